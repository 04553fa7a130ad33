"""Whatever a model adds at random while it trains is silenced at load, said, and gone from the learner; what cannot be
is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posttrain.engine.head.readout import read_out
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.model.disable_dropout import silence
from posttrain.system.errors import EngineError
from tests.engine.engine_parts import packed, policy
from tests.engine.test_families import AGREE, gap, known, load, write

FFN = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}
NOISY: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("mixtral", {"router_jitter_noise": 0.5}, r"Mixtral\w+ \(2 modules, first model.layers.0.mlp"),
    "phimoe": ("phimoe", {"input_jitter_noise": 0.5, "router_jitter_noise": 0.2}, "Phimoe.* adds noise while training"),
    "dbrx": ("dbrx", {"ffn_config": FFN | {"moe_jitter_eps": 0.5}}, "Dbrx.* adds noise while training"),
    "opt": ("opt", {"layerdrop": 0.5}, r"OPTDecoder \(model.decoder\) adds noise"),
    "biogpt": ("biogpt", {"layerdrop": 0.5}, r"BioGptModel \(biogpt\) adds noise"),
}


@pytest.mark.parametrize("name", NOISY)
def test_noise_that_is_no_dropout_is_silenced_and_said(name: str, tmp_path: Path) -> None:
    family, changes, says = NOISY[name]
    known(family)
    policy = load(write(tmp_path, family, **changes))
    (note,) = [n for n in policy.notes if "noise" in n]
    assert re.search(says, note) and note in " ".join(policy.describe())
    assert gap(policy) < AGREE
    assert gap(policy, gradient_checkpointing="full") < AGREE


@pytest.mark.parametrize("name", ["mixtral", "opt"])
def test_the_learner_stays_what_it_is_whatever_the_generators(name: str, tmp_path: Path) -> None:
    """Trained twice under other seeds, and as a clone: the same gradients, the same log-probs as the frozen copy."""
    family, changes, _ = NOISY[name]
    policy = load(write(tmp_path, family, **changes))
    batch, grads = packed(4), list[Tensor]()
    frozen = FrozenScorer(policy).score(batch)
    for seed, one in enumerate((policy, policy, policy.clone())):
        torch.manual_seed(seed)
        learner = HFLearner(one)
        learner.train_mode(True)
        logp = learner.forward(batch).logp
        np.testing.assert_allclose(logp.detach().numpy(), frozen, atol=2e-5)
        one.module.zero_grad()
        logp.sum().backward()
        weight: Any = one.module.get_input_embeddings().weight
        grads.append(weight.grad.clone())
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_layers_still_know_that_they_train(tmp_path: Path) -> None:
    """Silencing the module that drops layers leaves the layers' own training mode, which activation checkpointing
    reads."""
    policy = load(write(tmp_path, "opt", layerdrop=0.5))
    learner = HFLearner(policy, gradient_checkpointing="full")
    learner.train_mode(True)
    decoder: Any = policy.module.model.decoder
    assert not decoder.training and all(layer.training and layer.gradient_checkpointing for layer in decoder.layers)
    learner.train_mode(False)
    assert not any(part.training for part in policy.module.modules())


def test_a_quiet_model_has_no_note_and_moves_no_generator(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3")
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"]
    notes = load(path).notes
    assert not [n for n in notes if "noise" in n]
    assert (
        torch.equal(before[0], torch.get_rng_state())
        and before[1] == random.getstate()
        and np.array_equal(before[2], np.random.get_state(legacy=False)["state"]["key"])
    )


# --- noise of every kind, put into a layer ----------------------------------------------------------------------------


class Noisy(nn.Module):
    """A part that multiplies by what `draw` says, where `asks` trains."""

    def __init__(self, inner: nn.Module, draw: Any, asks: Any = None) -> None:
        super().__init__()
        self.inner, self.draw = inner, draw
        self.asks = asks or (lambda part: part.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (float(self.draw()) if self.asks(self) else 1.0)


DRAWS = {
    "torch": lambda: 1 + torch.rand(()),
    "python": lambda: 1 + random.random(),
    "numpy": lambda: 1 + np.random.rand(),
    "seldom": lambda: 2.0 if torch.rand(()) < 1e-6 else 1.0,
}


def with_part(part: Any) -> Any:
    """A tiny policy with one feed-forward inside `part`."""
    built = policy()
    layer: Any = built.module.model.layers[1]
    layer.mlp = part(layer.mlp)
    return built


@pytest.mark.parametrize("draw", DRAWS)
def test_every_generator_is_watched(draw: str) -> None:
    built = with_part(lambda mlp: Noisy(mlp, DRAWS[draw]))
    (note,) = silence(built.module, read_out(built.module))
    assert "Noisy (model.layers.1.mlp) adds noise while training" in note
    learner = HFLearner(built)
    learner.train_mode(True)
    assert not built.module.model.layers[1].mlp.training and built.module.model.layers[1].mlp.inner.training
    batch = packed(3)
    np.testing.assert_allclose(learner.forward(batch).logp.detach().numpy(), learner.score(batch), atol=1e-5)


def test_noise_of_a_part_that_asks_its_child_is_silenced_with_the_child() -> None:
    built = with_part(lambda mlp: Noisy(mlp, DRAWS["torch"], lambda part: part.inner.training))
    (note,) = silence(built.module, read_out(built.module))
    built.module.train()
    assert "Noisy" in note and not built.module.model.layers[1].mlp.inner.training


def test_what_stays_random_is_refused_by_name() -> None:
    built = with_part(lambda mlp: Noisy(mlp, DRAWS["torch"], lambda part: True))
    with pytest.raises(
        EngineError,
        match=r"Noisy \(model.layers.1.mlp\) draws random numbers in training mode, and in evaluation mode too",
    ):
        silence(built.module, read_out(built.module))


def test_what_trains_otherwise_without_drawing_is_refused_by_name() -> None:
    built = with_part(lambda mlp: Noisy(mlp, lambda: 1.5))
    with pytest.raises(EngineError, match=r"model.layers.1.mlp \(Noisy\) .* computes something else in training mode"):
        silence(built.module, read_out(built.module))
    own = np.random.default_rng(0)
    built = with_part(lambda mlp: Noisy(mlp, lambda: own.uniform(1, 2)))
    with pytest.raises(EngineError, match=r"model.layers.1.mlp \(Noisy\)"):
        silence(built.module, read_out(built.module))
