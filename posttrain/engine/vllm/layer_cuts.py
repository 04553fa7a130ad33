"""Finds how vLLM's layers cut their tensors among its workers (tensor parallelism): which rows or columns this worker
holds.

The layers say it themselves: the same attributes from which vLLM's own weight loaders cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from posttrain.engine.vllm.worker_parts import WorkerPart


@dataclass(frozen=True)
class CutMatrix:
    """The part of one Hugging Face matrix that this worker holds."""

    total: int
    """Rows or columns of the whole matrix."""
    begin: int
    """The first row or column that this worker holds."""
    size: int
    """How many it holds."""


@dataclass(frozen=True)
class Cut:
    """How a layer's tensor is cut among workers: into rows (axis 0) or columns (axis 1). The tensor is one matrix, or
    several that are fused."""

    axis: int
    shards: tuple[CutMatrix, ...]

    def part(self, index: int | None = None) -> WorkerPart:
        """Returns the part of the fused matrix `index`, or of all matrices as one, that this worker holds."""
        if index is not None:
            return WorkerPart(self.axis, (_range(self.shards[index], 0),))
        offsets = [sum(s.total for s in self.shards[:i]) for i in range(len(self.shards))]
        return WorkerPart(self.axis, tuple(_range(s, o) for s, o in zip(self.shards, offsets, strict=True)))

    def place(self, index: int) -> tuple[int, int]:
        """(begin, end) of the fused matrix `index` in this worker's tensor."""
        begin = sum(s.size for s in self.shards[:index])
        return begin, begin + self.shards[index].size


def cut_of(layer: Any, leaf: str) -> Cut | None:
    """Returns the cut of a layer's tensor (`weight` or `bias`). None: each worker holds all of it.

    Raises:
        LookupError: it is cut in a way that is not known here.
    """
    if isinstance(layer, VocabParallelEmbedding):
        # The last worker's part is filled up with rows of no token; these are not counted.
        at = layer.shard_indices
        begin, end = at.org_vocab_start_index, at.org_vocab_end_index
        return _cut(layer.tp_size, 0, CutMatrix(layer.org_vocab_size, begin, end - begin))
    if not isinstance(layer, LinearBase) or isinstance(layer, ReplicatedLinear):
        return None
    rank, count = layer.tp_rank, layer.tp_size
    if isinstance(layer, RowParallelLinear):
        n = layer.input_size_per_partition
        # The bias is added once, after the sum over workers, so each holds all of it.
        return _cut(count, 1, CutMatrix(layer.input_size, rank * n, n)) if leaf == "weight" else None
    if isinstance(layer, QKVParallelLinear):
        # With more workers than key-value heads, several neighbours hold the same head.
        query_rank, kv_rank = rank, rank // layer.num_kv_head_replicas
        # Of queries, keys and values: which part is here, heads of a part, heads of all, width of a head.
        sizes = [
            (query_rank, layer.num_heads, layer.total_num_heads, layer.head_size),
            (kv_rank, layer.num_kv_heads, layer.total_num_kv_heads, layer.head_size),
            (kv_rank, layer.num_kv_heads, layer.total_num_kv_heads, layer.v_head_size),
        ]
        return _cut(count, 0, *[CutMatrix(total * w, part * heads * w, heads * w) for part, heads, total, w in sizes])
    # Before ColumnParallelLinear, because MergedColumnParallelLinear and QKVParallelLinear are subclasses of it.
    if isinstance(layer, MergedColumnParallelLinear):
        return _cut(count, 0, *[CutMatrix(n, rank * (n // count), n // count) for n in layer.output_sizes])
    if isinstance(layer, ColumnParallelLinear):
        n = layer.output_size_per_partition
        return _cut(count, 0, CutMatrix(layer.output_size, rank * n, n))
    raise LookupError(
        f"vLLM's {type(layer).__name__} is cut among workers in a way that is not known here: set engine.workers=1"
    )


def _cut(count: int, axis: int, *shards: CutMatrix) -> Cut | None:
    """The cut among `count` workers; None for one worker."""
    return None if count == 1 else Cut(axis, shards)


def _range(shard: CutMatrix, offset: int) -> tuple[int, int]:
    """(begin, end) of this worker's part in a tensor where the matrix begins at `offset`."""
    return offset + shard.begin, offset + shard.begin + shard.size
