"""Grades a response against a gold answer: the answer that was found, how it was read, its score and the reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from posttrain.core.verdict import Verdict
from posttrain.verifier.math.answer_values import Other, TooLarge, Value, parts
from posttrain.verifier.math.equal import Algebra, equal, standing
from posttrain.verifier.math.extract import final
from posttrain.verifier.math.read_answer import read
from posttrain.verifier.math.spelling import LONGEST, spelled


class UnreadableError(ValueError):
    """The algebra cannot read an expression. `gold`: whether it is the gold answer."""

    def __init__(self, text: str, gold: bool) -> None:
        super().__init__(text)
        self.gold = gold


@dataclass(frozen=True)
class Gold:
    """A gold answer, read once."""

    raw: str
    values: tuple[Value, ...]

    @property
    def certain(self) -> bool:
        """True where our own rules can read all of the answer, so that the algebra is not needed."""
        return not any(_open(v) for v in self.values)


@dataclass(frozen=True)
class Grade:
    """`parsed` is the spelling of the response's answer, None if there was none. `why` is empty for a right answer.

    `kind`: wrong, unparsable, unevaluated (a sum was not computed), too_large; or `several_answers` for a right last
    box after boxes with another content, which still scores 1.
    """

    score: float
    parsed: str | None
    kind: str = ""
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict.value(self.score, self.kind, self.why)


@lru_cache(maxsize=65536)
def gold_of(answer: str) -> Gold | None:
    """A gold answer as data sets write it: a bare answer, or a solution that ends in `#### 72` or in a box. None if it
    has no answer."""
    text = answer.strip()
    # A bare answer is taken whole. A solution with a box that is never closed has no answer.
    solution = final(text) if "####" in text or "\\boxed" in text else None
    text = solution.text if solution else "" if "\\boxed" in text else text
    values = read(spelled(text))
    return Gold(text, values) if values else None


def grade(gold: Gold, response: str, algebra: Algebra | None = None) -> Grade | None:
    """The grade; None if only the algebra can decide and there is none here.

    >>> grade(gold_of("0.5"), r"so \\boxed{\\frac{1}{2}}").score, grade(gold_of("4"), r"\\boxed{3}").kind
    (1.0, 'wrong')
    """
    answer = final(response)
    if answer is None:
        return Grade(0.0, None, "unparsable", f"no answer in {response[-80:]!r}")
    text = spelled(answer.text)
    values = read(text)
    # The `!` of `It is 5!` may be a factorial or end the sentence, so the answer has both readings.
    if answer.told and text.endswith("!"):
        values += read(text.rstrip("!"))
    if not values:
        why = "the answer is too long" if len(answer.text) > LONGEST else f"{answer.text[:80]!r} says nothing"
        return Grade(0.0, None, "unparsable", why)
    try:
        answers = _answers(gold.values, values, algebra)
    except UnreadableError as error:
        # An unreadable gold answer is a fault of the data, and no response may be worth 0 for it.
        if error.gold:
            raise
        return Grade(0.0, text, "unparsable", f"{answer.text[:80]!r} cannot be read")
    if True in answers:
        return Grade(1.0, text, "several_answers" if answer.several else "")
    if None in answers:
        return None
    kind = "wrong"
    if any(isinstance(v, Other) and standing(v.text) for v in values):
        kind = "unevaluated"
    elif any(isinstance(v, TooLarge) for v in values):
        kind = "too_large"
    return Grade(0.0, text, kind, f"said {text[:80]}, wanted {gold.raw[:80]}")


def _answers(gold: Sequence[Value], said: Sequence[Value], algebra: Algebra | None) -> list[bool | None]:
    """The result of each pair of a gold reading and a reading of the response, up to the first pair that is equal."""
    results: list[bool | None] = []
    # The algebra is slow: it is asked only if our own rules find no equal pair.
    for algebra_of_pass in (None, algebra) if algebra else (None,):
        results = []
        for g, s in itertools.product(gold, said):
            results.append(equal(g, s, algebra_of_pass))
            if results[-1]:
                return results
    return results


def _open(value: Value) -> bool:
    """Returns whether a value has a part that only the algebra can read."""
    return isinstance(value, Other) or any(_open(v) for v in parts(value))
