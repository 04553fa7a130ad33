"""The softmax over a vocabulary that is read in blocks: what is kept of each block, and the two operations on a tile.

A tile is the matrix of scores of some tokens and one block of ids. The scores z of one token are read block by block.
Three numbers are kept of what was read: the largest score m, the mass S = sum exp(z - m), and U = sum exp(z - m)
(z - m). At the end log sum exp(z) = m + log S, and the entropy is log S - U / S. A new block can raise m; then S and U
are rescaled. With a single block, log sum exp(z) of torch's form has the bits of `torch.logsumexp`.

Axis letters: C tokens of one tile, B ids of one block, K named ids of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from posttrain.engine.cpu.compile_native import addresses, library
from posttrain.system.errors import EngineError


@dataclass(frozen=True)
class TileForm:
    """One way to compute the two operations on a tile. Neither changes the scores it is given."""

    fold: Callable[[Tensor, bool, bool], tuple[Tensor, Tensor, Tensor | None]]
    """(z [C, B], want_entropy, masked) -> m, S, and U or None, [C] each. `masked`: some scores may be -inf."""
    cotangent: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, bool, Tensor], Tensor]
    """(z [C, B], norm [C], named [C, K], by_logp [C, K], by_entropy [C] or None, entropy [C], masked, out [C, B]) ->
    `out`, the gradient with respect to z. `out` may be z itself, which is then lost. `named` are ids of the block;
    those that lie outside of it are ignored."""


@dataclass(frozen=True)
class Tile:
    """The tiles into which the scores are cut: at most `rows` tokens and `ids` ids each. `kept`: for the backward pass,
    which otherwise computes them again."""

    rows: int
    ids: int
    kept: bool = False


def fold(z: Tensor, want_entropy: bool, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `TileForm.fold`."""
    # A row may have no id that can be said in this block. Its largest score is then the lowest finite number and not
    # -inf, since -inf minus -inf is nan; so its mass is 0.
    most = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)
    q = z - most[:, None]
    if not want_entropy:
        return most, q.exp_().sum(1), None
    p = q.exp()
    if masked:
        # p is 0 there, and 0 times -inf is nan.
        q.masked_fill_(torch.isneginf(q), 0)
    return most, p.sum(1), torch.linalg.vecdot(p, q)


def cotangent(
    z: Tensor,
    norm: Tensor,
    named: Tensor,
    by_logp: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor,
    masked: bool,
    out: Tensor,
) -> Tensor:
    """See `TileForm.cotangent`. d logp_t / dz = onehot(t) - p, and d H / dz_i = -p_i (log p_i + H)."""
    # Each of the K named ids takes p away in proportion to its own gradient, so the dense part needs their sum alone.
    q, total = torch.sub(z, norm[:, None], out=out), by_logp.sum(1, keepdim=True)
    if by_entropy is None:
        d = q.exp_().mul_(-total)
    else:
        p = q.exp()
        if masked:
            q.masked_fill_(torch.isneginf(q), 0)
        # -(g_logp + g_H (q + H)) p
        d = q.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(total).mul_(p).neg_()
    return with_named(d, named, by_logp)


TORCH = TileForm(fold, cotangent)


def _form_results(
    form: TileForm, z: Tensor, norm: Tensor, named: Tensor, by: Tensor, want: bool
) -> list[Tensor | None]:
    """Returns the results of both operations on these scores, the scores after both, and the gradient written in their
    place. The rows of `by`: the gradients by two named log-probs, the gradient by the entropy, the entropy."""
    # `read_only` shows whether a form changes scores that it may only read, `overwritten` whether it can write there.
    read_only, overwritten = z.clone(), z.clone()

    def gradient(x: Tensor, out: Tensor) -> Tensor:
        return form.cotangent(x, norm, named, by[:2].t(), by[2] if want else None, by[3], True, out)

    folded, fresh = form.fold(read_only, want, True), gradient(read_only, torch.empty_like(z))
    return [*folded, fresh, read_only, gradient(overwritten, overwritten)]


