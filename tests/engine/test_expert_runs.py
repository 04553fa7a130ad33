"""Runs of mixtures of experts: killed and resumed, exported with a certificate, frozen in part, with a learning rate of
the routers' own, and with an adapter."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.config.model_settings import ALL_LINEAR, Lora
from posttrain.config.run import Model, Optimizer, Run
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.record import run_reader
from posttrain.record.certificate import CERTIFICATE, verify_certificate
from posttrain.system.errors import ConfigError
from tests import families
from tests.engine.engine_parts import ALPHABET
from tests.engine.test_experts import ARCHS, MIXTURE, moe_run, weights
from tests.prove.test_kill_sweep import digest, finish, instants, kill_after, resume, start
from tests.tiny import MODEL

pytestmark = pytest.mark.prove

REPLAYS = "sampler"


def swept(arch: Any) -> Run:
    """SFT, then RL that follows the sampler's experts, with a load-balance loss and several minibatches."""
    run = moe_run(arch, steps=4, minibatches=2, eval_every=2, checkpoint_every=1, router_aux_loss_coef=0.01)
    return replace(run, model=replace(run.model, router_replay=REPLAYS))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_mixture_killed_at_any_instant_and_resumed_is_one_never_killed(arch: str, tmp_path: Path) -> None:
    """Weights, optimizer state, record and choices, bit for bit."""
    run = swept(arch)
    begun = time.monotonic()
    wanted = finish(tmp_path / "whole", run)
    seconds = time.monotonic() - begun
    for i, instant in enumerate(instants(seconds, 4)):
        kill_after(instant, start(tmp_path / f"run{i}", run))
        assert finish(tmp_path / f"run{i}", run) == wanted, f"killed after {instant:.3f} s, resumed, and differs"
    for share in (0.5, 0.3):
        kill_after(share * seconds, resume(tmp_path / "twice", run))
    assert finish(tmp_path / "twice", run) == wanted == digest(tmp_path / "whole")


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_exported_of_a_mixture_has_a_certificate(arch: str, tmp_path: Path) -> None:
    """Plain transformers computes what the learner does, and says where experts went."""
    run = replace(moe_run(arch, steps=2), model=replace(MODEL, arch=arch, **MIXTURE, router_replay=REPLAYS))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    made = Path(posttrain.export(tmp_path / "run", tmp_path / "model"))
    assert (made / CERTIFICATE).exists() and verify_certificate(made)
    plain: Any = AutoModelForCausalLM.from_pretrained(made)
    ours = load_policy(Model(path=str(made), context=64), None, 0)
    ids = torch.arange(20)[None] % 9
    with torch.no_grad():
        told = plain(input_ids=ids, output_router_logits=True)
    assert len(told.router_logits) == 2
    out = HFLearner(ours)._reader.out
    with torch.no_grad():
        hidden = out.hidden(ids[0], torch.arange(20), PackedLayout([20]))
        assert float((out.logits(hidden) - told.logits[0]).abs().max()) < 1e-4


# --- what trains ------------------------------------------------------------------------------------------------------


def one_step(config: Optimizer) -> dict[str, float]:
    """How far each weight of a mixture moved in one step of the optimizer, the largest number of each."""
    learner = HFLearner(load_policy(replace(MODEL, arch="qwen3_moe", **MIXTURE), ALPHABET, 0))
    optimizer = StageOptimizer(learner.parameters(), config)
    before = {n: p.detach().clone() for n, p in learner.parameters().items()}
    for p in optimizer.trained().values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {n: float((p.detach() - before[n]).abs().max()) for n, p in learner.parameters().items()}


def test_routers_have_a_learning_rate_of_their_own() -> None:
    moved = one_step(Optimizer(lr=1e-2, warmup=0, clip=1e9, rates=(("mlp.gate", 0.1),)))
    gates = {n for n in moved if n.endswith("mlp.gate.weight")}
    assert len(gates) == 2
    for name, size in moved.items():
        assert size == pytest.approx(1e-3 if name in gates else 1e-2, rel=1e-3), name


