"""A run that goes on with other settings: `posttrain run --resume RUN rl.steps=200`.

The table `ALLOWED` has the settings that may change. All others stay, because the steps so far were taken with them. A
new run that begins with the weights of this one may change anything (`model=RUN`, see `build.request.branch`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.build.request.own_pieces import piece_asks
from posttrain.config import overrides as dotted
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.redact_secrets import scrubbed_data
from posttrain.record import provenance
from posttrain.record.checkpoint import Checkpoint, scan
from posttrain.record.external_access import Ask, asks, values
from posttrain.record.run_folder import RunFolder
from posttrain.record.run_reader import damage_is_named, run_file
from posttrain.record.runtime_objects import own_pieces
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line
from posttrain.system.version import VERSION

SCALARS = (str, int, float, bool, type(None))
"""Types of values that run.json keeps as they are."""
LENGTH = ("Stage.steps", "Stage.wall_time", "Stage.patience", "Reinforce.target", "Rejection.rounds")
"""Settings that say where a stage ends."""
ALLOWED: Mapping[str, str] = {
    "Stage.steps": "more steps, or fewer that were not taken yet",
    "Stage.wall_time": "another time after which the stage ends",
    "Reinforce.target": "another reward at which the stage ends",
    "Stage.eval": "whether it is measured at the end",
    "Stage.eval_every": "how often it is measured from now on",
    "Stage.checkpoint_every": "how often it is kept from now on",
    "Stage.micro_tokens": "how a step is split",
    "Stage.patience": "after how many held-out evaluations the stage ends",
    "Optimizer.skips": "how many steps in a row may be left out",
    "Reinforce.max_failed": "which share of unjudged samples stops the run",
    "Rejection.rounds": "rounds after which the stage ends",
    "Rejection.max_failed": "which share of unjudged samples stops the run",
    "StepLabeling.max_failed": "which share of unjudged answers stops the run",
    "Evaluation.samples": "samples of a measurement from now on",
    "Evaluation.greedy": "whether greedy answers are measured from now on",
    "JudgeEndpoint.calls": "how often a judge may be asked",
    "JudgeEndpoint.parallel": "how many requests to it run at once",
    "Run.slots": "sequences decoded at once",
    "Run.threads": "threads of the CPU",
    "Run.trackers": "where numbers are sent",
    "Run.log_completions": "how many completions go along",
    "Run.keep_checkpoints": "how many checkpoints stay",
    "Run.record_episodes": "whether episodes are written from now on",
    "Model.gradient_checkpointing": "memory against time",
    "Model.offload_activations": "where activations are kept",
    "Model.offload_optimizer": "where the optimizer's state is kept",
    "Model.warm_up": "whether the largest pass comes first",
    "Model.device": "the device that computes",
    "Run.placement": "where engines work",
    "Processes.engines": "how many engines sample",
    "Processes.cores": "the cores of each",
    "Processes.transport": "how weights come to the engines",
    "Processes.folder": "the folder of the weights on their way",
    "Processes.delta": "whether only what changed is sent",
    "Processes.timeout": "how long anything may take",
    "Processes.deaths": "how many engines a turn may kill",
    "Processes.environments": "how many processes play episodes",
    "Ray.address": "which Ray cluster they work on",
    "Ray.verifiers": "where verifiers work",
    "Embedded.cache_gib": "memory of the cache",
    "Embedded.budget": "positions of a forward pass",
    "Embedded.retain": "tokens that stay in the cache",
    "Embedded.sleep": "whether the cache is freed while the learner works",
    "Embedded.timeline": "whether a timeline is written",
}
"""Fields (`Class.field`) that may change when a run goes on. The texts say what they are, for readers of this table."""
REFUSED: Mapping[str, str] = {
    "Model": "the weights are of this model",
    "Env": "the record and the held-out figures are of these tasks and rewards",
    "Reward": "the record and the held-out figures are of these rewards",
    "Optimizer": "the optimizer's state and its learning rates so far belong to this setting",
    "Sampling": "the samples so far were drawn by this contract",
    "Algorithm": "the steps so far were taken by this algorithm",
    **dict.fromkeys(
        ("Supervised.epochs", "Preference.epochs", "RewardModel.epochs"),
        "its passes were counted as steps when it began; set steps",
    ),
    "Run.seed": "tasks and random numbers would no longer follow those before",
    "Evaluation.seed": "held-out figures would no longer be of the same draws",
}
"""Reasons why other fields cannot be changed, by `Class.field` or by class."""


@dataclass(frozen=True)
class Change:
    """One setting of a run that goes on. `field` is its `Class.field`."""

    path: str
    field: str
    before: Any
    after: Any

    @property
    def line(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def changes(old: Run, new: Run) -> tuple[Change, ...]:
    """The settings in which two runs differ."""
    before, after = values(old), values(new)  # path -> (Class.field, value)
    paths = [p for p in {**before, **after} if before.get(p) != after.get(p)]
    # A side that lacks the setting has None in the place of its value.
    return tuple(
        Change(p, (after.get(p) or before[p])[0], *(x[p][1] if p in x else None for x in (before, after)))
        for p in paths
    )


MAY = (
    "its length (steps, wall_time, target), how it is measured and kept (eval_every, checkpoint_every,"
    " evaluation.samples, trackers), and what changes no result (threads, slots, micro_tokens, the cache, placement)"
)
"""The table `ALLOWED` in words, for messages."""


def check_changes(folder: Path, old: Run, new: Run, words: Sequence[str] = ()) -> tuple[Change, ...]:
    """The changes from `old` to `new`, if `ALLOWED` has all of them; else ConfigError with the reason, and the command
    of a new run that may make it. `words`: the overrides as the user wrote them."""
    if [s.name for s in old.stages] != [s.name for s in new.stages]:
        raise ConfigError(f"a run goes on with the stages it was begun with.\n{_branch(folder, old, words)}")
    edits = changes(old, new)
    for c in edits:
        if c.field in ALLOWED:
            continue
        # The reason of the field, else that of its class, else one that is true of every setting.
        why = REFUSED.get(c.field) or REFUSED.get(c.field.partition(".")[0]) or "the steps so far were taken with it"
        # As the user wrote it: it may be a short key (`clip.high`), or change several fields.
        override = next((w for w in words if c.path in _alone(old, w)), f"{c.path}={c.after}")
        raise ConfigError(
            f"{override} cannot change in a run that goes on: {why} ({c.before}). What may change is {MAY}.\n"
            f"{_branch(folder, old, list(dict.fromkeys((*words, override))), c.path)}"
        )
    return edits


def _alone(run: Run, word: str) -> set[str]:
    """The paths of the settings that one override changes."""
    try:
        return {c.path for c in changes(run, dotted.apply(run, [word]))}
    except ConfigError:  # it is valid only together with other overrides
        return set()


def _branch(folder: Path, run: Run, words: Sequence[str], path: str = "") -> str:
    """A sentence and the command of a new run with the weights of this one, from the stage of `path` or the last."""
    names = [s.name for s in run.stages]
    stage_of_path = path.partition(".")[0]
    stages_before = names[: names.index(stage_of_path) if stage_of_path in names else len(names) - 1]
    left_out = [f"{name}=none" for name in stages_before if f"{name}=none" not in words]
    return (
        "A new run may begin with its weights and change anything:\n"
        f"  {command_line('run', run.recipe, f'model={folder}', *left_out, *words)}"
    )


@dataclass(frozen=True)
class ResumedRun:
    """How a run goes on: its new settings, the changes, and the state from which it starts."""

    run: Run
    changes: tuple[Change, ...]
    state: Mapping[str, Any] | None
    """The progress to go on from; None: there is no checkpoint."""
    gauges: Gauges | None
    """Set where an ended stage goes on: gauges of its last evaluation, which now belong to the line of its last
    step."""
    step: int
    """Steps of the stage so far."""
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Digests of the files that it reads from now on, where they differ from those with which it began
    (`build.request.input_digests`)."""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(f"changed: {c.line}" for c in self.changes)