def largest_gap(form: TileForm, device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Returns the largest difference between a form and torch's operations, relative to the largest number, on a small
    tile of `width` ids, with banned ids, a row without any id, and large scores. nan where one has nan."""
    # One row for each hard case. 500 overflows exp unless the largest score is subtracted. It stands last, so that a
    # form which reads in pieces has to rescale what it summed before.
    rows, draws = 5, torch.Generator().manual_seed(0)
    z = torch.randn(rows, width, generator=draws, dtype=torch.float64) * 3
    z[1, ::3], z[2, :], z[3, width - 1] = -torch.inf, -torch.inf, 500.0
    z, by = z.to(device, dtype), torch.randn(4, rows, generator=draws, dtype=torch.float64).to(device, dtype)
    # Named ids: first and last places, ids of other blocks, and twice the same id, whose gradients add up.
    named = torch.tensor([[1, width - 1], [4, -3], [0, 0], [width + 5, 2], [7, 7]], device=device)
    worst = 0.0
    for want in (False, True):
        # The row without any id has norm -inf, and -inf minus -inf would be nan in both forms.
        norm = torch.logsumexp(z, 1).nan_to_num(neginf=0.0)
        results = [_form_results(f, z, norm, named, by, want) for f in (form, TORCH)]
        for ours, theirs in zip(*results, strict=True):
            if ours is not None and theirs is not None:
                largest = theirs.abs().nan_to_num(posinf=0.0).clamp_max(1e30).max().clamp_min(1.0)
                # Equal first: two equal infinities have the difference nan.
                gaps = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / largest)
                worst = max(worst, float(gaps.max())) if not bool(gaps.isnan().any()) else float("nan")
    return worst


def within(named: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(place, inside): a valid column of each named id in a block of `width` ids, and whether the id lies in it."""
    # `gather` and `scatter` need valid columns. Of other ids the caller makes what they read or add zero.
    return named.clamp(0, width - 1), (named >= 0) & (named < width)


def with_named(d: Tensor, named: Tensor, by_logp: Tensor) -> Tensor:
    """`d` [C, B] with each token's `by_logp` [C, K] added at its named ids, in place."""
    place, inside = within(named, d.shape[1])
    return d.scatter_add_(1, place, by_logp.masked_fill(~inside, 0))


class RunningSoftmax:
    """The numbers m, S and U of M tokens over the blocks that were read so far."""

    def __init__(self, like: Tensor, want_entropy: bool) -> None:
        # The lowest finite number and not -inf, since `add` subtracts it from others of its kind.
        self.most = torch.full_like(like, torch.finfo(like.dtype).min)
        self.mass = torch.zeros_like(like)
        self.spread = torch.zeros_like(like) if want_entropy else None

    def add(self, rows: slice, most: Tensor, mass: Tensor, spread: Tensor | None) -> None:
        """Join what `TileForm.fold` found of a block, for the tokens `rows`."""
        # With m' = max of both: exp(z - m') = exp(z - m) exp(m - m'), and z - m' = (z - m) + (m - m').
        # So S' = exp(m - m') S, and U' = exp(m - m') (U + (m - m') S). U comes first, because it reads the old S.
        old, new = self.most[rows], torch.maximum(self.most[rows], most)
        old_factor, block_factor = torch.exp(old - new), torch.exp(most - new)
        if self.spread is not None and spread is not None:
            earlier, of_block = self.spread[rows] + (old - new) * self.mass[rows], spread + (most - new) * mass
            self.spread[rows] = old_factor * earlier + block_factor * of_block
        self.mass[rows] = old_factor * self.mass[rows] + block_factor * mass
        self.most[rows] = new

    def norm(self) -> Tensor:
        """log sum exp(z)"""
        return self.mass.log() + self.most

    def entropy(self) -> Tensor | None:
        return None if self.spread is None else self.mass.log() - self.spread / self.mass


Blocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""The blocks (first id, numbers [C, B]) of some tokens. Each reading computes them again."""


def each(blocks: Blocks, change: Callable[[Tensor], Tensor]) -> Blocks:
    """The blocks with every number changed."""
    return lambda: ((first, change(x)) for first, x in blocks())


def normalised(blocks: Blocks, soft: Callable[[Tensor, int], Tensor], single: bool) -> Blocks:
    """`soft`, torch's log-softmax or softmax, over all blocks.

    Args:
        single: there is one block, whose result is computed once and kept.
    """
    # With one block torch's own function sees the whole row, so the bits are equal to the plain computation's. With
    # more blocks, a first reading computes the norm, and every use reads the blocks once more.
    if single:
        whole = [(first, soft(z, 1)) for first, z in blocks()]
        return lambda: whole
    running = None
    for _, z in blocks():
        running = running or RunningSoftmax(z[:, 0], False)
        running.add(slice(None), *fold(z, False, True))
    assert running is not None
    norm = running.norm()[:, None]
    # In place, since every reading of `blocks` makes new numbers.
    if soft is torch.softmax:
        return each(blocks, lambda z: z.sub_(norm).exp_())
    return each(blocks, lambda z: z.sub_(norm))


# --- by compiled code, in float32 on the CPU: each operation reads the scores once, where torch's read or write them
# three to eight times -----------------------------------------------------------------------------------------------

NATIVE_BOUND = 1e-5
"""Largest difference from torch's operations, relative to the largest number."""
NATIVE_WIDTH = 83
"""Ids of the small tile on which both are compared: no multiple of the width of a vector."""


def _native_fold(z: Tensor, want_entropy: bool, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `TileForm.fold`. Masked scores need no other path."""
    z = z.contiguous()
    most, mass, spread = z.new_empty(3, len(z))
    library().fold_rows(*addresses(z, most, mass, spread if want_entropy else None), *z.shape)
    return most, mass, spread if want_entropy else None


def _native_cotangent(
    z: Tensor,
    norm: Tensor,
    named: Tensor,
    by_logp: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor,
    masked: bool,
    out: Tensor,
) -> Tensor:
    """See `TileForm.cotangent`."""
    z, norm, total = z.contiguous(), norm.contiguous(), by_logp.sum(1)
    by, entropies = (None, None) if by_entropy is None else (by_entropy.contiguous(), entropy.contiguous())
    # A wrong dtype or stride would not fail in C: it would read other memory.
    tensors = z, norm, total, by, entropies, out
    assert out.is_contiguous() and all(x is None or x.dtype == torch.float32 for x in tensors)
    library().cotangent_rows(*addresses(*tensors), *z.shape)
    return with_named(out, named, by_logp)


NATIVE = TileForm(_native_fold, _native_cotangent)


@cache
def native() -> TileForm:
    """The compiled form, after it agreed with torch's operations on a small case. EngineError where it does not."""
    gap = largest_gap(NATIVE, torch.device("cpu"), torch.float32, NATIVE_WIDTH)
    # Written as `not <=`, so that NaN is refused as well.
    if not gap <= NATIVE_BOUND:
        raise EngineError(
            f"the head's compiled code differs from torch's operations by {gap:.2g} of the largest number, and"
            f" {NATIVE_BOUND:.0e} is allowed: report it, and set model.kernels=torch meanwhile"
        )
    return NATIVE
