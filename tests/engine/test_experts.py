"""Mixtures of experts as models of runs: settings, checks and gauges, going on, export, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.checks.learning.expert_checks import (
    FollowedExpert,
    certain_load,
    choices_are_the_samplers,
    differing,
    every_token_has_its_experts,
    experts_learn,
    experts_moved,
    learned_from,
    load_gauges,
)
from posttrain.config.engines import VLLM
from posttrain.config.run import Model, Optimizer, Run, Supervised
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.expert_choices import UNKNOWN, RoutedPass
from posttrain.engine.model.policy_model import load_policy
from posttrain.record import run_reader
from posttrain.role.learner_passes import Needs, Passes
from posttrain.system.errors import ConfigError, InvariantError
from tests.engine.engine_parts import ALPHABET, packed
from tests.tiny import MODEL, tiny_run

ARCHS = ("qwen3_moe", "mixtral")
MIXTURE: dict[str, Any] = {"experts": 4, "experts_per_token": 2}


def moe_run(arch: Any = "qwen3_moe", **rl: Any) -> Run:
    run = tiny_run(**rl)
    sft = replace(run.stages[0], steps=30)
    return replace(run, model=replace(MODEL, arch=arch, **MIXTURE), stages=(sft, *run.stages[1:]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.prove
@pytest.mark.parametrize("arch", ARCHS)
def test_a_mixture_trains_goes_on_and_is_exported(arch: str, tmp_path: Path) -> None:
    """The run is not stopped, one that is resumed ends with the same weights, and plain transformers reads them."""
    run = replace(moe_run(arch), keep_checkpoints=9)
    words = ("model.router_replay=sampler", "rl.router_aux_loss_coef=0.01")
    posttrain.run(run, *words, out=tmp_path / "run", quiet=True)
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert len(steps) == 3
    for step in steps:
        names = {n.removeprefix("experts/") for n in step.gauges if n.startswith("experts/")}
        assert names >= {"load_most", "load_entropy", "dead", "differ", "tokens_differ", "regret", "balance_loss"}
        assert names >= {"gap_replayed", "gap_alone", "drift", "rerouted"}
        assert step.gauges["experts/gap_replayed"].mean < 1e-5 and step.gauges["experts/regret"].mean < 1e-3
        assert step.gauges["canary/router_replay"].mean < 1e-4
        assert not [n for n in step.notes if n.startswith("rule ")]
    done = weights(Path(posttrain.export(tmp_path / "run", tmp_path / "one")))
    assert any("experts" in n for n in done)
    cut = next((tmp_path / "run" / "checkpoints").glob("*-rl-000002"))
    posttrain.run(resume=cut, quiet=True)
    again = weights(Path(posttrain.export(tmp_path / "run", tmp_path / "two")))
    assert done.keys() == again.keys() and all(torch.equal(done[n], again[n]) for n in done)


@pytest.mark.prove
@pytest.mark.parametrize(
    "words",
    [
        ("model.router_replay=start", "rl.minibatches=2", "rl.epochs=2"),
        ("model.router_replay=sampler", "rl.staleness=1"),
        ("rl.optimizer.freeze=mlp.gate", "model.router_replay=sampler"),
        ("rl.optimizer.rates=mlp.gate:0.1", "model.dtype=bfloat16", "model.router_replay=sampler"),
        ("model.gradient_checkpointing=full", "model.router_replay=sampler", "rl.router_aux_loss_coef=0.001"),
        ("model.experts_per_token=1",),
    ],
)
def test_settings_of_mixtures_are_healthy(words: tuple[str, ...], tmp_path: Path) -> None:
    posttrain.run(moe_run(checkpoint_every=0), *words, out=tmp_path / "run", quiet=True)
    assert [s.index for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"] == [1, 2, 3]


def test_a_load_balance_loss_that_a_config_asks_for_is_told(tmp_path: Path) -> None:
    made = load_policy(moe_run("mixtral").model, ALPHABET, 0)
    assert not [n for n in made.notes if "load-balance" in n]
    made.module.config.output_router_logits, made.module.config.router_aux_loss_coef = True, 0.02
    made.write(tmp_path)
    told = [n for n in load_policy(Model(path=str(tmp_path)), None, 0).notes if "load-balance" in n]
    assert len(told) == 1 and "router_aux_loss_coef=0.02)" in told[0]


@pytest.mark.prove
def test_a_frozen_router_stays_and_its_experts_learn(tmp_path: Path) -> None:
    run = replace(moe_run(checkpoint_every=0), stages=moe_run().stages[:1])
    frozen = ("sft.optimizer.freeze=mlp.gate", "sft.checkpoint_every=0")
    posttrain.run(run, *frozen, out=tmp_path / "run", quiet=True)
    posttrain.run(run, *frozen, "sft.steps=1", out=tmp_path / "short", quiet=True)
    a, b = (weights(Path(posttrain.export(tmp_path / n, tmp_path / f"{n}-model"))) for n in ("run", "short"))
    gates = [n for n in a if n.endswith("mlp.gate.weight")]
    assert len(gates) == 2 and all(torch.equal(a[n], b[n]) for n in gates)
    assert not any(torch.equal(a[n], b[n]) for n in a if "experts" in n)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "qwen3", "router_replay": "sampler"}, "qwen3 has no router"),
        ({"arch": "mixtral", "router_replay": "start", "compile": True}, "compile=true"),
        ({"arch": "mixtral", "experts": 2, "experts_per_token": 3}, "experts_per_token=3"),
        ({"arch": "mixtral", "experts": 0}, "experts=0"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Model(**changes)


def test_another_engine_records_no_choices() -> None:
    run = moe_run()
    with pytest.raises(ConfigError, match=r"router_replay=sampler.*vLLM.*start"):
        replace(run, engine=VLLM(), model=replace(run.model, router_replay="sampler"))
    assert replace(run, engine=VLLM(), model=replace(run.model, router_replay="start"))
    balanced = replace(run.stages[1], router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match="rl.router_aux_loss_coef reads which experts"):
        replace(run, engine=VLLM(), stages=(run.stages[0], balanced))


def test_a_dense_model_has_no_load_to_balance(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl.router_aux_loss_coef=0.1.*no router"):
        posttrain.run(tiny_run(), "rl.router_aux_loss_coef=0.1", out=tmp_path / "run", quiet=True)


# --- the checks by themselves -----------------------------------------------------------------------------------------


def routed(packed_: Packed, expert: int = 0) -> Packed:
    n = len(packed_.ids_N)
    choices = np.stack([np.arange(n) % 4, (np.arange(n) + 1 + expert) % 4], 1)[:, None, :].astype(np.int16)
    choices[np.cumsum(packed_.lengths_S) - 1] = UNKNOWN
    return replace(packed_, routed_N=choices)


def told(p: Packed, regret: float = -1.0, moved: bool = False) -> RoutedPass:
    assert p.routed_N is not None
    used = np.where(p.routed_N == UNKNOWN, 0, p.routed_N).astype(np.int16)
    if moved:
        used = np.roll(used, 1, 0)
    return RoutedPass(used, used, np.full((len(used), 1), regret, np.float32), 2.0, np.zeros(p.spoken))


def test_choices_of_other_weights_stop_the_run() -> None:
    p = routed(packed())
    fresh = np.ones(len(p.ids_N), bool)
    assert choices_are_the_samplers(told(p), p, fresh, "float32")["experts/regret"].mean == -1
    with pytest.raises(InvariantError, match="not those of its weights"):
        choices_are_the_samplers(told(p, 0.1), p, fresh, "float32")
    assert choices_are_the_samplers(told(p, 0.1), p, fresh, "bfloat16")
    assert not choices_are_the_samplers(told(p, 0.1), p, ~fresh, "float32")
    with pytest.raises(InvariantError, match="not taken up"):
        choices_are_the_samplers(told(p, moved=True), p, fresh, "float32")


def test_a_lost_choice_stops_the_run() -> None:
    p = routed(packed())
    every_token_has_its_experts(p)
    assert p.routed_N is not None
    lost = p.routed_N.copy()
    lost[p.source_M[0]] = UNKNOWN
    with pytest.raises(InvariantError, match="the experts of 1 of"):
        every_token_has_its_experts(replace(p, routed_N=lost))


class Routers:
    experts, names, stacked, held, of_all = 4, ("gate",), (("up",),), slice(None), staticmethod(np.asarray)

    def read(self, packed: Packed, *, replay: bool) -> RoutedPass:
        raise NotImplementedError


def learning(**zero: Any) -> tuple[Batch, dict[str, torch.nn.Parameter]]:
    p = routed(packed(12))
    fields = {n: getattr(p, n) for n in ("ids_N", "lengths_S", "source_M", "target_M", "segment_M", "sequence_S")}
    batch = Batch(**fields, sampling=p.sampling, routed_N=p.routed_N)
    trained = {"gate": torch.nn.Parameter(torch.ones(4, 3)), "up": torch.nn.Parameter(torch.ones(4, 2, 3))}
    for t in trained.values():
        t.grad = torch.ones_like(t)
    return batch, trained


def test_an_expert_without_a_gradient_stops_the_run() -> None:
    batch, trained = learning()
    move, heard = lambda name, g, at: -1e-3, np.ones(batch.spoken, bool)
    followed = experts_learn(batch, Routers(), trained, move, 0, heard)
    assert {f.expert for f in followed} == {0, 1, 2, 3}
    trained["up"].grad[2] = 0  # type: ignore[index]
    with pytest.raises(InvariantError, match="expert 2 of up has no gradient"):
        experts_learn(batch, Routers(), trained, move, 0, heard)
    assert experts_learn(batch, Routers(), trained, move, 0, ~heard) == [], "no token of it asks for anything"
    batch, trained = learning()
    trained["gate"].grad = None
    with pytest.raises(InvariantError, match="router gate has no gradient"):
        experts_learn(batch, Routers(), trained, move, 0, heard)
    del trained["gate"]  # frozen
    assert experts_learn(batch, Routers(), trained, move, 0, heard)


def test_tokens_that_the_loss_asks_nothing_of_or_that_were_certain_are_not_learned_from() -> None:
    """Credit does not tell it: a trust region silences a token, and a set of one kept token makes it certain."""
    batch, _ = learning()
    asked, logp = np.ones(batch.spoken), np.full(batch.spoken, -1.0)
    asked[0], logp[1], logp[2] = 0, 0, -1e-8
    passes = Passes(Needs(gradients=True), [batch], [np.arange(batch.episodes)], [logp], [asked])
    assert np.flatnonzero(~learned_from(batch, passes)).tolist() == [0, 1, 2]


@pytest.mark.prove
@pytest.mark.parametrize(
    "words",
    [
        "rl.sampling.top_p=0.9",
        *(pytest.param(f"rl.algorithm={x}", marks=pytest.mark.prove) for x in ("top_entropy", "sdft")),
    ],
)
def test_a_mixture_whose_tokens_ask_for_little_is_not_stopped(words: str, tmp_path: Path) -> None:
    more = ("model.arch=mixtral", "model.hidden=32", "model.ffn=64", "sft.batch=16", "sft.eval=false")
    more += ("sft.steps=60", "rl.steps=4", "rl.prompts=4", "rl.siblings=4", "env.heldout=8", "rl.eval_every=0")
    more += ("evaluation.samples=1", "evaluation.greedy=false", "seed=1")
    recipe = "arithmetic" if "sdft" in words else "verifiable"
    done = posttrain.run(recipe, *more, words, out=tmp_path / "run", quiet=True)
    assert [s.steps for s in done.stages][-1] == 4


def test_an_expert_that_a_choosing_learner_may_not_have_used_stops_nothing() -> None:
    """The batch has the sampler's choices. A learner that follows none may have made others, of older weights or where
    two experts score alike; what it chose without doubt must learn all the same."""
    (batch, trained), move = learning(), lambda name, g, at: -1e-3
    heard = np.ones(batch.spoken, bool)
    trained["up"].grad[2] = 0  # type: ignore[index]
    n, k = batch.routed_N.shape[0], batch.routed_N.shape[2]
    used = RoutedPass(batch.routed_N, batch.routed_N, np.full((n, 1), -1.0), 1.0, np.zeros(batch.spoken, np.float32))
    tied = replace(used, regret=np.full((n, 1), -1e-4))
    others = replace(used, own=np.full((n, 1, k), 3, np.int16))
    for alone in (tied, others):
        assert experts_learn(
            batch, Routers(), trained, move, 0, heard, lambda a=alone: certain_load(batch, heard, a, 4, "float32")
        )
    with pytest.raises(InvariantError, match="expert 2 of up has no gradient"):
        experts_learn(batch, Routers(), trained, move, 0, heard, lambda: certain_load(batch, heard, used, 4, "float32"))


def test_an_expert_that_stays_stops_the_run() -> None:
    trained = {"up": torch.zeros(4, 2)}
    followed = [FollowedExpert("up", 1, 3, 0.0), FollowedExpert("up", 0, 0, 1.0)]
    with pytest.raises(InvariantError, match="expert 1 of up has a gradient and did not move"):
        experts_moved(followed, trained)
    assert experts_moved(followed[1:], trained)["canary/experts_moved"].sum == 1


def test_gauges_of_load_and_of_differences() -> None:
    even = np.array([[[0, 1]], [[2, 3]]], np.int16)
    found = load_gauges(even, 4)
    assert found["experts/load_most"].mean == 1 and found["experts/dead"].mean == 0
    assert found["experts/load_entropy"].mean == pytest.approx(1)
    one = load_gauges(np.zeros((5, 2, 1), np.int16), 4)
    assert one["experts/load_most"].mean == 4 and one["experts/dead"].mean == 0.75
    a = np.array([[[0, 1], [0, 1]], [[2, 3], [0, 1]]], np.int16)
    b = np.array([[[1, 0], [0, 1]], [[2, 1], [0, 1]]], np.int16)
    assert differing(a, b) == (0.25, 0.5)


@pytest.mark.prove
def test_supervised_stages_of_a_mixture_are_as_they_were(tmp_path: Path) -> None:
    sft = Supervised(name="sft", style="answer", steps=3, batch=8, optimizer=Optimizer(lr=3e-3), eval=False)
    run = replace(moe_run(), stages=(sft,), model=replace(MODEL, arch="mixtral", router_replay="sampler"))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    assert len(run_reader.steps(tmp_path / "run")) == 3
