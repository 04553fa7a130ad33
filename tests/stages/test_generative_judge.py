"""A trained judge as a reward: what it compares, how votes count, p(Yes), outages, and a run that it pays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

import posttrain
from posttrain.build.build_judges import generative_judge
from posttrain.build.build_reward_models import reward_member
from posttrain.build.reward_paths import check_reward_models
from posttrain.checks.judging.generative_judge_checks import votes_are_counted
from posttrain.config.env import Env, Reward
from posttrain.config.run import Optimizer, Run, Supervised
from posttrain.core.abilities import Judging
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Episode, Group, SampledTurn, Segment, Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.engine.model.tiny_models import characters
from posttrain.environment.gallery.judge import Judge
from posttrain.environment.judged.judge_rules import chosen
from posttrain.environment.templates.renderer import Renderer
from posttrain.evaluation.evaluate_search import evaluate_searches
from posttrain.record import run_reader
from posttrain.record.external_access import asks
from posttrain.role.judges.generative_judge import (
    GenerativeJudge,
    JudgedTask,
    Vote,
    asked,
    comparisons,
    meta_rows,
    tokens_are_of_text,
)
from posttrain.role.judges.reward_judge import JudgeMember
from posttrain.role.judging import with_judges
from posttrain.system.errors import ConfigError, DataError, InvariantError
from tests.tiny import MODEL, only_rl, tiny_run
from tests.vocabularies import train_byte_level

TASK = Task("a", "<3,8>")


def episode(text: str, sibling: int) -> Episode:
    ids, mask = np.array([1, 2 + sibling], np.int32), np.array([False, True])
    logp, version = np.array([np.nan, -1.0], np.float32), np.array([-1, 0], np.int32)
    return Episode(TASK, 0, sibling, (Segment(ids, mask, logp, version, Sampling(stop_ids=())),), Stop.SAID, (), text)


class Scripted:
    """A sampler whose turn is a function of the prompt's text, and which notes what it was asked."""

    def __init__(self, renderer: Renderer, says: Callable[[str], str]) -> None:
        self._renderer, self._says = renderer, says
        self.asked: list[str] = []
        self.places: list[int] = []

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        prompt = self._renderer.decode(ids)
        self.asked.append(prompt)
        self.places.append(place)
        said = self._renderer.encode(self._says(prompt))
        return SampledTurn(said, np.full(len(said), -1.0, np.float32), np.zeros(len(said), np.int32), Stop.LENGTH)


def judge(says: Callable[[str], str], format: str = "j1", **changes: Any) -> GenerativeJudge:
    env = Judge(format=format, heldout_count=0)
    tokenizer: Any = characters(env.alphabet)
    renderer = Renderer(tokenizer, (tokenizer.eos_token_id,), 128)
    judging = env.abilities.judging
    assert isinstance(judging, Judging)
    sampler: Any = Scripted(renderer, says)
    return GenerativeJudge("j", 1.0, judging, sampler, renderer, Sampling(stop_ids=()), 0, **changes)


def polite(prompt: str) -> str:
    """Prefers the side with more of `hi`."""
    a, b = prompt.split("A:")[1].split("\nB:")
    return "[[A]]" if a.count("hi") >= b.count("hi") else "[[B]]"


def scored(made: GenerativeJudge, *texts: str) -> list[Verdict]:
    found = asyncio.run(with_judges([made], [episode(t, i) for i, t in enumerate(texts)]))
    made.close()
    return [e.verdicts[0].verdict for e in found]


# --- comparing and counting -------------------------------------------------------------------------------------------


@given(st.integers(2, 9), st.integers(0, 9))
def test_each_answer_meets_as_many_others(count: int, rivals: int) -> None:
    pairs = comparisons(count, 2, rivals)
    met = [sum(i in p for p in pairs) for i in range(count)]
    assert len(set(pairs)) == len(pairs) and all(i < j for i, j in pairs)
    assert set(met) == {count - 1 if not rivals or 2 * rivals >= count - 1 else 2 * rivals}


