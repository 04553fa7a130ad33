"""Checks that no episode is lost, and that credit and weights are those of `checks.learning.credit_by_definition`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from posttrain.checks.learning.credit_by_definition import ExpectedCredit, expected_credit, weights
from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch
from posttrain.core.gauge import Step
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, RETURN, WEIGHT
from posttrain.core.types import Group
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent, ScoredEvent
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

CREDIT_BOUND = 1e-9
"""Largest difference of one number computed two ways in float64, relative to the larger of 1 and the expected
number."""
STREAM_BOUND = 1e-3
"""Largest difference of a stream, relative to 1 plus the largest number of the stream (`_off`). The scores of equal
episodes differ by rounding, which depends on their place in a packed batch, and equal episodes are not told apart
here."""
FAINT = 1e-9
"""Credit below this share of a step's largest may be a rounded 0. Such an episode may be left out of the batch."""


def everyone_is_scored(asked: Sequence[Group], scored: Sequence[ScoredGroup]) -> None:
    """Every judged episode of the step reaches the baseline: none is lost between judging and credit."""
    want = [(g.task.id, g.visit, [e.sibling for e in g.judged]) for g in asked if g.judged]
    got = [(g.group.task.id, g.group.visit, [e.episode.sibling for e in g.episodes]) for g in scored]
    if want != got:
        # None is lost where groups come twice or in another order: then the first is named.
        lost = next((w for w in want if w not in got), got[0] if got else want[0])
        raise InvariantError(
            f"{sum(len(s) for *_, s in want)} episodes of this step were judged and {sum(len(s) for *_, s in got)}"
            f" reach their baseline (task {lost[0]!r} differs). An episode that is left out of the baseline changes the"
            " credit of its siblings: drop it from the batch (shape=droptruncated), never from the group"
        )


