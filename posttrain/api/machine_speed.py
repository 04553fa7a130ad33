"""`posttrain plan --probe`: measures the speed of this machine's device, once, in about five seconds.

Four figures are kept in the cache folder, with versions and date: the arithmetic of a large product (operations a
second), the reading of memory (bytes a second), the seconds that a pass of a small model takes besides these two, and
the bytes of the device's memory.
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
"""Rows and columns of the matrices of the large product on a CPU; on an accelerator four times as many."""
READ = 1 << 28
"""Bytes that are read on a CPU; on an accelerator sixteen times as many."""
SMALL, CALLS = 64, 40
"""Width of the small products, and how many of them stand for a pass of a small model."""


def probe() -> dict[str, Any]:
    """Measures the figures, writes them to the cache folder and returns them."""
    where = machine()
    device, accelerated = torch.device(where.device), where.accelerated
    figures: dict[str, Any] = {
        "memory": where.memory * (1 << 30),
        "flops": _arithmetic(device, SIDE * (4 if accelerated else 1)),
        "bandwidth": _reading(device, READ * (16 if accelerated else 1)),
        "latency": _latency(device),
        "accelerator": accelerated,
        "date": date.today().isoformat(),
        "versions": f"torch {torch.__version__}, posttrain {VERSION}, {torch.get_num_threads()} threads",
    }
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=1) + "\n")
    return {**figures, "file": str(file)}


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of many calls, of a single CPU thread in CPU time, which other programs change less."""
    single_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if single_thread else time.perf_counter
    times, end = list[float](), time.perf_counter() + SECONDS
    # At least three calls, even if one takes longer than `SECONDS`: the first one allocates and warms caches.
    while time.perf_counter() < end or len(times) < 3:
        begun = clock()
        call()
        if device.type != "cpu":
            # A call to an accelerator returns before its work is done, so the end of the work is waited for.
            torch.get_device_module(device).synchronize(device)
        times.append(clock() - begun)
    return min(times)


def _arithmetic(device: torch.device, side: int) -> float:
    """Operations a second of a product of two square matrices."""
    # The dtypes that runs have by default on these devices.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def product() -> Tensor:
        return linear(a, b) if device.type == "cpu" else a @ b

    return 2 * side**3 / _fastest(product, device)


def _reading(device: torch.device, size: int) -> float:
    """Bytes a second that are read to sum up a large array."""
    x = torch.ones(size // 4, device=device)
    return size / _fastest(x.sum, device)


def _latency(device: torch.device) -> float:
    """Seconds of a pass of products so small that nearly all time goes into calling them."""
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
