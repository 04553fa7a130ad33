"""Checks that a preference loss has the gradient by each log-prob, and the shift, that its definition gives.
`preference_gradient` computes the gradient a second time. The shift is subtracted from every reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import SHIFT, prepared
from posttrain.checks.learning.loss_checks import gradient_agrees
from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.streams import COLLISION, MARGIN, OPPONENT, REFERENCE, SIDE, START, WEIGHT
from posttrain.ladder.preference_algorithm import SIDES, PreferenceAlgorithm
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport, PackedEvent
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.role.learning.logprob_tolerance import MARGIN as OF_ROUNDING
from posttrain.role.roles import PreferenceRoles
from posttrain.stages.preference.preference_data import judged_again, rows_of
from posttrain.stages.preference.preference_gradient import JudgedRows, preference_demand, running_shift, unknown
from posttrain.stages.preference.preference_reference import elsewhere
from posttrain.system.errors import InvariantError

UNITS, TOKENS = 6, 12
"""Judgements of the synthetic minibatch, and the longest completion in it."""


def preference_loss_agrees(
    a: PreferenceAlgorithm, batch: Batch, passes: Passes, rows: JudgedRows, shift: float
) -> Gauges:
    """Checks the loss's gradient by each log-prob, over all micro-batches, against the one of the definition."""

    def completion_of(m: int) -> str:
        e = int(batch.sequence_M[m])
        return f"judgement {rows.unit_E[e]}, side {rows.side_E[e]}"

    return gradient_agrees(
        a.name,
        batch,
        passes,
        lambda logp_M: preference_demand(a, batch, logp_M, rows, shift),
        completion_of,
        "chosen and rejected swapped; a constant is beta or a weight counted twice, or per micro-batch; else check the"
        " margin, the label noise, sums against averages, and whether a part that should be constant has a gradient",
    )


