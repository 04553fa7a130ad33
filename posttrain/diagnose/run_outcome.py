"""The outcome of a run, read from its folder alone: held-out scores with their steps, and gains paired by prompt. The
run may be finished, running or killed, and may be somebody else's."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.stage import START, Stage, starts
from posttrain.core.gauge import Step
from posttrain.core.measure.heldout_loss import HeldoutLoss
from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.right import Grades, Right, right_of
from posttrain.diagnose.measurement import Measurement, common_grades, outcome_gain, proxy_gain
from posttrain.record import run_reader, step_format
from posttrain.record.checkpoint import newest
from posttrain.record.run_reader import EpisodeFile, RunFile

Curve = tuple[tuple[int, float], ...]
"""(step of the stage, value), in order."""


NOTHING_ORDERED = "its held-out judgements order nothing: all of them say the same"
"""The reason why a reward model has no figure although it was measured at its end."""
LOSSES = ("sft/loss", "preference/loss", "ranking/loss")
"""Gauges of the loss, one for each kind of stage that learns from data."""


@dataclass(frozen=True)
class StageOutcome:
    """The outcome of one stage."""

    stage: Stage
    steps: int
    """Steps taken."""
    done: bool
    """Whether it came to its end."""
    start: Measurement | None
    """Measurement of the weights that the stage started from, on its own held-out tasks."""
    end: Measurement | None
    """The last one made during it or at its end."""
    accuracy: Gain | None
    """From `start` to `end`, over the same prompts."""
    reward: Gain | None
    proxy: Gain | None
    """Gain of what is paid, where the outcome is what is measured and not paid."""
    unpaired: str
    """The reason why there is no gain; '' where there is one."""
    rewards: Curve
    """Mean outcome of each step's samples; empty where the stage does not sample."""
    losses: Curve
    heldout: Curve
    """Held-out accuracy, the first and the last one included; empty where outcomes are grades of which
    the share of right answers says nothing (`Grades.tells`)."""
    heldout_reward: Curve
    greedy: float | None = None
    """Share of right held-out answers where each token is the likeliest one."""
    seconds: float | None = None
    roles: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by role."""
    peaks: Mapping[str, float] = field(default_factory=dict[str, float])
    """Peak bytes by role."""
    updates: int = 0
    """Optimizer steps that its steps took. A step without credit takes none."""
    idle: int = 0
    """Steps that took no optimizer step."""
    agreement: Score | None = None
    """Share of held-out pairs that the stage's scores order as they were judged; None where it reads no judgements."""
    agreement_before: float | None = None
    agreements: Curve = ()
    """The share `agreement` by the steps taken, the first and the last measurement included."""
    reward_stds: Curve = ()
    """Standard deviation of each step's outcomes, where it is recorded."""
    began: str = START
    """Name of the weights it started from."""
    likelihoods: Mapping[int, HeldoutLoss] = field(default_factory=dict[int, HeldoutLoss])
    """Held-out losses by the steps taken, in order; empty where the stage imitates nothing."""
    misordered: Mapping[int, HeldoutLoss] = field(default_factory=dict[int, HeldoutLoss])
    """For a stage that reads judgements, by the steps taken: 0 for a held-out pair that is ordered as judged, else
    1."""

    @property
    def loss(self) -> Gain | None:
        """The gain of the held-out loss, from before the first step to the last measurement; None without both."""
        ends = [*self.likelihoods.values()]
        return ends[0].gain(ends[-1]) if len(ends) > 1 and 0 in self.likelihoods else None

    @property
    def heldout_losses(self) -> Curve:
        """The mean held-out losses by the steps taken."""
        return tuple((i, x.score.mean) for i, x in self.likelihoods.items())

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def graded(self) -> bool:
        """True where outcomes are grades, so that the mean reward leads."""
        return any(m is not None and m.graded for m in (self.start, self.end))

    @property
    def tells(self) -> Right | None:
        """The bound of a right answer, where the share of right answers says something (`Grades.tells`)."""
        both = common_grades(self.start, self.end)
        if both is None:
            # No episodes were recorded, so nothing says how outcomes are to be read. Only the accuracy that the stage
            # itself reported tells whether there is a share of right answers.
            known = self.end is not None and bool(self.end.accuracy.known)
            return Right() if known or not self.graded else None
        return both.right if both.tells else None


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run, stage by stage. A stage that took no step and was not measured is left out."""

    folder: Path
    file: RunFile
    stages: tuple[StageOutcome, ...]

    @property
    def run(self) -> Run:
        return self.file.run

    @property
    def finished(self) -> bool:
        """True where all stages of the run came to their end."""
        return [s.name for s in self.stages if s.done] == [s.name for s in self.run.stages]

    @property
    def last(self) -> StageOutcome | None:
        """The stage that the run's verdict is about: the last one whose weights the run goes on with."""
        # The run does not go on with the weights of a stage that hands nothing on.
        return next((s for s in reversed(self.stages) if s.stage.hands_on), self.stages[-1] if self.stages else None)

    @property
    def drawn(self) -> StageOutcome | None:
        """The stage whose curve is drawn: the last one that learns from reward, else the last one."""
        used = [s for s in self.stages if s.stage.hands_on] or list(self.stages)
        return next((s for s in reversed(used) if isinstance(s.stage, Reinforce)), used[-1] if used else None)


