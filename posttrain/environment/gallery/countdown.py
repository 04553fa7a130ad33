"""Countdown: `<3,5,6,9:24>` is answered by an expression such as `(9-5)*6`, each number used at most once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from posttrain.core.ports import Attempt
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.expression import ExpressionError, evaluate
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.single import require
from posttrain.system.errors import ConfigError
from posttrain.verifier.reward_source import graded

# (the given numbers in sorted order, the target)
Key = tuple[tuple[int, ...], int]


@dataclass(frozen=True, kw_only=True)
class Countdown(GeneratedTasks):
    """Reach a target with given numbers. The reward is 1 for an expression that equals the target, else 0.

    Only the text after the last line break or `;` is judged, so a policy may think first. It may also write
    `expression=target`. Two tasks are the same if they have the same target and the same numbers in any order.
    """

    numbers: int = 4
    """How many numbers are given."""
    max_number: int = 9
    """Largest of the given numbers; the smallest is 1."""
    max_target: int = 99
    """Largest target."""
    ops: str = "+-*/"
    """The operators of the hidden solution. The policy may use any."""

    def __post_init__(self) -> None:
        require(2 <= self.numbers <= 10, self.name, f"numbers={self.numbers}: must lie in 2..10")
        require(2 <= self.max_number <= 10**6, self.name, f"max_number={self.max_number}: must lie in 2..1000000")
        require(2 <= self.max_target <= 10**9, self.name, f"max_target={self.max_target}: must lie in 2..1000000000")
        require(bool(self.ops) and set(self.ops) <= set("+-*/"), self.name, f"ops={self.ops!r}: some of + - * /")

    @property
    def name(self) -> str:
        return "countdown"

    @property
    def alphabet(self) -> str:
        return "0123456789+-*/()<>,:;="

    def draw(self, rng: np.random.Generator, name: str) -> Task | None:
        """A task with its solution. None if the value of the drawn expression cannot be a target."""
        numbers = [int(n) for n in rng.integers(1, self.max_number + 1, size=self.numbers)]
        target, solution = self._combine(rng, numbers)
        # A target among the numbers would be answered by copying it.
        if not 0 < target <= self.max_target or target in numbers:
            return None
        prompt = f"<{','.join(map(str, numbers))}:{target}>"
        return Task(id=name, prompt=prompt, answer=solution, info={"numbers": numbers, "target": target})

    def _combine(self, rng: np.random.Generator, numbers: list[int]) -> tuple[int, str]:
        """(value, text) of a random expression over at least two numbers; (-1, "") if a partial result is negative."""
        order = rng.permutation(len(numbers))
        parts = [(numbers[i], str(numbers[i])) for i in order[: int(rng.integers(2, len(numbers) + 1))]]
        while len(parts) > 1:
            i, j = (int(k) for k in rng.permutation(len(parts))[:2])
            (a, left), (b, right) = parts[i], parts[j]
            # -1 stands for a division that is not exact. It is refused below, together with negative results.
            values = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b and a % b == 0 else -1}
            op = self.ops[int(rng.integers(len(self.ops)))]
            if values[op] < 0:
                return -1, ""
            joined = (values[op], f"{_wrapped(left)}{op}{_wrapped(right)}")
            parts = [*(p for k, p in enumerate(parts) if k not in (i, j)), joined]
        return parts[0]

    def verify(self, attempt: Attempt) -> Verdict:
        last_line = re.split(r"[\n;]", attempt.text.strip())[-1].strip()
        left, equals, right = last_line.partition("=")
        numbers, target = attempt.task.info["numbers"], attempt.task.info["target"]
        try:
            expression = evaluate(left)
            if equals and evaluate(right).value != target:
                return Verdict.value(0.0, "wrong", f"{right!r} is not the target {target}")
        except ExpressionError as error:
            return Verdict.value(0.0, "unparsable", f"{last_line[:80]!r}: {error}")
        # A difference of multisets, because a number that is given twice may be used twice.
        if extra := Counter(expression.numbers) - Counter(numbers):
            return Verdict.value(
                0.0, "numbers", f"uses {sorted(extra.elements())}, which are not (or not so often) in {numbers}"
            )
        return graded(expression.value == target, expression.value, target)

    def key(self, task: Task) -> Key:
        return tuple(sorted(task.info["numbers"])), task.info["target"]

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The target itself: its value is right, but it is not one of the numbers."""
        return (str(task.info["target"]),)

    @property
    def styles(self) -> tuple[str, ...]:
        """`document`: equations over small numbers, no prompt; `answer`: an expression."""
        return ("document", "answer")

    @property
    def judged_style(self) -> str:
        """`answer`: an expression that reaches the target is preferred to one that misses it."""
        return "answer"

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, completion). A false answer uses the right numbers and misses the target."""
        self._check_style(style)
        false, solution, target = rng.random() < wrong, str(task.answer), task.info["target"]
        if style == "document":
            shown = target + (int(rng.integers(1, 4)) if false else 0)
            return "", f"{solution}={shown}"
        return str(task.prompt), self._off_target(rng, solution, target) if false else solution

    def _off_target(self, rng: np.random.Generator, solution: str, target: int) -> str:
        """The solution with one operator changed so that it misses the target. At least one such change exists."""
        places = [i for i, c in enumerate(solution) if c in "+-*/"]
        others = [solution[:i] + op + solution[i + 1 :] for i in places for op in "+-*/" if op != solution[i]]
        for k in rng.permutation(len(others)):
            try:
                if evaluate(others[k]).value != target:
                    return others[k]
            except ExpressionError:
                continue
        raise ConfigError(f"every exchange of an operator in {solution!r} still gives {target}")


def _wrapped(text: str) -> str:
    """An expression in parentheses; a number stays as it is."""
    return text if text.isdigit() else f"({text})"
