"""The settings of the engines that sample: `engine=embedded` or `engine=vllm`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import ConfigError, at_least
from posttrain.system.hostile_callers import in_the_clear

GIB = 1 << 30
KernelChoice = Literal["auto", "compiled", "torch", "reference"]
"""Which implementations of the engine's operations are used: see `Model.kernels`."""


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The engine of this package, in the trainer's process. It needs no further packages and runs every transformers
    decoder whose cache is keys and values."""

    cache_gib: float = 4.0
    """Most memory of the key-value cache; it grows as needed up to this."""
    budget: int = 2048
    """Positions of one forward pass. Sequences that are being sampled come first; parts of prompts fill the rest."""
    retain: int | None = None
    """Tokens of ended sequences that stay in the cache for later turns. None: half of what all slots could hold, and at
    most an eighth of the cache. 0: none."""
    lookup: int = 0
    """Draft this many tokens per pass by looking up what followed the same tokens before (prompt lookup). The sampled
    tokens stay the same. It is faster for text that repeats itself or has a low temperature. 0: off."""
    draft: str | None = None
    """Draft with this smaller model: a directory or hub id with the policy's tokenizer. The distribution stays exact.
    It is seldom faster at temperature 1 (docs/design/engine.md). None: off."""
    drafts: int = 4
    """Tokens per pass from the draft model."""
    update: Literal["drain", "inflight", "stale"] = "drain"
    """Treatment of unfinished sequences when new weights come. drain: they end first. inflight: they go on under the
    new weights, and their keys and values are computed again. stale: they go on with keys and values of the old
    weights, so their log-probs are those of no policy; `engine/stale_gap` measures by how much. A run that waits for
    all its samples has no unfinished sequences then."""
    sleep: bool = False
    """Free the key-value cache while the learner works, and make it anew for the next samples, so that both need not
    fit into memory at once. The tokens stay the same. Only where samples and updates take turns (staleness=0)."""
    timeline: bool = False
    """Write timeline.json into the run folder: when each request was queued, admitted and done, as a Chrome trace."""

    def __post_init__(self) -> None:
        _positive("cache_gib", self.cache_gib)
        _positive("budget", self.budget)
        _positive("drafts", self.drafts)
        if self.lookup < 0 or (self.retain or 0) < 0:
            raise ConfigError(f"engine.lookup={self.lookup} and engine.retain={self.retain}: must be >= 0")
        if self.lookup and self.draft is not None:
            raise ConfigError(
                f"engine.lookup={self.lookup} and engine.draft={self.draft} both draft tokens: keep one of them"
            )


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """vLLM: in the trainer's process, or as a server. docs/guides/engines.md compares it with the embedded engine."""

    server: bool = False
    """Start vLLM as a server of its own, on this machine, for the length of the run."""
    url: str | None = None
    """Address of a vLLM server that runs already, such as http://10.0.0.7:8000;
    it must be started as docs/guides/engines.md says."""
    key_env: str | None = None
    """Environment variable that holds the server's API key."""
    share: str | None = None
    """Folder in which new weights are handed to a server; both sides must see it. None: memory of this machine where
    it has room for twice the weights, else its temporary folder."""
    cache_gib: float = 4.0
    """Memory of the key-value cache, of all workers together."""
    eager: bool = False
    """No compilation: starts in seconds and steps slower."""
    workers: int = 1
    """Processes that compute each step together (vLLM's tensor parallelism): each holds a part of every layer and of
    the cache. It must divide the model's heads. On CPU each needs a core, because they spin while they wait for each
    other. 1: one holds everything."""
    update: Literal["drain", "inflight"] = "drain"
    """Treatment of unfinished sequences when new weights come. drain: they end first. inflight: they stand still
    meanwhile and go on under the new weights, and their keys and values are computed again. A run that waits for all
    its samples has no unfinished sequences then."""
    timeout: float = 600.0
    """Seconds a turn, a step or an update may take before the engine counts as failed."""

    @property
    def apart(self) -> bool:
        """True where the engine is a server: started for the run, or running already."""
        return self.server or self.url is not None

    def __post_init__(self) -> None:
        _positive("cache_gib", self.cache_gib)
        _positive("timeout", self.timeout)
        at_least(self, "engine.", workers=1)
        if self.server and self.url is not None:
            raise ConfigError(
                f"engine.server=true starts a server, and engine.url={self.url} names one that runs already: keep one"
                " of them"
            )
        if self.key_env is not None and self.url is None:
            raise ConfigError(f"engine.key_env={self.key_env}: only a server given by engine.url asks for a key")
        if self.key_env is not None and in_the_clear(self.url or ""):
            raise ConfigError(
                f"engine.url={self.url} would send the key in {self.key_env} in the clear: use https, or a tunnel to"
                " 127.0.0.1"
            )
        if self.share is not None and not self.apart:
            raise ConfigError(
                f"engine.share={self.share}: vLLM in this process takes weights without a folder. Leave it out"
            )


