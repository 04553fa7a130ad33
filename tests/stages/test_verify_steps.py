"""Verifiers that write: the papers' rules by hand, what they are shown, the scores of steps, and runs and searches that
go by them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.build.build_judges import by_its_form, generative_judge
from posttrain.build.build_reward_models import reward_member
from posttrain.checks.judging.generative_judge_checks import shows_no_verdict, step_votes_are_counted
from posttrain.config.env import Env, Reward
from posttrain.config.run import Optimizer, Supervised
from posttrain.core.abilities import Judging
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.types import Episode, SampledTurn, Segment, Stop, Task
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.engine.model.tiny_models import characters
from posttrain.environment.gallery.verify import VerifySteps
from posttrain.environment.judged.verify_rules import FORMATS, chance_of_yes, read_boxed_yes
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import Renderer
from posttrain.evaluation.evaluate_search import evaluate_searches
from posttrain.ladder.policy_rows import GRPO_PROCESS
from posttrain.record import run_reader
from posttrain.role.judges.generative_judge import GenerativeJudge
from posttrain.role.judges.generative_steps import GenerativeStepJudge, reads_to_the_step
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.system.errors import ConfigError, InvariantError
from tests.faulty import smallest
from tests.tiny import MODEL, only_rl, tiny_run

TASK = Task("a", "<3+4+5>", answer="12")
LETTERS = "0123456789+-=;<>"


@cache
def world(format: str = "thinkprm") -> VerifySteps:
    made = environment(Env(name="verify", args={"format": format}, heldout=40), seed=1)
    assert isinstance(made, VerifySteps)
    return made


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_chance_of_yes_by_hand() -> None:
    """2504.16828: p(Yes) / (p(Yes) + p(No)); it is a chance however small both are."""
    assert chance_of_yes(math.log(0.3), math.log(0.1)) == pytest.approx(0.75)
    assert chance_of_yes(-800.0, -800.0) == 0.5
    assert chance_of_yes(-1.0, -900.0) == 1.0 and chance_of_yes(-900.0, -1.0) == 0.0
    assert read_boxed_yes(r"\boxed{No} and then \boxed{Yes}") == (1.0,) and read_boxed_yes(r"\boxed{Maybe}") is None


def first_wrong(prompt: str) -> tuple[int, int]:
    """(index of the first wrong step, -1 for none; number of steps) of what is shown, by adding up anew."""
    question, said, _ = prompt.split("\n")
    terms = [int(x) for x in question.strip("<>").split("+")]
    total, steps = terms[0], [s for s in said.split(";") if s]
    for i, step in enumerate(steps):
        want = f"{total}+{terms[i + 1]}={total + terms[i + 1]}"
        if step != want:
            return i, len(steps)
        total += terms[i + 1]
    return -1, len(steps)


@pytest.mark.parametrize("format", list(FORMATS))
def test_half_of_the_beginnings_are_right_and_the_verdict_is_that_of_their_steps(format: str) -> None:
    env = world(format)
    tasks = [*(env.train.task(i) for i in range(300)), *env.heldout]
    for t in tasks:
        wrong, count = first_wrong(str(t.prompt))
        assert (wrong == -1) == bool(t.info["good"])
        assert t.answer == env.form.ends[int(wrong != -1)]
        if format == "genprm":
            assert wrong in (-1, count - 1), "the steps before the one that is judged are right"
        for said, score in ((env.gold(t), 1.0), (env.distractor(t), 0.0), (("?",), 0.0)):
            assert env.verify(Attempt(t, said, Stop.SAID)).score == score
        right = env.critique(t)
        assert env.form.read(f"{right} {t.answer}") == (float(wrong == -1),)
        made: Any = env
        asyncio.run(shows_no_verdict(made, judging(env), t))
    assert 0.4 < sum(t.info["good"] for t in tasks) / len(tasks) < 0.6


def test_no_answer_to_a_held_out_task_of_the_world_is_shown() -> None:
    env = world()
    inner = env.verified_world
    held = {inner.key(t) for t in inner.heldout}
    shown = {inner.key(inner.train.task(env.train.task(i).info["index"])) for i in range(300)}
    assert len(held) == 200 and not held & shown


def test_critiques_by_hand() -> None:
    """Every step up to the first wrong one; or the last alone."""
    think, gen = FORMATS["thinkprm"], FORMATS["genprm"]
    own = ["3+4=7", "7+5=12", "12+1=13"]
    assert think.critique(own[:2], own) == "3+4=7 ok 7+5=12 ok"
    assert think.critique(["3+4=8", "8+5=13"], own) == "3+4=7 no"
    assert think.critique([*own, "13+1=14"], own) == "3+4=7 ok 7+5=12 ok 12+1=13 ok no"
    assert gen.critique(["3+4=7", "7+5=13"], own) == "7+5=12" and gen.critique([*own, "1"], own) == "no"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"format": "thinkpm"}, "no form of verifying"),
        ({"wrong": 1.0}, "must lie between 0 and 1"),
        ({"separator": ""}, "separator is empty"),
        ({"world": "replies"}, "that judges steps, with the setting judge_steps"),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        environment(Env(name="verify", args=args, heldout=2), seed=0).train.task(0)


# --- scores of steps --------------------------------------------------------------------------------------------------


def judging(env: VerifySteps) -> Judging:
    found = env.abilities.judging
    assert isinstance(found, Judging)
    return found


class Adds:
    """A verifier that adds up: it says No where a step is wrong, and is sure by .9 of what it says. It reads nothing of
    beginnings that hold `8`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.asked: list[str] = []

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        prompt = self._renderer.decode(ids)
        self.asked.append(prompt)
        verdict = "0" if "8" in prompt else "Yes" if first_wrong(prompt)[0] < 0 else "No"
        said = self._renderer.encode(f"ok {verdict}")
        return SampledTurn(said, np.full(len(said), -1.0, np.float32), np.zeros(len(said), np.int32), Stop.LENGTH)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """log-probs of each token after the first: the verdict's letters share what it is sure of."""
        text = self._renderer.decode(ids)
        prompt, _, said = text.rpartition("\n")
        right = "Yes" if first_wrong(prompt + "\n")[0] < 0 else "No"
        verdict = said.rpartition(" ")[2]
        out = np.zeros(len(ids) - 1, np.float32)
        out[-len(verdict) :] = math.log(0.9 if verdict == right else 0.1) / len(verdict)
        return out


