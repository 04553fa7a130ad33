"""Published effects in miniature, on three seeds or more: every statement of docs/research/miniatures.md is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.miniatures.__main__ import NAMES, miniature
from benchmarks.miniatures.miniature import mean
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import GDPO, GRPO, MAXRL, PKPO, REINFORCE_PP_BASELINE
from posttrain.toy.answers import Answers
from posttrain.toy.training import credit_by_pattern, credit_in_full

pytestmark = pytest.mark.prove


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever ran before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_asserts(name: str) -> None:
    m = miniature(name)
    each = [m.play(seed).figures for seed in m.seeds]
    figures = mean(each)
    print(
        "", *(f"{arm}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()) for arm, row in figures.items()), sep="\n"
    )
    false = [s.text for s in m.judge(figures, each) if not s.true]
    assert not false, f"{m.claim}\nnot so: {false}\n{figures}"


@pytest.mark.parametrize(
    "a", [replace(GRPO, pull=None), GDPO, MAXRL, PKPO, REINFORCE_PP_BASELINE], ids=lambda a: a.name
)
def test_remembered_credit_is_the_step_s(a: Algorithm) -> None:
    """The harness asks `credit_step` once for every pattern of rewards; one call over the whole step says the same."""
    rewards = (np.random.default_rng(0).random((9, 8, 2 if a is GDPO else 1)) < 0.4).astype(float)
    answers = Answers(
        torch.zeros(72, dtype=torch.int64), torch.zeros(72, 1, dtype=torch.int64), torch.full((72, 1), -1.0).double()
    )
    assert credit_by_pattern(a, rewards).ravel() == pytest.approx(
        credit_in_full(a, rewards, answers).ravel(), abs=1e-12
    )
