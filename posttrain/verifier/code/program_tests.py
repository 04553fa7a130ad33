"""Tests of programs as data. Inputs and expected values are separate, because only the inputs enter a sandbox.

A task has them in `info["tests"]`: a list (or its JSON) of

- `{"function": "f", "args": [1, 2], "expected": 3}`, also `kwargs`, `tolerance`, `any_sequence`; a method is
  `Solution.f`
- `{"stdin": "1 2\\n", "stdout": "3\\n"}`, also `tolerance`
- `"assert f(1, 2) == 3"`: text of asserts. If all of them are calls with literal arguments, they become the first
  form. Otherwise the text is a weak test and needs `weak=True`: it has to enter the sandbox, where the program could
  find the answer or deceive the test.

The forms of public data sets are read too: `{"inputs": [...], "outputs": [...]}`, with `fn_name` where a function is
called (APPS, TACO), and lists of `{"input", "output", "testtype"}` (LiveCodeBench). A task without `info["tests"]` has
its tests in its answer.

With `"public": true` the verdict may show what was wanted. By default tests are hidden.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.core.types import Task
from posttrain.sandbox.cell.program import NotPlain, encode
from posttrain.sandbox.comparison import Comparison
from posttrain.sandbox.sandbox_types import KIB, MOST_SAID, Call
from posttrain.system.errors import DataError, nearest

TOLERANCE = 1e-6
"""How far a printed number with a decimal point may be from the wanted one, absolute or relative."""


@dataclass(frozen=True)
class CallTest:
    """The function of `call` is called and has to return `wanted`."""

    call: Call
    wanted: Any
    how: Comparison = Comparison()
    public: bool = False
    also: tuple[Any, ...] = ()
    """Other values that are as right."""
    method: bool = False
    """Whether the function may be a method of a class `Solution` instead."""

    @cached_property
    def room(self) -> int:
        """The output limit in bytes: enough for a right answer."""
        return SPARE + 2 * len(json.dumps(encode(self.wanted)))


@dataclass(frozen=True)
class InputTest:
    """The program reads `stdin` and has to print `wanted`, but for white space at the ends of lines and of the text.
    Numbers with a decimal point may differ by `tolerance`, absolute or relative."""

    stdin: str
    wanted: str
    public: bool = False
    tolerance: float = TOLERANCE

    @cached_property
    def room(self) -> int:
        """The output limit in bytes: enough for a right answer, with as much white space again."""
        return SPARE + 2 * len(self.wanted.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class WeakTest:
    """Statements that raise if the program is wrong. They run in its process, so the program could deceive them."""

    source: str
    public: bool = False
    room: int = 0


Test = CallTest | InputTest | WeakTest

CALL_KEYS = ("function", "args", "kwargs", "expected", "tolerance", "any_sequence", "public")
INPUT_KEYS = ("stdin", "stdout", "tolerance", "public")
LOOSE = Comparison(TOLERANCE, any_sequence=True)
"""How values are compared that were written as JSON, which has no tuples."""
SPARE = 4 * KIB
"""Bytes that an output limit leaves beyond a right answer."""


def tests_of(task: Task, *, weak: bool = False) -> tuple[Test, ...]:
    """A task's tests, the public ones first. DataError if there are none or if one cannot be read."""
    column, where = task.info.get("tests"), f"task {task.id!r}: info['tests']"
    if column is None and task.answer is not None:
        column, where = task.answer, f"task {task.id!r}: the answer"
    # In a table a list may be text. Text that begins like JSON is JSON, and other text is asserts.
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        column = _json(column, where)
    column = [column] if isinstance(column, str) else _of_data_set(column, _object(task.info.get("metadata")), where)
    if not isinstance(column, Sequence) or not column:
        raise DataError(
            f"{where} must be a list of at least one test, or {{'inputs', 'outputs'}}; without tests every program"
            " would pass. Where another column holds them, name it: env.args.answer_column"
        )
    tests = [t for i, entry in enumerate(column) for t in _tests_of_entry(entry, f"{where}[{i}]")]
    if not tests:
        raise DataError(f"{where} holds no assert and no test; without tests every program would pass")
    # No program could pass a test whose answer is over the limit of output.
    if (large := next((t for t in tests if t.room > MOST_SAID), None)) is not None:
        raise DataError(
            f"{where} wants an answer of {large.room // 2} bytes; no program may say more than {MOST_SAID // 2}: ask"
            " for less"
        )
    weak_test = next((t for t in tests if isinstance(t, WeakTest)), None)
    if weak_test is not None and not weak:
        raise DataError(
            f"{where}: {weak_test.source.strip()[:80]!r} does not read as `assert f(literals) == literal`, so it would"
            " run where the program can deceive it; rewrite it as {'function', 'args', 'expected'}, or accept such"
            " tests with weak=True"
        )
    # A verdict names the first test that failed. Public tests come first, because their wanted answer may be shown.
    return tuple(sorted(tests, key=lambda t: not t.public))


