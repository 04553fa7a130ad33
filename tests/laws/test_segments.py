"""Attention by compiled code is attention by its definition, for every tree, and says so on its first use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.engine.cpu import compile_native
from posttrain.engine.layers import packed_attention
from posttrain.engine.layers.attention import AttentionCall, PackedLayout
from posttrain.engine.layers.prefix_tree_attention import SharedTree, TreeLayout
from posttrain.system.errors import EngineError
from tests.laws.test_sharing import forest

pytestmark = pytest.mark.skipif(
    bool(compile_native.missing()), reason=f"no compiled kernels: {compile_native.missing()}"
)
HEADS = [(4, 4), (4, 2), (3, 1)]
WIDTHS = [(32, 32), (16, 24), (20, 7), (64, 64)]
BOUND = 2e-5
"""Largest difference from float64, relative to the largest number, or to 1 where all are smaller."""


def made(layout: Any, rows: list[Tensor], by: Tensor | None = None, window: int | None = None) -> list[Tensor]:
    """The output [1, N, H, D], and the gradients of query, key and value [1, heads, N, D] for a gradient of it."""
    given = [x.detach().clone().requires_grad_() for x in rows]
    out = layout.attend(AttentionCall(torch.nn.Module(), *given, 0.3, window))
    return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out) if by is None else by)]


def rows_of(count: int, heads: tuple[int, int], widths: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Query, key, value, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    rows = [torch.randn(1, h, count, d, generator=generator) for h, d in shapes]
    return [*rows, torch.randn(1, count, heads[0], widths[1], generator=generator)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    prompts=st.integers(1, 4),
    siblings=st.integers(1, 5),
    heads=st.sampled_from(HEADS),
    widths=st.sampled_from(WIDTHS),
    window=st.sampled_from([None, 1, 5, 33]),
    shared=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_float64(
    seed: int, prompts: int, siblings: int, heads: tuple[int, int], widths: tuple[int, int], window: int | None,
    shared: bool,
) -> None:  # fmt: skip
    parts = forest(seed, prompts, siblings)
    ids, lengths = np.concatenate(parts), np.array([len(x) for x in parts])
    tree = SharedTree.of(ids, lengths)
    layout = TreeLayout(tree) if shared else PackedLayout(lengths)
    *rows, by = rows_of(layout.tokens, heads, widths, seed)
    found = made(layout, rows, by, window)
    right = made(layout, [x.double() for x in rows], by.double(), window)
    for ours, wanted in zip(found, right, strict=True):
        assert wanted.dtype == torch.float64
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=BOUND * max(1.0, float(wanted.abs().max())))


def test_a_run_longer_than_any_block() -> None:
    for window in (None, 40):
        *rows, by = rows_of(700, (2, 1), (16, 16))
        layout = PackedLayout([600, 100])
        for ours, wanted in zip(
            made(layout, rows, by, window),
            made(layout, [x.double() for x in rows], by.double(), window),
            strict=True,
        ):
            torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=BOUND * max(1.0, float(wanted.abs().max())))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_no_bit_depends_on_the_number_of_threads() -> None:
    parts = forest(3, prompts=4)
    tree = SharedTree.of(np.concatenate(parts), np.array([len(x) for x in parts]))
    *rows, by = rows_of(len(tree.first_U), (4, 2), (32, 32))
    assert rows[0].numel() > 32_768, "as many as more than one thread is used for"
    found = list[list[Tensor]]()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(made(TreeLayout(tree), rows, by))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_no_bit_of_a_tree_depends_on_the_others() -> None:
    *rows, by = rows_of(90, (4, 2), (32, 32))
    together = made(PackedLayout([40, 37, 13]), rows, by)
    alone = made(PackedLayout([37]), [x[:, :, 40:77] for x in rows], by[:, 40:77])
    assert torch.equal(together[0][:, 40:77], alone[0])
    assert all(torch.equal(a[:, :, 40:77], b) for a, b in zip(together[1:], alone[1:], strict=True))


def test_a_gradient_that_is_not_contiguous_lives_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of its size that is written in between changes nothing."""
    *rows, by = rows_of(40, (4, 2), (16, 16))
    layout, real = PackedLayout([25, 15]), compile_native.library()
    wanted = made(layout, rows, by)

    def backward(*told: Any) -> int:
        other = [torch.full_like(by, torch.nan) for _ in range(8)]
        return real.segments_backward(*told) if other else 1

    code = SimpleNamespace(segments_forward=real.segments_forward, segments_backward=backward)
    monkeypatch.setattr(compile_native, "library", lambda: code)
    scattered = by.transpose(1, 2).contiguous().transpose(1, 2)
    assert not scattered.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(made(layout, rows, scattered), wanted, strict=True))


@pytest.fixture
def unproved() -> Iterator[None]:
    packed_attention._proved.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    packed_attention._proved.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(("wrong", "of"), [("segments_forward", "outputs"), ("segments_backward", "dq")])
def test_the_first_use_finds_wrong_code(wrong: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that scales the scores by 1 % more is refused, and nothing is attended by it."""
    real = compile_native.library()

    def scaled(told: Any, *addresses: int) -> int:
        changed = compile_native.Segments.from_buffer_copy(told._obj)
        changed.scale *= 1.01
        return getattr(real, wrong)(ctypes.byref(changed), *addresses)

    names = ("segments_forward", "segments_backward")
    code = SimpleNamespace(**{name: scaled if name == wrong else getattr(real, name) for name in names})
    monkeypatch.setattr(compile_native, "library", lambda: code)
    *rows, _ = rows_of(5, (2, 2), (8, 8))
    with pytest.raises(EngineError, match=rf"differs from its definition by .*\({of};.*model.kernels=torch"):
        PackedLayout([5]).attend(AttentionCall(torch.nn.Module(), *rows, 0.3))


@pytest.mark.usefixtures("unproved")
def test_the_first_use_may_be_without_gradients() -> None:
    *rows, _ = rows_of(5, (2, 2), (8, 8))
    with torch.inference_mode():
        PackedLayout([5]).attend(AttentionCall(torch.nn.Module(), *rows, 0.3))
    made(PackedLayout([5]), rows)
