"""A gradient that holds some rows of a weight trains it as a gradient of all its rows does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from posttrain.checks.learning.gradient_and_update_checks import StepGradients
from posttrain.config.run import Optimizer
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.exchange.row_gradient import held, joined, number, place, whole
from posttrain.core.exchange.scores import Reads
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.layers import embedding_gradient
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.optimizer import update_rules
from posttrain.engine.optimizer.optimizer import StageOptimizer
from tests.engine.engine_parts import packed, policy
from tests.engine.test_shared_embedding import Sizes, embedding
from tests.role.reward_parts import trained

ROWS, WIDTH = 210, 24
SMALL = 1 / 256
"""Of gradients that float16 holds when they are scaled."""


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is large enough, however many rows are read."""
    monkeypatch.setattr(embedding_gradient, "WORTH", 0)
    monkeypatch.setattr(embedding_gradient, "PART", 1)


def by_rows(seed: int, rows: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient of a few rows, some of them twice, as sums of passes have them."""
    rng = np.random.default_rng(seed)
    at = torch.from_numpy(rng.integers(0, ROWS, rows))
    values = torch.from_numpy(rng.normal(size=(rows, WIDTH))).to(dtype)
    return torch.sparse_coo_tensor(at[None], values, (ROWS, WIDTH), check_invariants=True)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_its_numbers_are_those_of_the_whole(seed: int, rows: int) -> None:
    made = by_rows(seed, rows)
    dense = made.to_dense()
    assert torch.equal(whole(made), dense) and torch.equal(whole(dense), dense)
    assert held(dense) is dense and held(made).shape[0] == len(np.unique(made._indices()))
    at = place(made, int(held(made).abs().argmax()))
    assert at == int(dense.abs().argmax()) == place(dense, at)
    for where in (at, 0, ROWS * WIDTH - 1):
        assert float(number(made, where)) == pytest.approx(float(number(dense, where)), rel=1e-6, abs=1e-6)
    once = joined(made)
    held(once).mul_(3)
    torch.testing.assert_close(whole(once), 3 * dense)


def stepped(
    config: Optimizer, sparse: bool, dtype: torch.dtype, kernels: Literal["auto", "reference"], scaled: bool = False
) -> tuple[list[Tensor], list[float], StageOptimizer]:
    """Weights, moments and norms after three steps of two passes each; a second weight has a dense gradient."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))
    other = torch.nn.Parameter(torch.randn(WIDTH, 16).to(dtype))
    optimizer = StageOptimizer({"embed_tokens.weight": weight, "layers.weight": other}, config, kernels, scaled)
    norms: list[float] = []
    for step in range(3):
        for part in range(2):
            found = by_rows(10 * step + part, dtype=dtype).coalesce() * (SMALL * optimizer.loss_scale)
            weight.grad = found if sparse else found.to_dense()
            other.grad = torch.full_like(other, SMALL * optimizer.loss_scale)
            optimizer.gather()
        norms.append(optimizer.step())
    return [weight.detach(), other.detach(), *optimizer.state_tensors().values()], norms, optimizer


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_steps_have_the_bits_of_whole_gradients(
    kind: Any, dtype: torch.dtype, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_rules, "PART", 64 * WIDTH)
    config = Optimizer(kind=kind, lr=0.01, warmup=0, weight_decay=0.1, clip=1e9, ema=0.9)
    ours, norms, _ = stepped(config, True, dtype, kernels)
    wanted, others, _ = stepped(config, False, dtype, kernels)
    assert len(ours) == len(wanted) and all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert norms == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_clip_and_a_scale_act_on_them(scaled: bool) -> None:
    config = Optimizer(lr=0.01, warmup=0, clip=0.01)
    dtype = torch.float16 if scaled else torch.float32
    ours, norms, _ = stepped(config, True, dtype, "auto", scaled)
    wanted, others, _ = stepped(config, False, dtype, "auto", scaled)
    assert min(others) > config.clip and norms == pytest.approx(others, rel=1e-6)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if scaled else 1e-5, atol=1e-6)