GOES_ON: Mapping[str, Any] = {"ended": "", "waited": 0}
"""What is reset in the state of an ended stage that is made longer. Without this it would end again at once."""


def extension(book: RunFolder, checkpoint: Checkpoint | None, new: Run) -> ResumedRun:
    """Returns the extension of a run that goes on from a checkpoint with new settings; ConfigError for a change that is
    not allowed, or comes too late: the stage ended before, or has taken more steps."""
    edits = check_changes(book.folder, book.run, new)
    if checkpoint is None:
        return ResumedRun(new, edits, None, None, 0)
    state: dict[str, Any] = dict(checkpoint.state)
    done, new_lengths = int(state.get("stage", 0)), {c.path.partition(".")[0] for c in edits if c.field in LENGTH}
    # Of stages that are over only the last can be opened again: later stages began with the weights of the others.
    over, last = [s for s in new.stages[:done] if s.name in new_lengths], new.stages[-1]
    if over and (over != [last] or done < len(new.stages)):
        name = over[0].name
        raise ConfigError(
            f"{name} is over, and a later stage has begun: only the last stage of a run, or one that is not over, can"
            f" be longer.\n{_branch(book.folder, new, [f'{name}.steps={over[0].steps}'], name)}"
        )
    if not over:
        running: Any = state.get("running") or {}
        step = int(running.get("step", 0))
        if done < len(new.stages):
            _enough_steps(book.folder, new, done, step, allow_equal=True)
        # The running stage met a stop condition in its last step before the checkpoint, and is now made longer.
        if running.get("ended") and new.stages[done].name in new_lengths:
            state["running"] = {**running, **GOES_ON}
        return ResumedRun(new, edits, state, None, step)
    return _reopened(book, checkpoint, new, edits)


