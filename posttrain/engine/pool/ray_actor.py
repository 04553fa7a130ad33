"""An engine, or environments, as an actor of a Ray cluster (`pip install "posttrain[ray]"`)."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakSet

from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.pool_waits import in_thread
from posttrain.engine.pool.worker_side import EngineEnded, EngineFacts, EngineReport, HostStart, WorkerMethods, portable
from posttrain.system.errors import ConfigError, EngineError

AT_ONCE = 100_000
"""Calls that an actor takes at once. What it computes at once is the engine's own decision."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at which nodes of the cluster live. Ray itself needs about 15 s to see that one is gone."""
CLOSE_SECONDS = 10.0
"""Seconds that Ray has to end an actor or the connection. Ray may never answer where its own processes are gone."""


class RayEngine:
    """The actor. Errors are returned, so that Ray's own errors always mean that the actor is lost."""

    def __init__(self, start: bytes) -> None:
        self._start = start
        self._hosted: WorkerMethods | None = None

    async def answer(self, method: str, arguments: Any) -> tuple[Any, BaseException | None, EngineReport | None]:
        """(value, error, report) of one call. The first one makes what answers."""
        try:
            if self._hosted is None:
                start: HostStart = pickle.loads(self._start)
                self._hosted = start.host()
                self._start = b""  # it may be large
            value, report = await self._hosted.answer(method, arguments)
        except Exception as error:
            return None, portable(error), None
        return value, None, report


class RayCluster:
    """A connection to a cluster, with CPUs for all engines reserved at once. ConfigError where it does not answer, or
    has too few CPUs.

    Args:
        address: of a cluster that runs already; None: one is started on this machine and ended by `close`. Then Ray is
            told `local`: without an address it looks for a cluster that somebody else has started here.
        cpus: CPUs that each engine reserves; 0: none.
        timeout: seconds that the reservation may take.
    """

    def __init__(self, address: str | None, engines: int, cpus: int, timeout: float) -> None:
        import ray

        # A connection that the user's program has made is used and left open.
        self._connected_here = not ray.is_initialized()
        self.cpus = cpus
        # Actors must find the modules that this process finds, the user's own ones too.
        path = os.pathsep.join(p for p in sys.path if p)
        if self._connected_here and address is not None:
            must_answer(address, min(timeout, 5.0))
        if self._connected_here:
            try:
                ray.init(
                    address="local" if address is None else address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                    # Ray refuses a number of CPUs for a cluster that runs already.
                    **({} if address is not None else {"num_cpus": max(engines * cpus, 1)}),
                )
            # A cluster that wants a token looks like this: Ray sends one only if the environment says so.
            except ConnectionError as error:
                raise ConfigError(
                    f"placement.address={address}: something answers there, and Ray cannot connect to it ({error})."
                    " Where the cluster was started with a token (`ray start` says so), set RAY_AUTH_MODE=token and"
                    " have the token in RAY_AUTH_TOKEN or ~/.ray/auth_token (`ray get-auth-token` tells it). Otherwise"
                    " it is no Ray cluster, or one of another version"
                ) from error
            ray._private.worker._worker_logs_enabled = False  # what Ray prints of its own processes, in colours
        self.nodes = NodeWatch()
        self.group: Any = None
        if cpus:
            from ray.util.placement_group import placement_group

            # All at once, or none, or each could hold some CPUs and wait for others' for ever. PACK: on few machines.
            self.group = placement_group([{"CPU": cpus}] * engines, strategy="PACK")
            if not self.group.wait(timeout):
                has = ray.cluster_resources().get("CPU", 0)
                self.close()
                raise ConfigError(
                    f"placement.engines={engines} with placement.cores={cpus} are {engines * cpus} CPUs, and the Ray"
                    f" cluster has {has:g}: take fewer, or add nodes"
                )

    def close(self) -> None:
        import ray

        self.nodes.over.set()
        if self.group is not None:
            from ray.util.placement_group import remove_placement_group

            within(CLOSE_SECONDS, remove_placement_group, self.group)
        if self._connected_here:
            within(CLOSE_SECONDS, ray.shutdown)


