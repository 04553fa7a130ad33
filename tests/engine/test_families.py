"""Sampler and learner agree on a random model of every family that is said to run, and every other is refused with its
reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.config.run import Model
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Segment
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.model.tiny_models import characters
from posttrain.system.errors import ConfigError, DataError, EngineError
from tests import families

ALPHABET = "0123456789+-*= abcdefghijklmnopqrstuv"
CONTEXT = 48
AGREE = 1e-4
"""Largest difference of a log-prob in float32, as docs/reference/models.md says; most are below 1e-6."""
REFUSALS = [(f, says) for says, (_, names) in families.REFUSED.items() for f in names.split()]
FIRST = {names.split()[0] for _, names in families.REFUSED.values()} | {
    "bloom",
    "xlnet",
    "doge",
    "gpt_oss",
    "xlstm",
}


def known(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def write(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint as somebody else would have made it."""
    families.build(families.config(family, **changes)).save_pretrained(folder)
    characters(ALPHABET).save_pretrained(folder)
    return folder


def load(path: Path, context: int | None = CONTEXT) -> Policy:
    return load_policy(Model(path=str(path), context=context), None, 0)


def say(policy: Policy, contract: Sampling, count: int = 3) -> list[Segment]:
    """What an engine of `policy` says to prompts of 1, 9, 20, ... tokens."""
    engine = EmbeddedEngine(policy.clone().module, slots=4, context=policy.context)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 30, n).astype(np.int32) for n in (1, 9, 20, 3)[:count]]

    async def main() -> list[Segment]:
        said = await asyncio.gather(*[engine.generate(p, contract, i) for i, p in enumerate(prompts)])
        out: list[Segment] = []
        for prompt, turn in zip(prompts, said, strict=True):
            transcript = Transcript(contract)
            transcript.see(prompt)
            transcript.say(turn)
            out.append(transcript.segment())
        return out

    return asyncio.run(main())


def gap(policy: Policy, **learner: Any) -> float:
    """Largest |log-prob of the learner while it trains - of the engine that said it|."""
    segments = say(policy, Sampling(max_tokens=20, stop_ids=()))
    trains = HFLearner(policy, **learner)
    trains.train_mode(True)
    logp = trains.forward(Packed.of(segments)).logp.detach().numpy()
    return float(np.abs(logp - np.concatenate([s.logp[s.mask] for s in segments])).max())


def agrees(family: str, folder: Path) -> None:
    known(family)
    assert gap(load(write(folder, family))) < AGREE


@pytest.mark.parametrize("family", families.CORE)
def test_sampler_and_learner_agree(family: str, tmp_path: Path) -> None:
    agrees(family, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("family", families.KEEP_STATE)
def test_sampler_and_learner_agree_on_models_with_a_state(family: str, tmp_path: Path) -> None:
    agrees(family, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("family", [f for f in families.RUNS if f not in families.CORE])
def test_sampler_and_learner_agree_on_the_others(family: str, tmp_path: Path) -> None:
    agrees(family, tmp_path)


def is_refused(family: str, says: str, folder: Path) -> None:
    known(family)
    write(folder, family)
    with pytest.raises((EngineError, DataError), match=says) as caught:
        load(folder)
    assert "Use a" in str(caught.value), "what to do stands in the message"


@pytest.mark.parametrize(("family", "says"), [r for r in REFUSALS if r[0] in FIRST])
def test_the_refusal_names_the_reason(family: str, says: str, tmp_path: Path) -> None:
    is_refused(family, says, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize(("family", "says"), [r for r in REFUSALS if r[0] not in FIRST])
def test_the_refusal_of_the_others_names_the_reason(family: str, says: str, tmp_path: Path) -> None:
    is_refused(family, says, tmp_path)


def test_every_family_of_transformers_stands_in_the_table_once() -> None:
    listed = [*families.RUNS, *families.KEEP_STATE, *(f for f, _ in REFUSALS), *families.UNTRIED]
    assert len(listed) == len(set(listed)) and set(families.CORE) <= set(families.RUNS)
    if transformers.__version__.startswith("5.23."):
        assert set(listed) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text(encoding="utf-8")
    assert families.table() in page, "docs/reference/models.md: its table is that of tests/families.py (table())"


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse", "full_attention"]}, "block_indices"),
    ],
)
def test_a_variant_that_needs_more_than_keys_and_values_is_refused(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    known(family)
    write(tmp_path, family, **changes)
    with pytest.raises(EngineError, match=says):
        load(tmp_path)


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_checkpointing_changes_no_gradient(family: str, tmp_path: Path) -> None:
    """A layer computed again in the backward pass attends as it did in the forward, whatever was computed in
    between."""
    write(tmp_path, family)
    packed = [Packed.of(say(load(tmp_path), Sampling(max_tokens=9, stop_ids=()), count)) for count in (2, 3)]
    grads: list[list[np.ndarray]] = []
    for saving in ("none", "selective", "full"):
        learner = HFLearner(load(tmp_path), gradient_checkpointing=saving)
        learner.train_mode(True)
        losses = [learner.forward(p).logp.sum() for p in packed]
        for loss in losses:
            loss.backward()
        grads.append(
            [p.grad.numpy() for n, p in learner.parameters().items() if "value_head" not in n and p.grad is not None]
        )
    assert len(grads[0]) > 5
    for one, other in (pair for more in grads[1:] for pair in zip(grads[0], more, strict=True)):
        np.testing.assert_allclose(one, other, atol=1e-5 * (1 + np.abs(one).max()))


# --- context ----------------------------------------------------------------------------------------------------------


def test_context_is_honoured_for_a_model_at_a_path(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3")
    assert load(path, context=None).context == families.CONTEXT and load(path, context=17).context == 17
    for wrong, says in (
        (65, "exceeds the 64 positions of Qwen3ForCausalLM. Set it to at most 64"),
        (1, "need at least 2"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(path, context=wrong)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_length_runs_up_to_where_it_does(kind: str, tmp_path: Path) -> None:
    """Within the original length its frequencies are the plain ones: sampler, learner and the same model without it
    agree."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    path = write(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(EngineError, match=rf"{kind} rope.*Set model.context to at most 32"):
        load(path, context=None)
    policy = load(path, context=32)
    assert policy.context == 32 and gap(policy) < AGREE
    if kind == "dynamic":
        plain = load(write(tmp_path / "plain", "llama"), context=32)
        (one, *_), (other, *_) = (say(p, Sampling(max_tokens=20, stop_ids=())) for p in (policy, plain))
        np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
