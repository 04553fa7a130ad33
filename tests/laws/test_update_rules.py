"""A step of every kind of optimizer is its definition in float64, its state goes on bit for bit, and what is not to
move stays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from posttrain.checks.learning.gradient_and_update_checks import UPDATE_BOUND, StepGradients, departure
from posttrain.config.run import Optimizer, Reinforce
from posttrain.config.stages.stage import check_patterns, fits
from posttrain.core.exchange.scores import ExpectedUpdate
from posttrain.engine.optimizer import eight_bit
from posttrain.engine.optimizer.optimizer import StageOptimizer, hidden_matrix
from posttrain.engine.optimizer.update_rules import orthogonal
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError

ALONG = 0.01
"""Largest error of a Muon step along its definition."""

KINDS = ("adamw", "adamw8bit", "muon", "sgd")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (20, 16),
    "model.layers.0.mlp.up_proj.weight": (64, 80),  # 5120 numbers, which 8 bits hold in 20 blocks
    "model.layers.0.mlp.gate.weight": (24, 9),
    "model.norm.weight": (16,),
    "value_head.weight": (1, 16),
}
UP, NORM, HEAD = "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "value_head.weight"


def needs(kind: str) -> None:
    if kind == "adamw8bit":
        pytest.importorskip("torchao.optim")


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {n: torch.randn(*shape, generator=draws).to(dtype).requires_grad_() for n, shape in SHAPES.items()}


def give(parameters: Mapping[str, Tensor], step: int, leave: str = "") -> None:
    draws = torch.Generator().manual_seed(100 + step)
    for name, p in parameters.items():
        g = torch.randn(*p.shape, generator=draws).to(p.dtype)
        if name != leave and p.requires_grad:
            p.grad = g


def settings(kind: str, **more: Any) -> Optimizer:
    return Optimizer(kind=cast("Any", kind), **{"lr": 0.01, "weight_decay": 0.1, "clip": 3.0, "warmup": 3, **more})


def along(step: Tensor, move: Tensor) -> float:
    return abs(float((step * move).sum() / move.square().sum()) - 1)


def handed(optimizer: StageOptimizer) -> tuple[dict[str, Tensor], float]:
    optimizer.gather()
    grads = {n: t.grad.clone() for n, t in optimizer.trained().items() if t.grad is not None}
    return grads, math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_what_the_kind_says(kind: str, dtype: torch.dtype) -> None:
    """With decay, clip, warm-up, rates of groups, a share of the rate, and a parameter without a gradient in some."""
    needs(kind)
    config = settings(kind, rates=(("value_head", 10.0), ("mlp.gate", 0.5)), schedule="cosine", horizon=6)
    parameters = weights(dtype)
    optimizer = StageOptimizer(parameters, config)
    for step in range(8):
        give(parameters, step, leave=NORM if step % 2 else "")
        grads, norm = handed(optimizer)
        moved = optimizer.trained()
        before = {n: t.detach().double().clone() for n, t in moved.items()}
        share = 0.3 if step > 3 else 1.0
        told = {n: optimizer.expected_update(config, n, g, norm, share=share) for n, g in grads.items()}
        alone = {n: optimizer.expected_update(config, n, g, norm, 7, share) for n, g in grads.items()}
        optimizer.step(share)
        state = optimizer.state_tensors()
        for name, expected in told.items():
            stepped = moved[name].detach().double() - before[name]
            if expected.along:
                assert along(stepped, expected.move) < ALONG
            else:
                off = (stepped - expected.move).abs() - 3e-7 * before[name].abs()
                assert float(off.max()) <= 1e-5 * expected.size
            assert float(alone[name].move) == float(expected.move.flatten()[7])
            for word, want in expected.state.items():
                gap = (state[f"{word}.{name}"].double() - want).abs().max()
                assert float(gap) <= (1.0 if word.endswith("codes") else 1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_textbook(kind: str) -> None:
    """From rest, written out once more: the first update of each kind."""
    needs(kind)
    config = settings(kind, clip=math.inf, warmup=0)
    parameters = weights()
    optimizer = StageOptimizer(parameters, config)
    give(parameters, 0)
    g, w = parameters[UP].grad, parameters[UP].detach().double().clone()
    assert g is not None
    g = g.double()
    optimizer.step()
    decayed = w * (1 - 0.01 * 0.1)
    if kind in ("adamw", "adamw8bit"):
        want, bound = decayed - 0.01 * g / (g.abs() + 1e-8), 1e-6
    elif kind == "sgd":
        want, bound = decayed - 0.01 * g, 1e-6
    else:
        u, s, v = torch.linalg.svd(g / g.norm(), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        turned = 0.2 * math.sqrt(80) * (u * s) @ v
        assert along(parameters[UP].detach().double() - w, -0.01 * turned - 0.001 * w) < ALONG
        return
    torch.testing.assert_close(parameters[UP].detach().double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_goes_on_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    needs(kind)
    config = settings(kind, ema=0.9, schedule="linear", horizon=5, freeze=("norm",))
    parameters = weights(dtype)
    optimizer = StageOptimizer(parameters, config)
    for step in range(3):
        give(parameters, step)
        optimizer.step()
    stored = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    twin = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
    again = StageOptimizer(twin, config)
    again.load_state_tensors(stored)
    for step in range(3, 7):
        for p in (parameters, twin):
            give(p, step)
        assert optimizer.lr == again.lr and optimizer.step() == again.step()
    assert all(torch.equal(parameters[n], twin[n]) for n in parameters)
    ours, theirs = optimizer.state_tensors(), again.state_tensors()
    assert set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_the_state_of_another_kind_is_refused() -> None:
    for kind, other in (("adamw", "sgd"), ("sgd", "adamw"), ("muon", "adamw")):
        parameters = weights()
        first = StageOptimizer(parameters, settings(kind))
        give(parameters, 0)
        first.step()
        with pytest.raises(RunFolderError, match="does not fit"):
            StageOptimizer(weights(), settings(other)).load_state_tensors(first.state_tensors())
        with pytest.raises(InvariantError, match=f"asks for the optimizer {other}, and {kind} was built"):
            first.expected_update(settings(other), UP, torch.ones(SHAPES[UP]), 1.0)


def test_schedules_are_their_closed_forms() -> None:
    constant = Optimizer(warmup=4)
    assert [constant.share(k) for k in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert Optimizer(warmup=0).share(1) == 1.0
    linear = Optimizer(warmup=2, schedule="linear", horizon=12, floor=0.0)
    assert [linear.share(k) for k in (1, 2, 3, 8, 12, 13, 99)] == pytest.approx([0.5, 1, 1, 0.5, 0.1, 0, 0])
    cosine = Optimizer(warmup=2, schedule="cosine", horizon=12, floor=0.2)
    for k in range(3, 13):
        assert cosine.share(k) == pytest.approx(0.2 + 0.8 * math.cos(math.pi * (k - 3) / 20) ** 2)
    assert cosine.share(13) == cosine.share(500) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_groups_rate_is_its_own_learning_rate(kind: str) -> None:
    """A factor of lr is the same as that lr for the group alone; other parameters do not notice."""
    needs(kind)
    three = [weights() for _ in range(3)]
    configs = [settings(kind), settings(kind, lr=0.001), settings(kind, rates=(("up_proj", 0.1),))]
    for parameters, config in zip(three, configs, strict=True):
        optimizer = StageOptimizer(parameters, config)
        for step in range(4):
            give(parameters, step)
            optimizer.step()
    whole, low, mixed = three
    for name in SHAPES:
        want = low if name == UP else whole
        torch.testing.assert_close(mixed[name], want[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_stays_and_takes_no_part(kind: str) -> None:
    """Not in the norm either: the others move as if the frozen ones were not there."""
    needs(kind)
    config = settings(kind, clip=1.0, freeze=("layers.0", "value_head"))
    parameters = weights()
    before = {n: p.detach().clone() for n, p in parameters.items()}
    rest = {n: p.detach().clone().requires_grad_() for n, p in parameters.items() if not config.frozen(n)}
    optimizer, alone = StageOptimizer(parameters, config), StageOptimizer(rest, replace(config, freeze=()))
    assert set(optimizer.trained()) == set(rest) == {"model.embed_tokens.weight", NORM}
    for step in range(3):
        give(parameters, step)
        for name, p in rest.items():
            g = parameters[name].grad
            p.grad = None if g is None else g.clone()
        assert optimizer.step() == alone.step()
        assert all(p.grad is None for p in parameters.values())
    for name, p in parameters.items():
        assert torch.equal(p, before[name] if config.frozen(name) else rest[name])
        assert torch.equal(p, before[name]) == config.frozen(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_its_closed_form(dtype: torch.dtype) -> None:
    decay, parameters = 0.8, weights(dtype)
    optimizer = StageOptimizer(parameters, settings("adamw", ema=decay))
    seen = [{n: t.detach().double().clone() for n, t in optimizer.trained().items()}]
    for step in range(5):
        give(parameters, step)
        optimizer.step()
        seen.append({n: t.detach().double().clone() for n, t in optimizer.trained().items()})
    n = len(seen) - 1
    for name, average in optimizer.averaged().items():
        want = decay**n * seen[0][name] + (1 - decay) * sum(decay ** (n - k) * seen[k][name] for k in range(1, n + 1))
        torch.testing.assert_close(average.double(), want, rtol=0, atol=2e-6)
        assert average.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_left_out_leaves_everything_as_it_was(kind: str, bad: float) -> None:
    needs(kind)
    parameters = weights()
    optimizer = StageOptimizer(parameters, settings(kind, ema=0.9))
    for step in range(2):
        give(parameters, step)
        optimizer.step()
    before = {n: p.detach().clone() for n, p in parameters.items()}
    state = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    give(parameters, 2)
    with torch.no_grad():
        cast("Tensor", parameters[UP].grad)[3, 3] = bad
    assert not math.isfinite(optimizer.step())
    after = optimizer.state_tensors()
    assert set(after) == set(state) and all(torch.equal(after[n], state[n]) for n in state)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in parameters.items())


def test_eight_bits_round_within_their_bound() -> None:
    """Codes and scales of torchao against the definition, and the stored moments against the exact ones."""
    pytest.importorskip("torchao.optim")
    from torchao.optim.quant_utils import create_dynamic_map

    for signed, name in ((True, "exp_avg"), (False, "exp_avg_sq")):
        held = eight_bit.values(signed)
        assert len(held) == 256
        torch.testing.assert_close(held, torch.tensor(create_dynamic_map(signed), dtype=torch.float64))
        parameters = weights()
        optimizer = StageOptimizer(parameters, settings("adamw8bit"))
        give(parameters, 0)
        grads, norm = handed(optimizer)
        plain = StageOptimizer(weights(), settings("adamw"))
        want = plain.expected_update(settings("adamw"), UP, grads[UP], norm).state[name].reshape(-1, 256)
        optimizer.step()
        state = optimizer.state_tensors()
        assert state[f"{name}_codes.{UP}"].dtype == torch.uint8 and f"{name}.{NORM}" in state
        scale = state[f"{name}_scale.{UP}"].double()[:, None]
        stored = held[state[f"{name}_codes.{UP}"].int()].reshape(-1, 256) * scale
        assert float(((stored - want).abs() / scale).max()) <= eight_bit.rounding(signed) * (1 + 1e-5)
        assert eight_bit.rounding(signed) < 0.008


@pytest.mark.parametrize("rank", [1, 2, 8, 64])
def test_muon_in_bfloat16_is_its_definition_along_its_definition(rank: int) -> None:
    """Also where most directions have no gradient, as with few tokens. Across it, noise may be as large as the step."""
    draws = torch.Generator().manual_seed(rank)
    for shape in ((64, 64), (128, 64), (32, 256)):
        g = torch.randn(shape[0], rank, generator=draws) @ torch.randn(rank, shape[1], generator=draws)
        exact, rough = orthogonal(g.double()), orthogonal(g.bfloat16()).double()
        assert along(rough, exact) < ALONG
        assert float((orthogonal(g).double() - exact).abs().max() / exact.abs().max()) < 1e-3
        assert rank > 2 or float((rough - exact).norm() / exact.norm()) > 0.5


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_muons_rounding_is_no_other_step_where_singular_values_lie_far_apart(rows: int) -> None:
    """As in the first gradients of an adapter, which has few rows: the check stops no such step, and stops others."""
    draws, name = torch.Generator().manual_seed(rows), "layers.0.lora_A.weight"
    apart = []
    for _ in range(300):
        u, s, v = torch.linalg.svd(torch.randn(rows, 32, generator=draws), full_matrices=False)
        g = (u * 10 ** (-6 * torch.rand(1, generator=draws) * torch.rand(s.shape, generator=draws))) @ v
        move, old = -0.01 * orthogonal(g.double()), torch.zeros(rows, 32)
        before = StepGradients(1.0, {}, {name: ExpectedUpdate(move, {}, 0.01, along=True)}, {name: old})
        stepped = -0.01 * orthogonal(g.bfloat16()).double()
        apart.append(along(stepped, move))
        assert departure(before, {name: stepped}, {}).moved == 0
        assert departure(before, {name: 1.5 * move}, {}).moved > UPDATE_BOUND
        assert departure(before, {name: 0.5 * move}, {}).moved > UPDATE_BOUND
    assert max(apart) > UPDATE_BOUND, "rounding alone is more than the bound of other optimizers"


def test_muon_takes_the_matrices_between_embedding_and_head() -> None:
    taken = {n for n, p in weights().items() if hidden_matrix(n, p)}
    assert taken == {UP, "model.layers.0.mlp.gate.weight"}
    assert not hidden_matrix("transformer.wte.weight", torch.zeros(9, 8))
    assert not hidden_matrix("gpt_neox.embed_in.weight", torch.zeros(9, 8))


def test_patterns_are_whole_words() -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    assert fits("layers.1", name) and fits("q_proj", name) and fits("*_proj", name) and fits("layers.?.self_attn", name)
    assert not fits("layers", "model.layer.1") and not fits("layers.1", "model.layers.11.x") and not fits("proj", name)
    assert Optimizer(rates=(("layers", 2.0), ("layers.1", 3.0))).rate(name) == 2.0
    with pytest.raises(ConfigError, match=r"rl.optimizer.freeze: 'q_prj' fits no parameter .* mean 'q_proj'"):
        check_patterns(Optimizer(freeze=("q_prj",)), [name], "rl.optimizer")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        check_patterns(Optimizer(freeze=("*",)), [name], "rl.optimizer")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        check_patterns(Optimizer(freeze=("layers",)), [name, "value_head.weight"], "rl.optimizer", [name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"momentum": 0.9}, "adamw has none"),
        ({"kind": "sgd", "beta1": 0.5}, "sgd does not read it"),
        ({"horizon": 100}, "a constant learning rate has none"),
        ({"schedule": "cosine", "horizon": 10}, "must be greater than warmup=10"),
        ({"floor": 1.5}, "a share"),
        ({"rates": (("x", 0.0),)}, "optimizer.freeze is for 0"),
        ({"ema": 1.0}, "a decay in"),
        ({"skips": -1}, "must be >= 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(**given)


def test_a_fall_needs_its_horizon_and_a_stage_ends_before_zero() -> None:
    with pytest.raises(ConfigError, match=r"takes 80: set rl.optimizer.horizon=80"):
        Reinforce(name="rl", steps=20, minibatches=4, optimizer=Optimizer(schedule="cosine"))
    short = Optimizer(schedule="linear", horizon=50, floor=0.0)
    with pytest.raises(ConfigError, match="would change nothing"):
        Reinforce(name="rl", steps=60, optimizer=short)
    Reinforce(name="rl", steps=50, optimizer=short)
