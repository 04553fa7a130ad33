"""Architectures whose layers keep a recurrent state: Mamba, linear attention, short convolutions.

In a packed row the state of one sequence would run on into the next one, and no attention mask stops it. So each
sequence gets a row of its own. Padding on its right changes nothing in a state that runs from left to right.

Axis letters: N packed positions, M of them read, S segments; a bucket is B segments padded to L positions; H heads, K
key-value heads, D head width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.core.batch import Packed
from posttrain.engine.head.kernel_table import kernel
from posttrain.engine.head.readout import ReadOut
from posttrain.engine.layers.attention import WASTE, AttentionCall, CollectRows, buckets
from posttrain.engine.layers.expert_routing import PackedRouting
from posttrain.engine.model.architecture_kinds import keeps_state

BATCH = 16384
"""Most positions of one batch of rows that are only scored."""


def is_stateful(module: PreTrainedModel) -> bool:
    """`keeps_state` of a model that is loaded."""
    return keeps_state(module.config.to_dict())


class RowLayout:
    """Causal attention of a batch of sequences, one in each row, padded on the right."""

    def __init__(self, kernels: KernelChoice = "auto") -> None:
        self._kernels: KernelChoice = kernels

    def attend(self, call: AttentionCall) -> Tensor:
        """query [B, H, L, D], key and value [B, K, L, D] -> [B, L, H, D]."""
        query, window = call.query, call.window
        length, mask = query.shape[2], None
        # Without a window the kernel's causal mask is enough: no real position looks right, where padding lies.
        if window is not None and window < length:
            at = torch.arange(length, device=query.device)
            distance = at[:, None] - at
            mask = (distance >= 0) & (distance < window)
        function = kernel("attention", query.device, query.dtype, self._kernels).function
        return function(query, call.key, call.value, mask, call.scaling, call.softcap).transpose(1, 2)


class SeparateRows:
    """Hidden states of packed segments, each computed in a row of its own. It has the interface of
    `shared_prefixes.Sharing` and its order of rows."""

    def __init__(self, out: ReadOut, kernels: KernelChoice) -> None:
        self._out, self._layout = out, RowLayout(kernels)
        self.computed = 0
        """Positions computed by all calls of `hidden` so far, without those that fill up rows."""

    def hidden(self, packed: Packed, at: np.ndarray | None = None, routing: PackedRouting | None = None) -> Tensor:
        """[M, hidden]: the hidden state that predicts each spoken token; with `at` those at these packed positions."""
        self.computed += len(packed.ids_N)
        wanted = packed.source_M if at is None else at
        return rows_alone(self._out, packed.ids_N, packed.lengths_S, wanted, self._layout)


def rows_alone(
    out: ReadOut, ids_N: np.ndarray, lengths_S: np.ndarray, wanted_M: np.ndarray, layout: RowLayout, most: int = 0
) -> Tensor:
    """[M, hidden]: hidden states at the packed positions `wanted_M`, each segment computed in a row of its own.

    Args:
        most: most positions of one batch; 0: a bucket is one batch, however large.
    """
    # place_N gives for each packed position its row in the padded batches, laid end to end.
    starts_S = np.cumsum(lengths_S) - lengths_S
    place_N = np.empty(len(ids_N), np.int64)
    parts: list[Tensor] = []
    row = 0
    # The first segment of each bucket is its longest.
    for group in buckets(np.asarray(lengths_S, np.int64), WASTE):
        longest = int(lengths_S[group[0]])
        per_batch = max(1, most // longest) if most else len(group)
        for members in (group[i : i + per_batch] for i in range(0, len(group), per_batch)):
            # Padding repeats the segment's last token. Any token would do, since nothing real comes behind it.
            at_BL = starts_S[members][:, None] + np.minimum(np.arange(longest), lengths_S[members][:, None] - 1)
            real_BL = np.arange(longest) < lengths_S[members][:, None]
            # `flatten` numbers a batch's positions row by row, and `row` counts all batches before it.
            place_N[at_BL[real_BL]] = row + np.flatnonzero(real_BL)
            ids = torch.from_numpy(ids_N[at_BL].astype(np.int64)).to(out.weight.device)
            parts.append(out.rows(ids, layout).flatten(0, 1))
            row += at_BL.size
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return CollectRows.apply(rows, torch.from_numpy(place_N[wanted_M]).to(rows.device))
