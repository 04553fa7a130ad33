"""The mathematics of updates: how a step changes tensors that hold gradients, and what it must change by definition.

A rule serves some of an optimizer's tensors. Clip, learning rate and master copies are the optimizer's (`optimizer`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.config.run import Optimizer
from posttrain.core.exchange.row_gradient import joined, number, whole
from posttrain.core.exchange.scores import ExpectedUpdate
from posttrain.engine.head import reference_ops
from posttrain.engine.head.kernel_table import Kernel, add_forms, kernel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's two moments."""
BUFFER = "momentum_buffer"
"""torch's name of the momentum."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that Muon applies (K. Jordan, 2024), `NEWTON_SCHULZ_STEPS` times."""
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_EPS = 1e-7
MATCHED_RMS = 0.2
"""An orthogonal update is scaled by this times the root of the longer side, so that its root mean square is that of a
usual AdamW step and one learning rate serves both (2502.16982)."""
PART, ROWS = 1 << 20, 16
"""A weight with a gradient of rows is updated in parts of about PART numbers, and a multiple of ROWS rows. So each part
begins where a vector of the processor begins, and rounds as an update of the whole weight does."""
EXACT_ELEMENTS = 1 << 20
"""Matrices with more elements are iterated in float32, on their device, when an expected update is computed."""