def test_the_update_is_told_from_them_as_from_whole_ones() -> None:
    told: list[StepGradients] = []
    for sparse in (True, False):
        config = Optimizer(lr=0.01, warmup=0)
        _, _, optimizer = stepped(config, sparse, torch.float32, "auto")
        found = by_rows(77)
        (weight,) = (t for n, t in optimizer.trained().items() if n.startswith("embed"))
        weight.grad = found if sparse else found.to_dense()
        told.append(StepGradients.of(optimizer, config))
    assert told[0].norm == pytest.approx(told[1].norm, rel=1e-12)
    assert told[0].largest == told[1].largest and told[0].largest


def rewarded(seed: int = 3, arch: str = "qwen3") -> HFLearner:
    made = policy(arch)
    return HFLearner(replace(made, reward_head=RewardHead(HeadShape(), 32, seed=seed)))


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gpt2"])
@pytest.mark.usefixtures("any_size")
def test_a_score_gives_rows_and_a_log_prob_gives_all(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's head is read for log-probs alone; weights of their own and shared ones."""
    one = rewarded(arch=arch)
    weight: Any = embedding(one).weight
    for _ in range(2):
        scores: Any = one.forward(packed(4), Reads(rewards=True, logp=False))
        scores.rewards.score.square().sum().backward()
    found = weight.grad
    assert found is not None and found.is_sparse
    weight.grad = None
    monkeypatch.setattr(embedding_gradient, "WORTH", 1 << 40)
    for _ in range(2):
        scores = one.forward(packed(4), Reads(rewards=True, logp=False))
        scores.rewards.score.square().sum().backward()
    assert weight.grad is not None and not weight.grad.is_sparse
    torch.testing.assert_close(found.to_dense(), weight.grad, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(embedding_gradient, "WORTH", 0)
    weight.grad = None
    scores = one.forward(packed(4), Reads(rewards=True))
    (scores.logp.sum() + scores.rewards.score.sum()).backward()
    assert weight.grad is not None and not weight.grad.is_sparse


def test_no_tensor_of_the_weights_size_is_made_by_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the two moments, at the first step."""
    monkeypatch.setattr(embedding_gradient, "WORTH", 0)
    monkeypatch.setattr(update_rules, "PART", 16 * 32)
    one = rewarded()
    optimizer = StageOptimizer(one.parameters(), Optimizer(warmup=0, clip=1e-3))
    made: list[int] = []
    for _ in range(2):
        scores: Any = one.forward(packed(2, vocabulary=4, longest=5), Reads(rewards=True, logp=False))
        with Sizes(tuple(embedding(one).weight.shape)) as sizes:
            scores.rewards.score.sum().backward()
            assert embedding(one).weight.grad.is_sparse
            optimizer.step()
        made.append(sizes.made)
    assert made == [len(update_rules.MOMENTS), 0]


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.usefixtures("any_size")
def test_a_run_trains_the_same_weights_and_no_check_speaks(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = Optimizer(kind=kind, lr=3e-3, warmup=1, clip=1e9)
    made = 0
    first = embedding_gradient.LookedUp.backward

    def counted(ctx: Any, *grads: Any) -> Any:
        nonlocal made
        out: Any = first(ctx, *grads)
        made += out[0] is not None and out[0].is_sparse
        return out

    monkeypatch.setattr(embedding_gradient.LookedUp, "backward", staticmethod(counted))
    ours = trained(tmp_path / "rows", optimizer=optimizer)
    assert made >= 4
    monkeypatch.setattr(embedding_gradient, "WORTH", 1 << 40)
    wanted = trained(tmp_path / "whole", optimizer=optimizer)
    files = [sorted(x.folder.rglob("*.safetensors")) for x in (ours, wanted)]
    assert files[0] and len(files[0]) == len(files[1])
    for a, b in zip(*files, strict=True):
        left, right = load_file(a), load_file(b)
        assert left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left), a.name
