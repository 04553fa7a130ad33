"""Reads an answer by our own rules: exact numbers with percent and unit; lists, sets and intervals; words. The rest
becomes an `Other`, which the algebra compares. Nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.verifier.math import numerals
from posttrain.verifier.math.answer_values import (
    ChoiceAnswer,
    Items,
    Named,
    Number,
    Other,
    TooLarge,
    Union,
    Value,
    WordAnswer,
    parts,
)
from posttrain.verifier.math.spelling import closing
from posttrain.verifier.math.units import changing, tail

MOST_ITEMS = 64
DEPTH = 4
"""The deepest nesting of lists."""

# A name: `x`, `x_1`, `\theta`, `(x,y)`, `f(2)`, `AB`, `m\angle ABC`.
_SIMPLE = re.compile(
    r"[A-Za-z](?:_(?:\w|\{\w+\}))?'?|\\[A-Za-z]+(?:_\w)?|\([A-Za-z](?:,[A-Za-z])+\)|[A-Za-z]{1,3}\([^()=]{0,30}\)"
    r"|[A-Za-z]_\{?\\text\{[^{}=]*\}\}?|\\text\{[^{}=]*\}(?:_\w)?|[A-Z]{2,3}|(?:m ?)?\\(?:angle|triangle)"
    r" ?[A-Z]{1,3}|\\binom\{\d+\}\{\d+\}"
)
# A phrase: `isosceles`, `red and blue`, `yes`.
_WORDS = re.compile(r"[^\W\d_]{4,}|(?:[^\W\d_]+[ '-]){1,8}[^\W\d_]{2,}|yes|no|odd|one|two|six|ten|all", re.IGNORECASE)
# An inequality in one letter: `x<3`, `1<x\le 2`.
_RELATION = re.compile(r"(?:([^<>=]+?)(<|>|\\le|\\ge) ?)?(?<![A-Za-z\\])([A-Za-z])(?: ?(<|>|\\le|\\ge) ?([^<>=]+))?")
# A set by a rule: `\{x \in \mathbb{R} \mid x>1\}`.
_SUCH_THAT = re.compile(r"\\\{[A-Za-z](?: ?\\in ?\\mathbb\{R\})? ?(?:\\mid ?|\||:)(.+)\\\}")
# A choice in words: `option C`, `answer: (B)`.
_OPTION = re.compile(r"(?:option|choice|answer)(?:[: ]{1,2}\(?|\()([A-Ja-j])\)?\.?", re.IGNORECASE)
# A choice alone: `(B)`, `\text{(B)}`, `B.`.
_CHOICE = re.compile(r"\(?(?:\\text\{ ?\(?)?([A-Za-z])(?:\)? ?\})?[).]?")
# What makes an equals sign part of another relation: the text before it ends in `<`, `>`, `:` or `!`, but not in `5!`.
_RELATING = re.compile(r"(?:[<>:]|(?<![\d)])!)\Z")
# A further relation inside one side of an inequality: `x<1\le y`.
_RELATED = re.compile(r"\\[lgn]e(?![A-Za-z])")
_INFINITE = (Other("-\\infty"), Other("\\infty"))
_OR = r"\\text\{ ?,? ?or ?\} ?| ?(?<![A-Za-z\\{])or(?![A-Za-z}]) ?| ?\\(?:lor|vee)(?![A-Za-z]) ?"
# What joins two answers that both hold: `1 and 2`, `x>1 \land x<2`; an `or` counts as one too.
_AND = re.compile(
    _OR + r"|\\text\{ ?,? ?and ?\} ?| ?(?<![A-Za-z\\{])and(?![A-Za-z}]) ?| ?\\(?:land|wedge)(?![A-Za-z]) ?"
)
# What joins answers of which one holds: `x<1 or x>2`, `x<1 \cup x>2`.
_EITHER = re.compile(_OR + r"| ?\\cup(?![A-Za-z]) ?")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# A value and its unit in a text command: `12\text{ cm}^2`.
_WRITTEN_UNIT = re.compile(r"(.+?) ?(\\text\{[^{}]*\}(?:\\text\{[^{}]*\}|\^\{?-?\d\}?|/)*)")
# A value of numbers and operations alone, and its unit: `2\pi cm`, `3/4 hours`.
_BARE_UNIT = re.compile(
    r"((?:[-+*/^(){}\[\]\d.,!: ]|\\(?:times|cdot|frac|sqrt|div|pi|ln|log)(?![A-Za-z]))+)"
    r"((?:cm|mm|km|kg|ft|yd|in|mi|hr|[A-Za-z]{3,}).*)"
)
# A choice in brackets with its value: `(C) 12`, `\text{(C)} 12`.
_LETTER = re.compile(r"(?:\\text\{ ?\(([A-J])\)[.:]? ?\}|\(([A-J])\)|\(\\text\{([A-J])\}\))[.:]? ?(.+)")
# A choice without an opening bracket: `C) 12`, `C. 12`, `\text{C} 12`.
_BARE_LETTER = re.compile(
    r"(?:\\text\{ ?([A-J])\)?[.:]? ?\}[).:]? ?(?=[-$\d\\])|([A-J])(?:\)|\. |:(?=[-$\d\\]|[A-Za-z]{3}))) ?(.+)"
)
_PRODUCT_OR_UNIT = re.compile(
    r"([-+\d./]+|[-+]?\\frac\{\d+\}\{\d+\}) ?(?:\\text\{)?([A-Za-z](?:[-+]\d+|\^\d|/[A-Za-z](?:\^\d)?)?)\}?"
)
"""`2 h` is 2 hours or a product, and `2e-1` is 0.2 or Euler's number twice without 1."""
# Arithmetic with a letter: `-x`, `2a`.
_PRODUCT = re.compile(r"^-|(?<![\\A-Za-z])[a-z](?![A-Za-z])")
# What cannot begin a value, so that the letter before it is a variable: `(A)+1`, `(A) and (B)`.
_OPERATION = re.compile(
    r"[+*/^_=<>!|,;:)\]}&']|\\(?:times|cdot|div|cup|cap|in|le|ge|ne|lor|land|to|sim|cong)(?![A-Za-z])|(?:\\text\{"
    r" ?)?(?:and|or)\b"
)


