"""The learner's fused layers: gradients as torch's own in float64, the same for any number of threads, seen by nobody
else, and refused where they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_parts import packed, policy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.errors import EngineError
from posttrain.core.run import Lora
from posttrain.engine import native, training_layers
from posttrain.engine.adapter import attach
from posttrain.engine.embedded.fused import fusable
from posttrain.engine.learner import HFLearner
from posttrain.engine.readout import read_out
from posttrain.engine.training_layers import CHUNK, FusedReadOut, Heads, RMSNorm, SwiGLU, fused_read_out

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=native.missing())
CLOSE = 2e-5


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).requires_grad_()


def same(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor, slope: Tensor | None = None) -> None:
    """The value and all gradients of an operation, in float32, against its plain form in float64. `slope`: what the
    gradient is multiplied with before terms that cancel are taken from it; they are rounded at their own size."""
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    a, b = ours(*narrow), plain(*inputs)
    by = drawn(9, *b.shape).detach()
    found = [a, *torch.autograd.grad(a, narrow, by.float())]
    wanted = [b, *torch.autograd.grad(b, inputs, by)]
    terms = 0.0 if slope is None else float((slope * by).abs().max())
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape
        size = max(1.0, float(y.detach().abs().max()), terms)
        assert float((x.detach().double() - y.detach()).abs().max()) <= CLOSE * size


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine[..., None, :] + torch.cat([-x[..., half:], x[..., :half]], -1) * sine[..., None, :]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3 * CHUNK), st.integers(1, 70), st.integers(0, 10**6))
@example(14, 1, 37)
def test_the_norm_is_the_plain_one(rows: int, width: int, seed: int) -> None:
    """A row of one small number has the largest terms: all of them cancel but for the share of epsilon."""
    x, weight = drawn(seed, rows, width), drawn(seed + 1, width)
    slope = ((x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).detach()
    same(lambda x, w: RMSNorm.apply(x, w, 1e-6), lambda x, w: plain_norm(x, w, 1e-6), x, weight, slope=slope)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, CHUNK + 9), st.integers(1, 5), st.integers(1, 20), st.booleans(), st.integers(0, 10**6))
def test_heads_are_normed_and_turned(rows: int, heads: int, half: int, normed: bool, seed: int) -> None:
    x, weight = drawn(seed, rows, heads, 2 * half), drawn(seed + 1, 2 * half)
    angles = torch.from_numpy(np.random.default_rng(seed).uniform(0, 6, (rows, half)))
    tables = tuple(torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    floats = tuple(t.float() for t in tables)
    if normed:
        ours = lambda x, w: Heads.apply(x, w, 1e-5, *floats)  # noqa: E731
        same(ours, lambda x, w: turned(plain_norm(x, w, 1e-5), *tables), x, weight)
    else:
        same(lambda x: Heads.apply(x, None, 0.0, *floats), lambda x: turned(x, *tables), x)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 40), st.integers(0, 10**6))
def test_the_gate_is_silu_times_up(rows: int, width: int, scale: float, seed: int) -> None:
    gate = (drawn(seed, rows, width).detach() * scale).requires_grad_()
    same(SwiGLU.apply, lambda g, u: torch.nn.functional.silu(g) * u, gate, drawn(seed + 1, rows, width))


def test_no_number_depends_on_the_threads() -> None:
    def made() -> list[Tensor]:
        x, w = (drawn(i, *s).detach().float().requires_grad_() for i, s in enumerate(((4 * CHUNK + 3, 96), (96,))))
        out: Any = RMSNorm.apply(x, w, 1e-6)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = made()
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(one, made(), strict=True))
    finally:
        torch.set_num_threads(before)


def loss(learner: HFLearner, seed: int = 0) -> Tensor:
    found = learner.forward(packed(seed=seed), entropy=False, value=False).logp
    assert found is not None
    return found.sum()


def test_nobody_else_sees_the_methods() -> None:
    made = policy("qwen3")
    learner = HFLearner(made)
    out = learner._reader.out  # pyright: ignore[reportPrivateUsage]
    assert isinstance(out, FusedReadOut) and out.methods
    loss(learner).backward()
    assert fusable(made.module) and not any("forward" in p.__dict__ for p, _ in out.methods)
    with pytest.raises(RuntimeError, match="stop"), out.replaced():
        raise RuntimeError("stop")
    assert not any("forward" in p.__dict__ for p, _ in out.methods)


def test_layers_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("qwen3")
    methods = {**training_layers.METHODS, "RMSNorm": lambda self, x: RMSNorm.apply(x, self.weight, 0.01)}
    monkeypatch.setattr(training_layers, "METHODS", methods)
    with pytest.raises(EngineError, match=r"differ from its own .* set model\.kernels=reference"):
        fused_read_out(made.module, read_out(made.module))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(4))
def test_rounding_that_a_model_enlarges_is_no_difference(scale: float, seed: int) -> None:
    """Weights of any size, and none: nothing is refused."""
    made = policy("qwen3", seed)
    with torch.no_grad():
        for p in made.module.parameters():
            p.mul_(scale)
    assert isinstance(fused_read_out(made.module, read_out(made.module)), FusedReadOut)


@pytest.mark.parametrize("how", ["computed again", "compiled by torch"])
def test_layers_that_run_otherwise_stay_plain(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("qwen3")
    learner = HFLearner(made, gradient_checkpointing="full" if how == "computed again" else "none")
    learner.train_mode(True)
    if how == "compiled by torch":
        decoder: Any = made.module.get_decoder()
        for layer in decoder.layers:
            layer.compile(backend="eager")
    monkeypatch.setattr(SwiGLU, "apply", lambda *_: pytest.fail("a fused layer ran"))
    loss(learner).backward()


@pytest.mark.parametrize("lora", [None, Lora(rank=4), Lora(rank=4, dora=True)])
def test_gradients_are_those_of_the_plain_layers(lora: Lora | None) -> None:
    """Of all weights, and of an adapter over frozen ones."""
    found: list[dict[str, Tensor]] = []
    for kernels in ("auto", "reference"):
        made = policy("qwen3")
        if lora is not None:
            attach(made.module, lora, seed=0)
        learner = HFLearner(replace(made, kernels=kernels, lora=lora))
        fused = isinstance(learner._reader.out, FusedReadOut)  # pyright: ignore[reportPrivateUsage]
        assert fused is (kernels == "auto")
        loss(learner).backward()
        found.append({n: p.grad for n, p in made.module.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and (lora is None or all("lora" in n for n in found[0]))
    for name, one in found[0].items():
        assert float((one - found[1][name]).abs().max()) <= 1e-4 * max(1.0, float(found[1][name].abs().max())), name
