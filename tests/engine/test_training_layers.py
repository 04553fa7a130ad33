"""The learner's fused layers: gradients as torch's own in float64, the same for any number of threads, seen by nobody
else, and refused where they differ."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.config.run import Lora
from posttrain.core.exchange.ranks import ALONE
from posttrain.engine.adapters.adapter_modules import attach
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded.cache.fused_decoder import fusable
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers import attention, fused_layers
from posttrain.engine.layers import layer_products as products
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.layers.embedding_gradient import rows_at
from posttrain.engine.layers.fused_layers import CHUNK, FusedReadOut, Heads, RMSNorm, SwiGLU, fused_read_out
from posttrain.engine.layers.layer_products import Products
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.parallel.sharded_proofs import prove_layers
from posttrain.system.errors import EngineError
from tests.engine.embedded_parts import module
from tests.engine.engine_parts import drawn, packed, policy

pytestmark = pytest.mark.skipif(bool(compile_native.missing()), reason=compile_native.missing())
CLOSE = 2e-5
FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose layers are fused; those of qwen2 have biases."""


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


@settings(max_examples=25)
@given(st.integers(1, 3 * CHUNK), st.integers(1, 70), st.integers(0, 10**6))
@example(14, 1, 37)
def test_the_norm_is_the_plain_one(rows: int, width: int, seed: int) -> None:
    """A row of one small number has the largest terms: all of them cancel but for the share of epsilon."""
    x, weight = drawn(seed, rows, width), drawn(seed + 1, width)
    slope = ((x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).detach()
    same(lambda x, w: RMSNorm.apply(x, w, 1e-6), lambda x, w: plain_norm(x, w, 1e-6), x, weight, slope=slope)


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 40), st.integers(0, 10**6))
def test_the_gate_is_silu_times_up(rows: int, width: int, scale: float, seed: int) -> None:
    gate = (drawn(seed, rows, width).detach() * scale).requires_grad_()
    same(SwiGLU.apply, lambda g, u: torch.nn.functional.silu(g) * u, gate, drawn(seed + 1, rows, width))


class _OneLeftOut(Products):
    """Its gradient of the input lacks the second product."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = Products.backward(ctx, *grads)
        lacking = Products.backward(ctx, grads[0], None, *grads[2:])
        return lacking[0], *whole[1:]


class _NoNumber(Products):
    """Its gradient of the last weight is NaN."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *first, weight, bias = Products.backward(ctx, *grads)
        return *first, None if weight is None else weight * float("nan"), bias


@pytest.mark.parametrize("wrong", [_OneLeftOut, _NoNumber])
@pytest.mark.parametrize("arch", FUSED)
def test_a_wrong_gradient_of_a_product_is_refused(
    arch: str, wrong: type[Products], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(arch)
    assert isinstance(fused_read_out(made, read_out(made)), FusedReadOut)
    monkeypatch.setattr(products, "Products", wrong)
    with pytest.raises(EngineError, match=r"differ from its own .* set model\.kernels=reference"):
        fused_read_out(made, read_out(made))


def test_a_gradient_that_is_no_number_is_refused_over_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("qwen3")
    out, own = fused_read_out(made, read_out(made)), dict(made.named_parameters())
    prove_layers(made, out, lambda function: function(), own, ALONE)
    monkeypatch.setattr(products, "Products", _NoNumber)
    with pytest.raises(EngineError, match="differ from its own by nan"):
        prove_layers(made, out, lambda function: function(), own, ALONE)


@pytest.mark.parametrize("frozen", ["", "q_proj", "v_proj.weight", "k_proj|gate_proj", "up_proj", "_proj", "layers.0"])
@pytest.mark.parametrize("read_M", [None, [39], [7, 3, 30, 3, 31], [*range(40)]], ids=["all", "one", "some", "each"])
@pytest.mark.parametrize("arch", FUSED)
def test_gradients_of_every_family_are_the_plain_ones(arch: str, read_M: list[int] | None, frozen: str) -> None:
    """With parts of the model frozen, and where some positions alone are read. All products of a layer are made
    together."""
    made, found = model(arch), list[dict[str, Tensor]]()
    for name, p in made.named_parameters():
        p.requires_grad_(not (frozen and re.search(frozen, name)))
    ids = torch.arange(40) * 7919 % made.config.vocab_size
    exact = copy.deepcopy(made).double()
    for read in (fused_read_out(made, read_out(made)), read_out(made), read_out(exact)):
        with patch.object(Products, "apply", wraps=Products.apply) as together:
            given = ids, torch.arange(40), PackedLayout([18, 22])
            if read_M is not None and isinstance(read, FusedReadOut):
                hidden = read.hidden_at(*given, np.array(read_M))
            else:
                hidden = read.hidden(*given)[... if read_M is None else read_M]
        assert together.call_count == (3 * len(read.layers) if isinstance(read, FusedReadOut) else 0)
        holder = exact if hidden.dtype == torch.float64 else made
        holder.zero_grad()
        (hidden * drawn(3, *hidden.shape).detach().to(hidden.dtype)).sum().backward()
        found.append({n: p.grad.double() for n, p in holder.named_parameters() if p.grad is not None})
    ours, plain, wanted = found
    assert ours.keys() == plain.keys() == wanted.keys() and ours
    size = max(float(g.abs().max()) for g in wanted.values())
    for name, g in wanted.items():
        assert float((ours[name] - g).abs().max()) <= CLOSE * size, name


@pytest.mark.parametrize("arch", FUSED)
def test_the_last_layer_computes_what_is_read(arch: str) -> None:
    """Without a gradient too, and nothing of the pass stays behind."""
    made, rows = model(arch), list[list[int]]()
    read, last = fused_read_out(made, read_out(made)), made.get_decoder().layers[-1]
    for layer in made.get_decoder().layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: rows[-1].append(x[0].shape[-2]))
    ids, at, layout = torch.arange(40), torch.arange(40), PackedLayout([40])
    before = len(made.get_decoder().layers) - 1
    for on in (True, False):
        for read_M, count in (([4, 9, 9, 8], 3), ([], 40), ([*range(40)], 40)):
            rows.append([])
            with torch.set_grad_enabled(on):
                found = read.hidden_at(ids, at, layout, np.array(read_M, np.int64))
            assert rows[-1] == [40] * before + [count] and "forward" not in last.__dict__
            rows.append([])
            wanted = read_out(made).hidden(ids, at, layout)[read_M]
            assert found.requires_grad == on and torch.allclose(found, wanted, rtol=0, atol=1e-5)


