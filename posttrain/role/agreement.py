"""Canaries with a second opinion: credit, weights, loss and update of a step against `audit` and `listening`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.run import Optimizer
from posttrain.core.types import Gauge, Gauges, Group, ScoredGroup
from posttrain.role.audit import Opinion, key, plain, weights
from posttrain.role.listening import Heard, demand, value_demand
from posttrain.role.movement import Handed, departure

CREDIT_BOUND = 1e-9
"""Relative difference of two float64 opinions on one number."""
STREAM_BOUND = 1e-3
"""Two episodes that say the same are one to us, and their scores differ by what their places in a packing do to rounding."""
FAINT = 1e-9
"""Credit below this share of a step's largest may be the rounding of 0, which leaves the batch."""
LOSS_BOUND = 5e-6
"""Difference of what the loss asks of a log-prob, relative to the size of its terms. Measured in float32: docs/trust.md."""
UPDATE_BOUND = 0.02
"""Departure of a first optimizer step, relative to the size of a full one (`Expected.size`; of AdamW the learning rate)."""


def everyone_is_scored(asked: Sequence[Group], scored: Sequence[ScoredGroup]) -> None:
    """Every judged episode of the step reaches the baseline: none is lost between judging and credit."""
    want = [(g.task.id, g.visit, [e.sibling for e in g.judged]) for g in asked if g.judged]
    got = [(g.group.task.id, g.group.visit, [e.episode.sibling for e in g.episodes]) for g in scored]
    if want != got:
        lost = next((w for w in want if w not in got), got[0] if got else want[0])
        raise InvariantError(
            f"{sum(len(s) for *_, s in want)} episodes of this step were judged and {sum(len(s) for *_, s in got)} reach their baseline "
            f"(task {lost[0]!r} differs). An episode that is left out of the baseline changes the credit of its siblings: drop it from the "
            "batch (shape=droptruncated), never from the group"
        )


