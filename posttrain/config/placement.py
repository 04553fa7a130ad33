"""The place where the roles of a run work: `placement=local`, `placement=processes` or `placement=ray`. No line of the
step reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from posttrain.config.engines import Embedded, Engine
from posttrain.system.errors import ConfigError, at_least
from posttrain.system.machine import cores


@dataclass(frozen=True, kw_only=True)
class Local:
    """One process: the learner and its engine take turns."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Engines in processes of their own on this machine, beside the learner's."""

    engines: int = 1
    """Engines that sample, each with its own copy of the weights and `slots` sequences at once."""
    cores: int = 0
    """CPU cores of each engine, which its process may not leave. Engine 0 has the last cores, engine 1 those before
    them, and the learner keeps to the rest, where there is one. 0: all may use all cores."""
    transport: Literal["shared", "file", "collective"] = "shared"
    """How weights come to the engines. shared: a block of memory of this machine. file: files in `folder`. collective:
    a broadcast over the network by torch.distributed, which needs no folder; it has no password."""
    folder: str | None = None
    """With transport=file: a folder that all machines see, for this run alone. None: a temporary one here."""
    delta: bool = False
    """Send only the tensors and bytes that changed since the last push. The engines serve the same bits; learner and
    engines each keep one more copy of the weights."""
    timeout: float = 600.0
    """Seconds that a turn, an update or the start of an engine may take. After them the run stops and names who waits
    for whom. An engine without any sign of life for a tenth of this time is replaced."""
    deaths: int = 3
    """How many engines one turn may kill, or processes of environments one episode. Then the episode counts as failed
    and is named in the record."""
    environments: int = 0
    """Processes that play episodes: the environment's code and its tools run there, and answers are judged by the
    learner's verifiers. 0: episodes are played in the learner's process."""

    def __post_init__(self) -> None:
        at_least(self, "placement.", engines=1, cores=0, deaths=1, environments=0)
        if self.folder is not None and self.transport != "file":
            raise ConfigError(
                f"placement.folder={self.folder}: only placement.transport=file writes into a folder. Leave it out"
            )
        if not self.timeout > 0:
            raise ConfigError(f"placement.timeout={self.timeout}: must be > 0")


@dataclass(frozen=True, kw_only=True)
class Ray(Processes):
    """Engines as actors of a Ray cluster (`pip install "posttrain[ray]"`). There `cores` are CPUs that Ray reserves for
    each engine."""

    address: str | None = None
    """Address of a Ray cluster that runs already, such as 10.0.0.7:6379 or `auto`. None: Ray is started on this machine
    and ended with the run."""
    verifiers: bool = False
    """Whether the workers of verifiers are actors too, spread over the machines of the cluster. A file with a reward
    function must lie under the same path there. They reserve no CPUs."""


Placement = Local | Processes | Ray


def placement_refusals(placement: Placement, engine: Engine) -> str:
    """Returns what an engine in another process cannot do, and what to change; '' where all fits."""
    if isinstance(placement, Local):
        return ""
    kind = type(placement).__name__.lower()
    if isinstance(engine, Embedded):
        if engine.timeline:
            return (
                f"engine.timeline=true writes times of an engine in the learner's process, and placement={kind} has"
                " none there: set engine.timeline=false, or placement=local"
            )
        if engine.sleep:
            return (
                f"engine.sleep=true is about an engine in the learner's process, and placement={kind} has none there:"
                " set engine.sleep=false, or placement=local"
            )
        return ""
    if engine.url is not None:
        return (
            f"engine.url={engine.url} is a server that runs already, and placement={kind} starts engines of its own:"
            " leave out engine.url, or set placement=local"
        )
    if engine.workers > 1 and isinstance(placement, Ray):
        return (
            f"engine.workers={engine.workers} under placement=ray: we could not try workers of vLLM inside of Ray's"
            " actors. Set placement=processes or local, or engine.workers=1"
        )
    return ""


def learner_cores(placement: Placement) -> int:
    """Cores of this machine that the engines leave to the learner. 0: the engines have no cores of their own, or they
    leave none; the learner then uses all."""
    if isinstance(placement, Local | Ray) or not placement.cores:
        return 0
    return max(0, cores() - placement.cores * placement.engines)


def check_machine(placement: Placement) -> None:
    """ConfigError for what this machine lacks: a package, or cores."""
    if isinstance(placement, Ray) and find_spec("ray") is None:
        raise ConfigError(
            'placement=ray needs Ray: pip install "posttrain[ray]", or take placement=processes, which needs no package'
        )
    if isinstance(placement, Local | Ray):
        return
    if placement.cores and not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"placement.cores={placement.cores}: this system cannot pin a process to cores. Set placement.cores=0"
        )
    if (wanted := placement.cores * placement.engines) > cores():
        raise ConfigError(
            f"placement.cores={placement.cores} for placement.engines={placement.engines} are {wanted} cores, and this"
            f" process may use {cores()}: set placement.cores=0 (not pinned), or fewer engines"
        )