def verifier(reward: Reward, votes: int = 1) -> tuple[GenerativeStepJudge, Any]:
    env = world()
    tokenizer: Any = characters(env.alphabet)
    renderer = Renderer(tokenizer, (tokenizer.eos_token_id,), 128)
    sampler: Any = Adds(renderer)
    judge = GenerativeJudge("v", 1.0, judging(env), sampler, renderer, Sampling(stop_ids=()), 0, votes=votes)
    return GenerativeStepJudge(judge, reward, TokenEnds(letters)), sampler


def letters(ids: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in ids if i < len(LETTERS))


def episode(text: str, sibling: int) -> Episode:
    """The prompt as one token, the text letter by letter, and a stop token."""
    own = [LETTERS.index(c) for c in text] + [len(LETTERS)]
    ids, mask = np.array([0, *own], np.int32), np.arange(len(own) + 1) > 0
    logp = np.where(mask, -1.0, np.nan).astype(np.float32)
    version = np.where(mask, 0, -1).astype(np.int32)
    segment = Segment(ids, mask, logp, version, Sampling(stop_ids=()))
    return Episode(TASK, 0, sibling, (segment,), Stop.SAID, (), text, turns=(len(own),))


def scored(judge: GenerativeStepJudge, *texts: str) -> list[tuple[Judged, ...]]:
    found = asyncio.run(judge.judge([episode(t, i) for i, t in enumerate(texts)]))
    judge.close()
    return found


def test_scores_of_steps_by_hand() -> None:
    """Each step at its own last token, the last one at the stop token. Equal beginnings are verified once."""
    judge, sampler = verifier(Reward(function="judge:v"), votes=2)
    right, wrong = scored(judge, "3+4=7;7+5=12", "3+4=7;7+5=13")
    assert [(j.end, round(j.verdict.score or 0.0, 6), j.paid) for j in right] == [(6, 0.9, False), (13, 0.9, False)]
    assert [round(j.verdict.score or 0.0, 6) for j in wrong] == [0.9, 0.1]
    assert len(sampler.asked) == 3 * 2 and wrong[1].verdict.why.count(",") == 1
    assert sorted(set(sampler.asked)) == [
        "<3+4+5>\n3+4=7;\n",
        "<3+4+5>\n3+4=7;7+5=12\n",
        "<3+4+5>\n3+4=7;7+5=13\n",
    ]


