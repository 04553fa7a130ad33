"""Changes of settings for a stage that does not fit into memory, and the largest size that does fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
    """The stage with the change."""


def most(work: Work) -> float:
    """Bytes of the place that takes the most."""
    return max(p.most for p in places(work))


def changes(work: Work, stage: str) -> Iterator[Saving]:
    """Each change that applies, the cheapest first. The first ones change nothing of what is learned."""
    micro = work.micro_tokens
    # A pass holds at least the longest sequence.
    while micro // 2 >= max(512, work.longest):
        micro //= 2
        price = "more and smaller passes; no result changes"
        yield Saving((f"{stage}.micro_tokens={micro}",), price, replace(work, micro_tokens=micro))
    if work.samples and work.cache > GIB:
        gib = round(work.cache / GIB / 4, 1)
        price = "fewer sequences at once where the cache is full"
        yield Saving((f"engine.cache_gib={gib:g}",), price, replace(work, cache=gib * GIB))
    # Only the embedded engine in the learner's process can sleep, and only while nobody asks it for samples ahead.
    if work.samples and not work.vllm and not work.engines and not work.staleness and not work.sleep:
        yield Saving(("engine.sleep=true",), "the cache is made anew in every step", replace(work, sleep=True))
    for how, price in (("selective", "about 1.04 of the learner's time"), ("full", "about 1.3 of the learner's time")):
        if work.checkpointing == "none" or (work.checkpointing, how) == ("selective", "full"):
            words = (f"model.gradient_checkpointing={how}",)
            yield Saving(words, price, replace(work, checkpointing=how))  # pyright: ignore[reportArgumentType]
    if work.accelerator and not work.offload_optimizer:
        price = "16 bytes a parameter over the bus in each step"
        yield Saving(("model.offload_optimizer=true",), price, replace(work, offload_optimizer=True))
    if work.accelerator and work.width == 4:
        yield Saving(("model.dtype=bfloat16",), "weights are rounded where they are computed", replace(work, width=2))
    if work.optimizer == "adamw" and work.lora is None:
        words = (f"{stage}.optimizer.kind=adamw8bit",)
        yield Saving(words, "moments are rounded to 8 bits", replace(work, optimizer="adamw8bit"))
    if work.lora is None and not work.values:
        adapted = replace(work, lora=Lora(), reference=False)
        yield Saving(("model.lora.rank=16",), "an adapter trains, not all weights", adapted)
        quantised = replace(adapted, quantize="nf4")
        yield Saving(("model.lora.rank=16", "model.quantize=nf4"), "frozen weights are rounded to 4 bits", quantised)


def fixes(work: Work, stage: str, memory: float, count: int = 3) -> list[Saving]:
    """The cheapest changes with which the stage fits into `memory` bytes; empty where nothing is enough.

    They are up to `count` single changes or, where no single one is enough, one combination of several.
    """
    single = [c for c in changes(work, stage) if most(c.work) <= memory][:count]
    if single:
        return single
    words, changed = list[str](), work
    # No single change is enough. Settings are gone through from the cheapest, and of each the last value that still
    # lowers the peak is taken, on top of those before it, until all fits.
    for name in dict.fromkeys(_setting(c) for c in changes(work, stage)):
        lower = [c for c in changes(changed, stage) if _setting(c) == name and most(c.work) < most(changed)]
        if not lower:
            continue
        last = lower[-1]
        # A word that sets the same key as an earlier one replaces it.
        words, changed = (
            [w for w in words if w.partition("=")[0] not in {x.partition("=")[0] for x in last.words}],
            last.work,
        )
        words += last.words
        if most(changed) <= memory:
            return [Saving(tuple(words), "together", changed)]
    return []


def _setting(change: Saving) -> str:
    """The path of the last setting that a change sets."""
    return change.words[-1].partition("=")[0]


# --- the largest that fits --------------------------------------------------------------------------------------------


def largest(what: str, work: Work, memory: float, stage: str) -> Saving | None:
    """The largest size with which the stage fits into `memory` bytes on each place; None: not even the smallest does.

    Args:
        what: the size that is changed: "model", "context", "siblings" or "batch".

    Raises:
        ConfigError: `what` is none of these words.
    """
    if what == "model":
        models = sorted(((shape_by_name(n), n) for n in MODELS), key=lambda x: -x[0].parameters)
        fitting = (Saving((f"model={n}",), "", replace(work, shape=s)) for s, n in models)
        return next((c for c in fitting if most(c.work) <= memory), None)
    # The groups of a step are cut into minibatches, so the batch is a multiple of their number.
    size, cut = "prompts" if work.samples else "batch", work.minibatches
    makers: dict[str, tuple[Callable[[int], tuple[str, ...]], Callable[[int], Work], int]] = {
        "context": (lambda n: _context(work, stage, n), lambda n: _longer(work, n), 1 << 22),
        "siblings": (lambda n: (f"{stage}.siblings={n}",), lambda n: replace(work, siblings=n), 1 << 16),
        "batch": (lambda n: (f"{stage}.{size}={n * cut}",), lambda n: replace(work, prompts=n * cut), 1 << 16),
    }
    if what not in makers:
        raise ConfigError(f"--fit {what}: {nearest(what, ['model', *makers])}")
    words, work_with, top = makers[what]
    # Doubling until it no longer fits, then halving the interval: memory rises with each of these sizes.
    # `low` fits, `high` does not.
    low, high = 0, 1
    while high <= top and most(work_with(high)) <= memory:
        low, high = high, high * 2
    if low and high > top:
        return Saving(
            words(low), "and more: memory does not grow with it, since a step is cut into passes", work_with(low)
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if most(work_with(middle)) <= memory else (low, middle)
    return Saving(words(low), "", work_with(low)) if low else None


def _context(work: Work, stage: str, answer: int) -> tuple[str, ...]:
    """The overrides for answers of at most `answer` tokens."""
    whole = (f"model.context={work.lengths.prompt + answer}",)
    return (*whole, f"{stage}.sampling.max_tokens={answer}") if work.samples else whole


def _longer(work: Work, answer: int) -> Work:
    """The stage with answers of at most `answer` tokens.

    Their mean length keeps its share of the longest. A pass can hold the longest sequence.
    """
    at = work.lengths
    longer = replace(at, most=answer, mean=max(1.0, at.mean / at.most * answer))
    return replace(work, lengths=longer, micro_tokens=max(work.micro_tokens, at.prompt + answer))
