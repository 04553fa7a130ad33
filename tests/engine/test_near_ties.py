"""Where two experts score alike, rounding decides which of them computes a token. No proof at load and no check of a
run takes that for a fault, and faults are found there all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from benchmarks.trust.healthy_experts import tie, undecided
from posttrain.config.run import Model
from posttrain.core.batch import Packed
from posttrain.engine.layers import shared_prefixes
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.layers.expert_routing import Routing
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model import supported_models as accepting
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.record import run_reader
from posttrain.system.errors import EngineError, InvariantError, PosttrainError
from tests.engine.engine_parts import ALPHABET, segments
from tests.engine.test_experts import moe_run
from tests.mutants import FAULTS

pytestmark = pytest.mark.prove

SEEDS = range(24)
FIXED = ("sft.optimizer.freeze=mlp.gate",)
"""Imitation leaves the routers undecided."""


def drawn(seed: int) -> Policy:
    """A mixture drawn at random, whose routers are undecided by a spread drawn at random."""
    rng = np.random.default_rng(seed)
    experts, dtype = int(rng.choice([4, 6, 8])), "bfloat16" if rng.random() < 0.3 else "float32"
    model = Model(
        arch="qwen3_moe" if rng.random() < 0.5 else "mixtral",
        hidden=int(rng.choice([32, 64])),
        layers=int(rng.integers(1, 4)),
        heads=2,
        kv_heads=1,
        ffn=24,
        experts=experts,
        experts_per_token=int(rng.integers(1, 4)),
        context=64,
        dtype=dtype,
    )
    made = load_policy(model, ALPHABET, seed)
    tie(made.module, 10 ** rng.uniform(-9, -4), seed)
    return made


def alike(seed: int) -> Packed:
    """Segments that begin alike."""
    begun, found = np.arange(12, dtype=np.int32) % 9, list[Any]()
    for s in segments(6, seed=seed, longest=20):
        none = {"mask": np.zeros(12, bool), "logp": np.full(12, np.nan, np.float32), "version": np.full(12, -1)}
        parts = {n: np.concatenate([x.astype(getattr(s, n).dtype), getattr(s, n)]) for n, x in none.items()}
        found.append(replace(s, ids=np.concatenate([begun, s.ids]), **parts))
    return Packed.of(found)


# --- proofs at load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_no_mixture_is_refused_because_its_routers_are_undecided(seed: int) -> None:
    made = drawn(seed)
    accepting.accept(made.module, made.context)
    for s in range(3 * accepting.TRIES):  # not by luck: no sequence differs
        with torch.no_grad():
            assert accepting._difference(made.module, HFLearner(made)._reader.out, 24, s) == ""
    HFLearner(made).score(alike(seed))


def test_without_following_rounding_alone_would_refuse_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above means something."""
    monkeypatch.setattr(accepting, "following", lambda passes: None)
    differ = 0
    for seed in SEEDS:
        made = drawn(seed)
        with torch.no_grad():
            differ += any(accepting._difference(made.module, HFLearner(made)._reader.out, 24, s) for s in range(3))
    print(f"{differ} of {len(SEEDS)} mixtures have a sequence that another pass computes by other experts")
    assert differ >= 2


class _OneSegment(PackedLayout):
    """All segments attend as one."""

    def __init__(self, lengths: Any, *given: Any, **more: Any) -> None:
        super().__init__([int(sum(lengths))], *given, **more)


@pytest.mark.parametrize("seed", (0, 1, 2, 3))
def test_a_fault_of_packing_is_found_in_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = drawn(seed)
    monkeypatch.setattr(accepting, "PackedLayout", _OneSegment)
    with pytest.raises(EngineError, match=r"cannot be sampled and learned alike"):
        accepting.accept(made.module, made.context)


@pytest.mark.parametrize("seed", (0, 1, 2, 3))
def test_a_router_that_reads_another_token_is_found(seed: int) -> None:
    """In a pass of several sequences each router reads the hidden states of the token before."""
    made = drawn(seed)
    for part in made.module.modules():
        if type(part).__name__.endswith("Router"):
            real: Any = part.forward
            part.forward = lambda x, f=real: f(x.roll(1, 0) if len(x) > 24 else x)  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"cannot be sampled and learned alike"):
        accepting.accept(made.module, made.context)


def test_choices_that_are_not_those_of_the_pass_are_told_from_rounding() -> None:
    made = drawn(2)
    accepting.accept(made.module, made.context)
    with torch.no_grad():
        out, ids = HFLearner(made)._reader.out, torch.arange(24) % 9
        layout = PackedLayout([24])
        layout.routing = seen = Routing()
        out.hidden(ids, torch.arange(24), layout)
        own = seen.stacked(seen.used)
        for given, wrong in ((own, False), ((own + 2) % 4, True)):
            layout.routing = told = Routing(given, True)
            out.hidden(ids, torch.arange(24), layout)
            assert (told.chosen_by_more(made.dtype) > 1) == wrong


def test_wrong_sharing_is_found_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shared_prefixes.Sharing._shared
    monkeypatch.setattr(shared_prefixes.Sharing, "_shared", lambda self, *a: real(self, *a) * 1.3)
    with pytest.raises(InvariantError, match="computing shared beginnings once"):
        HFLearner(drawn(1)).score(alike(0))


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replay", ["none", "sampler", "start"])
def test_a_run_whose_routers_are_undecided_is_not_stopped(replay: str, dtype: str, tmp_path: Path) -> None:
    """By the plain definitions, which round each sequence otherwise in other company. Compiled code does not."""
    words = (f"model.router_replay={replay}", f"model.dtype={dtype}", "rl.optimizer.freeze=mlp.gate")
    by = "model.kernels=reference"
    with undecided():
        posttrain.run(moe_run(checkpoint_every=0, siblings=6), *FIXED, *words, by, out=tmp_path / "run", quiet=True)
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert len(steps) == 3 and not [n for s in steps for n in s.notes if n.startswith("rule ")]
    print(f"{max(s.gauges['experts/differ'].mean for s in steps):.3g} of choices differ")
    if dtype == "float32":
        assert max(s.gauges["experts/differ"].mean for s in steps) > 0.01, "the routers were decided after all"


@pytest.mark.parametrize("replay", ["none", "sampler"])
@pytest.mark.parametrize(
    "fault", ["sync_one_tensor_stale", "logp_shifted", "temperature_one_side", "sampler_colder_than_it_says"]
)
def test_a_fault_in_such_a_run_is_caught(fault: str, replay: str, tmp_path: Path) -> None:
    run = moe_run(checkpoint_every=0, siblings=6, steps=8)
    words = (*FAULTS[fault].shows, f"fault={fault}", f"model.router_replay={replay}", "rl.optimizer.freeze=mlp.gate")
    with undecided(), pytest.raises(PosttrainError):
        posttrain.run(run, *FIXED, *words, out=tmp_path / "run", quiet=True, allow_fault=True)
