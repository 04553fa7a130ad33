"""`posttrain ladder` in the terminal: the tree of patches, the table, one algorithm, or the difference of two."""

from __future__ import annotations

import re
import textwrap
from itertools import zip_longest

from posttrain.cli.screen_text import fold, screen_width
from posttrain.ladder.algorithm import CHOICES, Algorithm, differences
from posttrain.ladder.algorithm_cost import anchor, cost, reads
from posttrain.ladder.both_ladders import AnyAlgorithm, any_named
from posttrain.ladder.formula import FORM, compact, credit_words, formula, formulas, patches, source, word
from posttrain.ladder.formula.preference_formula import (
    PREFERENCE_FORM,
    preference_formula,
    preference_formulas,
    preference_reads,
)
from posttrain.ladder.formula.tree_picture import WIDTH, picture, wrapped
from posttrain.ladder.policy_rows import LADDER
from posttrain.ladder.preference_algorithm import PREFERENCE_CHOICES, PreferenceAlgorithm
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line, with_reasons

BETWEEN = "   "
"""Space between the columns of a difference."""
CREDIT = 11
"""In a narrow terminal the column of the credit is made narrower first, down to so many columns."""
NARROWEST_CELL = 8
"""Columns below which no cell of the table is made narrower."""


def tree() -> str:
    """The trees of both ladders: each algorithm below the one it patches, with its changes."""
    more = with_reasons(
        (
            (command_line("ladder", "NAME"), "one in full: formulas, numbers, what it reads and costs"),
            (command_line("ladder", "--table"), "those of reward in one table: baseline, region, anchor, cost"),
            (command_line("ladder", "--diff", "A", "B"), "the choices in which two differ"),
            (command_line("ladder", "--on", "RUN"), "what each would do with the batches of one of your runs"),
        ),
        screen_width(),
    )
    return "\n".join(
        [
            *_form(),
            "",
            *picture(_width()),
            "",
            "Preference algorithms learn from judgements:",
            "",
            *_form(PREFERENCE_FORM),
            "",
            *picture(_width(), PREFERENCES),
            "",
            f"{len(LADDER)} algorithms of reward and {len(PREFERENCES)} of preference; numbers that are off are not"
            " printed.",
            *more,
        ]
    )


def _named(name: str) -> AnyAlgorithm:
    """An algorithm of a ladder by its name, or `path.py:NAME`, whose file is imported here."""
    if ":" not in name:
        return any_named(name)
    from posttrain.build.request.algorithm_file import algorithm_of

    return algorithm_of(name)


def table() -> str:
    """One line per algorithm: the choices in which they differ, and their cost."""
    head = ("name", "A", "region", "weight", "anchor", "fwd", "memory")
    rows = [head, *(_row(a) for a in LADDER.values())]
    wide = [max(len(r[i]) for r in rows) for i in range(len(head))]
    # Made narrower until it fits: first the gaps, then the credit (place 1) down to `CREDIT`, then always the widest
    # column but the name, by one character, and never below `NARROWEST_CELL`.
    gap = 2 if sum(wide) + 2 * len(wide) - 2 <= screen_width() else 1
    while (over := sum(wide) + gap * (len(wide) - 1) - screen_width()) > 0:
        widest = 1 if wide[1] > CREDIT else max(range(1, len(wide)), key=wide.__getitem__)
        if wide[widest] <= NARROWEST_CELL:
            break
        wide[widest] -= min(over, wide[widest] - CREDIT) if widest == 1 and wide[1] > CREDIT else 1
    lines: list[str] = []
    for row in rows:
        cells = zip_longest(*(_cell(x, w) for x, w in zip(row, wide, strict=True)), fillvalue="")
        lines += [(" " * gap).join(f"{x:<{w}}" for x, w in zip(c, wide, strict=True)).rstrip() for c in cells]
    foot = (
        "A: baseline/scale, whitening. anchor: what pi is compared with; - where no ratio is formed.",
        "fwd: forward-only passes over a step's tokens; +1 where a step takes several optimizer steps.",
        "memory: copy of the weights, value head, K or V(ocabulary) log-probs a token.",
    )
    return "\n".join([*lines, "", *(part for line in foot for part in fold(line, screen_width()))])


def _cell(text: str, width: int) -> list[str]:
    """The text of a cell in lines of at most `width`, broken after `/`, `,`, `+` or `_` where there are any.

    >>> _cell("groupmean/mixed_share", 12)
    ['groupmean/', 'mixed_share']
    """
    out = [""]
    for part in re.findall(r"[^/,+_]+[/,+_]*|[/,+_]+", text):
        if len(out[-1]) + len(part) > width and out[-1]:
            out.append("")
        out[-1] += part
    return [line for part in out for line in fold(part, width)]


def _row(a: Algorithm) -> tuple[str, ...]:
    """A row of the table, abbreviated."""
    costs, memory_words = cost(a), []
    if a.reads & {"reference", "teacher"} and not a.own_teacher:
        memory_words.append("copy")
    if "values" in a.reads:
        memory_words.append("head")
    if a.stores_top or a.distill is not None:
        memory_words.append("K" if a.stores_top or (a.distill and a.distill.top) else "V")
    forwards = str(costs.forwards) + (f"+{costs.late}" if costs.late else "")
    region = "-" if a.clip is None else type(a.clip).__name__.lower()
    return (
        a.name,
        credit_words(a),
        region,
        a.aggregate,
        anchor(a) or "-",
        forwards,
        "+".join(memory_words) or "-",
    )


