"""Environments in processes of their own: what such a process needs to make them, and the pool over them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.build.build_environments import distinct
from posttrain.build.spawn_engines import PLANTED
from posttrain.config.env import Env
from posttrain.config.placement import Local, Processes, Ray
from posttrain.config.run import Run
from posttrain.core.ports import Environment, Sampler
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.engine_process import ProcessHost
from posttrain.engine.pool.environment_pool import EnvironmentPlayer, EnvironmentPool
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.ray_actor import RayHost
from posttrain.engine.pool.remote_environment import EnvironmentStart
from posttrain.environment.make import environment
from posttrain.faults import Fault, named, planted
from posttrain.record.runtime_objects import is_inline, source_file
from posttrain.system.errors import ConfigError


@dataclass(frozen=True)
class EnvironmentParts:
    """Makes the environments of a run in another process. It is pickled."""

    made: tuple[Env | Environment, ...]
    """The configuration of each, or the environment itself where a program handed it."""
    seed: int
    fault: Fault | None

    def __call__(self) -> list[Environment]:
        PLANTED.enter_context(planted(self.fault))
        return [environment(m, self.seed) if isinstance(m, Env) else m for m in self.made]


@dataclass(frozen=True)
class PlacedEnvironments:
    """The players of the episodes of each environment of a run."""

    pool: EnvironmentPool | None = None
    environments: Sequence[Environment] = field(default_factory=list[Environment])
    engines: Callable[[], None] = lambda: None
    """Ends the engines."""

    def player(self, env: Environment) -> EnvironmentPlayer | None:
        """Returns the player of this environment; None: it is played in this process."""
        if self.pool is None:
            return None
        return EnvironmentPlayer(self.pool, next(i for i, e in enumerate(self.environments) if e is env))

    def close(self) -> None:
        """End the processes, then the engines."""
        if self.pool is not None:
            self.pool.close()
        self.engines()


def placed_environments(
    run: Run,
    env: Environment,
    others: Mapping[str, Environment],
    engine: Sampler,
    say: Callable[[str], None] = lambda line: None,
    close: Callable[[], None] = lambda: None,
) -> PlacedEnvironments:
    """The processes of `placement.environments`, which have all environments of the run. The engines are there by now.

    `others`: environments of stages that have their own, by the stage's name. `engine`: the engines of the run. Where
    they have cores of their own, so do the environments: the same. `close`: ends the engines. It is called with
    `PlacedEnvironments.close`, and where a process does not start. Raises ConfigError: an environment cannot be sent to
    another process. EngineError: a process does not start.
    """
    placement = run.placement
    if isinstance(placement, Local) or not placement.environments:
        return PlacedEnvironments(engines=close)
    every = distinct(env, others)
    try:
        return PlacedEnvironments(_pool(run, placement, every, others, engine, say), every, close)
    except BaseException:
        close()
        raise


def _pool(
    run: Run,
    placement: Processes,
    every: Sequence[Environment],
    others: Mapping[str, Environment],
    engine: Sampler,
    say: Callable[[str], None],
) -> EnvironmentPool:
    configs = [next((run.env_of(s) for s in run.stages if others.get(s.name, every[0]) is e), run.env) for e in every]
    made = tuple(_sent(config, e) for config, e in zip(configs, every, strict=True))
    start = pickle.dumps(EnvironmentStart(EnvironmentParts(made, run.seed, named(run.fault))), pickle.HIGHEST_PROTOCOL)
    cores = engine_cores(engine) if placement.cores else None

    def begin(number: int) -> tuple[EngineHost, Future[Any]]:
        name = f"environment {number}"
        if isinstance(placement, Ray):
            actor = RayHost(name, start, None, number, threads=1)
            return actor, actor.started
        host = ProcessHost(name, start, threads=1, cores=cores)
        return host, host.started

    return EnvironmentPool(
        begin, count=placement.environments, timeout=placement.timeout, deaths=placement.deaths, say=say
    )


def engine_cores(engine: Sampler) -> frozenset[int] | None:
    """The cores that the processes of the engines on this machine may use; None where that is not known."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    pids = [e.host.pid for e in engine.engines if e.host.pid] if isinstance(engine, EnginePool) else []
    return frozenset[int]().union(*(os.sched_getaffinity(pid) for pid in pids)) or None


def _sent(config: Env, env: Environment) -> Env | Environment:
    """Returns the object that the process needs to make the environment. Verifiers stay with the learner, so rewards
    are left out. Raises ConfigError: it cannot be sent."""
    if not is_inline(config.name) and not is_inline(config.prompts):
        return replace(config, rewards=(), measured=False)
    try:
        if source_file(type(env)) is None:
            raise TypeError(f"class {type(env).__name__} was defined in the program itself")
        pickle.dumps(env)
    except Exception as error:
        raise ConfigError(
            f"env={config.name} cannot be sent to another process ({type(error).__name__}: {error}). Name its class as"
            " path.py:Class, or set placement.environments=0"
        ) from error
    return env
