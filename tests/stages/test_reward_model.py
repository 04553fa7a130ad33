"""The stage that trains a reward model: it learns, is measured on held-out judgements, is cut and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import posttrain
from posttrain.api.main import certified_export
from posttrain.build.build_environments import make_environment
from posttrain.build.build_reward_models import reward_policy
from posttrain.build.build_run import make_policy
from posttrain.config.model_settings import Lora
from posttrain.config.run import Env, Model, Optimizer
from posttrain.config.stages.reward_model_settings import HeadShape, RewardModel
from posttrain.core.batch import Packed
from posttrain.engine.files.reward_folder import read_reward_model
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.learner.learner import HFLearner
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.report.export.export_reward import sequences
from posttrain.role.weights.saved_weights import WEIGHTS
from posttrain.system.errors import ConfigError, RunFolderError
from tests.role.reward_parts import Taste, reward_run, trained
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(find(folder).folder / WEIGHTS)


def test_it_learns_pairs_and_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = trained(tmp_path / "run", quiet=False, steps=30, batch=32, eval_every=15)
    [result] = done.stages
    steps = run_reader.steps(tmp_path / "run")
    assert result.kind == "rewardmodel" and result.accuracy is None and result.agreement is not None
    assert result.agreement_before is not None and result.agreement[0] > 0.8
    assert steps[-1].gauges["ranking/loss"].mean < steps[0].gauges["ranking/loss"].mean < 0.9
    assert steps[-1].gauges["ranking/accuracy"].mean > 0.8
    assert "heldout/agreement" in steps[14].gauges and "heldout/agreement" not in steps[15].gauges
    held = weights(tmp_path / "run")
    assert held["reward_head.score.weight"].shape == (1, 32)
    said = capsys.readouterr().out
    assert "rm: a reward model from pairs (Bradley-Terry); its head reads 'last'" in said
    assert "of held-out pairs ordered as judged" in said


def test_its_language_head_learns_beside_it(tmp_path: Path) -> None:
    """With regularise=sft the chosen completions get likelier while their scores rise."""
    trained(tmp_path / "run", steps=20, regularise="sft", alpha=0.5)
    first, *_, last = (s.gauges for s in run_reader.steps(tmp_path / "run"))
    assert last["ranking/regulariser"].mean < 0.98 * first["ranking/regulariser"].mean
    assert last["ranking/accuracy"].mean > 0.7
    mixed = 0.5 * last["ranking/regulariser"].mean
    assert mixed < last["ranking/loss"].mean < mixed + 0.5


def test_a_program_that_only_reads_knows_the_kind(tmp_path: Path) -> None:
    trained(tmp_path / "run", steps=1)
    read = "import sys, posttrain; print(posttrain.load(sys.argv[1]).stages[0].kind)"
    said = subprocess.run([sys.executable, "-c", read, str(tmp_path / "run")], capture_output=True, text=True)
    assert said.stdout.strip() == "rewardmodel", said.stderr


@pytest.mark.parametrize("regularise", ["none", "dpo"])
def test_cut_and_gone_on_with_it_is_the_same(tmp_path: Path, regularise: Any) -> None:
    """The reference is that of the beginning, too."""
    run = reward_run(regularise=regularise)
    posttrain.run(replace(run, stages=(replace(run.stages[0], steps=2),)), out=tmp_path / "cut", quiet=True)
    posttrain.run("", "rm.steps=4", resume=tmp_path / "cut", quiet=True)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    one, two = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    "change",
    [
        {"judgement": "label"},
        {"judgement": "label", "pool": "token"},
        {"pool": "mean", "centre": 0.01},
        {"judgement": "ranking"},
        {"judgement": "ranking", "pairs": True},
        {"judgement": "rating", "attributes": ("ones", "zeros")},
        {"judgement": "rating", "attributes": ("ones",), "classes": 7},
        {"attributes": ("a", "b"), "gate": True},
        {"regularise": "sft"},
        {"regularise": "dpo", "pool": "mean"},
        {"regularise": "dpo_free"},
    ],
    ids=str,
)
def test_other_heads_and_judgements(change: dict[str, Any], tmp_path: Path) -> None:
    done = trained(tmp_path / "run", steps=3, **change)
    assert done.stages[0].agreement is not None
    [*_, last] = run_reader.steps(tmp_path / "run")
    assert ("ranking/error" if change.get("judgement") == "rating" else "ranking/accuracy") in last.gauges


def test_ratings_train_the_attributes_and_then_pairs_the_gate(tmp_path: Path) -> None:
    """Two stages: the first leaves the gate as it began, the second the attributes, bit for bit."""
    names = ("ones", "zeros")
    given: dict[str, Any] = {"attributes": names, "gate": True, "batch": 8}
    first = Optimizer(lr=3e-3, warmup=1)
    rated = RewardModel(name="rm", judgement="rating", steps=4, optimizer=first, **given)
    optimizer = Optimizer(lr=1e-2, warmup=1, freeze=("reward_head.score",))
    paired = RewardModel(name="gate", optimizer=optimizer, steps=8, **given)
    world = Taste(max_terms=2, max_operand=20, heldout_count=60)
    run = replace(reward_run(), env=Env(heldout=60), stages=(rated,))
    posttrain.run(run, env=world, out=tmp_path / "one", quiet=True)
    both = posttrain.run(replace(run, stages=(rated, paired)), env=world, out=tmp_path / "both", quiet=True)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "both")
    begun = RewardHead(rated.shape, 32, seed=run.seed)
    assert begun.gate is not None
    assert torch.equal(one["reward_head.gate.weight"], begun.gate.weight)
    assert not torch.equal(one["reward_head.score.weight"], begun.score.weight)
    assert torch.equal(two["reward_head.score.weight"], one["reward_head.score.weight"])
    assert not torch.equal(two["reward_head.gate.weight"], begun.gate.weight)
    assert both.stages[1].agreement is not None
    assert any("canary/frozen" in s.gauges for s in run_reader.steps(tmp_path / "both") if s.stage == "gate")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"judgement": "rating"}, "rm.attributes=\\(\\): name the ratings to learn"),
        ({"attributes": ("a", "b")}, "a pair judges one score. Set judgement=rating, or gate=true"),
        ({"gate": True}, "rm: a gate weighs several outputs"),
        ({"classes": 3}, "classes are those of a rating"),
        ({"judgement": "label", "centre": 0.1}, "pairs and rankings leave the level open"),
        ({"pool": "token"}, "a head that reads every token learns from labels"),
        ({"judgement": "ranking", "regularise": "sft"}, "learns from chosen and rejected completions"),
        ({"alpha": 1.0}, "alpha=1 must be between 0 and 1"),
        ({"beta": 0.0}, "beta=0 > 0"),
        ({"pairs": True}, "it says how rankings are read"),
        ({"batch": 0}, "batch=0: must be >= 1"),
        ({"judgement": "rating", "attributes": ("a",), "classes": 1}, "give at least 2 classes"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RewardModel(name="rm", **changes)


def test_it_hands_no_policy_on(tmp_path: Path) -> None:
    """No policy starts from its weights; with hands_on=false the run goes on with those before it."""
    sft, rl = tiny_run().stages
    rm = reward_run().stages[0]
    with pytest.raises(ConfigError, match="'rl' would start from the weights of 'rm', which are a reward model's"):
        replace(tiny_run(), stages=(sft, rm, rl))
    with pytest.raises(ConfigError, match="train reward heads of different shapes"):
        replace(tiny_run(), stages=(rm, RewardModel(name="other", pool="mean")))
    short = (replace(sft, steps=2), replace(rm, hands_on=False, steps=2), replace(rl, steps=1))
    done = posttrain.run(replace(reward_run(), stages=short), out=tmp_path / "run", quiet=True)
    assert [r.start for r in done.stages] == ["start", "sft", "sft"] and done.stages[1].agreement is not None
    kept = [load_file(tmp_path / "run" / "kept" / n / WEIGHTS)["reward_head.score.weight"] for n in ("sft", "rm", "rl")]
    assert not torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


def test_a_kind_that_the_data_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="rm learns from judgements of kind 'ranking'"):
        posttrain.run(reward_run(judgement="ranking"), quiet=True)


def test_what_a_head_is() -> None:
    assert HeadShape().standard and not HeadShape(pool="mean").standard
    assert HeadShape(outputs=("a",), classes=4).width == 4 and not HeadShape(outputs=("a",), classes=4).standard
    with pytest.raises(ConfigError, match="names that differ"):
        HeadShape(outputs=("a", "a"))


def test_it_is_exported_as_sequence_classification_and_certified(tmp_path: Path) -> None:
    """transformers gives the run's scores; the folder rewards a policy; what takes a policy refuses the run by name."""
    trained(tmp_path / "run", steps=3)
    where, certificate = certified_export(tmp_path / "run", tmp_path / "out")
    assert certificate.passed and [c.what for c in certificate.comparisons] == [
        "scores padded on the right",
        "scores padded on the left",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    ours, theirs = reward_policy(tmp_path / "run"), read_reward_model(str(where), Model())
    said = Packed.of(sequences(ours))
    np.testing.assert_allclose(HFLearner(ours).rewards(said), HFLearner(theirs).rewards(said), atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A reward model: it scores" in card and "of held-out pairs as they were judged" in card
    assert (tmp_path / "out" / "lineage.json").exists()
    for refused in (
        lambda: posttrain.evaluate(tmp_path / "run", quiet=True),
        lambda: posttrain.run(tiny_run(), f"model={tmp_path / 'run'}", quiet=True),
    ):
        with pytest.raises(RunFolderError, match="holds the reward model that rm trained"):
            refused()
    with pytest.raises(ConfigError, match="whose head is no part of an adapter"):
        certified_export(tmp_path / "run", tmp_path / "adapter", adapter=True)


def test_another_head_is_exported_in_its_own_form(tmp_path: Path) -> None:
    trained(tmp_path / "run", steps=2, pool="mean")
    _, certificate = certified_export(tmp_path / "run", tmp_path / "out")
    assert certificate.passed and (tmp_path / "out" / "reward_head.json").exists()


def test_an_adapter_is_trained_with_its_head(tmp_path: Path) -> None:
    """LoRA over a frozen model: adapter and head train, and the export has the adapter merged."""
    policy = make_policy(reward_run(), make_environment(reward_run()))
    replace(policy, reward_head=None).save(tmp_path / "base")
    run = replace(reward_run(steps=3), model=Model(path=str(tmp_path / "base"), lora=Lora(rank=2)))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    held = weights(tmp_path / "run")
    assert any("lora_" in n for n in held) and "reward_head.score.weight" in held
    assert all("lora_" in n or n.startswith(("value_head.", "reward_head.")) for n in held)
    assert certified_export(tmp_path / "run", tmp_path / "out")[1].passed