def test_votes_in_both_orders_by_hand() -> None:
    """Three answers, of which the first has most of what this judge likes; two are alike for it, and it then names the
    first side: one vote in each order."""
    made = judge(polite, votes=2)
    found = scored(made, "hi hi 8", "hi 8", "hi 3")
    assert [v.score for v in found] == [1.0, (0 + 0 + 0.5 * 2) / 4, (0 + 0 + 0.5 * 2) / 4]
    assert found[1].why == "vs 0:0,0,0,0 vs 2:1,1,0,0"
    sampler: Any = made.sampler
    assert len(sampler.asked) == 3 * 2 * 2 and len(set(sampler.places)) == 12
    assert sum(p.endswith("A:hi 8\nB:hi hi 8\n") for p in sampler.asked) == 2


def test_points_are_averaged_and_pairs_are_zero_sum() -> None:
    """DeepSeek-GRM's points: sums of C05 over three votes, in one order after the other."""
    turns = iter([r"\boxed{8,6}", r"\boxed{5,7}", r"\boxed{9,4}"] * 2)
    found = scored(judge(lambda _: next(turns), "grm", votes=3), "8", "3")
    assert [v.score for v in found] == [pytest.approx((22 + 17) / 6)] * 2
    found = scored(judge(polite), "hi 8", "hi hi 8", "3", "hi 8 8")
    assert sum(v.score or 0.0 for v in found) == pytest.approx(4 / 2)


def test_an_answer_without_another_is_compared_with_itself() -> None:
    """Also where several siblings say the same: they are one answer. The votes of both sides are in the record."""
    for siblings in (1, 3):
        group = [replace(episode("hi 8", 0), sibling=i) for i in range(siblings)]
        found = asyncio.run(with_judges([made := judge(polite)], group))
        made.close()
        given = [e.verdicts[0].verdict for e in found]
        assert [(v.score, v.why) for v in given] == [(0.5, "vs 0:1,0,1,0")] * siblings
        for one in found:
            votes_are_counted(judge(polite), Group(TASK, 0, tuple(found)), one)


def test_what_has_no_verdict_is_failed_and_never_a_low_score() -> None:
    some = judge(lambda p: polite(p) if "3" not in p.split("A:")[1] else "?")
    found = scored(some, "hi 8", "8", "hi 3")
    assert [v.state for v in found] == [State.VALUE, State.VALUE, State.FAILED]
    assert found[2].kind == "unread" and "none of 4 votes has a verdict: such as '?'" in found[2].why
    long = scored(judge(polite), "hi " * 80, "8")
    assert {v.state for v in long} == {State.FAILED} and "leaves no room to answer" in long[0].why

    def raises(prompt: str) -> str:
        raise RuntimeError("the card is gone")

    assert {v.kind for v in scored(judge(raises), "8", "3")} == {"raised"}


class Liked:
    """A meta reward model that likes what ends in a letter."""

    def __init__(self, renderer: Renderer, letter: str) -> None:
        self.renderer, self.letter, self.read = renderer, letter, list[str]()

    def rewards(self, packed: Packed) -> np.ndarray:
        ends = np.cumsum(packed.lengths_S)
        texts = [self.renderer.decode(packed.ids_N[e - n : e]) for e, n in zip(ends, packed.lengths_S, strict=True)]
        self.read += texts
        return np.array([float(self.letter in t.split("\n")[-1]) for t in texts], np.float32)

    def tensors(self) -> dict[str, Any]:
        return {}


def test_a_meta_reward_model_keeps_the_better_half() -> None:
    """Of four votes about a pair, two name A and two B in turn; the meta model likes those that name A."""
    turns = iter(["[[A]]", "[[B]]"] * 2)
    made = judge(lambda _: next(turns), votes=2)
    meta = Liked(made.renderer, "A")
    made.meta = JudgeMember("meta", meta, 128)
    one, two = scored(made, "8", "3")
    assert (one.why, two.why) == ("vs 1:1,0*,0,1*", "vs 0:0,1*,1,0*")
    assert one.score == two.score == 0.5 and len(meta.read) == 4 and meta.read[0].startswith("<3,8>\nA:8")


