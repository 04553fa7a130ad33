"""The built site: it is built without a network and without a warning, every link and anchor leads somewhere, nothing
is asked of another host, and every page opens in Chromium without an error, on a desk and on a phone.

Run by `make test-docs`, in an environment without torch. In its environment:

    POSTTRAIN_SEED          draws the pages that the browser opens (it is printed)
    POSTTRAIN_DOCS=all      opens every page
    POSTTRAIN_PICTURES=DIR  writes a picture of each page that is opened: DIR/desk/PAGE.png and DIR/phone/PAGE.png

Without Chromium the tests that need it are skipped, and fail under CI.
"""

from __future__ import annotations

import http.server
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from tests.needed import program

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
SIZES = {"desk": (1280, 800), "phone": (390, 844)}
SAMPLE = 24
"""Pages that the browser opens at a landing, beside the few that are always opened."""
START = ("for-researchers", "for-engineers", "my-reward-my-model")
ALWAYS = ("index.html", *(f"start/{page}.html" for page in START), "search.html")
TALLEST = 6_000
"""Pixels of a page that its picture shows, from the top."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@cache
def offline() -> tuple[str, ...]:
    """What begins a command that has no network: a namespace without an interface that is up. Empty where this machine
    makes none."""
    ways = (("unshare", "--net"), ("unshare", "--net", "--user", "--map-root-user"))
    for words in ways:
        if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    return ()


@pytest.fixture(scope="session")
def site() -> Path:
    """Built anew, without a network; a warning of Sphinx is an error of the build."""
    words = [*offline(), sys.executable, "-m", "scripts.site", str(SITE)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@dataclass
class Page(HTMLParser):
    """What a page links to and loads, and its anchors."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        self.ids |= {given[k] for k in ("id", "name") if k in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect", "dns-prefetch"):
            self.loads.append(given["href"])

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def html(site: Path) -> list[Path]:
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


def test_the_network_is_cut_while_the_site_is_built(site: Path) -> None:
    """What is started as the build is has a way to nowhere, not even to this very process."""
    if not offline():
        program(("unshare",), "util-linux")
        pytest.skip("this kernel makes no network namespace for us, so the site was built with the network there")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"
        words = [sys.executable, "-c", ask, str(server.getsockname()[1])]
        here, there = (subprocess.run([*w, *words], capture_output=True, text=True) for w in ((), offline()))
    assert here.returncode == 0 and "OSError: [Errno 101]" in there.stderr, here.stderr + there.stderr
    routes = subprocess.run([*offline(), "cat", "/proc/net/route"], capture_output=True, text=True, check=True).stdout
    assert not routes.splitlines()[1:], routes
    assert (site / "index.html").is_file()


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    from scripts.site.pages import place, read_pages

    pages = read_pages(ROOT)
    assert len(pages) > 60
    assert not [p for p in pages if not (site / f"{place(p)}.html").is_file()]
    for path, text in pages.items():  # the words of its title, because the site turns quotes
        title = re.findall(r"\w+", text[text.index("# ") + 2 :].partition("\n")[0])
        shown = (site / f"{place(path)}.html").read_text(encoding="utf-8").partition("<title>")[2].partition("</title>")
        there = re.findall(r"\w+", unescape(shown[0]))[: len(title)]
        assert there == title, f"{place(path)}.html is another page than {path}"
    assert len(list((site / "reference").glob("*.html"))) > 100


def test_every_page_says_whom_it_is_for(site: Path) -> None:
    """The reference too. Pages that show a source file and those of the generator are no pages to read, and those of
    the lab begin with their question."""
    made, others = {"genindex.html", "search.html"}, {"source", "lab"}
    found = [p for p in html(site) if p.name not in made and others.isdisjoint(p.relative_to(site).parts)]
    said = {p: " ".join("".join(read(p).text).split()) for p in found}
    lacking = [p.relative_to(site) for p, text in said.items() if "For people" not in text and "For you" not in text]
    assert len(found) > 160 and not lacking, lacking
    assert not [p for p, text in said.items() if "After this page you" not in text]


def test_the_reference_says_what_each_name_is(site: Path) -> None:
    """In a whole sentence, or its first clause: no cell is empty or cut at a full stop inside of brackets."""
    text = (site / "reference/api.html").read_text(encoding="utf-8")
    rows = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in re.findall(r"<tr.*?</tr>", text, re.S)]
    said = {re.sub(r"<[^>]*>", "", r[0]): unescape(re.sub(r"<[^>]*>", "", r[1])).strip() for r in rows if len(r) == 2}
    assert len(said) > 200
    assert not [name for name, words in said.items() if not words or words.count("(") != words.count(")")]
    assert not [words for words in said.values() if re.search(r"\b(al|Eq)$", words)]


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    wrong = list[str]()
    for path in html(site):
        for link in read(path).links:
            target, anchor = urldefrag(link)
            if urlsplit(target).scheme in ("http", "https", "mailto"):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            if not there.is_file():
                wrong.append(f"{path.relative_to(site)}: {link}")
            elif anchor and there.suffix == ".html" and unquote(anchor) not in read(there).ids:
                wrong.append(f"{path.relative_to(site)}: {link}, no such anchor")
    assert not wrong, "\n".join(wrong[:40])


