"""Judgements of the data: which a step gets, which fit the context, their minibatch, how well scores order them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.config.stages.stage import LearnsRows
from posttrain.core import abilities, seeds
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating, StepLabels
from posttrain.core.measure.answer_steps import joined
from posttrain.core.measure.heldout_loss import Rows
from posttrain.core.measure.interval import Score
from posttrain.core.ports import Environment, PairRenderer, TaskSource
from posttrain.core.streams import MARGIN, SIDE, WEIGHT
from posttrain.core.types import Segment, Task
from posttrain.role.learning.demonstrations import demonstration
from posttrain.role.prompt_order import Prompts
from posttrain.system.errors import DataError, InvariantError

COMPARED: tuple[Kind, ...] = ("pair", "label")
"""The kinds of judgement with which held-out scores are compared. Where the data has both, the first one is taken."""
HELDOUT = 20_261_123
"""Seed of held-out judgements. It is not the run's seed, so that runs of different seeds are measured on the same."""


def walk(source: TaskSource, *, seed: int, stage: str, first: int, count: int) -> list[tuple[Task, int]]:
    """`count` tasks with their visit numbers, from place `first` of the order. They depend on the arguments alone, so a
    resumed run needs no state."""
    prompts = Prompts(source, seeds.torch_seed(seed, f"judgements/{stage}"), cursor=first)
    return [next(prompts) for _ in range(count)]


def drawn(
    environment: Environment, tasks: Sequence[tuple[Task, int]], kind: Kind, *, seed: int, stage: str
) -> list[Judgement]:
    """One judgement about each task. Its random numbers depend on the seed, the stage, the task and the visit."""
    offered = abilities.judgements(environment)
    return [
        offered.draw(task, kind, seeds.generator(seed, f"judgement/{stage}/{task.id}", visit)) for task, visit in tasks
    ]


def completions(judgement: Judgement) -> tuple[tuple[str, int], ...]:
    """Each completion of a judgement with its side: 1 chosen or good, 0 rejected or bad, and in a ranking the number of
    completions that it was preferred to."""
    match judgement:
        case Pair(chosen=chosen, rejected=rejected):
            return (chosen, 1), (rejected, 0)
        case Label(completion=completion, good=good):
            return ((completion, int(good)),)
        case Ranking(completions=texts):
            return tuple((text, len(texts) - 1 - i) for i, text in enumerate(texts))
        case Rating(completion=completion):
            return ((completion, 1),)
        case StepLabels(steps=steps, labels=labels, separator=separator):
            return ((joined(steps, separator)[0], int(min(labels) > 0)),)
        case _:
            raise InvariantError(f"a {type(judgement).__name__} is not a preference between completions")


def segments(judgement: Judgement, renderer: PairRenderer, context: int) -> list[Segment]:
    """The completions of a judgement as segments, each after its prompt, which is masked. DataError, with the row's
    place, where one is empty or longer than the context."""
    try:
        return [
            demonstration(renderer, judgement.task, judgement.task.prompt, text, context)
            for text, _ in completions(judgement)
        ]
    except DataError as error:
        raise judgement.told(str(error)) if judgement.place else error from error


def longest(judgement: Judgement, renderer: PairRenderer) -> int:
    """Tokens of the judgement's longest completion together with the prompt."""
    task = judgement.task
    return max(
        sum(len(ids) for ids in renderer.pair(task.prompt, text, task.id, task.tools))
        for text, _ in completions(judgement)
    )


def misfit(judgement: Judgement, renderer: PairRenderer, context: int) -> str:
    """Says what is wrong with a judgement that does not fit into the context, with its place; '' where it fits."""
    tokens = longest(judgement, renderer)
    return "" if tokens <= context else str(judgement.told(f"a completion with its prompt has {tokens} tokens"))


@dataclass(frozen=True)
class FittingTasks:
    """A finite source without the tasks whose judgements do not fit into the context."""

    tasks: tuple[Task, ...]
    left_out: int
    """Tasks that do not fit, held-out ones too."""
    asked: int
    """All tasks, held-out ones too."""
    first: str
    """A message about the first judgement that does not fit; '' where all fit."""

    @property
    def count(self) -> int | None:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        return self.tasks[index]

    @staticmethod
    def of(environment: Environment, kind: Kind, renderer: PairRenderer, context: int) -> FittingTasks | None:
        """The training tasks that fit, or None where they are generated without end."""
        source, heldout = environment.train, environment.heldout
        # Tasks without end cannot all be looked at. There a judgement that does not fit raises an error in its step.
        if source.count is None:
            return None
        train = [source.task(i) for i in range(source.count)]
        every = abilities.judgements(environment).every or (lambda task, kind: ())
        # A message for each task about its first judgement that does not fit; '' where all fit.
        misfits: list[str] = []
        for task in (*train, *heldout):
            # Each visit draws anew, so a draw that fits does not show that the next one does.
            judged = (*drawn(environment, [(task, 0)], kind, seed=0, stage=""), *every(task, kind))
            misfits.append(next(filter(None, (misfit(j, renderer, context) for j in judged)), ""))
        fit = tuple(task for task, wrong in zip(train, misfits[: len(train)], strict=True) if not wrong)
        return FittingTasks(fit, sum(map(bool, misfits)), len(misfits), next(filter(None, misfits), ""))


def fitting(stage: LearnsRows, judged: list[Judgement], renderer: PairRenderer, context: int) -> list[Judgement]:
    """The judgements without those that do not fit into the context, if the stage leaves such judgements out."""
    return [j for j in judged if not (stage.leaves_out_long and misfit(j, renderer, context))]


