"""Calls math-verify, in a worker process, for comparisons that our own rules cannot decide.

It gets single, spelled expressions, and its LaTeX grammar reads them. Its parser for plain expressions uses Python's
`eval` through sympy's `parse_expr`. That function is replaced in the whole process by one that reads only numbers and
names, so no text is ever evaluated.

Expressions are compared by their values, to 300 digits, at random points. Letters are real, and positive where one of
them stands under a root or in a logarithm, unless there is an absolute value. The letters `k`, `l`, `m` and `n` are
whole numbers, each greater than those before it.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from posttrain.core.verdict import Verdict
from posttrain.verifier.math.answer_values import Other, Value, parts
from posttrain.verifier.math.equal import ROUNDED, near
from posttrain.verifier.math.grade import UnreadableError, gold_of, grade
from posttrain.verifier.workers.worker_pool import reply_of

_SAME = (
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("\\pi", "3.141593"),
    ("\\frac{x+1}{2}", "\\frac{x}{2}+0.5"),
)
"""Pairs that a working algebra finds equal."""

_NUMBER = re.compile(r"[-+]?(?:\d+/\d+|\d+\.?\d*|\.\d+)")  # `-3/4`, `2.`, `.5`
_ROUNDED = re.compile(rf"-?\d*\.(\d{{{ROUNDED},}})")  # `0.333333`; group 1: the digits after the point
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")  # `\sin 30`, and not `\sinh x`


class _RefusedError(BaseException):
    """Text would be evaluated as Python. It is no Exception, so that the algebra does not catch it."""


def handler(argument: str = "") -> Callable[[Any], dict[str, Any]]:
    """Answers (gold, response) with a verdict, and (gold, None) with 1 if the gold answer can be read. RuntimeError if
    the algebra fails a pair that it must find equal, and so would judge wrongly."""
    all(equal(g, s) for g, s in _SAME)  # sympy loads parts of itself late, and builds them from text
    # Only after the first pairs: from here on sympy cannot build its own parts from text. What was parsed before is
    # forgotten, so that the second self-test runs as every request will.
    _forbid_eval()
    parsed.cache_clear()
    equal.cache_clear()
    if not all(equal(g, s) for g, s in _SAME) or equal("x^2+1", "(x-1)(x+1)"):
        raise RuntimeError("math-verify fails its self-test; install the version of constraints.txt")
    return lambda request: reply_of(answer(*request))


def answer(gold: str, response: str | None) -> Verdict:
    """Returns the verdict on a response, or, where `response` is None, 1 if the gold answer can be read."""
    # The gold answer is read here as it was in the trainer, so that the request is plain text.
    wanted = gold_of(gold)
    if wanted is None:
        return Verdict.failed("gold", f"there is no answer in {gold[:80]!r}")
    if response is None:
        try:
            for value in wanted.values:
                _readable(value)
        except UnreadableError as error:
            return Verdict.failed("gold", f"cannot read {str(error)[:80]!r}")
        return Verdict.value(1.0)
    try:
        graded = grade(wanted, response, equal)
    except UnreadableError as error:
        return Verdict.failed("gold", f"cannot read the gold answer {str(error)[:80]!r}")
    return graded.verdict if graded else Verdict.failed("worker", "the algebra gave no answer")


@functools.lru_cache(maxsize=65536)
def equal(gold: str, said: str) -> bool:
    """Returns whether two expressions are equal: by their values, and relations, sets and matrices by math-verify.
    UnreadableError if one cannot be read. Samples of a group often have the same answer, so results are cached."""
    from math_verify import verify

    try:
        gold_expression, said_expression = parsed(gold), parsed(said)
        if gold_expression is None or said_expression is None:
            raise UnreadableError(gold if gold_expression is None else said, gold=gold_expression is None)
        # None: they are relations, sets or matrices, or their values cannot be computed.
        same = same_values(gold_expression, said_expression, f"{gold}={said}", _rounding(gold) or _rounding(said))
        if same is not None:
            return same
        # math-verify's own limit on time is off: the worker's limit on processor time ends a long comparison.
        return verify(gold_expression, said_expression, allow_set_relation_comp=True, timeout_seconds=None)
    except _RefusedError:
        raise UnreadableError(said, gold=False) from None


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """The sympy expression of a spelled text; None if the grammar does not accept the text. An `i` alone is the
    imaginary unit, and the angles of functions may be in degrees."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )

    text = text.replace("%", "\\%")
    try:
        expression: Any = latex2sympy(
            normalize_latex(text, NormalizationConfig(boxed="none")),
            is_real=True,
            convert_degrees=_ANGLE.search(text) is not None,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        imaginary = sympy.Symbol("i", real=True)
        return expression.xreplace({imaginary: sympy.I}) if imaginary in expression.free_symbols else expression
    # The grammar raises exceptions of many kinds for what it does not accept.
    except Exception:
        return None


def _rounding(text: str) -> int:
    """How many digits a decimal of at least `ROUNDED` digits has after its point: it also equals what it rounds. 0 for
    all other text."""
    decimal = _ROUNDED.fullmatch(text)
    return len(decimal[1]) if decimal else 0


def _readable(value: Value) -> None:
    """Raises UnreadableError if the algebra cannot read an expression inside a gold value."""
    for inner in parts(value):
        _readable(inner)
    if isinstance(value, Other) and parsed(value.text) is None:
        raise UnreadableError(value.text, gold=True)


def _forbid_eval() -> None:
    """Replaces sympy's parser of text by one that reads numbers and names only. Sympy's parser uses `eval`."""
    import sympy

    known = {"oo": sympy.oo, "zoo": sympy.zoo, "nan": sympy.nan, "pi": sympy.pi, "E": sympy.E, "I": sympy.I}

    def numbers_only(text: str, *args: Any, **kwargs: Any) -> Any:
        if str(text).isidentifier():
            return known.get(str(text)) or sympy.Symbol(str(text))
        if _NUMBER.fullmatch(str(text)) is None:
            raise _RefusedError(str(text)[:80])
        return sympy.Rational(text)

    # Each of these modules has its own reference to the function.
    for name in (
        "sympy.parsing.sympy_parser",
        "sympy.parsing",
        "math_verify.parser",
        "latex2sympy2_extended.latex2sympy2",
    ):
        importlib.import_module(name).parse_expr = numbers_only  # type: ignore[attr-defined]


DIGITS = 300
"""A difference counts as 0 if none of its digits is significant when it is computed with up to this many digits."""
POINTS = 4
"""The number of random points at which expressions with letters are compared."""
# The letters of whole numbers, each with the range of its value. They do not overlap, so k < l < m < n everywhere.
_WHOLE = {"k": (2, 4), "l": (5, 7), "m": (8, 11), "n": (12, 30)}


def same_values(one: Any, two: Any, seed: str, rounding: int = 0) -> bool | None:
    """Returns whether two expressions are equal; None if one is no expression of numbers or has no value anywhere.

    `seed`: text from which the points are drawn. `rounding`: the digits after the point to which a constant is given.
    """
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(two, sympy.Expr)) or one.is_Matrix or two.is_Matrix:
        return None
    # The seed and the sorted letters give a pair the same points, and so the same verdict, in every process.
    letters = sorted(one.free_symbols | two.free_symbols, key=str)
    signed = one.has(sympy.Abs) or two.has(sympy.Abs) or not (_rooted(one) or _rooted(two))
    draw = random.Random(seed)
    # The difference is not simplified, which may take very long: it is 0 everywhere or at none of a few random points.
    difference = sympy.Add(_real_roots(one), sympy.Mul(-1, _real_roots(two), evaluate=False), evaluate=False)
    zero_there = [_zero(difference, _point(letters, draw, signed, k)) for k in range(POINTS if letters else 1)]
    # A point at which the difference cannot be computed decides nothing.
    decided = [t for t in zero_there if t is not None]
    if rounding and decided == [False] and not letters:
        return _rounds(one, two, rounding)
    return all(decided) if decided else None


