"""Weights of all ranks on one rank, in buckets.

A rank holds no more than its own parts and a bucket of them; the receiving one holds a bucket of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.exchange.ranks import check_same
from posttrain.core.exchange.shards import Shard
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.system.errors import InvariantError

BUCKET = 64 << 20
"""Most bytes of a bucket, of all ranks together. A larger weight is a bucket of its own."""
ALIGNED = 16
"""Each part begins at a multiple of this many bytes, so that it can be read in place as any dtype."""


@dataclass(frozen=True)
class _Label:
    """The description of one part that a rank sends before the part itself."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sent: int
    """Bytes that the rank sends for it, filled up to a multiple of `ALIGNED`; 0 where it sends none."""


def gathered(shards: Iterable[Shard], ranks: ProcessRanks, version: int, *, bucket: int = 0) -> Iterator[Shard]:
    """The parts of all ranks on rank 0; nothing on the others, which must read it to its end as well.

    A later part may overwrite the memory of one, so copy what is kept (`role.sync.whole_tensors` does). A weight that
    comes in one part has its own. What every rank holds whole comes from rank 0, and of several copies the first is
    sent.

    Args:
        version: of the weights of this rank. InvariantError where another rank has another one, or other weights.
        bucket: most bytes of a bucket; 0: `BUCKET`. That of rank 0 counts.
    """
    advice = "A rank left out an update, so its part is stale: nothing made of it could be trusted"
    check_same(ranks, version, "version of the weights", advice)
    own_shards = list(shards)
    # Everybody's labels go to everybody first, so each rank makes the same buckets, and then only bytes are exchanged.
    answers: list[tuple[int, list[_Label]]] = ranks.every((bucket or BUCKET, [_label(s, ranks) for s in own_shards]))
    bucket, table = answers[0][0], [labels for _, labels in answers]
    for rank, labels in enumerate(table):
        # Compared by every rank, so that all of them raise, and none is left waiting in the exchange of the bytes.
        if [(x.name, x.dtype, x.shape) for x in labels] != [(x.name, x.dtype, x.shape) for x in table[0]]:
            raise InvariantError(
                f"rank {rank} has other weights than rank 0: build the same model, in the same dtype, on every rank"
            )
    copy_ranks = ranks.world // ranks.replicas
    # Ranks of the other copies have taken part in the checks. They send nothing, because their parts equal those of the
    # first copy.
    if ranks.rank >= copy_ranks:
        return
    table, group = table[:copy_ranks], ranks.group if ranks.replicas == 1 else ranks.mesh.get_group("shard")
    # A gather needs pieces of the same size, so each bucket is as wide as the rank with the most bytes in it needs.
    runs = [(run, max(sum(labels[i].sent for i in run) for labels in table)) for run in _runs(table, bucket)]
    # The same memory serves all buckets, since what is freed for each one would stay with the C library. Row 0 is what
    # this rank sends. On the receiving rank a row for each rank follows.
    widest = max((width for _, width in runs), default=0)
    memory = torch.zeros(1 + len(table) * (ranks.rank == 0), widest, dtype=torch.uint8)
    for run, width in runs:
        sent_row, at = memory[0, :width], 0
        for i in run:
            if sent := table[ranks.rank][i].sent:
                raw = own_shards[i].tensor.detach().contiguous().view(-1).view(torch.uint8)
                sent_row[at : at + raw.numel()] = raw
                at += sent
        received = [part[:width] for part in memory[1:]] if ranks.rank == 0 else None
        dist.gather(sent_row, received, group=group, group_dst=0)
        for rank, part in enumerate(received or ()):
            yield from _read(part, [table[rank][i] for i in run], rank)


def _label(shard: Shard, ranks: ProcessRanks) -> _Label:
    """The label of one of this rank's parts."""
    size = shard.tensor.numel() * shard.tensor.element_size()
    # A weight that every rank holds whole is sent by rank 0 alone. The others send a label and no bytes.
    doubled = shard.whole and ranks.rank > 0 and size > 0
    sent = 0 if doubled else -(-size // ALIGNED) * ALIGNED
    return _Label(shard.name, shard.tensor.dtype, shard.shape, shard.offsets, tuple(shard.tensor.shape), sent)


def _runs(table: list[list[_Label]], bucket: int) -> Iterator[list[int]]:
    """For each bucket the numbers of its weights, as places in every rank's list of labels."""
    run, size = list[int](), 0
    for i in range(len(table[0])):
        weight_size = sum(labels[i].sent for labels in table)
        # `run and`: a weight that is larger than a bucket gets one of its own, and no empty one before it.
        if run and size + weight_size > bucket:
            yield run
            run, size = [], 0
        run.append(i)
        size += weight_size
    if run:
        yield run


def _read(part: Tensor, labels: list[_Label], rank: int) -> Iterator[Shard]:
    """The parts that `rank` has sent in one bucket, cut out of its bytes."""
    at = 0
    for label in labels:
        count = math.prod(label.sizes)
        if not label.sent and (count or rank > 0):
            continue  # sent by rank 0, or no part of this weight here; an empty weight is rank 0's alone
        raw = part[at : at + count * label.dtype.itemsize]
        if label.sizes == label.shape:
            raw = raw.clone()  # nobody copies a weight that comes in one part
        yield Shard(label.name, raw.view(label.dtype).view(label.sizes), label.shape, label.offsets)
        at += label.sent
