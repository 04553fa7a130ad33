"""Wrong answers said anew from their first wrong step: where it is, what is kept, and runs that learn from it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import posttrain
from posttrain.checks.judging.step_label_checks import said
from posttrain.config.env import Reward
from posttrain.config.overrides import apply
from posttrain.config.run import Run
from posttrain.config.stages.keep_rule import Best
from posttrain.config.stages.rejection import RAFT, RFT, Regenerate, Rejection
from posttrain.core.gauge import Step
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.types import Episode, SampledTurn, Segment, Task
from posttrain.core.verdict import SOLVED, Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.record.external_access import asks
from posttrain.role.judges.regenerate import RegeneratedAnswer, halved, regenerated_gauges, right_steps, scored_steps
from posttrain.role.learning.rejection_selection import Candidate, candidates_of, read, regenerated_candidates
from posttrain.role.learning.rejection_selection import write as write_candidates
from posttrain.role.rollout import Rollout
from posttrain.stages.rejection.regeneration_checks import goes_on_from_its_step
from posttrain.stages.rejection.rejection_stage import RejectionDriver
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, InvariantError
from tests.role.process_parts import ENV, SAMPLING, Counting, needed, parts_of, process_run, regenerate_run, regenerated

HOW = Regenerate(separator=";")
SCORES = Regenerate(by="scores")


# --- where the first wrong step is ------------------------------------------------------------------------------------


def judged(score: float | None) -> Episode:
    verdict = Verdict.failed("outage") if score is None else Verdict.value(score)
    return Episode(Task("t", "p"), 0, 0, (), Stop.SAID, (Judged("own", 1.0, verdict),))


@settings(max_examples=200)
@given(steps=st.integers(1, 60), data=st.data(), noise=st.lists(st.sampled_from([0.0, None]), max_size=3))
def test_halving_finds_what_asking_every_step_finds(steps: int, data: st.DataObject, noise: list[float | None]) -> None:
    """The first step from whose end no completion is right, by asking at each one in order, where a wrong step stays
    wrong; and log2 of the steps, rounded up, is the most that is asked."""
    right = data.draw(st.integers(0, steps - 1))

    async def from_step(number: int) -> tuple[Episode, ...]:
        return (*map(judged, noise), judged(1.0 if number <= right else 0.0))

    found = asyncio.run(halved(steps, from_step))
    assert found is not None
    kept, asked = found
    in_order = next(n for n in range(1, steps + 1) if n > right)
    assert kept == in_order - 1 == right
    assert len(asked) <= math.ceil(math.log2(steps)) if steps > 1 else not asked
    assert kept == 0 or kept in asked
    assert kept + 1 == steps or kept + 1 in asked


def test_an_outage_is_no_wrong_step() -> None:
    async def from_step(number: int) -> tuple[Episode, ...]:
        return (judged(None), judged(None))

    assert asyncio.run(halved(4, from_step)) is None


def test_scores_find_it_where_they_first_fall() -> None:
    assert [right_steps(s, 0.5) for s in ([0.9, 0.4, 0.8], [0.1], [0.9, 0.5], [])] == [1, 0, 2, 0]


@pytest.mark.parametrize(("scores", "kept"), [((1.0, 1.0), 1), ((1.0, 0.0), 0), ((0.0, 1.0), 0)])
def test_steps_that_end_with_one_token_are_one_step(scores: tuple[float, ...], kept: int) -> None:
    """A token may hold the end of one step and the whole of the next: nothing can be said anew between them."""
    two = tuple(Judged("step", 1.0, Verdict.value(s), 1) for s in scores)
    verdicts = (*two, Judged("step", 1.0, Verdict.value(0.0), 2), Judged("own", 1.0, Verdict.value(0.0)))
    spoken = Segment(
        np.array([4, 3, 2], np.int32),
        np.array([False, True, True]),
        np.array([np.nan, -1, -1], np.float32),
        np.array([-1, 0, 0], np.int32),
        SAMPLING,
    )
    e = Episode(Task("t", "p"), 0, 0, (spoken,), Stop.SAID, verdicts)
    ends, lowest = scored_steps(e)
    assert (ends, lowest) == ((1, 2), (min(scores), 0.0)) and right_steps(lowest, 0.5) == kept
    goes_on_from_its_step(RegeneratedAnswer(e, ends, kept, {kept: ()} if kept else {}), SCORES, Plain().text)


WORDS = ["", "a;", "b;", "c;", "<"]
"""Steps of a scripted policy: `a` and `c` are right, `b` is wrong."""
LENGTH = 6


class Marked(Arithmetic):
    """Right is an answer without a `b`. Each step is judged too, where `judge_steps` asks for it."""

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(float("b" not in attempt.text))

    def steps(self, attempt: Attempt) -> tuple[Judged, ...]:
        if not self.judge_steps:
            return ()
        own = enumerate(attempt.text.split(";")[:-1], 1)
        return tuple(Judged("step", 1.0, Verdict.value(float(s != "b")), attempt.spoken_upto(2 * n)) for n, s in own)


class Plain:
    """The encoder of the scripted policy."""

    format, restarted = None, False

    def see(self, content: Any, tools: Any = ()) -> np.ndarray:
        return np.array([4], np.int32)

    def text(self, ids: np.ndarray) -> str:
        return "".join(WORDS[int(i)] for i in ids)

    def said(self, ids: np.ndarray) -> str:
        return self.text(ids)


class Chains:
    """A policy of `LENGTH` steps. From the prompt its first error is at any step, and what follows is right by itself
    or wrong by chance; from the end of a step it goes on right if all before it is."""

    context, draws_by_place, keeps_sets, version = 64, True, False, 0

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        rng = np.random.default_rng(place)
        before = ids[1:]
        steps = rng.choice([1, 3], size=LENGTH - len(before))
        if not len(before):
            error = int(rng.integers(LENGTH))
            steps[error] = 2
            steps[error + 1 :] = rng.choice([1, 2, 3], size=LENGTH - error - 1)
        elif 2 in before and len(steps):
            steps[:] = rng.choice([1, 2, 3], size=len(steps))
        new = np.append(steps, 0).astype(np.int32)
        return SampledTurn(new, np.full(len(new), -1, np.float32), np.zeros(len(new), np.int32), Stop.SAID)


def scripted(how: Regenerate, seed: int, judge_steps: bool = False) -> tuple[Any, tuple[RegeneratedAnswer, ...]]:
    world = Marked(heldout_count=0, judge_steps=judge_steps)
    rollout = Rollout(Chains(), world, lambda task: Plain(), seed)  # type: ignore[arg-type]
    parts = SimpleNamespace(rollout=rollout, environment=world, stop_ids=(0,), spell=None)
    return regenerated(parts, how, 6, 4, Sampling(max_tokens=20, stop_ids=(0,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("how", [HOW, SCORES], ids=["completions", "scores"])
def test_every_wrong_answer_is_said_anew_from_its_planted_error(how: Regenerate, seed: int) -> None:
    """All completions of a right beginning are right here, so the planted error is found exactly, and mended wherever
    a step stands before it."""
    groups, answers = scripted(how, seed, judge_steps=how.by == "scores")
    assert [a.episode for a in answers] == [e for g in groups for e in g.episodes if e.reward == 0]
    for a in answers:
        planted = a.episode.text.index("b") // 2
        assert a.kept == planted and (a.kept == 0) == (not a.completions)
        assert all(c.text[: 2 * planted] == a.episode.text[: 2 * planted] for c in a.completions)
        assert all((c.figure or 0.0) >= SOLVED for c in a.completions)
        assert len(a.asked) <= (math.ceil(math.log2(LENGTH)) if how.by == "completions" else 1)
        goes_on_from_its_step(a, how, Plain().text)
    asked = candidates_of(groups, (), answers)
    plain = [c for c in asked.candidates if c.plain]
    anew = [c for c in asked.candidates if not c.plain]
    assert len(plain) == sum(len(g.episodes) for g in groups)
    assert len(anew) == len({c for a in answers for c in a.completions}) and all(c.reward == 1 for c in anew)
    assert len({(c.prompt, c.visit, c.sibling, c.begun) for c in anew}) == len(anew)
    gauges = regenerated_gauges(answers)
    assert gauges["reject/right_steps"].sum == sum(a.episode.text.index("b") // 2 for a in answers)
    assert gauges["reject/mended"].sum == sum(a.kept > 0 for a in answers)


def test_siblings_that_begin_alike_share_their_completions() -> None:
    """Each is a candidate once, and its random numbers are those of the first sibling that has the beginning."""
    shared = 0
    for seed in range(6):
        _, answers = scripted(HOW, seed)
        alike: dict[tuple[str, bytes], list[RegeneratedAnswer]] = {}
        for a in answers:
            if a.kept:
                alike.setdefault((a.episode.task.id, said(a.episode)[: a.ends[a.kept - 1]].tobytes()), []).append(a)
        for own in alike.values():
            assert all(x.completions is own[0].completions for x in own)
            shared += len(own) > 1
        assert len(regenerated_candidates(answers)) == HOW.completions * len(alike)
    assert shared, "some siblings begin alike"


@pytest.mark.parametrize("wrong", ["later", "earlier", "elsewhere", "right"])
def test_the_check_speaks(wrong: str) -> None:
    _, answers = scripted(HOW, 0)
    a = next(a for a in answers if 1 < a.kept < LENGTH - 1)
    b = next(b for b in answers if b.episode.task.id != a.episode.task.id and b.completions)
    changed = {
        "later": replace(a, kept=a.kept + 1),
        "earlier": replace(a, kept=a.kept - 1),
        "elsewhere": replace(a, asked={**a.asked, a.kept: b.completions}),
        "right": replace(a, episode=a.completions[0]),
    }[wrong]
    with pytest.raises(InvariantError, match="first wrong one|goes on from another place|only wrong ones|was cut at"):
        goes_on_from_its_step(changed, HOW, Plain().text)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_data_and_meaningless_ones_are_refused() -> None:
    run = regenerate_run(HOW)
    assert from_plain(Run, to_plain(run)) == run and not asks(run)
    stage = apply(run, ["method=rft", "method.regenerate=8", "method.regenerate.separator=;"]).stages[-1]
    assert isinstance(stage, Rejection) and stage.method.regenerate == replace(HOW, completions=8)
    assert stage.method.label == "rft+user"
    stage = apply(run, ["method.regenerate=none"]).stages[-1]
    assert isinstance(stage, Rejection) and stage.method.regenerate is None
    best = replace(RAFT, keep=Best(above=0.0), regenerate=HOW)
    assert best.label == "raft+user" and replace(best, regenerate=None).label == "raft"
    with pytest.raises(ConfigError, match=r"method\.keep\.above=0"):
        replace(RAFT, regenerate=HOW)
    for change, why in (({"completions": 0}, ">= 1"), ({"separator": ""}, "empty"), ({"at": math.nan}, "finite")):
        with pytest.raises(ConfigError, match=why):
            replace(HOW, **change)


@pytest.mark.prove
def test_what_cannot_be_regenerated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="by=scores: no step of any wrong answer has a score"):
        posttrain.run(regenerate_run(SCORES), out=tmp_path / "scores", quiet=True)
    labels = process_run()
    paid = replace(ENV, rewards=(Reward(function="model:stage:rm", steps="outcome"),), measured=True)
    stages = (*labels.stages[:-1], regenerate_run(HOW).stages[-1])
    with pytest.raises(ConfigError, match="model:stage:rm pays the answers too"):
        posttrain.run(replace(labels, env=paid, stages=stages), out=tmp_path / "paid", quiet=True)


def test_candidates_come_back_from_disk(tmp_path: Path) -> None:
    groups, answers = scripted(HOW, 0)
    asked = candidates_of(groups, (), answers)
    write_candidates(tmp_path, asked)

    def told(c: Candidate) -> tuple[Any, ...]:
        return c.prompt, c.visit, c.sibling, c.reward, c.hinted, c.begun, c.key

    assert [told(c) for c in read(tmp_path).candidates] == [told(c) for c in asked.candidates]


# --- runs -------------------------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[Step]:
    return [s for s in run_reader.steps(folder) if s.stage == "reject"]


def kept_of(folder: Path) -> list[Candidate]:
    """The candidates of every round of a run that were said anew."""
    found = [read(f) for f in sorted((folder / "kept").glob("reject-asked-*"))]
    return [c for asked in found for c in asked.candidates if c.begun is not None]


@pytest.mark.prove
@pytest.mark.parametrize("how", [HOW, SCORES], ids=["completions", "scores"])
def test_a_run_learns_from_what_it_said_anew(how: Regenerate, tmp_path: Path) -> None:
    run = regenerate_run(how, judge_steps=how.by == "scores")
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    asked = [s.gauges for s in lines(tmp_path / "run") if "reject/mended" in s.gauges]
    assert len(asked) == 2 and sum(g["reject/regenerated"].sum for g in asked) > 0
    assert sum(g["reject/mended"].sum for g in asked) > 0
    assert kept_of(tmp_path / "run")


@pytest.mark.prove
def test_a_process_reward_model_of_the_run_finds_the_step(tmp_path: Path) -> None:
    labels = process_run()
    env = replace(ENV, rewards=(Reward(function="model:stage:rm"),))
    stages = (*labels.stages[:-1], regenerate_run(SCORES).stages[-1])
    posttrain.run(replace(labels, env=env, stages=stages), out=tmp_path / "run", quiet=True)
    asked = [s.gauges for s in lines(tmp_path / "run") if "reject/completions" in s.gauges]
    assert asked and all(g["reject/completions"].mean <= SCORES.completions for g in asked)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parts = parts_of(tmp_path_factory.mktemp("regenerate") / "run", process_run())
    yield parts
    parts.close()
    parts.book.close()


@pytest.mark.prove
def test_what_is_said_anew_is_that_of_its_place(made: Any) -> None:
    """With other neighbours, or asked again, it is equal, also where siblings share beginnings."""
    found = [regenerated(made, HOW, count)[1] for count in (4, 2, 2)]
    for mine, theirs in zip([*found[1], *found[1]], [*found[2], *found[0][: len(found[1])]], strict=True):
        assert (mine.kept, list(mine.asked)) == (theirs.kept, list(theirs.asked))
        for n in mine.asked:
            assert [said(c).tolist() for c in mine.asked[n]] == [said(c).tolist() for c in theirs.asked[n]]


@pytest.mark.prove
def test_beginnings_are_computed_once(tmp_path: Path) -> None:
    """Token positions computed / needed, by the counter of an engine whose cache is empty."""
    new = parts_of(tmp_path / "run", process_run())
    try:
        counting = Counting(new.sampler)
        sampling = replace(SAMPLING, max_tokens=50, min_tokens=50)
        parts = replace(new, rollout=replace(new.rollout, sampler=counting))
        _, answers = regenerated(parts, replace(HOW, completions=8), 4, 2, sampling)
        assert any(a.asked for a in answers)
        computed, least = new.sampler.gauges()["engine/positions_linear"].sum, needed(counting.calls)
        print(f"{computed:.0f} positions computed for {least}")
        assert least <= computed <= 1.02 * least
    finally:
        new.close()
        new.book.close()


@pytest.mark.prove
@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_killed_stage_goes_on_as_if_it_had_never_been_killed(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(regenerate_run(HOW, rounds=2), deterministic=True)
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
    assert kept_of(tmp_path / "whole")
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert find(tmp_path / "cut").state["weights"] == find(tmp_path / "whole").state["weights"]


def test_a_published_method_says_nothing_anew() -> None:
    assert RFT.regenerate is None and RAFT.regenerate is None
