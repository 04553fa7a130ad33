"""What code, tests, pages and notebooks cite resolves in the repository: survey entries (A19), arXiv ids, laws, pains,
traps, gaps, and the steps of the walks in docs/design/architecture.md."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tests import public

ROOT = public.ROOT
DOCS = ROOT / "docs"
CITING = [
    *(p for folder in ("posttrain", "tests", "benchmarks", "tour", "scripts") for p in (ROOT / folder).rglob("*.py")),
    *ROOT.glob("*.md"),
    *(p for folder in ("docs", "examples", "tour", "notebooks") for p in (ROOT / folder).rglob("*.md")),
    *(ROOT / "notebooks").glob("*.ipynb"),
]
CITING.remove(Path(__file__))
"""Every file that may cite, but this one, whose examples lead nowhere."""
SURVEY = re.compile(r"(?<![\w-])[A-E]\d{2}\b")
EFFECT = re.compile(r"\bF\.\d(?:\.\d)?(?: items? (\d+(?:(?:, | and )\d+)*))?")
ARXIV = re.compile(r"(?<![\d.])\d{4}\.\d{5}\b(?!\.\d)")
NUMBERED = re.compile(r"\b(law|pain|trap|gap)s? (\d+(?:(?:, | and )\d+)*)\b(?![.,]\d)", re.I)
GAP = re.compile(r"\bG\d{1,2}\b")
INVENTED = {"tests/laws/test_open_pieces.py": {"2501.00001"}}
"""Ids that a test makes up."""
SANDBOX = re.compile(r"tests/sandbox/test_\w+\.py|docs/design/hostile-cases\.md")
"""Files that cite traps of the sandbox, which are rows of docs/design/hostile-cases.md."""


def text_of(path: Path) -> str:
    """A file's text; of a notebook that of its cells, without what they printed and drew."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


@cache
def entries() -> frozenset[str]:
    """Every mark that may be cited: `A19`, `law 3`, `pain 16`, `trap 4`, `sandbox trap 7`, `G17`, an arXiv id."""
    page = {n: (DOCS / f"design/{n}.md").read_text() for n in ("papers", "laws", "pains", "hostile-cases")}
    found = re.findall(r"^### ([A-E]\d{2})\. ", page["papers"], re.M) + ARXIV.findall(page["papers"])
    effects = page["papers"].partition("### F.2. ")[2].partition("\n### ")[0]
    found += [f"F.2 item {n}" for n in re.findall(r"^\| (\d+) \|", effects, re.M)] + ["F.3"]
    found += re.findall(r"^### (F\.\d(?:\.\d)?)\. ", page["papers"], re.M)
    found += [x.lower() for x in re.findall(r"^## (Law \d+)\. ", page["laws"], re.M)]
    found += [x.lower() for x in re.findall(r"^### ((?:Pain|Trap) \d+)\. ", page["pains"], re.M)]
    found += re.findall(r"^\| (G\d+) \|", page["pains"], re.M)
    found += [f"sandbox {x}" for x in re.findall(r"^\| (trap \d+) \|", page["hostile-cases"], re.M)]
    return frozenset(found)


def cited(text: str, path: str) -> Iterator[str]:
    """The marks that a text cites."""
    made_up = INVENTED.get(path, set[str]())
    yield from (x for x in (*SURVEY.findall(text), *ARXIV.findall(text)) if x not in made_up)
    for effect in EFFECT.finditer(text):
        head = effect[0].partition(" ")[0]
        yield from ([f"{head} item {n}" for n in re.findall(r"\d+", effect[1])] if effect[1] else [head])
    for kind, numbers in NUMBERED.findall(text):
        named = "sandbox trap" if kind.lower() == "trap" and SANDBOX.fullmatch(path) else kind.lower()
        if named != "gap":
            yield from (f"{named} {n}" for n in re.findall(r"\d+", numbers))
    if path.startswith(("posttrain/faults/", "tests/mutants/")):
        sources = re.findall(r'source="([^"]*)"', text)
        yield from (x for source in sources for x in GAP.findall(source))


def nowhere(text: str, path: str) -> list[str]:
    """The citations of a text that lead nowhere."""
    return sorted({x for x in cited(text, path) if x not in entries()})


def test_every_citation_leads_somewhere() -> None:
    found = {str(p.relative_to(ROOT)): nowhere(text_of(p), str(p.relative_to(ROOT))) for p in CITING}
    wrong = [f"{path}: {', '.join(marks)}" for path, marks in sorted(found.items()) if marks]
    assert not wrong, "no entry in docs/design/papers.md, laws.md, pains.md or hostile-cases.md:\n" + "\n".join(wrong)