class Books:
    """One step's second opinion, and what its minibatches were found to hold."""

    def __init__(self, a: Algorithm, opinions: Sequence[Opinion], minibatches: int, max_tokens: int) -> None:
        self._a, self._opinions, self._max_tokens = a, opinions, max_tokens
        self._by_key: dict[bytes, list[Opinion]] = {}
        for o in opinions:
            self._by_key.setdefault(o.key, []).append(o)
        faint = FAINT * max((float(np.abs(o.credit).max(initial=0.0)) for o in opinions), default=0.0)
        self._loud = [o for o in opinions if not o.dropped and bool(np.any(np.abs(o.credit) > faint))]
        alive = [p for p in dict.fromkeys(o.group for o in opinions) if any(not o.dropped for o in opinions if o.group == p)]
        parts = [set(x.tolist()) for x in np.array_split(np.array(alive, int), min(minibatches, max(1, len(alive))))]
        speaking = opinions if a.reads_silent_tokens else self._loud
        self._parts = [p for p in parts if any(o.group in p and not o.dropped for o in speaking)]
        """Groups of each minibatch of the first epoch that has anything to say, in order."""
        if a.whiten is not None and len(self._parts) < len(parts):
            self._parts = []  # whitening leaves 0 or its rounding, so nobody can say which minibatches there are
        self._seen: Counter[bytes] = Counter()
        self._batches = 0
        self._rows: list[slice] = []

    def check(self, batch: Batch) -> None:
        """A minibatch's streams are those of its episodes, its credit and weights those of the second opinion."""
        found: list[list[Opinion]] = []
        self._rows = [slice(*span) for span in pairwise(np.searchsorted(batch.sequence_M, np.arange(batch.episodes + 1)).tolist())]
        for e, rows in enumerate(self._rows):
            name = batch.target_M[rows].tobytes() + batch.logp_mu_M[rows].tobytes()
            if name not in self._by_key:
                raise InvariantError(
                    f"episode {e} of a minibatch says something no episode of this step said (other tokens, or the same with other log-probs). "
                    "Tokens and their streams went out of step between transcript and batch: look at what packs or reorders them"
                )
            self._seen[name] += 1
            found.append(self.streams_agree(batch, rows, self.credit_agrees(batch, rows, self._by_key[name])))
        if self._batches < len(self._parts):
            self.weights_agree(batch, found, self._parts[self._batches])
        self._batches += 1

    def credit_agrees(self, batch: Batch, rows: slice, options: Sequence[Opinion]) -> list[Opinion]:
        """The opinions whose credit the rows carry: several where answers are alike to the last bit."""
        got = batch.advantage_M[rows]
        alike = [o for o in options if len(o.credit) == len(got)]
        agreeing = [o for o in alike if np.all(np.abs(got - o.credit) <= CREDIT_BOUND * np.maximum(1, np.abs(o.credit)))]
        if agreeing:
            return agreeing
        o = options[0]
        t = int(np.argmax(np.abs(got - o.credit)))
        e = o.scored.episode
        raise InvariantError(
            f"credit is wrong: token {t} of {len(got)} of task {e.task.id!r} (sibling {e.sibling}, reward {e.reward:g}) carries {got[t]:.9g}, and "
            f"{self._a.name} computed a second way from the raw rewards of the step gives {o.credit[t]:.9g}. Check sign, baseline, scale (ddof 1), "
            "which rewards are compared, and whether credit is shifted or reordered on its way into the batch"
        )

    def streams_agree(self, batch: Batch, rows: slice, options: Sequence[Opinion]) -> list[Opinion]:
        """Those of the opinions whose episode's further streams the rows carry, token by token."""
        held = {"start": batch.logp_start_M, "reference": batch.logp_ref_M, "values": batch.value_M, "returns": batch.return_M}
        wrong: list[str] = []
        for o in options:
            own = {
                "start": o.scored.start,
                "reference": o.scored.reference,
                "values": o.scored.values,
                "returns": None if o.returns is None else (o.returns,),
            }
            off = {n: _off(got[rows], np.concatenate(own[n] or ())) for n, got in held.items() if got is not None and own[n]}
            wrong += [n for n, x in off.items() if not x <= STREAM_BOUND]
            if all(x <= STREAM_BOUND for x in off.values()):
                return [o]
        raise InvariantError(
            f"stream {wrong[0]!r} is out of step: what the batch holds for task {options[0].scored.episode.task.id!r} (sibling {options[0].scored.episode.sibling}) is not "
            "what was scored for its tokens. Every stream of a batch is packed in the order of its tokens: look for a shift or another order"
        )

    def weights_agree(self, batch: Batch, found: Sequence[Sequence[Opinion]], part: set[int]) -> None:
        """Each token weighs what the aggregation over the whole minibatch gives it."""
        members = [o for o in self._opinions if o.group in part and not o.dropped]
        want = weights(self._a.aggregate, [len(o.credit) for o in members], [o.group for o in members], self._max_tokens)
        if want is None:
            return
        of = {id(o): w for o, w in zip(members, want, strict=True)}
        for rows, options in zip(self._rows, found, strict=True):
            got = batch.weight_M[rows]
            twins = [o for o in self._by_key[options[0].key] if id(o) in of]
            if twins and all(np.any(np.abs(got - of[id(o)]) > CREDIT_BOUND * of[id(o)]) for o in twins):
                raise InvariantError(
                    f"weights are wrong: a token of task {twins[0].scored.episode.task.id!r} weighs {got[0]:.6g}, and aggregate={self._a.aggregate} over the "
                    f"{len(members)} episodes of its minibatch gives {of[id(twins[0])]:.6g}. Normalise once, over the whole minibatch, silent episodes included"
                )

    def complete(self) -> None:
        """After the step: whoever has credit was in a batch."""
        lost = [o for o in self._loud if not self._seen[o.key]]
        if lost and self._batches:
            e = lost[0].scored.episode
            raise InvariantError(
                f"{len(lost)} episodes with credit never reached a minibatch, such as task {e.task.id!r} sibling {e.sibling} with reward {e.reward:g}. "
                "Only tokens whose credit is exactly 0 may stay away from the batch"
            )


