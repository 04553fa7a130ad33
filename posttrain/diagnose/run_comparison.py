"""Compares runs: the settings in which they differ, and by how much their held-out scores differ.

Runs that differ in their seed alone form a group. Groups are compared with the first one, over the held-out prompts
that all runs share, and over seeds where both groups have several.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.interval import student95 as student95
from posttrain.diagnose.measurement import Measurement, common_scale
from posttrain.diagnose.run_outcome import RunOutcome, StageOutcome, read_outcome
from posttrain.record.external_access import values
from posttrain.system.errors import ConfigError, nearest
from posttrain.system.shell import command_line

NONE = "-"
"""The value of a run that has no such setting."""
FIRST = (
    *("", "algorithm.name", "model", "env", "steps", "epochs", "optimizer.lr", "prompts", "siblings", "batch", "beta"),
    *("sampling", "algorithm", "optimizer"),
)
"""The order of settings that matter most, without the name of their stage; '' is a stage itself. All others follow."""


def differing(runs: Sequence[Run], each: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns for each run the settings in which some of the runs differ, the most important first.

    A stage that one of the runs lacks is one setting. A setting that one of the runs lacks, such as a number of a piece
    of the algorithm, is not listed apart where a setting above it differs: it is part of that one's value.

    Args:
        each: all settings of each run, by their paths.
    """
    stages = [{s.name: f"{type(s).__name__.lower()}, {s.steps} steps" for s in run.stages} for run in runs]
    partial = {n for entries in stages for n in entries if any(n not in other for other in stages)}
    # A stage that some runs lack is one setting: its kind and its steps.
    each = [{**entries, **{n: s.get(n, NONE) for n in partial}} for entries, s in zip(each, stages, strict=True)]
    all_names = dict.fromkeys(n for entries in each for n in entries)
    names = [n for n in all_names if len({entries.get(n, NONE) for entries in each}) > 1]
    # What one run lacks follows from a setting above it that differs, whose value includes it.
    lacking = {n for n in names if any(n not in entries for entries in each)}
    listed = [n for n in names if n not in lacking or not any(n.startswith(f"{above}.") for above in names)]
    listed.sort(key=lambda n: _place(n, {s for entries in stages for s in entries}))
    return [{n: _value(n, entries) for n in listed} for entries in each]


def _value(path: str, of: Mapping[str, str]) -> str:
    """The value at a path; of a group that has none of its own, the values right below it."""
    if path in of:
        return of[path]
    below = {n.removeprefix(f"{path}."): x for n, x in of.items() if n.startswith(f"{path}.")}
    return ", ".join(x if n.isdigit() else f"{n}={x}" for n, x in below.items() if "." not in n) or NONE


def _place(path: str, stages: set[str]) -> int:
    """The place of a setting in the order of `FIRST`; all that it does not have share the last one."""
    head, _, rest = path.partition(".")
    # The order does not depend on the name of a stage.
    rest = rest if head in stages else path
    return next((i for i, known in enumerate(FIRST) if rest == known or rest.startswith(f"{known}.")), len(FIRST))


OF_THE_MACHINE = ("threads", "trackers", "keep_checkpoints", "slots", "deterministic")
"""Settings that do not make two runs different kinds of run: they change speed, files or the last bits."""
PER_STAGE = ("checkpoint_every", "eval_every", "micro_tokens")
"""The same kind of settings, of every stage."""
LETTERS = "ABCDEFGHIJKL"


What = Literal["accuracy", "reward", "loss"]
"""The figure by which runs are compared. Where nothing judges answers it is the held-out loss, whose values are stored
as negative numbers: so higher is better for all figures."""
SAME_LOSS = 0.01
"""A difference of held-out losses below which two runs count as the same, in nats."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: its last held-out measurement."""

    of: RunOutcome
    stage: StageOutcome
    measured: Measurement

    by_loss: bool = False
    """Whether it is measured by its held-out loss: nothing judges its answers."""

    @property
    def seed(self) -> int:
        return self.of.run.seed


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings but for their seeds."""

    letter: str
    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, str]
    """Value, as text, that this group has for each setting in which the groups differ."""


@dataclass(frozen=True)
class GroupGain:
    """The gain of a group over the first one."""

    group: RunGroup
    over_prompts: Gain
    """The gain over prompts. Each prompt has its mean over the group's seeds."""
    over_seeds: Score | None
    """The difference with an interval over seeds; its `prompts` is the number of differences or seeds. None where
    either group has one seed, or where all seeds give the same: then there is no interval."""
    by_seed: bool
    """Whether `over_seeds` compares runs of the same seed with each other."""
    seeds: tuple[int, int]
    """Numbers of different seeds, of the first group and of this one. Runs of the same seed count once, by their
    mean."""
    word: Literal["better", "worse", "the same", "cannot be told"]


