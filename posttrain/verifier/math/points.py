"""Compares two expressions by their values, in a worker process: to 300 digits, at random points.

Letters are real. They are positive where one of them stands under a root or in a logarithm, unless there is an absolute
value. The letters `k`, `l`, `m` and `n` are whole numbers, each greater than those before it.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from posttrain.verifier.math.equal import near

DIGITS = 300
"""A difference that has no significant digit when it is computed with so many is 0."""
POINTS = 4
_WHOLE = {"k": (2, 4), "l": (5, 7), "m": (8, 11), "n": (12, 30)}


def same_values(one: Any, two: Any, seed: str, rounding: int = 0) -> bool | None:
    """Returns whether two expressions are equal; None if they are no expressions or cannot be computed.

    `seed`: text from which the points are drawn. `rounding`: the digits after the point to which a constant is given.
    """
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(two, sympy.Expr)) or one.is_Matrix or two.is_Matrix:
        return None
    letters = sorted(one.free_symbols | two.free_symbols, key=str)
    signed = one.has(sympy.Abs) or two.has(sympy.Abs) or not (_rooted(one) or _rooted(two))
    draw = random.Random(seed)
    difference = sympy.Add(_real_roots(one), sympy.Mul(-1, _real_roots(two), evaluate=False), evaluate=False)
    told = [_zero(difference, _point(letters, draw, signed, k)) for k in range(POINTS if letters else 1)]
    known = [t for t in told if t is not None]
    if rounding and known == [False] and not letters:
        return _rounds(one, two, rounding)
    return all(known) if known else None


def _point(letters: list[Any], draw: random.Random, signed: bool, number: int) -> dict[Any, Any]:
    """A value for each letter. The absolute values of two letters are below and above 1 in all four ways."""
    import sympy

    out: dict[Any, Any] = {}
    for i, letter in enumerate(letters):
        if letter.name in _WHOLE:
            out[letter] = sympy.Integer(draw.randint(*_WHOLE[letter.name]))
            continue
        size = draw.randint(200, 900) if number >> i % 2 & 1 else draw.randint(1100, 4000)
        out[letter] = sympy.Rational(size, 997) * (draw.choice((1, -1)) if signed else 1)
    return out


def _zero(expression: Any, point: dict[Any, Any]) -> bool | None:
    """Returns whether the value at a point is 0, exactly where it is rational; None if it cannot be computed there."""
    try:
        if expression.is_rational_function() and (value := expression.xreplace(point).doit()).is_Rational:
            return bool(value == 0)
        value = expression.evalf(15, subs=point, maxn=DIGITS)
        if not value.is_number or not value.is_finite:
            return None
        return all(part == 0 or part._prec == 1 for part in value.as_real_imag())
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _rounds(one: Any, two: Any, digits: int) -> bool:
    x, y = (e.evalf(digits + 20) for e in (one, two))
    return bool(x.is_real and y.is_real) and near(Fraction(str(x)), Fraction(str(y)), digits)


def _rooted(expression: Any) -> bool:
    """Returns whether a letter stands under a root or in a logarithm."""
    import sympy

    roots = [part for part in expression.atoms(sympy.Pow) if part.exp.is_integer is not True]
    return any(part.free_symbols for part in (*roots, *expression.atoms(sympy.log)))


def _real_roots(expression: Any) -> Any:
    """With real roots of odd order: the cube root of -8 is -2. Complex expressions stay as they are."""
    import sympy

    if expression.has(sympy.I):
        return expression
    return expression.replace(
        lambda part: part.is_Pow and part.exp.is_Rational and part.exp.q % 2 and part.exp.q > 1,
        lambda part: sympy.sign(part.base) ** part.exp.p * sympy.Abs(part.base) ** part.exp,
    )
