"""Programs judged by tests. Each test runs in a fresh process in the sandbox, and its result is compared outside.

Expected values never enter the sandbox, so no program can find them, change the comparison, or end before it. Tests
that can only run in the program's process are `weak`: they must be accepted, and the verdict mentions them.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.sandbox.cell.program import encode
from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.sandbox.comparison import NoValidValue, heard, same, shown
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import (
    MOST_SAID,
    Call,
    ProgramLimits,
    Ran,
    SandboxBroken,
    SandboxUnavailableError,
)
from posttrain.system.errors import ConfigError
from posttrain.verifier.code.fences import LONGEST, blocks_of, last_of
from posttrain.verifier.code.program_tests import SPARE, CallTest, InputTest, Test, WeakTest, tests_of, wanted_names

Scoring = Literal["all", "fraction"]
ASSEMBLE = (Path(__file__).parent / "assemble.py").read_text(encoding="utf-8")
"""The source of `assemble`, which finds the program among several blocks and runs in the sandbox."""
MOST_BLOCKS = 64
"""The number of last blocks of a response that are searched for the program."""
MOST_SECONDS = 2.0
"""The most seconds of that search. If it takes longer, the last block is the program."""
_STATEMENT = re.compile(
    # An indented or empty line, a comment, a decorator, a closing bracket, a string; `def f(`, `class A:`;
    # `import math`.
    r"\s|[#@)\]}'\"]|$|(?:def|class|async def)\s+\w+\s*[(:]|import\s[\w., ]+$"
    r"|from\s+[\w.]+\s+import\b|(?:if|elif|for|while|with|match)\b.*:"  # `from a import b`, `for x in y:`
    # `else:`, `return x`, `print(`.
    r"|(?:else|try|finally|except)\b.*:|(?:return|pass|break|raise|assert|del|global)\b|[\w.]+\("
    r"|[A-Za-z_][\w.,* \[\]'\"]*+(?::[^=]*)?[-+*/%&|^<>@]*="  # `a, b = 1, 2`, `x: int = 3`, `x += 1`
)
"""Matches the begin of a line of a program. Lines of prose rarely match."""

_TYPED = re.compile(rf"\b(?:{'|'.join(typing.__all__)})\b")  # A name of `typing`, such as `List`.
# Possessive repetitions, because a program printed the text: no character is read twice, however long a number is.
_NUMBER = re.compile(r"((?<![\w.])[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?+(?!\w|\.\d))")
"""A number that stands alone, such as `-1.5e3`. The parts of a version (`1.2.3`) or of a word (`x2`) do not match."""


@dataclass(frozen=True)
class Outcome:
    """The result of one test: `kind` is '' if it passed, else the kind of failure."""

    kind: str = ""
    why: str = ""
    seconds: float = 0.0
    """The seconds for which the program ran."""


class Code:
    """A reward source: 1 if the response's program passes every test, else 0. With `scoring="fraction"`, the share of
    tests that it passes.

    The program is the block that defines what the tests call, with what it needs of the other blocks (`fences`,
    `assemble`).

    Args:
        sandbox: where programs run. None opens `auto`, which raises here if this machine has no sandbox.
        weak: accept tests that run in the program's process.
        seconds: that a program may run in all its tests together. Tests after that count as timed out.
        owned: close `sandbox` with this source. One that was opened here is always closed.
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
        self._new_gauges: Gauges = {}
        self.sandbox = sandbox or open_sandbox()

    def check(self, tasks: Sequence[Task]) -> None:
        """DataError if a task has no tests, or tests that cannot be read."""
        for task in tasks:
            tests_of(task, weak=self.weak)

    async def __call__(self, attempt: Attempt) -> Judged:
        return Judged(self.name, self.weight, redacted(await self.verdict(attempt.task, attempt.text)))

    def gauges(self) -> Gauges:
        """Since the last call: seconds to judge a response, overall and by kind of verdict; tests that wait for the
        sandbox at each new test; and attempts of a program to reach a network, all refused."""
        taken, self._new_gauges = merge(self._new_gauges, {"network": Gauge(*self.sandbox.network.take())}), {}
        return {f"verifier/{self.name}/{name}": gauge for name, gauge in taken.items()}

    async def verdict(self, task: Task, text: str) -> Verdict:
        """The verdict about one response. If the sandbox is lost, the verdict is `failed`."""
        begun = time.monotonic()
        try:
            tests = tests_of(task, weak=self.weak)
            verdict = await self._run_tests(tests, await self.program(tests, text))
        except (SandboxBroken, SandboxUnavailableError) as error:
            verdict = Verdict.failed("sandbox", str(error))
        took = Gauge(time.monotonic() - begun, 1)
        self._new_gauges = merge(self._new_gauges, {"seconds": took, f"kind/{verdict.kind or 'passed'}": took})
        return verdict

    async def program(self, tests: Sequence[Test], text: str) -> str:
        """The program of a response. If it could be one of several blocks, or has words around it, `assemble` finds it
        in the sandbox."""
        # A single fenced block, or code without words around it, is the program as it stands. Most responses are like
        # that, and need no process here. From a session of the interpreter (`>>> `) the prompts have to be removed.
        blocks = blocks_of(text)
        first_block, stands_alone = blocks[0], len(blocks) == 1 and not blocks[0].body.lstrip().startswith(">>>")
        if stands_alone and (
            first_block.kind != "bare" or all(_STATEMENT.match(line) for line in first_block.body.split("\n"))
        ):
            return first_block.body
        # `blocks_of` does not search so long a text: it is one bare block.
        if len(text) > LONGEST:
            return last_of(blocks)
        # Only names go into the sandbox with the blocks. What is parsed there is a policy's text, which may crash the
        # parser or make it run very long.
        request = {"bare": first_block.kind == "bare", "wanted": sorted(wanted_names(tests))}
        request["blocks"] = [(b.python, b.body) for b in blocks[-MOST_BLOCKS:]]
        usual = self.sandbox.limits
        cpu, wall = min(usual.cpu, MOST_SECONDS), min(usual.wall, MOST_SECONDS)
        # JSON writes a character in up to 12 bytes. Code is mostly ASCII, so 8 for each are almost always enough.
        limits = replace(usual, cpu=cpu, wall=wall, output=min(MOST_SAID, SPARE + 8 * len(text)))
        ran = await self.sandbox.run(ASSEMBLE, stdin=json.dumps(request), limits=limits)
        try:
            assembled = json.loads(ran.stdout) if ran.why == "ok" else None
        except ValueError:
            assembled = None
        return assembled if isinstance(assembled, str) else last_of(blocks)

    async def _run_tests(self, tests: Sequence[Test], program: str) -> Verdict:
        """The verdict of all tests, run one after another. `seconds` limits the time for which the program ran in them,
        without the time that it waited for a place in the sandbox."""
        outcomes: list[Outcome] = []
        spent = 0.0
        for test in tests:
            if spent > self.seconds:
                outcomes.append(Outcome("timeout", f"the tests together took longer than {self.seconds:g} s"))
            else:
                self._new_gauges = merge(self._new_gauges, {"queue": Gauge(self.sandbox.waiting, 1)})
                outcomes.append(await self.outcome(program, test))
                spent += outcomes[-1].seconds
            # The score is 0 from the first failure on, so the other tests need not run.
            if outcomes[-1].kind and self.scoring == "all":
                break
        return self._score(tests, outcomes)

    def _score(self, tests: Sequence[Test], outcomes: Sequence[Outcome]) -> Verdict:
        """The verdict from the outcomes of the tests. Its reason names the first test that failed."""
        # A program that ran unconfined, and tests that it could deceive, make a verdict less certain.
        notes = [f"sandbox={self.sandbox.name}"] if self.sandbox.name == "none" else []
        weak = sum(isinstance(t, WeakTest) for t in tests)
        notes += [f"{weak} weak tests"] if weak else []
        first_failure = next(((i, o) for i, o in enumerate(outcomes) if o.kind), None)
        if first_failure is None:
            return Verdict.value(1.0, why="; ".join(notes))
        passed = sum(not o.kind for o in outcomes)
        score = passed / len(tests) if self.scoring == "fraction" else 0.0
        why = f"test {first_failure[0] + 1} of {len(tests)}: {first_failure[1].why}"
        return Verdict.value(score, first_failure[1].kind, "; ".join([why, *notes]))

    async def outcome(self, program: str, test: Test) -> Outcome:
        """Run one test in a fresh process, whose output limit is large enough for the expected output."""
        # The limit is large enough for every right answer. Longer output is cut, so that a program cannot fill our
        # memory.
        limits, room = self.sandbox.limits, test.room
        limits = replace(limits, output=max(limits.output, room)) if isinstance(test, InputTest) else limits
        limits = replace(limits, result=max(limits.result, room)) if isinstance(test, CallTest) else limits
        if isinstance(test, InputTest):
            ran = await self.sandbox.run(program, stdin=test.stdin, limits=limits)
            outcome = _print_outcome(ran, test, limits)
        elif isinstance(test, CallTest):
            ran = await self.sandbox.run(_with_typing(program), call=_call_of(program, test), limits=limits)
            outcome = _call_outcome(ran, test)
        else:
            ran, outcome = await self._weak(program, test)
        return replace(outcome, seconds=ran.seconds)

    async def _weak(self, program: str, test: WeakTest) -> tuple[Ran, Outcome]:
        """Run the test's statements after the program, then call a function whose name the program cannot know."""
        # The function is defined behind the test's statements, so it exists only if they came to their end. After an
        # early `sys.exit(0)` it cannot be called. Its name and its value are random, so that the program cannot define
        # it itself.
        name, nonce = f"passed_{secrets.token_hex(8)}", secrets.token_hex(8)
        program_and_test = f"{program}\n\n{test.source}\n\ndef {name}():\n    return {nonce!r}\n"
        ran = await self.sandbox.run(program_and_test, call=Call(name))
        if ran.why != "ok":
            return ran, _failed_run(ran)
        try:
            passed = same(heard(ran.result), nonce)
        except NoValidValue as error:
            return ran, Outcome(error.kind, str(error))
        return ran, Outcome() if passed else Outcome("wrong", "the tests did not come to their end")

    async def lint(self, tasks: Sequence[Task]) -> list[str]:
        """One line for each task in which an empty program scores above 0, so that its tests prove nothing."""
        scores = [(task, (await self.verdict(task, "")).score) for task in tasks]
        return [f"task {task.id!r}: an empty program scores {score:g}" for task, score in scores if score]

    @property
    def contained(self) -> str:
        """Name of the sandbox in which programs run."""
        return self.sandbox.name

    def close(self) -> None:
        """Close the sandbox if this source owns it."""
        if self._owned:
            self.sandbox.close()


