"""AdamW with moments of 8 bits, by torchao, which is imported only where it is chosen.

A moment of at least 4096 numbers, a multiple of 256, is held in blocks of 256: a float32 scale, the largest size in the
block, and for each number the nearest of 256 values between -1 and 1 (2110.02861). Smaller moments stay float32.
The update of the weights reads the new moments before they are rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.config.run import Optimizer
from posttrain.core.exchange.scores import ExpectedUpdate
from posttrain.engine.optimizer.update_rules import MOMENTS, UpdateRule, adam_options, adamw_update, exact
from posttrain.system.errors import ConfigError

BLOCK = 256
"""Numbers that share a scale."""
SMALLEST = 4096
"""Moments with fewer numbers than this stay float32."""
LEAST_SCALE = 1e-12
"""The least scale of a block. A block whose numbers are all smaller in size has this one."""
PARTS = ("codes", "scale")
"""The tensors of a moment in 8 bits: a code for each number, and a scale for each block."""


class QuantisedMoments(UpdateRule):
    """AdamW whose moments are stored in 8 bits where they are large. Its steps are AdamW's from those moments, exact to
    float32; each stored number is off by at most `rounding` of its block's scale."""

    words = ("step", *(f"{m}_{part}" for m in MOMENTS for part in PARTS), *MOMENTS)

    def build(self, groups: list[dict[str, Any]], config: Optimizer, kernels: KernelChoice) -> torch.optim.Optimizer:
        check_installed()
        from torchao.optim import AdamW8bit

        device = next(iter(self.tensors.values())).device
        self._compiled = device.type == "cuda" and kernels in ("auto", "compiled")
        return AdamW8bit(groups, block_size=BLOCK, **adam_options(config))

    def set_lr(self, group: dict[str, Any], lr: float) -> None:
        # A tensor, because torchao's compiled step would be compiled anew for every other Python number.
        group["lr"].fill_(lr)

    def step(self, lr: float) -> None:
        """Update the tensors. torchao compiles its step, in seconds for each shape, which only a GPU wins back."""
        with contextlib.nullcontext() if self._compiled else torch.compiler.set_stance("force_eager"):
            super().step(lr)

    def expected(
        self, config: Optimizer, name: str, gradient: Tensor, scale: float, lr: float, at: int | None
    ) -> ExpectedUpdate:
        state = self.inner.state.get(self.tensors[name], {})
        g = exact(gradient, at) * scale
        first, second = (exact(_numbers(state[m]), at) if m in state else torch.zeros_like(g) for m in MOMENTS)
        step = float(state["step"]) + 1 if state else 1.0
        exact_update = adamw_update(config, exact(self.tensors[name], at), g, (first, second), step, lr)
        # The code of one number needs the scale of its whole block. So for a single index no codes are given.
        if at is not None or not _is_quantised(self.tensors[name]):
            return exact_update
        stored: dict[str, Tensor] = {}
        # The second moment is a mean of squares, so its codes have no sign.
        for m, signed in zip(MOMENTS, (True, False), strict=True):
            codes, scales = _quantised(exact_update.state[m], signed)
            stored |= {f"{m}_codes": codes.double(), f"{m}_scale": scales}
        return ExpectedUpdate(exact_update.move, stored, exact_update.size)

    def state(self, name: str) -> dict[str, Tensor]:
        state = self.inner.state.get(self.tensors[name], {})
        out: dict[str, Tensor] = {"step": state["step"]} if state else {}
        for m in MOMENTS if state else ():
            codes = hasattr(state[m], "codes")
            out |= {f"{m}_{part}": getattr(state[m], part) for part in PARTS} if codes else {m: state[m]}
        return out

    def forms(self, name: str) -> Mapping[str, torch.Size | None]:
        tensor = self.tensors[name]
        if not _is_quantised(tensor):
            return {"step": None} | dict.fromkeys(MOMENTS, tensor.shape)
        shapes = {"codes": tensor.shape, "scale": torch.Size([tensor.numel() // BLOCK])}
        return {"step": None} | {f"{m}_{part}": shapes[part] for m in MOMENTS for part in PARTS}

    def load(self, name: str, parts: Mapping[str, Tensor]) -> None:
        from torchao.optim.subclass_8bit import OptimState8bit

        tensor = self.tensors[name]
        state: dict[str, Any] = {"step": parts["step"].clone()}
        for m, signed in zip(MOMENTS, (True, False), strict=True):
            if not _is_quantised(tensor):
                state[m] = parts[m].to(device=tensor.device, dtype=tensor.dtype, copy=True)
                continue
            state[m] = OptimState8bit.zeros(tensor.shape, signed, BLOCK, tensor.device, dtype=tensor.dtype)
            state[m].codes.copy_(parts[f"{m}_codes"])
            state[m].scale.copy_(parts[f"{m}_scale"])
        self.inner.state[tensor] = state


def check_installed() -> None:
    """Refuse to go on without torchao.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "optimizer=adamw8bit needs torchao: pip install 'posttrain[adamw8bit]', or use another optimizer"
        )


def values(signed: bool) -> Tensor:
    """float64 [256]: the numbers that a code stands for, in units of the scale, ascending.

    The range is cut into decades. Each decade towards 0 has half the numbers of the one above it.
    """
    # With 0 and 1 these are 256: seven decades of 1, 2, 4, ... 64 intervals with both signs, or of twice as many with
    # one. Each interval is held by its middle.
    out = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        middle = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        out += [*middle, *(-x for x in middle)] if signed else middle
    return torch.tensor(sorted(out), dtype=torch.float64)


def rounding(signed: bool) -> float:
    """Largest error of a stored moment, relative to its block's scale: half the widest gap between two values."""
    code_values = values(signed)
    inside = float((code_values[1:] - code_values[:-1]).max()) / 2
    # 1 itself is held, but -1 is not: it gets the least value, which is a little above it.
    return max(inside, float(code_values[0]) + 1 if signed else 0.0)


def _is_quantised(tensor: Tensor) -> bool:
    """Returns whether the moments of a parameter are held in 8 bits."""
    return tensor.numel() >= SMALLEST and tensor.numel() % BLOCK == 0


def _numbers(moment: Any) -> Tensor:
    """A stored moment as numbers."""
    return moment.dequantize() if hasattr(moment, "codes") else moment


def _quantised(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of numbers, by definition: the nearest value, the upper one where two are as near."""
    blocks = x.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=LEAST_SCALE)
    code_values = values(signed)
    # The nearest value changes at the middle between two neighbours,
    # so a code is how many of the middles lie at or below the number.
    middles = (code_values[:-1] + code_values[1:]) / 2
    return torch.bucketize(blocks / scales[:, None], middles, right=True).reshape(x.shape), scales