def test_the_pages_are_whole() -> None:
    """Laws, pains and traps are counted without a gap, and each entry of the survey is cited by code or tests."""
    for kind, most in (("law", 8), ("pain", 25), ("trap", 20), ("sandbox trap", 14)):
        assert {f"{kind} {n}" for n in range(1, most + 1)} == {
            x for x in entries() if re.fullmatch(rf"{kind} \d+", x)
        }, kind
    used = {x for p in CITING if p.suffix == ".py" for x in SURVEY.findall(p.read_text())}
    assert not [x for x in sorted(entries()) if SURVEY.fullmatch(x) and x not in used]


def test_the_test_itself_finds_what_leads_nowhere(tmp_path: Path) -> None:
    text = "(A99), arXiv 2599.99999, law 9, laws 2 and 31, Pain 26, trap 21; A05, 2402.03300, Laws 2, 3 and 6, trap 4"
    assert nowhere(text, "posttrain/x.py") == ["2599.99999", "A99", "law 31", "law 9", "pain 26", "trap 21"]
    assert nowhere("F.2 item 3, F.2 items 2 and 99, F.1.9, F.3.2", "x") == ["F.1.9", "F.2 item 99"]
    assert nowhere("trap 15, trap 14", "docs/design/hostile-cases.md") == ["sandbox trap 15"]
    assert nowhere('source="G31; G17"', "tests/mutants/judging/data_faults.py") == ["G31"]
    assert "pain 10" in set(cited("(pain 10, trl#2175)", "x")) and not list(cited("gap 1.8, B2, sha A123", "x"))
    cells = [{"source": ["see A99\n", "and law 31"], "outputs": [{"text": "pain 99"}]}, {"source": "F.1.9"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert nowhere(text_of(tmp_path / "a.ipynb"), "notebooks/a.ipynb") == ["A99", "F.1.9", "law 31"]


def test_notebooks_may_cite() -> None:
    there = {p.name for p in CITING if p.parent.name == "notebooks"}
    assert {p.name for p in (ROOT / "notebooks").glob("*.ipynb")} <= there and len(there) >= 6


STEP = re.compile(
    r"^\| (?P<stay>\d+) (?P<room>\w+) \| [^|]+ \| `posttrain/(?P<file>[\w/.]+)` `(?P<name>[\w.]+)` \|"
    r" [^|]+ \| [^|]+ \|$",
    re.M,
)


def names(path: Path) -> set[str]:
    """Functions of a file, those of its classes as `Class.method`."""
    out: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            out.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
            out |= {f"{node.name}.{x.name}" for x in inside}
    return out


WALKS = {"a token": 10, "a reward": 7, "an override": 8, "a weight": 6, "a judged pair": 6}
"""Each walk, and how many stays it makes: how often it comes into a room."""


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_goes_through_functions_that_are_there(walk: str) -> None:
    """Each row is a step in the room that it names, and a stay is numbered anew where the room is another one."""
    section = (
        (DOCS / "design/architecture.md").read_text().partition(f"## The walk of {walk}\n")[2].partition("\n## ")[0]
    )
    steps = [m.groupdict() for m in STEP.finditer(section)]
    assert len(steps) >= 8 and len(steps) == section.count("\n| ") - 1, "a step: stay, what, `file` `function`, in, out"
    gone = [f"{s['file']}: {s['name']}" for s in steps if s["name"] not in names(ROOT / "posttrain" / s["file"])]
    assert not gone, gone
    rooms = [s["file"].partition("/")[0] for s in steps]
    stays = list(accumulate((a != b for a, b in pairwise(rooms)), initial=1))
    assert [(s["stay"], s["room"]) for s in steps] == [(str(n), r) for n, r in zip(stays, rooms, strict=True)]
    assert stays[-1] <= WALKS[walk], "the walk comes into more rooms than it did"


def test_a_pain_says_what_holds_it() -> None:
    """Each pain and trap names a test that exists; `faults` that it names are planted ones."""
    from tests.mutants import FAULTS

    text = (DOCS / "design/pains.md").read_text()
    sections = re.findall(r"^### ((?:Pain|Trap) \d+)\..*\n((?:(?!^#).*\n)*)", text, re.M)
    assert len(sections) == 45
    for name, body in sections:
        assert re.search(r"`tests/[\w/]+\.py(?:::\w+)?`", body), f"{name}: no test"
        planted = re.findall(r"`(\w+)`", body.partition("Faults:")[2].partition("Tests:")[0])
        planted += re.findall(r"faults? (?:`\w+` and )?`(\w+)`", body)
        assert not [f for f in planted if f not in FAULTS], name
    named = set(re.findall(r"`(\w+)`", text))
    lacking = [f.name for f in FAULTS.values() if re.search(r"\b(pain|trap) \d", f.source) and f.name not in named]
    assert not lacking, f"docs/design/pains.md does not name them at their pain: {lacking}"