def _failed_run(ran: Ran) -> Outcome:
    """The outcome of a run that failed. The text has no raw control characters."""
    complaint = f": {ran.complaint}" if ran.complaint else ""
    return Outcome(ran.why, f"{ran.why} (exit {ran.exit}, {ran.seconds:.2f} s){complaint}")


def _call_outcome(ran: Ran, test: CallTest) -> Outcome:
    """The outcome of a call: whether it returned a right value."""
    if ran.why != "ok":
        return _failed_run(ran)
    try:
        value = heard(ran.result)
    except NoValidValue as error:
        return Outcome(error.kind, str(error))
    if any(same(value, wanted, test.how) for wanted in (test.wanted, *test.also)):
        return Outcome()
    wanted = f", wanted {shown(encode(test.wanted))}" if test.public else ""
    return Outcome("wrong", f"returned {shown(value)}{wanted}")


def _print_outcome(ran: Ran, test: InputTest, limits: ProgramLimits) -> Outcome:
    """The outcome of a run with input: whether it printed the wanted lines."""
    if ran.why != "ok":
        return _failed_run(ran)
    # The output was cut at the limit. The part that is left could look like a right answer.
    if ran.cut and len(ran.stdout) >= limits.output:
        return Outcome("output", "printed more than is kept")
    printed, expected = _lines(ran.said), _lines(test.wanted)
    if len(printed) == len(expected) and all(
        _alike(*lines, test.tolerance) for lines in zip(printed, expected, strict=True)
    ):
        return Outcome()
    wanted = f", wanted {test.wanted[:80]!r}" if test.public else ""
    return Outcome("wrong", f"printed {ran.said[:80]!r}{wanted}")


