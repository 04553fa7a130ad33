"""Models with a recurrent state: a batch of sequences is each of them alone, gradients too, and a state that leaks is
seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import posttrain
from posttrain.config.engines import VLLM
from posttrain.config.run import Model
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.endpoint import TokenSampler, discover
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.architecture_kinds import IN_VLLM, KNOWN, keeps_state, refuse_vllm
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.model.tiny_models import characters
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, EngineError, InvariantError
from posttrain.verifier.http_client import Endpoint
from tests import families
from tests.engine.engine_parts import segments
from tests.mutants import planted
from tests.serve.serve_parts import TOKEN, up
from tests.tiny import only_rl, tiny_run
from tests.verifier.http_parts import QUICK

ALPHABET = "0123456789+-*=<> abcdefghijklmnopqrstuv"
NAMED = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2", "mamba2")
BOUND = 3e-6
"""Of log-probs and gradients in float64 models: transformers computes the state itself in float32 there."""


def written(folder: Path, family: str) -> Path:
    families.build(families.config(family)).save_pretrained(folder)
    characters(ALPHABET).save_pretrained(folder)
    return folder


def loaded(folder: Path, family: str) -> Policy:
    return load_policy(Model(path=str(written(folder, family)), context=48), None, 0)


def learned(learner: HFLearner, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of a loss that reads them and the entropies."""
    scores = learner.forward(batch, Reads(entropy=True))
    weights = torch.from_numpy(np.sin(batch.target_M.astype(float)))
    assert scores.entropy is not None
    (scores.logp * weights + 0.3 * scores.entropy).sum().backward()
    gradient = {n: p.grad.clone() for n, p in learner.parameters().items() if p.grad is not None}
    for p in learner.parameters().values():
        p.grad = None
    return scores.logp.detach(), gradient


@pytest.mark.parametrize("family", NAMED)
def test_a_batch_is_each_of_its_sequences_alone(family: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path, family)
    policy.module.double()
    if hasattr(policy.module.config, "_experts_implementation"):
        policy.module.set_experts_implementation("eager")
    learner = HFLearner(policy)
    said = segments(6, seed=3, longest=30, vocabulary=30)
    together, gradient = learned(learner, Packed.of(said))
    apart = [learned(learner, Packed.of([s])) for s in said]
    assert float((together - torch.cat([logp for logp, _ in apart])).abs().max()) < BOUND
    assert gradient
    for name, whole in gradient.items():
        alone = torch.stack([g[name] for _, g in apart if name in g]).sum(0)
        assert float((whole - alone).abs().max()) < BOUND * max(1.0, float(alone.abs().max()))


@pytest.mark.parametrize("family", NAMED)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path, family)
    said = segments(5, seed=1, longest=30, vocabulary=30)
    found = HFLearner(policy).score(Packed.of(said))
    module = policy.clone().module
    module.set_attn_implementation("eager")
    wanted: list[Tensor] = []
    for s in said:
        ids = torch.from_numpy(s.ids.astype(np.int64))
        with torch.no_grad():
            logp = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        at = np.flatnonzero(s.mask)
        wanted.append(logp[at - 1, ids[at]])
    assert np.abs(found - torch.cat(wanted).numpy()).max() < 1e-4


def test_float64_is_computed_for_a_mixture_with_a_state(tmp_path: Path) -> None:
    learner = HFLearner(loaded(tmp_path, "granitemoehybrid"))
    batch = Packed.of(segments(3, longest=20, vocabulary=30))
    exact = learner.exact(batch)
    assert exact is not None and np.abs(exact - learner.score(batch)).max() < 1e-4


