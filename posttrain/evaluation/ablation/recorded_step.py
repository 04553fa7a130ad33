"""One recorded step of a run, with the kept weights that are nearest to those the step began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.stage import starts
from posttrain.core.gauge import Step
from posttrain.core.types import Episode, Group, Top
from posttrain.record import run_reader
from posttrain.record.checkpoint import Checkpoint, find, scan
from posttrain.record.step_format import Recorded
from posttrain.system import files
from posttrain.system.errors import ConfigError, RunFolderError, nearest

KEPT_REFERENCE = "-reference-"
"""Part of the name of a refreshed reference below `kept/`: STAGE-reference-STEP."""


@dataclass(frozen=True)
class Weights:
    """Weights in a run folder."""

    name: str
    folder: Path
    step: int | None
    """The step of the stage after which they were written; 0: at its start; None: weights of another stage."""
    version: int | None
    """Optimizer steps of the run until then; None where the folder does not record it."""
    memory: Mapping[str, Any] | None = None
    """The adaptive state of the stage's algorithm at that time; empty: it has just begun; None: not known."""

    def verified(self) -> Weights:
        """These weights. RunFolderError if their files are damaged."""
        if wrong := files.damage(self.folder):
            raise RunFolderError(f"weights {self.name}: {wrong}")
        return self


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step of a reinforcement stage as its folder records it."""

    run: Run
    stage: Reinforce
    index: int
    records: tuple[Recorded, ...]
    line: Step | None
    """Its line of steps.jsonl; None while it is being written."""
    weights: Weights

    @property
    def behind(self) -> int | None:
        """Number of steps of the stage by which these weights are older than those the step began with; negative:
        newer."""
        return None if self.weights.step is None else self.index - 1 - self.weights.step

    @property
    def version(self) -> int:
        """Version of the weights the step began with; where it was not recorded, that of the newest token."""
        # A line has the version at the end of its step. The updates of the step are subtracted.
        if self.line is not None and "optim/steps" in self.line.gauges:
            return self.line.version - int(self.line.gauges["optim/steps"].sum)
        versions = [int(s.version.max(initial=0)) for r in self.records for s in r.episode.segments]
        return max(versions, default=0)

    @property
    def top(self) -> int:
        """Number of the most probable tokens that the sampler stored with every token."""
        # The least of all segments, so that every episode has at least this number.
        samplings = [s.sampling for r in self.records for s in r.episode.segments]
        return min((s.top for s in samplings if not s.greedy), default=0)


def choose_stage(folder: Path, run: Run, name: str | None) -> Reinforce:
    """The named reinforcement stage, or the only one. ConfigError lists the stages there are."""
    stages = {s.name: s for s in run.stages if isinstance(s, Reinforce)}
    if not stages:
        raise ConfigError(
            f"{folder} has no reinforcement stage: there is no algorithm to compare with"
            f" ({', '.join(s.name for s in run.stages)})"
        )
    if name is None and len(stages) > 1:
        raise ConfigError(f"{folder} has several reinforcement stages: say which with --stage ({', '.join(stages)})")
    if name is not None and name not in stages:
        raise ConfigError(f"--stage {name}: not a reinforcement stage of this run; {nearest(name, stages)}")
    return next(iter(stages.values())) if name is None else stages[name]


def recorded_steps(folder: Path, run: Run, stage: Reinforce) -> list[int]:
    """The steps whose episodes are in the folder. RunFolderError, with the reason, if there are none."""
    steps = [f.index for f in run_reader.episode_files(folder) if f.stage == stage.name and f.kind == "train"]
    if not steps:
        why = (
            "the run was started with record_episodes=false, so what it sampled is gone. Start one with"
            " record_episodes=true"
            if not run.record_episodes
            else f"stage {stage.name} has taken no step yet"
        )
        raise RunFolderError(f"{folder} holds no training episodes: {why}")
    return steps


def recorded_step(folder: Path, run: Run, stage: Reinforce, index: int | None, checkpoint: str | None) -> RecordedStep:
    """One step with its episodes and weights.

    Without `index` it is the last step whose starting weights are in the folder, or else the last step.
    """
    steps = recorded_steps(folder, run, stage)
    if index is not None and index not in steps:
        closest = min(steps, key=lambda i: abs(i - index))
        raise ConfigError(
            f"--step {index}: no episodes of {stage.name}; the nearest is {closest} (from {steps[0]} to {steps[-1]})"
        )
    known = candidates(folder, run, stage)
    if index is None:
        # Exact: the weights that this step began with are in the folder, so nothing is approximated.
        exact = [i for i in steps if any(w.step == i - 1 for w in known)]
        index = exact[-1] if exact and checkpoint is None else steps[-1]
    weights = _named(folder, known, checkpoint) if checkpoint is not None else _nearest(folder, known, index)
    line = next((s for s in run_reader.steps(folder) if s.stage == stage.name and s.index == index), None)
    return RecordedStep(run, stage, index, run_reader.episodes(folder, stage.name, index), line, weights.verified())


# --- weights ---------------------------------------------------------------------------------------------------------


def candidates(folder: Path, run: Run, stage: Reinforce) -> list[Weights]:
    """All weights of a stage in the folder, oldest first: its start, checkpoints, refreshed references, its end."""
    position = run.stages.index(stage)
    # Checkpoints of a running stage, which have its step and its adaptive state.
    checkpoints = [(c, s) for c in scan(folder) if (s := _running(c)) and c.state["stage"] == position]
    weights = [
        Weights(c.name, c.folder, int(s["step"]), int(c.state["version"]), s.get("memory")) for c, s in checkpoints
    ]
    kept = folder / "kept"
    references = sorted(kept.glob(f"{stage.name}{KEPT_REFERENCE}*"))
    weights += [Weights(f"kept/{p.name}", p, int(p.name.rpartition("-")[2]), None) for p in references]
    if (end_folder := kept / stage.name).is_dir():
        last_step = max(
            (f.index for f in run_reader.episode_files(folder) if f.stage == stage.name and f.kind == "train"),
            default=0,
        )
        # Weights under a stage's name are those of its end, and the first checkpoint behind it has their version.
        after_stage = next(
            (c for c in scan(folder) if stage.hands_on and c.state.get("stage") == position + 1 and not _running(c)),
            None,
        )
        weights.append(
            Weights(
                f"kept/{end_folder.name}",
                end_folder,
                last_step,
                int(after_stage.state["version"]) if after_stage else None,
            )
        )
        weights += (
            [Weights(after_stage.name, after_stage.folder, last_step, int(after_stage.state["version"]))]
            if after_stage
            else []
        )
    if (start_folder := kept / starts(run.stages, stage)).is_dir():
        weights.append(Weights(f"kept/{start_folder.name}", start_folder, 0, None, {}))
    # Of two from the same step the one with a known version comes last, and `_nearest` takes the last.
    return sorted(weights, key=lambda w: (w.step or 0, w.version is not None))


def _running(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The state of an unfinished stage in a checkpoint; empty at the end of a stage."""
    return checkpoint.state.get("running") or {}