def test_of_two_votes_a_meta_reward_model_keeps_one() -> None:
    turns = iter(["[[A]]", "[[A]]"])
    made = judge(lambda _: next(turns))
    made.meta = JudgeMember("meta", Liked(made.renderer, "A"), 128)
    assert [v.why.count("*") for v in scored(made, "8", "3")] == [1, 1]


# --- the check that counts again --------------------------------------------------------------------------------------


def told(*given: tuple[float, str], texts: Sequence[str] = ("8", "3")) -> Group:
    found = asyncio.run(with_judges([judge(polite)], [episode(t, i) for i, t in enumerate(texts)]))
    changed = [
        replace(e, verdicts=(replace(e.verdicts[0], verdict=Verdict.value(score, why=why)),))
        for e, (score, why) in zip(found, given, strict=True)
    ]
    return Group(TASK, 0, tuple(changed))


def test_votes_are_counted_again() -> None:
    made = judge(polite)
    right = told((0.5, "vs 1:1,0"), (0.5, "vs 0:0,1"))
    for e in right.episodes:
        votes_are_counted(made, right, e)
    swapped = told((0.5, "vs 0:0,1"), (0.5, "vs 1:1,0"))
    with pytest.raises(InvariantError, match="compare it with itself, so they are about another answer"):
        votes_are_counted(made, swapped, swapped.episodes[0])
    low = told((0.0, "vs 1:-,-"), (0.5, "vs 0:0,1"))
    with pytest.raises(InvariantError, match="does not exist, as none has a verdict.*never a low score"):
        votes_are_counted(made, low, low.episodes[0])
    other = told((1.0, "vs 1:1,0"), (0.5, "vs 0:0,1"))
    with pytest.raises(InvariantError, match=r"gave 1, and the mean of its recorded votes is 0\.5"):
        votes_are_counted(made, other, other.episodes[0])


def test_a_yes_of_another_tokenizer_is_told() -> None:
    one = judge(polite, "genrm").renderer
    other: Any = characters("".join(reversed(Judge(format="genrm").alphabet)))
    ids = np.array(other.encode("c4 Yes", add_special_tokens=False), np.int32)
    tokens_are_of_text(one, one.encode("c4 Yes"), "c4 Yes")
    with pytest.raises(InvariantError, match="they are another tokenizer's"):
        tokens_are_of_text(one, ids, "c4 Yes")


def test_the_chance_of_a_verdict_is_that_at_the_verdict() -> None:
    """A verdict is a whole word: the No of "Not" behind it is none."""
    made, tokenizer = judge(polite, "genrm"), characters("YesNot. ")
    renderer = Renderer(tokenizer, (), 64)  # type: ignore[arg-type]
    scored_ids: list[np.ndarray] = []

    async def score(ids: np.ndarray) -> np.ndarray:
        scored_ids.append(ids)
        return np.full(len(ids) - 1, -1.0, np.float32)

    text = "so. Yes. Not so."
    vote = Vote((0,), np.concatenate([renderer.encode("t"), renderer.encode(text)]), 1, (1.0,), text)
    made = replace(made, renderer=renderer, sampler=SimpleNamespace(score=score))  # type: ignore[arg-type]
    assert made.judging.read(text) == (1.0,)
    assert [asyncio.run(made.log_says(vote, end)) for end in ("Yes", "No")] == [-3.0, -2.0]
    assert [renderer.decode(ids) for ids in scored_ids] == ["tso. Yes", "tso. No"]


def test_a_judge_whose_tokenizer_normalises_is_not_another_one() -> None:
    tokenizer = train_byte_level(["caf\u00e9 Yes No"] * 9, 300)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # type: ignore[attr-defined]
    renderer = Renderer(tokenizer, (), 64)  # type: ignore[arg-type]
    tokens_are_of_text(renderer, renderer.encode("cafe\u0301 Yes"), "cafe\u0301 Yes")
    with pytest.raises(InvariantError, match="they are another tokenizer's"):
        tokens_are_of_text(renderer, renderer.encode("cafe\u0301 No"), "cafe\u0301 Yes")


# --- real judges ------------------------------------------------------------------------------------------------------


