"""Every page of the lab, without a browser: each knob at its ends and in the middle, what breaks speaks by its name,
each exercise takes its answer and refuses others. Pages that train are in the long suites."""

from __future__ import annotations

import json
import math
import re
from inspect import cleandoc
from itertools import pairwise

import pytest
import torch

from posttrain.lab.catalog import WAYS, entries, find, load, way
from posttrain.lab.lesson import AskChoice, AskKnobs, AskNumber, Readout
from posttrain.lab.page import lesson_page, source
from posttrain.lab.site import default_index, fitted
from posttrain.system.errors import ConfigError
from scripts.site import lessons as tables

NAMES = [e.name for e in entries()]


LONG = {"ahead", "rlhf", "noise", "search", "scheduling", "sync", "dapo", "bandit", "leak"}
"""Lessons whose knobs together take longer than a second and a half."""


def played(*long: str) -> pytest.MarkDecorator:
    """Every lesson; those that train, and these, are played by the long suite."""
    marks = {e.name: [pytest.mark.prove] * (e.pace == "train" or e.name in long) for e in entries()}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


every = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def sound(readout: Readout) -> None:
    """A readout that the front end can show: pictures with rows, finite values, no lost words."""
    shown = readout.as_json()
    tables = [p.table() for p in readout.pictures]
    assert shown["pictures"] and all(columns and rows for columns, rows in tables)
    assert all(len(row) == len(columns) for columns, rows in tables for row in rows)
    assert readout.sentence and not re.search(r"\bnan\b|\binf\b", readout.sentence)
    assert all(math.isfinite(v) for v in readout.values.values()), readout.values


@played(*LONG)
def test_every_knob_at_its_ends_and_in_the_middle(name: str) -> None:
    lesson = load(name)
    positions = [{}, *({k.name: v} for k in lesson.knobs for v in k.tried())]
    seen = dict[str, Readout]()
    for given in positions:
        values = lesson.read(given)
        if (key := repr(values)) not in seen:
            seen[key] = lesson.last(values)
            sound(seen[key])
    assert len({str(r.as_json()) for r in seen.values()}) > 1, "no knob changes anything"


@played()
def test_the_same_knobs_give_the_same_readout(name: str) -> None:
    lesson = load(name)
    values = lesson.read({})
    assert lesson.last(values).as_json() == lesson.last(values).as_json()


@played()
def test_what_breaks_training_speaks_by_its_name(name: str) -> None:
    lesson = load(name)
    quiet = {s.name for s in lesson.last(lesson.read({})).says}
    for b in lesson.breaks:
        readout = lesson.last(lesson.read(b.values))
        sound(readout)
        said = {s.name for s in readout.says}
        if b.speaks is None:
            assert not said, f"the page says that nothing speaks: {said}"
        else:
            assert b.speaks in said and b.speaks not in quiet, (b.speaks, said, quiet)


@played()
def test_exercises_accept_their_answer_and_no_other(name: str) -> None:
    lesson = load(name)
    for e in lesson.exercises:
        if isinstance(e, AskNumber):
            for wrong in (e.answer * 1.5 + 1, e.answer - abs(e.answer) - 1):
                assert abs(wrong - e.answer) > e.within * max(abs(e.answer), 1e-9)
        elif isinstance(e, AskChoice):
            assert 0 <= e.answer < len(e.choices) == len(set(e.choices)) and len(e.choices) >= 3
        else:
            assert isinstance(e, AskKnobs)
            assert e.met(lesson.last(lesson.read(e.solved)).values), "its own solution is refused"
            assert not e.met(lesson.last(lesson.read({})).values), "it is solved before anything was moved"
            assert not e.met({})


@played("ahead", "scheduling")
def test_claims_can_be_computed(name: str) -> None:
    for c in load(name).claims:
        found = c.ours()
        assert math.isfinite(found)
        assert c.holds(found) or c.why, f"{c.text}: claimed {c.claimed}, ours {found}; say why it does not hold"


@every
def test_a_page_has_what_every_page_has(name: str) -> None:
    lesson = load(name)
    assert len(cleandoc(lesson.idea).split()) <= 150
    assert lesson.question.count("?") + lesson.question.count(".") >= 1
    assert lesson.knobs or lesson.missing
    assert 1 <= len(lesson.exercises) <= 3
    assert lesson.breaks or lesson.number in ("23", "27") or lesson.missing
    assert lesson.docs and lesson.command and lesson.code
    assert len(lesson.breaks) < 2 or all(b.label for b in lesson.breaks), "each button says what it breaks"
    for dotted in lesson.code:
        assert source(dotted)[2]
    assert set(lesson.grid) <= {k.name for k in lesson.knobs} and len(lesson.grid) <= 2
    assert find(lesson.number).name == find(lesson.name).name == name
    assert lesson.title in lesson_page(lesson, "server").replace("&#x27;", "'").replace("&amp;", "&")


def test_the_ways_name_pages_and_each_page_on_them_names_the_next() -> None:
    assert {n for numbers in WAYS.values() for n in numbers} <= {e.number for e in entries()}
    pages = way("researcher")
    for here, there in pairwise(pages):
        assert f'<a href="/{there.name}">{there.number} ' in lesson_page(load(here.name), "server")


@every
def test_knobs_refuse_what_is_no_position(name: str) -> None:
    lesson = load(name)
    for wrong in ({"no such knob": 1}, *({k.name: v} for k in lesson.knobs for v in (None, [], math.nan, 1e99, {}))):
        with pytest.raises(ConfigError):
            lesson.read(wrong)


@pytest.mark.prove
@every
def test_the_page_fits_on_the_site(name: str) -> None:
    text, found = fitted(load(name))
    assert json.loads(text)["readouts"][default_index(load(name), found)]["pictures"]


@pytest.mark.prove
def test_the_tables_of_the_page_are_what_the_pages_compute() -> None:
    text = tables.PAGE.read_text()
    assert tables.with_tables(text) == text, "run: python -m scripts.site.lessons"


def test_the_page_names_every_lesson_that_breaks() -> None:
    text = tables.PAGE.read_text()
    lost = [e.number for e in entries() if load(e.name).breaks and f"| {e.number} {e.title} |" not in text]
    assert not lost, f"pages {lost}: run python -m scripts.site.lessons"