def test_what_becomes_of_the_scores_is_a_choice_of_the_reward() -> None:
    def given(**choice: Any) -> list[float]:
        judge, _ = verifier(Reward(function="judge:v", **choice))
        return [round(j.verdict.score or 0.0, 6) for j in scored(judge, "3+4=7;7+5=13")[0]]

    assert given(steps="pay", progress=True) == [0.9, -0.8]
    assert given(steps="outcome") == [0.1] and given(steps="outcome", aggregate="mean") == [0.5]
    with pytest.raises(ConfigError, match="progress is of single steps"):
        Reward(function="judge:v", steps="outcome", progress=True)


def test_steps_are_not_asked_of_a_judge_of_whole_answers() -> None:
    judge, _ = verifier(Reward(function="judge:v"))
    whole = replace(judge.verifier, judging=replace(judge.verifier.judging, separator=""))
    assert by_its_form(whole, Reward(function="judge:v"), TokenEnds(letters)) is whole
    with pytest.raises(ConfigError, match="judges whole answers, and steps and progress are for one that judges steps"):
        by_its_form(whole, Reward(function="judge:v", steps="pay"), TokenEnds(letters))
    with pytest.raises(ConfigError, match="what is measured is about the whole answer"):
        by_its_form(judge.verifier, Reward(function="judge:v", measured=True), TokenEnds(letters))


def test_an_answer_with_a_step_that_cannot_be_read_is_failed() -> None:
    judge, _ = verifier(Reward(function="judge:v"))
    read, unread, empty = scored(judge, "3+4=7;7+5=12", "3+4=7;7+5=18", "")
    assert [j.verdict.state for j in read] == [State.VALUE] * 2
    assert [j.verdict.state for j in unread] == [State.FAILED] and unread[0].end is None
    assert "no vote about step 2 has a verdict: such as 'ok 0'" in unread[0].verdict.why
    assert [j.verdict.state for j in empty] == [State.VALUE if empty[0].end else State.ABSTAIN]


def test_scores_are_counted_again_from_the_votes() -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"steps": "pay", "progress": True},
        {"steps": "outcome", "aggregate": "product"},
    ]
    for choice in choices:
        judge, _ = verifier(Reward(function="judge:v", **choice), votes=2)
        e = episode("3+4=7;7+5=13", 0)
        right = replace(e, verdicts=scored(judge, e.text)[0])
        step_votes_are_counted(judge, right)
        changed = [replace(j, verdict=replace(j.verdict, score=0.7)) for j in right.verdicts]
        with pytest.raises(InvariantError, match="its recorded votes make"):
            step_votes_are_counted(judge, replace(right, verdicts=tuple(changed)))
        unread = [replace(j, verdict=Verdict.value(0.0, why="-,-")) for j in right.verdicts]
        with pytest.raises(InvariantError, match="no vote about step 1|1 steps were verified"):
            step_votes_are_counted(judge, replace(right, verdicts=tuple(unread)))
        if len(right.verdicts) > 1:
            with pytest.raises(InvariantError, match="1 steps were verified, and the answer has 2"):
                step_votes_are_counted(judge, replace(right, verdicts=right.verdicts[:1]))


def test_a_beginning_that_is_not_of_its_step_is_told() -> None:
    reads_to_the_step("3+4=7;", "3+4=7", "3+4=7;", "step 1")
    reads_to_the_step("3+4=7;", "3+4=7", "3+4=7;7", "step 1")  # a token that two steps share
    # The step's last token completes a character: before it there is half a character, which decodes to U+FFFD.
    reads_to_the_step("3+4\u3002", "3+4\ufffd", "3+4\u3002", "step 1")
    for text in ("3+4=7;7+5=13", "3+4"):
        with pytest.raises(InvariantError, match="the score would be of another step"):
            reads_to_the_step(text, "3+4=7", "3+4=7;", "step 1")


# --- real verifiers ---------------------------------------------------------------------------------------------------

