"""Programs judged by tests: each test a fresh process in the sandbox, each answer compared outside.

What was wanted never enters the sandbox, so no program can find it, patch the comparison, or end before it. Tests that
can only run beside the program are `weak`, accepted by name, and named in the verdict.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import ConfigError
from posttrain.core.ports import Attempt
from posttrain.core.types import Gauge, Gauges, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.code_tests import CallTest, InputTest, Test, WeakTest, tests_of
from posttrain.environment.redact import redacted
from posttrain.environment.sandbox.cell.program import encode
from posttrain.environment.sandbox.choose import open_sandbox
from posttrain.environment.sandbox.pool import Sandbox
from posttrain.environment.sandbox.port import Call, Ran, SandboxBroken, SandboxUnavailableError
from posttrain.environment.sandbox.value import Unheard, heard, same, shown

Scoring = Literal["all", "fraction"]
FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """One test: `kind` is '' where it passed, else what went wrong."""

    kind: str = ""
    why: str = ""


class Code:
    """A reward source: 1 where the response's program passes every test; with `scoring="fraction"`, the share it passes.

    The program is the last fenced block marked as Python, else the last fenced block, else the whole response.

    Args:
        sandbox: where programs run; None opens `auto`, which is refused here and now if this machine has none.
        weak: accept tests that run beside the program.
        seconds: for all tests of one program together; those that it leaves no time for count as timed out.
        owned: end `sandbox` with this source; one that was opened here always is.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        scoring: Scoring = "all",
        weak: bool = False,
        seconds: float = 60.0,
        name: str = "code",
        weight: float = 1.0,
        owned: bool = False,
    ) -> None:
        if scoring not in ("all", "fraction"):
            raise ConfigError(f"reward code: scoring={scoring!r} is neither all nor fraction")
        self.name = name
        self.weight = weight
        self.scoring: Scoring = scoring
        self.weak = weak
        self.seconds = seconds
        self._owned = owned or sandbox is None
        self._judged = self._spent = 0.0
        self.sandbox = sandbox or open_sandbox()

    def check(self, tasks: Sequence[Task]) -> None:
        """DataError where a task has no tests, or tests that are not understood."""
        for task in tasks:
            tests_of(task, weak=self.weak)

    async def __call__(self, attempt: Attempt) -> Judged:
        begun = time.monotonic()
        verdict = await self.verdict(attempt.task, attempt.text)
        self._judged, self._spent = self._judged + 1, self._spent + time.monotonic() - begun
        return Judged(self.name, self.weight, redacted(verdict))

    def gauges(self) -> Gauges:
        """Since the last call: seconds a response took to judge, attempts of a program to reach a network (each refused), and tests
        that wait for a sandbox now."""
        taken = Gauge(self._spent, self._judged)
        self._judged = self._spent = 0.0
        told = {"seconds": taken, "network": self.sandbox.network.take(), "waiting": Gauge(self.sandbox.waiting, 1)}
        return {f"verifier/{self.name}/{name}": gauge for name, gauge in told.items()}

    async def verdict(self, task: Task, text: str) -> Verdict:
        """What one response is worth. A sandbox that was lost is our failure and no score."""
        tests = tests_of(task, weak=self.weak)
        program = program_in(text)
        end = time.monotonic() + self.seconds
        outcomes: list[Outcome] = []
        try:
            for test in tests:
                if time.monotonic() > end:
                    outcomes.append(Outcome("timeout", f"the tests together took longer than {self.seconds:g} s"))
                else:
                    outcomes.append(await self.outcome(program, test))
                if outcomes[-1].kind and self.scoring == "all":
                    break
        except (SandboxBroken, SandboxUnavailableError) as error:
            return Verdict.failed("sandbox", str(error))
        return self._score(tests, outcomes)

    def _score(self, tests: Sequence[Test], outcomes: Sequence[Outcome]) -> Verdict:
        notes = [f"sandbox={self.sandbox.name}"] if self.sandbox.name == "none" else []
        notes += [f"{sum(isinstance(t, WeakTest) for t in tests)} weak tests"] if any(isinstance(t, WeakTest) for t in tests) else []
        bad = next(((i, o) for i, o in enumerate(outcomes) if o.kind), None)
        if bad is None:
            return Verdict.value(1.0, why="; ".join(notes))
        passed = sum(not o.kind for o in outcomes)
        score = passed / len(tests) if self.scoring == "fraction" else 0.0
        why = f"test {bad[0] + 1} of {len(tests)}: {bad[1].why}"
        return Verdict.value(score, bad[1].kind, "; ".join([why, *notes]))

    async def outcome(self, program: str, test: Test) -> Outcome:
        """One test in a process of its own."""
        if isinstance(test, InputTest):
            return _printed(await self.sandbox.run(program, stdin=test.stdin), test)
        if isinstance(test, WeakTest):
            return await self._weak(program, test)
        ran = await self.sandbox.run(program, call=test.call)
        if ran.why != "ok":
            return _ended(ran)
        try:
            said = heard(ran.result)
        except Unheard as error:
            return Outcome(error.kind, str(error))
        return Outcome() if same(said, test.wanted, test.how) else _differs(said, test)

    async def _weak(self, program: str, test: WeakTest) -> Outcome:
        """The tests' statements after the program's, then a call of a function whose name the program was not told."""
        name, nonce = f"passed_{secrets.token_hex(8)}", secrets.token_hex(8)
        whole = f"{program}\n\n{test.source}\n\ndef {name}():\n    return {nonce!r}\n"
        ran = await self.sandbox.run(whole, call=Call(name))
        if ran.why != "ok":
            return _ended(ran)
        try:
            return Outcome() if same(heard(ran.result), nonce) else Outcome("wrong", "the tests did not come to their end")
        except Unheard as error:
            return Outcome(error.kind, str(error))

    async def lint(self, tasks: Sequence[Task]) -> list[str]:
        """Tasks that a program without content passes, a line each: their tests prove nothing."""
        found: list[str] = []
        for task in tasks:
            verdict = await self.verdict(task, "")
            if verdict.score:
                found.append(f"task {task.id!r}: an empty program scores {verdict.score:g}")
        return found

    @property
    def contained(self) -> str:
        """Name of the sandbox that programs run in."""
        return self.sandbox.name

    def close(self) -> None:
        """End the sandbox, if it was opened here."""
        if self._owned:
            self.sandbox.close()


def program_in(text: str) -> str:
    """The program of a response."""
    blocks = FENCE.findall(text)
    marked = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    if marked:
        return marked[-1]
    return blocks[-1][1] if blocks else text


def _ended(ran: Ran) -> Outcome:
    """A run that did not end well, in words that show no raw control character."""
    said = f": {ran.complaint}" if ran.complaint else ""
    return Outcome(ran.why, f"{ran.why} (exit {ran.exit}, {ran.seconds:.2f} s){said}")


def _printed(ran: Ran, test: InputTest) -> Outcome:
    if ran.why != "ok":
        return _ended(ran)
    if ran.cut:
        return Outcome("output", "printed more than is kept")
    if _lines(ran.said) == _lines(test.wanted):
        return Outcome()
    wanted = f", wanted {test.wanted[:80]!r}" if test.public else ""
    return Outcome("wrong", f"printed {ran.said[:80]!r}{wanted}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _differs(said: object, test: CallTest) -> Outcome:
    wanted = f", wanted {shown(encode(test.wanted))}" if test.public else ""
    return Outcome("wrong", f"returned {shown(said)}{wanted}")
