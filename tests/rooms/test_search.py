"""Search at inference: votes, beams and trees over steps, by hand and on a scripted policy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.types import Said, Task
from posttrain.search.beam import beam
from posttrain.search.puct import TreeNode, tree_search
from posttrain.search.steps import Beginning, StepSearch
from posttrain.search.votes import best, vote

LETTERS = "pabc;."
STOP = LETTERS.index(".")
TASK = Task(id="t", prompt="p")


def text(ids: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in ids if i != STOP)


@dataclass
class Dice:
    """Says one letter of a, b, c and a separator, three times, and then the stop token. Which letter is a function of
    the place and the position."""

    asked: list[np.ndarray] = field(default_factory=list[np.ndarray])

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> Said:
        self.asked.append(ids)
        said: list[int] = []
        begun = len(ids) - 1
        rolled = seeds.uniforms(place, 16)
        while True:
            at = begun + len(said)
            token = STOP if at == 5 else LETTERS.index(";") if at % 2 else 1 + int(rolled[len(said)] * 3)
            said.append(token)
            stop = Stop.SAID if token == STOP else None
            if token == LETTERS.index(";") and sampling.stop:
                stop = Stop.STRING
            if stop is not None:
                n = len(said)
                return Said(np.array(said, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), stop)


class Likes:
    """Scores a step by its letter: a is good, c is bad."""

    def tokens(self, packed: Packed) -> np.ndarray:
        out = np.zeros(packed.spoken)
        worth = {"a": 0.9, "b": 0.5, "c": 0.1}
        for s in range(len(packed.lengths_S)):
            own = np.flatnonzero(packed.segment_M == s)
            last = 0.0
            for m in own:
                last = worth.get(LETTERS[int(packed.target_M[m])], last)
                out[m] = last
        return out


class World:
    async def judge(self, attempt: Any) -> Any:
        from posttrain.core.verdict import Judged, Verdict

        return (Judged("world", 1.0, Verdict.value(float(attempt.text == "a;a;a"))),)


def tools(**more: Any) -> StepSearch:
    sampling = Sampling(max_tokens=12, stop_ids=(STOP,))
    return StepSearch(Dice(), Likes(), World(), lambda t: np.zeros(1, np.int32), text, sampling, ";", **more)  # type: ignore[arg-type]


def test_votes_by_hand() -> None:
    assert best([0.1, 0.7, 0.7, 0.2]) == 1
    assert vote(["1", "2", "2", "1", "2"]) == 1
    assert vote(["1", "2", "2"], [5.0, 1.0, 1.0]) == 0
    assert vote([None, None]) == 0 and vote([None, "3"]) == 1


def test_whole_answers_have_the_scores_of_their_steps_and_cost_what_was_said() -> None:
    s = tools()
    found = asyncio.run(s.whole(TASK, 5))
    for b in found:
        steps = text(b.ids).split(";")
        assert [round(x, 2) for x in b.scores] == [{"a": 0.9, "b": 0.5, "c": 0.1}[x] for x in steps]
        assert b.stop is Stop.SAID and s.worth(b) == min(b.scores)
    assert s.spent == sum(len(b.ids) for b in found) == 30
    again = asyncio.run(tools().whole(TASK, 5))
    assert [b.key for b in again] == [b.key for b in found]


def test_a_wide_beam_finds_the_best_answer_and_shares_its_beginnings() -> None:
    s = tools()
    found = asyncio.run(beam(s, TASK, width=2, expand=12))
    assert text(found.ids) == "a;a;a" and found.stop is Stop.SAID
    assert asyncio.run(s.right(TASK, found))
    assert s.spent == 3 * 24 * 2  # three steps of two tokens, for 24 continuations each
    asked = s.sampler.asked  # type: ignore[attr-defined]
    assert len({x.tobytes() for x in asked}) <= 1 + 2 + 2 + 2


def test_what_a_leaf_is_worth_is_told_to_all_above_it() -> None:
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    child = TreeNode(Beginning(np.array([1], np.int32)), root)
    leaf = TreeNode(Beginning(np.array([1, 4], np.int32), stop=Stop.SAID), child)
    root.children, child.children = [child], [leaf]
    leaf.back_up(0.8)
    child.back_up(0.4)
    assert (leaf.value, child.value, root.value) == (0.8, pytest.approx(0.6), pytest.approx(0.6))
    assert (root.visits, child.visits, leaf.visits) == (2, 2, 1)
    assert child.finished and root.finished


def test_puct_takes_the_good_child_and_looks_at_the_others() -> None:
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in (1, 2)]
    for child, value in zip(root.children, (0.9, 0.6), strict=True):
        child.back_up(value)
    assert root.chosen(0.0) is root.children[0]
    for _ in range(20):
        root.children[0].back_up(0.9)
    assert root.chosen(4.0) is root.children[1]
    root.children[0].beginning = Beginning(np.array([1], np.int32), stop=Stop.SAID)
    assert root.chosen(0.0) is root.children[1]


def test_a_tree_finds_the_best_answer() -> None:
    s = tools()
    found = asyncio.run(tree_search(s, TASK, expansions=24, expand=6, exploration=0.5))
    assert text(found.ids) == "a;a;a" and found.stop is Stop.SAID and s.spent > 0