def one(name: str) -> str:
    """One algorithm: its changes, formulas, choices, inputs, cost and lineage."""
    a = _named(name)
    about = _preference(a) if isinstance(a, PreferenceAlgorithm) else _reward(a)
    choices = PREFERENCE_CHOICES if isinstance(a, PreferenceAlgorithm) else CHOICES
    out = [f"{a.name}   ({source(a)})", "", *about]
    out += ["", *_prose("note     ", a.note)] if a.note else []
    out += ["", "choices, as an override spells them:"]
    # A choice of more than 40 characters gets a line of its own, and does not push all meanings to the right.
    wide = max(len(f"{f}={compact(getattr(a, f))}") for f in choices if len(f"{f}={compact(getattr(a, f))}") <= 40)
    for f in choices:
        typed = f"  {f}={compact(getattr(a, f))}"
        lead = typed if len(typed) > wide + 2 else f"{typed:<{wide + 2}}   "
        if lead is typed:
            out.append(typed)
            lead = " " * (wide + 5)
        formula_of = preference_formula if isinstance(a, PreferenceAlgorithm) else formula
        out += _prose(lead, formula_of(f, getattr(a, f)))
    # 21 columns: the longest name, reinforce_pp_baseline. The changes begin in column 25.
    steps = [line for p in a.lineage() for line in wrapped(f"  {p.name:<21}  ", patches(p), " " * 25, _width())]
    return "\n".join([*out, "", "lineage:", *steps])


def _reward(a: Algorithm) -> list[str]:
    """Formulas, inputs and cost of an algorithm that learns from reward."""
    out = [*_form(FORM), ""]
    out += [line for label, text in formulas(a) for line in _prose(f"  {label:<8} ", text)]
    if a.pull is not None and a.pull.truth:
        out += _prose("  KL       ", f"its gradient is {a.pull.truth}")
    costs = cost(a)
    out += ["", *_prose("reads    ", ", ".join(reads(a)) or "nothing beside what the sampler stored")]
    with_what = formula("anchor", a.anchor).removeprefix("anchor = ") if anchor(a) else "nothing: no ratio"
    out += _prose("compares ", f"pi with {with_what}")
    out += _prose("forwards ", "; ".join(costs.passes) or "none beside rollout and learning")
    out += _prose("samples  ", "; ".join(costs.generation)) if costs.generation else []
    return out + (_prose("memory   ", "; ".join(costs.memory)) if costs.memory else [])


def _preference(a: PreferenceAlgorithm) -> list[str]:
    """Formulas and inputs of an algorithm that learns from preferences."""
    out = [*_form(PREFERENCE_FORM), ""]
    out += [line for label, text in preference_formulas(a) for line in _prose(f"  {label:<8} ", text)]
    out += ["", *_prose("learns   ", f"from {preference_formula('rows', a.rows)}")]
    return out + _prose("reads    ", ", ".join(preference_reads(a)) or "nothing beside the log-probs of the policy")


def _prose(lead: str, text: str) -> list[str]:
    """A text after its lead; further lines begin below the text."""
    return textwrap.wrap(
        text, _width(), initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False
    ) or [lead.rstrip()]


def _form(form: str = FORM) -> list[str]:
    """The form that all algorithms of a ladder have. A line too long for the terminal is broken at its wide gaps."""
    out: list[str] = []
    for line in form.split("\n"):
        parts = re.split(r" {3,}", line) if len(line) > _width() else [line]
        out += [parts[0], *(f"       {p}" for p in parts[1:])]
    return out


def _width() -> int:
    """Columns for trees and single algorithms: those of the terminal, at most `WIDTH`."""
    return min(WIDTH, screen_width())


def diff(left: str, right: str) -> str:
    """The choices in which two algorithms differ, in three columns as wide as the terminal; longer text is wrapped."""
    a, b = _named(left), _named(right)
    if type(a) is not type(b):
        raise ConfigError(
            f"{a.name} and {b.name} are on two ladders: one learns from reward, the other from preferences, and they"
            " share no choice. Compare two of one ladder"
        )
    rows = [(f, word(x), word(y)) for f, (x, y) in differences(a, b).items()]
    if not rows:
        return f"{a.name} and {b.name} make the same choices"
    rows_with_names = [("", a.name, b.name), *rows]
    w0, w1, w2 = (max(len(r[i]) for r in rows_with_names) for i in range(3))
    room = screen_width() - w0 - 2 * len(BETWEEN)
    w1, w2 = (w1, w2) if w1 + w2 <= room else _shared(w1, w2, room)
    lines: list[str] = []
    for f, x, y in rows_with_names:
        cells = zip_longest([f], fold(x, w1), fold(y, w2), fillvalue="")
        lines += [f"{c0:<{w0}}{BETWEEN}{c1:<{w1}}{BETWEEN}{c2}".rstrip() for c0, c1, c2 in cells]
    return "\n".join(lines)


def _shared(one: int, two: int, room: int) -> tuple[int, int]:
    """Widths of two columns that need `one` and `two` in `room`: half each, or more where the other needs less."""
    half = room // 2
    first = min(one, max(half, room - two))
    return first, room - first