Engine = Embedded | VLLM


def engine_refusals(
    engine: Engine, kernels: KernelChoice, lora: bool, deterministic: bool, exact: bool, ahead: str
) -> Iterator[str]:
    """Yields a message about each thing that the engine of a run cannot do. Each message says what to change.

    Args:
        lora: whether the model has an adapter.
        ahead: the name of a stage that asks for samples while the learner works; '' where none does.
    """
    if not isinstance(engine, Embedded):
        if exact:
            yield (
                "exact=true computes the learner's log-probs with the embedded engine's own code; vLLM's kernels are"
                " others, and their bits depend on what runs beside. Set engine=embedded, or exact=false"
            )
        if deterministic:
            yield (
                "deterministic=true is what the embedded engine can do; vLLM's tokens depend in their last bits on what"
                " runs beside them. Set engine=embedded, or deterministic=false"
            )
        if kernels == "compiled":
            yield "model.kernels=compiled is about the embedded engine. Set engine=embedded, or leave it out"
        if lora and engine.update == "inflight":
            yield (
                "engine.update=inflight: vLLM names the adapter in each request, so unfinished ones would go on under"
                " the old adapter. Set engine.update=drain, or model.lora=none"
            )
        return
    if engine.sleep and ahead:
        yield (
            f"{ahead}.staleness asks for samples while the learner works, and with engine.sleep=true the engine has no"
            f" cache then: set {ahead}.staleness=0, or engine.sleep=false"
        )
    for name in [n for n, on in (("deterministic", deterministic), ("exact", exact)) if on]:
        if engine.lookup or engine.draft:
            yield (
                f"{name}=true computes fixed shapes, and drafts differ in number: set engine.lookup=0 engine.draft=none"
            )
        if engine.update == "stale":
            yield (
                f"{name}=true computes every sequence by one policy, and engine.update=stale does not: use drain or"
                " inflight"
            )
    if exact and kernels == "reference":
        yield (
            "exact=true: the reference kernels pad to the longest sequence of a pass, so their bits depend on"
            " neighbours. Set model.kernels=auto or torch"
        )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"engine.{name}={value}: must be > 0")


def pause_refusals(stage: str, engine: Engine, local: bool, deterministic: bool) -> Iterator[str]:
    """Yields the reason why turns of a stage cannot stop while the learner computes (`unfinished=pause`), with what to
    change. `local`: whether the engine computes in the learner's process."""
    setting = f"{stage}.unfinished=pause stops turns while the learner computes"
    if not (local and isinstance(engine, Embedded)):
        yield f"{setting}, and this engine goes on meanwhile by itself: set {stage}.unfinished=go_on"
    elif deterministic:
        yield f"{setting}, and with deterministic=true every group ends before new weights come: leave one of them out"
    elif engine.update == "drain":
        yield (
            f"{setting}, and with engine.update=drain new weights wait until these turns have ended: set"
            " engine.update=inflight"
        )
