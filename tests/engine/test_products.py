"""Products of one input with several weights: as torch's own in float64, by whichever library makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from posttrain.engine.cpu import compile_native
from posttrain.engine.layers import layer_products
from posttrain.engine.layers.layer_products import FEW, MANY, WIDE, Products, fits, is_product
from posttrain.system.machine import processor
from tests.engine.engine_parts import drawn

BOTH = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
pytestmark = pytest.mark.skipif(not BOTH, reason="this torch has one library for products")
CLOSE = 2e-5


@st.composite
def products_of_one(draw: st.DrawFn) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
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


@settings(max_examples=60)
@given(products_of_one(), st.lists(st.booleans(), min_size=3, max_size=3), st.booleans())
def test_products_of_one_input_are_the_plain_ones(case: Any, used: list[bool], one_dnn: bool) -> None:
    """For all that may be frozen, and where nothing is made of some product. Gradients of weights have the bits of
    torch's own, and so have outputs where torch makes them; all others are as near to float64 as rounding allows."""
    x, parts, _ = case
    used = used[: len(parts) // 2]

    def run(function: Callable[..., Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
        given = [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, *parts)]
        outs = function(*given)
        return list(outs), gradients_of(outs, [t for t in given if t is not None and t.requires_grad], used)

    def plain(x: Tensor, *parts: Any) -> list[Tensor]:
        return [nn.functional.linear(x, w, b) for w, b in zip(parts[::2], parts[1::2], strict=True)]

    with patch.object(layer_products, "ONE_DNN", one_dnn):
        outs, ours = run(Products.apply, torch.float32)
    same_outs, theirs = run(plain, torch.float32)
    exact_outs, exact = run(plain, torch.float64)
    for a, b, c in zip(outs, same_outs, exact_outs, strict=True):
        assert a.requires_grad == b.requires_grad and a.shape == b.shape
        assert near(a, c) and (one_dnn or torch.equal(a, b))
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert (a is None) == (b is None), "a gradient is there where torch's own is"
        if a is None or b is None or c is None:
            continue
        if i or not x.requires_grad:
            assert torch.equal(a, b)
        else:
            assert near(a, c)


def near(ours: Tensor, exact: Tensor) -> bool:
    return float((ours.double() - exact).detach().abs().max()) <= CLOSE * max(1.0, float(exact.detach().abs().max()))


@pytest.mark.skipif(not layer_products.ONE_DNN, reason="torch's own products are faster on this processor, and taken")
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 37, 400])
def test_a_product_by_one_dnn_depends_on_no_thread_and_no_other_row(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs of any shape and strides; and it is made by oneDNN."""
    made, real = list[int](), torch.nn.functional.linear
    monkeypatch.setattr(layer_products.F, "linear", lambda x, w, b=None: made.append(x.numel()) or real(x, w, b))
    before = torch.get_num_threads()
    for width, outputs in ((8, 24), (96, 40), (512, 7), (1536, 64)):
        x, w, b = (drawn(i, *s).detach().float() for i, s in enumerate(((rows, width), (outputs, width), (outputs,))))
        exact = x.double() @ w.double().T + b.double()
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                one = layer_products.linear(x, w, b)
                assert near(one, exact)
                assert torch.equal(layer_products.linear(x[None], w, b)[0], one)
                assert near(layer_products.linear(x.T.contiguous().T, w.T.contiguous().T, b), exact)
                if threads == 1:
                    alone = one
                if rows > FEW:
                    assert torch.equal(one, alone) and torch.equal(
                        layer_products.linear(x[: FEW + 1], w, b), one[: FEW + 1]
                    )
        finally:
            torch.set_num_threads(before)
    assert bool(made) == (rows <= FEW)


@pytest.mark.skipif(not layer_products.ONE_DNN, reason="torch's own products are faster on this processor, and taken")
@pytest.mark.skipif(bool(compile_native.missing()), reason="no C compiler")
@pytest.mark.parametrize("rows", [MANY, MANY + 37])
def test_gradients_of_weights_by_one_dnn_depend_on_no_thread(rows: int) -> None:
    """Whichever side is transposed, of gradients of any strides, and for one product or several."""
    before = torch.get_num_threads()
    for width, outputs in ((WIDE, (WIDE,)), (200, (70,)), (70, (200,)), (100, (67, 81)), (512, (300, 300))):
        x, *grads = (drawn(i, rows, n).detach().float() for i, n in enumerate((width, *outputs)))
        alone = list[Tensor]()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found = layer_products.summed(grads, x)
                alone = alone or found
                for g, one, two in zip(grads, found, alone, strict=True):
                    assert torch.equal(one, two) and one.is_contiguous() and near(one, g.double().T @ x.double())
                turned = layer_products.summed([g.T.contiguous().T for g in grads], x.T.contiguous().T)
                assert all(torch.equal(a, b) for a, b in zip(turned, found, strict=True))
        finally:
            torch.set_num_threads(before)


@pytest.mark.skipif(bool(compile_native.missing()), reason="no C compiler")
@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_copy_is_transposed(rows: int, width: int) -> None:
    x = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    assert torch.equal(layer_products.transposed(x), x.T)


@pytest.mark.parametrize(
    ("text", "faster"),
    [
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2", False),
        ("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f", False),
        ("", False),
    ],
)
def test_one_dnn_is_taken_where_it_was_measured(text: str, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_products, "processor", lambda: text)
    assert layer_products._is_faster() == faster  # pyright: ignore[reportPrivateUsage]


def test_what_may_be_multiplied_without_a_gradient() -> None:
    x, w = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3))
    assert fits(x, None) and not fits(x, w), "the weight wants a gradient"
    with torch.no_grad():
        assert fits(x, w, None) and not fits(x.double(), w) and not fits(x.to("meta"), w)

        class Other(Tensor):
            pass

        assert not fits(x.as_subclass(Other), w)


def test_a_processor_that_may_not_be_read_is_told_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refused)
    assert processor() == ""


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
    assert is_product(module)
    OTHERS[how](module)
    assert not is_product(module)
    called = list[nn.Module]()
    monkeypatch.setattr(nn.Module, "__call__", lambda self, x: called.append(self) or x)
    plain = nn.Linear(4, 4)
    layer_products.products(torch.ones(2, 4), plain, module)
    assert called == [plain, module]
