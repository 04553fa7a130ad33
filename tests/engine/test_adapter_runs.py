"""Runs that train an adapter: they go on bit for bit, branch, export, and refuse another base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import run_file, steps
from posttrain.system.errors import ConfigError, RunFolderError
from tests.engine.engine_parts import packed, tiny

pytestmark = pytest.mark.prove

SMALL = (
    *("rl.prompts=2", "rl.siblings=4", "rl.sampling.max_tokens=6", "evaluation.samples=1", "env.heldout=2"),
    *("rl.eval_every=0", "rl.checkpoint_every=2", "slots=8", "threads=1", "rl.optimizer.lr=0.01"),
)
LORA = ("model.lora.rank=4", "model.lora.alpha=8")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward that random answers already earn now and then."""
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text("def odd(task, text):\n    return float(sum(map(ord, text)) % 2)\n")
    return f"env.rewards={file}:odd"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, reward: str) -> Path:
    """A finished run of all weights."""
    out = tmp_path_factory.mktemp("runs") / "full"
    posttrain.run("grpo", "rl.steps=1", *SMALL, reward, out=out, quiet=True)
    return out


@pytest.fixture(scope="module")
def model(full: Path) -> Path:
    """The same weights as a plain model."""
    return Path(posttrain.export(full, full.parent / "model"))


Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(reward: str) -> Train:
    def trained(model: Path, out: Path, steps: int, *more: str, lora: Sequence[str] = LORA) -> Path:
        settings = (f"model={model}", f"rl.steps={steps}", *SMALL, *lora, reward, *more)
        posttrain.run("grpo", *settings, out=out, quiet=True)
        return out

    return trained


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(find(folder, "last").folder / "weights.safetensors")


def same(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_run_goes_on_bit_for_bit(train: Train, model: Path, tmp_path: Path) -> None:
    straight, cut = train(model, tmp_path / "a", 4), train(model, tmp_path / "b", 2)
    assert not same(straight, cut)
    posttrain.run(resume=cut, steps=4, quiet=True)
    assert same(straight, cut)


def test_checkpoints_hold_the_adapter_alone_and_the_record_its_base(train: Train, model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "a", 2, "pull=kl", "pull.coef=0.1")
    held = weights(run)
    assert all("lora_" in n or n.startswith("value_head.") for n in held)
    assert (
        sum(t.numel() for t in held.values())
        < sum(t.numel() for t in load_file(model / "model.safetensors").values()) / 2
    )
    assert len(str(run_file(run).facts["base_digest"])) == 32
    assert not (run / "model" / "base.safetensors").exists(), "the base is where the user has it"
    assert steps(run)[-1].gauges["policy/kl_reference"].count > 0


def test_another_base_is_refused(train: Train, model: Path, tmp_path: Path) -> None:
    import shutil

    own = tmp_path / "model"
    shutil.copytree(model, own)
    for papers in ("certificate.json", "lineage.json"):  # as a model without them, whose change nothing else finds
        (own / papers).unlink()
    run = train(own, tmp_path / "a", 2)
    held = load_file(own / "model.safetensors")
    name = next(n for n in held if "mlp" in n)
    save_file({**held, name: held[name] + 1e-3}, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFolderError, match=r"model.path: .*model.safetensors was changed"):
        posttrain.run(resume=run, steps=4, quiet=True)
    for verb in (
        lambda: posttrain.run(resume=run, steps=4, accept_changed=True, quiet=True),  # nobody can accept it
        lambda: posttrain.export(run, tmp_path / "m"),
    ):
        with pytest.raises(RunFolderError, match="have changed since"):
            verb()


@pytest.mark.parametrize("kept", [True, False])
def test_a_branch_goes_on_with_the_adapter(train: Train, full: Path, model: Path, tmp_path: Path, kept: bool) -> None:
    """`kept`: the base is another run's, so the folder keeps it; else it is the model that the run was given. A branch
    keeps it in any case, and goes on without the other one."""
    first = train(full if kept else model, tmp_path / "a", 2)
    assert (first / "model" / "base.safetensors").exists() == kept
    second = train(first, tmp_path / "b", 2, lora=())
    assert run_file(second).run.model.lora == run_file(first).run.model.lora
    assert (second / "model" / "base.safetensors").exists()
    assert run_file(second).facts["base_digest"] == run_file(first).facts["base_digest"]
    third = train(second, tmp_path / "d", 2, lora=())
    assert run_file(third).facts["base_digest"] == run_file(first).facts["base_digest"]
    with pytest.raises(ConfigError, match="there is an adapter already"):
        train(first, tmp_path / "c", 2, lora=["model.lora.rank=2"])


def test_what_is_exported_computes_what_was_train(train: Train, model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "a", 2)
    merged, adapter = posttrain.export(run, tmp_path / "m"), posttrain.export(run, tmp_path / "p", adapter=True)
    one, two = (HFLearner(load_policy(tiny(path=str(x)), None, 0)) for x in (merged, adapter))
    np.testing.assert_allclose(one.score(packed(2, vocabulary=16)), two.score(packed(2, vocabulary=16)), atol=2e-5)
    found = saved_adapter(adapter)
    assert found is not None and found.lora.rank == 4 and Path(found.base) == model
    assert not np.allclose(
        one.score(packed(2, vocabulary=16)),
        HFLearner(load_policy(tiny(path=str(model)), None, 0)).score(packed(2, vocabulary=16)),
    )


def test_a_run_of_all_weights_has_no_adapter_to_export(full: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --adapter out"):
        posttrain.export(full, tmp_path / "x", adapter=True)


def test_an_adapter_over_another_run_says_the_way_out(train: Train, full: Path, tmp_path: Path) -> None:
    over = train(full, tmp_path / "over", 1)
    with pytest.raises(ConfigError, match=rf"train with model=my-base: .*export {full} my-base --checkpoint"):
        posttrain.export(over, tmp_path / "x", adapter=True)
    base = posttrain.export(full, tmp_path / "my-base")
    posttrain.export(train(Path(base), tmp_path / "again", 1), tmp_path / "alone", adapter=True)
    assert (tmp_path / "alone" / "adapter_config.json").exists()