def _reopened(book: RunFolder, checkpoint: Checkpoint, new: Run, edits: tuple[Change, ...]) -> ResumedRun:
    """The extension of a finished run whose last stage goes on."""
    last = new.stages[-1]
    reopening: Any = checkpoint.state.get("reopening")
    if not isinstance(reopening, dict) or not isinstance(reopening.get("progress"), dict):
        why = (
            f"{last.name} hands nothing on, so it has no checkpoint to go on from"
            if not last.hands_on
            else "its last checkpoint holds no optimizer (an older version wrote it)"
        )
        raise ConfigError(
            f"{book.folder} is finished, and {why}. Go on from a checkpoint inside the stage (--resume"
            f" {book.folder}/checkpoints/NAME).\n{_branch(book.folder, new, [f'{last.name}.steps={last.steps}'])}"
        )
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        # The progress as it was just before the stage ended. The same checkpoint has the stage's optimizer.
        state = dict(reopening["progress"])
        running = dict(state["running"])
        step = int(running["step"])
    _enough_steps(book.folder, new, len(new.stages) - 1, step, allow_equal=False)
    # Without this check the run would be opened, take no step, and be finished again.
    if why := _ended_still(last, running, edits):
        raise ConfigError(why)
    state["running"] = {**running, **(GOES_ON if running.get("ended") else {})}
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        gauges = {name: Gauge(float(total), float(n)) for name, (total, n) in reopening["gauges"].items()}
    return ResumedRun(new, edits, state, gauges, step)


def _enough_steps(folder: Path, run: Run, at: int, step: int, allow_equal: bool) -> None:
    """ConfigError where the new length of the stage number `at` is less than the steps taken, or equal to them unless
    `allow_equal`."""
    stage = run.stages[at]
    if stage.steps > step or (allow_equal and stage.steps == step):
        return
    length = f"{stage.name}.steps={stage.steps}"
    if early := [c for c in scan(folder) if _taken(c, at) <= stage.steps]:
        way = f"go back to an earlier checkpoint: {command_line('run', '--resume', early[-1].folder, length)}"
    else:
        way = "start a new run: no checkpoint that is left has as few"
    raise ConfigError(f"{length}: {step} steps are taken already. Give more, or {way}")


