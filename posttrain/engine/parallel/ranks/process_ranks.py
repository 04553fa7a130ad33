"""Ranks as processes of torch.distributed: who they are, and the exchange of small Python values between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from posttrain.engine.parallel.ranks.signed_messages import signed, users_key
from posttrain.system.errors import ConfigError

SECONDS = 600.0
"""How long a rank waits in an exchange for the others before it stops."""


class ProcessRanks:
    """`core.exchange.ranks.Ranks` over a group of processes on CPU.

    Args:
        group: of these processes, this one among them; None: all of them.
        mesh: of the same processes, with one axis, or two where there are copies of the weights; None: one axis.
        seconds: how long groups made of these wait in an exchange.
    """

    def __init__(
        self, group: ProcessGroup | None = None, mesh: DeviceMesh | None = None, seconds: float = SECONDS
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "this process does not belong to a group yet: enter"
                " `posttrain.engine.parallel.ranks.process_ranks.joined` first"
            )
        self.group: ProcessGroup = cast("ProcessGroup", GroupMember.WORLD) if group is None else group
        self.mesh = DeviceMesh.from_group(self.group, "cpu") if mesh is None else mesh
        self.seconds = seconds

    @property
    def replicas(self) -> int:
        """Copies of the weights that these ranks have together. Each copy is cut over world / replicas ranks."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def every(self, value: Any) -> list[Any]:
        """The value of every rank, pickled and signed, in the order of the ranks."""
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self.group)
        return out

    def part(self, members: Sequence[int], replicas: int = 1) -> ProcessRanks | None:
        """These ranks as a group of their own; None on a rank that is not among them. Every process calls it.

        Args:
            replicas: copies of the weights (HSDP): ranks 0 to n - 1 hold the first one, the next n the second one.
        """
        if replicas < 1 or len(members) % replicas:
            raise ConfigError(
                f"replicas={replicas} of {len(members)} ranks: each copy of the weights is cut over the same number of"
                " ranks, so give a divisor of their number"
            )
        # [replicas, parts]: a row is one copy of the weights, a column the ranks that hold the same part of it.
        grid = torch.tensor([dist.get_global_rank(self.group, r) for r in members]).view(replicas, -1)
        group = self._own_group([grid.flatten()])
        # Columns first, then rows: the order of the mesh's names, replicate and shard.
        axis_groups = [] if replicas == 1 else [self._own_group(list(grid.T)), self._own_group(list(grid))]
        # Only now, because every process must take part in making every group, also of those that it is not in.
        if group is None:
            return None
        typed_groups: Any = axis_groups  # a member has a group on each axis, so none of them is None
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group(typed_groups, "cpu", mesh=grid, mesh_dim_names=names) if axis_groups else None
        return ProcessRanks(group, mesh, self.seconds)

    def _own_group(self, lines: list[torch.Tensor]) -> ProcessGroup | None:
        """A group for each line of global ranks; the one that this process is in."""
        limit = timedelta(seconds=self.seconds)
        # All processes make all groups in the same order, which is how torch gives them the same names.
        groups: list[Any] = [dist.new_group(line.tolist(), timeout=limit) for line in lines]
        me = dist.get_rank()
        return next((g for g, line in zip(groups, lines, strict=True) if me in line), None)


@contextmanager
def joined(
    rank: int | None = None,
    world: int | None = None,
    address: str = "env://",
    seconds: float = SECONDS,
    replicas: int = 1,
) -> Iterator[ProcessRanks]:
    """Inside, this process is one of `world` ranks (gloo). What they send each other as pickles is signed with their
    user's key (`signed_messages.users_key`).

    Args:
        rank, world: both or neither; None: from the environment, as torchrun sets it.
        address: where the ranks meet, such as `tcp://127.0.0.1:29500`, `file:///tmp/meet`, or the environment.
        replicas: copies of the weights; see `ProcessRanks.part`.
    """
    rank_and_world: dict[str, Any] = {} if rank is None or world is None else {"rank": rank, "world_size": world}
    with signed(users_key()):
        dist.init_process_group("gloo", init_method=address, timeout=timedelta(seconds=seconds), **rank_and_world)
        try:
            yield in_copies(seconds, replicas)
        finally:
            dist.destroy_process_group()


def in_copies(seconds: float, replicas: int) -> ProcessRanks:
    """All processes of the group, with so many copies of the weights."""
    everyone = ProcessRanks(seconds=seconds)
    ranks = everyone if replicas == 1 else everyone.part(range(everyone.world), replicas)
    assert ranks is not None  # every process is a member
    return ranks