@dataclass(frozen=True)
class RunComparison:
    """Groups of runs, and what each is better by than the first."""

    groups: tuple[RunGroup, ...]
    gains: tuple[GroupGain, ...]
    """Gains of every group but the first."""
    what: What
    prompts: int
    """Held-out prompts that all runs share."""
    notes: tuple[str, ...]
    """Facts that a reader must know before believing the figures."""

    def __repr__(self) -> str:
        gains = "; ".join(f"{g.group.letter}: {g.word}, {g.over_prompts}" for g in self.gains) or "one group"
        return f"RunComparison(by {self.what} over {self.prompts} prompts, against A; {gains})"


def compare_runs(folders: Sequence[str | Path], stage: str | None = None) -> RunComparison:
    """Compare runs by their last held-out measurement, or by that of one stage.

    Raises:
        ConfigError: they cannot be compared; says why and what would make it possible.
    """
    paths = [Path(f) for f in folders]
    if len(paths) < 2:
        raise ConfigError("compare takes two runs or more: posttrain compare RUN RUN ...")
    # One folder by two names: a run equals itself, and would seem to prove something.
    if len({p.resolve() for p in paths}) < len(paths):
        raise ConfigError("a run is given twice; compare it with another one")
    runs = [_compared_run(read_outcome(p), stage) for p in paths]
    _refuse(runs)
    shared = _shared(runs)
    what: What = "reward" if any(r.measured.graded for r in runs) else "accuracy"
    if any(by_loss := [r.by_loss for r in runs]):
        if not all(by_loss):
            figures = [f"{r.of.folder} by {'held-out loss' if r.by_loss else 'what judges answers'}" for r in runs]
            raise ConfigError(f"these runs are measured differently ({'; '.join(figures)}), so nothing can be paired")
        # The mean over rows has to be the mean over tokens, which depends on which rows are shared.
        what, runs = "loss", [_over_shared_rows(r, shared) for r in runs]
    groups = _groups(runs)
    gains = tuple(_gain(groups[0], g, what, shared) for g in groups[1:])
    return RunComparison(groups, gains, what, len(shared), tuple(_notes(runs, shared)))


def _values(run: ComparedRun, what: str) -> Mapping[Hashable, float]:
    """The compared figure of a run for each held-out prompt."""
    return run.measured.right if what == "accuracy" else run.measured.outcomes


def _compared_run(of: RunOutcome, stage: str | None) -> ComparedRun:
    """A run with its last held-out measurement, or that of the named stage.

    It is an evaluation of answers; without one the held-out loss, or the order of held-out pairs.

    Raises:
        ConfigError: there is none.
    """
    chosen = of.last
    if stage is not None:
        by_name = {s.name: s for s in of.stages}
        if stage not in by_name:
            raise ConfigError(f"{of.folder} has taken no step of a stage {stage!r}; {nearest(stage, by_name)}")
        chosen = by_name[stage]
    if chosen is not None and chosen.end is None and chosen.likelihoods:
        return _by_loss(of, chosen)
    if chosen is not None and chosen.end is None and chosen.misordered:
        step, rows = [*chosen.misordered.items()][-1]
        # Misordered is a loss: 1 less it is the share that is right.
        right: dict[Hashable, float] = {k: 1 - x for k, (x, _) in rows.rows.items()}
        score = Score.of([*right.values()])
        return ComparedRun(of, chosen, Measurement(chosen.name, step, score, score, False, right, right))
    if chosen is None or chosen.end is None:
        why = "took no step" if chosen is None else f"{chosen.name} has not been measured on held-out tasks"
        if chosen is not None and isinstance(chosen.stage, RewardModel):
            why = f"{chosen.name} trained a reward model, which answers no held-out task"
        raise ConfigError(f"{of.folder}: {why}, so there is nothing to compare. {_remedy(of, chosen)}")
    if not chosen.end.right:
        raise ConfigError(
            f"{of.folder}: the answers of its held-out evaluation were not recorded or not judged, so no prompt can be"
            " compared with itself. Start it with record_episodes=true"
        )
    return ComparedRun(of, chosen, chosen.end)


def _by_loss(of: RunOutcome, stage: StageOutcome) -> ComparedRun:
    """A run by its last held-out loss."""
    step, last = [*stage.likelihoods.items()][-1]
    unknown = Score(math.nan, math.nan, math.nan, 0)
    # Negative, so that higher is better as for the other figures. Graded (True): a loss is no pass or fail.
    rows: dict[Hashable, float] = {k: -nll / tokens for k, (nll, tokens) in last.rows.items()}
    return ComparedRun(of, stage, Measurement(stage.name, step, unknown, last.score, True, rows, rows), by_loss=True)


