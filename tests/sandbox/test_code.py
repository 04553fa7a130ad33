"""Programs judged by tests: right ones earn 1, and every known way to look right without being it earns nothing.

Case numbers with V are those of the list of exploits of verifiers that the judge was designed against.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.sandbox.cell.program import NotPlain, decode, encode
from posttrain.sandbox.comparison import Comparison, NoValidValue, heard, same
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import Call, ProgramLimits, SandboxBroken
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.code.code_reward import Code
from posttrain.verifier.code.fences import blocks_of, last_of
from posttrain.verifier.code.program_tests import CallTest, InputTest, WeakTest, rewritten
from posttrain.verifier.code.program_tests import tests_of as read_tests
from tests.sandbox.sandbox_parts import backend


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(backend("namespaces"), workers=2, limits=ProgramLimits(wall=10.0)) as pool:
        yield pool


def task(*tests: Any) -> Task:
    return Task("t", "write f", info={"tests": list(tests)})


def judged(sandbox: Sandbox, program: str, *tests: Any, **options: Any) -> Verdict:
    code = Code(sandbox, **options)
    return asyncio.run(code.verdict(task(*tests), program))


ADD = ({"function": "f", "args": [1, 2], "expected": 3}, {"function": "f", "args": [5, -2], "expected": 3})
ECHO = ({"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 5\n", "stdout": "15"})


def test_right_programs_earn_everything(sandbox: Sandbox) -> None:
    assert judged(sandbox, "def f(a, b): return a + b", *ADD) == Verdict.value(1.0)
    assert judged(sandbox, "Here:\n```python\ndef f(a, b):\n    return a + b\n```\nDone.", *ADD).score == 1.0
    assert judged(sandbox, "a, b = map(int, input().split())\nprint(a + b, '')", *ECHO).score == 1.0
    assert judged(sandbox, "def f(a, b): return a + b", "assert f(1, 2) == 3\nassert f(0, b=1) == 1").score == 1.0
    method = {"function": "Solution.f", "args": [[3, 1, 2]], "expected": [1, 2, 3]}
    assert judged(sandbox, "class Solution:\n def f(self, x): return sorted(x)", method).score == 1.0


def test_the_share_of_tests_passed(sandbox: Sandbox) -> None:
    half = "def f(a, b): return a + b if a == 1 else None"
    assert judged(sandbox, half, *ADD).score == 0.0
    verdict = judged(sandbox, half, *ADD, scoring="fraction")
    assert (verdict.score, verdict.kind) == (0.5, "wrong")


PRINTED = [
    ("0.3333333333333333", "0.3333333", {}, 1.0),
    ("0.50 -0.0 2", "0.5 0.0 2.0", {}, 1.0),
    ("1e-07 1e+16", "0.0000001 10000000000000000.0", {}, 1.0),
    ("Case #1: [0.30000000000000004, 1.0]", "Case #1: [0.3, 1.0]", {}, 1.0),
    ("123456789.1", "123456789.2", {}, 1.0),
    ("2.0", "2", {}, 0.0),
    ("Case #1: 0.33333", "Case #1: 0.33334", {}, 0.0),
    ("v1.2.30", "v1.2.3", {}, 0.0),
    ("yes 0.5", "no 0.5", {}, 0.0),
    ("0.5 0.5", "0.5", {}, 0.0),
    ("0.50", "0.5", {"tolerance": 0}, 0.0),
    ("0.505", "0.5", {"tolerance": 0.01}, 1.0),
    ("1" * 60000 + "a", "1" * 60000 + ".5", {}, 0.0),
]


@pytest.mark.parametrize(("said", "wanted", "beside", "score"), PRINTED)
def test_printed_decimals_have_a_tolerance_and_integers_and_words_none(
    sandbox: Sandbox, said: str, wanted: str, beside: dict[str, Any], score: float
) -> None:
    assert judged(sandbox, f"print({said!r})", {"stdin": "", "stdout": wanted, **beside}).score == score


STARTER = "class Solution:\n    def total(self, a: List[int], b: Optional[int] = 0) -> int:\n        return sum(a) + b"
FIELD = [
    (STARTER, {"fn_name": "total", "inputs": [[[1, 2], 3]], "outputs": [[6]]}, {}, 1.0),
    (STARTER, {"fn_name": "total", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}, {}, 1.0),
    (
        STARTER,
        [{"input": "[1, 2]", "output": "4", "testtype": "functional"}],
        {"metadata": '{"func_name": "total"}'},
        0.0,
    ),
    (STARTER, [{"input": "[1]", "output": "1", "testtype": "functional", "metadata": {"func_name": "total"}}], {}, 1.0),
    ("def wrap(a): return a,", {"fn_name": "wrap", "inputs": [[1], [2]], "outputs": [[1], [2]]}, {}, 1.0),
    ("def add(a, b): return a - b", {"fn_name": "add", "inputs": [[3, 1]], "outputs": [[4]]}, {}, 0.0),
    ("print(sum(map(int, open(0))))", {"inputs": ["1\n2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}, {}, 1.0),
    ("print(int(input()) + 1)", [{"input": "1\n", "output": "2\n", "testtype": "stdin"}], {}, 1.0),
    ("from __future__ import annotations\ndef f(a: List[int]): return a", ["assert f([1]) == [1]"], {}, 1.0),
    ("class List: pass\ndef f(): return List.__name__", ["assert f() == 'List'"], {}, 1.0),
]


@pytest.mark.parametrize(("program", "tests", "beside", "score"), FIELD)
def test_tests_in_the_forms_of_public_data_sets(
    sandbox: Sandbox, program: str, tests: Any, beside: dict[str, Any], score: float
) -> None:
    """As objects, as JSON text, and in the place of the answer; starter code has no imports."""
    text = json.dumps(tests)
    for one in (
        Task("t", "p", info={**beside, "tests": tests}),
        Task("t", "p", info={**beside, "tests": text}),
        Task("t", "p", answer=text, info=beside),
    ):
        assert asyncio.run(Code(sandbox).verdict(one, f"```python\n{program}\n```")).score == score


CHEATS = [
    ("V-01 exit", "import sys; sys.exit(0)"),
    ("V-01 hard exit", "import os; os._exit(0)"),
    ("V-01 exit in the call", "def f(a, b): raise SystemExit"),
    ("V-01 hard exit in the call", "import os\ndef f(a, b): os._exit(0)"),
    ("V-01 at exit", "import atexit, os\natexit.register(os._exit, 0)\ndef f(a, b): return 0"),
    (
        "V-01 thread exits",
        "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef f(a, b):\n while True: pass",
    ),
    (
        "V-02 equal to everything",
        (
            "class E:\n __eq__ = lambda s, o: True\n __ne__ = lambda s, o: False\n __hash__ = lambda s: 3\ndef f(a, b):"
            " return E()"
        ),
    ),
    (
        "V-03 subclass of int",
        "class I(int):\n __eq__ = lambda s, o: True\n __hash__ = int.__hash__\ndef f(a, b): return I(3)",
    ),
    ("V-03 subclass of str", "class S(str): pass\ndef f(a, b): return S('3')"),
    (
        "V-04 patched helpers",
        (
            "import builtins, json, math, unittest\nmath.isclose = lambda *a, **k: True\njson.loads = lambda *a:"
            " 3\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(a, b): return 0"
        ),
    ),
    (
        "V-05 searches frames and garbage",
        (
            "import gc, sys\ndef f(a, b):\n for o in gc.get_objects():\n  if isinstance(o, dict) and 'expected' in o:"
            " return o['expected']\n g = sys._getframe()\n while g:\n  if 'wanted' in g.f_locals: return"
            " g.f_locals['wanted']\n  g = g.f_back\n return None"
        ),
    ),
    (
        "V-06 reads the tests",
        (
            "import sys, os, glob\ndef f(a, b):\n for p in [*sys.argv, *glob.glob('/inside/**', recursive=True),"
            " *glob.glob('/tmp/**')]:\n  try:\n   if 'wanted' in open(p).read(): return 3\n  except (OSError,"
            " UnicodeDecodeError): pass"
        ),
    ),
    ("V-07 says that it passed", "print('ALL TESTS PASSED'); print('1 passed in 0.01s')\ndef f(a, b): pass"),
    ("V-07 writes a result frame", "import os, json\nos.write(3, json.dumps({'passed': True}).encode()); os._exit(0)"),
    ("V-08 breaks the collection", "raise ImportError"),
    ("V-08 does not parse", "def f(a, b) return 3"),
    (
        "V-09 leaves a conftest",
        "open('conftest.py', 'w').write('x'); open('sitecustomize.py', 'w').write('x')\ndef f(a, b): return 0",
    ),
    ("V-10 a float for an integer", "def f(a, b): return float(a + b)"),
    ("V-10 a decimal", "from decimal import Decimal\ndef f(a, b): return Decimal(a + b)"),
    ("V-10 a float of numpy for an integer", "import numpy as np\ndef f(a, b): return np.float64(a + b)"),
    (
        "V-10 a subclass of a number of numpy",
        (
            "import numpy as np\nclass I(np.int64):\n __eq__ = lambda s, o: True\n item = tolist = lambda s: 3\ndef"
            " f(a, b): return I(a + b)"
        ),
    ),
    ("V-10 text", "def f(a, b): return str(a + b)"),
    ("V-11 recursive", "def f(a, b):\n x = []\n x.append(x)\n return x"),
    ("V-11 huge", "def f(a, b): return [0] * 10**6"),
    ("V-11 long", "def f(a, b): return 'x' * 10**7"),
    ("V-11 generator", "def f(a, b): yield a + b"),
    (
        "V-14 right the second time only",
        "import os\nn = os.path.exists('seen'); open('seen', 'w').close()\ndef f(a, b): return a + b if n else 0",
    ),
    ("the function is missing", "def g(a, b): return a + b"),
    ("nothing", ""),
]


@pytest.mark.parametrize("program", [pytest.param(p, id=i) for i, p in CHEATS])
def test_a_cheat_earns_nothing(sandbox: Sandbox, program: str) -> None:
    verdict = judged(sandbox, program, *ADD)
    assert verdict.state is State.VALUE and verdict.score == 0.0 and verdict.kind, verdict


PRINTS = [
    ("V-13 every candidate", "print(*range(100))", "wrong"),
    ("V-13 a line each", "for i in range(100): print(i)", "wrong"),
    ("nothing", "", "wrong"),
    ("right, then an error", "a, b = map(int, input().split())\nprint(a + b)\n1 / 0", "error"),
    ("too much", "while True: print(3)", "output"),
    ("cut", "print(3)\nprint(' ' * 100_000)", "output"),
    ("control characters", "print('\\x1b[2K3')", "wrong"),
    ("reads too far", "while True: input()", "error"),
]


@pytest.mark.parametrize(("program", "kind"), [pytest.param(p, k, id=i) for i, p, k in PRINTS])
def test_a_wrong_printer_earns_nothing_and_is_called_by_its_fault(sandbox: Sandbox, program: str, kind: str) -> None:
    verdict = judged(sandbox, program, *ECHO)
    assert (verdict.score, verdict.kind) == (0.0, kind), verdict
    assert verdict.why.isprintable()


def test_kinds_of_failure(sandbox: Sandbox) -> None:
    slow = Code(sandbox)
    loop = Task("t", "", info={"tests": list(ADD)})

    async def verdict(program: str) -> str:
        return (await slow.verdict(loop, program)).kind

    assert asyncio.run(verdict("def f(a, b): return bytearray(1 << 30)")) == "memory"
    assert asyncio.run(verdict("import ctypes\ndef f(a, b): ctypes.string_at(0)")) == "crashed"
    assert asyncio.run(verdict("def f(a, b): return object()")) == "type"
    assert asyncio.run(verdict("import os\ndef f(a, b): os._exit(0)")) == "no_result"
    with Sandbox(sandbox.backend, workers=1, limits=ProgramLimits(wall=0.3)) as short:
        assert judged(short, "def f(a, b):\n while True: pass", *ADD).kind == "timeout"


def test_speed_is_measured_outside(sandbox: Sandbox) -> None:
    """V-12."""
    ran = sandbox.run_sync(
        "import time\nreal = time.sleep\ntime.time = time.monotonic = time.perf_counter = lambda: 0\nreal(0.3)"
    )
    assert ran.seconds >= 0.3


def test_hidden_tests_are_not_told_and_public_ones_are(sandbox: Sandbox) -> None:
    wrong = "def f(a, b): return 0"
    secret = {"function": "f", "args": [1], "expected": 987654}
    assert "987654" not in judged(sandbox, "def f(a): return 0", secret).why
    assert "987654" in judged(sandbox, "def f(a): return 0", {**secret, "public": True}).why
    assert "987654" not in judged(sandbox, wrong, {"stdin": "1", "stdout": "987654"}).why
    first = read_tests(task(ADD[0], {**ADD[1], "public": True}))[0]
    assert isinstance(first, CallTest) and first.public


def test_our_failure_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name = "broken"
        waiting = 0
        limits = ProgramLimits()

        async def run(self, *_: object, **__: object) -> None:
            raise SandboxBroken("the sandbox is gone")

    code = Code(Broken())  # type: ignore[arg-type]
    judged = asyncio.run(code(Attempt(task(*ADD), ("def f(a, b): return a + b",), Stop.SAID)))
    assert judged.verdict == Verdict.failed("sandbox", "the sandbox is gone") and judged.source == "code"


WEAK = "def check(g):\n    assert sorted(g(x, 1) for x in range(3)) == [1, 2, 3]\ncheck(f)"


def test_tests_that_run_beside_the_program_are_accepted_by_name_and_called_weak(sandbox: Sandbox) -> None:
    with pytest.raises(DataError, match="accept such tests with weak=True"):
        judged(sandbox, "def f(a, b): return a + b", WEAK)
    verdict = judged(sandbox, "def f(a, b): return a + b", WEAK, weak=True)
    assert verdict.score == 1.0 and "1 weak tests" in verdict.why
    for program in (
        "def f(a, b): return a",
        "import sys\ndef f(a, b): sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "'''",
    ):
        assert judged(sandbox, program, WEAK, weak=True).score == 0.0


REFUSED = [
    ((), "at least one test"),
    (("x = 1",), "contains no assert"),
    (("def check(c):\n assert c(1) == 2",), "never calls them"),
    (("assert f(1 ==",), "neither JSON nor Python"),
    (({"function": "f", "expect": 3},), "did you mean 'expected'"),
    (({"function": "f"},), "lacks 'expected'"),
    (({"stdin": "1", "stdout": " \n"},), "empty output"),
    (({"stdin": "1", "stdout": "1", "tolerance": "some"},), "tolerance is 'some', wanted a number"),
    (({"function": "f", "expected": 1, "tolerance": -1},), "tolerance is -1, wanted a number"),
    (({"function": "f", "args": "12", "expected": 1},), "args is a list and kwargs an object, not '12'"),
    (({"function": "f", "kwargs": ["a"], "expected": 1},), "args is a list and kwargs an object"),
    ((f"assert f({5000 * '-'}1) == 1",), "cannot be read as Python: RecursionError"),
    (({"function": "f", "expected": object()},), "plain built-in values"),
    ((3,), "a test is an object or a text"),
    (({"input": "1", "output": "1", "testtype": "functional"},), "give fn_name"),
    (({"input": "1 2", "output": "1", "fn_name": "f"},), "no JSON"),
]


@pytest.mark.parametrize(("tests", "says"), REFUSED)
def test_tests_that_prove_nothing_are_refused_before_the_run(tests: tuple[Any, ...], says: str) -> None:
    """V-15."""
    with pytest.raises(DataError, match=says):
        read_tests(task(*tests))
    with pytest.raises(DataError, match="2 inputs and 1 outputs"):
        read_tests(Task("t", "", info={"tests": {"inputs": ["1", "2"], "outputs": ["1"]}}))


def test_the_tolerance_and_the_sequences_of_a_test_are_those_it_names() -> None:
    (test,) = read_tests(task({"function": "f", "expected": [1e10], "tolerance": 1e-6, "any_sequence": True}))
    assert isinstance(test, CallTest) and test.how == Comparison(1e-6, relative=True, any_sequence=True)


def test_empty_fields_of_a_table_are_absent() -> None:
    empty = dict.fromkeys(("function", "args", "kwargs", "tolerance", "public"))
    (call,) = read_tests(task({**empty, "function": "f", "args": [1], "expected": None, "stdin": None, "stdout": None}))
    assert call == CallTest(Call("f", (1,)), None)
    (printed,) = read_tests(task({**empty, "expected": None, "stdin": "1", "stdout": "2"}))
    assert isinstance(printed, InputTest) and (printed.stdin, printed.wanted) == ("1", "2")


def test_the_lint_finds_tests_that_an_empty_program_passes(sandbox: Sandbox) -> None:
    """V-16."""
    code = Code(sandbox, weak=True)
    good, bad = task(*ADD), Task("bad", "", info={"tests": "x = 1\nassert x\nprint(x)"})
    assert asyncio.run(code.lint([good, bad])) == ["task 'bad': an empty program scores 1"]
    with pytest.raises(ConfigError, match="neither all nor fraction"):
        Code(sandbox, scoring="some")  # type: ignore[arg-type]


REWRITES = [
    ("assert f(1, [2], k='a') == {'b': (1, None)}", Call("f", (1, [2]), (("k", "a"),)), {"b": (1, None)}),
    ("assert 3 == f(-1)", Call("f", (-1,)), 3),
    ("assert f() is None", Call("f"), None),
    ("from x import f\nassert Solution().go(2) == True, 'message'", Call("Solution.go", (2,)), True),
]


@pytest.mark.parametrize(("text", "call", "wanted"), REWRITES)
def test_asserts_become_calls(text: str, call: Call, wanted: object) -> None:
    assert rewritten(text, "") == [CallTest(call, wanted)]


def test_asserts_with_a_tolerance_and_those_that_stay_weak() -> None:
    assert rewritten("assert abs(f(2) - 1.5) < 1e-6", "") == [
        CallTest(Call("f", (2,)), 1.5, Comparison(math.nextafter(1e-6, 0), relative=False))
    ]
    assert rewritten("assert abs(f(2) - 1.5) <= 1e-6", "") == [
        CallTest(Call("f", (2,)), 1.5, Comparison(1e-6, relative=False))
    ]
    for text in (
        "assert f(1)",
        "assert f(x) == 1",
        "assert len(f(1)) == 2",
        "assert f(1) != 2",
        "assert f(1) == g(1)",
        "assert f(*[1]) == 2",
    ):
        assert rewritten(text, "") == [WeakTest(text)], text


DIFFERENCES = [
    ("abs(f() - 1000.0) < 0.1", "1000.05", 1.0),
    ("abs(f() - 1000.0) < 0.1", "1099.0", 0.0),
    ("abs(f() - 1000000.0) < 1e-3", "1000900.0", 0.0),
    ("abs(f() - 1.0) < 0.5", "1.5", 0.0),
    ("abs(f() - 1.0) <= 0.5", "1.5", 1.0),
    ("abs(f() - 5) < 0.5", "5", 1.0),
]


@pytest.mark.parametrize(("test", "value", "score"), DIFFERENCES)
def test_a_difference_is_bounded_as_it_is_written(sandbox: Sandbox, test: str, value: str, score: float) -> None:
    assert judged(sandbox, f"def f(): return {value}", f"assert {test}").score == score


@pytest.mark.parametrize("bound", ["0.0", "-1.0", "5e-324"])
def test_a_difference_of_nothing_is_no_tolerance(bound: str) -> None:
    assert isinstance(rewritten(f"assert abs(f(2) - 1.5) < {bound}", "")[0], WeakTest)


def test_what_a_right_answer_needs_may_be_said(sandbox: Sandbox) -> None:
    lines = "\n".join(map(str, range(20_000)))
    prints = "print('\\n'.join(map(str, range(20_000))))"
    assert judged(sandbox, prints, {"stdin": "", "stdout": lines}).score == 1.0
    assert judged(sandbox, f"{prints}; print(1)", {"stdin": "", "stdout": lines}).kind == "wrong"
    assert (
        judged(
            sandbox,
            "def f(n): return list(range(n))",
            {"function": "f", "args": [60_000], "expected": list(range(60_000))},
        ).score
        == 1.0
    )
    loud = "import sys\nfor i in range(3000): print('line', i, '.' * 20, file=sys.stderr)\nprint(42)"
    assert judged(sandbox, loud, {"stdin": "", "stdout": "42"}).score == 1.0
    assert judged(sandbox, "print(42, ' ' * 100_000, 43)", {"stdin": "", "stdout": "42"}).kind == "output"
    with pytest.raises(DataError, match="no program may say more"):
        read_tests(task({"stdin": "", "stdout": "x" * 3_000_000}))


@pytest.mark.prove
def test_a_wait_for_us_is_no_time_of_the_program(sandbox: Sandbox) -> None:
    """Two endless programs stand before the two tests of a right one, longer than all its tests may take."""

    async def main() -> Verdict:
        with Sandbox(sandbox.backend, workers=1, limits=ProgramLimits(wall=1.0)) as one:
            hogs = [asyncio.create_task(one.run("while True: pass")) for _ in range(2)]
            await asyncio.sleep(0.05)
            code = Code(one, seconds=1.5)
            verdict = await code.verdict(task("assert f(1) == 2", "assert f(2) == 3"), "def f(x): return x + 1")
            await asyncio.gather(*hogs)
            gauges = code.gauges()
            assert gauges["verifier/code/queue"].sum >= 1 and gauges["verifier/code/kind/passed"].mean > 1.5
            return verdict

    assert asyncio.run(main()).score == 1.0


def test_the_time_of_all_tests_is_bounded(sandbox: Sandbox) -> None:
    slow = "import time\ndef f(x): time.sleep(0.3); return x"
    tests = [{"function": "f", "args": [i], "expected": i} for i in range(4)]
    verdict = judged(sandbox, slow, *tests, seconds=0.5, scoring="fraction")
    assert (verdict.score, verdict.kind) == (0.5, "timeout")


def program_in(text: str) -> str:
    return last_of(blocks_of(text))


def test_the_program_of_a_response() -> None:
    assert program_in("x = 1") == "x = 1"
    assert program_in("```\na\n```\n```python\nb\n```\n```text\nc\n```") == "b\n"
    assert program_in("```python\nb\n```\nno:\n```py\nd\n```") == "d\n"
    assert program_in("```python\nunfinished") == "unfinished"
    assert program_in("```js\na\n```") == "a\n"
    assert program_in("```python\na```\nand\n```py\nb```") == "b" and program_in("```python\na```") == "a"
    assert program_in("1. Here:\n   ```python\n   def f():\n       return 1\n   ```\n") == "def f():\n    return 1\n"
    assert program_in("Here it is: ```python\ndef f():\n    return 1\n```\n") == "def f():\n    return 1\n"
    assert program_in("- ```python\n  x = 1\n  ```\n") == "x = 1\n"
    assert program_in("```python\ndef f():\n    return '```'\n```\n") == "def f():\n    return '```'\n"
    doc = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert program_in(f"```python\n{doc}```\nThat is it.") == doc
    assert program_in(f"````python\n{doc}````") == doc and program_in("````\n```\nx\n```\n````") == "```\nx\n```\n"


STRICT = [
    (5, 5, True),
    (5.0, 5, False),
    (True, 1, False),
    (1, True, False),
    ("5", 5, False),
    (None, False, False),
    (float("nan"), float("nan"), True),
    (1.0, float("nan"), False),
    (-0.0, 0.0, False),
    (float("inf"), float("inf"), True),
    ([1], (1,), False),
    ((1, 2), (1, 2), True),
    ({1, 2}, {2, 1}, True),
    ({1}, frozenset({1}), False),
    (b"a", b"a", True),
    ({"a": 1, 2: [3]}, {2: [3], "a": 1}, True),
    ({1: 2}, {True: 2}, False),
    ([1, 2], [1], False),
    ("\ud800", "\ud800", True),
    ([], {}, False),
    ({frozenset({"a"})}, {frozenset({"b"})}, False),
    ({frozenset({1}): 2}, {frozenset({1}): 3}, False),
]


@pytest.mark.parametrize(("said", "wanted", "equal"), STRICT)
def test_values_are_the_same_by_type_and_value(said: object, wanted: object, equal: bool) -> None:
    """V-10."""
    assert same(encode(said), wanted) is equal
    assert type(decode(encode(said))) is type(said)


def test_sets_in_sets_are_the_same_in_any_order() -> None:
    """The order they are walked in depends on the interpreter's hashes: here it is reversed."""

    def turned(value: Any) -> Any:
        if isinstance(value, list):
            return [turned(v) for v in value]
        if not isinstance(value, dict):
            return value
        return {
            k: [turned(p) for p in reversed(v)] if k in ("set", "frozenset", "dict") else turned(v)
            for k, v in value.items()
        }

    words = frozenset({"eat", "tea", "ate"})
    for value in (
        {words, frozenset({"tan", "nat"})},
        {words: 1, frozenset({8, 0}): 2},
        [{frozenset({words, frozenset()})}],
        {(1, words): {2, 3}},
    ):
        assert same(turned(encode(value)), value) and same(encode(value), value)
    deep: Any = {"int": "0x1"}
    for _ in range(200):
        deep = {"frozenset": [deep]}
    assert not same({"set": [deep]}, {1})