@pytest.mark.parametrize("pattern", ["mlp.gate", "mlp.experts", "self_attn"])
def test_what_is_frozen_stays_and_everything_else_moves(pattern: str, tmp_path: Path) -> None:
    """Over a whole run of reinforcement, by the exported weights, bit for bit."""
    run = moe_run(steps=3, checkpoint_every=0, optimizer=Optimizer(lr=3e-3, warmup=0))
    words = (f"model.router_replay={REPLAYS}", f"rl.optimizer.freeze={pattern}")
    posttrain.run(run, *words, out=tmp_path / "run", quiet=True)
    posttrain.run(replace(run, stages=run.stages[:1]), words[0], out=tmp_path / "before", quiet=True)
    after, before = (weights(Path(posttrain.export(tmp_path / n, tmp_path / f"{n}-m"))) for n in ("run", "before"))
    same = {n for n in after if torch.equal(after[n], before[n])}
    assert same == {n for n in after if pattern in n}
    assert [s for s in run_reader.steps(tmp_path / "run") if "canary/frozen" in s.gauges]


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_of_a_mixture_trains_its_attention_alone(tmp_path: Path) -> None:
    """Experts and routers are no linear layers to PEFT. Their weights stay; the adapter trains and is exported."""
    base = replace(moe_run(checkpoint_every=0), stages=moe_run().stages[:1])
    posttrain.run(base, out=tmp_path / "base", quiet=True)
    model = Path(posttrain.export(tmp_path / "base", tmp_path / "model"))
    lora = ("model.lora.rank=4", "model.lora.alpha=16", f"model.router_replay={REPLAYS}")
    run = replace(moe_run(), model=Model(path=str(model), context=64), stages=moe_run().stages[1:], keep_checkpoints=9)
    posttrain.run(run, *lora, out=tmp_path / "run", quiet=True)
    done = weights(Path(posttrain.export(tmp_path / "run", tmp_path / "one")))
    before = weights(model)
    moved = {n for n in done if not torch.equal(done[n], before[n])}
    assert moved and all("self_attn" in n for n in moved)
    assert verify_certificate(tmp_path / "one")
    posttrain.run(resume=next((tmp_path / "run" / "checkpoints").glob("*-rl-000002")), quiet=True)
    again = weights(Path(posttrain.export(tmp_path / "run", tmp_path / "two")))
    assert all(torch.equal(done[n], again[n]) for n in done)
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert all(s.gauges["experts/gap_replayed"].mean < 1e-5 for s in steps)


@pytest.mark.parametrize("target", ["gate_up_proj", "gate", "experts"])
def test_an_adapter_of_experts_or_routers_is_refused_by_name(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.targets={target}.*q_proj"):
        posttrain.run(moe_run(), "model.lora.rank=2", f"model.lora.targets={target}", out=tmp_path / "r", quiet=True)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("qwen2_moe", ""), ("deepseek_v3", "q_a_proj,.*,o_proj"), ("qwen3_next", "in_proj_qkvz,.*,o_proj")],
)
def test_all_linear_takes_the_linear_layers_of_a_mixture_or_says_which_targets_work(family: str, wanted: str) -> None:
    """Of some families PEFT takes every layer that is called as an expert was for the experts."""
    module, every = families.build(families.config(family)), Lora(rank=2, targets=(ALL_LINEAR,))
    if not wanted:
        adapter_modules.attach(module, every, 0)
        assert any("shared_expert.up_proj" in name for name in adapter_modules.layers(module))
        return
    with pytest.raises(ConfigError, match=f"Set model.lora.targets={wanted}") as told:
        adapter_modules.attach(module, every, 0)
    module, targets = families.build(families.config(family)), str(told.value).rpartition("=")[2].split(",")
    adapter_modules.attach(module, replace(every, targets=tuple(targets)), 0)
    assert {n.rpartition(".")[2] for n in adapter_modules.layers(module)} == {*targets}
