"""The head's compiled operations on the CPU, beside plain log-softmax and beside torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.engine.cpu import compile_native
from posttrain.engine.head import tiles
from posttrain.engine.head.kernel_table import kernel
from posttrain.engine.head.logprob import logprobs
from posttrain.engine.head.tiles import NATIVE, NATIVE_BOUND
from posttrain.system.errors import EngineError
from tests.engine.test_logprob import CASES, Case, inputs, plain, targets

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(compile_native.missing()), reason=compile_native.missing())


@pytest.fixture
def unproved() -> Iterator[None]:
    tiles.native.cache_clear()
    yield
    tiles.native.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("block", [11, 5])
def test_the_compiled_head_equals_plain_log_softmax(case: Case, block: int) -> None:
    """Values and gradients of log-prob and entropy, in one block of the vocabulary and in several."""
    assert kernel("head", CPU, torch.float32).form == "compiled" and kernel("head", CPU, torch.float64).form == "torch"
    ours, theirs = inputs(torch.float32, case.bias), inputs(bias=case.bias)
    logp, entropy = logprobs(*ours, targets(), **case.arguments(), want_entropy=True, chunk=4, block=block)
    wanted = plain(*theirs, case)
    assert entropy is not None
    by = torch.randn(2, len(logp), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (by[0].float() @ logp + by[1].float() @ entropy).backward()
    (by[0] @ wanted[0] + by[1] @ wanted[1]).backward()
    pairs = [(logp, wanted[0]), (entropy, wanted[1])]
    pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    for a, b in pairs:
        assert a is not None and b is not None
        assert float((a - b).detach().abs().max()) <= NATIVE_BOUND * max(1.0, float(b.detach().abs().max()))


@settings(max_examples=50)
@given(width=st.integers(5, 200))
def test_both_operations_agree_with_torch_at_any_width(width: int) -> None:
    """Also where the last vector of a row is not full."""
    assert tiles.largest_gap(NATIVE, CPU, torch.float32, width) <= NATIVE_BOUND / 10


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    z = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    z[0, 17] = bad
    (most, mass, spread), row = NATIVE.fold(z, True, False), torch.zeros(2)
    assert spread is not None
    assert not torch.isfinite(most[0].log() + mass[0] + spread[0]) and torch.isfinite(mass[1] + spread[1])
    by = torch.ones(2, 1)
    d = NATIVE.cotangent(z, most + mass.log(), by.long(), by, row, row, False, torch.empty_like(z))
    assert not torch.isfinite(d[0]).all() and torch.isfinite(d[1]).all()


def test_no_bit_depends_on_the_number_of_threads() -> None:
    z = torch.randn(300, 515, generator=torch.Generator().manual_seed(0)) * 4
    row, named = z[:, 0].contiguous(), torch.arange(300)[:, None] % 515
    given = z.logsumexp(1), named, z[:, 1:2], row, row, False
    before, found = torch.get_num_threads(), list[list[Tensor | None]]()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([*NATIVE.fold(z, True, False), NATIVE.cotangent(z, *given, torch.empty_like(z))])
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def _no_entropy(z: Tensor, norm: Tensor, named: Tensor, by: Tensor, by_entropy: Tensor | None, *rest: Any) -> Tensor:
    return tiles.cotangent(z, norm, named, by, None, *rest)


def _overwrites(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    found = tiles.fold(z, *rest)
    z.add_(1)
    return found


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(
    "wrong",
    [
        {"fold": lambda z, *rest: tiles.fold(z[:, :80], *rest)},
        {"fold": _overwrites},
        {"cotangent": _no_entropy},
        {"cotangent": lambda z, *rest: rest[-1].copy_(tiles.cotangent(z, *rest).half())},
        {"cotangent": lambda z, *rest: rest[-1].fill_(torch.nan)},
    ],
    ids=["columns lost", "scores overwritten", "entropy lost", "half precision", "nan"],
)
def test_code_that_computes_something_else_is_refused(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first use, with the way out in the message."""
    monkeypatch.setattr(tiles, "NATIVE", replace(NATIVE, **wrong))
    with pytest.raises(EngineError, match=r"differs from torch's operations by .*model\.kernels=torch"):
        tiles.native()
