"""Law 2 over ranks with adapters, weights below float32, copies of the weights (HSDP), layers computed again, shared
beginnings and offloaded parts; the weights they send, and scores divided over ranks.

All processes are started once, and every test reads what they found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from law_ranks import LARGE, SMALL, WORLDS, Case, Compare, Distance, over_ranks
from rank_wider import DORA, FAULTS, LORA, PlantWider, TogetherWider

pytestmark = pytest.mark.prove

BOUND, BOUND32 = 1e-12, 5e-6
"""As in `test_ranks`: in float64, and of the gradient's largest number where gradients are summed in float32."""
FOUR = ("policy", "preference", "ranking", "likelihood")
ADAPTERS = (
    *(Case(loss, SMALL, True, lora=LORA) for loss in FOUR),
    *(Case(loss, LARGE, lora=LORA) for loss in ("policy", "preference")),
    Case("policy", SMALL, arch="qwen3", lora=DORA),
    Case("policy with values", SMALL, arch="llama", lora=LORA),
)
COPIES = (
    *(Case(loss, SMALL, True, replicas=2) for loss in FOUR),
    *(Case(loss, LARGE, replicas=2) for loss in FOUR),
    Case("policy", SMALL, replicas=4),
    Case("policy", SMALL, arch="llama", lora=LORA, replicas=2),
)
LESS = (
    *(Case("policy", SMALL, arch="llama", checkpointing=how) for how in ("full", "selective")),
    Case("likelihood", SMALL, checkpointing="full", lora=LORA),
    *(Case(loss, LARGE, shared=10) for loss in FOUR),
    Case("policy", LARGE, shared=10, lora=LORA, checkpointing="full", replicas=2),
    Case("policy", SMALL, offload=True),
)
BFLOAT16 = (
    *(Case(loss, 1, loss in ("preference", "ranking"), arch="llama", dtype=torch.bfloat16) for loss in FOUR),
    Case("policy", 1, arch="qwen3", dtype=torch.bfloat16, checkpointing="full", replicas=2),
    Case("policy with values", 1, arch="llama", dtype=torch.float16),
    Case("policy", 1, arch="llama", dtype=torch.bfloat16, lora=LORA),
)
TENSOR = (
    *(Case(loss, SMALL if loss == "policy" else LARGE, loss == "ranking", "starcoder2", tensor=True) for loss in FOUR),
    Case("policy with values", SMALL, arch="starcoder2", tensor=True, checkpointing="full"),
)
"""Layers cut by columns and rows: every rank computes the whole minibatch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tasks = {
        "adapters": Compare(ADAPTERS),
        "copies": Compare(COPIES),
        "less": Compare(LESS),
        "tensor": Compare(TENSOR),
        "narrow": Compare(BFLOAT16),
        "together": TogetherWider(),
        "faults": PlantWider(),
    }
    return over_ranks(tasks, tmp_path_factory.mktemp("ranks"))


def given(found: list[dict[str, Any]], task: str) -> list[Any]:
    """What the task returned on each rank."""
    out = [one[task] for one in found]
    assert not any(isinstance(x, str) for x in out), next(x for x in out if isinstance(x, str))
    return out


def worst(table: dict[Any, Distance]) -> float:
    return max(max(d.gradient, d.weights, d.norm) for d in table.values())


@pytest.mark.parametrize(
    ("word", "cases"), [("adapters", ADAPTERS), ("copies", COPIES), ("less", LESS), ("tensor", TENSOR)]
)
def test_ranks_train_as_one_process(word: str, cases: tuple[Case, ...], found: list[dict[str, Any]]) -> None:
    """In float64, before the clip and after two clipped updates."""
    table: dict[tuple[Case, int], Distance] = given(found, word)[0]
    assert len(table) == sum(len(WORLDS) if case.replicas == 1 else 1 for case in cases)
    print(f"{word}, {len(table)} cases in float64: {worst(table):.2g}")
    wrong = {key: d for key, d in table.items() if not max(d.gradient, d.weights, d.norm) <= BOUND}
    assert not wrong, wrong
    assert min(d.size for d in table.values()) > 1e-3
    assert all(d.shared > 0.1 for (case, _), d in table.items() if case.shared)


def test_weights_below_float32_have_float32_masters(found: list[dict[str, Any]]) -> None:
    """The numbers that the passes round are the same, and they are summed and updated in float32. (The policy's cases
    keep their order: in the other one an episode's two segments change places within a pass.)"""
    table: dict[tuple[Case, int], Distance] = given(found, "narrow")[0]
    assert len(table) == 3 * (len(BFLOAT16) - 1) + 1
    gradient = max(d.gradient / d.size for d in table.values())
    print(f"{len(table)} cases below float32: gradients differ by {gradient:.2g} of their size (bound {BOUND32:g})")
    assert gradient <= BOUND32 and max(max(d.norm, d.weights) for d in table.values()) <= BOUND32


def test_an_engine_is_sent_what_it_computes_with(found: list[dict[str, Any]]) -> None:
    """The adapter's bytes alone; weights in their own type; each row of one copy once."""
    every = given(found, "together")
    first = every[0]
    for word in ("adapter", "bfloat16", "copies", "columns"):
        assert first[word]["arrived"] is True
        sent = sum(one[word]["sent"] for one in every)
        padding = 16 * 4 * first[word]["tensors"]
        assert sent <= first[word]["whole"] + 4 * padding or word == "columns", word  # what all have whole is padded
        assert all(one[word]["tensors"] == 0 for one in every[1:])
    assert first["adapter"]["whole"] < first["adapter"]["all"] / 3
    assert first["bfloat16"]["dtypes"] == ["torch.bfloat16"]


def test_scores_are_divided_over_ranks(found: list[dict[str, Any]]) -> None:
    """Every rank is told all of them, and computes a share."""
    every = [one["scores"] for one in given(found, "together")]
    for said in every:
        gaps = {word: x for word, x in said.items() if isinstance(x, float)}
        assert len(gaps) == 8 and max(gaps.values()) < 1e-6, gaps
        assert "asked to score different tokens" in said["other tokens"]
    assert sum(said["computed"] for said in every) < 1.5 * every[0]["asked"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, found: list[dict[str, Any]]) -> None:
    """By a check on every rank, or by the law."""
    said = [one[name] for one in given(found, "faults")]
    by = FAULTS[name][3]
    if by == "law":
        far = [max(d.gradient / d.size, d.norm) if isinstance(d, Distance) else d for d in said]
        assert all(isinstance(x, float) and not x <= 10 * BOUND32 for x in far), far
    else:
        assert all(isinstance(text, str) and by in text for text in said), said