def read(text: str, depth: int = 0) -> tuple[Value, ...]:
    """All values that a spelled answer may mean, most likely first; empty if it means nothing.

    >>> read("1,000")
    (Number(value=Fraction(1000, 1), decimals=None, percent=False, unit=''),)
    >>> read("100,200")[1].items[0].value, read("50%")[0].percent, read("x=3")[0].name
    (Fraction(100, 1), True, 'x')
    """
    text = text.strip()
    # A text command around a number or letters of choices is layout. Around words it tells them from a product.
    if (inside := _TEXT.fullmatch(text)) is not None and (
        any(c.isdigit() for c in text)
        or re.fullmatch(r"\(?[A-J]\)?(?:(?:,| and| or) ?\(?[A-J]\)?)+", inside[1].strip())
    ):
        text = inside[1].strip()
    if (rule := _SUCH_THAT.fullmatch(text)) is not None and (known := _as_intervals(rule[1].strip(), depth)):
        return known
    if not text or not any(c.isalnum() or c in "\\$" for c in text):
        return ()
    # The order decides between notations that look alike: `(C) 12` is a choice before it is a product, `2:30` a time
    # before it is a ratio, and an equation is split before its commas are.
    if (choice := _choice(text, depth)) is not None:
        return choice
    if (worded_value := _in_words(text)) is not None:
        return (worded_value,)
    if (time_or_based := numerals.clock(text) or numerals.based(text)) is not None:
        return (time_or_based,)
    plain_number = numerals.number(text)
    # With a comma there are two readings, a number with thousands and a list.
    if isinstance(plain_number, TooLarge) or (plain_number is not None and "," not in text):
        product = _PRODUCT_OR_UNIT.fullmatch(text)
        return (plain_number, Other(f"{product[1]} {product[2]}")) if product else (plain_number,)
    if ("\\approx" in text or (text.endswith(")") and "(" in text)) and (about := _approximation(text, depth)):
        return about
    if named := _as_intervals(text, depth) or _named(text, depth):
        return named
    # What no rule reads is left to the algebra as it is spelled, unless computing it would never end.
    items = _plus_minus(text, depth) or _union(text, depth) or _items(text, depth)
    if values := tuple(v for v in (plain_number, items) if v is not None) or _value_with_unit(text, depth):
        return values
    return (_word_answer(text) or (TooLarge(text) if numerals.vast(text) else Other(text)),)


def _in_words(text: str) -> Number | WordAnswer | None:
    """A number in words, alone or before a noun or a unit, and `option C`; None for anything else."""
    plain = _TEXT.sub(r"\1", text).strip()
    if "\\" in plain or not plain[:1].isalpha():
        return None
    if (option := _OPTION.fullmatch(plain)) is not None:
        return WordAnswer(option[1].upper())
    words = plain.split()
    # The longest beginning that spells a number counts: `twenty five` is no 20 with a noun `five`.
    for end in range(min(len(words), 12), 0, -1):
        value, rest = numerals.worded(" ".join(words[:end])), " ".join(words[end:])
        if value is None:
            continue
        if not rest:
            return Number(value)
        # A capital letter in the rest makes it a name (`Seven Samurai`), not a number with its noun.
        factor_and_unit = tail(rest) if rest == rest.lower() and not changing(rest) else None
        return None if factor_and_unit is None else Number(value * factor_and_unit[0], None, False, factor_and_unit[1])
    return None


