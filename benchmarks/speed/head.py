"""The head alone: log-prob and entropy, forward and backward, by every form that runs here: seconds and peak bytes.

    python -m benchmarks.speed.head                                   # a CPU: minutes
    python -m benchmarks.speed.head --device cuda --dtype bfloat16 --tokens 8192 --width 896
    python -m benchmarks.speed.head --quick                           # small sizes, nothing written: does it run?

`naive` is a float32 softmax over all logits at once by autograd. It is left out where its matrices would not fit. Peak
bytes are beyond the hidden states and the weight. Seconds are the median of the repeats; on a CPU, of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.side import machine
from posttrain.core.sampling import Sampling
from posttrain.engine.head.kernel_table import TABLE
from posttrain.engine.head.logit_transform import logit_dtype
from posttrain.engine.head.logprob import logprobs
from tests.peak import peak_bytes as cpu_peak_bytes

RESULTS = Path(__file__).parent / "results" / "head.json"
FORMS = ("compiled", "torch")
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def naive(h: Tensor, w: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of all logits at once."""
    logp = torch.nn.functional.linear(h, w).float().log_softmax(1)
    return logp.gather(1, said[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def ours(form: str) -> Head:
    """The head by one form of the table."""
    return lambda h, w, said: logprobs(h, w, None, said, sampling=Sampling(), want_entropy=True, kernels=form)  # type: ignore[arg-type]


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes that torch had allocated at once while `work` ran, beyond those before it."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return cpu_peak_bytes(work)


def measured(head: Head, inputs: tuple[Tensor, Tensor, Tensor], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of the forward and of forward and backward, and peak bytes."""
    h, w, said = inputs
    walls: list[tuple[float, float]] = []

    def clock() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def step() -> None:
        h.grad = w.grad = None
        begun = clock()
        logp, entropy = head(h, w, said)
        middle = clock()
        assert entropy is not None
        (logp.sum() + 0.01 * entropy.sum()).backward()
        walls.append((middle - begun, clock() - begun))

    peak = peak_bytes(step, device)
    walls.clear()
    for _ in range(repeats):
        step()
    forward, both = (statistics.median(column) for column in zip(*walls, strict=True))
    return {"forward": round(forward, 5), "forward_backward": round(both, 5), "peak_mib": round(peak / 2**20, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[258, 32_000, 151_936])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive-gib", type=float, default=4.0, help="most memory of the naive form")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.tokens, asked.vocabulary, asked.repeats = 64, [258, 20_000], 1
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    rows: list[dict[str, Any]] = []
    for vocabulary in asked.vocabulary:
        g = torch.Generator().manual_seed(0)
        h = torch.randn(asked.tokens, asked.width, generator=g).to(device, dtype).requires_grad_()
        w = (torch.randn(vocabulary, asked.width, generator=g) / asked.width**0.5).to(device, dtype).requires_grad_()
        said = torch.randint(0, vocabulary, (asked.tokens,), generator=g).to(device)
        fit = {k.form for k in TABLE["head"] if not k.unfit(device, logit_dtype(dtype))}
        heads: dict[str, Head] = {form: ours(form) for form in FORMS if form in fit}
        if 5 * 4 * asked.tokens * vocabulary <= asked.naive_gib * 2**30:
            heads["naive"] = naive
        for name, head in heads.items():
            rows.append(
                {"vocabulary": vocabulary, "form": name} | measured(head, (h, w, said), asked.device, asked.repeats)
            )
            print(json.dumps(rows[-1]), flush=True)
    where = torch.cuda.get_device_name() if asked.device != "cpu" else machine(torch.get_num_threads())["cpu"]
    told = {
        "date": str(date.today()),
        "device": where,
        "dtype": asked.dtype,
        "tokens": asked.tokens,
        "width": asked.width,
    }
    if not asked.quick:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(held | {f"{asked.device} {asked.dtype}": told | {"rows": rows}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