def _nearest(folder: Path, known: Sequence[Weights], index: int) -> Weights:
    """Of the weights in `known`, the newest that are no newer than those the step began with."""
    # Newer weights have learned from this very step.
    old = [w for w in known if w.step is not None and w.step <= index - 1]
    if not old:
        raise RunFolderError(
            f"{folder} holds no weights of step {index} or before it: kept/ and checkpoints/ are empty or were removed"
        )
    return old[-1]


def _named(folder: Path, known: Sequence[Weights], name: str) -> Weights:
    """The weights with this name: those of the stage, or any checkpoint of the folder."""
    by_name = {w.name.removeprefix("kept/"): w for w in known}
    if name.removeprefix("kept/") in by_name:
        return by_name[name.removeprefix("kept/")]
    c = find(folder, name)
    return by_name.get(c.name, Weights(c.name, c.folder, None, int(c.state["version"])))


# --- groups ----------------------------------------------------------------------------------------------------------


def rebuild(records: Sequence[Recorded], *, shown: bool, top: int) -> tuple[Group, ...]:
    """The step's groups as the rollout returned them.

    Args:
        shown: keep demonstrated siblings.
        top: how many of the sampler's most probable tokens to keep per token.
    """
    groups: list[Group] = []
    for _, of_prompt in groupby((r.episode for r in records), key=lambda e: (e.task.id, e.visit)):
        episodes = list(of_prompt)
        # The greedy answer is no sibling: it is what a baseline compares with.
        greedy = next((e for e in episodes if any(s.sampling.greedy for s in e.segments)), None)
        # Demonstrations are left out where an algorithm reads none: they would change baseline and batch.
        siblings = tuple(_cut(e, top) for e in episodes if e is not greedy and (shown or not e.shown))
        if siblings:
            groups.append(Group(siblings[0].task, siblings[0].visit, siblings, greedy))
    return tuple(groups)


def _cut(episode: Episode, top: int) -> Episode:
    """The episode with only the first `top` of the sampler's most probable tokens."""
    if all(s.sampling.top == top for s in episode.segments):
        return episode
    cut = [
        replace(
            s,
            sampling=replace(s.sampling, top=top),
            top=Top(s.top.ids[:, :top], s.top.logp[:, :top]) if s.top and top else None,
        )
        for s in episode.segments
    ]
    return replace(episode, segments=tuple(cut))
