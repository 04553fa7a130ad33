"""Programs: `<+3*2-1>` asks for Python that adds 3, doubles and subtracts 1: `(x+3)*2-1`, run in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.single import require
from posttrain.sandbox.choose_backend import choose, open_sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits
from posttrain.verifier.code.code_reward import Code

Steps = tuple[tuple[str, int], ...]
"""The operations on x, in order. Each is an operator of `+ - *` and a digit."""
Line = tuple[int, int]
"""(a, b) of the function a * x + b that the steps compute. It is the key of a task."""
INPUTS = (-3, 0, 2, 7)
"""The values of x in the hidden test."""
LIMITS = ProgramLimits(wall=2.0, cpu=1.0, memory=256 * 1024**2)
"""Limits of one run: an answer such as `9**9**9` loses its reward and takes little time."""


@dataclass(frozen=True, kw_only=True)
class Programs(GeneratedTasks):
    """Write an expression in x that does some steps in order. The reward is 1 if it passes every hidden test, else 0.

    The answer becomes the body of a function that runs in the sandbox. Its values are compared outside, so that no
    program can see the expected values. Two tasks are the same if their steps compute the same function of x.
    """

    min_steps: int = 2
    """Fewest steps that a program has to do."""
    max_steps: int = 3
    """Most steps, up to 8."""
    max_operand: int = 9
    """The largest operand of a step. The smallest is 1, and 2 for `*`."""
    workers: int = 1
    """How many sandboxes run at once."""

    def __post_init__(self) -> None:
        require(
            1 <= self.min_steps <= self.max_steps <= 8,
            self.name,
            f"min_steps={self.min_steps}, max_steps={self.max_steps}: need 1 <= min <= max <= 8",
        )
        require(2 <= self.max_operand <= 9, self.name, f"max_operand={self.max_operand}: must lie in 2..9")
        require(self.workers >= 1, self.name, f"workers={self.workers}: must be 1 or more")
        _ = self.contained  # raises here if no sandbox works, and not after the first stage

    @property
    def name(self) -> str:
        return "programs"

    @property
    def alphabet(self) -> str:
        return "0123456789+-*()x<>"

    @cached_property
    def code(self) -> Code:
        """The verifier with its sandboxes, made when the first answer is judged."""
        name, token = self.sandbox.name, self.sandbox.token
        box = open_sandbox(name, workers=self.workers, limits=LIMITS, packages=(), token=token)
        return Code(box, name=self.name, owned=True)

    @cached_property
    def contained(self) -> tuple[str, ...]:
        return tuple(sorted({*super().contained, choose(self.sandbox.name, (), token=self.sandbox.token).name}))

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        steps = self._drawn(rng)
        prompt = "<" + "".join(f"{op}{n}" for op, n in steps) + ">"
        # All steps are linear in x, so the two numbers a and b say what they compute. Two inputs are enough to tell
        # linear functions apart. The other inputs catch answers that are not linear.
        a, b = line(steps)
        test = {"function": "f", "args": [list(INPUTS)], "expected": [a * x + b for x in INPUTS]}
        info = {"steps": [list(s) for s in steps], "tests": [test]}
        return Task(id=name, prompt=prompt, answer=written(steps), info=info)

    def _drawn(self, rng: np.random.Generator) -> Steps:
        """Steps at random."""
        count = int(rng.integers(self.min_steps, self.max_steps + 1))
        ops = ["+-*"[i] for i in rng.integers(3, size=count)]
        return tuple((op, int(rng.integers(2 if op == "*" else 1, self.max_operand + 1))) for op in ops)

    async def verdict(self, attempt: Attempt) -> Verdict:
        return redacted(await self.code.verdict(attempt.task, program(attempt.text)))

    def gauges(self) -> Gauges:
        # `__dict__` is read so that the verifier is not made here: a run that judged nothing has opened no sandbox.
        return merge(super().gauges(), self.code.gauges()) if "code" in self.__dict__ else super().gauges()

    def close(self) -> None:
        super().close()
        if "code" in self.__dict__:
            self.code.close()

    def key(self, task: Task) -> Line:
        return line(_steps(task))

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The steps without the parentheses that they need. If they need none, there is one extra step."""
        flat = "x" + str(task.prompt)[1:-1]
        return (flat if flat != task.answer else f"{flat}+1",)

    @property
    def styles(self) -> tuple[str, ...]:
        """`document`: expressions alone; `answer`: the program."""
        return ("document", "answer")

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, completion). A false one lacks parentheses, has a wrong operator or digit, or exchanged steps."""
        self._check_style(style)
        steps, false = _steps(task), rng.random() < wrong
        if style == "document":
            return "", written(self._drawn(rng))
        return str(task.prompt), self._mistaken(rng, steps) if false else written(steps)

    def _mistaken(self, rng: np.random.Generator, steps: Steps) -> str:
        """A wrong expression: half of the time one without parentheses, if that makes it wrong."""
        without_parentheses = "x" + "".join(f"{op}{n}" for op, n in steps)
        if without_parentheses != written(steps) and rng.random() < 0.5:
            return without_parentheses
        while True:
            i, changed = int(rng.integers(len(steps))), list(steps)
            kind = int(rng.integers(3))
            if kind == 0:
                changed[i] = ("+-*"[int(rng.integers(3))], steps[i][1])
            elif kind == 1:
                changed[i] = (steps[i][0], int(rng.integers(1, 10)))
            else:
                changed[i], changed[i - 1] = changed[i - 1], changed[i]
            # Some changes compute the same function, such as another order of two sums. Then another change is drawn.
            if line(tuple(changed)) != line(steps):
                return written(tuple(changed))


def program(text: str) -> str:
    """A program with the function `f` that the test calls. `f` applies the answer to each input."""
    return f"def f(inputs):\n    return [g(x) for x in inputs]\n\ng = lambda x: {text.strip()}\n"


def line(steps: Steps) -> Line:
    """(a, b) of the function a * x + b that the steps compute.

    >>> line((("+", 3), ("*", 2), ("-", 1)))
    (2, 5)
    """
    a, b = 1, 0
    for op, n in steps:
        a, b = (a * n, b * n) if op == "*" else (a, b + n if op == "+" else b - n)
    return a, b


def written(steps: Steps) -> str:
    """The steps as Python, with the parentheses they need.

    >>> written((("+", 3), ("*", 2), ("-", 1)))
    '(x+3)*2-1'
    """
    expression, ends_with_sum = "x", False
    for op, n in steps:
        # Only a sum that is multiplied needs parentheses.
        expression = f"({expression})" if op == "*" and ends_with_sum else expression
        expression, ends_with_sum = f"{expression}{op}{n}", op != "*"
    return expression


def _steps(task: Task) -> Steps:
    return tuple((op, n) for op, n in task.info["steps"])
