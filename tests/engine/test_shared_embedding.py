"""A weight that embedding and head share gets one gradient: the same numbers, without a second tensor of that size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.engine.layers.embedding_gradient import LookUp
from posttrain.engine.learner.learner import HFLearner
from tests.engine.engine_parts import packed, policy


class Sizes(TorchDispatchMode):
    """Counts the tensors of one shape that operations make, and not those that are a view or changed in place."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.made, self._known = shape, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor) and not x.is_sparse}
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or out.is_sparse:
            return out
        if tuple(out.shape) == self.shape and out.untyped_storage()._cdata not in before:
            self.made += 1
        return out


@contextmanager
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(LookUp, "of", staticmethod(lambda decoder, head: None))
        yield


def embedding(learner: HFLearner) -> Any:
    return learner.policy.module.get_input_embeddings()


def learner(arch: str, dtype: torch.dtype, padding: bool = False) -> HFLearner:
    built = HFLearner(policy(arch, dtype=dtype))
    if padding:
        embedding(built).padding_idx = 3
    return built


def gradients(learner: HFLearner, batch: Packed, head: bool = True) -> dict[str, Tensor]:
    if head:
        scores: Any = learner.forward(batch, Reads(entropy=True, value=True))
        by = torch.from_numpy(batch.target_M.astype(float)).sin()
        loss = (scores.logp * by + 0.3 * scores.entropy + scores.value**2).sum()
    else:
        loss = learner._reader.hidden(batch).square().sum()
    loss.backward()
    found = {n: p.grad.clone() for n, p in learner.parameters().items() if p.grad is not None}
    for p in learner.parameters().values():
        p.grad = None
    return found


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "gemma"])
def test_the_gradient_has_the_same_numbers(
    arch: str, padding: bool, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        batch = packed(6)
        found = gradients(learner(arch, dtype, padding), batch, head)
        with apart(monkeypatch):
            wanted = gradients(learner(arch, dtype, padding), batch, head)
        assert found.keys() == wanted.keys()
        for name, g in wanted.items():
            assert float((found[name] - g).abs().max()) <= bound * max(1.0, float(g.abs().max())), name


def test_one_tensor_of_that_size_is_made_and_not_three(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> int:
        one = learner("qwen3", torch.float32)
        scores: Any = one.forward(packed(6, vocabulary=9))  # not every row
        with Sizes(tuple(embedding(one).weight.shape)) as sizes:
            scores.logp.sum().backward()
        return sizes.made

    ours = made()
    with apart(monkeypatch):
        theirs = made()
    assert ours == 1 and theirs > ours


def test_passes_that_read_the_head_late_or_not_at_all_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward passes before one backward, one of them without the head, and gradients taken twice."""

    def found() -> list[Tensor]:
        one = learner("qwen3", torch.float64)
        first: Any = one.forward(packed(4), Reads(value=True))
        second = one._reader.hidden(packed(3, seed=1))
        third: Any = one.forward(packed(2, seed=2))
        total = first.logp.sum() + (first.value**2).sum() + second.square().sum() + 2 * third.logp.sum()
        parameters = list(one.parameters().values())
        once = torch.autograd.grad(total, parameters, retain_graph=True)
        again = torch.autograd.grad(total, parameters)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        return list(once)

    ours = found()
    with apart(monkeypatch):
        theirs = found()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_frozen_or_separate_weights_are_looked_up_as_they_are() -> None:
    frozen = learner("qwen3", torch.float32)
    embedding(frozen).weight.requires_grad_(False)
    scores: Any = frozen.forward(packed(3))
    scores.logp.sum().backward()
    assert embedding(frozen).weight.grad is None
    module: Any = policy("llama").module
    apart = LookUp.of(module.get_decoder(), module.get_output_embeddings())
    assert apart is not None
    with apart.looked_up():
        assert "forward" not in module.get_input_embeddings().__dict__ and apart.take() is None
