"""The HTML of one lesson, in the order that every lesson has: question, idea, knobs beside the picture, what breaks it,
the claims, the exercises, the code, and the way on."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal

from posttrain.lab.catalog import FORCES, WAYS, Entry, entries, way
from posttrain.lab.lesson import AskChoice, AskKnobs, Exercise, Knob, Lesson, Options, Slider, TextInput, Toggle
from posttrain.system.errors import ConfigError
from posttrain.web.html import Markup, data, document, inline, join, markdown, tag

Where = Literal["server", "site"]
STYLES = ("uplot.css", "page.css", "lab.css")
SCRIPTS = ("uplot.js", "pictures.js", "lab.js")
PACKAGE = Path(__file__).parents[1]


def address(entry: Entry | None, where: Where) -> str:
    """The address of a page as seen from another page; None: the map."""
    if where == "site":
        return "index.html" if entry is None else f"{entry.name}.html"
    return "/" if entry is None else f"/{entry.name}"


def file_address(name: str, where: Where) -> str:
    return name if where == "site" else f"/static/{name}"


def knob_data(k: Knob) -> dict[str, Any]:
    """A knob as the front end reads it."""
    kind = type(k).__name__.lower()
    return {"kind": kind, **asdict(k), **({"whole": k.whole} if isinstance(k, Slider) else {})}


def exercise_data(e: Exercise) -> dict[str, Any]:
    """An exercise as the front end reads it."""
    return {"kind": type(e).__name__.lower(), **asdict(e)}


def lesson_page(lesson: Lesson, where: Where, first: dict[str, Any] | None = None) -> str:
    """The whole page.

    Args:
        where: served, or written as a file: addresses differ.
        first: the readout of the default position, so that the first picture needs no request. None: the page asks.
    """
    lesson_data = {
        "where": where, "number": lesson.number, "name": lesson.name, "pace": lesson.pace,
        "knobs": [knob_data(k) for k in lesson.knobs], "first": first,
        "breaks": [asdict(b) for b in lesson.breaks], "exercises": [exercise_data(e) for e in lesson.exercises],
    }  # fmt: skip
    main = tag(
        "main",
        tag("h1", f"{lesson.number} {lesson.title}"),
        tag("p", inline(lesson.question), class_="lead"),
        tag("div", markdown(cleandoc(lesson.idea)), class_="idea"),
        tag("code", cleandoc(lesson.formula), class_="formula"),
        *([tag("p", f"Not whole yet: {lesson.missing}", class_="quiet")] if lesson.missing else []),
        _bench(lesson),
        _claims(lesson),
        _exercises(lesson),
        _code(lesson, where),
        _ends(lesson, where),
        id="main",
    )
    body = (_top(lesson, where), main, data("lesson", lesson_data))
    return document(
        f"{lesson.number} {lesson.title} - posttrain lab", *body,
        styles=tuple(file_address(s, where) for s in STYLES), scripts=tuple(file_address(s, where) for s in SCRIPTS),
    )  # fmt: skip


def waiting_page(entry: Entry) -> str:
    """The page of a lesson while the library is being loaded; it opens itself again."""
    text = f"{entry.number} {entry.title}: the library is being loaded, some seconds once."
    refresh = tag("meta", http_equiv="refresh", content="1")
    html = document(
        entry.title, tag("main", tag("h1", entry.title), tag("p", text)), styles=("/static/page.css",), scripts=()
    )
    return html.replace("<title>", f"{refresh}<title>", 1)


def _top(lesson: Lesson, where: Where) -> Markup:
    facts = f"{lesson.part} | {lesson.force}: {FORCES[lesson.force]} | {lesson.minutes} min"
    skip = tag("a", "to the page", href="#main", class_="skip")
    home = tag("nav", tag("a", "the map", href=address(None, where)), aria_label="lab")
    return tag("header", skip, home, tag("span", facts), class_="top")


def _bench(lesson: Lesson) -> Markup:
    buttons = [tag("button", "Reset", id="reset", type="button")]
    if lesson.pace == "train":
        buttons.insert(0, tag("button", "Train", id="train", type="button", class_="go"))
    breaks = [
        tag("button", "Break it" if len(lesson.breaks) == 1 else f"Break it: {b.label or i + 1}", id=f"break-{i}",
            type="button", title=b.what, class_="strong")
        for i, b in enumerate(lesson.breaks)
    ]  # fmt: skip
    progress = [tag("progress", id="progress", value=0, max=1, aria_label="training")] * (lesson.pace == "train")
    left = tag(
        "form", *(_knob(k) for k in lesson.knobs), tag("div", *buttons, *breaks, class_="buttons"), *progress,
        tag("p", id="status", class_="status", role="status"), class_="knobs", id="knobs", aria_label="knobs",
    )  # fmt: skip
    right = tag(
        "div", tag("p", id="sentence", class_="sentence", aria_live="polite"), tag("ul", id="values", class_="values"),
        tag("div", id="says", aria_live="polite"), tag("div", id="pictures"), class_="shown",
    )  # fmt: skip
    return tag("section", left, right, class_="bench", aria_label="the experiment")


def _knob(k: Knob) -> Markup:
    identity = f"knob-{k.name}"
    if isinstance(k, Toggle):
        box = tag("input", type="checkbox", id=identity, checked=k.default)
        return tag("div", tag("label", box, tag("span", k.label), for_=identity), class_="knob toggle")
    if isinstance(k, Options):
        field = tag("select", *(tag("option", o, value=o, selected=o == k.default) for o in k.options), id=identity)
        return tag("div", tag("label", tag("span", k.label), for_=identity), field, class_="knob")
    if isinstance(k, TextInput):
        field = tag("input", type="text", id=identity, value=k.default, maxlength=k.longest, autocomplete="off")
        return tag("div", tag("label", tag("span", k.label), for_=identity), field, class_="knob")
    # A logarithmic slider has 1000 equal ways (WAY of lab.js); its value is put there by the script.
    ends = {"min": 0, "max": 1000, "step": 1} if k.log else {"min": k.low, "max": k.high, "step": k.step}
    value = tag("output", id=f"value-{k.name}", for_=identity)
    field = tag("input", type="range", id=identity, **ends)
    return tag("div", tag("label", tag("span", k.label), value, for_=identity), field, class_="knob")


def _claims(lesson: Lesson) -> Markup:
    if not lesson.claims:
        return Markup("")
    place = tag("div", tag("p", "computing ...", class_="soft"), id="claims", class_="wide", tabindex="0", role="group")
    numbers = "Numbers of papers (by their number on arXiv) and of the curriculum that these pages follow, beside ours."
    return tag("section", tag("h2", "The claim, and ours"), tag("p", numbers, class_="soft sources"), place)


def _exercises(lesson: Lesson) -> Markup:
    if not lesson.exercises:
        return Markup("")
    rows = [_exercise(i, e) for i, e in enumerate(lesson.exercises)]
    return tag("section", tag("h2", "Try"), tag("div", *rows, class_="exercises"))


def _exercise(i: int, e: Exercise) -> Markup:
    reply = tag("p", id=f"reply-{i}", class_="reply", role="status")
    if isinstance(e, AskKnobs):
        return tag("div", tag("p", inline(e.question)), reply, class_="exercise")
    if isinstance(e, AskChoice):
        rows = [
            tag("label", tag("input", type="radio", name_=f"exercise-{i}", value=j), f" {choice}")
            for j, choice in enumerate(e.choices)
        ]
        return tag("div", tag("fieldset", tag("legend", inline(e.question)), *rows), reply, class_="exercise")
    label = tag("label", inline(e.question), for_=f"exercise-{i}")
    field = tag("input", type="text", inputmode="decimal", id=f"exercise-{i}", autocomplete="off")
    check = tag("button", "Check", type="button", id=f"check-{i}")
    return tag("div", tag("p", label), tag("div", field, " ", check), reply, class_="exercise")


def _code(lesson: Lesson, where: Where) -> Markup:
    parts: list[str] = []
    for name in lesson.code:
        path, line, text = source(name)
        title = tag("summary", tag("code", name.rpartition(".")[2]), f" in posttrain/{path}, line {line}")
        body = tag("pre", tag("code", text), tabindex="0", role="group", aria_label=name)
        parts.append(tag("details", title, body))
    if len(parts) > 4:
        parts = [tag("details", tag("summary", f"{len(parts)} functions and classes"), *parts)]
    if lesson.docs:
        parts.append(tag("p", "Read on: ", _docs(lesson.docs, where)))
    if lesson.command:
        parts.append(tag("p", "In a real run: ", tag("code", lesson.command)))
    return tag("section", tag("h2", "In the code"), *parts, class_="where") if parts else Markup("")


def _docs(page: str, where: Where) -> Markup:
    """The page of the documentation: a link on the site, its file elsewhere."""
    name, _, part = page.partition("#")
    if where == "server":
        return tag("code", f"docs/{page}")
    there = name.removesuffix(".md")
    return tag("a", there.rpartition("/")[2], href=f"../{there.lower()}.html{'#' + part if part else ''}")


def _ends(lesson: Lesson, where: Where) -> Markup:
    pages = entries()
    at = next(i for i, e in enumerate(pages) if e.name == lesson.name)

    def link(i: int, words: Callable[[Entry], str]) -> Markup:
        return tag("a", words(pages[i]), href=address(pages[i], where)) if 0 <= i < len(pages) else tag("span")

    before = link(at - 1, lambda e: f"before: {e.number} {e.title}")
    after = link(at + 1, lambda e: f"next: {e.number} {e.title}")
    return tag("nav", *_on_the_way(lesson, where), before, after, class_="ends", aria_label="other pages")


def _on_the_way(lesson: Lesson, where: Where) -> list[Markup]:
    """Returns the place of a page on each shorter way: the page's number there, and the next page."""
    out: list[Markup] = []
    for name in WAYS:
        pages = way(name)
        at = next((i for i, e in enumerate(pages) if e.name == lesson.name), len(pages))
        if at + 1 < len(pages):
            e = pages[at + 1]
            link = tag("a", f"{e.number} {e.title}", href=address(e, where))
            out.append(tag("p", f"The {name}'s way, page {at + 1} of {len(pages)}, goes on with ", link, class_="way"))
    return out


@cache
def source(name: str) -> tuple[str, int, str]:
    """(file below the package, line, text) of a dotted name: a function, a class, a method or a constant.

    Raises:
        ConfigError: there is no such name.
    """
    parts = name.split(".")[1:]  # the longest path that is a file is the module; what is left are names in it
    for cut in range(len(parts) - 1, 0, -1):
        path = PACKAGE.joinpath(*parts[:cut]).with_suffix(".py")
        if not path.is_file():
            path = PACKAGE.joinpath(*parts[:cut], "__init__.py")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            node = _node(ast.parse(text), parts[cut:])
            if node is not None:
                # Decorators stand before the line of a function or class.
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                lines = text.splitlines()[first - 1 : node.end_lineno]
                return str(path.relative_to(PACKAGE)), first, join(*(f"{line}\n" for line in lines))
    raise ConfigError(f"{name}: there is no such name in the package")


def _node(tree: Any, names: list[str]) -> Any:
    """The statement that defines a name, through classes; None where there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = [getattr(node, "name", None), *(getattr(t, "id", None) for t in targets)]
        if names[0] in named:
            return node if len(names) == 1 else _node(node, names[1:])
    return None
