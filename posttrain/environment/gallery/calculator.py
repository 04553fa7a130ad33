"""A tool in two turns: for `<12*3>` the policy writes `calc:12*3`, is shown `[36]`, and answers `36`.

With a tape the tool first shows other computations, as tools do that return more than was asked: `7*9=63;[36]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posttrain.core.ports import Attempt, Talk
from posttrain.core.seeds import generator
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.expression import ExpressionError, evaluate
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.single import HELDOUT_SEED, require
from posttrain.verifier.integers import last_integer
from posttrain.verifier.reward_source import graded

REQUEST = "calc:"
Key = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class CalculatorEnv(GeneratedTasks):
    """Ask a calculator, read its result, answer. The reward is 1 if the last integer of the answer is right, else 0.

    A turn that begins with `calc:` is a request, and any other turn is the answer. The policy may answer without the
    tool. If the last turn is still a request, the episode ends with stop reason `turns` and has no answer.
    """

    max_operand: int = 99
    """Largest operand of a question; the smallest is 0."""
    ops: str = "*"
    """The operators of the questions: one or more of + - *."""
    turns: int = 2
    """The largest number of turns, the answer included."""
    tape: int = 0
    """How many other computations the tool shows before a result. They are a function of the task and the request."""

    def __post_init__(self) -> None:
        require(1 <= self.max_operand <= 10**5, self.name, f"max_operand={self.max_operand}: must lie in 1..100000")
        require(bool(self.ops) and set(self.ops) <= set("+-*"), self.name, f"ops={self.ops!r}: some of + - *")
        require(2 <= self.turns <= 16, self.name, f"turns={self.turns}: must lie in 2..16")
        require(0 <= self.tape <= 1000, self.name, f"tape={self.tape}: must lie in 0..1000")
        n = self.max_operand + 1
        # Ordered pairs where the order of operands matters, else unordered ones. At most half may be held out.
        room = sum(n * n if op == "-" else n * (n + 1) // 2 for op in set(self.ops)) // 2
        require(
            self.heldout_count <= room,
            self.name,
            f"heldout={self.heldout_count}, but these settings have room for {room}; raise max_operand",
        )

    @property
    def name(self) -> str:
        return "calculator"

    @property
    def alphabet(self) -> str:
        return "0123456789+-*/()<>[]:?=;cal"

    def _computation(self, rng: np.random.Generator) -> tuple[int, str, int, int]:
        """(left operand, operator, right operand, value), drawn at random."""
        a, b = (int(n) for n in rng.integers(0, self.max_operand + 1, size=2))
        op = self.ops[int(rng.integers(len(self.ops)))]
        return a, op, b, {"+": a + b, "-": a - b, "*": a * b}[op]

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        a, op, b, value = self._computation(rng)
        return Task(id=name, prompt=f"<{a}{op}{b}>", answer=str(value), info={"op": op, "left": a, "right": b})

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        for turns_left in reversed(range(self.turns)):
            turn = await talk.say()
            if not turn.stop.finished or not is_request(turn.text):
                return turn.stop
            if turns_left:
                talk.see(self._printed(task, turn.text) + result(turn.text))
        return Stop.TURNS

    def _printed(self, task: Task, request: str) -> str:
        # A function of task and request: siblings that ask the same are shown the same.
        rng = generator(HELDOUT_SEED, "calculator/tape", task.id, request)
        return "".join(f"{a}{op}{b}={value};" for a, op, b, value in (self._computation(rng) for _ in range(self.tape)))

    def verify(self, attempt: Attempt) -> Verdict:
        if is_request(attempt.text):
            return Verdict.value(0.0, "no_answer", f"the last turn is a request: {attempt.text[:80]!r}")
        number = last_integer(attempt.text)
        return graded(
            number == attempt.task.answer, number, attempt.task.answer, kind="no_integer" if number is None else "wrong"
        )

    def key(self, task: Task) -> Key:
        """Operator and operands. The operands are sorted unless their order matters."""
        op, a, b = task.info["op"], task.info["left"], task.info["right"]
        return (op, a, b) if op == "-" else (op, min(a, b), max(a, b))

    def gold(self, task: Task) -> tuple[str, ...]:
        return (REQUEST + str(task.prompt).strip("<>"), str(task.answer))

    @property
    def styles(self) -> tuple[str, ...]:
        """`tool`: a request, then the answer."""
        return ("tool",)

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str, tuple[str, ...]]:
        """(prompt, turns). A wrong one asks about another number, or changes one digit of the right result."""
        self._check_style(style)
        op, a, b = task.info["op"], task.info["left"], task.info["right"]
        if rng.random() >= wrong:
            return str(task.prompt), self.gold(task)
        if rng.random() < 0.5:
            return str(task.prompt), (self.gold(task)[0], str(_misread(rng, int(task.answer))))
        other_operand, value = b, int(task.answer)
        while value == int(task.answer):
            other_operand = int(rng.integers(0, self.max_operand + 1))
            # 0 times anything is 0, so with a factor 0 no other number would give a wrong result.
            a = a if a or op != "*" else 1 + int(rng.integers(self.max_operand))
            value = {"+": a + other_operand, "-": a - other_operand, "*": a * other_operand}[op]
        return str(task.prompt), (f"{REQUEST}{a}{op}{other_operand}", str(value))

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The right request and the wrong answer."""
        return (self.gold(task)[0], str(int(task.answer) + 1))


def _misread(rng: np.random.Generator, value: int) -> int:
    """The number with one digit changed."""
    digits = list(str(abs(value)))
    at = int(rng.integers(len(digits)))
    digits[at] = str((int(digits[at]) + 1 + int(rng.integers(9))) % 10)  # any digit but the old one
    return int("".join(digits)) * (-1 if value < 0 else 1)


def is_request(text: str) -> bool:
    return text.lstrip().startswith(REQUEST)


def result(request: str) -> str:
    """Returns the text that the tool shows: `[36]`, a fraction as `[1/2]`, and `[?]` for what it cannot compute."""
    try:
        return f"[{evaluate(request.strip().removeprefix(REQUEST)).value}]"
    except ExpressionError:
        return "[?]"
