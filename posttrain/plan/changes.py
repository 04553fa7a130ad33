"""Changes of settings for a stage that does not fit into memory, and the largest size that does fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from posttrain.config.engines import GIB
from posttrain.config.model_settings import Lora
from posttrain.plan.memory import places
from posttrain.plan.models import MODELS, shape_by_name
from posttrain.plan.work import Work
from posttrain.system.errors import ConfigError, nearest


@dataclass(frozen=True)
class Saving:
    """One setting that takes less memory."""

    words: tuple[str, ...]
    """Overrides to paste."""
    price: str
    """Cost of the change, in words."""
    work: Work


def most(work: Work) -> float:
    """Bytes of the place that takes the most."""
    return max(p.most for p in places(work))


def changes(work: Work, stage: str) -> Iterator[Saving]:
    """Each change that applies, the cheapest first. The first ones change nothing of what is learned."""

    def saving(price: str, *words: str, **changed: Any) -> Saving:
        return Saving(words, price, replace(work, **changed))

    micro = work.micro_tokens
    while micro // 2 >= max(512, work.longest):  # a pass holds at least the longest sequence
        micro //= 2
        yield saving("more and smaller passes; no result changes", f"{stage}.micro_tokens={micro}", micro_tokens=micro)
    if work.samples_answers and work.cache > GIB:
        gib = round(work.cache / GIB / 4, 1)
        price = "fewer sequences at once where the cache is full"
        yield saving(price, f"engine.cache_gib={gib:g}", cache=gib * GIB)
    # Only the embedded engine in the learner's process can sleep, and only while nobody asks it for samples ahead.
    if work.samples_answers and not work.vllm and not work.engines and not work.staleness and not work.sleep:
        yield saving("the cache is made anew in every step", "engine.sleep=true", sleep=True)
    for way, price in (("selective", "about 1.04 of the learner's time"), ("full", "about 1.3 of the learner's time")):
        if work.checkpointing == "none" or (work.checkpointing, way) == ("selective", "full"):
            yield saving(price, f"model.gradient_checkpointing={way}", checkpointing=way)
    if work.accelerator and not work.offload_optimizer:
        price = "16 bytes a parameter over the bus in each step"
        yield saving(price, "model.offload_optimizer=true", offload_optimizer=True)
    if work.accelerator and work.width == 4:
        yield saving("weights are rounded where they are computed", "model.dtype=bfloat16", width=2)
    if work.optimizer == "adamw" and work.lora is None:
        yield saving("moments are rounded to 8 bits", f"{stage}.optimizer.kind=adamw8bit", optimizer="adamw8bit")
    if work.lora is None and not work.values:
        rank, adapted = "model.lora.rank=16", {"lora": Lora(), "reference": False}
        yield saving("an adapter trains, not all weights", rank, **adapted)
        yield saving("frozen weights are rounded to 4 bits", rank, "model.quantize=nf4", **adapted, quantize="nf4")


def fixes(work: Work, stage: str, memory: float, count: int = 3) -> list[Saving]:
    """The cheapest changes with which the stage fits into `memory` bytes; empty where nothing is enough.

    They are up to `count` single changes or, where no single one is enough, one combination of several.
    """
    if single := [c for c in changes(work, stage) if most(c.work) <= memory][:count]:
        return single
    words, changed = list[str](), work
    # No single change is enough. Settings are gone through from the cheapest, and of each the last value that still
    # lowers the peak is taken, on top of those before it, until all fits.
    for name in dict.fromkeys(_setting(c) for c in changes(work, stage)):
        lower = [c for c in changes(changed, stage) if _setting(c) == name and most(c.work) < most(changed)]
        if not lower:
            continue
        # A word that sets the same key as an earlier one replaces it.
        keys = {x.partition("=")[0] for x in lower[-1].words}
        words = [*(w for w in words if w.partition("=")[0] not in keys), *lower[-1].words]
        changed = lower[-1].work
        if most(changed) <= memory:
            return [Saving(tuple(words), "together", changed)]
    return []


def _setting(change: Saving) -> str:
    """The path of the last setting that a change sets."""
    return change.words[-1].partition("=")[0]


# --- the largest that fits --------------------------------------------------------------------------------------------


def largest(what: str, work: Work, memory: float, stage: str) -> Saving | None:
    """The largest model, context, siblings or batch (`what`) that fits into `memory` bytes; None: no size does."""
    if what == "model":
        models = sorted(((shape_by_name(n), n) for n in MODELS), key=lambda x: -x[0].parameters)
        fitting = (Saving((f"model={n}",), "", replace(work, shape=s)) for s, n in models)
        return next((c for c in fitting if most(c.work) <= memory), None)
    if what not in ("context", "siblings", "batch"):
        raise ConfigError(f"--fit {what}: {nearest(what, ['model', 'context', 'siblings', 'batch'])}")
    # Doubling until it no longer fits, then halving the interval: memory rises with each of these sizes.
    # `low` fits, `high` does not.
    low, high, top = 0, 1, 1 << 22 if what == "context" else 1 << 16
    while high <= top and most(_sized(what, work, stage, high).work) <= memory:
        low, high = high, high * 2
    if low and high > top:
        price = "and more: memory does not grow with it, since a step is cut into passes"
        return replace(_sized(what, work, stage, low), price=price)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if most(_sized(what, work, stage, middle).work) <= memory else (low, middle)
    return _sized(what, work, stage, low) if low else None


def _sized(what: str, work: Work, stage: str, n: int) -> Saving:
    """The stage with answers of at most `n` tokens, with `n` siblings, or with a batch of `n` times its minibatches."""
    if what == "siblings":
        return Saving((f"{stage}.siblings={n}",), "", replace(work, siblings=n))
    if what == "batch":
        prompts = n * work.minibatches
        words = (f"{stage}.{'prompts' if work.samples_answers else 'batch'}={prompts}",)
        return Saving(words, "", replace(work, prompts=prompts))
    at = work.lengths
    words = (f"model.context={at.prompt + n}", *((f"{stage}.sampling.max_tokens={n}",) if work.samples_answers else ()))
    # The mean length keeps its share of the longest, and a pass can hold the longest sequence.
    longer = replace(at, most=n, mean=max(1.0, at.mean / at.most * n))
    return Saving(words, "", replace(work, lengths=longer, micro_tokens=max(work.micro_tokens, at.prompt + n)))