def read_outcome(folder: Path | str) -> RunOutcome:
    """Read a run folder.

    Raises:
        RunFolderError: it is no run folder, or a file in it is damaged.
    """
    folder = Path(folder)
    file = run_reader.run_file(folder)
    steps, evaluations = run_reader.steps(folder), [f for f in run_reader.episode_files(folder) if f.kind == "eval"]
    state = _state(folder)
    reading = _Reading(folder, file.run, evaluations)
    stages = [
        _stage(file.run, stage, [s for s in steps if s.stage == stage.name], reading, state.get(stage.name, {}))
        for stage in file.run.stages
        # A stage counts as soon as it took a step or was measured. Later ones of a run that is cut are not there.
        if any(s.stage == stage.name for s in steps) or any(f.stage == stage.name for f in evaluations)
    ]
    return RunOutcome(folder, file, tuple(stages))


def _state(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns what the newest checkpoint stores of each stage: the result of one that ended, else its progress."""
    if (checkpoint := newest(folder)) is None:
        return {}
    with run_reader.damage_is_named(f"{checkpoint.folder}/state.json"):
        state = checkpoint.state
        # Results are of stages that have ended. Of the one that was running there is only its progress.
        by_stage: dict[str, Mapping[str, Any]] = {r["name"]: {**r, "done": True} for r in state["results"]}
        if (running := state.get("running")) is not None:
            stage = run_reader.run_file(folder).run.stages[state["stage"]]
            by_stage[stage.name] = running
    return by_stage


def _stage(run: Run, stage: Stage, steps: Sequence[Step], reading: _Reading, known: Mapping[str, Any]) -> StageOutcome:
    """The outcome of one stage.

    Args:
        steps: its recorded steps.
        known: what the newest checkpoint stores of it (`_state`).
    """
    done = bool(known.get("done"))
    taken = max((s.index for s in steps), default=0)
    start = reading.start(stage)
    # While a stage is not done, its last measurement stays one of the step at which it was made.
    end = _at_the_end(stage, steps, start, reading.end(stage)) if done else reading.end(stage)
    with run_reader.damage_is_named("the state of the newest checkpoint"):
        # Without recorded episodes the figures of the checkpoint remain, and no prompt can be paired. The accuracy is
        # None where grades tell no share of right answers.
        if end is None and done and known.get("reward"):
            end = Measurement(
                stage.name,
                int(known["steps"]),
                _score(known["accuracy"] or [math.nan] * 3),
                _score(known["reward"]),
                known["graded"],
            )
        greedy = known.get("greedy")
        seconds = known.get("seconds")
        roles = {str(k): float(v) for k, v in known.get("roles", {}).items()}
        peaks = {str(k): float(v) for k, v in known.get("peaks", {}).items()}
        agreement = _score(known["agreement"]) if known.get("agreement") else None
        agreement_before = None if known.get("agreement_before") is None else float(known["agreement_before"])
        greedy = None if greedy is None else float(greedy)
        seconds = None if seconds is None else float(seconds)
    # Measurements before the first step and after the last are in no step's line, so they are added to the curve.
    end_points = {0: agreement_before, taken: agreement and agreement.mean}
    agreements = dict(_curve(steps, "heldout/agreement")) | {i: x for i, x in end_points.items() if x is not None}
    # After a kill the losses may be of steps that the record has lost.
    losses = {i: x for i, x in run_reader.losses(reading.folder, stage.name).items() if i <= taken}
    unpaired = _unpaired(run, stage, taken, start, end)
    # A reward model was measured and has no agreement: its held-out judgements are all alike.
    if done and stage.eval and not stage.leaves_policy and run.env_of(stage).heldout and agreement is None:
        unpaired = NOTHING_ORDERED
    pair = (start, end) if start is not None and end is not None and not unpaired else None
    # Where the accuracy says nothing of the outcomes (`Grades.tells`), it has no curve.
    grades = common_grades(start, end)
    heldout = _with_ends(_curve(steps, "eval/accuracy"), start, end, "accuracy")
    return StageOutcome(
        stage=stage,
        steps=taken,
        done=done,
        start=start,
        end=end,
        accuracy=Gain.of(pair[0].right, pair[1].right) if pair else None,
        reward=outcome_gain(*pair) if pair else None,
        proxy=proxy_gain(*pair) if pair else None,
        unpaired=unpaired,
        rewards=_curve(steps, "rollout/reward"),
        losses=next((c for n in LOSSES if (c := _curve(steps, n))), ()),
        heldout=heldout if grades is None or grades.tells else (),
        heldout_reward=_with_ends(_curve(steps, "eval/reward"), start, end, "reward"),
        greedy=greedy,
        seconds=seconds,
        roles=roles,
        peaks=peaks,
        updates=_updates(steps),
        idle=sum("optim/steps" in s.gauges and not s.gauges["optim/steps"].sum for s in steps),
        agreement=agreement,
        agreement_before=agreement_before,
        agreements=tuple(sorted(agreements.items())),
        reward_stds=_curve(steps, "rollout/reward_std"),
        began=starts(run.stages, stage),
        # A stage that reads judgements writes 0 or 1 of each pair in the same place where others write a loss.
        likelihoods={} if stage.judged else losses,
        misordered=losses if stage.judged else {},
    )


def _updates(steps: Sequence[Step]) -> int:
    """The optimizer steps that these steps took."""
    counts = (s.gauges["optim/steps"].sum for s in steps if "optim/steps" in s.gauges)
    return sum(int(x) for x in counts if math.isfinite(x))


def _at_the_end(
    stage: Stage, steps: Sequence[Step], start: Measurement | None, end: Measurement | None
) -> Measurement | None:
    """The measurement of the weights at the end of a stage.

    Weights that no step changed since the last measurement are not evaluated again. So that measurement counts as one
    of the stage's last step.
    """
    last, taken = end or start, max((s.index for s in steps), default=0)
    since = [s for s in steps if s.index > (end.step if end is not None else 0)]
    # A line without a count of updates does not show that nothing moved.
    if last is None or not stage.eval or not since or _updates(since) or "optim/steps" not in since[-1].gauges:
        return end
    return replace(last, stage=stage.name, step=taken)


def _score(measured: Sequence[float]) -> Score:
    """A score from (mean, low end, high end) of a checkpoint, which does not hold the number of prompts."""
    mean, low, high = (float(x) for x in measured)
    return Score(mean, low, high, 0)


def _curve(steps: Sequence[Step], name: str) -> Curve:
    """The finite means of a gauge by step."""
    counted = [(s.index, s.gauges[name].mean) for s in steps if name in s.gauges and s.gauges[name].count]
    return tuple((i, x) for i, x in counted if math.isfinite(x))


def _with_ends(middle: Curve, start: Measurement | None, end: Measurement | None, what: str) -> Curve:
    """The curve with the evaluations before the first step and after the last one, which no step's line holds."""
    points = dict(middle)
    if start is not None:
        points[0] = getattr(start, what).mean
    if end is not None:
        points[end.step] = getattr(end, what).mean
    return tuple(sorted((i, x) for i, x in points.items() if math.isfinite(x)))


def _unpaired(run: Run, stage: Stage, taken: int, start: Measurement | None, end: Measurement | None) -> str:
    """Returns the reason why the stage's end cannot be compared with its start, prompt by prompt; '' where it can."""
    env = run.env_of(stage)
    # In the order in which a user must remove them: no tasks, no measurement, no record; then what start or end lacks.
    if not env.heldout:
        return "no task is held out"
    if not stage.eval:
        return "the stage was not measured"
    if not run.record_episodes and (start is None or not start.right or end is None or not end.right):
        return "the answers were not recorded, so no prompt can be compared with itself"
    if end is None or end.step == 0:
        return f"nothing was measured after its start; it took {taken} of {stage.steps} steps"
    if start is None:
        return f"the weights it started from ({starts(run.stages, stage)}) were not measured on its held-out tasks"
    if not start.right or not end.right:
        return "no held-out answer could be judged" if not end.right else "no answer before it could be judged"
    if start.sampling != end.sampling:
        return "its start and its end were sampled with different settings"
    if not start.right.keys() & end.right.keys():
        return "its start and its end share no judged prompt"
    return ""


class _Reading:
    """The evaluations of a run, each file read once."""

    def __init__(self, folder: Path, run: Run, files: Sequence[EpisodeFile]) -> None:
        self.folder, self.run = folder, run
        self.files = {(f.stage, f.index): f for f in files if f.path.is_file()}
        self._read: dict[tuple[str, int], Measurement] = {}

    def start(self, stage: Stage) -> Measurement | None:
        """Returns a measurement of the weights that a stage started from; None if there is none.

        It was made before the stage, at the end of the stage whose weights they are, or before another stage that
        started from the same weights.
        """
        # Its own measurement, else the end of the stage that it goes on from, else another stage's start.
        if (stage.name, 0) in self.files:
            return self._at(stage.name, 0)
        began = starts(self.run.stages, stage)
        # Only under the same tasks and rewards: else the two figures are of different things.
        same = [s for s in self.run.stages if self.run.env_of(s) == self.run.env_of(stage) and s.name != stage.name]
        for other in same:
            if other.name == began and (other_end := self.end(other)) is not None:
                return other_end
        for other in same:
            if starts(self.run.stages, other) == began and (other.name, 0) in self.files:
                return self._at(other.name, 0)
        return None

    def end(self, stage: Stage) -> Measurement | None:
        """The last evaluation of a stage after its first step."""
        after = [index for name, index in self.files if name == stage.name and index > 0]
        return self._at(stage.name, max(after)) if after else None

    def _at(self, stage: str, index: int) -> Measurement:
        if (stage, index) not in self._read:
            self._read[stage, index] = measurement(self.files[stage, index])
        return self._read[stage, index]


def measurement(file: EpisodeFile) -> Measurement:
    """Read one evaluation: its tasks, the settings of its sampling, and its verdicts. Tokens are not read."""
    columns = step_format.read_columns(file.path)
    with run_reader.damage_is_named(str(file.path)):
        meta: dict[str, list[dict[str, Any]]] = json.loads(columns["meta"].tobytes())
        # Prompt, answer and extra columns together, as `Task.asked`: equal rows are one prompt of the interval.
        keys = [json.dumps([t["prompt"], t["answer"], t["info"]], sort_keys=True) for t in meta["tasks"]]
        outcomes_of: dict[Hashable, list[float]] = {}
        proxies_of: dict[Hashable, list[float]] = {}
        graded = list[tuple[float | None, Right]]()
        for episode in meta["episodes"]:
            judged = [step_format.verdict_from_plain(v) for v in episode["verdicts"]]
            # `figure` is stored where something is measured and not paid. Then it is the outcome, and the reward is the
            # proxy.
            outcome = episode.get("figure", episode["reward"])
            graded.append((outcome, right_of(judged, episode.get("right_at"), "figure" in episode)))
            if outcome is not None:
                outcomes_of.setdefault(keys[episode["task"]], []).append(float(outcome))
            if "figure" in episode and episode["reward"] is not None:
                proxies_of.setdefault(keys[episode["task"]], []).append(float(episode["reward"]))
        samplings = {json.dumps(meta["samplings"][i], sort_keys=True) for e in meta["episodes"] for i in e["samplings"]}
    means = {key: float(np.mean(values)) for key, values in outcomes_of.items()}
    grades = Grades.each(graded)
    # Only after all episodes are read: one rule of what is right holds for all of them.
    right = {key: grades.right.share(values) for key, values in outcomes_of.items()}
    return Measurement(
        file.stage,
        file.index,
        Score.of(list(right.values()) if grades.tells else []),
        Score.of(list(means.values()), *grades.scale),
        grades.graded,
        right,
        means,
        grades.scale,
        "\n".join(sorted(samplings)),
        {key: float(np.mean(values)) for key, values in proxies_of.items()},
        grades,
    )