def _approximation(text: str, depth: int) -> tuple[Value, ...]:
    """The first side of `12\\pi\\approx 37.7` or `12\\pi (\\approx 37.7)`; the other if that is a name or empty."""
    pieces = numerals.roundings(text)
    if len(pieces) < 2 or depth >= DEPTH:
        return ()
    # `12 \approx 43` holds two answers, of which one may be right by luck. As words it equals no number.
    if numerals.contradicts([p for piece in pieces for p in numerals.sides(piece, _equals(piece))]):
        return (WordAnswer(text),)
    if not pieces[0]:
        return read(pieces[1], depth + 1)
    if _SIMPLE.fullmatch(pieces[0]):
        return tuple(Named(pieces[0], True, v) for v in read(pieces[1], depth + 1))
    return read(pieces[0], depth + 1)


def _choice(text: str, depth: int) -> tuple[Value, ...] | None:
    """`(C) 12`, `\\textbf{(C)}\\ 12`, `C) 12`: the letter of a choice and its value, or a product. None if it is
    neither."""
    match = _LETTER.fullmatch(text) or _BARE_LETTER.fullmatch(text)
    if match is None or depth >= DEPTH or _OPERATION.match(match[match.lastindex or 0]):
        return None
    *letters, value_text = (g for g in match.groups() if g)
    # `(A) 1, (B) 2` is a list of options and no choice among them.
    if any(_LETTER.fullmatch(p) or _BARE_LETTER.fullmatch(p) for p in _parts(value_text)[1:]):
        return None
    values = read(value_text.strip("$"), depth + 1)
    # `(A)(x+1)` is a product, and `(A) B` or `(A)(B)` are two letters; `(A) (1,2)` is a choice of a pair.
    if (
        not values
        or (value_text.startswith("(") and not isinstance(values[0], Items))
        or re.fullmatch(r"[A-Z]|\([A-Z]\)", value_text)
    ):
        return None
    # `(A)-x` may also be arithmetic with a letter A, so that reading is kept beside the choice.
    other = (Other(text),) if _PRODUCT.search(value_text) else ()
    return (*(ChoiceAnswer(letters[0], v) for v in values), *other)


def _value_with_unit(text: str, depth: int) -> tuple[Value, ...]:
    """A value that only the algebra understands, and its unit: `12\\pi\\text{ cm}^2`, `\\frac{\\pi}{2} radians`."""
    if depth >= DEPTH:
        return ()
    written = _WRITTEN_UNIT.fullmatch(text)
    match = written or _BARE_UNIT.fullmatch(text)
    words = _TEXT.sub(r"\1", match[2]).strip() if match else ""
    if match is None or not any(c.isalpha() for c in words):
        return ()
    factor_and_unit = tail(words)
    if factor_and_unit is None:
        return (WordAnswer(text),) if changing(words) else ()
    # In `12+3x` and `2 - 5 m` what looks like a unit belongs to the last term alone. A written unit of several
    # letters is one of the whole sum.
    in_sum = any(c in "+-" and _outside(match[1], i) for i, c in enumerate(match[1]) if i)
    if in_sum and (not written or len(words) == 1):
        return ()
    factor, unit_name = factor_and_unit
    # Words that are neither a unit nor change the value (`12 apples`) are passed over only in a text command behind
    # numbers and operations alone, such as `2\pi`: those that `_BARE_UNIT` reads once a unit, `cm`, stands behind them.
    if factor == 1 and not unit_name and not (written and _BARE_UNIT.fullmatch(f"{match[1]}cm")):
        return ()
    return tuple(_scaled(v, factor, unit_name) for v in read(match[1], depth + 1))


def _scaled(value: Value, factor: Fraction, unit_name: str) -> Value:
    """The value times the factor, with the unit if it has none; a percentage or a list as it is."""
    if isinstance(value, Number) and not value.percent:
        return Number(value.value * factor, value.decimals if factor == 1 else None, False, value.unit or unit_name)
    if isinstance(value, Other):
        return Other(value.text if factor == 1 else rf"{factor}\cdot({value.text})", value.unit or unit_name)
    return value


