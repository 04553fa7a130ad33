"""The work every side of `rollout.py` does: prompts and forced lengths; and the loop by which a side is asked for it.

numpy only, so that it also imports where neither posttrain nor transformers is installed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.speed.grpo_work import SYMBOLS, Wire, lengths_PG, memory_mb

PROMPT = 7
SLOTS = 64
FIRST = 3
"""Ids below are pad, eos and unk."""
VOCABULARY = FIRST + len(SYMBOLS)
WARM = 64
"""Requests of the warm-up."""


@dataclass(frozen=True)
class Job:
    """What one side's process is asked to be. `options` are its own."""

    checkpoint: str
    threads: int
    slots: int = SLOTS
    context: int = 264
    """Most tokens of a sequence: a prompt of 7 and the longest answer, 256."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Work:
    """Requests in arrival order: token ids of each prompt, and how many tokens each says."""

    prompts: list[list[int]]
    lengths: list[int]
    salt: int
    """Another for each play of a process, so that none finds the prompts of an earlier one in its cache."""


Play = Callable[[Work], tuple[list[list[int]], dict[str, Any]]]
"""What a side does: the said ids of each request in order, and whatever else it tells."""


def work(regime: str | int, requests: int, salt: int = 0) -> Work:
    """`requests` different prompts of 7 tokens; lengths 64 (`equal`), log-normal, mean 40, at most 256 (`heavy`), or a
    number for all."""
    if isinstance(regime, int):
        lengths = np.full(requests, regime)
    else:
        lengths = lengths_PG(regime, -(-requests // 8)).ravel()[:requests]
    return Work([tokens(0, salt, i, PROMPT) for i in range(requests)], lengths.tolist(), salt)


def tokens(stream: int, salt: int, index: int, count: int) -> list[int]:
    """Random ids, a function of the numbers alone."""
    rng = np.random.Generator(np.random.Philox(key=[stream << 32 | salt, index]))
    return rng.integers(FIRST, VOCABULARY, count).tolist()


def check(said: list[list[int]], wanted: list[int]) -> int:
    """Tokens really said, all of them; SystemExit where a request said another number of them than it was to."""
    counts = [len(ids) for ids in said]
    if counts != wanted:
        i = next(i for i, (a, b) in enumerate(zip(counts, wanted, strict=True)) if a != b)
        raise SystemExit(f"request {i} said {counts[i]} tokens instead of {wanted[i]}")
    if any(not 0 <= token < VOCABULARY for ids in said for token in ids):
        raise SystemExit("a side said tokens outside the vocabulary")
    return sum(counts)


def serve(wire: Wire, load: Callable[[], dict[str, Play]]) -> None:
    """Load, then play what is asked for, timed, until the line closes.

    Loading and the first play of each command are warm-up: their seconds are told apart.
    """
    begun = time.perf_counter()
    plays = load()
    wire.send(ready=True, load_seconds=time.perf_counter() - begun, **memory_mb())
    while (command := wire.receive())["do"] != "quit":
        w = work(command["regime"], command["requests"], command.get("salt", 0))
        begun = time.perf_counter()
        said, extra = plays[command["do"]](w)
        seconds = time.perf_counter() - begun
        wire.send(seconds=seconds, spoken=check(said, w.lengths), extra=extra, **memory_mb())