def _lines(text: str) -> list[str]:
    """The lines of a text without white space at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _alike(said: str, wanted: str, tolerance: float) -> bool:
    """Returns whether two lines are equal, numbers with a decimal point or an exponent up to the tolerance.

    >>> _alike("Case #1: 0.3333333", "Case #1: 0.33333333", 1e-6), _alike("v1.2.30", "v1.2.3", 1e-6)
    (True, False)
    """
    if said == wanted or not tolerance:
        return said == wanted
    # The pattern has one group, so `split` returns text at even places and numbers at odd ones.
    one, other = _NUMBER.split(said), _NUMBER.split(wanted)
    return len(one) == len(other) and all(
        a == b
        or (
            i % 2 == 1  # numbers stand at the odd places
            # If the wanted number is an integer, it has to be printed exactly.
            and not b.lstrip("+-").isdecimal()
            and math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
        )
        for i, (a, b) in enumerate(zip(one, other, strict=True))
    )


def _with_typing(program: str) -> str:
    """The program with an import of `typing`, if it uses names such as `List` that starter code does not import."""
    # Where annotations are not evaluated, their names need no import, and `from __future__` has to come first.
    return f"from typing import *\n{program}" if _TYPED.search(program) and "__future__" not in program else program


def _call_of(program: str, test: CallTest) -> Call:
    """The call of a test, with `Solution.` before its function if the program has such a class."""
    # Public data sets call a function, and write their starter code as a method of `class Solution`.
    method = test.method and re.search(r"^class Solution\b", program, re.MULTILINE)
    return replace(test.call, function=f"Solution.{test.call.function}") if method else test.call
