"""Compare algorithms on a run's recorded batches: the gradient that each gives on the same samples.

The episodes of a step are read, grouped, scored, credited, packed and differentiated exactly as in the run. There is no
optimizer step; the gradients are compared instead. Algorithms that the record cannot evaluate are listed with the
reason. The run folder is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, standing, steered
from posttrain.algorithm.credit.step_credit import credit_step, without_credit
from posttrain.algorithm.loss.mismatch_correction import effective_share
from posttrain.build.request.algorithm_file import reward_algorithm
from posttrain.build.request.own_pieces import own_classes
from posttrain.build.request.trust_prompt import STAGES, admitted, to_stderr
from posttrain.build.request.user_objects import given_notes
from posttrain.core.gauge import Gauges
from posttrain.core.scored import Credit, Scored, ScoredGroup
from posttrain.core.types import Episode
from posttrain.evaluation.ablation.recorded_gradients import FrozenLearner, Gradient, cosine
from posttrain.evaluation.ablation.recorded_step import RecordedStep, choose_stage, rebuild, recorded_step
from posttrain.evaluation.ablation.replayable_algorithms import RecordedFacts
from posttrain.ladder.algorithm import CHOICES, Algorithm
from posttrain.ladder.policy_rows import LADDER
from posttrain.record import run_reader
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.role.pack import Minibatch, pack
from posttrain.role.score import score
from posttrain.system.errors import ConfigError, PosttrainError

Say = Callable[[str], None]


@dataclass(frozen=True)
class AblationRow:
    """One algorithm on one recorded step. Shares are in [0, 1]; a mean over nothing is NaN."""

    name: str
    cosine: float
    """Cosine of its gradient with that of the run's own algorithm, over the policy's parameters."""
    norm: float
    """Gradient norm before clipping, over all parameters the optimizer trains."""
    ratio: float
    """`norm` divided by that of the run's own algorithm."""
    silent: float
    """Share of groups without any credit; groups that a filter rejects count too."""
    clipped: float
    """Share of tokens in the loss that are clipped by the trust region."""
    effective: float
    """Effective sample size / sample size of the correction's factors; without a correction, of the ratios. NaN where
    there are neither."""
    credit: float
    """Mean |credit| per token."""
    solved: float
    """Mean credit per token of solved responses (`env.right`)."""
    unsolved: float
    """Mean credit per token of the other responses."""
    tokens: int
    """Tokens for whose log-prob the loss has a nonzero gradient."""
    note: str = ""
    """How this evaluation differs from a run of the algorithm itself."""


@dataclass(frozen=True)
class Ablation:
    """All algorithms on one recorded step."""

    folder: Path
    stage: str
    step: int
    own: str
    """Name of the run's own algorithm, which is the first row."""
    weights: str
    """Name of the weights at which the step was evaluated."""
    behind: int | None
    """Steps by which these weights are older than those the step began with. 0: the same; negative: newer; None: they
    are of another stage."""
    logp_gap: float
    """Mean |log-prob of these weights - of the sampler| per token. It is rounding where these weights sampled."""
    groups: int
    episodes: int
    tokens: int
    minibatches: int
    """Optimizer steps that the run took in this step; here all its groups are one minibatch."""
    recorded_norm: float | None
    """Gradient norm that the run recorded; None where it took several optimizer steps or none."""
    credit_gap: float
    """Largest |credit - recorded credit| of the run's own algorithm."""
    halves: float
    """Cosine of the own algorithm's gradients on two halves of the groups: the effect of sampling noise alone."""
    rows: tuple[AblationRow, ...]
    refused: tuple[tuple[str, str], ...]
    """(algorithm, why this record cannot evaluate it)."""


