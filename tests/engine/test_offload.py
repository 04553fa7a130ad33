"""Optimizer state that is elsewhere between steps: the same steps bit for bit, and one group at a time on the device.

Both devices are the CPU where no accelerator is there. The copies are made all the same, so what is tested is who holds
which numbers when; only pinned memory and the order of a device's stream need a real accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from posttrain.config.run import Model, Optimizer
from posttrain.engine.optimizer import optimizer as module
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.optimizer.optimizer_offload import OffloadedState, groups
from posttrain.engine.optimizer.update_rules import exact
from posttrain.system.errors import ConfigError
from tests.peak import peak_bytes

CPU = torch.device("cpu")
WORK = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
KINDS = ("adamw", "adamw8bit", "muon", "sgd")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (20, 16),
    "model.layers.0.mlp.up_proj.weight": (64, 80),  # 5120 numbers, which 8 bits hold in 20 blocks
    "model.layers.0.mlp.gate.weight": (24, 9),
    "model.norm.weight": (16,),
    "model.layers.0.scale": (1,),
    "value_head.weight": (1, 16),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "groups", lambda tensors: groups(tensors, 400))


def weights(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {n: torch.randn(*s, generator=draws).to(device, dtype).requires_grad_() for n, s in SHAPES.items()}


def give(parameters: Mapping[str, Tensor], step: int) -> None:
    """Gradients; some steps leave a parameter out."""
    draws = torch.Generator().manual_seed(100 + step)
    for i, (name, p) in enumerate(parameters.items()):
        g = torch.randn(*p.shape, generator=draws)
        p.grad = None if i == step % 3 and name != "model.layers.0.mlp.up_proj.weight" else g.to(p)


def pair(
    kind: str, dtype: torch.dtype, device: torch.device, **more: Any
) -> tuple[Optimizer, list[dict[str, Tensor]], list[StageOptimizer]]:
    """(config, weights, optimizers) of two: a plain one, and one whose state is at home."""
    if kind == "adamw8bit":
        pytest.importorskip("torchao.optim")
    config = Optimizer(kind=cast("Any", kind), **{"lr": 0.01, "clip": 3.0, "warmup": 2, "ema": 0.9, **more})
    both = [weights(dtype, device) for _ in range(2)]
    scaled = dtype == torch.float16
    return (
        config,
        both,
        [StageOptimizer(w, config, "auto", scaled, home) for w, home in zip(both, (None, CPU), strict=True)],
    )


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n].cpu(), two[n].cpu()) for n in one)


@pytest.mark.parametrize("device", WORK, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_same_bits(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """With rates, a frozen group, an average, parameters without a gradient, and a step that is left out."""
    config, both, (plain, away) = pair(kind, dtype, device, rates=(("value_head", 3.0),), freeze=("gate",))
    for step in range(7):
        for w in both:
            give(w, step)
            if step == 4:
                cast("Tensor", w["model.embed_tokens.weight"].grad)[0, 0] = math.inf
        assert plain.step() == away.step() or step == 4
        assert (
            same(*both)
            and same(plain.state_tensors(), away.state_tensors())
            and same(plain.averaged(), away.averaged())
        )
        g = torch.full(SHAPES["model.embed_tokens.weight"], 0.1, device=device)
        told = [o.expected_update(config, "model.embed_tokens.weight", g, 0.3) for o in (plain, away)]
        assert torch.equal(told[0].move, told[1].move) and same(told[0].state, told[1].state)


@pytest.mark.parametrize("device", WORK, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", [0, 1], ids=["to-plain", "to-home"])
def test_a_state_goes_on_at_home_and_on_the_device(kind: str, to: int, device: torch.device) -> None:
    """What one stored, the other takes, and both go on alike: the setting may change when a run goes on."""
    config, both, optimizers = pair(kind, torch.bfloat16, device)
    for step in range(3):
        for w, o in zip(both, optimizers, strict=True):
            give(w, step)
            o.step()
    stored = {n: t.clone() for n, t in optimizers[1 - to].state_tensors().items()}
    twin = {n: p.detach().clone().requires_grad_() for n, p in both[0].items()}
    again = StageOptimizer(twin, config, home=CPU if to else None)
    again.load_state_tensors(stored)
    for step in range(3, 6):
        for w, o in ((both[0], optimizers[0]), (twin, again)):
            give(w, step)
            o.step()
    assert same(both[0], twin) and same(optimizers[0].state_tensors(), again.state_tensors())


def test_state_is_at_home_between_steps_in_the_same_memory() -> None:
    _, (_, w), (_, away) = pair("adamw", torch.float32, CPU)
    places = list[dict[str, int]]()
    for step in range(4):
        give(w, 0 if step else 3)  # the first step reaches all but one
        away.step()
        places.append({n: t.data_ptr() for n, t in away.state_tensors().items() if t.numel() > 1})
    assert places[1] == places[2] == places[3] and len(places[1]) > 10


def test_the_device_holds_the_state_of_one_group() -> None:
    """Bytes a step allocates beyond its results: where copies stayed, a hundred groups would be held at once."""
    config = Optimizer(warmup=0, clip=math.inf)
    w = {f"layers.{i}.weight": torch.randn(20, 20).requires_grad_() for i in range(100)}
    for p in w.values():
        p.grad = torch.ones_like(p)
    away = StageOptimizer(w, config, home=CPU)
    give_again = {n: torch.ones_like(p) for n, p in w.items()}
    assert away.pending_bytes() == 2 * 4 * 400
    away.step()
    for n, p in w.items():
        p.grad = give_again[n]
    taken = peak_bytes(lambda: away.step())
    assert away.pending_bytes() == 2 * 4 * 400 and 2 * 4 * 400 <= taken < 20 * 4 * 400


def test_expected_updates_read_what_is_at_home() -> None:
    """A state that a step had not copied back would be found: planted here by a change at home."""
    config, (_, w), (_, away) = pair("adamw", torch.float32, CPU)
    give(w, 0)
    away.step()
    name = "model.layers.0.mlp.up_proj.weight"
    g = torch.ones(SHAPES[name])
    before = away.expected_update(config, name, g, 1.0, 5).move
    away.state_tensors()[f"exp_avg.{name}"].add_(1.0)
    assert not torch.equal(before, away.expected_update(config, name, g, 1.0, 5).move)
    moved = exact(w[name], None)
    told = away.expected_update(config, name, g, float(g.norm()))
    for n, p in w.items():
        p.grad = g if n == name else None
    away.step()
    assert float((exact(w[name], None) - moved - told.move).abs().max()) <= 1e-6


def test_tensors_made_of_several_are_moved_part_by_part() -> None:
    pytest.importorskip("torchao.optim")
    _, (_, w), (_, away) = pair("adamw8bit", torch.float32, CPU)
    give(w, 0)
    away.step()
    (moment,) = (
        held["exp_avg"]
        for rule in dict.fromkeys(away._rules.values())
        for held in rule.inner.state.values()
        if hasattr(held["exp_avg"], "codes")
    )
    again = OffloadedState(CPU).stored(moment)
    assert type(again) is type(moment) and again.codes.data_ptr() != moment.codes.data_ptr()
    assert torch.equal(again.dequantize(), moment.dequantize())


def test_it_is_told_and_refused_on_a_cpu() -> None:
    _, _, (plain, away) = pair("adamw", torch.float32, CPU)
    assert "memory of the CPU between steps" in away.words() and "between steps" not in plain.words()
    with pytest.raises(ConfigError, match="adamw8bit"):
        Model(offload_optimizer=True)
    assert Model(offload_optimizer=True, device="cuda").offload_optimizer