def _over_shared_rows(run: ComparedRun, shared: Sequence[Hashable]) -> ComparedRun:
    """The run with other values of its rows: their mean over the shared rows is the mean loss over all tokens."""
    last = [*run.stage.likelihoods.values()][-1]
    row_values = {k: -x for k, x in last.values([str(k) for k in shared]).items()}
    reward = Score.free([*row_values.values()])
    return replace(run, measured=replace(run.measured, right=row_values, outcomes=row_values, reward=reward))


def _remedy(of: RunOutcome, stage: StageOutcome | None) -> str:
    """What to do so that a run has something to compare, for the message of an error."""
    if stage is not None and not of.run.env_of(stage.stage).heldout:
        return "Start it with env.heldout=100"
    if stage is not None and isinstance(stage.stage, RewardModel):
        return f"Its agreement with judgements: {command_line('eval', of.folder)}"
    if stage is not None and not stage.stage.eval:
        return f"Start it with {stage.name}.eval=true"
    if stage is not None and stage.done:
        return "Start it with env.rewards, which judge the answers to held-out prompts"
    return f"Let it go on to its end: {command_line('run', '--resume', of.folder)}"


def _refuse(runs: Sequence[ComparedRun]) -> None:
    """ConfigError where figures of these runs mean different things."""
    first = runs[0]
    for other in runs[1:]:
        # A file counts by its name: copies of one reward may lie at different places. `_notes` says where they do.
        if _rewards(first) != _rewards(other):
            raise ConfigError(
                f"{first.of.folder} and {other.of.folder} are judged by different rewards, so their scores mean"
                " different things. Judge both by the same ones first: posttrain eval RUN env.rewards=..."
            )
    if not _shared(runs):
        names = [f"{r.of.folder}: {r.of.run.env_of(r.stage.stage).name}" for r in runs]
        raise ConfigError(
            f"these runs share no held-out prompt ({', '.join(names)}), so nothing can be paired. Hold the same tasks"
            " out: the same data, env.args and env.heldout; or measure both on one set with posttrain eval RUN env=..."
        )


def _rewards(run: ComparedRun, places: bool = False) -> list[str]:
    """The reward functions of a run with their weights; a file by its name alone, and by its place with `places`."""
    env = run.of.run.env_of(run.stage.stage)
    named = ((r.function if places else r.function.rpartition("/")[2], r.weight) for r in env.rewards)
    return [f"{name} x {weight:g}" for name, weight in named]


def _shared(runs: Sequence[ComparedRun]) -> list[Hashable]:
    """The judged prompts that are in every run, in the order of the first."""
    others = [r.measured.right.keys() for r in runs[1:]]
    return [p for p in runs[0].measured.right if all(p in keys for keys in others)]


def _groups(runs: Sequence[ComparedRun]) -> tuple[RunGroup, ...]:
    """Runs with equal settings together, in the order in which they were given."""
    by_settings: dict[str, list[ComparedRun]] = {}
    # In the order given, so that A is what the user named first.
    settings = [settings_of(r.of.run) for r in runs]
    for run, run_settings in zip(runs, settings, strict=True):
        by_settings.setdefault(repr(sorted(run_settings.items())), []).append(run)
    if len(by_settings) > len(LETTERS):
        raise ConfigError(f"compare takes at most {len(LETTERS)} different settings: {len(by_settings)} were given")
    firsts = [members[0].of.run for members in by_settings.values()]
    differences = differing(firsts, [settings_of(run) for run in firsts])
    return tuple(
        RunGroup(letter, tuple(members), run_settings)
        for letter, members, run_settings in zip(LETTERS, by_settings.values(), differences, strict=False)
    )


def settings_of(run: Run) -> dict[str, str]:
    """The settings that make a kind of run, as text by their paths: without the seed and the settings of the machine.

    Of an algorithm they have its name and its own choices, and not those of its parents.
    """
    out: dict[str, str] = {}
    for path, (_, value) in values(run).items():
        head, last = path.split(".")[0], path.split(".")[-1]
        of_stage = any(s.name == head for s in run.stages)
        if path == "seed" or head in OF_THE_MACHINE or (of_stage and last in PER_STAGE) or ".parent." in path:
            continue
        if ".algorithm." in path and last in ("parent", "paper", "note"):
            continue
        out[path] = f"{value:g}" if isinstance(value, float) else str(value)
    return out