def _point(letters: list[Any], draw: random.Random, signed: bool, number: int) -> dict[Any, Any]:
    """A value for each letter. Over the `POINTS` points, two letters are below and above 1 (in absolute value) in all
    four combinations."""
    import sympy

    values: dict[Any, Any] = {}
    for i, letter in enumerate(letters):
        if letter.name in _WHOLE:
            values[letter] = sympy.Integer(draw.randint(*_WHOLE[letter.name]))
            continue
        # Bit i % 2 of the number says on which side of 1 a letter lies. 997 is prime, so that no round number, at which
        # different expressions may meet, is drawn.
        size = draw.randint(200, 900) if number >> i % 2 & 1 else draw.randint(1100, 4000)
        values[letter] = sympy.Rational(size, 997) * (draw.choice((1, -1)) if signed else 1)
    return values


def _zero(expression: Any, point: dict[Any, Any]) -> bool | None:
    """Returns whether the value at a point is 0. A rational value is compared exactly. None if there is no value."""
    try:
        # Rational values are computed exactly. Others are evaluated with more and more digits up to `maxn`; sympy gives
        # a part precision 1 where none of its digits is significant even then, and such a part is 0.
        if expression.is_rational_function() and (value := expression.xreplace(point).doit()).is_Rational:
            return bool(value == 0)
        value = expression.evalf(15, subs=point, maxn=DIGITS)
        if not value.is_number or not value.is_finite:
            return None
        return all(part == 0 or part._prec == 1 for part in value.as_real_imag())
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _rounds(one: Any, two: Any, digits: int) -> bool:
    """Returns whether one constant is the other, rounded to `digits` digits after the point."""
    x, y = (e.evalf(digits + 20) for e in (one, two))
    return bool(x.is_real and y.is_real) and near(Fraction(str(x)), Fraction(str(y)), digits)


def _rooted(expression: Any) -> bool:
    """Returns whether a letter stands under a root or in a logarithm."""
    import sympy

    roots = [part for part in expression.atoms(sympy.Pow) if part.exp.is_integer is not True]
    return any(part.free_symbols for part in (*roots, *expression.atoms(sympy.log)))


def _real_roots(expression: Any) -> Any:
    """The expression with real roots of odd order: the cube root of -8 is -2. Expressions with `I` stay as they are."""
    import sympy

    if expression.has(sympy.I):
        return expression
    # x^(p/q) with odd q is sign(x)^p |x|^(p/q). Sympy's own power is the principal one, which is complex for x < 0.
    return expression.replace(
        lambda part: part.is_Pow and part.exp.is_Rational and part.exp.q % 2 and part.exp.q > 1,
        lambda part: sympy.sign(part.base) ** part.exp.p * sympy.Abs(part.base) ** part.exp,
    )