def within(seconds: float, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Call a function of Ray, which may fail or never return where its processes are gone."""
    with contextlib.suppress(Exception):
        in_thread(function, *arguments, **keywords).result(seconds)


class NodeWatch:
    """Looks in a thread whether the node of this process lives. Where it is gone, nothing can be started any more, and
    whoever waits is told. What was on another node has died, and starts elsewhere."""

    hosts: ClassVar[WeakSet[RayHost]] = WeakSet()
    """All hosts of this process, with a `RayCluster` or without one. They are told when the node is gone."""
    gone: ClassVar[str] = ""
    """The reason why nothing can be started; '' where there is none."""

    def __init__(self) -> None:
        import ray

        self._ray, self._node_id, self.over = ray, ray.get_runtime_context().get_node_id(), threading.Event()
        NodeWatch.gone = ""
        threading.Thread(target=self._look, name="looks whether its node lives", daemon=True).start()

    def _look(self) -> None:
        """What the thread runs: looks until the node is gone or the connection ends."""
        while not self.over.wait(LOOK_SECONDS) and not self.gone:
            with contextlib.suppress(Exception):  # asked again; a run that waits has its own deadline
                if self._node_id in {n["NodeID"] for n in self._ray.nodes() if not n["Alive"]}:
                    NodeWatch.gone = (
                        "the Ray node of this machine is gone: it was killed, or ran out of memory. Start it again"
                        " (without placement.address the run does), and go on from the last checkpoint with --resume"
                    )
        for host in list(self.hosts) if self.gone else ():
            host.die(self.gone)


def node_address() -> str:
    """The address under which the machines of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def must_answer(address: str, timeout: float) -> None:
    """Raises ConfigError where nothing listens at `[ray://]host:port`; Ray 2.60 alone tries for 14 minutes (20 x 41 s).
    An address without a port, such as `auto`, is left to Ray."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        if parts.port is not None and parts.hostname:
            socket.create_connection((parts.hostname, parts.port), timeout).close()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"placement.address={address}: no Ray cluster answers there ({error}). Start one with `ray start --head`,"
            " or leave the address out"
        ) from error


class RayHost(EngineHost):
    """The learner's side of an actor. Its first answer, to `started`, comes when it can sample. Without a `cluster` no
    CPUs are reserved for it, and it comes to any machine."""

    def __init__(self, name: str, start: bytes, cluster: RayCluster | None, number: int, *, threads: int) -> None:
        import ray

        if NodeWatch.gone:
            raise EngineError(NodeWatch.gone)
        super().__init__(name)
        self._ray = ray
        options: dict[str, Any] = {
            "num_cpus": 0 if cluster is None else cluster.cpus,
            "max_concurrency": AT_ONCE,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        }
        if cluster is None:
            options["scheduling_strategy"] = "SPREAD"
        elif cluster.group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(cluster.group, number)
        self._actor: Any = ray.remote(RayEngine).options(**options).remote(start)
        # The actor makes its engine within the first call, so errors of the start come back as this answer.
        self.started: Future[EngineFacts] = self.call("facts")
        self.started.add_done_callback(self._keep_pid)
        NodeWatch.hosts.add(self)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        number, future = self._begin()
        if not future.done():
            ref = self._actor.answer.remote(method, arguments)
            future.add_done_callback(lambda f: self._cancelled(number, ref) if f.cancelled() else None)
            ref.future().add_done_callback(lambda done: self._answered(number, done))
        return future

    def kill(self, why: str) -> None:
        self.die(f"{why}{self._memory}")
        within(CLOSE_SECONDS, self._ray.kill, self._actor, no_restart=True)

    def close(self) -> None:
        self.kill("it was closed at the end of the run")

    def _cancelled(self, number: int, ref: Any) -> None:
        self._drop(number)
        with contextlib.suppress(Exception):
            self._ray.cancel(ref)

    def _answered(self, number: int, done: Future[Any]) -> None:
        """Ray has ended a call: pass on its answer, its error, or the loss of the actor."""
        try:
            value, error, report = done.result()
        except self._ray.exceptions.TaskCancelledError:  # by this side, so nothing waits for it
            self._drop(number)
        except self._ray.exceptions.RayActorError as error:  # the actor returns its own errors, so it is lost
            self.die(f"its actor is lost: {str(error).strip()}{self._memory}")
        except BaseException as error:
            self._end(number, None, EngineError(f"{self.name}, through Ray: {error}"), None)
        else:
            if isinstance(error, EngineEnded):
                self.kill(str(error))
            self._end(number, value, error, report)

    def _keep_pid(self, started: Future[EngineFacts]) -> None:
        if not started.cancelled() and started.exception() is None:
            self.pid = started.result().pid
