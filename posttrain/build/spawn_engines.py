"""Engines and environments in processes of their own: what such a process gets, how it starts, and the pools."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from posttrain.build.build_engines import ServedSampler, check_vllm, keeping_contracts, make_engine
from posttrain.build.build_environments import distinct
from posttrain.build.distributed_run import with_absolute_path
from posttrain.config.engines import Embedded
from posttrain.config.env import Env
from posttrain.config.placement import Local, Processes, Ray, check_machine
from posttrain.config.run import Run, Supervised
from posttrain.core.ports import Environment, Sampler
from posttrain.engine.learner.torch_settings import use_deterministic, use_threads
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.parallel.sharded_load import BlankPolicy
from posttrain.engine.pool.engine_pool import EnginePool, NewHost
from posttrain.engine.pool.engine_process import ProcessHost
from posttrain.engine.pool.environment_pool import EnvironmentPlayer, EnvironmentPool
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.ray_actor import RayCluster, RayHost, node_address
from posttrain.engine.pool.remote_environment import EnvironmentStart
from posttrain.engine.pool.worker_side import EngineFacts, EngineStart
from posttrain.engine.transfer.collective import LOOPBACK, CollectiveCarrier
from posttrain.engine.transfer.parcel import Carrier
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_folder import FolderCarrier
from posttrain.engine.transfer.shared_memory import SharedCarrier
from posttrain.engine.vllm.start_vllm import BINDING
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import Renderer
from posttrain.faults import Fault, named, planted
from posttrain.record.runtime_objects import is_inline, source_file
from posttrain.system.errors import ConfigError, EngineError
from posttrain.verifier.workers.ray_worker import RayWorker
from posttrain.verifier.workers.worker_pool import begin_workers

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Nats by which two engines may differ in the log-prob of one token. Deterministic engines must agree in every bit."""

BUCKET_SHARE = 0.25
"""Share of the pool's time-out that one bucket of a broadcast may take. So an engine that hangs in a bucket is replaced
before that time-out ends, and an engine that nobody calls says so before the pool does."""

