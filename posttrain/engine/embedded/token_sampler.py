"""Logits to tokens under the log-prob contract `core.sampling.Sampling`, for many rows. Each row has its own contract.

A row's token depends only on its own logits, contract, past tokens and uniform. Ties go to the lower id. Sums along a
row have a fixed order. One uniform picks the token by the inverse of the row's cumulative distribution. The steps
before the temperature, which read past tokens, are in `slot_rules`.

Axis letters: B rows, V vocabulary, R truncated rows, n candidates looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.sampling import Sampling
from posttrain.core.types import Top
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded.schedule.slot_rules import NotADistribution, SlotRules, placed
from posttrain.engine.head.kernel_table import Kernel, add_forms, in_c, kernel

HEAD = 1024
"""Most probable tokens that are sorted first where the vocabulary is large. Rows that keep more are sorted whole."""
INF = float("-inf")
NOTHING = np.zeros(0, np.int64)


@dataclass(eq=False)
class Contracts:
    """The contracts of B rows as columns: a table of all slots, or (`at`) the rows that one draw takes from it."""

    beta: np.ndarray
    """float32: 1 / temperature."""
    top_k: np.ndarray
    """int64; 0 keeps all."""
    top_p: np.ndarray
    """float64"""
    min_p: np.ndarray
    """float64"""
    greedy: np.ndarray
    """bool"""
    truncated: np.ndarray
    """bool"""
    top: np.ndarray
    """int64: number of most probable tokens to return with each draw."""
    rules: SlotRules | None = None
    """The steps before the temperature; None where no row has any."""
    slots: np.ndarray | None = None
    """int64: the slot of `rules` that each row follows; None: row b is slot b."""
    ahead: np.ndarray | None = None
    """int64 [B, D], filled up with -1: tokens that each row treats as said after those of its slot."""
    special: set[int] | None = None
    """Rows whose contract asks for more than the softmax at temperature 1; None: they are not counted."""

    @staticmethod
    def plain(n: int) -> Contracts:
        """`n` contracts with temperature 1 and no truncation."""
        zeros = np.zeros(n, bool)
        return Contracts(
            np.ones(n, np.float32),
            np.zeros(n, np.int64),
            np.ones(n),
            np.zeros(n),
            zeros,
            zeros.copy(),
            np.zeros(n, np.int64),
            special=set(),
        )

    @property
    def easy(self) -> bool:
        """True where every row draws from the softmax of its logits alone, so that no column need be read."""
        return self.special is not None and not self.special

    @staticmethod
    def of(
        samplings: Sequence[Sampling],
        prompts: Sequence[np.ndarray] | None = None,
        said: Sequence[np.ndarray] | None = None,
    ) -> Contracts:
        """One row per contract, after these prompts and the tokens `said` in the turns (default: none)."""
        out = Contracts.plain(len(samplings))
        for i, s in enumerate(samplings):
            out.put(i, s, None if prompts is None else prompts[i], None if said is None else said[i])
        return out

    def put(self, row: int, s: Sampling, prompt: np.ndarray | None = None, said: np.ndarray | None = None) -> None:
        """Row `row` follows `s` from now on, after int32 `prompt` and the tokens its turn has `said` (None: none)."""
        self.beta[row], self.top_k[row], self.top_p[row], self.min_p[row] = 1 / s.temperature, s.top_k, s.top_p, s.min_p
        self.greedy[row], self.truncated[row], self.top[row] = s.greedy, s.truncated, s.top
        if self.special is not None:
            # Where all slots sample at temperature 1, no step reads a column of this table (`easy`).
            plain = s.temperature == 1 and not (s.rules or s.truncated or s.greedy or s.top)
            (self.special.discard if plain else self.special.add)(row)
        if s.rules and self.rules is None:
            self.rules = SlotRules(len(self.beta))
        if self.rules is not None:
            nothing = np.zeros(0, np.int32)
            self.rules.put(row, s, nothing if prompt is None else prompt, nothing if said is None else said)

    def clear(self, row: int) -> None:
        """Row `row` has no contract any more."""
        self.greedy[row] = self.truncated[row] = False
        self.top[row] = 0
        if self.special is not None:
            self.special.discard(row)
        if self.rules is not None:
            self.rules.clear(row)

    def record(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Record one token `ids[i]` that row `rows[i]` has said."""
        if self.rules is not None:
            self.rules.record(rows, ids)

    def at(self, rows: np.ndarray, ahead: np.ndarray | None = None) -> Contracts:
        """The contracts of some rows, which may repeat. `ahead` [B, D]: tokens taken as said; -1 fills it up."""
        if self.easy:
            return EASY
        slots = rows if self.slots is None else self.slots[rows]
        ruled = self.rules is not None and bool(self.rules.active[slots].any())
        return Contracts(
            self.beta[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.greedy[rows],
            self.truncated[rows],
            self.top[rows],
            self.rules if ruled else None,
            slots if ruled else None,
            ahead if ruled else None,
        )


EASY = Contracts.plain(0)
"""Any number of rows at temperature 1: nothing is read of them."""


@dataclass(frozen=True, eq=False)
class DrawnTokens:
    """One token per row. `kept`: the kept ids (ascending) of each truncated row, in the order of `truncated_rows`."""

    ids: np.ndarray
    """int64 [B]"""
    logp: np.ndarray
    """float32 [B]: log-prob under the distribution that was sampled from; 0 for a greedy row."""
    truncated_rows: np.ndarray
    kept: list[np.ndarray]
    top: Top | None = None
    """The most probable tokens of every row, as many as the row that asks for the most."""

    def at(self, rows: np.ndarray) -> DrawnTokens:
        """Some of the rows."""
        index = {r: i for i, r in enumerate(self.truncated_rows.tolist())}
        truncated = [i for i, r in enumerate(rows.tolist()) if r in index]
        top = None if self.top is None else Top(self.top.ids[rows], self.top.logp[rows])
        kept = [self.kept[index[int(rows[i])]] for i in truncated]
        return DrawnTokens(self.ids[rows], self.logp[rows], np.array(truncated, np.int64), kept, top)


@dataclass(frozen=True, eq=False)
class DrawDistributions:
    """The distributions that B tokens are drawn from, each under its contract."""

    logp: Tensor
    """[B, V]: log-probs; -inf for tokens that are not kept."""
    contracts: Contracts
    best: Tensor | None
    """int64 [B]: the most probable token before truncation; None where no row is greedy."""
    cut: np.ndarray
    """Rows that are truncated and not greedy."""
    mask: Tensor | None
    """bool [len(cut), V]: the tokens they keep."""
    kernels: KernelChoice
    dead: np.ndarray
    """Rows after drafted tokens in which every token is banned. Their distributions have no meaning."""

    @staticmethod
    def of(logits: Tensor, contracts: Contracts, kernels: KernelChoice = "auto") -> DrawDistributions:
        """logits: float32 [B, V], overwritten. NothingLeft where in a row without drafted tokens all are banned."""
        c, dead = contracts, NOTHING
        if c.easy:
            return DrawDistributions(torch.log_softmax(logits, -1), c, None, NOTHING, None, kernels, NOTHING)
        if c.rules is not None:
            dead = c.rules.adjust(logits, np.arange(len(logits)) if c.slots is None else c.slots, c.ahead)
        if np.any(c.beta != 1):
            logits.mul_(placed(c.beta, logits)[:, None].to(logits.dtype))
        best = lowest_argmax(logits) if c.greedy.any() else None
        # A greedy row is not cut: truncation never removes its most probable token, and it costs a sort.
        cut = np.flatnonzero(c.truncated & ~c.greedy)
        mask: Tensor | None = None
        if len(cut):
            rows = placed(cut, logits)
            z = logits.index_select(0, rows)
            # A banned token is never kept, even where the contract would keep more tokens than are left.
            mask = kept_mask(z, c.at(cut)) & (z > INF)
            logits.index_copy_(0, rows, z.masked_fill_(~mask, INF))
        return DrawDistributions(torch.log_softmax(logits, -1), c, best, cut, mask, kernels, dead)

    def probabilities(self) -> Tensor:
        """[B, V]: the probabilities. A greedy row has probability 1 on its most probable token."""
        p = self.logp.exp()
        if self.best is None:
            return p
        certain = torch.zeros_like(p).scatter_(1, self.best[:, None], 1)
        return torch.where(placed(self.contracts.greedy, p)[:, None], certain, p)

    def pick(self, uniform: np.ndarray) -> Tensor:
        """int64 [B]: one token per row, drawn by one uniform each."""
        ids = pick(self.logp, uniform, self.kernels)
        return ids if self.best is None else torch.where(placed(self.contracts.greedy, ids), self.best, ids)

    def draw(self, uniform: np.ndarray) -> DrawnTokens:
        """Draw one token per row, with its log-prob, kept set and most probable tokens."""
        return self.say(self.pick(uniform))

    def say(self, ids: Tensor) -> DrawnTokens:
        """The tokens `ids` [B], with their log-probs, kept sets and most probable tokens."""
        c = self.contracts
        logp = self.logp.gather(1, ids[:, None])[:, 0]
        if self.best is not None:
            # A greedy row says its token with probability 1.
            logp = logp.masked_fill(placed(c.greedy, ids), 0.0)
        out, out_logp = ids.cpu().numpy(), logp.float().cpu().numpy()
        if c.easy:
            return DrawnTokens(out, out_logp, NOTHING, [])
        kept = _kept(c, self.cut, self.mask, out)
        return DrawnTokens(out, out_logp, *kept, _top(self.logp, int(c.top.max(initial=0))))


def draw(logits: Tensor, contracts: Contracts, uniform: np.ndarray, kernels: KernelChoice = "auto") -> DrawnTokens:
    """Draw one token per row. logits: float32 [B, V], overwritten. uniform: float64 [B] in [0, 1).
    `kernels` as in `pick`.

    Raises:
        NothingLeft: in some rows every token is banned.
        NotADistribution: some rows have probabilities that are not finite.
    """
    return DrawDistributions.of(logits, contracts, kernels).draw(uniform)


def _top(logp: Tensor, k: int) -> Top | None:
    """The k most probable tokens of each distribution; None for k = 0."""
    if not k:
        return None
    best = logp.topk(k, -1)
    return Top(best.indices.int().cpu().numpy(), best.values.float().cpu().numpy())


def pick(logp: Tensor, uniform: np.ndarray, kernels: KernelChoice = "auto") -> Tensor:
    """int64 [B]: the first token whose cumulative probability exceeds uniform * total, with sums in float64, in order
    of ids. NotADistribution where some rows have probabilities that are not finite. Only a token of positive
    probability can be the first to exceed the target. The target stays below the total."""
    ids = kernel("draw", logp.device, logp.dtype, kernels).function(logp, uniform)
    if ids is None:
        # The forms say only that some row has failed. Where no such row is found here, all are named.
        not_finite = ~logp.exp().sum(-1, dtype=torch.float64).isfinite()
        raise NotADistribution(
            np.flatnonzero(not_finite.cpu().numpy() if not_finite.any() else np.ones(len(logp))),
            "the model's logits are not finite, so nothing can be sampled: its weights have diverged or were loaded"
            " wrongly",
        )
    return ids


def _pick(logp: Tensor, uniform: np.ndarray) -> Tensor | None:
    """The reference form of `pick`; None where a row's sum is not finite."""
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    if not bool(total.isfinite().all()):
        return None
    # Below the total even where rounding brings uniform * total up to it, so there is always a token. With right=True
    # it is the first whose sum exceeds the target; one of probability 0 has the sum of the one before.
    target = torch.minimum(placed(uniform, logp) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]


add_forms(
    "draw",
    in_c(lambda logp, uniform: compile_native.library().pick(logp, uniform), 0.0),
    Kernel("reference", _pick),
)


def lowest_argmax(logits: Tensor) -> Tensor:
    """int64 [B]: the lowest id among the most probable."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1]).amin(-1)


def kept_mask(z: Tensor, c: Contracts) -> Tensor:
    """bool [R, V]: top-k, then top-p, then min-p, each on the renormalised distribution that the one before left.

    Example: probabilities [.5, .3, .15, .05] with top_k=3 and top_p=.8. Top-k leaves [.53, .32, .16]. The first two of
    these reach .8, so the result keeps ids 0 and 1.
    """
    size = z.shape[-1]
    # A small vocabulary is sorted whole: then no row can be unsure, and none is sorted twice.
    if size <= 4 * HEAD:
        return _prefix(z, c, size)[0]
    mask, sure = _prefix(z, c, HEAD)
    if not bool(sure.all()):
        unsure = torch.nonzero(~sure)[:, 0]
        mask.index_copy_(0, unsure, _prefix(z.index_select(0, unsure), c.at(unsure.cpu().numpy()), size)[0])
    return mask


def _prefix(z: Tensor, c: Contracts, n: int) -> tuple[Tensor, Tensor]:
    """(bool [R, V]: the mask of kept tokens, from the n most probable ones; bool [R]: rows for which these n are
    enough). They are not enough where the kept set reaches the value of the last of them, which tokens outside may have
    too. Nor where a top-k larger than n comes before top-p, because the mass that it leaves is unknown."""
    size = z.shape[-1]
    # None: all ids. Else in ascending order, so that the stable sort by value gives ties to the lower id.
    ids = torch.topk(z, n, sorted=False).indices.sort(-1).values if n < size else None
    values, order = torch.sort(z if ids is None else z.gather(1, ids), dim=-1, descending=True, stable=True)
    if ids is not None:
        order = ids.gather(1, order)
    top_k = placed(np.where((c.top_k == 0) | (c.top_k > size), size, c.top_k), z)[:, None]
    inside = torch.arange(n, device=z.device) < top_k
    wide = values.double().masked_fill_(~inside, INF)
    # `norm` is the log of the mass that top-k leaves. Without top-k, or where top_k > n, the mass of the whole
    # vocabulary is taken. That is wrong where top-k cuts behind these n tokens and top-p needs the mass: see `beyond`.
    norm = wide.logsumexp(-1, keepdim=True)
    if n < size:
        norm = torch.where(top_k <= n, norm, z.double().logsumexp(-1, keepdim=True))
    q = (wide - norm).exp()
    # A token stays while the mass before it is below top_p: the token that reaches top_p stays, and the first always.
    inside &= q.cumsum(-1) - q < placed(c.top_p, z)[:, None]
    inside &= q >= placed(c.min_p, z)[:, None] * q[:, :1]
    sure = torch.ones(len(z), dtype=torch.bool, device=z.device)
    if n < size:
        beyond = (top_k > n) & (top_k < size) & (placed(c.top_p, z)[:, None] < 1)
        sure = ~(beyond | inside & (values == values[:, -1:])).any(-1)
    return torch.zeros_like(z, dtype=torch.bool).scatter_(1, order, inside), sure


def _kept(c: Contracts, cut: np.ndarray, mask: Tensor | None, said: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """(truncated rows, kept ids of each): those of the rows `cut` of `mask`, and of a greedy row the token it said."""
    rows = np.flatnonzero(c.truncated)
    if mask is None:
        return rows, [said[r : r + 1].astype(np.int32) for r in rows]
    # Row by row and ascending within a row, so the ids can be split by the rows' counts.
    where, ids = np.nonzero(mask.cpu().numpy())
    sets = np.split(ids.astype(np.int32), np.cumsum(np.bincount(where, minlength=len(cut)))[:-1])
    of_row = dict(zip(cut.tolist(), sets, strict=True))
    return rows, [of_row[r] if r in of_row else said[r : r + 1].astype(np.int32) for r in rows.tolist()]
