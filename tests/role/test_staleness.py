"""Stages whose samples may be older than their learner, as whole runs: bits where they are promised, counts where they
are not, and what a checkpoint keeps of what was asked ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.algorithm.loss.minibatch_streams import CHOSEN
from posttrain.algorithm.loss.token_selection import choose
from posttrain.api import main
from posttrain.config.engines import VLLM
from posttrain.config.placement import Processes
from posttrain.config.run import Embedded, Reinforce, Run
from posttrain.config.stages.reinforce import Replay
from posttrain.core.batch import Batch
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Step
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.streams import MU, NOW
from posttrain.core.verdict import Verdict
from posttrain.environment.gallery import GALLERY
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.shape import DropTruncated
from posttrain.ladder.policy_rows import DAPO, DECOUPLED, DR_GRPO, GRPO, LUFFY, M2PO
from posttrain.record import run_reader
from posttrain.role.trainer import Trainer
from posttrain.stages.interrupt import Interrupted
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.system.errors import ConfigError
from tests.killing import cut_run
from tests.late import Late, episodes_of, late_run, nothing_lost_or_doubled, rl_steps, through_the_queue
from tests.prove.test_kill_sweep import digest
from tests.tiny import tiny_run

FILTERED = patch(DAPO, "filtered", "-", shape=())
UNCUT = patch(GRPO, "uncut", "-", shape=(DropTruncated(),))
SHORT = 5
"""Characters that are too many to be right in `Brief`."""


class Brief(Late):
    """Short answers are right. So a filter that refuses groups of equal outcomes chooses by length."""

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(float(0 < sum(map(len, attempt.turns)) < SHORT))


GALLERY["brief"] = f"{__name__}:Brief"


def played(run: Run, folder: Path) -> Path:
    main.run(run, out=folder, quiet=True)
    return folder


def leaving(run: Run, unfinished: Any, **of: Any) -> Run:
    """The run, whose last stage leaves unfinished groups so."""
    *before, last = run.stages
    assert isinstance(last, Reinforce)
    return replace(run, stages=(*before, replace(last, unfinished=unfinished)), **of)


LONG = pytest.mark.prove


@pytest.mark.parametrize(
    ("staleness", "algorithm"),
    [
        pytest.param(k, a, id=f"{k}-{a.name}", marks=LONG)
        for k, a in ((1, FILTERED), (1, GRPO), (4, GRPO), (4, FILTERED))
    ],
)
def test_a_deterministic_run_is_the_same_whatever_takes_how_long(
    staleness: int, algorithm: Any, tmp_path: Path
) -> None:
    run = late_run(staleness, algorithm=algorithm)
    one, two = (digest(played(run, tmp_path / name)) for name in ("one", "two"))
    assert one == two
    for step in [s for s in run_reader.steps(tmp_path / "one") if s.stage == "rl"]:
        assert step.gauges["rollout/most_behind"].sum <= staleness


@pytest.mark.prove
def test_groups_of_a_deterministic_run_have_the_promised_version(tmp_path: Path) -> None:
    folder = played(late_run(2), tmp_path / "run")
    begun = next(s.version for s in run_reader.steps(folder) if s.stage == "rl") - 1
    for row in run_reader.episode_files(folder):
        if row.stage == "rl" and row.kind == "train":
            said = {int(v) for e in episodes_of(row) for s in e.episode.segments for v in s.version[s.mask]}
            assert said == {begun + max(0, row.index - 1 - 2)}


@LONG
@pytest.mark.parametrize("how", ["interrupted", "broken"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_cut_and_resumed_is_never_cut(
    staleness: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a border by a signal, where the queue is saved; and inside a step, back to the checkpoint before it."""
    run = late_run(staleness, algorithm=FILTERED)
    if not staleness:  # there the engine's counters are in the record, and they tell how long tools took
        run = replace(run, env=replace(run.env, name="arithmetic"))
    whole = digest(played(run, tmp_path / "whole"))
    remember = ReinforceDriver.remember

    def cut(self: ReinforceDriver, asked: Experience, step: Step) -> Step:
        if asked.index == 3 and how == "interrupted":
            self.stopper.stop(15)
        if asked.index == 4 and how == "broken":
            raise RuntimeError("the machine broke")
        return remember(self, asked, step)

    with monkeypatch.context() as patched:
        patched.setattr(ReinforceDriver, "remember", cut)
        with pytest.raises((Interrupted, RuntimeError)):
            played(run, tmp_path / "cut")
    assert len([s for s in run_reader.steps(tmp_path / "cut") if s.stage == "rl"]) == 3
    main.run(resume=tmp_path / "cut", quiet=True)
    assert digest(tmp_path / "cut") == whole


