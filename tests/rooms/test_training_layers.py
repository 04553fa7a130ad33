"""The learner's fused layers: gradients as torch's own in float64, the same for any number of threads, seen by nobody
else, and refused where they differ."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from embedded_parts import module
from engine_parts import packed, policy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from posttrain.core.errors import EngineError
from posttrain.core.run import Lora
from posttrain.engine import attention, native, training_layers
from posttrain.engine.adapter import attach
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.fused import fusable
from posttrain.engine.learner import HFLearner
from posttrain.engine.readout import read_out
from posttrain.engine.training_layers import CHUNK, FusedReadOut, Heads, Products, RMSNorm, SwiGLU, fused_read_out

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=native.missing())
CLOSE = 2e-5
FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose layers are fused; those of qwen2 have biases."""


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


@st.composite
def products(draw: st.DrawFn) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """(x, [weight, bias or None, ...], what of them trains), all float64 that are float32 numbers."""
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    seeds = iter(range(draw(st.integers(0, 10**6)), 10**9))

    def one(*shape: int) -> Tensor:
        return drawn(next(seeds), *shape).detach().float().double().requires_grad_(draw(st.booleans()))

    x, parts = one(1, rows, width), list[Tensor | None]()
    for outputs in draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)):
        parts += [one(outputs, width), one(outputs) if draw(st.booleans()) else None]
    return x, parts, [t for t in (x, *parts) if t is not None and t.requires_grad]


def gradients_of(outs: Sequence[Tensor], trained: list[Tensor], used: list[bool]) -> list[Tensor | None]:
    """Of a weighted sum of the outputs that are used."""
    total = outs[0].new_zeros(())
    for i, (out, here) in enumerate(zip(outs, used, strict=True)):
        if here:
            total = total + (out * drawn(i, *out.shape).detach().to(out.dtype)).sum()
    return list(torch.autograd.grad(total, trained, allow_unused=True)) if trained and total.requires_grad else []