@pytest.mark.prove
def test_a_run_learns_and_a_leaking_state_stops_it(tmp_path: Path) -> None:
    run = only_rl(tiny_run(steps=2, prompts=2, siblings=2))
    run = replace(run, model=Model(path=str(written(tmp_path / "model", "lfm2")), context=48))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    steps = run_reader.steps(tmp_path / "run")
    assert len(steps) == 2 and steps[0].gauges["canary/logp_gap_worst"].mean < 1e-4
    with planted("state_leaks"), pytest.raises(InvariantError, match="sampler and learner disagree"):
        posttrain.run(run, out=tmp_path / "leaks", quiet=True)


def test_what_was_not_shown_is_refused_by_name_before_weights_are_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "lfm2")
    (folder / "model.safetensors").write_bytes(b"not read")
    config = json.loads((folder / "config.json").read_text())
    for kind, changes in (("xlstm", {}), ("brand_new", {"layer_types": ["gated_delta", "full_attention"]})):
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind} | changes))
        with pytest.raises(EngineError, match=f"{kind} keeps a recurrent state.*Use a decoder-only causal LM"):
            load_policy(Model(path=str(folder)), None, 0)


def test_a_hybrid_without_a_state_is_packed_as_before() -> None:
    assert keeps_state({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]})
    assert not keeps_state({"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]})
    assert not keeps_state({"model_type": "qwen3", "layer_types": ["full_attention"]})
    assert set(NAMED) <= set(KNOWN)


def test_the_embedded_engine_says_what_a_state_costs(tmp_path: Path) -> None:
    engine = EmbeddedEngine(loaded(tmp_path, "mamba2").module, slots=2, context=48)
    assert "a pass over its whole sequence" in engine.describe()


@pytest.mark.parametrize("engine", [VLLM(), VLLM(server=True), VLLM(url="http://127.0.0.1:9")])
def test_vllm_is_refused_by_name_before_anything_is_loaded(engine: VLLM, tmp_path: Path) -> None:
    """The weights are no weights, vLLM need not be installed, and no folder is made."""
    folder = written(tmp_path / "model", "lfm2")
    (folder / "model.safetensors").write_bytes(b"not read")
    run = replace(only_rl(tiny_run()), model=Model(path=str(folder), context=48), engine=engine)
    with pytest.raises(ConfigError, match=r"engine=vllm with lfm2: .*recurrent state.*engine=embedded"):
        posttrain.run(run, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_vllm_is_refused_where_its_weights_cannot_be_read_back() -> None:
    assert set(IN_VLLM) <= set(KNOWN)
    with pytest.raises(ConfigError, match="engine=vllm with mamba2: .*A_log"):
        refuse_vllm({"model_type": "mamba2"})
    refuse_vllm({"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]})
    refuse_vllm({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]})


async def test_an_endpoint_says_what_the_learner_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own server answers from a model with a state, with the learner's log-probs."""
    monkeypatch.setenv("TEST_KEY", TOKEN)
    folder, prompt = written(tmp_path / "model", "lfm2"), np.array([5, 9, 3, 17, 4], np.int32)
    async with up(folder) as u, Endpoint(u.url, "rollout", key_env="TEST_KEY", patience=QUICK) as endpoint:
        sampler = TokenSampler(endpoint, await discover(endpoint))
        contract = Sampling(max_tokens=9, stop_ids=u.served.renderer.stop_ids)
        turns = [await sampler.generate(prompt, contract, place) for place in range(4)]
    said = list[Segment]()
    for turn in turns:
        mask = np.arange(len(prompt) + len(turn.ids)) >= len(prompt)
        logp = np.concatenate([np.full(len(prompt), np.nan, np.float32), turn.logp])
        said.append(
            Segment(np.concatenate([prompt, turn.ids]), mask, logp, np.where(mask, 0, -1).astype(np.int32), contract)
        )
    assert len({tuple(turn.ids) for turn in turns}) > 1
    learner = HFLearner(load_policy(Model(path=str(folder), context=48), None, 0))
    assert np.abs(learner.score(Packed.of(said)) - np.concatenate([turn.logp for turn in turns])).max() < 1e-4