def ablate(
    folder: str | Path,
    against: Sequence[str] = (),
    *,
    stage: str | None = None,
    steps: Sequence[int] = (),
    checkpoint: str | None = None,
    device: str | None = None,
    say: Say | None = None,
    trust: bool = False,
) -> tuple[Ablation, ...]:
    """Evaluate algorithms on recorded steps of a run; one `Ablation` per step. The run folder is only read.

    Args:
        folder: a run folder, finished or being written.
        against: names of algorithms on the ladder, or `path.py:NAME` of your own; empty: the whole ladder.
        stage: a reinforcement stage; may be left out where there is only one.
        steps: recorded steps; empty: the last one whose starting weights are in the folder.
        checkpoint: weights to evaluate at instead of the nearest older ones: a checkpoint's name, `last`, `best`, or a
            kept name.
        device: used instead of the run's `model.device`.
        say: called with lines about the progress.
        trust: allow what models and references of a folder made by somebody else ask for.

    Raises:
        ConfigError: an unknown algorithm, stage or step.
        RunFolderError: no such run, episodes or weights.
    """
    say = say or (lambda line: None)
    chosen = [reward_algorithm(name) for name in dict.fromkeys(against)] or list(LADDER.values())
    folder = Path(folder)
    file = run_reader.run_file(folder)
    run = admitted(folder, parts=("model", STAGES), allow=trust)
    for line in given_notes(folder, RuntimeObjects(pieces=own_classes(run))):
        to_stderr(line)
    run = run if device is None else replace(run, model=replace(run.model, device=device))
    reinforce = choose_stage(folder, run, stage)
    # All steps are read before a model is built, so that a wrong number costs nothing.
    recorded = [recorded_step(folder, run, reinforce, i, checkpoint) for i in dict.fromkeys(steps or (None,))]
    frozen = FrozenLearner(folder, run, file.facts, say)
    return tuple(_Step(folder, frozen, r, say).all(chosen, named=bool(against)) for r in recorded)


