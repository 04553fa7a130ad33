"""Activations that are computed again, or kept elsewhere: the same gradient, and less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config.model_settings import Lora
from posttrain.config.run import Checkpointing, Model, Reinforce
from posttrain.core.exchange.scores import Reads
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded.cache.fused_decoder import fusable
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.stages.warm_up import largest
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError
from tests.engine.engine_parts import ALPHABET, tiny
from tests.peak import peak_bytes

HOW: tuple[Checkpointing, ...] = ("none", "selective", "full")


def gradient(arch: str, seed: int = 0, tokens: int = 300, **how: Any) -> dict[str, torch.Tensor]:
    model = tiny(arch, context=64, layers=3, kernels="torch")  # layers that are computed again are the plain ones
    learner = HFLearner(load_policy(model, ALPHABET, seed), **how)
    packed = largest(Reinforce(name="rl", micro_tokens=tokens), 64, np.arange(20))
    learner.train_mode(True)
    scores = learner.forward(packed, Reads(entropy=True, value=True))
    assert scores.entropy is not None
    (scores.logp.sum() + 0.1 * scores.entropy.sum()).backward()
    return {n: p.grad for n, p in learner.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gpt2", "gemma"])
@pytest.mark.parametrize(
    "how",
    [
        {"gradient_checkpointing": "selective"},
        {"gradient_checkpointing": "full"},
        {"offload_activations": True},
        {"gradient_checkpointing": "selective", "offload_activations": True},
        {"gradient_checkpointing": "full", "offload_activations": True},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_the_gradient_is_the_same_bit_for_bit(arch: str, how: dict[str, Any]) -> None:
    plain, saving = gradient(arch), gradient(arch, **how)
    assert plain.keys() == saving.keys() and len(plain) > 10
    assert all(torch.equal(plain[n], saving[n]) for n in plain)


@pytest.mark.prove
def test_each_keeps_less() -> None:
    """Bytes of the whole pass, by torch's allocator; those of the head are in each."""
    model = Model(arch="qwen3", hidden=64, layers=6, heads=4, kv_heads=4, ffn=192, context=256)
    packed = largest(Reinforce(name="rl", micro_tokens=1024), 256, np.arange(20))
    taken = dict[str, int]()
    for how in (*HOW, "fused"):
        fused = how == "fused"
        kept = replace(model, kernels="auto" if fused else "torch")
        learner = HFLearner(load_policy(kept, ALPHABET, 0), gradient_checkpointing="none" if fused else how)
        learner.train_mode(True)

        def work(learner: HFLearner = learner) -> None:
            learner.forward(packed).logp.sum().backward()

        work()
        taken[how] = peak_bytes(work)
    assert taken["selective"] < 0.8 * taken["none"] and taken["full"] < 0.6 * taken["selective"]
    assert compile_native.missing() or taken["fused"] < 0.8 * taken["none"]


def test_offloading_copies_activations_and_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = HFLearner(load_policy(tiny("qwen3", context=64), ALPHABET, 0), offload_activations=True)
    sizes = {p.numel() for p in learner.parameters().values() if p.ndim == 2}
    packed = largest(Reinforce(name="rl", micro_tokens=1000), 64, np.arange(20))
    copied, real = list[int](), torch.Tensor.copy_

    def seen(self: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        copied.append(source.numel())
        return real(self, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    learner.forward(packed).logp.sum().backward()
    assert len(copied) > 10 and not sizes & set(copied)


def test_true_and_false_are_still_read() -> None:
    for given, now in ((True, "full"), (False, "none"), ("selective", "selective")):
        model = from_plain(Model, {**to_plain(Model()), "gradient_checkpointing": given})
        assert model.gradient_checkpointing == model.checkpointing == now
        assert from_plain(Model, to_plain(model)) == model
    with pytest.raises(ConfigError, match="selective"):
        from_plain(Model, {**to_plain(Model()), "gradient_checkpointing": "selectiv"})


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["whole", "adapter"])
def test_copies_of_the_model_keep_the_fused_decoder(how: Checkpointing, lora: Lora | None) -> None:
    """transformers adds a hook to the embedding, and a model with hooks has the plain decoder."""
    policy = load_policy(tiny("llama", context=64, lora=lora), ALPHABET, 0)
    HFLearner(policy, gradient_checkpointing=how)
    assert fusable(policy.twin().module)


def test_offloading_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing=selective"):
        Model(offload_activations=True)
    assert Model(offload_activations=True, device="cuda").offload_activations