def _taken(checkpoint: Checkpoint, at: int) -> float:
    """The steps of the stage number `at` that were taken at a checkpoint; infinite where the stage was over."""
    done, running = int(checkpoint.state.get("stage", 0)), checkpoint.state.get("running") or {}
    return math.inf if done > at else int(running.get("step", 0)) if done == at else 0


def _ended_still(stage: Stage, running: Mapping[str, Any], edits: Sequence[Change]) -> str:
    """Returns the reason why the stage would end again at once, by its time, target or rounds; else ''."""
    changed = {c.field for c in edits}
    seconds = float(running.get("seconds", 0.0))
    if stage.wall_time is not None and seconds >= stage.wall_time:
        return (
            f"{stage.name} has taken {seconds:.0f} s, and {stage.name}.wall_time={stage.wall_time:g} ends it: give"
            " more, or none"
        )
    met = str(running.get("ended", ""))
    if met.startswith("target") and isinstance(stage, Reinforce) and "Reinforce.target" not in changed:
        return f"{stage.name} ended because of its {met}: give a higher {stage.name}.target too, or none"
    if isinstance(stage, Rejection) and met == f"all {stage.rounds} rounds":
        return f"{stage.name} ended after {met}: give a larger {stage.name}.rounds too, or none"
    return ""


def history_entry(e: ResumedRun, edited: Sequence[str]) -> dict[str, Any]:
    """Returns the entry that run.json keeps of an extension: who changed what, and at which step."""
    state: Any = e.state or {}
    # In a finished run the number of finished stages is past the last stage.
    stage = e.run.stages[min(int(state.get("stage", 0)), len(e.run.stages) - 1)].name
    return {
        "stage": stage,
        "step": e.step,
        "changed": {c.path: [_plain(c.before), _plain(c.after)] for c in e.changes},
        **({"inputs": {k: dict(v) for k, v in e.inputs.items()}} if e.inputs else {}),
        "by": scrubbed_data(sys.argv),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "posttrain": VERSION,
        "edited_before": list(edited),
    }


def _plain(value: Any) -> Any:
    """The value of a setting as run.json keeps it: a scalar or a list as it is, any other value as text."""
    # JSON has no infinity, so it becomes text.
    as_it_is = isinstance(value, SCALARS) and value not in (math.inf, -math.inf)
    return list(value) if isinstance(value, tuple) else value if as_it_is else str(value)


def begin(e: ResumedRun, book: RunFolder, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Record that the run goes on with other settings. Returns the checkpoint to go on from, opened anew."""
    written = run_file(book.folder)
    note = provenance.recall(written.identity)
    if e.gauges is not None and checkpoint is not None and e.state is not None:
        name = f"{int(e.state['version']):08d}-{e.run.stages[-1].name}-{e.step:06d}"
        # First the checkpoint, then run.json: killed in between, the stage has its old length, and ends once more.
        checkpoint = book.reopen(checkpoint, name, e.state, e.gauges)
    book.record_change(e.run, history_entry(e, written.edited))
    carry_note(book.folder, note, written.run, e.run)
    return checkpoint


def carry_note(folder: Path, before: provenance.Note | None, old: Run, new: Run) -> None:
    """Write this user's note of a run anew, after `RunFolder.record_change` wrote its run.json.

    The note keeps what this user allowed the run to do. A folder of somebody else has no note and gets none.
    """
    if before is None:
        return
    # The user's note has what the user allowed before, and what this command adds, since the user wrote it. What the
    # folder asked for without permission does not get into the note.
    asked_before = {a.digest for a in asks(old)}
    allowed: list[Ask] = [a for a in asks(new) if a.digest in before.asked or a.digest not in asked_before]
    written = run_file(folder)
    allowed += [a for a in piece_asks(own_pieces(written.facts)) if a.digest in before.asked]
    provenance.remember(written.identity or "", written.digest, allowed)