def _gain(first: RunGroup, other: RunGroup, what: str, prompts: Sequence[Hashable]) -> GroupGain:
    """The gain of `other` over `first`, with the word for it."""
    measured = [r.measured for g in (first, other) for r in g.runs]
    low, high = common_scale(measured)
    # A difference of 0.01 nats is taken as 5 % of the scale, which is the bound for "the same" below.
    scale = SAME_LOSS / 0.05 if what == "loss" else 1.0 if what == "accuracy" else high - low
    means = _mean(first, what, prompts), _mean(other, what, prompts)
    over_prompts = Gain.free(*means) if what == "loss" else Gain.of(*means, scale)
    a, b = (_by_seed(g, what, prompts) for g in (first, other))
    seeds = over_seeds(a, b)
    # Both kinds of doubt must be gone: other prompts, and other seeds.
    intervals = [over_prompts, *([seeds] if seeds is not None else [])]
    word = "cannot be told"
    if all(x.low > 0 for x in intervals):
        word = "better"
    elif all(x.high < 0 for x in intervals):
        word = "worse"
    # "The same" needs intervals that lie within 5 % of the scale on both sides, not ones that hold 0.
    elif all(-0.05 * scale < x.low and x.high < 0.05 * scale for x in intervals):
        word = "the same"
    return GroupGain(other, over_prompts, seeds, a.keys() == b.keys() and seeds is not None, (len(a), len(b)), word)


def _mean(group: RunGroup, what: str, prompts: Sequence[Hashable]) -> dict[Hashable, float]:
    """Each prompt with its mean over the group's seeds."""
    # Each seed weighs the same, however many runs were made of it.
    weight = {seed: 1 / sum(r.seed == seed for r in group.runs) for seed in {r.seed for r in group.runs}}
    weights = [weight[r.seed] / len(weight) for r in group.runs]
    return {p: math.fsum(w * _values(r, what)[p] for w, r in zip(weights, group.runs, strict=True)) for p in prompts}


def _by_seed(group: RunGroup, what: str, prompts: Sequence[Hashable]) -> dict[int, float]:
    """The score of each seed: a run that was made twice counts once."""
    scores: dict[int, list[float]] = {}
    for r in group.runs:
        values = _values(r, what)
        scores.setdefault(r.seed, []).append(float(np.mean([values[p] for p in prompts])))
    return {seed: math.fsum(of_seed) / len(of_seed) for seed, of_seed in scores.items()}


def over_seeds(first: Mapping[int, float], other: Mapping[int, float]) -> Score | None:
    """The difference of scores by seed, with Student's interval over seeds.

    Where both groups have the same seeds it is the interval of the paired differences, else Welch's. None where a group
    has one seed, or where all seeds give the same. The interval would be a point then, and claim to know what another
    seed would give.
    """
    if min(len(first), len(other)) < 2:
        return None
    if first.keys() == other.keys():
        # Runs of one seed share what depends on the seed alone, so their differences scatter less.
        d = np.array([other[seed] - first[seed] for seed in first])
        mean, error, freedom = float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d)), len(d) - 1.0
        half = student95(freedom) * error
        # An error below 1e-12 is rounding: all seeds gave the same.
        return Score(mean, mean - half, mean + half, len(d)) if error > 1e-12 else None
    a, b = (np.array([*g.values()]) for g in (first, other))
    mean = float(b.mean() - a.mean())
    parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    error = math.sqrt(sum(parts))
    if error <= 1e-12:
        return None
    # Welch: the variances of the groups need not be equal. Satterthwaite's degrees of freedom.
    denominator = sum(v * v / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
    freedom = sum(parts) ** 2 / denominator
    half = student95(freedom) * error
    return Score(mean, mean - half, mean + half, len(a) + len(b))


def _notes(runs: Sequence[ComparedRun], shared: Sequence[Hashable]) -> list[str]:
    """The facts that a reader must know before believing the figures."""
    out: list[str] = []
    most = max(len(r.measured.right) for r in runs)
    if len(shared) < most:
        out.append(f"only the {len(shared)} held-out prompts that all runs share are compared, of up to {most}")
    for r in runs:
        if not r.of.finished:
            out.append(
                f"{r.of.folder} is not finished: {r.stage.name} took {r.stage.steps} of {r.stage.stage.steps} steps;"
                f" measured at step {r.measured.step}"
            )
        if r.of.run.fault is not None:
            out.append(f"{r.of.folder} has a planted fault ({r.of.run.fault}): its numbers mean nothing")
    if len({repr(_rewards(r, places=True)) for r in runs}) > 1:
        out.append("their reward functions are of one name in files at different places: see that both are the same")
    if len({r.measured.sampling for r in runs}) > 1:
        out.append("their held-out answers were sampled with different settings (see the table)")
    if len({r.stage.name for r in runs}) > 1:
        out.append("they are compared at different stages: " + ", ".join(dict.fromkeys(r.stage.name for r in runs)))
    return out
