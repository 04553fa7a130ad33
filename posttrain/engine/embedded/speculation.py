"""Speculative decoding: several tokens of a sequence per forward pass, with the same distribution as one at a time.

A proposer drafts up to k tokens after the pending one. The target model computes all of them in one pass, so
position j has the target's distribution p_j given the drafts before it. A draft d from the proposer's distribution q
is accepted with probability min(1, p(d) / q(d)). A rejected one is replaced by a draw from (p - q)+ / sum (p - q)+,
and all later drafts are dropped (Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318). The tokens
then have distribution p.

A deterministic proposer has q = 1 at d, so the rule becomes: draw from p, and accept d if it was drawn. With the
position's uniform, this is the same token as without speculation. Drafts of a model are drawn and accepted with two
more random streams of the same place. The distribution is exact, but the tokens differ from those without speculation.

At temperature 1 it is seldom faster: half of the computed positions are rejected, and in a full batch reading the
weights is not what costs most. It is off by default.

Axis letters: n slots, R rows (position j of slot i), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.core import seeds
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.forward_plan import Drafts
from posttrain.engine.embedded.cache.key_value_cache import ragged_arange
from posttrain.engine.embedded.schedule.slots import GenerateCall, Slots
from posttrain.engine.embedded.token_sampler import DrawDistributions, DrawnTokens, pick
from posttrain.system.errors import EngineError

MAX_NGRAM = 3
"""Most tokens at the end of a sequence that prompt lookup searches for."""


@dataclass(frozen=True)
class Lookup:
    """Draft up to `tokens` that followed the last occurrence of the sequence's last `MAX_NGRAM` .. 1 tokens."""

    tokens: int = 4


@dataclass(frozen=True, eq=False)
class Draft:
    """Draft with a smaller model of the same vocabulary."""

    model: PreTrainedModel
    tokens: int = 4


class Proposer(Protocol):
    """Drafts tokens. `tokens` is the most it drafts for one slot and pass."""

    tokens: int

    def propose(self, slots: Slots, at: np.ndarray, most: np.ndarray) -> Drafts:
        """Up to `most` [n] drafts for each slot of `at`."""
        ...


def positions_ahead(slots: Slots, at: np.ndarray, tokens: int) -> np.ndarray:
    """int64 [n]: most drafts of each slot for which there are cache rows, within the turn's limit."""
    # One row is for the pending token, and after n accepted drafts one more token is drawn.
    room = slots.held[at] - slots.cached[at] - 1
    return np.minimum(np.minimum(tokens, room), slots.limit[at] - slots.said[at] - 1).clip(0)


def within(most: np.ndarray, room: int) -> np.ndarray:
    """`most` [n] drafts per slot, cut at one common level so that their sum is at most `room`.

    Example: [4, 1, 4] in a room of 7 becomes [3, 1, 3].
    """
    level = int(most.max(initial=0))
    while np.minimum(most, level).sum() > room:
        level -= 1
    return np.minimum(most, level)


class PromptLookup:
    """The proposer of `Lookup`."""

    def __init__(self, options: Lookup) -> None:
        if options.tokens < 1:
            raise EngineError(f"{options}: tokens must be at least 1")
        self.tokens = options.tokens
        self._known: dict[int, tuple[GenerateCall | None, list[int], dict[tuple[int, ...], int]]] = {}
        """Slot -> (its request, its tokens, position after the last occurrence of each short sequence)."""

    def propose(self, slots: Slots, at: np.ndarray, most: np.ndarray) -> Drafts:
        """For each slot the tokens that followed the last occurrence of its sequence's end, at most `most`."""
        ids = np.zeros((len(at), self.tokens), np.int64)
        counts = np.zeros(len(at), np.int64)
        for i, (s, n) in enumerate(zip(at.tolist(), most.tolist(), strict=True)):
            drafts = self._after(slots, s)[:n]
            ids[i, : len(drafts)], counts[i] = drafts, len(drafts)
        return Drafts(ids, counts)

    def _after(self, slots: Slots, s: int) -> list[int]:
        """The tokens that followed the last occurrence of the sequence's end, for the longest end that occurred."""
        request = slots.of(s)
        # Another request begins anew. Otherwise only new tokens are looked at: time in proportion to the turn's length.
        whose, tokens, known = self._known.get(s, (None, [], {}))
        if whose is not request:
            tokens, known = request.ids.tolist(), {}
            self._learn(tokens, known, 0)
        begun = len(tokens)
        tokens += slots.ids[s, begun - len(request.ids) : slots.said[s]].tolist()
        ends = (tuple(tokens[len(tokens) - n :]) for n in range(min(MAX_NGRAM, len(tokens)), 0, -1))
        followed_at = next((known[end] for end in ends if end in known), None)
        self._learn(tokens, known, begun)
        self._known[s] = (request, tokens, known)
        return [] if followed_at is None else tokens[followed_at:]

    def _learn(self, tokens: list[int], known: dict[tuple[int, ...], int], begun: int) -> None:
        """Store the position after every short sequence that ends before the last token, from position `begun` on."""
        # Later occurrences overwrite earlier ones. The very end is left out, or it would always find itself.
        for end in range(max(begun, 1), len(tokens)):
            for n in range(1, min(MAX_NGRAM, end) + 1):
                known[tuple(tokens[end - n : end])] = end


