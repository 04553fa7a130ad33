"""The softmax over a vocabulary that is read in blocks: what is kept of each block, and the two operations on a tile.

A tile is the matrix of scores of some tokens and one block of ids. The scores z of one token are read block by block.
Three numbers are kept of what was read: the largest score m, the mass S = sum exp(z - m), and U = sum exp(z - m)
(z - m). At the end log sum exp(z) = m + log S, and the entropy is log S - U / S. A new block can raise m; then S and U
are rescaled. With a single block, log sum exp(z) has the bits of `torch.logsumexp`.

Axis letters: C tokens of one tile, B ids of one block, K named ids of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TileForm:
    """One way to compute the two operations on a tile. Both may overwrite the scores they are given."""

    fold: Callable[[Tensor, bool, bool], tuple[Tensor, Tensor, Tensor | None]]
    """(z [C, B], want_entropy, masked) -> m, S, and U or None, [C] each. `masked`: some scores may be -inf."""
    cotangent: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, bool], Tensor]
    """(z [C, B], norm [C], named [C, K], by_logp [C, K], by_entropy [C] or None, entropy [C], masked) -> the gradient
    [C, B] with respect to z. `named` are ids of the block; those that lie outside of it are ignored."""


def fold(z: Tensor, want_entropy: bool, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `TileForm.fold`."""
    most = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)
    q = z.sub_(most[:, None])
    if not want_entropy:
        return most, q.exp_().sum(1), None
    p = q.exp()
    if masked:
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
) -> Tensor:
    """See `TileForm.cotangent`. With p the distribution and H its entropy: d logp_t / dz = onehot(t) - p, and
    d H / dz_i = -p_i (log p_i + H)."""
    q, total = z.sub_(norm[:, None]), by_logp.sum(1, keepdim=True)
    if by_entropy is None:
        d = q.exp_().mul_(-total)
    else:
        p = q.exp()
        if masked:
            q.masked_fill_(torch.isneginf(q), 0)
        # -(g_logp + g_H (q + H)) p
        d = q.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(total).mul_(p).neg_()
    place, inside = within(named, z.shape[1])
    return d.scatter_add_(1, place, by_logp.masked_fill(~inside, 0))


TORCH = TileForm(fold, cotangent)


def within(named: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(place, inside): a valid column of each named id in a block of `width` ids, and whether the id lies in it."""
    return named.clamp(0, width - 1), (named >= 0) & (named < width)


class RunningSoftmax:
    """The numbers m, S and U of M tokens over the blocks that were read so far."""

    def __init__(self, like: Tensor, want_entropy: bool) -> None:
        self.most = torch.full_like(like, torch.finfo(like.dtype).min)
        self.mass = torch.zeros_like(like)
        self.spread = torch.zeros_like(like) if want_entropy else None

    def add(self, rows: slice, most: Tensor, mass: Tensor, spread: Tensor | None) -> None:
        """Join what `TileForm.fold` found of a block, for the tokens `rows`."""
        old, new = self.most[rows], torch.maximum(self.most[rows], most)
        was, now = torch.exp(old - new), torch.exp(most - new)
        if self.spread is not None and spread is not None:
            self.spread[rows] = was * (self.spread[rows] + (old - new) * self.mass[rows]) + now * (
                spread + (most - new) * mass
            )
        self.mass[rows] = was * self.mass[rows] + now * mass
        self.most[rows] = new

    def norm(self) -> Tensor:
        """log sum exp(z)"""
        return self.mass.log() + self.most

    def entropy(self) -> Tensor | None:
        return None if self.spread is None else self.mass.log() - self.spread / self.mass


Blocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""The blocks (first id, numbers [C, B]) of some tokens, from the first id to the last. They can be read again, and are
then computed again."""


def each(blocks: Blocks, change: Callable[[Tensor], Tensor]) -> Blocks:
    """The blocks with every number changed."""
    return lambda: ((first, change(x)) for first, x in blocks())


def normalised(blocks: Blocks, soft: Callable[[Tensor, int], Tensor], single: bool) -> Blocks:
    """`soft`, torch's log-softmax or softmax, over all blocks; `single`: there is one, which is computed once and
    kept."""
    if single:
        whole = [(first, soft(z, 1)) for first, z in blocks()]
        return lambda: whole
    running = None
    for _, z in blocks():
        running = running or RunningSoftmax(z[:, 0], False)
        running.add(slice(None), *fold(z, False, True))
    assert running is not None
    norm = running.norm()[:, None]
    if soft is torch.softmax:
        return each(blocks, lambda z: z.sub_(norm).exp_())
    return each(blocks, lambda z: z.sub_(norm))