def test_a_last_layer_that_another_has_changed_stays_as_it_is() -> None:
    made, given = model("qwen3"), (torch.arange(9), torch.arange(9), PackedLayout([9]))
    read, last = fused_read_out(made, read_out(made)), made.get_decoder().layers[-1]
    own = last.forward
    last.forward = lambda *args, **named: 2 * own(*args, **named)
    changed = last.forward
    assert torch.equal(read.hidden_at(*given, np.array([4])), read.hidden(*given)[[4]])
    assert last.forward is changed


@given(st.lists(st.integers(0, 8), max_size=20), st.integers(0, 100))
def test_rows_that_are_read_again_add_up_their_gradients(at: list[int], seed: int) -> None:
    rows = drawn(seed, 9, 3)
    found, wanted = rows_at(rows, np.array(at, np.int64)), rows[at]
    by = drawn(seed + 1, *wanted.shape).detach()
    assert torch.equal(found, wanted)
    ours, plain = (torch.autograd.grad((x * by).sum(), rows)[0] for x in (found, wanted))
    assert torch.allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", ["another row", "keys of what is read alone", "a product that is a little off"])
def test_a_last_layer_that_differs_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("qwen3")
    real, layer, product = fused_layers._selected, fused_layers._last_layer, products.linear  # pyright: ignore[reportPrivateUsage]
    if wrong == "another row":
        monkeypatch.setattr(fused_layers, "_selected", lambda x, read: real(x, read - 1))
    elif wrong == "a product that is a little off":
        monkeypatch.setattr(products, "linear", lambda x, w, b=None: product(x, w, b) * 1.001)
    else:
        seen = lambda self, read, x, **k: layer(self, read, x.index_fill(1, torch.arange(5), 0), **k)  # noqa: E731
        monkeypatch.setattr(fused_layers, "_last_layer", seen)
    with pytest.raises(EngineError, match=r"differ from its own .* set model\.kernels=reference"):
        fused_read_out(made, read_out(made))


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
    found = learner.forward(packed(seed=seed)).logp
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
    methods = {**fused_layers.METHODS, "RMSNorm": lambda self, x: RMSNorm.apply(x, self.weight, 0.01)}
    monkeypatch.setattr(fused_layers, "METHODS", methods)
    with pytest.raises(EngineError, match=r"differ from its own .* set model\.kernels=reference"):
        fused_read_out(made.module, read_out(made.module))


def test_layers_that_are_off_by_more_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("qwen3")

    def norm(self: Any, x: Tensor) -> Any:
        # Off by .02 %: three times the bound, and some hundred times the rounding of these layers.
        return RMSNorm.apply(x, self.weight * 1.0002, self.variance_epsilon)

    monkeypatch.setattr(fused_layers, "METHODS", {**fused_layers.METHODS, "RMSNorm": norm})
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


@pytest.mark.parametrize("how", ["computed again", pytest.param("compiled by torch", marks=pytest.mark.prove)])
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