def _named(text: str, depth: int) -> tuple[Named | WordAnswer, ...]:
    """`x=3`, `x=1,2`, `x\\in(1,2)`, and the last equals sign of a chain; nothing for a list of equations."""
    # `x=1,2` names a list, `x=1,y=2` is a list of equations: all equals signs have to stand before the first comma.
    pieces = [p for p in _parts(text) if _equals(p)]
    equals = _equals(text)
    if len(pieces) > 1 or (equals and _equals(_parts(text)[0]) != equals) or depth >= DEPTH:
        return ()
    split = (text[: equals[-1]], text[equals[-1] + 1 :]) if equals else _member(text)
    if split is None or not split[0].strip():
        return ()
    chain = numerals.sides(text, equals)
    if equals and numerals.contradicts(chain):
        return (WordAnswer(text),)
    name, first_side = split[0].strip(), split[0].partition("=")[0].strip()
    variable = _SIMPLE.fullmatch(first_side) is not None
    # A left side of numbers (`3+4=7`) only repeats the question. Any other expression (`x^2=3`) is a statement, and its
    # right side is not the answer.
    simple = variable or numerals.constant(name) or numerals.based(name) is not None
    # In `1/3=0.333` the last side only rounds an exact one: both are readings.
    more = numerals.exact(chain) if equals else None
    values = (*read(split[1], depth + 1), *(read(more, depth + 1) if more else ()))
    return tuple(Named(first_side if variable else name, simple, v) for v in values)


def _as_intervals(text: str, depth: int) -> tuple[Named, ...]:
    """`x<3`, `3>x`, `1<x\\le 2`, `x>1 and x<2` and `x<1 or x>2` as intervals."""
    pieces = [p.strip(" ,") for p in _EITHER.split(text)]
    if depth >= DEPTH or len(pieces) > MOST_ITEMS:
        return ()
    if len(pieces) == 1:
        one = _two_bounds(text, depth) or _relation(text, depth)
        return (one,) if one else ()
    named = [_relation(p, depth) or _point(p, depth) for p in pieces]
    known = [n for n in named if n is not None]
    # `x=1 or x=2` holds points alone: that is a list, and no union of intervals.
    if len(known) < len(pieces) or len({n.name for n in known}) > 1 or all(len(parts(n.value)) == 1 for n in known):
        return ()
    values = [i for n in known for i in (n.value.items if isinstance(n.value, Union) else (n.value,))]
    return (Named(known[0].name, True, Union(tuple(i for i in values if isinstance(i, Items)))),)


def _relation(text: str, depth: int) -> Named | None:
    """An inequality in one letter, `1<x\\le 2`, as an interval."""
    match = _RELATION.fullmatch(text)
    if match is None:
        return None
    low, below, name, above, high = match.groups()
    # `3>x>1` is turned round to `1<x<3`. A relation that points both ways (`1<x>2`) bounds one side twice. `x<1\le y`
    # has a relation more than can be read.
    down = {below, above} & {">", "\\ge"}
    if _RELATED.search(f"{low} {high}") or (down and {below, above} & {"<", "\\le"}):
        return None
    if down:
        low, below, above, high = high, above, below, low
    ends = [read(low or "-\\infty", depth + 1), read(high or "\\infty", depth + 1)]
    if not all(ends) or not (low or high):
        return None
    # An end that is not given is infinite, and open.
    left, right = ("[" if below in ("\\le", "\\ge") else "("), ("]" if above in ("\\le", "\\ge") else ")")
    return Named(name, True, Items(left, right, (ends[0][0], ends[1][0])))


def _two_bounds(text: str, depth: int) -> Named | None:
    """`x>1 and x<2`, if both ends are numbers and in this order."""
    pieces = _AND.split(text)
    named = [_relation(p.strip(" ,"), depth) for p in pieces]
    if len(pieces) != 2 or named[0] is None or named[1] is None or named[0].name != named[1].name:
        return None
    ends = [n.value for n in named if n is not None and isinstance(n.value, Items)]
    # One interval with a finite lower end is needed, and one with a finite upper end.
    ends.sort(key=lambda i: i.items[0] == _INFINITE[0])
    low, high = ends[0].items[0], ends[1].items[1]
    if (ends[0].items[1], ends[1].items[0]) != (_INFINITE[1], _INFINITE[0]):
        return None
    if not (isinstance(low, Number) and isinstance(high, Number) and low.value < high.value):
        return None
    return Named(named[0].name, True, Items(ends[0].left, ends[1].right, (low, high)))


