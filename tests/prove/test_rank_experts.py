"""Runs over ranks that hold whole experts of a mixture (`--parallel experts`): the run of one process, also where
choices are replayed and the load is balanced, and where it is cut and gone on with in another way; planted faults; and
what is refused by name."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from benchmarks.trust.healthy_experts import undecided
from posttrain.api import main
from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.stage import Stage
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError
from tests.faulty import catch, smallest
from tests.killing import cut_run
from tests.mutants import FAULTS
from tests.over_ranks import BOUND, apart, drawn, is_that_of_one_process, run_of
from tests.prove.test_rank_runs import STAGES

pytestmark = pytest.mark.prove

EXPERTS: dict[str, Any] = {"nproc": 2, "parallel": "experts"}
ALONE: dict[str, Any] = {}


def mixture(model: dict[str, Any] | None = None, **rl: Any) -> Run:
    """The run of `run_of` of a mixture of 8 experts, 2 of a token."""
    made = {"arch": "qwen3_moe", "experts": 8, "experts_per_token": 2} | (model or {})
    run = run_of(made, **rl)
    return replace(run, deterministic=False, stages=tuple(map(steady, run.stages)))


def steady(stage: Stage) -> Stage:
    """The stage with an `eps` above the rounding of gradients: some experts compute few tokens, with little weight, and
    Adam would make a whole move of rounding."""
    return replace(stage, optimizer=replace(stage.optimizer, eps=1e-5))


KINDS: dict[str, Run] = {
    "own choices": mixture(),
    "the sampler's choices": mixture({"router_replay": "sampler", "arch": "mixtral"}),
    "choices of the start, balanced": mixture(
        {"router_replay": "start"}, router_aux_loss_coef=0.01, micro_tokens=64, minibatches=2
    ),
    "older samples": mixture({"router_replay": "sampler"}, staleness=1),
    "layers computed again": mixture({"router_replay": "sampler", "gradient_checkpointing": "full"}),
}
PARTS = drawn(["cut", "others"], 1)
"""What is played here, beside a kind of run and faults."""


@pytest.mark.parametrize("kind", drawn(KINDS, 1))
def test_ranks_train_to_what_one_process_comes_to(kind: str, tmp_path: Path) -> None:
    """Imitation, and reinforcement with a reference."""
    main.run(KINDS[kind], out=tmp_path / "one", quiet=True)
    for world in drawn(["2", "4"], 1):
        main.run(KINDS[kind], out=tmp_path / world, quiet=True, nproc=int(world), parallel="experts")
        is_that_of_one_process(tmp_path / "one", tmp_path / world)
        told, wanted = (run_reader.steps(tmp_path / x)[-1].gauges for x in (world, "one"))
        assert {n for n in told if n.startswith("experts/")} == {n for n in wanted if n.startswith("experts/")} != set()


WAYS = {
    "experts to experts": (EXPERTS, EXPERTS),
    "two to four": (EXPERTS, EXPERTS | {"nproc": 4}),
    "experts to one": (EXPERTS, ALONE),
    "one to experts": (ALONE, EXPERTS),
}


@pytest.mark.skipif("cut" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("way", drawn(WAYS, 1))
def test_a_run_that_was_cut_goes_on_in_another_way(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main.run(mixture(), out=tmp_path / "one", quiet=True)
    first, then = WAYS[way]
    cut_run(mixture(), tmp_path / way, monkeypatch, **first)
    main.run(resume=tmp_path / way, quiet=True, **then)
    is_that_of_one_process(tmp_path / "one", tmp_path / way)


@pytest.mark.skipif("others" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("kind", drawn(STAGES, 1))
def test_preferences(kind: str, tmp_path: Path) -> None:
    run = replace(mixture(), stages=(mixture().stages[0], steady(STAGES[kind])))
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "experts", quiet=True, **EXPERTS)
    gap = apart(tmp_path / "one", tmp_path / "experts")
    print(f"{kind}: a weight differs by at most {gap:.2g} (bound {BOUND:g})")
    assert gap <= BOUND


REFUSED: dict[str, tuple[Run, dict[str, Any]]] = {
    "shares whole experts, and model.arch=qwen3 has none": (run_of(), EXPERTS),
    "3 ranks cannot share model.experts=8": (mixture(), EXPERTS | {"nproc": 3}),
    "copies of such weights are not built": (mixture(), EXPERTS | {"replicas": 2}),
    "computes in float32 so far": (mixture({"dtype": "bfloat16"}), EXPERTS),
    "--parallel experts": (mixture(), {"nproc": 2}),
    "has no plan of columns and rows": (mixture({"kv_heads": 2}), {"nproc": 2, "parallel": "tensor"}),
}


@pytest.mark.skipif("others" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_shared_so_is_refused_by_name(why: str, tmp_path: Path) -> None:
    run, how = REFUSED[why]
    with pytest.raises(ConfigError, match=why):
        main.run(run, out=tmp_path / "run", quiet=True, **how)
    assert not (tmp_path / "run").exists()


def any_run(rng: random.Random) -> Run:
    """A run of a mixture, as people may set it."""
    experts = rng.choice([4, 8])
    model = {
        "arch": rng.choice(["qwen3_moe", "mixtral"]),
        "experts": experts,
        "experts_per_token": rng.choice([1, 2, 2, 3]),
        "router_replay": rng.choice(["none", "sampler", "start"]),
        "gradient_checkpointing": rng.choice(["none", "none", "full"]),
    }
    rl = {
        "steps": rng.randint(3, 6),
        "staleness": rng.choice([0, 0, 1, 2]),
        "minibatches": rng.choice([1, 2]),
        "micro_tokens": rng.choice([64, 4096]),
        "router_aux_loss_coef": rng.choice([0.0, 0.0, 0.01]),
        "optimizer": Optimizer(lr=rng.choice([1e-3, 3e-3, 1e-2]), warmup=1),
    }
    return replace(run_of(model, **rl), deterministic=False, seed=rng.randrange(1000))


@pytest.mark.parametrize("number", drawn(map(str, range(8)), 1))
def test_a_healthy_run_is_not_disturbed(number: str, tmp_path: Path) -> None:
    """Also where experts score alike, but for rounding."""
    rng = random.Random(f"{os.environ.get('POSTTRAIN_SEED', '0')} {number}")
    run, world = any_run(rng), rng.choice([2, 2, 4])
    with undecided() if rng.random() < 0.4 else nullcontext():
        main.run(run, out=tmp_path / "run", quiet=True, nproc=world, parallel="experts")
    assert not [n for s in run_reader.steps(tmp_path / "run") for n in s.notes if n.startswith(("rule ", "stopped"))]


# --- faults -----------------------------------------------------------------------------------------------------------

SAYS = {
    "experts_of_another_rank": "scores a canary otherwise",
    "rank_experts_left_out": "scores a canary otherwise",
    "gradients_into_experts_not_summed": "gone different ways",
    "rank_experts_never_learn": "it would never learn",
}
"""Words of what the run says when it stops, whatever rank sees it first."""
OF_MIXTURES = [n for n, f in FAULTS.items() if f.needs == "experts"]


def test_all_of_them_are_here() -> None:
    assert [n for n, f in FAULTS.items() if f.needs == "rank_experts"] == list(SAYS)


@pytest.mark.parametrize("name", [*drawn(SAYS, 1), *drawn(OF_MIXTURES, 1)])
def test_a_planted_fault_stops_the_run(name: str, tmp_path: Path) -> None:
    """Those of such ranks, and those of every mixture."""
    found = catch(FAULTS[name], tmp_path / "no model is read", tmp_path, parallel="experts")
    assert found is not None
    print(f"{name}: {found.detector}, step {found.step}: {found.message[:200]}")
    assert SAYS.get(name, "") in found.message and found.kind != "rule"


def test_the_run_they_are_planted_in_is_healthy_without_them(tmp_path: Path) -> None:
    run = smallest(FAULTS["rank_experts_left_out"], tmp_path / "no model is read", tmp_path, steps=3)
    posttrain.run(run, out=tmp_path / "healthy", quiet=True, **EXPERTS)
    steps = run_reader.steps(tmp_path / "healthy")
    assert [s.index for s in steps] == [*range(1, 61), 1, 2, 3]
    assert not [n for s in steps for n in s.notes if n.startswith(("rule ", "stopped"))]