def _off(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, relative to the largest of the two and 1."""
    return float(np.abs(got - want).max(initial=0.0)) / (1 + float(np.abs(want).max(initial=0.0)))


def loss_agrees(a: Algorithm, batch: Batch, heard: Heard) -> Gauges:
    """What the loss asked of each log-prob, all micro-batches together, is what the definition asks of the whole minibatch."""
    logp_M = np.concatenate([np.zeros(0), *heard.logp])
    asked_M = np.concatenate([np.zeros(0), *heard.asked])
    if len(logp_M) != batch.spoken or len(asked_M) != batch.spoken:
        raise InvariantError(
            f"the micro-batches scored {len(logp_M)} tokens and differentiated {len(asked_M)} of the minibatch's {batch.spoken}: "
            "every token belongs to exactly one micro-batch"
        )
    if heard.left:
        raise InvariantError(
            f"{heard.left} parameters still held a gradient when the step began: it would be added to this one's. Clear gradients after every optimizer step"
        )
    entropy_and_value_agree(a, batch, heard)
    want = demand(a, batch, logp_M)
    if want is None:
        return {}
    error_M = np.where(want.sure_M, np.abs(asked_M - want.want_M), 0.0)
    relative_M = error_M / np.maximum(want.size_M, 1e-3 * float(want.size_M.max(initial=0.0)) + 1e-30)
    worst = float(relative_M.max(initial=0.0))
    if not worst <= LOSS_BOUND:
        m = int(np.argmax(relative_M))
        ratio = float(asked_M @ want.want_M / (want.want_M @ want.want_M)) if np.any(want.want_M) else np.nan
        raise InvariantError(
            f"the gradient is not that of {a.name}: for spoken token {m} the loss asked {asked_M[m]:.6g} of its log-prob (credit {batch.advantage_M[m]:.4g}, "
            f"weight {batch.weight_M[m]:.4g}), the definition asks {want.want_M[m]:.6g}; over the minibatch the two are in the proportion {ratio:.4g}. "
            "-1 is a flipped sign; a constant is a scale counted twice or per micro-batch; else check the ratio's anchor, the trust region and the KL's direction"
        )
    return {"canary/loss_gap": Gauge(worst, 1)}


def entropy_and_value_agree(a: Algorithm, batch: Batch, heard: Heard) -> None:
    """What the loss asked of entropies and values is minus the bonus, and the slope of the value loss."""
    told: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if a.entropy is not None and heard.entropy and plain(a.entropy) and a.distill is None and a.tokens is None:
        told["entropy"] = (np.concatenate(heard.entropy), -a.entropy.coef * batch.weight_M)
    if a.learns_values is not None and heard.value and plain(a.learns_values):
        want = value_demand(a.learns_values, batch, np.concatenate([v for v, _ in heard.value]))
        if want is not None:
            told["value"] = (np.concatenate([g for _, g in heard.value]), want)
    for name, (got, want) in told.items():
        size = float(np.abs(want).max(initial=0.0))
        if len(got) != len(want) or float(np.abs(got - want).max(initial=0.0)) > 1e-4 * size + 1e-12:
            raise InvariantError(
                f"the loss asks the wrong thing of the {name}: its gradient is up to {float(np.abs(got).max(initial=0.0)):.4g}, and {a.name} asks for up to {size:.4g} "
                f"(largest difference {float(np.abs(got - want).max(initial=0.0)) if len(got) == len(want) else np.nan:.3g}). Check its sign, its coefficient and its weights"
            )


def update_agrees(config: Optimizer, handed: Handed, after: Mapping[str, Any], state: Mapping[str, Any]) -> Gauges:
    """The first optimizer step is the configured one, nothing more: learning rate, warm-up, decay and clip included."""
    worst = departure(handed, after, state)
    if worst.moved > UPDATE_BOUND or worst.state > UPDATE_BOUND:
        raise InvariantError(
            f"the first optimizer step is not the configured one: {worst.name} is off by {worst.moved:.3g} of a full step, its state by "
            f"{worst.state:.3g} of its size (gradient norm {handed.norm:.3g}; configured lr={config.lr:g}, warmup={config.warmup}, "
            f"weight_decay={config.weight_decay:g}, clip={config.clip:g}). Something else moves the weights, or the optimizer was built with other settings"
        )
    return {"canary/update_gap": Gauge(worst.moved, 1)}


def served_is_trained(served: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """What the sampler is served is what the optimizer moves (small constants of an architecture aside)."""
    left = {n: t for n, t in served.items() if n not in trained and t.is_floating_point()}
    size, whole = sum(t.numel() for t in left.values()), sum(t.numel() for t in served.values())
    if size > 0.005 * whole:
        raise InvariantError(
            f"{len(left)} of {len(served)} tensors ({size / whole:.0%} of the weights) never reach the optimizer: {', '.join(list(left)[:5])}"
            f"{', ...' if len(left) > 5 else ''}. They will stay as they are. Check requires_grad and what the optimizer was built from"
        )


def demonstration_ends_once(packed: Any, stop_ids: Sequence[int], text: Callable[[np.ndarray], str]) -> None:
    """Every demonstrated turn is imitated up to exactly one stop token, its last, and a demonstration ends with a turn."""
    if not stop_ids:
        return
    ends = np.cumsum(packed.lengths_S) - 1
    stops_N = np.isin(packed.ids_N, list(stop_ids))
    said_N = np.zeros(len(packed.ids_N), bool)
    said_N[packed.source_M + 1] = True
    turn_ends_N = said_N & ~np.append(said_N[1:], False)
    counts = np.bincount(packed.segment_M, weights=stops_N[packed.source_M + 1], minlength=len(ends))
    turns = np.bincount(packed.segment_M, weights=turn_ends_N[packed.source_M + 1], minlength=len(ends))
    misplaced = np.bincount(packed.segment_M, weights=(stops_N != turn_ends_N)[packed.source_M + 1], minlength=len(ends))
    wrong = np.flatnonzero(~(stops_N[ends] & said_N[ends]) | (misplaced > 0))
    if len(wrong):
        s = int(wrong[0])
        shown = text(packed.ids_N[ends[s] + 1 - packed.lengths_S[s] : ends[s] + 1])
        how = (
            "does not end in a stop token"
            if not stops_N[ends[s]]
            else "ends in a stop token that is masked"
            if not said_N[ends[s]]
            else f"has {int(counts[s])} stop tokens for {int(turns[s])} turn{'s' if turns[s] > 1 else ''}"
        )
        raise InvariantError(
            f"demonstration {shown!r} {how}, so the policy is taught {'to go on after its end' if counts[s] > turns[s] else 'never to stop'}. A demonstrated "
            "turn is imitated up to and including exactly one stop token; look for a template that adds its own, or padding that is masked by its value"
        )


def same_question(shown: np.ndarray, asked: np.ndarray, text: Callable[[np.ndarray], str]) -> None:
    """What stands before an imitated answer is what a rollout is shown before it answers."""
    if shown.tolist() != asked.tolist():
        raise InvariantError(
            f"imitation and reinforcement ask differently: before the imitated answer stands {text(shown)!r} ({len(shown)} tokens), and a rollout of the same "
            f"task is shown {text(asked)!r} ({len(asked)} tokens). Use one template for both, and mask exactly the prompt"
        )


__all__ = [
    "Books",
    "demonstration_ends_once",
    "everyone_is_scored",
    "key",
    "loss_agrees",
    "same_question",
    "served_is_trained",
    "update_agrees",
]