class StepCreditAudit:
    """The expected credit of one step, compared with what each of its minibatches holds."""

    def __init__(
        self, a: Algorithm, expected_credit: Sequence[ExpectedCredit], minibatches: int, max_tokens: int
    ) -> None:
        self._algorithm, self._expected, self._max_tokens = a, expected_credit, max_tokens
        # One key may have several episodes: siblings that said the same, with the same log-probs.
        self._by_key: dict[bytes, list[ExpectedCredit]] = {}
        for entry in expected_credit:
            self._by_key.setdefault(entry.key, []).append(entry)
        # Relative to the largest credit of the step. Credit far below it may be the rounding of a difference that is 0.
        faint = FAINT * max((float(np.abs(entry.credit).max(initial=0.0)) for entry in expected_credit), default=0.0)
        kept = [entry for entry in expected_credit if not entry.dropped]
        self._with_credit = [entry for entry in kept if bool(np.any(np.abs(entry.credit) > faint))]
        # The groups with an episode that is not dropped, in order, as packing takes them.
        alive = list(dict.fromkeys(entry.group for entry in kept))
        # The minibatches as packing cuts them in the first epoch; the orders of later ones are not computed.
        parts = [set(x.tolist()) for x in np.array_split(np.array(alive, int), min(minibatches, max(1, len(alive))))]
        # Without credit a minibatch is left out, unless silent tokens are learned from (`reads_silent_tokens`).
        learned_from = {entry.group for entry in (kept if a.reads_silent_tokens else self._with_credit)}
        self._minibatch_groups = [p for p in parts if p & learned_from]
        """The groups of each minibatch of the first epoch that has a gradient, in order."""
        if a.whiten is not None and len(self._minibatch_groups) < len(parts):
            # Whitening gives 0 or a rounded 0, so it is unknown which minibatches are left out.
            self._minibatch_groups = []
        self._seen: Counter[bytes] = Counter()
        self._batches = 0
        self._rows: list[slice] = []

    def check(self, batch: Batch) -> None:
        """The minibatch holds the expected streams, credit and weights of its episodes."""
        matched: list[ExpectedCredit] = []
        # The spoken tokens of an episode stand side by side, so each episode is one slice.
        ends = np.searchsorted(batch.sequence_M, np.arange(batch.episodes + 1)).tolist()
        self._rows = [slice(*span) for span in pairwise(ends)]
        for e, rows in enumerate(self._rows):
            # The same bytes as `ExpectedCredit.key`: the episode is found by what it said and with which log-probs.
            key = batch.target_M[rows].tobytes() + batch[MU][rows].tobytes()
            if key not in self._by_key:
                raise InvariantError(
                    f"episode {e} of a minibatch says something no episode of this step said (other tokens, or the same"
                    " with other log-probs). Tokens and their streams went out of step between transcript and batch:"
                    " look at what packs or reorders them"
                )
            self._seen[key] += 1
            matched.append(self.streams_agree(batch, rows, self.credit_agrees(batch, rows, self._by_key[key])))
        if self._batches < len(self._minibatch_groups):
            self.weights_agree(batch, matched, self._minibatch_groups[self._batches])
        self._batches += 1

    def credit_agrees(self, batch: Batch, rows: slice, options: Sequence[ExpectedCredit]) -> list[ExpectedCredit]:
        """The episodes whose expected credit these rows hold; several if answers are equal to the last bit."""
        got = batch[ADVANTAGE][rows]
        # Equal answers may have other credit (under a moving average), so each of them is tried.
        agreeing = [
            entry
            for entry in options
            if np.all(np.abs(got - entry.credit) <= CREDIT_BOUND * np.maximum(1, np.abs(entry.credit)))
        ]
        if agreeing:
            return agreeing
        entry = options[0]
        t = int(np.argmax(np.abs(got - entry.credit)))
        e = entry.scored.episode
        raise InvariantError(
            f"credit is wrong: token {t} of {len(got)} of task {e.task.id!r} (sibling {e.sibling}, reward {e.reward:g})"
            f" carries {got[t]:.9g}, and {self._algorithm.name} computed a second way from the raw rewards of the step"
            f" gives {entry.credit[t]:.9g}. Check sign, baseline, scale (ddof 1), which rewards are compared, and"
            " whether credit is shifted or reordered on its way into the batch"
        )

    def streams_agree(self, batch: Batch, rows: slice, options: Sequence[ExpectedCredit]) -> ExpectedCredit:
        """The first of these episodes whose streams (other than the credit) are those of the rows."""
        wrong: list[str] = []
        for entry in options:
            # Streams with several numbers a token are not compared.
            expected = {s: np.concatenate(parts) for s, parts in entry.scored.streams.items() if parts and not s.wide}
            expected |= {} if entry.returns is None else {RETURN: entry.returns}
            gaps = {s.name: _off(batch[s][rows], x) for s, x in expected.items() if s in batch}
            # Written so that a NaN is wrong.
            wrong += [n for n, x in gaps.items() if not x <= STREAM_BOUND]
            if all(x <= STREAM_BOUND for x in gaps.values()):
                return entry
        raise InvariantError(
            f"stream {wrong[0]!r} is out of step: what the batch holds for task {options[0].scored.episode.task.id!r}"
            f" (sibling {options[0].scored.episode.sibling}) is not what was scored for its tokens. Every stream of a"
            " batch is packed in the order of its tokens: look for a shift or another order"
        )

    def weights_agree(self, batch: Batch, matched: Sequence[ExpectedCredit], group_numbers: set[int]) -> None:
        """Each token has the weight that the aggregation over the whole minibatch gives it.

        Args:
            matched: for each episode of the batch, the expected one that it is.
            group_numbers: the numbers of the minibatch's groups.
        """
        # All these count in the denominators, those without credit too.
        members = [entry for entry in self._expected if entry.group in group_numbers and not entry.dropped]
        want = weights(
            self._algorithm.aggregate,
            [len(entry.credit) for entry in members],
            [entry.group for entry in members],
            self._max_tokens,
        )
        if want is None:
            return
        weight = {id(entry): w for entry, w in zip(members, want, strict=True)}
        for rows, expected in zip(self._rows, matched, strict=True):
            got = batch[WEIGHT][rows]
            # Equal answers are each other's twins: the weight is wrong only if it fits none of them.
            twins = [entry for entry in self._by_key[expected.key] if id(entry) in weight]
            wanted = [weight[id(entry)] for entry in twins]
            if twins and all(np.any(np.abs(got - w) > CREDIT_BOUND * w) for w in wanted):
                raise InvariantError(
                    f"weights are wrong: a token of task {twins[0].scored.episode.task.id!r} weighs {got[0]:.6g}, and"
                    f" aggregate={self._algorithm.aggregate} over the {len(members)} episodes of its minibatch gives"
                    f" {wanted[0]:.6g}. Normalise once, over the whole minibatch, episodes without credit"
                    " included"
                )

    def complete(self) -> None:
        """After the step: every episode with credit was in a minibatch."""
        # Credit near 0 (`FAINT`) may have been rounded to 0 on the way, so such episodes need not have been there.
        lost = [entry for entry in self._with_credit if not self._seen[entry.key]]
        if lost and self._batches:
            e = lost[0].scored.episode
            raise InvariantError(
                f"{len(lost)} episodes with credit never reached a minibatch, such as task {e.task.id!r} sibling"
                f" {e.sibling} with reward {e.reward:g}. Only tokens whose credit is exactly 0 may stay away from the"
                " batch"
            )


def _off(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, relative to 1 plus the largest of `want`."""
    return float(np.abs(got - want).max(initial=0.0)) / (1 + float(np.abs(want).max(initial=0.0)))


class CreditCheck(Observer):
    """Every judged episode reaches the baseline. At `due` steps, minibatches hold expected credit and weights."""

    def __init__(self) -> None:
        self._audit: StepCreditAudit | None = None

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case ScoredEvent(e, groups):
                everyone_is_scored(e.groups, groups)
                # At due steps only: it is slow, by definition.
                self._audit = _audit(roles, groups) if due(e.index) else None
            case PackedEvent(batch=batch) if self._audit is not None:
                self._audit.check(batch)
        return None

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        if self._audit is not None:
            self._audit.complete()
        # It holds the arrays of the whole step.
        self._audit = None


def _audit(roles: ReinforceRoles, groups: Sequence[ScoredGroup]) -> StepCreditAudit | None:
    """The audit of a step; None if the algorithm has a piece that is not covered."""
    a, max_tokens = roles.stage.algorithm, roles.sampling.max_tokens
    expected = expected_credit(a, groups, max_tokens=max_tokens, ema=roles.adaptive.ema)
    return None if expected is None else StepCreditAudit(a, expected, roles.stage.minibatches, max_tokens)