def _point(text: str, depth: int) -> Named | None:
    """`x=3` or `x\\in(1,2)` next to an inequality."""
    if (member := _member(text)) is not None:
        inside = read(member[1], depth + 1)
        bracketed = inside and (isinstance(inside[0], Union) or (isinstance(inside[0], Items) and inside[0].left))
        return Named(member[0], True, inside[0]) if bracketed else None
    # A point counts as a set of one, so that `x<1 or x=3` is a union.
    name, equals, value_text = text.partition("=")
    values = read(value_text, depth + 1) if equals and re.fullmatch(r"[A-Za-z] ?", name) else ()
    if not values or isinstance(values[0], Items):
        return None
    return Named(name.strip(), True, Items("{", "}", (values[0],)))


def _union(text: str, depth: int) -> Union | None:
    """Intervals and sets joined by `\\cup`."""
    if "\\cup" not in text or depth >= DEPTH:
        return None
    pieces = re.split(r" ?\\cup(?![A-Za-z]) ?", text)
    items = [_items(p, depth + 1) if p and _brackets(p)[0] else None for p in pieces]
    known = tuple(i for i in items if i is not None)
    return Union(known) if len(known) == len(pieces) > 1 else None


def _equals(text: str) -> list[int]:
    """Positions of the equals signs outside brackets that are not part of another relation."""
    return [i for i, c in enumerate(text) if c == "=" and not _RELATING.search(text, 0, i) and _outside(text, i)]


def _member(text: str) -> tuple[str, str] | None:
    """(name, set) of `x\\in(1,2)`; None for other text."""
    match = re.match(r"([A-Za-z]) ?\\in ?(?=[(\[\\])", text)
    return (match[1], text[match.end() :]) if match else None


def _outside(text: str, at: int) -> bool:
    """Returns whether a position is outside all brackets. The brackets of half-open intervals count too."""
    depth = 0
    for c in text[:at]:
        depth += (c in "([{") - (c in ")]}")
    return depth == 0


def _parts(text: str) -> list[str]:
    """Split at commas and semicolons outside of brackets, and at `and` and `or`."""
    out, depth, start = [], 0, 0
    text = _AND.sub(",", text)
    for i, c in enumerate(text):
        # Any closing bracket closes any opening one, because half-open intervals mix them.
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c in ",;":
            out.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*out, text[start:]] if p.strip()]


def _items(text: str, depth: int) -> Items | None:
    """A set, a bracketed list, an interval, or a bare list of two or more."""
    if depth >= DEPTH:
        return None
    left, inner, right = _brackets(text)
    if not left and len(_parts(text)) < 2:
        return None
    pieces = _parts(inner)
    # `(3)` is a number in brackets, and `[3]` a list of one.
    if len(pieces) > MOST_ITEMS or (left in ("(", "[") and len(pieces) < 2 and left + right != "[]"):
        return None
    # A piece such as `050` is the end of `1,050`: the commas part thousands and no items.
    if any(re.fullmatch(r"0\d\d", p) for p in pieces):
        return None
    values = [read(p, depth + 1) for p in pieces]
    return Items(left, right, tuple(v[0] for v in values)) if all(values) and values else None


def _plus_minus(text: str, depth: int) -> Items | None:
    """`a\\pm b` as the list of its two values."""
    if text.count("\\pm") != 1 or len(_parts(text)) != 1 or depth >= DEPTH or _WRITTEN_UNIT.fullmatch(text):
        return None
    values = [read(text.replace("\\pm ", "\\pm").replace("\\pm", sign).removeprefix("+"), depth + 1) for sign in "+-"]
    return Items("", "", (values[0][0], values[1][0])) if all(values) else None


def _brackets(text: str) -> tuple[str, str, str]:
    """(left, inside, right) if one pair of brackets encloses everything, else ('', text, '')."""
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 1) == len(text) - 1:
        return "{", text[2:-2], "}"
    if text[0] in "([" and closing(text, 0) == len(text) - 1:
        return text[0], text[1:-1], text[-1]
    return "", text, ""


def _word_answer(text: str) -> WordAnswer | None:
    """A word, a phrase, or a choice such as `(B)`: compared as text."""
    # A bare letter may be a variable, so it stays an expression, whose spelling equals the choice's.
    if (match := _CHOICE.fullmatch(text)) is not None and len(text) > 1:
        return WordAnswer(match[1])
    plain = _TEXT.sub(r"\1", text).strip()
    in_text = plain != text and "\\" not in plain and not any(c.isdigit() or c in "+*/^=<>" for c in plain)
    if in_text or _WORDS.fullmatch(plain):
        return WordAnswer(plain if len(plain) == 1 else " ".join(plain.casefold().split()))
    return None