class _Step:
    """Evaluates algorithms on one recorded step."""

    def __init__(self, folder: Path, frozen: FrozenLearner, recorded: RecordedStep, say: Say) -> None:
        self.folder, self.frozen, self.recorded, self.say = folder, frozen, recorded, say
        self.stage = recorded.stage
        memory = recorded.weights.memory
        self.memory = AdaptiveState(**memory) if memory else AdaptiveState()
        # The checkpoint's adaptive state is that before the step only where the checkpoint is of the step before it.
        self.remembered = memory is not None and recorded.behind == 0
        # A coefficient that is steered during a run has the value that it had in this step, not the configured one.
        own = steered(self.stage.algorithm, self.memory)
        self.warming = own.learns_values is not None and recorded.index <= own.learns_values.warmup
        # In a value warm-up the run's own gradient moved values alone.
        self.own = standing(own) if self.warming else own
        self.facts = RecordedFacts.of(recorded, self.own, self.remembered)

    def all(self, chosen: Sequence[Algorithm], *, named: bool) -> Ablation:
        """The run's own algorithm and the chosen ones on this step. `named`: they were named by the user."""
        r, own = self.recorded, self.own
        self.say(f"{r.stage.name} step {r.index}: {len(r.records)} episodes, weights {r.weights.name}")
        self.frozen.load(r)
        if reason := self.facts.lacks(own):
            raise ConfigError(
                f"{self.folder}: the run's own algorithm {own.name} cannot be evaluated on step {r.index}: {reason}"
            )
        own_row, gradient, credit, seen = self._evaluate(own, None)
        rows, refused = [own_row], list[tuple[str, str]]()
        # The run's own algorithm is the first row already. It gets a second row only where the user named it.
        others = [a for a in chosen if named or not _same(a, self.stage.algorithm)]
        for i, a in enumerate(others):
            self.say(f"{r.stage.name} step {r.index}: {a.name} ({i + 1} of {len(others)})")
            reason = self.facts.lacks(a)
            if not reason:
                # A record that lacks something of one algorithm says nothing about the others.
                try:
                    rows.append(self._evaluate(a, gradient)[0])
                except PosttrainError as error:
                    reason = str(error)
            if reason:
                refused.append((a.name, reason))
        line = r.line.gauges if r.line is not None else {}
        # Only with a single optimizer step is the recorded norm that of this gradient.
        once = "optim/grad_norm" in line and self.stage.optimizer_steps == 1
        episodes = [e.episode for g in credit.groups for e in g.episodes]
        gap = seen.get("mismatch/logp_gap")
        return Ablation(
            folder=self.folder,
            stage=r.stage.name,
            step=r.index,
            own=own.name,
            weights=r.weights.name,
            behind=r.behind,
            logp_gap=gap.mean if gap else math.nan,
            groups=len(credit.groups),
            episodes=len(episodes),
            tokens=sum(e.spoken for e in episodes),
            minibatches=self.stage.optimizer_steps,
            recorded_norm=line["optim/grad_norm"].mean if once else None,
            credit_gap=_credit_gap(credit, r),
            halves=self._halves(credit),
            rows=tuple(rows),
            refused=tuple(refused),
        )

    # --- one algorithm ------------------------------------------------------------------------------------------------

    def _evaluate(self, a: Algorithm, own: Gradient | None) -> tuple[AblationRow, Gradient, Credit, Gauges]:
        """One algorithm on this step, with what its row was made of.

        Args:
            own: the gradient of the run's own algorithm; None for that algorithm itself.
        """
        credit, total = self._credit(a)
        gradient, seen = Gradient({}, {}, 0.0, 0), Gauges()
        # One minibatch of all groups: how the run cut them does not enter.
        for minibatch in self._pack(credit, a, minibatches=1):
            gradient, seen = self._differentiate(minibatch, a)
        norm = gradient.norm
        # A gradient of 0 has no direction, so it has no cosine with itself either.
        cosine_with_own, norm_ratio = (1.0 if norm else math.nan), 1.0
        if own is not None:
            cosine_with_own = cosine(gradient, own)
            norm_ratio = norm / own.norm if own.norm else math.nan
        kept = [e for g in credit.groups for e in g.episodes if not e.dropped]
        token_credit = [(np.concatenate([np.zeros(0), *e.advantage]), e.episode.solved) for e in kept]
        # A group is silent where no episode of it has credit, as in the run's own gauge.
        with_credit = sum(
            any(np.any(x != 0) for e in g.episodes if not e.dropped for x in e.advantage) for g in credit.groups
        )
        row = AblationRow(
            name=a.name,
            cosine=cosine_with_own,
            norm=norm,
            ratio=norm_ratio,
            # Groups that the algorithm's filter would turn away are silent too.
            silent=1 - with_credit / total if total else math.nan,
            clipped=sum(seen[n].sum for n in _CLIPS) / seen[_CLIPS[0]].count if seen else math.nan,
            effective=_effective(a, seen),
            credit=_mean([np.abs(x) for x, _ in token_credit]),
            solved=_mean([x for x, right in token_credit if right]),
            unsolved=_mean([x for x, right in token_credit if not right]),
            tokens=gradient.tokens,
            note=self._note(a, credit, total),
        )
        return row, gradient, credit, seen

    def _credit(self, a: Algorithm) -> tuple[Credit, int]:
        """Credit of the step, and how many groups there were before the algorithm's filter."""
        groups = rebuild(self.recorded.records, shown=a.shown is not None, top=a.stores_top)
        passed = [g for g in groups if g.mixed] if a.filter == "mixed" else groups
        scored = score(passed, a, self.frozen.learner, self.frozen.reference(self.recorded, a), optimizer_steps=1)
        ema, emas = self._ema(a)
        credit = credit_step(a, scored, max_tokens=self.stage.sampling.max_tokens, ema=ema, emas=emas)
        return (without_credit(credit) if self._warming(a) else credit), len(groups)

    def _warming(self, a: Algorithm) -> bool:
        """True where `a` is the run's own algorithm and only its values were trained in this step (warm-up)."""
        return a is self.own and self.warming

    def _ema(self, a: Algorithm) -> tuple[float, Mapping[str, float]]:
        """The moving baselines before this step: of all tasks, and of each source.

        They are from the checkpoint, or recomputed from all earlier recorded steps.
        """
        if not a.baseline.moving or (a is self.own and self.remembered):
            return self.memory.ema, self.memory.emas
        # A moving baseline is replayed from the first step on, because each step moved it.
        ema, emas = 0.0, dict[str, float]()
        for i in range(1, self.recorded.index):
            groups = rebuild(run_reader.episodes(self.folder, self.stage.name, i), shown=a.shown is not None, top=0)
            unscored = [ScoredGroup(g, tuple(Scored(e) for e in g.judged)) for g in groups if g.judged]
            credit = credit_step(a, unscored, max_tokens=self.stage.sampling.max_tokens, ema=ema, emas=emas)
            ema, emas = credit.ema, dict(credit.emas)
        return ema, emas

    def _pack(self, credit: Credit, a: Algorithm, minibatches: int) -> Sequence[Minibatch]:
        """The step's groups, packed into this number of minibatches."""
        # Settings need a multiple of `minibatches` for `prompts`, which packing does not read.
        r, one_epoch = self.recorded, replace(self.stage, prompts=minibatches, minibatches=minibatches, epochs=1)
        version = r.version if r.weights.version is None else r.weights.version
        return list(pack(credit, a, one_epoch, seed=r.run.seed, step=r.index, version=version))

    def _differentiate(self, minibatch: Minibatch, a: Algorithm) -> tuple[Gradient, Gauges]:
        """The gradient and the gauges of a minibatch."""
        # No token of the minibatch can give a gradient.
        if minibatch.batch is None:
            return Gradient({}, {}, 0.0, 0), {}
        return self.frozen.gradient(minibatch.batch, a, self.stage.micro_tokens, self._warming(a))

    def _halves(self, credit: Credit) -> float:
        """Cosine of the own algorithm's gradients on two halves of the groups; NaN where one of them is zero."""
        # A split of the groups: what differs is the sample, and not the algorithm.
        parts = [self._differentiate(m, self.own)[0] for m in self._pack(credit, self.own, minibatches=2)]
        return cosine(parts[0], parts[1]) if len(parts) == 2 else math.nan

    def _note(self, a: Algorithm, credit: Credit, total: int) -> str:
        """`AblationRow.note`. `total`: the groups before the algorithm's filter."""
        notes = list(self.facts.caveats(a))
        if self._warming(a):
            notes.append(
                "its values were warming up: in this step the policy stood still, so nothing has a cosine with it"
            )
        if a.filter == "mixed" and len(credit.groups) < total:
            notes.append(f"filter: {len(credit.groups)} of {total} groups; a run would have asked again")
        return "; ".join(notes)