@LONG
@pytest.mark.parametrize(
    ("update", "unfinished"),
    [("drain", "go_on"), ("inflight", "go_on"), ("inflight", "pause"), ("stale", "pause"), ("drain", "ask_again")],
)
def test_a_free_run_loses_and_doubles_nothing(
    update: Any, unfinished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut twice on its way: every prompt is learned from once, in the order of the file, no token older than 2."""
    if unfinished == "ask_again":
        monkeypatch.setattr(Late, "slowest", 0.15)
    run = leaving(late_run(2, deterministic=False, steps=8), unfinished, engine=Embedded(update=update))
    remember = ReinforceDriver.remember
    cuts = {3, 6}

    def cut(self: ReinforceDriver, asked: Experience, step: Step) -> Step:
        if asked.index in cuts:
            cuts.remove(asked.index)
            self.stopper.stop(15)
        return remember(self, asked, step)

    monkeypatch.setattr(ReinforceDriver, "remember", cut)
    with pytest.raises(Interrupted):
        played(run, tmp_path / "run")
    with pytest.raises(Interrupted):
        main.run(resume=tmp_path / "run", quiet=True)
    main.run(resume=tmp_path / "run", quiet=True)
    steps = rl_steps(tmp_path / "run")
    assert all(s.gauges["rollout/most_behind"].sum <= 2 for s in steps)
    assert max(s.gauges["rollout/most_behind"].sum for s in steps) >= 1, "samples did run ahead"
    if unfinished == "ask_again":
        assert sum(s.gauges["rollout/asked_again"].sum for s in steps) > 0, "tools were at work when weights came"
    nothing_lost_or_doubled(tmp_path / "run", run)


@LONG
@pytest.mark.parametrize("algorithm", [GRPO, FILTERED], ids=["grpo", "filtered"])
def test_staleness_zero_through_the_queue_is_the_synchronous_run(algorithm: Any, tmp_path: Path) -> None:
    """Here the gauges too; of all shipped recipes: `tests/prove/test_recipes_through_queue.py`. With a filter the two
    may ask other numbers of groups at once, so there only the first step is compared."""
    run = late_run(0, algorithm=algorithm)
    played(run, tmp_path / "waves")
    with through_the_queue() as made:
        played(run, tmp_path / "queue")
    assert made
    if algorithm is GRPO:
        told = [
            [(s.index, s.version, dict(_own(s))) for s in run_reader.steps(tmp_path / n)] for n in ("waves", "queue")
        ]
        assert told[0] == told[1]
    rows = [
        [
            e.episode
            for r in run_reader.episode_files(tmp_path / n)
            if (r.stage, r.index, r.kind) == ("rl", 1, "train")
            for e in episodes_of(r)
        ]
        for n in ("waves", "queue")
    ]
    for a, b in zip(*rows, strict=False):
        assert (a.task.id, a.sibling) == (b.task.id, b.sibling)
        assert all(np.array_equal(x.ids, y.ids) for x, y in zip(a.segments, b.segments, strict=True))


def _own(step: Step) -> Any:
    """The gauges of a step that are not the engine's own counters."""
    return {n: g for n, g in step.gauges.items() if not n.startswith("engine/")}


@LONG
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_replay_buffer_comes_back_from_a_checkpoint(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are learned from again, with all checks on, and a run that was cut learns from the same ones."""
    again = Replay(size=12, groups=3, age=3, ratio=2.0, discount=0.8)
    run = late_run(staleness, replay=again, algorithm=DECOUPLED, steps=6)
    run = replace(run, env=replace(run.env, name="arithmetic"))
    whole = digest(played(run, tmp_path / "whole"))
    steps = [s for s in run_reader.steps(tmp_path / "whole") if s.stage == "rl"]
    assert [s.gauges["replay/groups"].sum for s in steps] == [0, 3, 3, 3, 3, 3]
    assert all(s.gauges["rollout/groups"].sum == 4 + s.gauges["replay/groups"].sum for s in steps)
    rows = [r for r in run_reader.episode_files(tmp_path / "whole") if (r.stage, r.kind) == ("rl", "train")]
    written = [(e.episode.task.id, e.episode.visit, e.episode.sibling) for r in rows for e in episodes_of(r)]
    assert len(set(written)) == len(written) == 6 * 4 * 4, "the record holds each answer once"
    cut_run(run, tmp_path / "cut", monkeypatch, at=4)
    main.run(resume=tmp_path / "cut", quiet=True)
    assert digest(tmp_path / "cut") == whole


@LONG
def test_weights_are_pushed_every_so_many_optimizer_steps(tmp_path: Path) -> None:
    folder = played(late_run(1, minibatches=2, sync_every=4, steps=8, eval_every=0), tmp_path / "run")
    steps = [s for s in run_reader.steps(folder) if s.stage == "rl"]
    begun = steps[0].version - 2
    for row in run_reader.episode_files(folder):
        if row.stage == "rl" and row.kind == "train":
            said = {int(v) for e in episodes_of(row) for s in e.episode.segments for v in s.version[s.mask]}
            assert all((v - begun) % 4 == 0 for v in said), "no version between two pushes has said a token"
    assert max(s.gauges["rollout/most_behind"].sum for s in steps) == 2, "staleness 1, and 2 steps a push"


@pytest.mark.prove
def test_a_step_without_a_second_minibatch_does_not_put_off_a_push(tmp_path: Path) -> None:
    """Minibatches without credit, here of two equal answers, take no optimizer step. Weights are pushed after as many
    steps all the same, so no token is older than promised."""
    two: dict[str, Any] = {"prompts": 2, "siblings": 2, "minibatches": 2}
    run = late_run(1, **two, algorithm=DR_GRPO, sync_every=4, steps=8, eval_every=0, checkpoint_every=0)
    steps = [s for s in run_reader.steps(played(run, tmp_path / "run")) if s.stage == "rl"]
    assert min(s.gauges["optim/steps"].sum for s in steps) < 2, "some minibatch has no credit"
    assert len(steps) == 8 and max(s.gauges["rollout/most_behind"].sum for s in steps) <= 2


AGAIN = Replay(size=12, groups=3)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("algorithm", "left_out", "replay"),
    [
        (GRPO, False, None),
        (DECOUPLED, False, AGAIN),
        (LUFFY, False, None),
        (FILTERED, True, None),
        (UNCUT, True, None),
    ],
    ids=["all", "again", "shown", "filtered", "uncut"],
)
def test_what_was_trained_on_is_as_long_as_what_was_asked(
    algorithm: Algorithm, left_out: bool, replay: Replay | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rollout/trained_length` is 1 where every answer is learned from, also beside those of earlier steps and of
    demonstrations, and the ratio of the two means where a filter or a mask left some out by their length."""
    remember, taken = ReinforceDriver.remember, list[tuple[Experience, Step]]()

    def kept(self: ReinforceDriver, asked: Experience, step: Step) -> Step:
        taken.append((asked, step))
        return remember(self, asked, step)

    monkeypatch.setattr(ReinforceDriver, "remember", kept)
    run = late_run(1, algorithm=algorithm, replay=replay, checkpoint_every=0)
    played(replace(run, env=replace(run.env, name="brief")), tmp_path / "run")
    ratios = list[float]()
    for asked, step in taken:
        own = [[e for e in g.episodes if e.own] for g in asked.played]
        trained = [e for g in asked.fresh for e in g.episodes if e.own and not (algorithm is UNCUT and e.stop.cut)]
        mean = np.mean([e.spoken for g in own for e in g])
        if trained:
            ratios.append(float(np.mean([e.spoken for e in trained]) / mean))
            assert step.gauges["rollout/trained_length"].mean == pytest.approx(ratios[-1], rel=1e-12)
        else:
            assert not step.gauges["rollout/trained_length"].count
    assert len(taken) == 6 and ratios and any(r != pytest.approx(1) for r in ratios) == left_out


@pytest.mark.prove
def test_the_mask_of_m2po_is_made_by_the_weights_of_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole run, with several updates a batch: the mask is that of the policy before the very update."""
    step, seen, tokens = Trainer.step, list[tuple[bool, bool]](), M2PO.tokens
    assert tokens is not None

    def watched(self: Trainer, batch: Batch, *args: Any, **named: Any) -> Any:
        if MU in batch:
            masks = [choose(tokens, batch.having({NOW: x}), None, None) for x in (self.learner.score(batch), None)]
            seen.append((np.array_equal(batch[CHOSEN], masks[0]), np.array_equal(batch[CHOSEN], masks[1])))
        return step(self, batch, *args, **named)

    monkeypatch.setattr(Trainer, "step", watched)
    run = late_run(2, algorithm=M2PO, minibatches=2, epochs=2, steps=4, checkpoint_every=0, eval_every=0)
    stage = run.stages[-1]
    assert isinstance(stage, Reinforce)
    played(
        replace(run, stages=(*run.stages[:-1], replace(stage, optimizer=replace(stage.optimizer, lr=0.02)))),
        tmp_path / "run",
    )
    assert len(seen) == 4 * 4 and all(now for now, _ in seen)
    assert not all(start for _, start in seen), "some mask is not that of the start of the batch"


@pytest.mark.prove
def test_what_checks_sample_is_not_counted_as_a_step_s(tmp_path: Path) -> None:
    """Without a queue too samples are older between two pushes, and the checks sample turns on the same engine."""
    steps = run_reader.steps(played(late_run(0, sync_every=2, checkpoint_every=0), tmp_path / "run"))
    own = [s for s in steps if s.stage == "rl"]
    assert sum(s.gauges["canary/probed"].sum for s in own if "canary/probed" in s.gauges) >= 2
    assert all(s.gauges["engine/tokens"].count <= 2 * 16 for s in own), "16 episodes of two turns"


@pytest.mark.parametrize("unfinished", ["pause", pytest.param("go_on", marks=pytest.mark.prove)])
def test_paused_turns_become_partial_rollouts_without_any_tool(unfinished: Any, tmp_path: Path) -> None:
    """Answers of a policy that was never taught have all lengths, and the engine has fewer slots than are asked."""
    run = tiny_run(staleness=2, sampling=Sampling(max_tokens=40), steps=6, checkpoint_every=0)
    run = leaving(replace(run, stages=run.stages[-1:], slots=8), unfinished, engine=Embedded(update="inflight"))
    folder = played(run, tmp_path / "run")
    segments = [s for row in run_reader.episode_files(folder) for e in episodes_of(row) for s in e.episode.segments]
    several = [s for s in segments if len({*s.version[s.mask].tolist()}) > 1]
    assert bool(several) == (unfinished == "pause"), "a turn without a tool is said to its end, or it is paused"
    assert all((np.diff(s.version[s.mask]) >= 0).all() for s in several)
    assert all(s.gauges["rollout/most_behind"].sum <= 2 for s in rl_steps(folder))
    nothing_lost_or_doubled(folder, run)


@pytest.mark.parametrize(
    ("of", "word"),
    [
        ({"engine": Embedded()}, "with engine.update=drain new weights wait"),
        ({"engine": Embedded(update="inflight"), "deterministic": True}, "leave one of them out"),
        ({"engine": VLLM()}, "this engine goes on meanwhile by itself: set rl.unfinished=go_on"),
        ({"engine": Embedded(update="inflight"), "placement": Processes()}, "goes on meanwhile by itself"),
    ],
)
def test_turns_that_cannot_be_paused_are_refused(of: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        leaving(tiny_run(staleness=1), "pause", **{"engine": Embedded(update="inflight")} | of)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"staleness": -1}, "must be >= 0"),
        ({"unfinished": "ask_again"}, "staleness=0"),
        ({"unfinished": "pause"}, "unfinished=pause: with staleness=0"),
        ({"minibatches": 2, "sync_every": 3}, "use a multiple of 2"),
        ({"sync_every": 2, "eval_every": 3}, "eval_every=3"),
        ({"sync_every": 2, "checkpoint_every": 3}, "checkpoint_every=3"),
        ({"sync_every": 0}, "use a multiple of 1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        tiny_run(**{"eval_every": 0, "checkpoint_every": 0} | settings)


def test_what_it_means_for_the_algorithm_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stage = tiny_run(staleness=2, steps=1).stages[-1]
    assert isinstance(stage, Reinforce)
    from posttrain.stages.reinforce.reinforce_stage import staleness_words

    assert "cannot see" in " ".join(staleness_words(stage, False)) and len(staleness_words(stage, True)) == 2
    assert staleness_words(replace(stage, staleness=0), False) == []
