"""The embedded engine's form of a model with a recurrent state: it caches the tokens and computes each sequence again.

A state cannot be cut back to the beginning that two sequences share, as keys and values can. So the pool holds the id
of each token in their place, and a hidden state is computed from all ids up to it. It is exact, and each token costs a
pass over its whole sequence: for small models and for trying out. vLLM serves large ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.forward_plan import Plan
from posttrain.engine.embedded.cache.key_value_cache import CachePool, ragged_arange
from posttrain.engine.embedded.load_weights import replace_weights
from posttrain.engine.embedded.schedule.slots import Slots
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.model.recurrent_state import BATCH, RowLayout, rows_alone
from posttrain.engine.model.supported_models import LayerShape
from posttrain.system.errors import EngineError

TOKEN = LayerShape(1, 1, 1)
"""The shape of what is cached of a token: its id, as one key."""
MOST_IDS = 1 << 24
"""Ids below this are exact as float32."""


class RecomputedModel(CachedModel):
    """`CachedModel` of a model with a recurrent state."""

    def _make_cache(self, shapes: list[LayerShape], context: int) -> None:
        if self.vocabulary > MOST_IDS:
            raise EngineError(f"a vocabulary of {self.vocabulary:,} ids: at most {MOST_IDS:,} can be cached")
        # No attention runs over this pool, so it needs no compiled kernels.
        self.pool = CachePool([TOKEN], torch.float32, self.read_out.weight.device, "torch")
        self.fused, self.lanes, self._logit_rows = False, 1, None  # `refuse_same_bits` has refused fixed rows
        self._layout = RowLayout(self.kernels)

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        replace_weights(self.module, tensors)

    def run(self, plan: Plan) -> tuple[Tensor, PackedLayout | None]:
        """(hidden states [N, H] of a plan's positions; None). The positions' ids are cached."""
        self._keep(plan.rows, plan.ids[: len(plan.rows)])
        # Positions name the rows of their sequence. Those of one piece, each a row longer, become one sequence.
        rows_seen = [plan.visible[a : a + n] for a, n in zip(plan.starts, plan.lengths, strict=True)]
        seqs: list[tuple[np.ndarray, int]] = []
        for rows in rows_seen:
            if seqs and len(rows) == len(seqs[-1][0]) + 1 and np.array_equal(rows[:-1], seqs[-1][0]):
                seqs[-1] = rows, seqs[-1][1] + 1  # the next position of the same piece
            else:
                seqs.append((rows, 1))
        at = len(rows_seen)
        for n in plan.dense:
            seqs.append((plan.rows[at : at + n], n))
            at += n
        return self._last_states([*seqs, *plan.chunks]), None

    def ahead(self, slots: Slots, at: np.ndarray, ids: np.ndarray, position: np.ndarray) -> Tensor:
        """[n, H]: hidden states of one token for each slot of `at`."""
        self._keep(slots.table[at, position], ids)
        seqs = [(slots.table[i, : p + 1], 1) for i, p in zip(at.tolist(), position.tolist(), strict=True)]
        return self._last_states(seqs)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """[N, H]: hidden states of whole sequences back to back. Each sequence begins at position 0."""
        starts = np.flatnonzero(positions.cpu().numpy() == 0)
        lengths = np.diff(np.append(starts, len(ids)))
        return rows_alone(self.read_out, ids.cpu().numpy(), lengths, np.arange(len(ids)), self._layout, BATCH)

    def _keep(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Store these ids in the pool rows, as keys of width 1. The values are the same ids, and nobody reads them."""
        key = torch.from_numpy(np.asarray(ids, np.float32)).to(self.pool.device)[None, :, None]
        self.pool.write(0, torch.from_numpy(rows).to(self.pool.device), key, key)

    def _last_states(self, seqs: list[tuple[np.ndarray, int]]) -> Tensor:
        """The last hidden states of sequences: of each the pool rows of its ids and how many states are wanted."""
        if not seqs:
            return self.read_out.weight.new_zeros(0, self.read_out.weight.shape[1])
        lengths, wanted = (np.array(x, np.int64) for x in ([len(r) for r, _ in seqs], [n for _, n in seqs]))
        places = self.pool.places(torch.from_numpy(np.concatenate([r for r, _ in seqs])).to(self.pool.device), 1)
        # The cached "keys" are the token ids.
        ids = self.pool.keys[0][places, 0].long().cpu().numpy()
        last = np.repeat(np.cumsum(lengths) - wanted, wanted) + ragged_arange(wanted)
        return rows_alone(self.read_out, ids, lengths, last, self._layout, BATCH)