SUMS = Env(name="arithmetic", args={"min_terms": 3, "max_terms": 3, "max_operand": 4}, heldout=6)


def learned(folder: Path, format: str = "thinkprm") -> Path:
    """A small policy that has learned the form of a verdict."""
    sft = Supervised(
        name="sft", style="verdict", steps=60, batch=16, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
    )
    rl = replace(only_rl(tiny_run(steps=1)).stages[0], sampling=Sampling(max_tokens=12))
    args = {"format": format, "world": "arithmetic min_terms=3 max_terms=3 max_operand=4", "world_heldout": 6}
    env = Env(name="verify", args=args, heldout=8)
    run = replace(tiny_run(), model=replace(MODEL, context=96), env=env, stages=(sft, rl), slots=32)
    posttrain.run(run, out=folder, quiet=True)
    return folder


@pytest.mark.prove
@pytest.mark.parametrize("format", list(FORMATS))
def test_a_run_is_paid_and_searched_by_a_verifier(format: str, tmp_path: Path) -> None:
    """The scores of steps are in the record, a second run is bit-equal, and beams go by the same verifier."""
    folder = learned(tmp_path / "taught", format)
    rl = replace(smallest(None, tmp_path / "model", tmp_path).stages[-1], steps=2)
    rl = replace(rl, algorithm=GRPO_PROCESS, sampling=Sampling(max_tokens=20), max_failed=0.9, eval=False)
    cot = Supervised(name="sft", style="cot", wrong=0.3, steps=18, batch=64, optimizer=Optimizer(lr=1e-2), eval=False)
    env = replace(SUMS, rewards=(Reward(function=f"judge:{folder}", votes=2),))
    run = replace(tiny_run(), model=replace(MODEL, context=64), env=env, stages=(cot, rl))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    found = [e.episode for e in run_reader.episodes(tmp_path / "run", "rl", 1)]
    steps = [[j for j in e.verdicts if j.source == "taught" and j.end is not None] for e in found]
    assert sum(map(bool, steps)) > len(found) / 2
    for e, own in zip(found, steps, strict=True):
        assert not own or len(own) == len([s for s in e.text.split(";") if s])
        assert all(0 <= (j.verdict.score or 0.0) <= 1 for j in own)
    posttrain.run(run, out=tmp_path / "again", quiet=True)
    again = [e.episode for e in run_reader.episodes(tmp_path / "again", "rl", 1)]
    assert [e.verdicts for e in again] == [e.verdicts for e in found]
    words = ("search=best_of.count=2", "search=beam.width=2,expand=2", "search=vote.count=2,weighted=true")
    report = evaluate_searches(tmp_path / "run", *words, quiet=True)
    assert len(report.points) == 4 and report.scored_by.startswith("verifier taught reads each answer up to each step")


@pytest.mark.prove
def test_the_score_of_a_step_is_of_the_verifiers_own_tokens(tmp_path: Path) -> None:
    """p(Yes) and p(No) against the verifier's engine, read token by token."""
    folder = learned(tmp_path / "taught")
    own = run_reader.run_file(folder).run
    reward = Reward(function=f"judge:{folder}", votes=3)
    made = by_its_form(generative_judge(own, reward, 1e-5, reward_member), reward, TokenEnds(letters))
    assert isinstance(made, GenerativeStepJudge)
    judge = made.verifier

    async def asked() -> tuple[Any, list[Any]]:
        votes = [await judge.vote("<3+4+5>\n3+4=7;\n", (0,), "a", 0, 0, 1, k) for k in range(3)]
        return await made.verified(TASK, "3+4=7;", 0, 0, 1), votes

    found, votes = asyncio.run(asked())
    chances: list[float] = []
    for vote in (v for v in votes if v.scores is not None):
        before = vote.text[: max(vote.text.rfind("Yes"), vote.text.rfind("No"))]
        each = [
            float(asyncio.run(judge.sampler.score(np.concatenate([vote.ids[: vote.spoken], tokens])))[-n:].sum())
            for word, n in (("Yes", 3), ("No", 2))
            for tokens in (judge.renderer.encode(before + word),)
        ]
        chances.append(math.exp(each[0]) / (math.exp(each[0]) + math.exp(each[1])))
    assert found.score == pytest.approx(float(np.mean(chances)), abs=1e-5) and 0 < found.score < 1
