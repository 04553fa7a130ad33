"""The stage that imitates the best of its own samples: what is kept, what is imitated, and runs that use it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

import posttrain
from posttrain.build.build_environments import make_environment
from posttrain.config.overrides import apply
from posttrain.config.run import Env, Optimizer, Run
from posttrain.config.stages.keep_rule import Best, Keep, Passing, Rising, TopShare
from posttrain.config.stages.rejection import METHODS, RAFT, REST, RFT, STAR, Rejection, RejectionMethod
from posttrain.core.abilities import hints
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Step
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.streams import WEIGHT
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.role.learning import rejection_selection as kept_module
from posttrain.role.learning.demonstrations import imitated
from posttrain.role.learning.rejection_selection import (
    HINTED,
    Candidate,
    RoundSamples,
    candidates_of,
    drawn,
    once,
    read,
    select,
    steps_of,
    to_ask_again,
)
from posttrain.role.learning.rejection_selection import write as write_candidates
from posttrain.role.trainer import NonFiniteGradient, Trainer
from posttrain.stages import training_step as steps
from posttrain.stages.rejection.rejection_checks import may_be_kept
from posttrain.stages.rejection.rejection_stage import RejectionDriver
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, RunFolderError
from tests.tiny import play, tiny_parts, tiny_run

SAMPLING = Sampling(stop_ids=(0,), temperature=0.7)


def episode(
    sibling: int,
    score: float | None,
    said: Sequence[int] = (3, 4),
    prompt: Sequence[int] = (1, 2),
    name: str = "t",
    stop: Stop = Stop.SAID,
) -> Episode:
    transcript = Transcript(SAMPLING)
    transcript.see(prompt)
    ids = np.array(said, np.int32)
    transcript.say(SampledTurn(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), stop))
    verdict = Verdict.failed("outage") if score is None else Verdict.value(score)
    return Episode(Task(name, "p"), 0, sibling, (transcript.segment(),), stop, (Judged("own", 1.0, verdict),))


def group(*episodes: Episode) -> Group:
    return Group(episodes[0].task, 0, episodes)


def candidate(
    prompt: str, sibling: int, reward: float, said: Sequence[int] = (3, 4), hinted: bool = False
) -> Candidate:
    (found,) = candidates_of([group(episode(sibling, reward, said, name=prompt))]).candidates
    return replace(found, hinted=hinted)


# --- the rules -------------------------------------------------------------------------------------------------------


def test_what_each_rule_keeps() -> None:
    rewards = [0.0, 1.0, 0.5, 1.0, 0.2]
    assert Passing().chosen(rewards) == [1, 3]
    assert Passing(at=0.5).chosen(rewards) == [1, 2, 3]
    assert Passing(at=0.3).chosen([0.1 + 0.2 - 1e-12]) == [0], "the rounding of a sum is no failure"
    assert Best().chosen(rewards) == [1] and Best(above=1.0).chosen(rewards) == []
    assert Best().chosen([0.0, 0.0]) == [0] and Best(above=0.0).chosen([0.0, 0.0]) == []
    assert TopShare(share=0.4).chosen(rewards) == [1, 3] and TopShare(share=0.1).chosen(rewards) == [1]
    rising = Rising(at=(0.2, 0.5, 1.0))
    assert [rising.chosen(rewards, i) for i in range(4)] == [[1, 2, 3, 4], [1, 2, 3], [1, 3], [1, 3]]


@settings(max_examples=60)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8),
    keep=st.sampled_from([Passing(), Passing(at=0.5), Rising(), Best(), Best(above=0.0), TopShare(share=0.5)]),
)
def test_a_rule_prefers_no_worse_completion(rewards: list[float], keep: Keep) -> None:
    chosen = keep.chosen(rewards)
    assert len(set(chosen)) == len(chosen)
    left = [r for i, r in enumerate(rewards) if i not in chosen]
    assert all(rewards[i] >= r for i in chosen for r in left) or isinstance(keep, Best | TopShare)
    assert not chosen or not left or max(left) <= min(rewards[i] for i in chosen)


def test_meaningless_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep=passing"):
        replace(STAR, keep=Best())
    with pytest.raises(ConfigError, match="numbers that rise"):
        Rising(at=(0.9, 0.7))
    with pytest.raises(ConfigError, match="Give both, or neither"):
        Rejection(name="reject", general=0.2)
    with pytest.raises(ConfigError, match="at least one of each"):
        Rejection(name="reject", general=0.01, style="cot", batch=4)
    with pytest.raises(ConfigError, match="greedy"):
        Rejection(name="reject", sampling=Sampling(greedy=True))


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.name)
def test_a_method_is_data(method: RejectionMethod) -> None:
    assert from_plain(RejectionMethod, to_plain(method)) == method and method.label == method.name
    stage = apply(reject_run(), [f"reject.method={method.name}", "method.most=7"]).stages[-1]
    assert isinstance(stage, Rejection) and stage.method.label == f"{method.name}+user" == stage.algorithm_name


def test_a_threshold_belongs_to_the_rewards_and_another_rule_is_another_method() -> None:
    stage = apply(reject_run(), ["method=rft", "method.keep.at=0.5"]).stages[-1]
    assert isinstance(stage, Rejection) and stage.method.keep == Passing(at=0.5) and stage.method.label == "rft"
    assert replace(RFT, keep=Best()).label == "rft+user"


def test_a_name_that_is_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rest_em'"):
        apply(reject_run(), ["reject.method=rest-em"])


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_what_could_not_be_judged_is_neither_right_nor_wrong() -> None:
    asked = candidates_of([group(episode(0, None), episode(1, 1.0)), group(episode(0, None, name="u"))])
    assert [c.sibling for c in asked.candidates] == [1]
    assert (asked.prompts, asked.judged, asked.unjudged, asked.cut) == (2, 1, 2, 0)
    assert not to_ask_again([group(episode(0, None, name="u"))], Passing()), "an outage is no wrong answer"


def test_what_was_cut_off_is_never_kept() -> None:
    asked = candidates_of([group(episode(0, 1.0, stop=Stop.LENGTH), episode(1, 1.0))])
    assert [c.sibling for c in asked.candidates] == [1] and asked.cut == 1


def test_equal_completions_are_kept_once_and_a_prompt_has_a_limit() -> None:
    ones = [candidate("a", i, 1.0, said) for i, said in enumerate([(3,), (4,), (3,), (5,)])] + [
        candidate("b", 0, 1.0, (3,))
    ]
    found = select(ones, RFT)
    assert [(c.prompt, c.sibling) for c in found.kept] == [("a", 0), ("a", 1), ("a", 3), ("b", 0)]
    assert (found.passing, found.duplicates, found.over) == (5, 1, 0) and found.distinct == {"a": 3, "b": 1}
    few = select(ones, replace(RFT, most=2))
    assert [(c.prompt, c.sibling) for c in few.kept] == [("a", 0), ("a", 1), ("b", 0)] and few.over == 1
    assert few.distinct == found.distinct, "the alarm reads what passes, not what a limit leaves of it"
    assert len(select(ones, replace(RFT, distinct=False)).kept) == 5


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 1.0]), st.integers(3, 5)), min_size=1, max_size=12
    ),
    method=st.sampled_from([*METHODS.values(), replace(RFT, most=1), replace(RFT, keep=TopShare(share=0.5))]),
)
def test_a_selection_adds_up(rows: list[tuple[str, float, int]], method: RejectionMethod) -> None:
    ones = [candidate(p, i, r, (t,)) for i, (p, r, t) in enumerate(rows)]
    found = select(ones, method)
    assert len(found.kept) == found.passing - found.duplicates - found.over
    counts = Counter((c.prompt, c.key) for c in found.kept)
    assert not method.distinct or all(n == 1 for n in counts.values())
    per_prompt = Counter(c.prompt for c in found.kept)
    assert method.most is None or all(n <= method.most for n in per_prompt.values())


def test_a_hinted_completion_is_imitated_under_the_prompt_without_the_hint() -> None:
    plain = group(episode(0, 0.0, (5,), (1, 2)), episode(1, 0.0, (6,), (1, 2)))
    assert to_ask_again([plain], Passing()) == [plain] and not to_ask_again([group(episode(0, 1.0))], Passing())
    hinted = group(episode(0, 1.0, (3, 4), (1, 2, 9, 9), f"t{HINTED}"))
    asked = candidates_of([plain], [hinted])
    found = select(asked.candidates, STAR)
    (one,) = found.kept
    assert one.hinted and one.prompt == "t"
    (segment,) = one.segments
    assert segment.ids.tolist() == [1, 2, 3, 4] and segment.mask.tolist() == [False, False, True, True]
    assert found.gauges(asked, 1)["reject/covered"].sum == 0, "the policy did not say it by itself"


def test_what_is_imitated_is_the_models_own_distribution() -> None:
    ones = [candidate("a", 0, 1.0, (3, 4)), candidate("b", 0, 1.0, (5, 6, 7))]
    batch = imitated([s for c in ones for s in c.segments])
    assert batch.sampling.temperature == 1 and not batch.sampling.truncated
    assert batch.target_M.tolist() == [3, 4, 5, 6, 7] and batch[WEIGHT].tolist() == [0.2] * 5


@pytest.mark.parametrize(("count", "own", "epochs"), [(10, 4, 3), (3, 8, 2), (8, 8, 1), (9, 4, 2)])
def test_each_pass_takes_each_kept_completion_once(count: int, own: int, epochs: int) -> None:
    ones = [candidate(str(i), 0, 1.0) for i in range(count)]
    steps = [drawn(ones, own, i, (0, "reject", 1)) for i in range(steps_of(count, own, epochs))]
    assert all(1 <= len(s) <= own for s in steps)
    assert len({len(s) for s in steps}) <= 2 and len(steps) == epochs * math.ceil(count / own)
    each = len(steps) // epochs
    for e in range(epochs):
        taken = [c.prompt for s in steps[e * each : (e + 1) * each] for c in s]
        assert sorted(taken) == sorted(c.prompt for c in ones)
    assert once(ones) == [ones[0]] if count == 1 else True


@pytest.mark.parametrize("rule", [TopShare(share=0.3), TopShare(share=0.3, above=0.0), Best(), Passing(at=3.0)])
@pytest.mark.parametrize("size", [1.0, 1e7])
def test_the_check_of_a_rule_passes_what_the_rule_keeps_and_nothing_else(rule: Keep, size: float) -> None:
    """Whatever the size of the rewards."""
    rewards = [size * x for x in (3.0, -1.0, 2.0, 7.0, 5.0, 6.0, 4.0, 1.0)]
    kept = rule.chosen(rewards)
    assert [may_be_kept(rule, x, rewards, 0) for x in rewards] == [i in kept for i in range(len(rewards))]


def test_candidates_come_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    names = ["a", "with\nline", "ü"]
    asked = RoundSamples(
        tuple(candidate(n, i, 0.1 + 0.2, range(3, 4 + i), i == 1) for i, n in enumerate(names)), 5, 7, 1, 2, 1
    )
    for one in (asked, RoundSamples((), 3, 0, 3)):
        write_candidates(tmp_path, one)
        again = read(tmp_path)
        assert (again.prompts, again.judged, again.unjudged, again.cut, again.hints) == (
            (one.prompts, one.judged, one.unjudged, one.cut, one.hints)
        )
        for a, b in zip(again.candidates, one.candidates, strict=True):
            assert (a.prompt, a.visit, a.sibling, a.reward, a.hinted, a.key) == (
                (b.prompt, b.visit, b.sibling, b.reward, b.hinted, b.key)
            )
            assert [s.ids.tolist() for s in a.segments] == [s.ids.tolist() for s in b.segments]
    (tmp_path / kept_module.FILE).write_bytes(b"nothing")
    with pytest.raises(RunFolderError, match="damaged"):
        read(tmp_path)
    write_candidates(tmp_path, asked)
    arrays = load_arrays(tmp_path / kept_module.FILE)
    unspeakable = {"mask": np.ones_like(arrays["mask"])}
    for changes in ({"prompts": np.frombuffer(b"[" * 100_000, np.uint8)}, unspeakable):
        save_arrays({**arrays, **changes}, tmp_path / kept_module.FILE)
        with pytest.raises(RunFolderError, match="damaged"):
            read(tmp_path)


# --- runs ------------------------------------------------------------------------------------------------------------


def reject_run(steps: int = 30, taught: int = 40, **given: Any) -> Run:
    run = tiny_run()
    stage = Rejection(
        **{
            "name": "reject",
            "sampling": Sampling(max_tokens=6),
            "optimizer": Optimizer(lr=1e-3, warmup=1),
            "prompts": 12,
            "siblings": 4,
            "batch": 8,
            "epochs": 1,
            "rounds": 3,
            "steps": steps,
            "eval_every": 0,
            "checkpoint_every": 1,
        }
        | given
    )
    return replace(run, stages=(replace(run.stages[0], steps=taught, checkpoint_every=0), stage))


def lines(folder: Path) -> list[Step]:
    return [s for s in run_reader.steps(folder) if s.stage == "reject"]


@pytest.mark.prove
@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.name)
def test_every_method_runs(method: RejectionMethod, tmp_path: Path) -> None:
    results = asyncio.run(play(tiny_parts(tmp_path / "run", reject_run(method=method))))
    taken = lines(tmp_path / "run")
    rounds = [s for s in taken if "reject/round" in s.gauges]
    assert [s.gauges["reject/round"].sum for s in rounds] == [1, 2, 3] and results[-1].why == "all 3 rounds"
    asked = [s for s in rounds if "rollout/reward" in s.gauges]
    assert len(asked) == math.ceil(3 / method.improvements)
    assert all(math.isfinite(s.gauges["sft/loss"].mean) for s in taken if s.gauges["optim/steps"].sum)
    if method.keep.thresholds:
        assert all(s.gauges["reject/reward"].mean >= 0.7 for s in rounds if s.gauges["reject/reward"].count)
    assert not [n for s in taken for n in s.notes]


def batches(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The minibatches that the rejection stage of a run trained on."""
    found: list[Batch] = []
    real = RejectionDriver._batch

    async def seen(self: Any, ones: Any, index: int) -> Batch:
        batch = await real(self, ones, index)
        found.append(batch)
        return batch

    monkeypatch.setattr(RejectionDriver, "_batch", seen)
    asyncio.run(play(tiny_parts(folder, run)))
    return found


