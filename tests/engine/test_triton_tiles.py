"""The head's Triton kernels by Triton's interpreter, on a CPU. Skipped where triton is not installed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.engine.head import tiled_head, tiles
from posttrain.engine.head.kernel_table import TABLE, Kernel, kernel
from posttrain.engine.head.logprob import logprobs
from posttrain.system.errors import EngineError
from tests.engine.test_logprob import CASES, Case, inputs, plain, targets

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The module with its kernels interpreted. Triton reads the variable when it is imported."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; `make test-vllm` runs these tests where it is")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported without its interpreter; set TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module("posttrain.engine.head.triton_tiles")


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("block", [11, 5])
def test_the_head_by_triton_equals_plain_log_softmax(
    kernels: ModuleType, case: Case, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of log-prob and entropy, in one block of the vocabulary and in several."""
    monkeypatch.setattr(kernels, "COLUMNS", 4)
    (form,) = (k for k in TABLE["head"] if k.form == "compiled" and "cuda" in k.devices)
    monkeypatch.setitem(TABLE, "head", (Kernel("reference", form.function),))
    for dtype, bound in form.bounds.items():
        ours, theirs = inputs(dtype, case.bias), inputs(bias=case.bias)
        logp, entropy = logprobs(*ours, targets(), **case.arguments(), want_entropy=True, chunk=4, block=block)
        wanted = plain(*theirs, case)
        assert entropy is not None and logp.dtype == dtype
        by = torch.randn(2, len(logp), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (by[0].to(dtype) @ logp + by[1].to(dtype) @ entropy).backward()
        (by[0] @ wanted[0] + by[1] @ wanted[1]).backward()
        pairs = [(logp, wanted[0]), (entropy, wanted[1])]
        pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        for a, b in pairs:
            assert a is not None and b is not None
            assert float((a - b).detach().abs().max()) <= bound * max(1.0, float(b.detach().abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_operations_agree_with_torch(kernels: ModuleType, dtype: torch.dtype) -> None:
    gap = tiles.largest_gap(kernels.TRITON, CPU, dtype, kernels.COLUMNS + 37)
    assert gap <= kernels.BOUNDS[dtype] / 10


def _lost_columns(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return tiles.fold(z[:, :4096], *rest)


def _no_entropy(z: Tensor, norm: Tensor, named: Tensor, by: Tensor, by_entropy: Tensor | None, *rest: Any) -> Tensor:
    return tiles.cotangent(z, norm, named, by, None, *rest)


def _half(z: Tensor, *rest: Any) -> Tensor:
    return rest[-1].copy_(tiles.cotangent(z, *rest).half())


def _nothing(z: Tensor, *rest: Any) -> Tensor:
    return rest[-1].fill_(torch.nan)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "wrong",
    [{"fold": _lost_columns}, {"cotangent": _no_entropy}, {"cotangent": _half}, {"cotangent": _nothing}],
    ids=["columns lost", "entropy lost", "half precision", "nan"],
)
def test_kernels_that_compute_something_else_are_refused(
    kernels: ModuleType, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their first use, with the way out in the message."""
    monkeypatch.setattr(kernels, "TRITON", replace(kernels.TRITON, **wrong))
    kernels.proved.cache_clear()
    with pytest.raises(EngineError, match=r"differ from torch's operations on cpu by .*model\.kernels=torch"):
        kernels.proved(CPU, torch.float32)


def test_kernels_that_do_not_run_are_refused(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no device code")

    monkeypatch.setattr(kernels, "_launch", broken)
    kernels.proved.cache_clear()
    with pytest.raises(EngineError, match=r"do not run on cpu \(RuntimeError: no device code\).*model\.kernels=torch"):
        kernels.proved(CPU, torch.float32)


def test_a_cpu_never_chooses_them() -> None:
    (form,) = (k for k in TABLE["head"] if k.form == "compiled" and "cuda" in k.devices)
    assert "on cuda, not torch.float32 on cpu" in form.unfit(CPU, torch.float32)
    assert kernel("head", CPU, torch.float32) is not form
    assert kernel("head", CPU, torch.float64).form == "torch"


def test_a_gpu_chooses_them_only_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for there, form in ((None, "torch"), (object(), "compiled")):
        monkeypatch.setattr(tiled_head, "find_spec", lambda name, there=there: there)
        assert kernel("head", gpu, torch.float32).form == form
        assert kernel("head", gpu, torch.float32, "torch").form == "torch"