def test_a_citation_is_a_link(site: Path) -> None:
    """`law 7` on a page leads to the law, `(A05)` in the reference to the survey's entry, `F.2` to its table."""
    assert [x for x in read(site / "research/miniatures.html").links if "papers.html#f-2-" in x]
    assert [x for x in read(site / "start/for-engineers.html").links if "laws.html#law-7" in x]
    assert [x for x in read(site / "reference/posttrain.ladder.pieces.baseline.html").links if "papers.html#a05" in x]


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    wrong = [f"{p.relative_to(site)}: {x}" for p in html(site) for x in read(p).loads if urlsplit(x).netloc]
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        text = re.sub(r"xmlns(?::\w+)?=\"[^\"]*\"", "", path.read_text(encoding="utf-8"))
        found = re.findall(r"(?:url\(|@import|href=)\s*[\"']?(?:https?:)?//[^\s\"')]+", text)
        wrong += [f"{path.relative_to(site)}: {x}" for x in found]
    assert not wrong, "\n".join(wrong[:40])


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(site))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that leaves a page before it has all of it is no error; what it asks for and does not get, it
            tells itself."""

    server = Server(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@dataclass
class Window:
    """A window of the browser in which every host but ours is refused; what went wrong in it is kept."""

    page: Any
    address: str
    size: str
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.route("**/*", self._routed)
        self.page.on("console", lambda m: self.wrong.append(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.wrong.append(f"script: {e}"))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", lambda r: self.wrong.append(f"{r.status}: {r.url}") if r.status >= 400 else None)

    def _routed(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.address, "data:", "blob:")):
            route.continue_()
        else:
            self.wrong.append(f"asks another host: {url}")
            route.abort()

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # an icon that was still on its way when the next page was opened
            self.wrong.append(f"request failed: {request.url}, {request.failure}")

    def open(self, path: str) -> list[str]:
        """What is wrong with a page."""
        self.wrong.clear()
        self.page.goto(urljoin(self.address, path), wait_until="load")
        wide = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if wide[0] > wide[1]:
            self.wrong.append(f"wider than the window: {wide[0]} of {wide[1]} pixels, {self._widest(wide[1])}")
        if not self.page.locator("h1, #search-results").count():
            self.wrong.append("no title")
        return [f"{path}: {x}" for x in self.wrong]

    def picture(self, path: str, folder: Path) -> None:
        """Writes what the open page looks like."""
        width, height = (self.page.evaluate(f"document.documentElement.scroll{x}") for x in ("Width", "Height"))
        into = folder / self.size / f"{path.removesuffix('.html')}.png"
        into.parent.mkdir(parents=True, exist_ok=True)
        shown = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST)}
        self.page.screenshot(path=into, full_page=True, clip=shown)

    def _widest(self, width: int) -> str:
        return self.page.evaluate(
            "w => [...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > w + 1)"
            ".map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 60)).slice(0, 2).join('; ')",
            width,
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = program(BROWSERS, "chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture(params=SIZES)
def window(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Window]:
    width, height = SIZES[request.param]
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
    yield Window(context.new_page(), address, request.param)
    context.close()


def chosen(site: Path) -> list[str]:
    """The pages to open: all, or those that the seed draws and the few that are always opened."""
    pages = [p.relative_to(site).as_posix() for p in html(site)]
    if os.environ.get("POSTTRAIN_DOCS") == "all":
        return pages
    seed = int(os.environ.get("POSTTRAIN_SEED") or time.time_ns() % 2**31)
    print(f"\npages drawn with POSTTRAIN_SEED={seed}")
    return sorted({*ALWAYS, *random.Random(seed).sample(pages, min(SAMPLE, len(pages)))})


def test_pages_open_without_an_error(site: Path, window: Window) -> None:
    wrong, pages, pictures = list[str](), chosen(site), os.environ.get("POSTTRAIN_PICTURES")
    for path in pages:
        wrong += window.open(path)
        if pictures:
            window.picture(path, Path(pictures))
    print(f"\n{len(pages)} pages opened, {window.size}: {len(wrong)} things wrong")
    assert not wrong, "\n".join(wrong[:40])


def test_the_refusal_itself_is_seen(window: Window) -> None:
    window.open("index.html")
    window.page.evaluate("fetch('https://example.org/x').catch(() => 0)")
    assert any("asks another host: https://example.org/x" in x for x in window.wrong)


@pytest.mark.parametrize(
    ("first", "second", "title", "anchor"),
    [
        ("from evaluation to your first RL run", "my own reward on my own model", "My own reward on my own model", ""),
        ("coming from another framework", "What replaces my GRPOConfig", "Coming from TRL", "#grpoconfig"),
    ],
    ids=["researcher", "engineer"],
)
def test_two_clicks(window: Window, first: str, second: str, title: str, anchor: str) -> None:
    window.open("index.html")
    for words in (first, second):
        window.page.locator("article").get_by_role("link", name=words, exact=True).first.click()
        window.page.wait_for_load_state("load")
    assert title in window.page.locator("h1").first.inner_text()
    assert window.page.url.endswith(anchor) and not window.wrong, window.wrong


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("aggregation", ".html"),
        ("icepop", "algorithms.html"),
        ("v_trace", "algorithms.html"),
        ("staleness", "staleness.html"),
        ("GRPOConfig", "coming-from-trl.html"),
        ("TokenL2", "reference/posttrain.ladder.pieces"),
        ("beams", "guides/search.html"),
        ("LLM judge", "judges.html"),
        ("multi-turn", "tools.html"),
        ("quickstart", "readme.html"),
        ("config file", "recipes.html"),
        ("Weights & Biases", "trackers.html"),
    ],
)
def test_search_finds_words_without_a_network(window: Window, words: str, page: str) -> None:
    """Names of algorithms, of settings and of classes lead to their pages, and none to the shelf of research."""
    window.open(f"search.html?q={words}")
    window.page.locator(f"#search-results li a[href*='{page}']").first.wait_for(timeout=20_000)
    assert not window.page.locator("#search-results li a[href*='research/']").count()
    assert not window.wrong, window.wrong