def _same(a: Algorithm, b: Algorithm) -> bool:
    """Returns whether two algorithms make the same choices, whatever their names."""
    return all(getattr(a, f) == getattr(b, f) for f in CHOICES)


# Both are counted over the same tokens.
_CLIPS = ("policy/clip_low", "policy/clip_high")


def _effective(a: Algorithm, seen: Gauges) -> float:
    """`AblationRow.effective`, from the gauges of the step."""
    # A correction is what multiplies the gradient; without one the ratio does.
    names = ("correction/used", "correction/used_square") if a.correction else ("policy/ratio", "policy/ratio_square")
    if not seen or (not a.correction and a.ratio == "one"):
        return math.nan
    return effective_share(seen[names[0]], seen[names[1]])


def _mean(parts: Sequence[np.ndarray]) -> float:
    """The mean of all numbers of these arrays; NaN where there is none."""
    numbers = np.concatenate([np.zeros(0), *parts])
    return float(numbers.mean()) if len(numbers) else math.nan


def _credit_gap(credit: Credit, recorded: RecordedStep) -> float:
    """Largest difference from the recorded credit; NaN where none was recorded."""
    credit_of = {_key(r.episode): r.advantage for r in recorded.records if r.advantage is not None}
    # Episodes that the record has no credit for are compared with nothing.
    pairs = [
        (now, then)
        for g in credit.groups
        for e in g.episodes
        for now, then in zip(e.advantage, credit_of.get(_key(e.episode), ()), strict=False)
    ]
    return max((float(np.max(np.abs(now - then), initial=0.0)) for now, then in pairs), default=math.nan)


def _key(e: Episode) -> tuple[str, int, int]:
    """The place of an episode in its step."""
    return e.task.id, e.visit, e.sibling
