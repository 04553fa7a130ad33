"""A reference is a copy of the weights, or the learner's own model with its adapter switched off, as the model
offers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import torch

from posttrain.build.build_run import probe_ids
from posttrain.config.model_settings import Lora
from posttrain.config.run import Optimizer
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.exact_replay import SamplerReplay
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.frozen_reference import AdapterOff, freeze
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.role.sync import Sync
from tests.engine.engine_parts import packed, policy


def adapt(p: Policy, *train: str) -> Policy:
    """The policy with an adapter on its query and value projections; of its own weights only those named in `train`
    learn."""
    module, lora = p.clone().module, Lora(rank=2, targets=("q_proj", "v_proj"))
    adapter_modules.attach(module, lora, 0)
    for name, one in module.named_parameters():
        if name in train:
            one.requires_grad_(True)
    return replace(p, module=module, lora=lora)


def learn(learner: HFLearner, steps: int = 3) -> None:
    adam = StageOptimizer(learner.parameters(), Optimizer(lr=0.03, warmup=0))
    for _ in range(steps):
        learner.train_mode(True)
        learner.forward(packed(3)).logp.sum().neg().backward()
        adam.step()
        learner.train_mode(False)


def test_the_same_bits_as_the_sampler_are_the_policy_s_and_not_its_reference_s() -> None:
    """Log-probs of the sampler's own pass have the adapter in them, and those of the reference do not."""
    base, batch = policy(), packed(4)
    adapted = adapt(base)
    learner = HFLearner(adapted, sampled=SamplerReplay(adapted, 8).values)
    reference = freeze(learner)
    assert isinstance(reference, AdapterOff)
    learn(learner)
    np.testing.assert_array_equal(reference.score(batch), FrozenScorer(base).score(batch))
    assert np.abs(learner.score(batch) - reference.score(batch)).max() > 0.1
    np.testing.assert_allclose(learner.score(batch), learner.packed_score(batch), rtol=0, atol=1e-4)


def test_without_an_adapter_a_reference_is_a_copy() -> None:
    assert isinstance(freeze(HFLearner(policy())), FrozenScorer)


def test_with_its_adapter_off_a_learner_scores_like_a_copy_of_its_base_bit_for_bit() -> None:
    base, batch = policy(), packed(4)
    copy = FrozenScorer(base)
    learner, alone = (HFLearner(adapt(base)) for _ in range(2))
    reference = freeze(learner)
    assert isinstance(reference, AdapterOff)
    learn(alone)
    for _ in range(3):
        learn(learner, 1)
    other = HFLearner(adapt(base))
    watching = freeze(other)
    adam = StageOptimizer(other.parameters(), Optimizer(lr=0.03, warmup=0))
    for _ in range(3):
        watching.score(batch)
        other.train_mode(True)
        other.forward(packed(3)).logp.sum().neg().backward()
        assert np.array_equal(watching.score(batch), copy.score(batch)), "also between backward and step"
        adam.step()
        other.train_mode(False)
    assert other.fingerprint() == alone.fingerprint(), "training goes on as without a reference"
    assert not np.allclose(learner.score(batch), copy.score(batch))
    for verb in ("score", "entropy", "energy"):
        assert np.array_equal(getattr(reference, verb)(batch), getattr(copy, verb)(batch))
    assert np.array_equal(reference.top(batch, 3).logp, copy.top(batch, 3).logp)
    held = adapter_modules.base_tensors(learner.policy.module)
    assert fingerprint(held.items()) == copy.digest, "the base is the copy's, under other names"
    assert reference.fingerprint() == reference.digest != learner.fingerprint()


def test_the_check_sees_a_base_that_moves() -> None:
    learner = HFLearner(adapt(policy()))
    reference = freeze(learner)
    with torch.no_grad():
        dict(named_tensors(learner.policy.module))["model.norm.weight"][0] += 1e-6
    assert isinstance(reference, AdapterOff) and reference.fingerprint() != reference.digest


def test_where_the_base_is_not_the_policy_or_trains_the_weights_are_copied() -> None:
    learned = HFLearner(adapt(policy()))
    learn(learned, 1)
    reference = freeze(learned)
    assert isinstance(reference, FrozenScorer) and np.array_equal(reference.score(packed(2)), learned.score(packed(2)))
    assert isinstance(freeze(HFLearner(adapt(policy(), "model.norm.weight"))), FrozenScorer)


def test_an_adapted_learner_is_published_and_its_reference_stays() -> None:
    """What is served has the adapter, before and after the reference has scored."""
    p = adapt(policy())
    learner = HFLearner(p)
    engine = EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2)
    reference, batch = freeze(learner), packed(2)
    before = reference.score(batch)
    learn(learner)
    sync = Sync(learner, engine, probe_ids(p))
    assert asyncio.run(sync.push(1)) == learner.fingerprint()
    assert np.array_equal(reference.score(batch), before) and isinstance(reference, AdapterOff)
    assert asyncio.run(sync.push(2)) == learner.fingerprint()


def test_where_no_gradient_is_kept_a_module_that_trains_is_still_copied() -> None:
    learner = HFLearner(adapt(policy(), "model.norm.weight"))
    learner.policy.module.requires_grad_(True)
    with torch.no_grad():
        assert isinstance(freeze(learner), FrozenScorer)