class UpdateRule(ABC):
    """One way to update tensors, by parameter. `rates`: the factor of the learning rate of each."""

    takes_rows: ClassVar[bool] = False
    """Whether it reads gradients that hold some rows alone (`core.exchange.row_gradient`)."""
    words: ClassVar[tuple[str, ...]]
    """Names of the state that each tensor has; a state tensor is called WORD.PARAMETER."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Optimizer, rates: Mapping[str, float], kernels: KernelChoice
    ) -> None:
        self.tensors = dict(tensors)
        # torch's optimizers have one learning rate a group, so parameters of one factor are one group.
        by_rate: dict[float, list[Tensor]] = {}
        for name, tensor in self.tensors.items():
            by_rate.setdefault(rates[name], []).append(tensor)
        self.inner = self.build([{"params": ts, "rate": rate} for rate, ts in by_rate.items()], config, kernels)

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], config: Optimizer, kernels: KernelChoice) -> torch.optim.Optimizer:
        """The optimizer of torch or another library that takes the steps."""

    @abstractmethod
    def expected(
        self, config: Optimizer, name: str, gradient: Tensor, scale: float, lr: float, at: int | None
    ) -> ExpectedUpdate:
        """The next update by definition, in float64.

        Args:
            gradient: before the clip; `scale` is the factor of the clip.
            lr: the learning rate of this parameter in the step.
            at: see `role.trainer.WeightOptimizer.expected_update`.
        """

    def step(self, lr: float) -> None:
        """Update the tensors that have a gradient."""
        for group in self.inner.param_groups:
            self.set_lr(group, lr * group["rate"])
        self.inner.step()

    def set_lr(self, group: dict[str, Any], lr: float) -> None:
        """Set the learning rate of one group of parameters."""
        group["lr"] = lr

    def state(self, name: str) -> dict[str, Tensor]:
        """The state of a tensor by word, as it is stored; empty before its first update."""
        state_of_tensor = self.inner.state.get(self.tensors[name], {})
        return {word: state_of_tensor[word] for word in self.words if word in state_of_tensor}

    def forms(self, name: str) -> Mapping[str, torch.Size | None]:
        """The shape of each word of a tensor's stored state; None: it is a single number."""
        return {word: None if word == "step" else self.tensors[name].shape for word in self.words}

    def bytes(self, name: str) -> int:
        """Bytes of a tensor's state: 1 for a code of 8 bits, 4 for a float32. Single numbers are not counted."""
        tensors_of_state = ((word, form) for word, form in self.forms(name).items() if form is not None)
        return sum((1 if word.endswith("codes") else 4) * form.numel() for word, form in tensors_of_state)

    def load(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Replace a tensor's state by copies of what `state` gave."""
        tensor = self.tensors[name]
        # A step count keeps its own dtype, as torch makes it: float32 also beside float64 weights.
        self.inner.state[tensor] = {
            word: part.to(tensor.device, copy=True)
            if word == "step"
            else part.to(device=tensor.device, dtype=tensor.dtype, copy=True)
            for word, part in parts.items()
        }


class Moments(UpdateRule):
    """AdamW (1711.05101, algorithm 2)."""

    words = ("step", *MOMENTS)
    takes_rows = True

    def build(self, groups: list[dict[str, Any]], config: Optimizer, kernels: KernelChoice) -> torch.optim.Optimizer:
        first = next(iter(self.tensors.values()))
        form = kernel("adamw", first.device, first.dtype, kernels).function
        return form(groups, **adam_options(config))

    def expected(
        self, config: Optimizer, name: str, gradient: Tensor, scale: float, lr: float, at: int | None
    ) -> ExpectedUpdate:
        state = self.inner.state.get(self.tensors[name], {})
        g = exact(gradient, at) * scale
        first, second = (exact(state[m], at) if m in state else torch.zeros_like(g) for m in MOMENTS)
        step = float(state["step"]) + 1 if state else 1.0
        return adamw_update(config, exact(self.tensors[name], at), g, (first, second), step, lr)

    def step(self, lr: float) -> None:
        """Update the tensors, and those whose gradient holds only some rows in parts.

        Each part gets a dense gradient of its own, which is zero in the other rows. The result is that of a whole dense
        gradient, and no gradient of the weight's size is made.
        """
        gradients_of_rows = {t: t.grad for t in self.tensors.values() if t.grad is not None and t.grad.is_sparse}
        # Hidden from torch's step, which takes dense gradients, and stepped by rows below.
        for tensor in gradients_of_rows:
            tensor.grad = None
        super().step(lr)
        for tensor, gradient in gradients_of_rows.items():
            self._step_by_rows(tensor, joined(gradient))

    @torch.no_grad()
    def _step_by_rows(self, weight: Tensor, gradient: Tensor) -> None:
        """Update one weight whose gradient holds some rows, part by part."""
        # As torch makes it on the first step of a fused AdamW.
        if not self.inner.state.get(weight):
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            self.inner.state[weight] = {"step": step, **{m: torch.zeros_like(weight) for m in MOMENTS}}
        state, groups = self.inner.state[weight], self.inner.param_groups
        group = next(g for g in groups if any(t is weight for t in g["params"]))
        rows, values = gradient.indices()[0], gradient.values()
        # `rows` are ascending: part i, of `size` rows, has the entries cuts[i] to cuts[i + 1] - 1 of them.
        size = max(1, PART // (ROWS * weight.shape[1])) * ROWS
        edges = range(0, weight.shape[0], size)
        cuts = [*torch.searchsorted(rows, torch.tensor([*edges], device=rows.device)).tolist(), len(rows)]
        new_step = state["step"]
        try:
            for first, low, high in zip(edges, cuts[:-1], cuts[1:], strict=True):
                # Parts without a row are visited too, because moments fade and weights decay without a gradient. `part`
                # and its moments are views: the step changes the weight's own numbers.
                part = weight.detach()[first : first + size]
                part.grad = torch.zeros_like(part)
                part.grad[rows[low:high] - first] = values[low:high]
                moments = {m: state[m][first : first + size] for m in MOMENTS}
                # A clone, because torch counts the step up in place, and all parts take the same step.
                self.inner.state[part] = {"step": state["step"].clone(), **moments}
                self.inner.param_groups = [{**group, "params": [part]}]
                self.inner.step()
                new_step = self.inner.state.pop(part)["step"]
        finally:
            self.inner.param_groups = groups
        state["step"].copy_(new_step)


class Momentum(UpdateRule):
    """Gradient descent with momentum: b = momentum b + g, w = w - lr b."""

    words = (BUFFER,)

    def build(self, groups: list[dict[str, Any]], config: Optimizer, kernels: KernelChoice) -> torch.optim.Optimizer:
        self._decay = config.weight_decay
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.decay_of_momentum)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the tensors that have a gradient; weight decay first."""
        if self._decay:  # torch's own is a part of the gradient
            # Decoupled decay, as AdamW has it: w shrinks by lr * decay, whatever momentum and clip do.
            for group in self.inner.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.mul_(1 - lr * group["rate"] * self._decay)
        super().step(lr)

    def expected(
        self, config: Optimizer, name: str, gradient: Tensor, scale: float, lr: float, at: int | None
    ) -> ExpectedUpdate:
        buffer = self.inner.state.get(self.tensors[name], {}).get(BUFFER)
        g = exact(gradient, at) * scale
        after = g if buffer is None else config.decay_of_momentum * exact(buffer, at) + g
        move = -lr * after - lr * config.weight_decay * exact(self.tensors[name], at)
        return ExpectedUpdate(move, {BUFFER: after} if config.decay_of_momentum else {}, float(move.abs().max()))

    def state(self, name: str) -> dict[str, Tensor]:
        return {word: value for word, value in super().state(name).items() if value is not None}  # torch keeps a None


class Orthogonal(UpdateRule):
    """Muon: momentum of a matrix, with all its singular values brought near 1 by Newton-Schulz in bfloat16.

    The iteration amplifies directions without a gradient, and bfloat16's rounding in them, by up to 3.4 ** 5. At low
    rank that noise is as large as the step, so only the part of a step along its definition is checked: exact to 1 %
    for most gradients, to some 20 % for matrices of few rows, such as adapters'. The momentum is exact to float32."""

    words = (BUFFER,)

    def build(self, groups: list[dict[str, Any]], config: Optimizer, kernels: KernelChoice) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            groups,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.decay_of_momentum,
            nesterov=True,
            ns_coefficients=NEWTON_SCHULZ,
            ns_steps=NEWTON_SCHULZ_STEPS,
            eps=NEWTON_SCHULZ_EPS,
            adjust_lr_fn="match_rms_adamw",
        )

    def expected(
        self, config: Optimizer, name: str, gradient: Tensor, scale: float, lr: float, at: int | None
    ) -> ExpectedUpdate:
        weight = self.tensors[name]
        g, buffer = exact(gradient, None) * scale, self.inner.state.get(weight, {}).get(BUFFER)
        # torch's Muon keeps an average: b = m b + (1 - m) g. Nesterov looks ahead by one more: (1 - m) g + m b.
        after = (1 - config.decay_of_momentum) * g
        after = after if buffer is None else config.decay_of_momentum * exact(buffer, None) + after
        ahead = (1 - config.decay_of_momentum) * g + config.decay_of_momentum * after
        large = ahead.numel() > EXACT_ELEMENTS
        turned = orthogonal(ahead.to(weight.device, torch.float32) if large else ahead).double().cpu()
        longer = max(weight.shape)
        move = -lr * MATCHED_RMS * math.sqrt(longer) * turned - lr * config.weight_decay * exact(weight, None)
        size = float(move.abs().max())
        return ExpectedUpdate(exact(move, at), {BUFFER: exact(after, at)}, size, along=True)


