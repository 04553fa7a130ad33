"""The documentation as files: who each page is for, what the index holds, and how links turn into those of the site.
What the built site must do is in tests/site/built.py (`make test-docs`)."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from posttrain.ladder.policy_rows import LADDER
from scripts.site.build import SHELVES, listed
from scripts.site.drawings import DRAWINGS, QUESTIONS
from scripts.site.examples import FIRST, LAST, TITLE, cut
from scripts.site.pages import SiteError, Stage, place, read_pages, relative, slug
from scripts.site.pictures import FIGURES, PICTURES, Picture

ROOT = Path(__file__).parents[1]
PAGES = read_pages(ROOT)
NAMED = re.compile(r"^For (?:people|you)\b[^\n]*(?:\n[^\n]+)*", re.M)


def test_a_page_says_whom_it_is_for_and_what_they_can_do_after_it() -> None:
    heads = {path: re.split(r"^## ", text, maxsplit=1, flags=re.M)[0] for path, text in PAGES.items()}
    said = {path: NAMED.search(head) for path, head in heads.items()}
    lacking = [p for p, found in said.items() if not found or "After this page you" not in " ".join(found[0].split())]
    assert not lacking, f"{lacking}: below its title, write 'For people who .... After this page you ....'"


def test_the_index_leads_to_every_page() -> None:
    """The index lists the shelves, and the first page of a shelf its pages."""
    assert listed(PAGES, "docs/README.md", "docs/")[-len(SHELVES) :] == [f"docs/{s}/README.md" for s in SHELVES]
    found = {p for s in SHELVES for p in listed(PAGES, f"docs/{s}/README.md", f"docs/{s}/")}
    lacking = [p for p in PAGES if p.startswith("docs/") and not p.endswith("/README.md") and p not in found]
    assert not lacking, f"no shelf's README.md lists {lacking}"


def words(text: str) -> int:
    """Words of running text and tables: no code block, no address of a link, no cell without a letter."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in re.sub(r"\]\([^)]*\)", "]", text).split())


def test_what_users_read_is_short() -> None:
    """Start, guides, help and reference together: evidence and logs belong to research."""
    read = {p: words(text) for p, text in PAGES.items() if p.startswith(tuple(f"docs/{s}/" for s in SHELVES[:4]))}
    assert 40_000 < sum(read.values()) <= 70_000, sum(read.values())


def test_no_page_lies_where_another_one_does(tmp_path: Path) -> None:
    """The generator makes pages too: its search would replace a page of that name."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/search.md").write_text("# A page\n")
    with pytest.raises(SiteError, match=r"docs/search\.md: the site has another page search\.html"):
        read_pages(tmp_path)


def test_two_clicks_in_the_files() -> None:
    index, first = PAGES["docs/README.md"], ("start/for-researchers.md", "start/for-engineers.md")
    assert all(f"]({page})" in index for page in first)
    assert "[my own reward on my own model](my-reward-my-model.md)" in PAGES["docs/start/for-researchers.md"]
    assert "[What replaces my `GRPOConfig`](coming-from-trl.md#grpoconfig)" in PAGES["docs/start/for-engineers.md"]
    assert "## GRPOConfig" in PAGES["docs/start/coming-from-trl.md"]


def test_every_anchor_is_there() -> None:
    """A link to a part of a page names a heading of that page."""
    wrong = list[str]()
    for path, text in PAGES.items():
        for page, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
            there = (ROOT / path).parent / page if page else ROOT / path
            if there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                wrong.append(f"{path}: ({page}#{anchor})")
    assert not wrong, wrong


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings; equal ones are numbered."""
    out: set[str] = set()
    for title in re.findall(r"^#{1,6} (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        name, n = slug(title), 0
        while (f"{name}-{n}" if n else name) in out:
            n += 1
        out.add(f"{name}-{n}" if n else name)
    return out


def test_where_a_page_lies() -> None:
    assert [place(p) for p in ("docs/README.md", "README.md", "docs/start/recipes.md", "docs/research/LOG.md")] == [
        *("index", "readme", "start/recipes", "research/log")
    ]
    assert place("examples/README.md") == "examples/index" and place("examples/gsm8k/README.md") == "examples/gsm8k"
    assert place("docs/help/README.md") == "help/index" and relative("recipes", "examples/gsm8k") == "../recipes"


def test_links_turn_into_those_of_the_site() -> None:
    stage = Stage(ROOT, PAGES)
    said = stage.text(
        "[a](../../docs/start/recipes.md#rlhf) [b](../../posttrain/ladder/policy_rows.py) (law 2, A05,"
        " F.2 item 5) `law 2` [c](https://x.org)\n"
        "```sh\nlaw 3 [d](nowhere)\n```",
        "examples/gsm8k/README.md",
        "examples/gsm8k",
    )
    law, entry, effects = (stage.marks[x].partition("#")[2] for x in ("law 2", "a05", "f.2"))
    assert said.splitlines() == [
        "[a](../start/recipes.md#rlhf) [b](../source/posttrain/ladder/policy_rows_py.md)"
        f" ([law 2](../design/laws.md#{law}), [A05](../design/papers.md#{entry}),"
        f" [F.2](../design/papers.md#{effects}) item 5) `law 2`"
        " [c](https://x.org)",
        "```sh",
        "law 3 [d](nowhere)",
        "```",
    ]
    assert stage.sources == {"posttrain/ladder/policy_rows.py"}
    with pytest.raises(SiteError, match="neither a page nor a file"):
        stage.text("[x](gone.md)", "docs/start/recipes.md", "recipes")


def test_a_date_is_not_cut() -> None:
    rows = "| 2026-11-23 | law | a |\n| H-07 | b |\n| a-07 | c |\n    | 2026-11-23 | d |"
    assert Stage(ROOT, PAGES).text(rows, "docs/start/recipes.md", "recipes").splitlines() == [
        '| <span class="uncut">2026-11-23</span> | law | a |',
        '| <span class="uncut">H-07</span> | b |',
        *("| a-07 | c |", "    | 2026-11-23 | d |"),
    ]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)
