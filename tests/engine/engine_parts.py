"""Tiny policies and segments for the tests of the engine's rooms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from posttrain.config.run import Model
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment, TruncationSets
from posttrain.engine.model.policy_model import Policy, load_policy

ALPHABET = "0123456789+-*= \nabcdefgh"
ARCHS = ("qwen3", "llama", "gpt2", "gemma")


def tiny(arch: str = "qwen3", **changes: Any) -> Model:
    sizes: dict[str, Any] = {
        "hidden": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4 if arch == "gpt2" else 2,
        "ffn": 48,
        "context": 64,
    }
    return Model(arch=arch, **(sizes | changes))  # type: ignore[arg-type]


def policy(arch: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    """A tiny policy whose weights are large enough that its distributions are far from uniform."""
    built = load_policy(tiny(arch), ALPHABET, seed)
    with torch.no_grad():
        for p in built.module.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return replace(built, module=built.module.to(dtype))


def segments(
    count: int, seed: int = 0, longest: int = 40, sampling: Sampling = Sampling(), vocabulary: int = 26
) -> list[Segment]:
    """Random tokens after a prompt of at least one; some hold a second observation in the middle."""
    rng = np.random.default_rng(seed)
    out: list[Segment] = []
    for _ in range(count):
        size = int(rng.integers(3, longest))
        mask = np.arange(size) >= rng.integers(1, size)
        if size > 12 and rng.random() < 0.5:
            mask[size // 2 : size // 2 + 3] = False
        ids = rng.integers(0, vocabulary, size).astype(np.int32)
        sets = [np.union1d(rng.integers(0, vocabulary, 5), [i]).astype(np.int32) for i in ids[mask]]
        logp = np.where(mask, -1.0, np.nan).astype(np.float32)
        kept = TruncationSets.of(sets) if sampling.truncated else None
        out.append(Segment(ids, mask, logp, np.where(mask, 0, -1).astype(np.int32), sampling, kept))
    return out


def packed(count: int = 6, **changes: Any) -> Packed:
    return Packed.of(segments(count, **changes))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers in float64 that have a gradient."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).requires_grad_()