def orthogonal(x: Tensor) -> Tensor:
    """A matrix with its singular values brought near 1, in its own dtype."""
    a, b, c = NEWTON_SCHULZ
    # The Gram matrix below then has the shorter side. Divided by the Frobenius norm, no singular value is above 1,
    # where the polynomial brings them towards 1.
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.norm().clamp(min=NEWTON_SCHULZ_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def adamw_update(
    config: Optimizer, weight: Tensor, g: Tensor, before: tuple[Tensor, Tensor], taken: float, lr: float
) -> ExpectedUpdate:
    """The `taken`-th update of AdamW from the moments `before`; all float64. With m and v the corrected moments:

    move = -lr m / (sqrt(v) + eps) - lr weight_decay w
    """
    first, mean = _moment(config.beta1, taken, before[0], g)
    second, square = _moment(config.beta2, taken, before[1], g * g)
    move = -lr * mean / (square.sqrt() + config.eps) - lr * config.weight_decay * weight
    return ExpectedUpdate(move, dict(zip(MOMENTS, (first, second), strict=True)), lr)


def exact(x: Tensor, at: int | None) -> Tensor:
    """All numbers of a tensor in float64, or only the one at index `at` of the flattened tensor."""
    return (whole(x.detach()) if at is None else number(x.detach(), at)).double().cpu()


def _moment(decay: float, taken: float, before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """A moment after its `taken`-th number `now`, and the same moment with its bias toward 0 corrected."""
    # Divided before the sum: so for taken = 1 the factor of `now` is (1 - decay) / (1 - decay), which is 1 exactly.
    correction = 1 - decay**taken
    return decay * before + (1 - decay) * now, decay / correction * before + (1 - decay) / correction * now


def adam_options(config: Optimizer) -> dict[str, Any]:
    """The settings of AdamW as torch's arguments."""
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


add_forms(
    "adamw",
    Kernel("torch", partial(torch.optim.AdamW, fused=True), bounds={torch.float32: 1e-5, torch.float64: 1e-13}),
    Kernel("reference", reference_ops.adamw),
)
