"""Engines in processes of their own: what such a process needs to make one, and the pool over them."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from posttrain import faults
from posttrain.build.build_engines import ServedSampler, check_vllm, keeping_contracts, make_engine
from posttrain.build.distributed_run import here
from posttrain.config.engines import Embedded
from posttrain.config.env import Env
from posttrain.config.placement import Local, Processes, Ray, check_machine
from posttrain.config.run import Run, Supervised
from posttrain.core.ports import Sampler
from posttrain.engine.learner.torch_settings import use_deterministic, use_threads
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.parallel.sharded_load import BlankPolicy
from posttrain.engine.pool.engine_pool import EnginePool, NewHost
from posttrain.engine.pool.engine_process import ProcessHost
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.ray_actor import RayCluster, RayHost, node_address
from posttrain.engine.pool.worker_side import EngineFacts, EngineStart
from posttrain.engine.transfer.collective import LOOPBACK, CollectiveCarrier
from posttrain.engine.transfer.parcel import Carrier
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_folder import FolderCarrier
from posttrain.engine.transfer.shared_memory import SharedCarrier
from posttrain.engine.vllm.start_vllm import BINDING
from posttrain.environment.templates.renderer import Renderer
from posttrain.system.errors import EngineError
from posttrain.verifier.workers.ray_worker import RayWorker
from posttrain.verifier.workers.worker_pool import begin_workers

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Nats by which engines on devices of their own may differ in the log-prob of one token. Deterministic ones differ in
no bit."""

BUCKET_SHARE = 0.25
"""Share of the time-out that a bucket of a broadcast may take: an engine that hangs in one is replaced before, and one
that nobody calls says so before the pool does."""

PLANTED = contextlib.ExitStack()
"""Holds the fault that a run plants, in an engine's process, for as long as that lives."""


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Makes the engine of a run in another process. It is pickled with the policy in it."""

    run: Run
    policy: Policy | None
    """None: the process reads the model by itself."""
    threads: int
    fault: faults.Fault | None = None

    def __call__(self) -> Sampler:
        use_threads(self.threads)
        use_deterministic(self.run.deterministic)
        os.environ.setdefault(BINDING, "nobind")
        PLANTED.enter_context(faults.planted(self.fault))
        policy = self.policy or load_policy(self.run.model, None, self.run.seed)
        render = Renderer(cast("Any", policy.tokenizer), policy.stop_ids, policy.context, self.run.model.history)
        return make_engine(self.run, policy, render.decode, own=True).sampler


def placed_engine(
    run: Run,
    policy: Policy,
    text: Callable[[np.ndarray], str],
    say: Callable[[str], None] = lambda line: None,
    own: bool = False,
) -> ServedSampler:
    """The engine of the run where `Run.placement` says: here, or several elsewhere as one. `text`: decodes token ids,
    special tokens included; stop strings are searched in the result. `say`: tells the user what happens to engines
    elsewhere. `own`: the policy's weights are the engine's alone. Raises ConfigError: it cannot keep a stage's sampling
    contract, or is not installed. Raises EngineError: it does not start."""
    if isinstance(run.placement, Local):
        return make_engine(run, policy, text, own)
    if not isinstance(run.engine, Embedded):
        check_vllm(run, run.engine, policy)
    pool = engine_pool(run, run.placement, policy, say)
    return keeping_contracts(run, ServedSampler(pool, pool.close))


def engine_pool(run: Run, placement: Processes, policy: Policy, say: Callable[[str], None]) -> EnginePool:
    """The engines of the run, each in a process of its own, as one sampler. Raises ConfigError: this machine, or the
    cluster, lacks what they need. EngineError: the model cannot be sent to another process, or an engine does not
    start."""
    check_machine(placement)
    threads, fault = placement.cores or torch.get_num_threads(), faults.named(run.fault)
    if isinstance(policy, BlankPolicy):
        parts = EngineParts(_for_engine(replace(run, model=here(run.model))), None, threads, fault)
    else:
        parts = EngineParts(_for_engine(run), replace(policy.twin(), reward_head=None), threads, fault)
    try:
        start = pickle.dumps(EngineStart(parts, ParcelReceiver), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise EngineError(
            f"the model cannot be sent to another process ({type(error).__name__}: {error}): set placement=local"
        ) from error

    begin, end = _hosts(placement, start, threads)
    exact = run.deterministic or run.exact
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
    weakref.finalize(carrier, temporary.cleanup)
    return carrier


def _hosts(placement: Processes, start: bytes, threads: int) -> tuple[NewHost, Callable[[], None]]:
    """Returns (the function that begins an engine, the function that ends the resources that all engines share)."""
    if isinstance(placement, Ray):
        cluster = RayCluster(placement.address, placement.engines, placement.cores, placement.timeout)

        def actor(number: int) -> tuple[EngineHost, Future[EngineFacts]]:
            host = RayHost(f"engine {number}", start, cluster, number, threads=threads)
            return host, host.started

        back = begin_workers(RayWorker) if placement.verifiers else lambda: None

        def close() -> None:
            back()
            cluster.close()

        return actor, close

    have = sorted(os.sched_getaffinity(0), reverse=True) if placement.cores else []
    apart = [frozenset(have[i * placement.cores : (i + 1) * placement.cores]) for i in range(placement.engines)]

    def process(number: int) -> tuple[EngineHost, Future[EngineFacts]]:
        cores = apart[number] if placement.cores else None
        host = ProcessHost(f"engine {number}", start, threads=threads, cores=cores)
        return host, host.started

    return process, keep_to(frozenset(have[placement.engines * placement.cores :]))


def keep_to(cores: frozenset[int]) -> Callable[[], None]:
    """Keep this process to these cores, where there are any; returns what undoes it."""
    if not cores:
        return lambda: None
    before = os.sched_getaffinity(0)
    _pin(cores)
    return lambda: _pin(before)


def _pin(cores: Collection[int]) -> None:
    """Pins this process to cores. The kernel pins one thread at a time; threads that begin later have the cores of the
    threads that began them."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _for_engine(run: Run) -> Run:
    """The settings that an engine reads. The stages are left out, because they may hold classes of the user's files."""
    nothing = Supervised(name="none", style="answer", steps=1)
    return replace(run, stages=(nothing,), env=Env(), placement=Local(), trackers=())
