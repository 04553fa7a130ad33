"""Changes the logits of one tile, some tokens and a block of ids, before the softmax, and gives the derivative.

Axis letters: C tokens, B ids of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.core.types import TruncationSets
from posttrain.engine.head.logit_rules import LogitRules
from posttrain.engine.layers.layer_products import fits, linear
from posttrain.system.errors import InvariantError


class KeptMask:
    """Kept sets, one of each spoken token, on the device. The mask of each chunk is made from them."""

    def __init__(self, kept: TruncationSets, device: torch.device) -> None:
        self.offsets = kept.offsets
        self.rows = torch.from_numpy(np.repeat(np.arange(len(kept)), np.diff(kept.offsets))).to(device)
        self.ids = torch.from_numpy(kept.ids.astype(np.int64)).to(device)
        self._last = int(kept.ids.max(initial=-1))

    def outside(self, a: int, b: int, width: int, first: int = 0) -> Tensor:
        """bool [b - a, width]: True where tokens a..b did not keep the id, for the ids first..first + width."""
        lo, hi = int(self.offsets[a]), int(self.offsets[b])
        rows, ids = self.rows[lo:hi] - a, self.ids[lo:hi] - first
        # Only where an id may lie outside: a selection makes the CPU wait for the GPU (`logit_rules.Ragged.places`).
        if first or self._last >= width:
            inside = (ids >= 0) & (ids < width)
            rows, ids = rows[inside], ids[inside]
        mask = torch.ones(b - a, width, dtype=torch.bool, device=self.ids.device)
        mask[rows, ids] = False
        return mask


def check_kept(kept: TruncationSets, targets: Tensor) -> None:
    """InvariantError where a kept set does not hold the token that was said."""
    # `reduceat` gives a wrong answer for an empty run, but `TruncationSets` refuses empty sets.
    is_target = np.repeat(targets.cpu().numpy(), np.diff(kept.offsets)) == kept.ids
    has_target = np.logical_or.reduceat(is_target, kept.offsets[:-1]) if len(kept) else np.zeros(0, bool)
    if not has_target.all():
        first = int(np.flatnonzero(~has_target)[0])
        raise InvariantError(
            f"spoken token {first} is not in its own kept set: sampler and batch disagree on the distribution"
        )


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """The steps from the head's product to the softmax: scale, soft-cap, rules, 1 / temperature (`beta`), kept sets."""

    beta: float
    softcap: float | None
    scale: float
    rules: LogitRules | None
    sets: KeptMask | None

    def scores(
        self,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        at: int,
        slopes: list[LogitSlope] | None = None,
        first: int = 0,
    ) -> Tensor:
        """z [C, B] of tokens at..at + C, -inf for a token that cannot be said. `w` and `b` hold the rows of the ids
        first..first + B. The factors of the backward are appended to `slopes`."""
        z = logits(h, w, b, self.scale, self.softcap)
        if slopes is not None and self.softcap is not None:
            # z = c tanh(x / c) has the derivative 1 - tanh^2 = 1 - (z / c)^2. The next steps change z in place.
            slopes.append(LogitSlope(None, 1 - (z / self.softcap).square_()))
        penalised = None if self.rules is None else self.rules.adjust(z, at, first)
        if slopes is not None and penalised is not None:
            slopes.append(LogitSlope(*penalised))
        if self.beta != 1:
            z.mul_(self.beta)
        if self.sets is None:
            return z
        # Last, because the sampler cuts its sets from the distribution after the temperature.
        return z.masked_fill_(self.sets.outside(at, at + len(z), z.shape[1], first), float("-inf"))

    @property
    def masked(self) -> bool:
        """True where there may be tokens that cannot be said."""
        return self.sets is not None or (self.rules is not None and self.rules.bans)

    @property
    def sloped(self) -> bool:
        """True where the backward pass may need factors that `scores` makes."""
        return self.softcap is not None or self.rules is not None

    def outside(self, z: Tensor) -> Tensor | None:
        """bool [C, V]: tokens that cannot be said; None where all can."""
        return torch.isneginf(z) if self.masked else None


@dataclass(frozen=True, eq=False)
class LogitSlope:
    """One elementwise factor of the chain rule, for the whole [C, B] or for some places of it, numbered row by row."""

    places: Tensor | None
    by: Tensor

    def times(self, d: Tensor) -> None:
        """d *= slope"""
        if self.places is None:
            d.mul_(self.by)
        else:
            flat = d.view(-1)
            flat.index_copy_(0, self.places, flat[self.places].mul_(self.by))


def logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """[..., H] -> [..., V] logits in `logit_dtype`. Sampler and learner both call this function."""
    dtype = logit_dtype(weight.dtype)
    h, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # `linear` has no derivative, so the reference form, which autograd differentiates, takes torch's.
    out = (linear if fits(h, w, b) else torch.nn.functional.linear)(h, w, b)
    if scale != 1:
        out = out * scale
    return out if softcap is None else torch.tanh(out / softcap) * softcap


def logit_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the logits for weights of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