@pytest.mark.prove
def test_no_hint_is_in_any_trained_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint of this world begins with a character that nothing else has and that the policy may not say; completions
    to it are kept, and no trained token, of prompts neither, is that character."""
    monkeypatch.setattr(Arithmetic, "alphabet", property(lambda self: "0123456789+-=;<>?"))
    monkeypatch.setattr(Arithmetic, "hinted", lambda self, task: f"{str(task.prompt)[:-1]}?{task.answer}>")
    sampling = Sampling(max_tokens=6, bad_words=("?",))
    run = reject_run(method=STAR, taught=25, prompts=24, rounds=4, sampling=sampling)
    parts_of = tmp_path / "run"
    found = batches(run, parts_of, monkeypatch)
    hinted = [s.gauges["reject/hinted"] for s in lines(parts_of) if "reject/hinted" in s.gauges]
    assert sum(g.sum for g in hinted) > 0, "some hinted completions were right and kept"
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(parts_of / "tokenizer")
    mark = tokenizer.convert_tokens_to_ids("?")
    assert mark != tokenizer.unk_token_id
    assert found and not any((b.ids_N == mark).any() for b in found)
    asked = [s.index for s in lines(parts_of) if "rollout/reward" in s.gauges]
    played = [e.episode for i in asked for e in run_reader.episodes(parts_of, "reject", i)]
    assert any((s.ids == mark).any() for e in played for s in e.segments), "the record shows what was really asked"


@pytest.mark.prove
def test_demonstrations_are_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reject_run(general=0.25, style="answer", rounds=2)
    found = batches(run, tmp_path / "run", monkeypatch)
    assert found
    for b in found:
        assert b.episodes in {own + math.ceil(2 * own / 6) for own in range(1, 7)}
        assert b[WEIGHT].sum() == pytest.approx(1) and len({*b[WEIGHT].tolist()}) == 1


@pytest.mark.prove
def test_start_begins_every_round_with_the_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    real = RejectionDriver._open_round

    async def opened(self: Any, work: Any) -> Any:
        before = self.parts.learner.fingerprint()
        out = await real(self, work)
        seen.append((before, self.parts.learner.fingerprint()))
        return out

    monkeypatch.setattr(RejectionDriver, "_open_round", opened)
    asyncio.run(play(tiny_parts(tmp_path / "start", reject_run(method=RFT))))
    assert len({after for _, after in seen}) == 1 and len({before for before, _ in seen}) == 3
    seen.clear()
    asyncio.run(play(tiny_parts(tmp_path / "last", reject_run(method=RAFT))))
    assert all(before == after for before, after in seen) and len({*seen}) == 3


def test_a_message_names_some_culprits_and_counts_the_others() -> None:
    error = NonFiniteGradient(float("inf"), 2, range(6), 9)
    all_named, some_named = error.told([f"e{i}" for i in range(6)]), error.told([f"e{i}" for i in range(4)], unnamed=2)
    assert (
        all_named == some_named and "6 of the 9 episodes of the batch make it: e0; e1; e2; e3 and 2 more." in all_named
    )


@pytest.mark.prove
def test_a_step_that_is_left_out_is_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in float16, or where a mixture overflows: the weights stay, and so does their version."""
    taken = Trainer.step

    def overflows(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if kwargs["index"] == 2 and self.version > 40:  # after the 40 steps of imitation
            raise NonFiniteGradient(float("inf"), 2, [0], 6)
        return taken(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", overflows)
    monkeypatch.setattr(steps, "left_out", lambda roles, batch, index, why: ({"optim/steps": Gauge(0, 1)}, str(why)))
    asyncio.run(play(tiny_parts(tmp_path / "run", reject_run(method=RAFT, rounds=4))))
    versions = [s.version for s in lines(tmp_path / "run")]
    assert len(versions) > 2 and versions[1] == versions[0]


@pytest.mark.prove
def test_a_round_that_keeps_nothing_says_what_to_change(tmp_path: Path) -> None:
    asyncio.run(play(tiny_parts(tmp_path / "run", reject_run(taught=1, method=replace(RFT, keep=Passing(at=2.0))))))
    taken = lines(tmp_path / "run")
    assert len(taken) == 3 and all(s.gauges["optim/steps"].sum == 0 for s in taken)
    assert all("kept nothing" in s.notes[0] and "reject." in s.notes[0] for s in taken)
    assert any(n.startswith("rule nothing_is_kept") for n in taken[-1].notes)
    cut = reject_run(taught=1, sampling=Sampling(max_tokens=1), rounds=1)
    asyncio.run(play(tiny_parts(tmp_path / "cut", cut)))
    assert "raise reject.sampling.max_tokens (now 1)" in lines(tmp_path / "cut")[0].notes[0]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("method", "given", "killed_at"),
    [
        *((m, {"general": 0.25, "style": "answer"}, at) for m in (STAR, REST) for at in (2, 3, 4)),
        *((RFT, {"prompts": 1, "siblings": 2, "rounds": None}, at) for at in (5, 8)),
    ],
    ids=lambda x: x.name if isinstance(x, RejectionMethod) else None,
)
def test_a_killed_stage_goes_on_as_if_it_had_never_been_killed(
    method: RejectionMethod, given: dict[str, Any], killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(reject_run(method=method, **{"steps": 9, "rounds": 4} | given), deterministic=True)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    remember = RejectionDriver.remember

    class Killed(Exception):
        pass

    def killed(self: RejectionDriver, asked: Any, step: Step) -> Step:
        if step.index == killed_at:
            raise Killed
        return remember(self, asked, step)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(RejectionDriver, "remember", killed)
        posttrain.run(run, out=tmp_path / "cut", quiet=True)
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert find(tmp_path / "cut").state["weights"] == find(tmp_path / "whole").state["weights"]


# --- hints -----------------------------------------------------------------------------------------------------------


def test_who_gives_hints(tmp_path: Path) -> None:
    run = reject_run(method=STAR)
    env = make_environment(run)
    assert hints(env)(env.train.task(0)) == str(env.train.task(0).prompt)[:-1] + f"={env.train.task(0).answer}>"
    with pytest.raises(ConfigError, match="writes no hints"):
        make_environment(replace(run, env=Env(name="countdown", heldout=4), stages=run.stages[1:]))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "2+2?", "answer": 4}\n{"prompt": [{"role": "user", "content": "1+1?"}], "answer": 2}\n')
    own = Env(name="prompts", prompts=str(file), rewards=(posttrain.config.env.Reward(function="exact"),), heldout=0)
    with pytest.raises(ConfigError, match=r"env\.args\.hint"):
        make_environment(replace(run, env=own, stages=run.stages[1:]))
    told = make_environment(replace(run, env=replace(own, args={"hint": " (it is {answer})"}), stages=run.stages[1:]))
    assert [hints(told)(told.train.task(i)) for i in range(2)] == [
        "2+2? (it is 4)",
        ({"role": "user", "content": "1+1? (it is 2)"},),
    ]
    with pytest.raises(ConfigError, match="where the answer stands"):
        make_environment(replace(run, env=replace(own, args={"hint": "it is 4"}), stages=run.stages[1:]))