def test_numbers_too_long_to_print_are_compared_all_the_same(sandbox: Sandbox) -> None:
    assert same(encode(10**9000), 10**9000) and not same(encode(10**9000), 10**9000 + 1)
    test = {"function": "f", "args": [], "expected": 10**9000, "public": True}
    assert judged(sandbox, "def f(): return 10**9000", test).score == 1.0
    assert judged(sandbox, "def f(): return 10**9000 + 1", test).kind == "wrong"


def test_a_tolerance_is_explicit() -> None:
    near = Comparison(tolerance=1e-6)
    assert same(encode([0.1 + 0.2, 1]), [0.3, 1.0], near) and same(-0.0, 0.0, near) and not same(0.31, 0.3, near)
    assert (
        not same(encode(1.0), 1, near)
        and not same(encode(float("nan")), 1.0, near)
        and not same({"int": "zz"}, 1.0, near)
    )
    assert same(encode(((1,), [2])), [[1], (2,)], Comparison(any_sequence=True))


FORGED = [
    b"",
    b"{",
    b"3",
    b'{"passed": true}',
    b"[" * 100_000,
    b'{"value": 1, "x": 2}',
    b'{"value":' + b"9" * 10_000 + b"}",
    b"\xff",
]


@pytest.mark.parametrize("result", FORGED)
def test_a_forged_frame_is_no_value(result: bytes) -> None:
    """V-07, H-25."""
    with pytest.raises(NoValidValue):
        heard(result)


@pytest.mark.parametrize(
    "said", [3, [3], {"int": 3}, {"int": "3"}, {"list": 3}, {"dict": [3]}, {"int": "0x3", "x": 1}, {}, {"set": [{}]}]
)
def test_a_forged_value_is_not_equal_and_breaks_nothing(said: Any) -> None:
    for wanted in (3, [3], {3: 3}, {3}, 3.0, "3", None):
        assert not same(said, wanted) and not same(said, wanted, Comparison(1e-3, True))


def test_what_is_not_plain_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value in (object(), 1j, range(3), deep, [0] * 300_000):
        with pytest.raises(NotPlain):
            encode(value)


@pytest.mark.prove
def test_the_page_about_the_sandbox_is_true() -> None:
    backend("namespaces")
    blocks = (Path(__file__).parents[2] / "docs/guides/sandbox.md").read_text().split("```python\n")[1:]
    assert len(blocks) == 3
    for block in blocks:
        lines = block.splitlines()
        exec(compile("\n".join(lines[: lines.index("```")]), "sandbox.md", "exec"), {})
