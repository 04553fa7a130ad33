"""The math reward on two tables: right answers as models write them earn 1, and answers that are none earn 0."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("math_verify")

from benchmarks.trust.answers import pairs
from posttrain.config.env import Reward
from posttrain.config.field_docs import meaning
from posttrain.core.types import Task
from posttrain.core.verdict import State
from posttrain.verifier.math.math_reward import SECONDS, MathSource, math_source
from tests.verifier.layout_parts import table

SLOWEST = 3.0
"""Seconds of one verdict, the algebra's time-out among them."""


@pytest.fixture(scope="module")
def reward() -> Iterator[MathSource]:
    source = math_source(workers=1, timeout=2)
    yield source
    source.close()


def score(reward: MathSource, gold: str, response: str) -> float | None:
    """The score; the verdict has to come in time by this process's clock, and the worker's is bounded by its
    time-out."""
    began = time.process_time()
    verdict = reward.verdict(Task(id="t", prompt="p", answer=gold), response)
    assert time.process_time() - began < SLOWEST and verdict.state is State.VALUE, verdict
    return verdict.score


@pytest.mark.parametrize(("gold", "response"), table("math_honest", "math_second_honest"))
def test_a_right_answer_earns_one(reward: MathSource, gold: str, response: str) -> None:
    assert score(reward, gold, response) == 1.0


@pytest.mark.parametrize(("gold", "response"), table("math_tricky", "math_second_tricky"))
def test_what_is_no_right_answer_earns_nothing(reward: MathSource, gold: str, response: str) -> None:
    assert score(reward, gold, response) == 0.0


@pytest.mark.prove
def test_every_ninth_of_the_measured_pairs(reward: MathSource) -> None:
    """`benchmarks/trust/answers.py` measures all of them."""
    left = {r"\genfrac{}{}{}{}{1}{2}", r"\surd 2", "C(5,2)"}
    for _, gold, said, right in list(pairs())[::9]:
        assert {gold, said} & left or score(reward, gold, f"\\boxed{{{said}}}") == right, (gold, said)


@pytest.mark.parametrize(
    "piece",
    ["<!--", "~~a", "~~", "\\text{ ", "\\text{a: }", "\\ ", " \\", "<b ", "</answer>", "<answer>", "| answer |", "0.11",
    "1.1...", "\\phantom{", "\\Rightarrow ", "x=", "=", "\\approx ",
     "one hundred ", "and ", "(A) ", "C is correct ", "\\boxed{1} and ", "\\boxed{1}, ", "答案是", "1, ", "not ",
     "perhaps ", "\\begin{aligned}", "\\log_e ", "1 1/", "% ", "wait the answer is "],
)  # fmt: skip
def test_repeated_pieces_are_quick(reward: MathSource, piece: str) -> None:
    """No pattern reads the same text in two ways: what the run's own process does with a long response takes linear
    time."""
    began = time.process_time()
    for text in (
        piece * (200_000 // len(piece)),
        f"answer is {piece * (9_000 // len(piece))}",
        f"\\boxed{{{piece * (900 // len(piece))}",
    ):
        score(reward, "7", text + " 7")
    score(reward, "7", f"\\boxed{{{piece * (900 // len(piece))}7}}")
    assert time.process_time() - began < SLOWEST


def test_the_algebra_is_stopped_in_time() -> None:
    """By the kernel, which counts whole seconds of the worker's processor: at most one more than it is given."""
    assert round(SECONDS) + 1 <= SLOWEST


def test_the_setting_says_the_seconds_of_the_algebra() -> None:
    assert f"{SECONDS:g} for `math`, so at most {SECONDS + 1:g};" in " ".join(meaning(Reward, "timeout").split())