def agrees_on_synthetic_judgements(a: PreferenceAlgorithm) -> None:
    """Checks on a synthetic minibatch in two micro-batches that a loss has the gradients of its definition.

    There the log-probs of policy, start of the step and reference differ by up to a nat per token. Lengths and weights
    differ too. In a real first step every log-ratio is 0, and most mistakes would not show.
    """
    if unknown(a):
        return
    raw, logp_M, rows = _synthetic(a)
    # shift=mismatched needs log-ratios of completions under other prompts. Two are made up here, with mean 0.3.
    batch, _ = prepared(a, raw, {}, np.array([0.5, 0.1]) if a.reads_mismatched else None)
    if a.reads_mismatched:
        shift = 0.3 * a.beta
    elif a.shift == "running":
        total, count = running_shift(a, raw, rows, 0.0, 0.0)
        shift = total / count
    else:
        shift = 0.0
    # The first completion of the second half of the units: no unit is split between the two micro-batches.
    half = int(np.searchsorted(rows.unit_E, UNITS // 2))
    parts = [np.arange(half), np.arange(half, batch.episodes)]
    passes = Passes(Needs(), episodes=parts)
    loss = PreferenceLoss(a)
    for part, micro in zip(parts, batch.cut(parts), strict=True):
        logp = torch.from_numpy(logp_M[np.isin(batch.sequence_M, part)]).requires_grad_()
        loss.terms(micro, TokenScores(logp, None, None)).loss.backward()
        passes.logp.append(logp.detach().double().numpy())
        passes.logp_grad.append(np.zeros(len(logp)) if logp.grad is None else logp.grad.double().numpy())
    try:
        # `raw`, not `batch`: the second computation reads no stream that was made for the loss.
        preference_loss_agrees(a, raw, passes, rows, shift)
    except InvariantError as error:
        raise InvariantError(f"on made-up judgements, before the first step: {error}") from error


def _synthetic(a: PreferenceAlgorithm) -> tuple[Batch, np.ndarray, JudgedRows]:
    """(a minibatch, the policy's log-probs in float32 [M], how its completions were judged), for the kind of rows."""
    rng = np.random.Generator(np.random.Philox(key=20_261_123))
    order = SIDES[a.rows] or (1,)  # labels have no order: each completion is a unit
    side_E = np.tile(np.array(order), UNITS)
    if a.rows == "label":
        # 0, 1, 0, 0, 1, 0: both labels, in unequal numbers.
        side_E = np.arange(UNITS) % 3 % 2
    unit_E = np.repeat(np.arange(UNITS), len(order))
    length_E = rng.permutation(np.arange(len(side_E))) % TOKENS + 1
    sequence_M = np.repeat(np.arange(len(side_E), dtype=np.int32), length_E)
    # Each sequence is one prompt token and `length` spoken ones: their sources are its first `length` positions.
    starts_E = np.cumsum(length_E + 1) - length_E - 1
    source_M = np.concatenate([s + np.arange(n) for s, n in zip(starts_E, length_E, strict=True)])
    # An algorithm with `match` compares sides of different pairs, and refuses pairs of different weights.
    weight_U = np.ones(UNITS) if a.match is not None else rng.uniform(0.5, 1.5, UNITS)
    margin_U = rng.uniform(0, 1, UNITS)
    logp_M = rng.uniform(-3, -1, len(sequence_M)).astype(np.float32)

    def near(by: float) -> np.ndarray:
        """Log-probs that differ from the policy's by up to `by`."""
        return (logp_M + rng.uniform(-by, by, len(logp_M))).astype(np.float32)

    start_M = near(0.3)
    # sum p^2 over the vocabulary is at least p^2 of the token itself, and at most 1.
    p_M = np.exp(start_M.astype(np.float64))
    batch = Batch(
        ids_N=np.zeros(len(sequence_M) + len(side_E), np.int32),
        lengths_S=(length_E + 1).astype(np.int32),
        source_M=source_M,
        target_M=np.zeros(len(sequence_M), np.int32),
        segment_M=sequence_M,
        sequence_S=np.arange(len(side_E), dtype=np.int32),
        sampling=Sampling(stop_ids=()),
        unit_E=unit_E.astype(np.int32),
        streams={
            SIDE: side_E[sequence_M].astype(np.int32),
            WEIGHT: weight_U[unit_E][sequence_M],
            MARGIN: margin_U[unit_E][sequence_M],
            REFERENCE: near(0.7),
            START: start_M,
            COLLISION: rng.uniform(p_M**2, 1).astype(np.float32),
            OPPONENT: (side_E != 1)[sequence_M],
        },
    )
    return batch, logp_M, JudgedRows(side_E=side_E, unit_E=unit_E, weight_U=weight_U, margin_U=margin_U)


class PreferenceLossCheck(Observer):
    """Checks the gradients of a preference loss on a synthetic minibatch before the first step, and then at `due`
    steps.

    The shift of an algorithm is computed a second time, from sums that are kept here.
    """

    def __init__(self, kept: Mapping[str, Any] | None) -> None:
        """`kept`: what `state` returned at the checkpoint from which the stage goes on. {}: the checkpoint has nothing
        of this check. None: the stage begins here."""
        kept = {"sum": 0.0, "count": 0.0} if kept is None else kept
        # Sum and number of the rewards so far, for shift=running. With {} they are NaN and stay NaN: nothing is
        # compared.
        self._total: float = kept.get("sum", np.nan)
        self._count: float = kept.get("count", np.nan)
        self._noted = False
        """Whether the note about pieces that are not covered was given."""

    async def begin(self, roles: PreferenceRoles) -> None:
        agrees_on_synthetic_judgements(roles.stage.algorithm)

    def state(self) -> dict[str, Any]:
        return {"preference": {"sum": self._total, "count": self._count}} if np.isfinite(self._total) else {}

    def rows(self, roles: Any, index: int) -> JudgedRows:
        """Returns how the completions of step `index` were judged."""
        return rows_of(judged_again(roles, index))

    def needs(self, roles: PreferenceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=due(event.index), gradients=due(event.index))

    def on_event(self, roles: PreferenceRoles, event: Event) -> ObserverReport | None:
        a = roles.stage.algorithm
        match event:
            case PackedEvent(index=index, batch=batch):
                self._shift(roles, index, batch)
                if not self._noted and (uncovered := unknown(a)):
                    self._noted = True
                    note = (
                        f"the gradient of {a.name} is not checked: no second computation covers {', '.join(uncovered)}"
                    )
                    return ObserverReport(notes=(note,))
            case LearnedEvent(packed=PackedEvent(index=index, batch=batch), passes=passes) if due(index):
                rows = self.rows(roles, index)
                shift = float(batch[SHIFT][0]) if SHIFT in batch else 0.0
                return ObserverReport(preference_loss_agrees(a, batch, passes, rows, shift))
        return None

    def _shift(self, roles: PreferenceRoles, index: int, batch: Batch) -> None:
        """Compare what is subtracted from rewards with a second computation."""
        a = roles.stage.algorithm
        if a.shift == "running" and not unknown(a):
            rows = self.rows(roles, index)
            self._total, self._count = running_shift(a, batch, rows, self._total, self._count)
            if np.isfinite(self._total):
                shift_is(a, batch, self._total / self._count, 1e-9)
        elif a.shift == "mismatched" and due(index):
            mean, tokens = elsewhere(roles, batch)
            least = LEAST[roles.run.model.dtype].mean
            # A log-ratio is a sum over a completion's tokens, so the bound is one token's times the mean length.
            shift_is(a, batch, a.beta * max(0.0, mean), OF_ROUNDING * least * tokens * a.beta)


def shift_is(a: PreferenceAlgorithm, batch: Batch, want: float, bound: float) -> None:
    """Checks that the number subtracted from every reward is what the definition gives for the whole minibatch."""
    shift_M = batch[SHIFT]
    largest_gap = float(np.abs(shift_M - want).max(initial=0.0))
    if not largest_gap <= bound + 1e-9 * abs(want):
        what = (
            "beta times the mean log-ratio of completions under the prompts of others, at least 0"
            if a.shift == "mismatched"
            else "the mean of the rewards of all completions of the stage so far, this minibatch's included"
        )
        raise InvariantError(
            f"{a.name} subtracts {float(shift_M[0]):.6g} from each reward, and shift={a.shift} is {want:.6g}: {what}."
            " Check which completions it is made of, and whether a resumed stage remembers it"
        )
