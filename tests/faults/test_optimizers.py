"""What an optimizer says of its next step is what the step does, and an optimizer from outside the package is checked
by its own word."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.checks.learning.gradient_and_update_checks import (
    Largest,
    StepGradients,
    keeps_to_schedule,
    update_agrees,
)
from posttrain.config.run import Optimizer
from posttrain.core.exchange.scores import ExpectedUpdate
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.record import run_reader
from posttrain.system.errors import InvariantError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


class Momentum:
    """Stochastic gradient descent: b = beta1 b + g, w = w - lr b. Gradients are clipped globally, the learning rate is
    constant."""

    def __init__(self, parameters: Mapping[str, Tensor], config: Optimizer) -> None:
        self.config, self.steps = config, 0
        self.parameters = dict(parameters)
        self.momentum = {n: torch.zeros_like(p) for n, p in parameters.items()}

    loss_scale = 1.0

    @property
    def lr(self) -> float:
        return self.config.lr

    def gather(self) -> None:
        """Gradients stay where the backward left them."""

    @torch.no_grad()
    def step(self) -> float:
        grads = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
        if math.isfinite(norm):
            for name, g in grads.items():
                held, p = self.momentum[name], self.parameters[name]
                held.mul_(self.config.beta1).add_(g * min(1.0, self.config.clip / norm) if norm else g)
                p.sub_(self.config.lr * held)
            self.steps += 1
        for p in self.parameters.values():
            p.grad = None
        return norm

    def trained(self) -> dict[str, Tensor]:
        return self.parameters

    def expected_update(
        self, config: Optimizer, name: str, gradient: Tensor, norm: float, at: int | None = None
    ) -> ExpectedUpdate:
        g, before = (
            x.detach().double() if at is None else x.detach().flatten()[at : at + 1].double()
            for x in (gradient, self.momentum[name])
        )
        after = config.beta1 * before + g * (min(1.0, config.clip / norm) if norm else 1.0)
        return ExpectedUpdate(-config.lr * after, {"momentum": after}, config.lr * float(after.abs().max()))

    def state_tensors(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps)} | {f"momentum.{n}": t for n, t in self.momentum.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps = int(tensors["steps"])
        for name in self.momentum:
            self.momentum[name].copy_(tensors[f"momentum.{name}"])


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_are_no_number_are_no_configured_step(whole: bool, along: bool) -> None:
    """`max` and `>` pass over a NaN."""
    before, after = ({"w": torch.full((4,), x)} for x in (1.0, math.nan))
    update = ExpectedUpdate(torch.full((4,), -0.1).double(), {}, 0.1, along)
    largest = {"w": Largest(0, 1.0, -0.1, math.inf if along else 0.1)}
    handed = StepGradients(1.0, largest, {"w": update} if whole else {}, before)
    with pytest.raises(InvariantError, match="the first optimizer step is not the configured one: w is off by inf"):
        update_agrees(Optimizer(), handed, after, {})
    with pytest.raises(InvariantError, match="an optimizer step moved w by nan"):
        keeps_to_schedule(Optimizer(), handed, after, 0.1)


class Bent(Momentum):
    """Its step is half as long again as it says."""

    @torch.no_grad()
    def step(self) -> float:
        before = {n: p.clone() for n, p in self.parameters.items()}
        norm = super().step()
        for name, p in self.parameters.items():
            p.add_(0.5 * (p - before[name]))
        return norm


class Forgetful(Momentum):
    """Its momentum is gone after every step."""

    def step(self) -> float:
        norm = super().step()
        for held in self.momentum.values():
            held.zero_()
        return norm


class Idle(Momentum):
    """Nothing moves."""

    @torch.no_grad()
    def step(self) -> float:
        before = {n: p.clone() for n, p in self.parameters.items()}
        norm = super().step()
        for name, p in self.parameters.items():
            p.copy_(before[name])
        return norm


CONFIG = Optimizer(lr=0.05, warmup=0, clip=0.05)


def trains(folder: Path, optimizer: Callable[[Any, Optimizer], Any]) -> None:
    """A tiny run with this optimizer."""
    parts = tiny_parts(folder, only_rl(tiny_run(prompts=16, steps=2, optimizer=CONFIG)))
    parts.optimize = lambda config: optimizer(parts.learner.parameters(), config)
    asyncio.run(play(parts))


def test_an_optimizer_from_outside_is_followed_by_its_own_word(tmp_path: Path) -> None:
    trains(tmp_path / "run", Momentum)
    first = next(s for s in run_reader.steps(tmp_path / "run") if "canary/update_gap" in s.gauges)
    assert abs(first.gauges["canary/update_gap"].mean) < 1e-3
    assert first.gauges["canary/moved"].sum > 0


@pytest.mark.prove
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Bent, "first optimizer step is not the configured one: .* off by 0.5"),
        (Forgetful, "first optimizer step is not the configured one: .* its state by 1 "),
        (Idle, "did not move in an optimizer step"),
        (
            lambda p, config: Momentum(p, replace(config, lr=2 * config.lr)),
            "first optimizer step is not the configured one: .* off by 1 ",
        ),
        (
            lambda p, config: Momentum(p, replace(config, clip=math.inf)),
            "first optimizer step is not the configured one",
        ),
    ],
    ids=["bent step", "no momentum", "no step", "another lr", "no clip"],
)
def test_a_step_that_is_not_its_word_stops_the_run(
    tmp_path: Path, optimizer: Callable[[Any, Optimizer], Any], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        trains(tmp_path / "run", optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_does_what_it_says_at_every_step(dtype: torch.dtype) -> None:
    """From rest and later, with decay, clip and warm-up, for parameters that have no gradient in some steps."""
    draws = torch.Generator().manual_seed(3)
    config = Optimizer(lr=0.01, weight_decay=0.1, clip=1.5, warmup=3)
    parameters = {n: torch.randn(4, 3, generator=draws).to(dtype).requires_grad_() for n in ("a", "b")}
    adam = StageOptimizer(parameters, config)
    for step in range(6):
        for name in ("a", "b") if step % 2 else ("a",):
            parameters[name].grad = torch.randn(4, 3, generator=draws).to(dtype)
        adam.gather()
        moved = adam.trained()
        before = {n: t.detach().double().clone() for n, t in moved.items()}
        grads = {n: t.grad.clone() for n, t in moved.items() if t.grad is not None}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        told = {n: adam.expected_update(config, n, g, norm) for n, g in grads.items()}
        alone = {n: adam.expected_update(config, n, g, norm, 7) for n, g in grads.items()}
        adam.step()
        assert set(grads) == ({"a", "b"} if step % 2 else {"a"})
        for name, expected in told.items():
            torch.testing.assert_close(moved[name].detach().double() - before[name], expected.move, rtol=0, atol=5e-7)
            assert float(alone[name].move) == float(expected.move.flatten()[7])
            for word, want in expected.state.items():
                torch.testing.assert_close(adam.state_tensors()[f"{word}.{name}"].double(), want, rtol=1e-5, atol=1e-9)


def test_what_is_expected_does_not_hang_on_what_the_optimizer_was_built_with() -> None:
    config = Optimizer(lr=0.01, warmup=4)
    w = {"w": torch.ones(3, requires_grad=True)}
    other = StageOptimizer(w, Optimizer(lr=1.0, beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.5, clip=0.1, warmup=0))
    told = [o.expected_update(config, "w", torch.full((3,), 0.3), 0.5) for o in (StageOptimizer(w, config), other)]
    assert torch.equal(told[0].move, told[1].move) and told[0].size == told[1].size == 0.01 / 4
    torch.testing.assert_close(told[0].move, torch.full((3,), -0.01 / 4, dtype=torch.float64), rtol=1e-6, atol=0)
