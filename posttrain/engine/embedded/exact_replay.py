"""The sampler's own function of the learner's weights, for `exact=true`: its log-probs, bit for bit.

Two forward passes of one model differ in their last bits, because matrix products and sums depend on the shapes they
are computed in. A deterministic engine (`EmbeddedEngine`) computes every position in a pass of the same number of rows,
and its attention over exactly the rows that the position sees. So the log-prob of a token is one function of weights
and tokens, whatever else is in the pass. Here that function is computed again, with the weights of a learner, by the
same code in the same shapes. The learner takes these values. Its gradients still come from the packed pass, whose
log-probs differ by rounding alone.

Axis letters: N packed positions, M spoken tokens, R rows of a pass, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import Packed
from posttrain.engine.embedded.cache.cache_blocks import BLOCK
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.key_value_cache import CachedLayout, ragged_arange
from posttrain.engine.head.logit_rules import LogitRules
from posttrain.engine.head.logit_transform import KeptMask
from posttrain.engine.model.policy_model import Policy, served_tensors

ROWS = 64
"""The positions of a deterministic forward pass are the number of slots, rounded up to a multiple of this."""
TOKENS = 16384
"""Most positions whose keys and values are held at once."""


def fixed_rows(slots: int) -> int:
    """Positions of every forward pass of a deterministic engine with this many slots."""
    return -(-slots // ROWS) * ROWS


class SamplerReplay:
    """Scores tokens as a deterministic engine with `slots` slots does, by a copy of the learner's model. The copy takes
    the learner's weights at each call."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self._learner: nn.Module = policy.module
        self._rows = fixed_rows(slots)
        self._served = CachedModel(
            policy.twin().module, policy.context, device=str(policy.device), rows=self._rows, kernels=policy.kernels
        )

    @torch.no_grad()
    def values(self, packed: Packed) -> Tensor:
        """float32 [M]: the log-prob of each spoken token under the learner's weights of now.

        Raises:
            InvariantError: the contract bans a token that was said.
        """
        self._served.load(served_tensors(self._learner))
        return torch.cat([self._part(part) for part in packed.split(TOKENS)])

    @torch.inference_mode()
    def _part(self, packed: Packed) -> Tensor:
        """`values` of segments that together have at most `TOKENS` positions."""
        pool, size, rows = self._served.pool, len(packed.ids_N), self._rows
        row_N, blocks = _places(packed)
        if pool.rows < blocks * BLOCK:
            pool.grow(blocks)
        out = torch.empty(packed.spoken, device=pool.device)
        # Spoken tokens in the order of their positions, so that two binary searches find the ones that a pass predicts.
        order = np.argsort(packed.source_M, kind="stable")
        sources = packed.source_M[order]
        mask = None if packed.kept is None else KeptMask(packed.kept, pool.device)
        rules = LogitRules.of(packed, self._served.vocabulary, pool.device)
        # As many positions in each pass as a step of the engine has. It sees those of earlier passes and its own.
        for a in range(0, size, rows):
            b = min(a + rows, size)
            hidden = self._pass(packed, row_N, a, b)
            lo, hi = np.searchsorted(sources, (a, b))
            said = order[lo:hi]
            if hi > lo:
                z = self._served.logits(hidden[torch.from_numpy(sources[lo:hi] - a).to(pool.device)])
                targets = torch.from_numpy(packed.target_M[said].astype(np.int64)).to(pool.device)
                logp = self._distributions(z, packed, said, rules, mask).gather(1, targets[:, None])[:, 0]
                out[torch.from_numpy(said).to(pool.device)] = logp.float()
        return out.clone()

    def _pass(self, packed: Packed, row_N: np.ndarray, a: int, b: int) -> Tensor:
        """Hidden states of the positions a..b, which are cached in these pool rows. The rest of the pass is idle."""
        # A last pass with fewer positions is filled up, because the bits of a product depend on its number of rows.
        idle = np.zeros(self._rows - (b - a), np.int64)
        before = packed.positions_N[a:b]
        # A segment lies in consecutive rows, so position p of it sees p + 1 rows from the first on.
        visible = np.repeat(row_N[a:b] - before, before + 1) + ragged_arange(before + 1)
        layout = CachedLayout(self._served.pool, row_N[a:b], visible, np.append(before + 1, idle), None)
        device = self._served.pool.device
        ids = torch.from_numpy(np.append(packed.ids_N[a:b].astype(np.int64), idle)).to(device)
        at = torch.from_numpy(np.append(packed.positions_N[a:b], idle)).to(device)
        return self._served.hidden(ids, at, layout)[: b - a].clone()

    def _distributions(
        self, z: Tensor, packed: Packed, said: np.ndarray, rules: LogitRules | None, mask: KeptMask | None
    ) -> Tensor:
        """Log-probs of logits z [C, V], computed as `token_sampler.DrawDistributions` does, with the kept sets of the
        draw. `said`: for each row of z, the index of its spoken token in the batch."""
        if rules is not None:
            # One by one: `adjust` takes tokens that follow each other, and in the order of positions these may not.
            for row, m in zip(z.split(1), said.tolist(), strict=True):
                rules.adjust(row, m)
        if packed.sampling.temperature != 1:
            # Rounded to float32 first, as the sampler's column of contracts is: float64 could give another last bit.
            beta = torch.tensor([1 / packed.sampling.temperature], dtype=torch.float32, device=z.device)
            z = z.mul_(beta.to(z.dtype))
        if mask is not None:
            outside = torch.cat([mask.outside(m, m + 1, z.shape[1]) for m in said.tolist()])
            z = z.masked_fill_(outside, float("-inf"))
        return torch.log_softmax(z, -1)


def _places(packed: Packed) -> tuple[np.ndarray, int]:
    """(pool row of each position [N], blocks of all). Each segment begins a block, as in the engine: compiled
    attention sums block by block."""
    blocks_S = -(-packed.lengths_S.astype(np.int64) // BLOCK)
    starts_S = (np.cumsum(blocks_S) - blocks_S) * BLOCK
    return np.repeat(starts_S, packed.lengths_S) + packed.positions_N, int(blocks_S.sum())