def wanted_names(tests: Sequence[Test]) -> set[str]:
    """The names of functions and classes that the tests use. Empty for tests that only give input.

    >>> sorted(wanted_names(rewritten("assert f(1) == 2\\nassert len(Solution().g(2)) == 1", "")))
    ['Solution', 'f']
    """
    names: set[str] = set()
    for test in tests:
        if isinstance(test, CallTest):
            names |= {test.call.function.partition(".")[0], *(["Solution"] if test.method else [])}
        elif isinstance(test, WeakTest):
            nodes = list(ast.walk(ast.parse(test.source)))
            used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            # The program need not define what the tests define themselves, nor built-ins.
            stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
            defined = stored | {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            names |= used - defined - set(dir(builtins))
    return names


def _json(text: Any, where: str) -> Any:
    """The value of a JSON text; DataError if it is none."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error


def _object(value: Any) -> Mapping[str, Any]:
    """An object, or one as JSON text; empty for anything else."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _of_data_set(column: Any, shared: Mapping[str, Any], where: str) -> Any:
    """The tests of a public data set as entries that `_tests_of_entry` reads; anything else as it is. `shared`: what
    the task says of all its tests, such as `fn_name`."""
    wrapped = False
    if isinstance(column, Mapping) and "inputs" in column and "outputs" in column:
        inputs, outputs = column["inputs"], column["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            counts = [len(x) if isinstance(x, list) else "no list of" for x in (inputs, outputs)]
            raise DataError(f"{where} has {counts[0]} inputs and {counts[1]} outputs: give one output for each input")
        wrapped = all(isinstance(o, list) and len(o) == 1 for o in outputs)  # APPS writes a value v as [v]
        shared, column = {**shared, **column}, [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(column, list) or not all(
        isinstance(t, Mapping) and {"input", "output"} <= t.keys() for t in column
    ):
        return column
    # A later source replaces an earlier one: what is said of all tests, then the test's metadata, then the test itself.
    return [_data_set_test(t, {**shared, **_object(t.get("metadata")), **t}, wrapped, where) for t in column]


def _data_set_test(
    test: Mapping[str, Any], settings: Mapping[str, Any], wrapped: bool, where: str
) -> CallTest | dict[str, str]:
    """One test of a public data set, as a call or as `stdin` and `stdout`.

    `settings`: the test together with what is said of all tests. `wrapped`: an output `[v]` may mean the value v.
    """
    name = settings.get("fn_name") or settings.get("func_name")
    if (settings.get("testtype") or ("functional" if name else "stdin")) != "functional":
        return {"stdin": _lines(test["input"]), "stdout": _lines(test["output"])}
    if not name:
        raise DataError(f"{where} has a functional test and no name: give fn_name, the function that is called")
    return _call_test(name, test["input"], test["output"], wrapped, where)


def _lines(text: Any) -> str:
    """A text, or a list of lines as one text."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _call_test(name: Any, arguments: Any, wanted: Any, wrapped: bool, where: str) -> CallTest:
    """A test that calls a function. `arguments` is a list, or a text with one argument in JSON on each line; then the
    output is JSON too."""
    if isinstance(arguments, str):
        arguments = [_json(line, where) for line in arguments.split("\n") if line.strip()]
        wanted = _json(wanted, where) if isinstance(wanted, str) else wanted
    if not isinstance(arguments, list):
        raise DataError(f"{where}: the input of {name} is {type(arguments).__name__}, wanted a list of its arguments")
    # `[3]` may be the value 3 with a list around it, or a list that is the value itself, so both are right.
    also = (wanted[0],) if wrapped else ()
    return _plain(CallTest(Call(str(name), tuple(arguments)), wanted, LOOSE, also=also, method=True), where)


def _tests_of_entry(entry: Any, where: str) -> list[Test]:
    """The tests of one entry of `info["tests"]`. DataError if it cannot be read."""
    if isinstance(entry, CallTest):
        return [entry]
    if isinstance(entry, str):
        return rewritten(entry, where)
    if not isinstance(entry, Mapping):
        raise DataError(f"{where} is {type(entry).__name__}; a test is an object or a text of asserts")
    # In a table every test has every field, and those of the other form are empty. A function may return None.
    inputs = entry.get("stdin") is not None
    entry = {k: v for k, v in entry.items() if v is not None or (k == "expected" and not inputs)}
    keys = INPUT_KEYS if "stdin" in entry else CALL_KEYS
    unknown = [k for k in entry if k not in keys]
    if unknown:
        raise DataError(f"{where}: unknown key {unknown[0]!r}: {nearest(str(unknown[0]), keys)}")
    missing = [k for k in (("stdout",) if "stdin" in entry else ("function", "expected")) if k not in entry]
    if missing:
        raise DataError(f"{where} lacks {missing[0]!r}")
    try:
        tolerance = float(entry.get("tolerance", TOLERANCE if "stdin" in entry else 0.0))
    except (TypeError, ValueError):
        tolerance = math.nan
    if not 0 <= tolerance < math.inf:
        raise DataError(f"{where}: tolerance is {entry['tolerance']!r:.40}, wanted a number of 0 or more")
    public = bool(entry.get("public", False))
    if "stdin" in entry:
        if not str(entry["stdout"]).strip():
            raise DataError(f"{where} wants empty output, which a program that does nothing gives too")
        return [InputTest(str(entry["stdin"]), str(entry["stdout"]), public, tolerance)]
    args, kwargs = entry.get("args", ()), entry.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise DataError(f"{where}: args is a list and kwargs an object, not {args!r:.40} and {kwargs!r:.40}")
    call = Call(str(entry["function"]), tuple(args), tuple(kwargs.items()))
    comparison = Comparison(tolerance, any_sequence=bool(entry.get("any_sequence", False)))
    return [_plain(CallTest(call, entry["expected"], comparison, public), where)]


def _plain(test: CallTest, where: str) -> CallTest:
    """The test itself, checked. DataError if an argument or the wanted value is no plain built-in value."""
    try:
        # A value that cannot be compared is refused before the run and not in the middle of it.
        encode([list(test.call.args), dict(test.call.kwargs), test.wanted])
    except NotPlain as error:
        raise DataError(f"{where}: arguments and expected values are plain built-in values: {error}") from None
    return test


def rewritten(source: str, where: str) -> list[Test]:
    """The asserts of a text as tests: `CallTest`s if all are calls with literal arguments, else one weak test of the
    whole text.

    >>> rewritten("assert f(1, k=[2]) == {'a': 3}", "")[0].wanted
    {'a': 3}
    """
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise DataError(f"{where} is neither JSON nor Python: {error.msg} in line {error.lineno}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where} cannot be read as Python: {type(error).__name__}: {error}") from error
    tests = [_from_assert(s) for s in body if not isinstance(s, ast.Import | ast.ImportFrom)]
    call_tests = [t for t in tests if t is not None]
    if len(call_tests) == len(tests):
        return [_plain(t, where) for t in call_tests]
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(ast.parse(source))):
        raise DataError(f"{where} contains no assert")
    # HumanEval writes `def check(candidate): ...` and calls it elsewhere.
    if all(isinstance(s, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign) for s in body):
        raise DataError(
            f"{where} defines its checks and never calls them, so every program would pass; add the call, such as"
            " check(f)"
        )
    return [WeakTest(source)]


def _from_assert(statement: ast.stmt) -> CallTest | None:
    """The test that an assert states; None if it is no call with literal arguments compared to a literal."""
    if not isinstance(statement, ast.Assert):
        return None
    condition = statement.test
    if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
        return None
    left, right, op = condition.left, condition.comparators[0], condition.ops[0]
    if isinstance(op, ast.Lt | ast.LtE):
        return _from_difference(left, right, less=isinstance(op, ast.Lt))
    if not isinstance(op, ast.Eq | ast.Is):
        return None
    # `assert 3 == f(1)` is the same test.
    for call_node, value_node in ((left, right), (right, left)):
        call, wanted = _call(call_node), _literal(value_node)
        if call is not None and wanted is not None:
            return CallTest(call, wanted[0])
    return None


def _from_difference(left: ast.expr, right: ast.expr, *, less: bool) -> CallTest | None:
    """The test of `assert abs(f(x) - literal) < bound`; None for other expressions."""
    match left:
        case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call_node, op=ast.Sub(), right=value_node)]):
            call, wanted, bound = _call(call_node), _literal(value_node), _literal(right)
        case _:
            return None
    if bound is None or not isinstance(bound[0], float) or bound[0] <= 0:
        return None
    if call is None or wanted is None or not isinstance(wanted[0], int | float):
        return None
    # A comparison allows a difference equal to its tolerance, and `<` does not: so the next smaller float.
    tolerance = math.nextafter(bound[0], 0.0) if less else bound[0]
    return CallTest(call, float(wanted[0]), Comparison(tolerance=tolerance, relative=False)) if tolerance else None


def _call(node: ast.expr) -> Call | None:
    """The call that an expression makes with literal arguments; None for other expressions."""
    if not isinstance(node, ast.Call):
        return None
    name = _name(node.func)
    args = [_literal(a) for a in node.args]
    kwargs = [(k.arg, _literal(k.value)) for k in node.keywords]
    if not name or None in args or any(k is None or v is None for k, v in kwargs):
        return None
    return Call(name, tuple(a[0] for a in args if a), tuple((k, v[0]) for k, v in kwargs if k and v))


def _name(node: ast.expr) -> str:
    """`f`, or `Solution.f` for `Solution().f`; '' for anything else, and for built-ins that only wrap the real call."""
    match node:
        case ast.Name(id=name):
            return "" if hasattr(builtins, name) else name
        case ast.Attribute(value=ast.Call(func=func, args=[], keywords=[]), attr=method):
            return f"{owner}.{method}" if (owner := _name(func)) else ""
    return ""


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal in a tuple of one; None for other expressions. The literal `None` gives `(None,)`."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