@settings(max_examples=60, deadline=None)
@given(products(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_products_of_one_input_are_the_plain_ones(case: Any, used: list[bool]) -> None:
    """For all that may be frozen, and where nothing is made of some product. Outputs and gradients of weights have the
    bits of torch's own; the gradient of the input is as near to float64 as rounding allows."""
    x, parts, _ = case
    used = used[: len(parts) // 2]

    def run(function: Callable[..., Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
        given = [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, *parts)]
        outs = function(*given)
        return list(outs), gradients_of(outs, [t for t in given if t is not None and t.requires_grad], used)

    def plain(x: Tensor, *parts: Any) -> list[Tensor]:
        return [nn.functional.linear(x, w, b) for w, b in zip(parts[::2], parts[1::2], strict=True)]

    outs, ours = run(Products.apply, torch.float32)
    same_outs, theirs = run(plain, torch.float32)
    _, exact = run(plain, torch.float64)
    assert all(torch.equal(a, b) and a.requires_grad == b.requires_grad for a, b in zip(outs, same_outs, strict=True))
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert (a is None) == (b is None), "a gradient is there where torch's own is"
        if a is None or b is None or c is None:
            continue
        if i or not x.requires_grad:
            assert torch.equal(a, b)
        else:
            assert float((a.double() - c).abs().max()) <= CLOSE * max(1.0, float(c.abs().max()))


def test_products_keep_the_input_once_and_what_is_needed_alone() -> None:
    def kept(x: Tensor, *parts: Tensor | None) -> list[int]:
        found = list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.data_ptr()) or t, lambda t: t):
            Products.apply(x, *parts)
        return found

    x, v, w = (drawn(i, 6, 6).detach().float() for i in range(3))
    assert kept(x, v, None, w, None) == []
    v.requires_grad_()
    assert kept(x, v, None, w, None) == [x.data_ptr()]
    x.requires_grad_()
    assert kept(x, v, None, w, None) == [t.data_ptr() for t in (x, v, w)]
    v.requires_grad_(False)
    assert kept(x, v, None, w, None) == [v.data_ptr(), w.data_ptr()]


def test_the_gradient_of_a_product_may_be_asked_twice_and_reaches_its_hooks() -> None:
    x, w = (drawn(i, 5, 5).detach().float().requires_grad_() for i in range(2))
    heard = list[Tensor]()
    w.register_post_accumulate_grad_hook(lambda p: heard.append(torch.as_tensor(p.grad).clone()))
    outs: Any = Products.apply(x, w, None, w, None)
    total = (outs[0] * outs[1]).sum()
    first = torch.autograd.grad(total, (x, w), retain_graph=True)
    total.backward(retain_graph=True)
    total.backward()
    assert len(heard) == 2 and torch.equal(heard[0], first[1]) and torch.equal(heard[1], 2 * first[1])
    assert x.grad is not None and torch.equal(x.grad, 2 * first[0])


OTHERS: dict[str, Callable[[nn.Linear], Any]] = {
    "hook": lambda p: p.register_forward_hook(lambda *_: None),
    "hook before": lambda p: p.register_forward_pre_hook(lambda *_: None),
    "hook of the backward pass": lambda p: p.register_full_backward_hook(lambda *_: None),
    "method": lambda p: p.__dict__.update(forward=p.forward),
    "weight of float64": lambda p: p.double(),
    "compiled": lambda p: p.compile(backend="eager"),
    "parametrised": lambda p: weight_norm(p),
    "kind of its own": lambda p: setattr(p, "__class__", type("Other", (nn.Linear,), {})),
}


@pytest.mark.parametrize("how", OTHERS)
def test_a_module_that_is_no_plain_product_is_called(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 4)
    assert training_layers._is_product(module)  # pyright: ignore[reportPrivateUsage]
    OTHERS[how](module)
    assert not training_layers._is_product(module)  # pyright: ignore[reportPrivateUsage]
    called = list[nn.Module]()
    monkeypatch.setattr(nn.Module, "__call__", lambda self, x: called.append(self) or x)
    plain = nn.Linear(4, 4)
    training_layers._products(torch.ones(2, 4), plain, module)  # pyright: ignore[reportPrivateUsage]
    assert called == [plain, module]


class _OneLeftOut(Products):
    """Its gradient of the input lacks the second product."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = Products.backward(ctx, *grads)
        lacking = Products.backward(ctx, grads[0], None, *grads[2:])
        return lacking[0], *whole[1:]


@pytest.mark.parametrize("arch", FUSED)
def test_a_gradient_that_lacks_one_product_is_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(arch)
    assert isinstance(fused_read_out(made, read_out(made)), FusedReadOut)
    monkeypatch.setattr(training_layers, "Products", _OneLeftOut)
    with pytest.raises(EngineError, match=r"differ from its own .* set model\.kernels=reference"):
        fused_read_out(made, read_out(made))


@pytest.mark.parametrize("frozen", ["", "q_proj", "v_proj.weight", "k_proj|gate_proj", "up_proj", "_proj", "layers.0"])
@pytest.mark.parametrize("arch", FUSED)
def test_gradients_of_every_family_are_the_plain_ones(arch: str, frozen: str) -> None:
    """With parts of the model frozen. All products of a layer are made together."""
    made, found = model(arch), list[dict[str, Tensor]]()
    for name, p in made.named_parameters():
        p.requires_grad_(not (frozen and re.search(frozen, name)))
    ids = torch.arange(40) * 7919 % made.config.vocab_size
    exact = copy.deepcopy(made).double()
    for read in (fused_read_out(made, read_out(made)), read_out(made), read_out(exact)):
        with patch.object(Products, "apply", wraps=Products.apply) as together:
            hidden = read.hidden(ids, torch.arange(40), PackedLayout([40]))
        assert together.call_count == (2 * len(read.layers) if isinstance(read, FusedReadOut) else 0)
        holder = exact if hidden.dtype == torch.float64 else made
        holder.zero_grad()
        (hidden * drawn(3, *hidden.shape).detach().to(hidden.dtype)).sum().backward()
        found.append({n: p.grad.double() for n, p in holder.named_parameters() if p.grad is not None})
    ours, plain, wanted = found
    assert ours.keys() == plain.keys() == wanted.keys() and ours
    size = max(float(g.abs().max()) for g in wanted.values())
    for name, g in wanted.items():
        assert float((ours[name] - g).abs().max()) <= CLOSE * size, name


def test_no_number_depends_on_the_threads() -> None:
    def made() -> list[Tensor]:
        x, w = (drawn(i, *s).detach().float().requires_grad_() for i, s in enumerate(((4 * CHUNK + 3, 96), (96,))))
        out: Any = RMSNorm.apply(x, w, 1e-6)
        v, u = (drawn(i, 64, 96).detach().float().requires_grad_() for i in (5, 6))
        two: Any = Products.apply(x, v, None, u, None)
        products = torch.autograd.grad(two[0].square().sum() + two[1].square().sum(), (x, v, u))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w)), *products]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = made()
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(one, made(), strict=True))
    finally:
        torch.set_num_threads(before)


def model(arch: str) -> Any:
    attention.register()
    built: Any = module(arch)
    built.set_attn_implementation(attention.NAME)
    return built


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
