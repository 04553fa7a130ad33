"""What both vLLM samplers share: checks of requests, tensors and versions, a gate for updates, and counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from posttrain.engine.embedded.load_weights import checked_tensors
from posttrain.engine.model.policy_model import Policy, served_tensors
from posttrain.engine.vllm.sampling_parameters import Capabilities, check
from posttrain.system.errors import DataError, EngineError

ReadBack = list[tuple[str, str, list[int]]]
"""(name, dtype, shape) of tensors that are read back from an engine."""


@dataclass(frozen=True, eq=False)
class CheckedRequest:
    """A checked request for one turn. `end`: the reason for the end of a turn that reaches `limit`."""

    ids: list[int]
    sampling: Sampling
    place: int
    limit: int
    end: Stop


def check_request(ids: np.ndarray, sampling: Sampling, place: int, capabilities: Capabilities) -> CheckedRequest:
    """Check one request: DataError where the prompt is empty, too long or of another vocabulary, EngineError where the
    contract is not resolved, ConfigError where vLLM cannot follow it."""
    ids, context = np.asarray(ids), capabilities.context
    if ids.ndim != 1 or len(ids) == 0:
        raise DataError(
            f"a prompt is a non-empty list of token ids, got shape {ids.shape}: check the task and its chat template"
        )
    if len(ids) >= context:
        raise DataError(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {context}: shorten one or raise the other"
        )
    if ids.min() < 0 or ids.max() >= capabilities.vocabulary:
        raise DataError(
            f"prompt ids span {ids.min()}..{ids.max()}, the model has 0..{capabilities.vocabulary - 1}: use its own"
            " tokenizer"
        )
    if not sampling.resolved:
        raise EngineError(
            "the sampling waits for a tokenizer (stop_ids, bad_words, allowed_words): call sampling.resolve() once at"
            " load"
        )
    sampling.check_vocabulary(capabilities.vocabulary)
    check(sampling, capabilities)
    room = context - len(ids)
    end = Stop.LENGTH if sampling.max_tokens <= room else Stop.CONTEXT
    return CheckedRequest(ids.tolist(), sampling, place, min(sampling.max_tokens, room), end)


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that an engine accepts: the weights of the policy that it was started with, or its adapter's."""

    own: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Name -> (dtype, shape), in the learner's order."""

    @staticmethod
    def of(policy: Policy) -> ExpectedTensors:
        return ExpectedTensors({n: (t.dtype, tuple(t.shape)) for n, t in served_tensors(policy.module)})

    def wanted(self) -> ReadBack:
        """[name, dtype, shape] of every tensor, as plain data."""
        return [(n, str(dtype).removeprefix("torch."), list(shape)) for n, (dtype, shape) in self.own.items()]

    def checked(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        return checked_tensors(self.own, tensors)


def newer(version: int, than: int) -> None:
    """EngineError where `version` is not newer than the other one."""
    if version <= than:
        raise EngineError(f"weights of version {version} after version {than}: versions only increase")


class VLLMSampler:
    """What both samplers over vLLM have: what they accept, their version and their counters."""

    draws_by_place, keeps_sets = False, True

    def __init__(self, policy: Policy, capabilities: Capabilities, workers: int, inflight: bool) -> None:
        self._capabilities, self._expected = capabilities, ExpectedTensors.of(policy)
        self.context = capabilities.context
        self._workers, self.inflight = workers, inflight
        # `_empty`: the version of an engine without pushed weights, which refuses to generate. It lies below -1 where
        # adapters are pushed, because an adapter is first tried as version -1 (`role.sync`).
        self.version = self._empty = -1 if policy.lora is None else -2
        self._counters = ClientCounters()

    def gauges(self) -> Gauges:
        return self._counters.take()

    def clock(self) -> Mapping[str, float]:
        """Seconds since the last call. `engine/load`: in updates. Of the engine in this process `engine/step`: in its
        steps; of a server `engine/turn`: the sum over all turns."""
        return self._counters.clock()

    def _salt(self) -> str:
        """A string in the key of every cached block, so that blocks of other weights are never found."""
        return f"version {self.version}"


class UpdateGate:
    """Lets many turns run at once, or one update. It waits for turns that may not stay, and later turns wait for it."""

    def __init__(self) -> None:
        self.turns = 0
        self._staying = 0
        self._updates = 0
        self._updating = False
        self._waiters: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, stays: bool = False) -> AsyncIterator[None]:
        """Inside, a turn runs. `stays`: it may go on during an update."""
        # `_updates` counts those that wait too: otherwise new turns could hold an update back for ever.
        await self._until(lambda: not self._updates)
        self.turns += 1
        self._staying += stays
        try:
            yield
        finally:
            self.turns -= 1
            self._staying -= stays
            self._wake()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Inside, an update runs, and no turn but those that may stay."""
        self._updates += 1
        try:
            await self._until(lambda: self.turns == self._staying and not self._updating)
            self._updating = True
            try:
                yield
            finally:
                self._updating = False
        finally:
            self._updates -= 1
            self._wake()

    async def _until(self, free: Callable[[], bool]) -> None:
        while not free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        """Let all that wait look again, in the order in which they came. Those of a loop that has ended are left."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)


@dataclass
class ClientCounters:
    """Sums since the last `take`, for the gauges of `diagnose.gauges.registry` that a client of vLLM can compute."""

    tokens: int = 0
    turns: int = 0
    longest: int = 0
    found: int = 0
    """Prompt tokens that were found in vLLM's prefix cache."""
    prompts: int = 0
    """Prompt tokens."""
    sent: int = 0
    """Bytes of pushed weights."""
    pushes: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def delivered(self, said: SampledTurn, prompt: Sequence[int], cached: int | None) -> None:
        """Count a turn that has ended. `cached` of its prompt's tokens were found in vLLM's prefix cache."""
        self.tokens += len(said.ids)
        self.turns += 1
        self.longest = max(self.longest, len(said.ids))
        self.found += cached or 0
        self.prompts += len(prompt)

    def pushed(self, size: int) -> None:
        self.sent += size
        self.pushes += 1

    def spent(self, what: str, begun: float) -> None:
        """Add the seconds since `begun` (`time.perf_counter`) to `what`."""
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun

    def take(self) -> Gauges:
        """The gauges since the last call; the sums begin again at 0."""
        out = {
            "engine/tokens": Gauge(self.tokens, self.turns),
            "engine/prefix_hits": Gauge(self.found, self.prompts),
            # The longest turn over the mean one: longest / (tokens / turns).
            "engine/straggler": Gauge(self.longest * self.turns, self.tokens),
        }
        if self.pushes:
            out["engine/pushed"] = Gauge(self.sent, self.pushes)
        self.tokens = self.turns = self.longest = self.found = self.prompts = self.sent = self.pushes = 0
        return out

    def clock(self) -> dict[str, float]:
        """The seconds since the last call, by name."""
        taken, self.seconds = self.seconds, {}
        return taken