PLANTED = contextlib.ExitStack()
"""Holds the fault that a run plants, in an engine's process, for as long as that lives."""


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Makes the engine of a run in another process. It is pickled with the policy in it."""

    run: Run
    policy: Policy | None
    """None: the process reads the model by itself."""
    threads: int
    fault: Fault | None = None

    def __call__(self) -> Sampler:
        use_threads(self.threads)
        use_deterministic(self.run.deterministic)
        # vLLM for CPU would bind the threads of all engines to the same cores. A value that the user set stays.
        os.environ.setdefault(BINDING, "nobind")
        PLANTED.enter_context(planted(self.fault))
        policy = self.policy or load_policy(self.run.model, None, self.run.seed)
        render = Renderer(cast("Any", policy.tokenizer), policy.stop_ids, policy.context, self.run.model.history)
        return make_engine(self.run, policy, render.decode, keeps=True).sampler


def placed_engine(
    run: Run,
    policy: Policy,
    text: Callable[[np.ndarray], str],
    say: Callable[[str], None] = lambda line: None,
    keeps: bool = False,
) -> ServedSampler:
    """The engine of the run where `Run.placement` says: here, or several elsewhere as one.

    Args:
        text: decodes token ids, special tokens included; stop strings are searched in the result.
        say: tells the user what happens to engines elsewhere.
        keeps: the policy's weights are the engine's alone.

    Raises:
        ConfigError: it cannot keep a stage's sampling contract, or is not installed.
        EngineError: it does not start.
    """
    if isinstance(run.placement, Local):
        return make_engine(run, policy, text, keeps)
    # Checked before processes start. There the error would come late, and from several processes.
    if not isinstance(run.engine, Embedded):
        check_vllm(run, run.engine, policy)
    pool = engine_pool(run, run.placement, policy, say)
    return keeping_contracts(run, ServedSampler(pool, pool.close))


def engine_pool(run: Run, placement: Processes, policy: Policy, say: Callable[[str], None]) -> EnginePool:
    """The engines of the run, each in a process of its own, as one sampler.

    Raises:
        ConfigError: this machine, or the cluster, lacks what they need. EngineError: the model cannot be sent to
            another process, or an engine does not start.
    """
    check_machine(placement)
    threads, fault = placement.cores or torch.get_num_threads(), named(run.fault)
    # This process has no weights to send: each engine reads the model by itself, by an absolute path.
    if isinstance(policy, BlankPolicy):
        parts = EngineParts(_for_engine(replace(run, model=with_absolute_path(run.model))), None, threads, fault)
    else:
        parts = EngineParts(_for_engine(run), replace(policy.twin(), reward_head=None), threads, fault)
    try:
        start = pickle.dumps(EngineStart(parts, ParcelReceiver), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs code of the model's classes
        raise EngineError(
            f"the model cannot be sent to another process ({type(error).__name__}: {error}): set placement=local"
        ) from error

    begin, end = _hosts(placement, start, threads)
    exact = run.deterministic or run.exact
    # If a later line raises, `failed` ends processes and shared memory; a pool that is made closes them itself.
    with contextlib.ExitStack() as failed:
        failed.callback(end)
        sender = ParcelSender(_carrier(placement), deltas=placement.delta)
        failed.callback(sender.close)
        pool = EnginePool(
            begin,
            sender,
            count=placement.engines,
            timeout=placement.timeout,
            deaths=placement.deaths,
            tolerance=0.0 if exact else TOLERANCE[run.model.dtype],
            say=say,
            end=end,
        )
        failed.pop_all()
    return pool


def _carrier(placement: Processes) -> Carrier:
    """Returns the carrier that brings weights to the engines. A cluster is connected by now."""
    if placement.transport == "shared":
        return SharedCarrier()
    if placement.transport == "collective":
        host = node_address() if isinstance(placement, Ray) else LOOPBACK
        return CollectiveCarrier(placement.engines, host=host, seconds=BUCKET_SHARE * placement.timeout)
    if placement.folder is not None:
        return FolderCarrier(Path(placement.folder))
    temporary = tempfile.TemporaryDirectory(prefix="posttrain-weights-")
    carrier = FolderCarrier(Path(temporary.name))
    # The folder is removed together with its carrier, even if nobody closes that.
    weakref.finalize(carrier, temporary.cleanup)
    return carrier


def _hosts(placement: Processes, start: bytes, threads: int) -> tuple[NewHost, Callable[[], None]]:
    """Returns (the function that begins an engine, the function that ends the resources that all engines share)."""
    if isinstance(placement, Ray):
        cluster = RayCluster(placement.address, placement.engines, placement.cores, placement.timeout)

        def actor(number: int) -> tuple[EngineHost, Future[EngineFacts]]:
            host = RayHost(f"engine {number}", start, cluster, number, threads=threads)
            return host, host.started

        end_workers = begin_workers(RayWorker) if placement.verifiers else lambda: None

        def close() -> None:
            # First the workers of verifiers begin on this machine again, and none on a cluster that is gone.
            end_workers()
            cluster.close()

        return actor, close

    # Each engine has cores of its own, counted from the highest number; also when it is started again. This process
    # keeps the others.
    cores_each = placement.cores
    available = sorted(os.sched_getaffinity(0), reverse=True) if cores_each else []

    def process(number: int) -> tuple[EngineHost, Future[EngineFacts]]:
        cores = frozenset(available[number * cores_each : (number + 1) * cores_each]) if cores_each else None
        host = ProcessHost(f"engine {number}", start, threads=threads, cores=cores)
        return host, host.started

    return process, keep_to(frozenset(available[placement.engines * cores_each :]))


def keep_to(cores: frozenset[int]) -> Callable[[], None]:
    """Restrict this process to these cores; returns a function that undoes it. Does nothing for an empty set."""
    if not cores:
        return lambda: None
    before = os.sched_getaffinity(0)
    _pin(cores)
    return lambda: _pin(before)


def _pin(cores: Collection[int]) -> None:
    """Pins every thread of this process to cores. Later threads inherit those of the thread that begins them."""
    for thread in os.listdir("/proc/self/task"):
        # A thread may end between the listing and the call.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _for_engine(run: Run) -> Run:
    """The settings that an engine reads. The stages are left out, since they may have classes of the user's files."""
    # A run must have a stage. This one is never read by an engine.
    placeholder = Supervised(name="none", style="answer", steps=1)
    return replace(run, stages=(placeholder,), env=Env(), placement=Local(), trackers=())


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
        """End the processes, then the engines, from which their episodes get turns."""
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

    Args:
        others: environments of stages that have their own, by the stage's name.
        engine: the engines of the run. If they have cores of their own, the environments use the same cores.
        close: ends the engines. It is called with `PlacedEnvironments.close`, and where a process does not start.

    Raises:
        ConfigError: an environment cannot be sent to another process. EngineError: a process does not start.
    """
    placement = run.placement
    if isinstance(placement, Local) or not placement.environments:
        return PlacedEnvironments(engines=close)
    envs = distinct(env, others)
    try:
        return PlacedEnvironments(_pool(run, placement, envs, others, engine, say), envs, close)
    except BaseException:
        close()
        raise


def _pool(
    run: Run,
    placement: Processes,
    envs: Sequence[Environment],
    others: Mapping[str, Environment],
    engine: Sampler,
    say: Callable[[str], None],
) -> EnvironmentPool:
    # Another process makes each again from the settings of the first stage that plays it.
    configs = [next((run.env_of(s) for s in run.stages if others.get(s.name, envs[0]) is e), run.env) for e in envs]
    sent = tuple(_sent(config, e) for config, e in zip(configs, envs, strict=True))
    start = pickle.dumps(EnvironmentStart(EnvironmentParts(sent, run.seed, named(run.fault))), pickle.HIGHEST_PROTOCOL)
    cores = engine_cores(engine) if placement.cores else None

    def begin(number: int) -> tuple[EngineHost, Future[Any]]:
        name = f"environment {number}"
        if isinstance(placement, Ray):
            host = RayHost(name, start, None, number, threads=1)
        else:
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
    """Returns what another process needs to make the environment: its settings, or the environment itself.

    Verifiers stay in the learner's process, so rewards are left out of the settings.

    Raises:
        ConfigError: it cannot be sent.
    """
    # An environment with a name is made again there. An object of the program is pickled and sent. For that, its class
    # must be in a file which the other process can import.
    if not is_inline(config.name) and not is_inline(config.prompts):
        return replace(config, rewards=(), measured=False)
    try:
        if source_file(type(env)) is None:
            raise TypeError(f"class {type(env).__name__} was defined in the program itself")
        pickle.dumps(env)
    except Exception as error:  # pickling runs code of its classes
        raise ConfigError(
            f"env={config.name} cannot be sent to another process ({type(error).__name__}: {error}). Name its class as"
            " path.py:Class, or set placement.environments=0"
        ) from error
    return env