def training_tasks(
    stage: LearnsRows,
    environment: Environment,
    kind: Kind,
    renderer: PairRenderer,
    context: int,
    say: Callable[[str], None],
) -> TaskSource:
    """The training tasks whose judgements fit into the context; DataError where none does."""
    if not stage.leaves_out_long:  # checked before the run began
        return environment.train
    fitting_tasks = FittingTasks.of(environment, kind, renderer, context)
    if fitting_tasks is None:
        return environment.train
    if not fitting_tasks.tasks:
        raise DataError(f"{stage.name}: no judgement fits into {context} tokens. {fitting_tasks.first}")
    if fitting_tasks.left_out:
        say(
            f"{stage.name}: {fitting_tasks.left_out} of {fitting_tasks.asked} judgements are left out, because they"
            f" do not fit into {context} tokens, such as: {fitting_tasks.first}"
        )
    return fitting_tasks


def batch_of(judgements: Sequence[Judgement], renderer: PairRenderer, context: int) -> Batch:
    """A minibatch in which each judgement is a unit, its completions in order.

    Streams, the same for all tokens of a completion: SIDE, WEIGHT (the judgement's own, not normalised), and MARGIN
    where all judgements are pairs with a margin.
    """
    parts = [segments(j, renderer, context) for j in judgements]
    sides = [side for j in judgements for _, side in completions(j)]
    weights = np.array([j.weight if isinstance(j, Pair) else 1.0 for j in judgements])
    # [E]: one entry a completion, judgement by judgement. For a stream [M] the entry of a completion is repeated once
    # for each of its spoken tokens.
    weight_E = np.repeat(weights, [len(p) for p in parts])
    flat = [s for p in parts for s in p]
    spoken = [s.spoken for s in flat]
    streams = {SIDE: np.repeat(np.array(sides, np.int32), spoken), WEIGHT: np.repeat(weight_E, spoken)}
    margins = [j.margin for j in judgements if isinstance(j, Pair) and j.margin is not None]
    # A stream needs a number for every token. So if one judgement has no margin, the whole stream is left out. For an
    # algorithm that reads margins, the stage then raises an error that names the row.
    if len(margins) == len(judgements):
        streams[MARGIN] = np.repeat(np.repeat(np.array(margins, np.float64), [len(p) for p in parts]), spoken)
    unit_E = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts])
    return Batch.of(flat, unit_E=unit_E, streams=streams)


def heldout_judgements(environment: Environment) -> list[Judgement]:
    """One judgement about each held-out task, the same in every evaluation and every run: pairs, else labelled
    completions; none where the environment gives neither."""
    offered = abilities.judgements(environment)
    kind: Kind | None = next((k for k in COMPARED if k in offered.kinds), None)
    if kind is None:
        return []
    return [
        offered.draw(task, kind, seeds.generator(HELDOUT, f"judgement/{task.id}", 0)) for task in environment.heldout
    ]


@dataclass(frozen=True)
class AgreementReport:
    """The agreement of scores with held-out pairs as they were judged. Each pair counts once; a tie counts half."""

    accuracy: Score
    margin: float
    """Mean score of the chosen completion minus that of the rejected one."""
    rows: Rows = field(default_factory=dict[str, tuple[float, float]])
    """By the id of the unit's task: (share of its pairs that are not ordered as judged, 1)."""

    @staticmethod
    def of(score: np.ndarray, worth: np.ndarray, unit: np.ndarray, ids: Sequence[str] = ()) -> AgreementReport | None:
        """The share of pairs inside units that the scores order as their worth does. None where no completion is better
        than another one of its unit.

        Args:
            score, worth: of each completion.
            unit: the unit of each completion; -1: it is compared with none.
            ids: names of the units, where they have names.
        """
        if not np.all(np.isfinite(score)):
            not_finite = int((~np.isfinite(score)).sum())
            raise InvariantError(f"{not_finite} of {len(score)} scores of held-out completions are not finite")
        shares, gaps = dict[int, float](), list[float]()
        for u in np.unique(unit[unit >= 0]).tolist():
            members = np.flatnonzero(unit == u)
            # All (better, worse) pairs of the unit: one pair, or all pairs of a ranking, which together count as one.
            better, worse = np.nonzero(worth[members][:, None] > worth[members][None])
            if len(better):
                gap = score[members][better] - score[members][worse]
                shares[u] = float(((gap > 0) + (gap == 0) / 2).mean())
                gaps.append(float(gap.mean()))
        rows = {ids[u]: (1 - x, 1.0) for u, x in shares.items()} if ids else {}
        return AgreementReport(Score.of([*shares.values()]), float(np.mean(gaps)), rows) if shares else None

    @staticmethod
    def of_labels(score_E: np.ndarray, good_E: np.ndarray) -> AgreementReport | None:
        """From the scores of labelled completions: for each good one, the share of bad ones with a lower score. None
        where all have the same label."""
        good, bad = score_E[good_E], score_E[~good_E]
        if not np.all(np.isfinite(score_E)):
            raise InvariantError(f"{int((~np.isfinite(score_E)).sum())} held-out completions have no finite score")
        if not len(good) or not len(bad):
            return None
        # A tie counts 1/2. The mean over all is the area under the ROC curve.
        above = (good[:, None] > bad).mean(1) + 0.5 * (good[:, None] == bad).mean(1)
        return AgreementReport(Score.of(above), float(good.mean() - bad.mean()))

    def gauges(self) -> Gauges:
        n = self.accuracy.prompts
        return {"heldout/agreement": self.accuracy.gauge(), "heldout/margin": Gauge(self.margin * n if n else 0.0, n)}
