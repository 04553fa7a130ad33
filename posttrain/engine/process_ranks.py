"""Ranks as processes of torch.distributed: who they are, and the exchange of small Python values between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from posttrain.core.errors import ConfigError

SECONDS = 600.0
"""How long a rank waits in an exchange for the others before it stops."""


class ProcessRanks:
    """`core.ranks.Ranks` over a group of processes on CPU.

    Args:
        group: of these processes, this one among them; None: all of them.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "this process does not belong to a group yet: enter `posttrain.engine.process_ranks.joined` first"
            )
        self.group: ProcessGroup = cast("ProcessGroup", GroupMember.WORLD) if group is None else group
        self.mesh = DeviceMesh.from_group(self.group, "cpu")

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def every(self, value: Any) -> list[Any]:
        """The value of every rank, pickled, in the order of the ranks."""
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self.group)
        return out

    def part(self, members: Sequence[int]) -> ProcessRanks | None:
        """These ranks as a group of their own; None on a rank that is not among them. Every rank calls it."""
        group: Any = dist.new_group([dist.get_global_rank(self.group, r) for r in members])
        return ProcessRanks(group) if self.rank in members else None


@contextmanager
def joined(
    rank: int | None = None, world: int | None = None, address: str = "env://", seconds: float = SECONDS
) -> Iterator[ProcessRanks]:
    """Inside, this process is one of `world` ranks (gloo).

    Args:
        rank, world: None: from the environment, as torchrun sets it.
        address: where the ranks meet, such as `tcp://127.0.0.1:29500`, `file:///tmp/meet`, or the environment.
    """
    told: dict[str, Any] = {} if rank is None or world is None else {"rank": rank, "world_size": world}
    dist.init_process_group("gloo", init_method=address, timeout=timedelta(seconds=seconds), **told)
    try:
        yield ProcessRanks()
    finally:
        dist.destroy_process_group()
