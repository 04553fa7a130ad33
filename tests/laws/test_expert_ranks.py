"""Law 2 over ranks that hold whole experts (expert parallelism): a mixture divided over 1, 2 and 4 processes trains as
in one; its weights and scores; planted faults; what is refused.

All processes are started once, and every test reads what they found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_tasks import EXPERTS, FAULTS, CompareExperts, Mixed, PlantExperts, RoundOtherwise, TogetherExperts
from law_ranks import LARGE, WORLDS, Distance, over_ranks

pytestmark = pytest.mark.prove

BOUND, BOUND32 = 1e-12, 5e-6
"""As in `test_ranks`."""
CASES = (
    *(Mixed(loss, arch) for arch in ("qwen3_moe", "mixtral") for loss in ("policy", "likelihood")),
    Mixed("preference", micro_tokens=LARGE),
    Mixed("policy with values", checkpointing="full"),
    Mixed("policy", given="any"),
    Mixed("likelihood", "mixtral", given="two"),
    Mixed("policy", given="any", balanced=True),
)
NARROW = (Mixed("policy", narrow=True), Mixed("likelihood", "mixtral", narrow=True, given="two"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tasks = {
        "exact": CompareExperts(CASES),
        "narrow": CompareExperts(NARROW),
        "together": TogetherExperts(CASES[0]),
        "otherwise": RoundOtherwise(CASES[0]),
        "faults": PlantExperts(CASES[0]),
    }
    return over_ranks(tasks, tmp_path_factory.mktemp("ranks"))


def given(found: list[dict[str, Any]], task: str) -> list[Any]:
    """What the task returned on each rank."""
    out = [one[task] for one in found]
    assert not any(isinstance(x, str) for x in out), next(x for x in out if isinstance(x, str))
    return out


def worst(d: Distance) -> float:
    """Of a gradient relative to its largest number where that is above 1: some losses here have large ones."""
    return max(d.gradient / max(1.0, d.size), d.weights, d.norm)


def test_ranks_train_as_one_process(found: list[dict[str, Any]]) -> None:
    """In float64: every gradient before the clip, and the weights after two clipped updates."""
    table: dict[tuple[Mixed, int], Distance] = given(found, "exact")[0]
    assert len(table) == len(CASES) * len(WORLDS)
    print(f"{len(table)} cases in float64: {max(map(worst, table.values())):.2g}")
    wrong = {key: d for key, d in table.items() if not worst(d) <= BOUND}
    assert not wrong, wrong
    assert min(d.size for d in table.values()) > 1e-3


def test_in_float32_they_differ_by_rounding(found: list[dict[str, Any]]) -> None:
    table: dict[tuple[Mixed, int], Distance] = given(found, "narrow")[0]
    assert len(table) == len(NARROW) * len(WORLDS)
    gaps = [max(d.gradient / d.size, d.norm) for d in table.values()]
    print(f"{len(table)} cases in float32: {max(gaps):.2g} (bound {BOUND32:g})")
    assert max(gaps) <= BOUND32


def test_a_rank_holds_its_experts_and_an_engine_is_sent_all(found: list[dict[str, Any]]) -> None:
    every = given(found, "together")
    for said in every:
        assert len(said["own"]) == 4 and all(shape[0] == EXPERTS // 4 for shape in said["own"].values())
        assert np.array_equal(said["score"], every[0]["score"])
    assert every[0]["arrived"] and every[0]["gap"] < 1e-6


def test_what_rounding_decides_is_decided_by_the_first_rank(found: list[dict[str, Any]]) -> None:
    """The experts of a token, and gradients of weights that every rank has; not what differs by more than rounding."""
    every = given(found, "otherwise")
    assert len({said["whole"] for said in every}) == 1 and every[0]["tensors"] > 8
    assert worst(every[0]["distance"]) <= BOUND
    assert all("gone different ways" in said["said"] for said in every)


def test_what_cannot_be_divided_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    words = {
        "uneven": "4 ranks cannot share 6 experts of Qwen3MoeForCausalLM evenly",
        "dense": "Qwen3ForCausalLM has no plan of whole experts in transformers",
        "bfloat16": "expert parallelism computes on CPU in float32 here",
        "adapter": "expert parallelism trains all weights",
    }
    for said in given(found, "together"):
        assert said["refused"].keys() == words.keys()
        assert all(words[name] in text for name, text in said["refused"].items()), said["refused"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, found: list[dict[str, Any]]) -> None:
    """By a check on every rank, or by the law."""
    said, by = [one[name] for one in given(found, "faults")], FAULTS[name][1]
    if by == "law":
        far = [max(d.gradient / d.size, d.norm, d.weights) if isinstance(d, Distance) else d for d in said]
        assert all(isinstance(x, float) and not x <= 10 * BOUND32 for x in far), far
    else:
        assert all(isinstance(text, str) and by in text for text in said), said