def learned(folder: Path, format: str = "rm_r1", steps: int = 60) -> Path:
    """A small policy that has learned the form of a verdict."""
    sft = Supervised(
        name="sft", style="verdict", steps=steps, batch=16, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
    )
    rl = replace(only_rl(tiny_run(steps=1)).stages[0], sampling=Sampling(max_tokens=24))
    env = Env(name="judge", args={"format": format}, heldout=8)
    run = replace(tiny_run(), model=replace(MODEL, context=96), env=env, stages=(sft, rl), slots=32)
    posttrain.run(run, out=folder, quiet=True)
    return folder


def paid(*rewards: Reward) -> Run:
    run = only_rl(tiny_run(steps=2, sampling=Sampling(max_tokens=8)))
    env = Env(name="replies", args={"numbers": 2, "max_number": 9}, heldout=4, rewards=rewards, measured=True)
    return replace(run, env=env)


@pytest.mark.prove
def test_a_run_is_paid_by_a_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its votes are in the record; the world's own verdict is measured beside; a second run is bit-equal."""
    folder = learned(tmp_path / "taught")
    run = paid(Reward(function=f"judge:{folder}", votes=2))
    assert [a.what for a in asks(run) if "rewards" in a.path] == [f"reads the judge in {folder}"]
    posttrain.run(run, out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "judge taught (weight 1) compares each answer with all others of its group, in both orders, votes 2" in said
    found = [e.episode for e in run_reader.episodes(tmp_path / "run", "rl", 1)]
    verdicts = [next(j for j in e.verdicts if j.source == "taught").verdict for e in found]
    read = [v for v in verdicts if v.state is State.VALUE]
    assert len(found) == 16 and len(read) > 8 and all("vs " in v.why for v in read)
    assert all(e.reward == v.score for e, v in zip(found, verdicts, strict=True))
    assert {j.source for e in found for j in e.verdicts if j.measured} == {"replies"}
    posttrain.run(run, out=tmp_path / "again", quiet=True)
    again = [e.episode for e in run_reader.episodes(tmp_path / "again", "rl", 1)]
    assert [e.verdicts for e in again] == [e.verdicts for e in found]
    words = ("search=best_of.count=3", "search=vote.count=2,weighted=true,answer=line")
    searched = evaluate_searches(tmp_path / "run", *words, quiet=True)
    assert len(searched.points) == 3 and "judge taught compares each answer" in searched.scored_by
    with pytest.raises(ConfigError, match=r"search=beam.*goes on from the best steps, and judge:.*whole answers"):
        evaluate_searches(tmp_path / "run", "search=beam", quiet=True)


@pytest.mark.prove
def test_the_probability_of_yes_is_that_of_the_judges_own_tokens(tmp_path: Path) -> None:
    """Against the learner's log-probs of prompt, reasoning and verdict."""
    folder = learned(tmp_path / "taught", "genrm")
    own = run_reader.run_file(folder).run
    made = generative_judge(own, Reward(function=f"judge:{folder}", votes=3), 1e-5, reward_member)
    episodes = [episode("hi 8", 0), episode("3", 1)]

    async def asked() -> list[Any]:
        votes = [await made._votes(episodes, (i,)) for i in range(2)]
        return [(v, await made._yes(v)) for v in votes]

    for votes, logp in asyncio.run(asked()):
        for vote, said in zip(votes, logp, strict=True):
            if vote.scores is None:
                assert said == -np.inf
                continue
            text = vote.text[: max(vote.text.rfind("Yes"), vote.text.rfind("No"))]
            ids = np.concatenate([vote.ids[: vote.spoken], made.renderer.encode(text + "Yes")])
            each = asyncio.run(made.sampler.score(ids))
            assert said == pytest.approx(float(each[-3:].sum()), abs=1e-5)
    found = asyncio.run(made.verdicts(episodes))
    assert all(v.score is None or 0 <= v.score <= 1 for v in found)


@pytest.mark.prove
def test_what_is_no_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder. Train a judge first"):
        check_reward_models(paid(Reward(function=f"judge:{tmp_path / 'none'}")))
    posttrain.run(only_rl(tiny_run(steps=1)), out=tmp_path / "sums", quiet=True)
    with pytest.raises(ConfigError, match="learned environment 'arithmetic', which is no judging"):
        posttrain.run(paid(Reward(function=f"judge:{tmp_path / 'sums'}")), out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"function": "judge:"}, "name the run folder of a judge"),
        ({"function": "exact", "votes": 2}, "are for judge:PATH"),
        ({"function": "judge:a", "votes": 0}, "votes=0 must be at least 1"),
        ({"function": "judge:a", "workers": 1}, "leave workers and timeout out"),
    ],
)
def test_wrong_settings_of_a_judge_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Reward(**given)


