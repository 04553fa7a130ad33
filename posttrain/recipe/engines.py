"""From `Run.engine` to a sampler: the one place where an engine comes into being, with how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posttrain.core.engines import GIB, VLLM, Embedded
from posttrain.core.ports import Sampler
from posttrain.core.run import Reinforce, Run
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.models import Policy
from posttrain.engine.vllm.contract import check
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.engine.vllm.start import limits


@dataclass(frozen=True)
class Serving:
    """A sampler, and what ends it: threads, processes, memory."""

    sampler: Sampler
    close: Callable[[], None]


def make_engine(run: Run, policy: Policy, text: Callable[[np.ndarray], str]) -> Serving:
    """The engine of the run, with weights of its own.

    Args:
        text: what token ids say, special tokens included; stop strings are looked for in it.

    Raises:
        ConfigError: it cannot keep a stage's sampling contract, or is not installed. EngineError: it does not start.
    """
    serving = _embedded(run, run.engine, policy, text) if isinstance(run.engine, Embedded) else _vllm(run, run.engine, policy)
    try:
        for stage in run.stages:
            if isinstance(stage, Reinforce):
                stage.sampling.for_training(serving.sampler.keeps_sets)
    except BaseException:
        serving.close()
        raise
    return serving


def _embedded(run: Run, how: Embedded, policy: Policy, text: Callable[[np.ndarray], str]) -> Serving:
    engine = EmbeddedEngine(
        policy.clone().module,
        slots=run.slots,
        context=policy.context,
        deterministic=run.deterministic,
        device=run.model.device,
        cache_bytes=int(how.cache_gib * GIB),
        text=text,
    )
    return Serving(engine, lambda: None)


def _vllm(run: Run, how: VLLM, policy: Policy) -> Serving:
    for stage in run.stages:
        if isinstance(stage, Reinforce):
            check(stage.sampling, limits(policy))
    engine = VLLMEngine(policy, slots=run.slots, cache_bytes=int(how.cache_gib * GIB), eager=how.eager, timeout=how.timeout)
    return Serving(engine, engine.close)
