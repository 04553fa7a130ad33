"""`posttrain plan --probe`: what this machine's device reaches, measured once in about five seconds.

Four figures are kept in the cache folder with the versions and the date: arithmetic of a large product, reading of
memory, the seconds of a pass of a small model that are neither, and the device's memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.api.planned import cache_file
from posttrain.build.request.input_measures import machine
from posttrain.engine.layers.layer_products import linear
from posttrain.system.version import VERSION

SECONDS = 1.2
"""Seconds of each measurement."""
SIDE = 1024
"""Side of the matrices of the product on a processor; four times that on an accelerator."""
READ = 1 << 28
"""Bytes that are read; sixteen times that on an accelerator."""
SMALL, CALLS = 64, 40
"""Width of the small products, and how many make up a pass."""


def probe() -> dict[str, Any]:
    """The figures, which are written to the cache folder too."""
    where = machine()
    device, big = torch.device(where.device), where.accelerated
    told: dict[str, Any] = {
        "memory": where.memory * (1 << 30),
        "flops": _arithmetic(device, SIDE * (4 if big else 1)),
        "bandwidth": _reading(device, READ * (16 if big else 1)),
        "latency": _latency(device),
        "accelerator": big,
        "date": date.today().isoformat(),
        "versions": f"torch {torch.__version__}, posttrain {VERSION}, {torch.get_num_threads()} threads",
    }
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n")
    return {**told, "file": str(file)}


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of many calls. One thread of a processor is measured in its own seconds, which other
    programs change less."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    found, end = list[float](), time.perf_counter() + SECONDS
    # At least three calls, also where one takes longer than the time: the first allocates and warms caches.
    while time.perf_counter() < end or len(found) < 3:
        begun = clock()
        call()
        if device.type != "cpu":
            # Calls to a device return at once: the time is that of the work, so it is waited for.
            torch.get_device_module(device).synchronize(device)
        found.append(clock() - begun)
    return min(found)


def _arithmetic(device: torch.device, side: int) -> float:
    """Operations a second of a square product, by the library that is faster here."""
    # The types that runs compute in on these devices, where the user names none.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def product() -> Tensor:
        return linear(a, b) if device.type == "cpu" else a @ b

    return 2 * side**3 / _fastest(product, device)


def _reading(device: torch.device, size: int) -> float:
    """Bytes a second of a sum."""
    x = torch.ones(size // 4, device=device)
    return size / _fastest(x.sum, device)


def _latency(device: torch.device) -> float:
    """Seconds of a pass of products so small that only their calls count."""
    # As many small calls as a pass of a small model has: their arithmetic takes nearly no time.
    layers = [nn.Linear(SMALL, SMALL).to(device) for _ in range(CALLS)]
    x = torch.ones(1, SMALL, device=device)

    @torch.no_grad()
    def run() -> Tensor:
        out = x
        for layer in layers:
            out = layer(out)
        return out

    return _fastest(run, device)