class DraftModel:
    """The proposer of `Draft`: a second model whose cache pool has the same rows, so that both use the slots' tables.

    Args:
        vocabulary: size of the target's vocabulary. kernels: as in the engine.
    """

    def __init__(
        self, options: Draft, context: int, vocabulary: int, slots: int, device: str, kernels: KernelChoice
    ) -> None:
        if options.tokens < 1:
            raise EngineError(f"a draft model drafts at least 1 token a pass, not {options.tokens}")
        self.tokens = options.tokens
        self.served = CachedModel(options.model, context, device=device, kernels=kernels)
        if self.served.vocabulary != vocabulary:
            raise EngineError(
                f"the draft model has a vocabulary of {self.served.vocabulary}, the target one of {vocabulary}: they"
                " must share their tokenizer"
            )
        self._chance = np.zeros((slots, 2, context))
        """[s, (draft, accept), position]: uniforms from the place of the slot's request."""
        self._seeded_for: list[GenerateCall | None] = [None] * slots
        """For each slot the request whose uniforms `_chance` has."""

    def propose(self, slots: Slots, at: np.ndarray, most: np.ndarray) -> Drafts:
        """Draft one token after the other, each in one pass over the slots that may have another draft."""
        self._seed(slots, at)
        ids = np.full((len(at), self.tokens), -1, np.int64)
        q: list[Tensor] = []
        token = slots.pending[at].copy()
        for j in range(int(most.max(initial=0))):
            go = np.flatnonzero(most > j)
            position = slots.cached[at[go]] + j
            hidden = self.served.ahead(slots, at[go], token[go], position)
            spread = DrawDistributions.of(
                self.served.logits(hidden), slots.contracts.at(at[go], ids[go] if j else None), self.served.kernels
            )
            drawn = spread.draw(self._chance[at[go], 0, slots.said[at[go]] + j])
            # A row for every slot, also without a j-th draft: `verify` finds the row of a slot by its index.
            of_all = spread.logp.new_zeros((len(at), spread.logp.shape[1]))
            q.append(of_all.index_copy_(0, torch.from_numpy(go).to(of_all.device), spread.probabilities()))
            token[go] = ids[go, j] = drawn.ids
        return Drafts(ids, most, q)

    def accepts(self, slots: Slots, at: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """float64: for each row the uniform that decides about draft number `ahead`, from 0, of slot `at`."""
        return self._chance[at, 1, slots.said[at] + ahead]

    def _seed(self, slots: Slots, at: np.ndarray) -> None:
        """Draw the uniforms of slots that have another request than at the last call."""
        for s in at.tolist():
            request = slots.of(s)
            if self._seeded_for[s] is not request:
                for row, stream in enumerate(("draft", "accept")):
                    key = seeds.key(request.place, stream)
                    self._chance[s, row, : request.limit] = seeds.uniforms(key, request.limit)
                self._seeded_for[s] = request


def verify(
    spread: DrawDistributions, drafts: Drafts, uniform: np.ndarray, accept_at: np.ndarray | None
) -> tuple[DrawnTokens, np.ndarray]:
    """(a token for every row, and int64 [n] how many drafts of each slot are accepted).

    Args:
        spread: the target's distributions. The rows of one slot are consecutive: one per draft, then one more.
        uniform: float64 [R], one for each row's position. accept_at: float64 [R], to accept drafts
            drawn from `drafts.q`.
    """
    widths = drafts.counts + 1
    slot, step = np.repeat(np.arange(len(widths)), widths), ragged_arange(widths)
    # The draft that each row decides about; -1 in a slot's last row, which has none.
    draft = np.where(step < drafts.counts[slot], drafts.ids[slot, np.minimum(step, drafts.ids.shape[1] - 1)], -1)
    if drafts.q is None or accept_at is None:
        drawn = spread.draw(uniform)
    else:
        drawn = spread.say(_residual(spread, drafts.q, uniform, accept_at, slot, step, draft))
    # How many drafts of a slot are accepted is the index of its first row that drew something else. -1 is no token, so
    # the last row always does, and every slot has such a row.
    equals_draft = drawn.ids == draft
    differing_row = np.where(equals_draft, len(slot), np.arange(len(slot)))
    starts = np.cumsum(widths) - widths
    return drawn, np.minimum.reduceat(differing_row, starts) - starts


def _residual(
    spread: DrawDistributions,
    drafted_from: list[Tensor],
    uniform: np.ndarray,
    accept_at: np.ndarray,
    slot: np.ndarray,
    step: np.ndarray,
    draft: np.ndarray,
) -> Tensor:
    """int64 [R]: the draft where it is accepted, else a draw from (p - q)+; in a row without a draft, a draw from p."""
    p = spread.probabilities().double()
    device = p.device
    ids = spread.pick(uniform)
    rows = np.flatnonzero(draft >= 0)
    if not len(rows):
        return ids
    of_rows = [drafted_from[j][i] for i, j in zip(slot[rows].tolist(), step[rows].tolist(), strict=True)]
    q = torch.stack(of_rows).double()
    at, d = torch.from_numpy(rows).to(device), torch.from_numpy(draft[rows]).to(device)[:, None]
    p_rows = p.index_select(0, at)
    # Accepted with probability min(1, p / q). Strictly less, so that a draft of probability 0 under p is never
    # accepted, not even for a uniform of 0.
    accepted = torch.from_numpy(accept_at[rows]).to(device) * q.gather(1, d)[:, 0] < p_rows.gather(1, d)[:, 0]
    residual = (p_rows - q).clamp_min(0)
    # where the residual is zero, p equals q and every draft is accepted
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_rows)
    replacement = pick(residual.log(), uniform[rows], spread.kernels)
    return ids.index_copy(0, at, torch.where(accepted, d[:, 0], replacement))