# --- a meta reward model's rows ---------------------------------------------------------------------------------------


def voted(task: Task, *texts: str) -> JudgedTask:
    env = Judge(format="grm", heldout_count=0)
    votes = [Vote((0, 1), np.zeros(2, np.int32), 1, env.form.read(t), t) for t in texts]
    return JudgedTask(task, tuple(votes))


def test_rows_for_a_meta_reward_model_are_labelled_by_the_pair() -> None:
    """Most votes name the worse side, and are labelled wrong all the same; a tie is wrong; unread ones are left out."""
    env = Judge(format="grm", heldout_count=0)
    judging = env.abilities.judging
    assert judging is not None
    task = next(t for t in (env.train.task(i) for i in range(99)) if t.info["gold"] == 1)
    said = (r"\boxed{8, 6}", r"\boxed{9, 1}", r"\boxed{5, 7}", r"\boxed{5, 5}", "nothing")
    rows = meta_rows(judging, [voted(task, *said), voted(task, said[0], said[1])])
    assert [(r["completion"], r["label"]) for r in rows] == list(
        zip(said[:4], (False, False, True, False), strict=True)
    )
    assert all(r["prompt"] == task.prompt for r in rows)
    with pytest.raises(DataError, match="teach a meta reward model nothing"):
        meta_rows(judging, [voted(task, said[0])])


def test_labels_that_are_the_votes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta model that is trained on the judge's own majority."""
    env = Judge(format="grm", heldout_count=0)
    judging = env.abilities.judging
    assert judging is not None
    task = next(t for t in (env.train.task(i) for i in range(99)) if t.info["gold"] == 1)
    monkeypatch.setattr(
        "posttrain.role.judges.generative_judge.right", lambda judging, task, vote: chosen(vote.scores) == 0
    )
    with pytest.raises(InvariantError, match="2 of 3 judgements are labelled right and name the worse side"):
        meta_rows(judging, [voted(task, r"\boxed{8, 6}", r"\boxed{9, 1}", r"\boxed{5, 7}")])


@pytest.mark.prove
def test_a_judge_with_a_meta_reward_model_from_its_own_judgements(tmp_path: Path) -> None:
    """Judgements of a judge become rows, a reward model learns them from the judge's weights, and then keeps half of
    the votes that pay a policy."""
    folder = learned(tmp_path / "taught", "grm", steps=100)
    own = run_reader.run_file(folder).run
    made = generative_judge(own, Reward(function=f"judge:{folder}"), 0.0, reward_member)
    world = Judge(format="grm", heldout_count=0)
    judged = asyncio.run(asked(made, [world.train.task(i) for i in range(40)], 4))
    rows = meta_rows(made.judging, judged)
    assert {r["label"] for r in rows} == {True, False}
    (tmp_path / "meta.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = (
        "reward_model.judgement=label",
        "reward_model.centre=0",
        "reward_model.steps=3",
        "env.heldout=4",
        "reward_model.batch=8",
    )
    given = (f"model={folder}", f"env.prompts={tmp_path / 'meta.jsonl'}")
    posttrain.run("reward_model", *given, *words, out=tmp_path / "meta", quiet=True)
    run = paid(Reward(function=f"judge:{folder}", votes=2, meta=str(tmp_path / "meta")))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    found = [e.episode for e in run_reader.episodes(tmp_path / "run", "rl", 1)]
    said = [j.verdict.why for e in found for j in e.verdicts if j.source == "taught"]
    assert any(why.count("*") >= 1 for why in said)
