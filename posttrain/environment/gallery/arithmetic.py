"""Sums: the answer to `<3+4+5>` is `12`, given directly or after the running sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from posttrain.core.ports import Attempt, TaskSource
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.single import HELDOUT_SEED, Generated, SingleTurn, require
from posttrain.verifier.integers import last_integer
from posttrain.verifier.reward_source import graded

Signed = tuple[tuple[str, int], ...]
"""The terms of a sum in order, each with its sign. The sign of the first term is `+`."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic(SingleTurn):
    """Add (and subtract) a few integers. The reward is 1 if the last integer of the answer is the sum, else 0.

    Two tasks are the same if they have the same terms in any order. At most half of the term multisets of each length
    are held out.
    """

    min_terms: int = 2
    """Fewest terms of a sum."""
    max_terms: int = 4
    """Most terms of a sum, up to 32."""
    max_operand: int = 9
    """Largest term; the smallest is 0. 9 is one digit, 99 two."""
    ops: str = "+"
    """`+`, or `+-` for sums with subtractions (answers may be negative)."""
    judge_steps: bool = False
    """Also judge every running sum separately, for algorithms that assign credit to steps."""

    def __post_init__(self) -> None:
        require(
            2 <= self.min_terms <= self.max_terms <= 32,
            self.name,
            f"min_terms={self.min_terms}, max_terms={self.max_terms}: need 2 <= min <= max <= 32",
        )
        require(1 <= self.max_operand <= 10**9, self.name, f"max_operand={self.max_operand}: must lie in 1..1000000000")
        require(self.ops in ("+", "+-"), self.name, f"ops={self.ops!r}: valid are '+' and '+-'")
        room = sum(self._room(n) for n in self._lengths)
        require(
            self.heldout_count <= room,
            self.name,
            f"heldout={self.heldout_count}, but these settings have room for {room} (half of the distinct sums); "
            "raise max_operand or max_terms, or lower heldout",
        )

    @property
    def _lengths(self) -> range:
        return range(self.min_terms, self.max_terms + 1)

    def _room(self, length: int) -> int:
        """The most multisets of this length that may be held out: half of all there are."""
        # There are C(max_operand + length, length) multisets of `length` numbers out of max_operand + 1. With signs
        # there are 2 * (max_operand + 1) terms to choose from. The first term is positive, so multisets with only minus
        # signs do not occur and are subtracted.
        unsigned = math.comb(self.max_operand + length, length)
        signed = math.comb(2 * self.max_operand + 1 + length, length) - unsigned
        return (unsigned if self.ops == "+" else signed) // 2

    @property
    def name(self) -> str:
        return "arithmetic"

    @property
    def alphabet(self) -> str:
        return "0123456789+-=;<>"

    @property
    def train(self) -> TaskSource:
        return Generated(self._train)

    def _train(self, index: int) -> Task:
        rng = generator(self.seed, "arithmetic/train", index)
        length = int(rng.integers(self.min_terms, self.max_terms + 1))
        while True:
            terms = self._draw(rng, length)
            if _multiset(terms) not in self._held:
                return _task(f"arithmetic-{index}", terms)

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        rng = generator(HELDOUT_SEED, "arithmetic/heldout")
        room = {n: self._room(n) for n in self._lengths}
        drawn: set[Signed] = set()
        tasks: list[Task] = []
        while len(tasks) < self.heldout_count:
            # If half of the sums of a length are held out, no more of that length are drawn. Otherwise training could
            # have no sum of that length left, and `_train` would draw for ever.
            open_lengths = [n for n, left in room.items() if left]
            length = open_lengths[int(rng.integers(len(open_lengths)))]
            terms = self._draw(rng, length)
            if (same := _multiset(terms)) not in drawn:
                drawn.add(same)
                room[length] -= 1
                tasks.append(_task(f"arithmetic-heldout-{len(tasks)}", terms))
        return tuple(tasks)

    @cached_property
    def _held(self) -> frozenset[Signed]:
        return frozenset(_multiset(_terms(t)) for t in self.heldout)

    def _draw(self, rng: np.random.Generator, length: int) -> Signed:
        operands = rng.integers(0, self.max_operand + 1, size=length)
        signs = ["+", *(self.ops[i] for i in rng.integers(0, len(self.ops), size=length - 1))]
        return tuple((s, int(o)) for s, o in zip(signs, operands, strict=True))

    def verify(self, attempt: Attempt) -> Verdict:
        number = last_integer(attempt.text)
        return graded(
            number == attempt.task.answer, number, attempt.task.answer, kind="no_integer" if number is None else "wrong"
        )

    def steps(self, attempt: Attempt) -> tuple[Judged, ...]:
        """`3+4=7;7+5=11` scores 1 for the first sum, 0 for the second. An extra sum scores 0, a missing one nothing.
        A last `;` begins no sum: it belongs to the one before it."""
        if not self.judge_steps:
            return ()
        right = _chain(_terms(attempt.task))
        steps = attempt.text.removesuffix(";").split(";")
        # `Judged.end` is in tokens, and `spoken_upto` converts positions in characters. Each step ends behind its `;`.
        # The last one ends with the turn: a position behind the whole text counts all tokens, the stop token too.
        ends = [*accumulate(len(step) + 1 for step in steps[:-1]), len(attempt.text) + 1]
        return tuple(
            Judged("step", 1.0, Verdict.value(i < len(right) and step == right[i]), attempt.spoken_upto(end))
            for i, (step, end) in enumerate(zip(steps, ends, strict=True))
        )

    def key(self, task: Task) -> Signed:
        return _multiset(_terms(task))

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The right answer, followed by a wrong one."""
        return (f"{task.answer}={int(task.answer) + 1}",)

    def hinted(self, task: Task) -> str:
        """`<3+4+5=12>`"""
        return f"{str(task.prompt)[:-1]}={task.answer}>"

    @property
    def styles(self) -> tuple[str, ...]:
        """`document`: number sequences and equations, no prompt; `answer`: the sum alone; `cot`: running sums."""
        return ("document", "answer", "cot")

    @property
    def judged_style(self) -> str:
        """`cot`: a right chain of sums is preferred to one with an error."""
        return "cot"

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, completion). With probability `wrong` the result is off by a small amount. A chain of sums then has
        one wrong step and is consistent after it, so that its end is wrong too."""
        self._check_style(style)
        terms, false = _terms(task), rng.random() < wrong
        sums = _running(terms)
        if style == "document":
            return "", self._document(terms, false, rng)
        if style == "answer":
            return str(task.prompt), str(sums[-1] + (self._error(rng, sums[-1]) if false else 0))
        # `slip`: the index of the first wrong sum. The texts of a pair are equal before it. The first term is no sum.
        slip = int(rng.integers(1, len(terms)))
        error = self._error(rng, sums[slip]) if false else 0
        sums = [value + (error if step >= slip else 0) for step, value in enumerate(sums)]
        return str(task.prompt), ";".join(_chain(terms, sums))

    def _error(self, rng: np.random.Generator, floor: int) -> int:
        """A small error to add to the value `floor`. With only `+`, the result is not negative."""
        size = (1, 1, 2, 3, 10)[int(rng.integers(5))]
        upward = rng.random() < 0.5 or (self.ops == "+" and floor < size)
        return size if upward else -size

    def _document(self, terms: Signed, false: bool, rng: np.random.Generator) -> str:
        """Half number sequences, half equations of the task's own (training) terms."""
        if rng.random() < 0.5:
            total = _running(terms)[-1]
            return f"{_expression(terms)}={total + (self._error(rng, total) if false else 0)}"
        start = int(rng.integers(0, self.max_operand + 1))
        step, length = int(rng.integers(1, 4)), int(rng.integers(3, 8))
        values = [start + step * i for i in range(length)]
        if false:
            values[int(rng.integers(1, length))] += int(rng.integers(1, 4))
        return ";".join(str(v) for v in values)


def _expression(terms: Signed) -> str:
    """`3+4-5`"""
    return "".join(f"{s}{o}" for s, o in terms)[1:]


def _task(task_id: str, terms: Signed) -> Task:
    answer, info = str(_running(terms)[-1]), {"terms": [[s, o] for s, o in terms]}
    return Task(id=task_id, prompt=f"<{_expression(terms)}>", answer=answer, info=info)


def _terms(task: Task) -> Signed:
    return tuple((s, o) for s, o in task.info["terms"])


def _multiset(terms: Signed) -> Signed:
    """The terms in sorted order, equal for sums that differ in the order alone."""
    return tuple(sorted(terms))


def _chain(terms: Signed, sums: list[int] | None = None) -> list[str]:
    """3+4+5 gives `3+4=7` and `7+5=12`. With `sums` given, the chain shows those instead."""
    steps = zip(pairwise(_running(terms) if sums is None else sums), terms[1:], strict=True)
    return [f"{before}{sign}{operand}={after}" for (before, after), (sign, operand) in steps]


def _running(terms: Signed) -> list[int]:
    """Sums after each term: 3+4+5 gives [3, 7, 12]."""
    return list(accumulate(o if s == "+" else -o for s, o in terms))