def test_a_picture_is_of_its_command_and_asks_nobody(picture: Picture) -> None:
    text = (ROOT / f"docs/pictures/{picture.name}.svg").read_text(encoding="utf-8")
    words = "".join(xml.fromstring(text).itertext()).replace("\xa0", " ")
    assert picture.command in words
    assert not re.findall(r"(?:url\(|href=)[\"']?https?://", text) and "/.venv" not in words


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_its_script_draws(name: str) -> None:
    text = DRAWINGS[name]().svg()
    assert text == (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8"), (
        "run python -m scripts.site.drawings"
    )
    assert xml.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None


def test_the_decision_tree_names_what_its_page_names() -> None:
    page, named = PAGES["docs/guides/which-algorithm.md"], [a for _, _, names in QUESTIONS for a in names.split(", ")]
    assert not [a for a in named if a not in LADDER or f"`{a}`" not in page]


def test_every_picture_is_shown() -> None:
    shown = " ".join(PAGES.values())
    named = {*(f"{p.name}.svg" for p in PICTURES), *FIGURES, *(p.name for p in (ROOT / "docs/pictures").iterdir())}
    assert not [name for name in sorted(named) if f"pictures/{name})" not in shown]
    for name in FIGURES:
        assert "<svg" in (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/reference/algorithms.md", "docs/design/papers.md"])
def test_every_algorithm_is_on_the_pages_that_list_them(page: str) -> None:
    lacking = [name for name in LADDER if f"`{name}`" not in PAGES[page] and f"\n## {name}\n" not in PAGES[page]]
    assert not lacking, f"{page} has no {lacking}"


def test_experiments_stand_by_topic_and_newest_first() -> None:
    """LOG.md: each topic begins with its table; defects.md: each row names what holds it."""
    topics = re.split(r"^## ", PAGES["docs/research/LOG.md"], flags=re.M)[2:]
    assert len(topics) >= 8
    for topic in topics:
        title, _, rest = topic.partition("\n")
        assert rest.lstrip().startswith("| date | question | predicted | measured |"), title
        dates = re.findall(r"^\| (\d{4}-\d\d-\d\d) \|", rest, re.M)
        assert dates and dates == sorted(dates, reverse=True), title
        headed = re.findall(r"^### (\d{4}-\d\d-\d\d) ", rest, re.M)
        assert headed and headed == sorted(headed, reverse=True), title
    rows = re.findall(r"^\| \d{4}-\d\d-\d\d \|.*\| ([^|]*) \|$", PAGES["docs/research/defects.md"], re.M)
    assert len(rows) > 20 and all("`" in row for row in rows)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebooks_page_is_of_this_notebook(path: Path) -> None:
    """Its cells stand there in order, with what they printed; nothing of the machine that ran them does."""
    page, at = path.with_suffix(".md").read_text(encoding="utf-8"), 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip("\n")
        shown = f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
        assert shown in page[at:], f"run `python -m scripts.site.notebooks {path.stem}`: {source[:60]!r} is not there"
        at += page[at:].index(shown) + len(shown)
    assert "```text" in page and not re.search(r"/tmp/|/home/|/root/|venv/bin|site-packages|Traceback", page)


NOT_MADE: tuple[str, ...] = ()
"""Examples whose outputs are still to be made."""


def test_what_an_example_prints_is_of_its_commands() -> None:
    """Each command of the last section stands above it, in order; nothing of the machine that ran it is there."""
    examples = [p for p in PAGES if re.fullmatch(r"examples/\w+/README\.md", p)]
    shown = {p: PAGES[p].partition(f"\n{TITLE}\n") for p in examples}
    lacking = [p for p, (_, title, _) in shown.items() if not title and p not in NOT_MADE]
    assert len(examples) > 8 and not lacking, f"run `python -m scripts.site.examples` for {lacking}"
    for path, (above, _, said) in shown.items():
        at = 0
        for command in re.findall(r"^\$ (.+)$", said, re.M):
            assert command in above[at:], f"run `python -m scripts.site.examples`: {path} has no {command!r}"
            at += above[at:].index(command)
        assert not re.search(r"/tmp/|/home/|/root/|venv/bin|site-packages|Traceback", said), path


def test_long_output_is_cut_between_paragraphs() -> None:
    """The beginning, then whole paragraphs of the end; one that is too long alone is cut where it is."""
    parts = [[f"{letter}{n}" for n in range(count)] for letter, count in (("a", 30), ("b", 20), ("c", 10))]
    assert cut("\n\n".join("\n".join(p) for p in parts)) == [*parts[0][:FIRST], "...", *parts[2]]
    assert cut("\n".join(parts[0] * 2)) == [*parts[0][:FIRST], "...", *parts[0][-LAST:]]
    assert cut("a\n\n\nb\n") == ["a", "b"]
    assert cut("\n".join(parts[0] * 2), 0) == [*parts[0][:FIRST], "..."]


def test_the_site_needs_no_import_of_the_package() -> None:
    """It is built where torch is not installed; only what makes its pictures, tables and outputs needs it."""
    for path in (ROOT / "scripts/site").glob("*.py"):
        if path.name not in ("pictures.py", "drawings.py", "curves.py", "notebooks.py", "examples.py", "lessons.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            assert not [m for m in named if m.split(".")[0] in ("posttrain", "tests", "torch")], path.name
