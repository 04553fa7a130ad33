"""Exact evaluation of arithmetic that a policy writes: no `eval`, and limits on length, depth and digits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 20
MAX_DIGITS = 12

_TOKEN = re.compile(r"[ \t]*(?:(?P<number>[0-9]+)|(?P<symbol>[-+*/()]))")
# Signs of typography -> those of Python.
_SPELLINGS = str.maketrans({"\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})


class ExpressionError(ValueError):
    """The text is no expression, is too large, or divides by zero. The message says which."""


@dataclass(frozen=True)
class Expression:
    """The value of an expression and the numbers written in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Expression:
    """The exact value of an expression with `+ - * /`, parentheses and leading minus signs over naturals.

    >>> evaluate("(3+5)*4/6").value, evaluate("3 - -4").numbers
    (Fraction(16, 3), (3, 4))

    Raises:
        ExpressionError: other text; more than 200 characters, 12 digits in a number or 20 levels; division by zero.
    """
    # The length is checked first. All further work is linear in it, and the parser bounds the digits and the depth, so
    # no answer can take much time or overflow the stack.
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"more than {MAX_CHARACTERS} characters")
    parser = _ExpressionParser(_tokens(text.translate(_SPELLINGS)))
    value = parser.sum(0)
    if parser.next is not None:
        raise ExpressionError(f"unexpected {parser.next!r}")
    return Expression(value, tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    """The numbers and symbols of a text, in order."""
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"unexpected {text[at]!r}")
        token = match["number"] or match["symbol"]
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        tokens.append(token)
        at = match.end()
    return tokens


class _ExpressionParser:
    """Recursive descent: sum -> product -> factor."""

    def __init__(self, tokens: list[str]) -> None:
        self.numbers: list[int] = []
        self._tokens = tokens
        self._at = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        """The next token, which is then done. ExpressionError at the end."""
        token = self.next
        if token is None:
            raise ExpressionError("it ends too early")
        self._at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        """The value of products joined by `+` and `-`. `depth`: the number of levels around it."""
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = value + self._product(depth) if self._take() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        """The value of factors joined by `*` and `/`."""
        value = self._factor(depth)
        while self.next in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            elif (divisor := self._factor(depth)) == 0:
                raise ExpressionError("division by zero")
            else:
                value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        """The value of a number, of a factor behind a minus sign, or of a sum in parentheses."""
        if depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} levels")
        token = self._take()
        # A minus sign counts as a level too, because a chain of them recurses as parentheses do.
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if not token.isdigit():
            raise ExpressionError(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))
