"""AdamW with a global gradient clip and linear warm-up. Its whole state is a set of named tensors.

Weights below float32 have float32 master copies, so that updates smaller than a weight's rounding add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from posttrain.core.engines import KernelChoice
from posttrain.core.errors import RunFolderError
from posttrain.core.run import Optimizer
from posttrain.core.scores import ExpectedUpdate
from posttrain.engine import plain
from posttrain.engine.kernels import Kernel, add_forms, kernel

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW on the gradients that the parameters hold. Weight decay is decoupled and applies to every parameter.

    Args:
        parameters: by name, in a fixed order; float32, float64, or a narrower dtype with a master copy. A step does not
            change parameters without a gradient.
        kernels: the choice of kernels (`Model.kernels`).
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: Optimizer, kernels: KernelChoice = "auto") -> None:
        self.config = config
        self.steps = 0
        """Optimizer steps taken."""
        self._parameters = dict(parameters)
        self._masters = {n: p.detach().float().clone() for n, p in self._parameters.items() if p.dtype.itemsize < 4}
        moved = [self._masters.get(n, p) for n, p in self._parameters.items()]
        self._adam: torch.optim.Optimizer = kernel("adamw", moved[0].device, moved[0].dtype, kernels).function(
            moved, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        self._moved = dict(zip(self._parameters, moved, strict=True))

    @property
    def lr(self) -> float:
        """Learning rate of the next step. Step k (from 1) of the warm-up has lr * k / warmup."""
        return (
            self.config.lr * min(1.0, (self.steps + 1) / self.config.warmup) if self.config.warmup else self.config.lr
        )

    def trained(self) -> dict[str, Tensor]:
        """The tensors that a step updates, by parameter: the float32 master where there is one,
        else the parameter itself."""
        return dict(self._moved)

    def step(self) -> float:
        """Clip the gradients globally, update, and clear them. Returns the gradient norm before the clip.

        If the norm is not finite, weights and moments do not change, and the step is not counted.
        """
        self._follow_weights()
        self.gather()
        with_grad = [t for t in self._moved.values() if t.grad is not None]
        norm = torch.nn.utils.get_total_norm([t.grad for t in with_grad if t.grad is not None])
        size = float(norm)
        if math.isfinite(size):
            if size > self.config.clip:
                torch.nn.utils.clip_grads_with_norm_(with_grad, self.config.clip, norm)
            for group in self._adam.param_groups:
                group["lr"] = self.lr
            self._adam.step()
            self.steps += 1
            self._publish_masters()
        for t in (*self._moved.values(), *self._parameters.values()):
            t.grad = None
        return size

    def expected_update(
        self, config: Optimizer, name: str, gradient: Tensor, norm: float, at: int | None = None
    ) -> ExpectedUpdate:
        """The update of AdamW (1711.05101, algorithm 2) with a global clip and a linear warm-up, in
        float64; see `role.trainer.WeightOptimizer`."""
        weight = _exact(self._moved[name], at)
        state = self._adam.state.get(self._moved[name], {})
        g = _exact(gradient, at) * (min(1.0, config.clip / norm) if norm > 0 else 1.0)
        first, second = (_exact(state[m], at) if m in state else torch.zeros_like(g) for m in MOMENTS)
        taken = float(state["step"]) + 1 if state else 1.0
        lr = config.lr * min(self.steps + 1, config.warmup) / config.warmup if config.warmup else config.lr
        first, mean = _moment(config.beta1, taken, first, g)
        second, square = _moment(config.beta2, taken, second, g * g)
        move = -lr * mean / (square.sqrt() + config.eps) - lr * config.weight_decay * weight
        return ExpectedUpdate(move, dict(zip(MOMENTS, (first, second), strict=True)), lr)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as tensors for safetensors: step counts, moments, masters."""
        out = {"steps": torch.tensor(self.steps)}
        for name, tensor in self._moved.items():
            state = self._adam.state.get(tensor, {})
            if state:
                out |= {f"{moment}.{name}": state[moment] for moment in MOMENTS} | {f"step.{name}": state["step"]}
        return out | {f"master.{name}": master for name, master in self._masters.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors`, bit for bit. The weights themselves are loaded separately.

        Raises:
            RunFolderError: the state belongs to other parameters.
        """
        left = dict(tensors)
        steps = left.pop("steps", None)
        new: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._moved.items():
            parts = {key: left.pop(f"{key}.{name}") for key in ("step", *MOMENTS) if f"{key}.{name}" in left}
            if len(parts) not in (0, 3) or any(parts[key].shape != tensor.shape for key in parts if key != "step"):
                raise RunFolderError(_foreign(name))
            if parts:
                new[name] = parts
        masters = {name: left.pop(f"master.{name}", None) for name in self._masters}
        foreign = [*left, *(n for n, m in masters.items() if m is None or m.shape != self._masters[n].shape)]
        if steps is None or foreign:
            raise RunFolderError(_foreign(foreign[0] if foreign else "steps"))
        self.steps = int(steps)
        self._adam.state.clear()
        for name, parts in new.items():
            tensor = self._moved[name]
            self._adam.state[tensor] = {"step": parts["step"].to(tensor.device, copy=True)} | {
                key: parts[key].to(device=tensor.device, dtype=tensor.dtype, copy=True) for key in MOMENTS
            }
        for name, master in masters.items():
            if master is not None:
                self._masters[name].copy_(master)

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of low-precision weights to those of their masters, so that micro-batches
        are summed in float32."""
        for name, master in self._masters.items():
            p = self._parameters[name]
            if p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def _follow_weights(self) -> None:
        """Copy weights that were replaced from outside to their masters."""
        for name, master in self._masters.items():
            p = self._parameters[name]
            if not torch.equal(master.to(p.dtype), p):
                master.copy_(p)

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, master in self._masters.items():
            self._parameters[name].copy_(master)


def _exact(x: Tensor, at: int | None) -> Tensor:
    """All numbers of a tensor in float64, or only the one at index `at` of the flattened tensor."""
    return (x.detach() if at is None else x.detach().flatten()[at : at + 1]).double().cpu()


def _moment(decay: float, taken: float, before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """A moment after its `taken`-th number, and the moment with its bias toward 0 corrected. The first
    corrected one equals `now`."""
    whole = 1 - decay**taken
    return decay * before + (1 - decay) * now, decay / whole * before + (1 - decay) / whole * now


def _foreign(name: str) -> str:
    return (
        f"the optimizer state is of other parameters ({name!r} does not fit): resume with the model and stage the run"
        " was started with"
    )


add_forms(
    Kernel(
        operation="adamw",
        form="torch",
        function=partial(torch.optim.AdamW, fused=True),
        bounds={torch.float32: 1e-5, torch.float64: 1e-13},
    ),
    Kernel(operation="adamw", form="reference", function=plain.adamw),
)
