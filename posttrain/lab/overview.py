"""The map: all lessons as places, the six roles as a picture, two ways through, papers, eras, and eight words."""

from __future__ import annotations

from posttrain.lab.catalog import FORCES, PARTS, Entry, entries, order, way
from posttrain.lab.page import Where, address, file_address
from posttrain.web.html import Markup, document, inline, tag

PART_WORDS = {
    "the framework": "one training step, role by role",
    "the algorithms": "REINFORCE, and what the others change in it",
    "production": "where rewards and prompts come from",
    "the engineer": "speed and memory",
    "synthesis": "all of it together",
    "the ladder": "a very small model, from its shapes to RL",
}
ROLES = (
    # name, room, what it does, column, row
    ("Rollout", "role/rollout.py", "Samples answers, and keeps the log-prob of every token that it says.", 0, 0),
    ("Environment", "environment/", "Gives tasks, answers turns, and judges what an answer is worth.", 1, 0),
    ("Reference", "role/score.py", "A frozen copy that scores the same tokens. It is never trained.", 2, 0),
    ("Algorithm", "algorithm/", "Credit and loss: two pure functions. It sees numbers, and no model.", 2, 1),
    ("Trainer", "role/trainer.py", "The only backward pass and the only optimizer.", 1, 1),
    ("Weight sync", "role/sync.py", "Brings new weights to the sampler, with a version for every token.", 0, 1),
)  # fmt: skip
ARROWS = (
    # path, what goes along it, where its words stand
    ("M212 52 H266", "answers", 239, 44), ("M462 52 H516", "rewards", 489, 44), ("M615 86 V126", "log-probs", 652, 110),
    ("M518 162 H464", "loss", 491, 154), ("M268 162 H214", "weights", 241, 154), ("M115 128 V88", "weights", 146, 110),
)  # fmt: skip
WORDS = {
    "policy": "The model that is trained. It gives each next token a probability, which formulas call pi.",
    "rollout": "One answer that the policy sampled, with the log-prob of every token. Several answers to one prompt "
    "are siblings; together they are a group.",
    "reward": "A number that says how good an answer is.",
    "verifier": "A program that computes a reward: it runs a test, or compares with a right answer.",
    "advantage": "How much better an answer was than was to be expected, also called credit. The gradient of its "
    "log-prob is multiplied by it: above 0 the answer is pushed up, below 0 down.",
    "baseline": "What was to be expected: often the mean reward of the siblings. A network that learns it is a critic, "
    "or value model.",
    "KL": "How far two policies are from one another. The KL anchor holds the policy near its start.",
    "RLVR": "Reinforcement learning with verifiable rewards: the reward is a program. In RLHF (from human feedback) it "
    "is a model of what people prefer.",
}
PAPERS = (
    # name, number on arXiv, subject, what is in it, page that shows it, minutes of reading
    ("DeepSeekMath", "2402.03300", "algorithms", "GRPO: siblings in place of a value model", "11", 30),
    ("DeepSeek-R1", "2501.12948", "algorithms", "rules alone as reward, then four stages", "23", 30),
    ("DAPO", "2503.14476", "algorithms", "four repairs of GRPO", "13", 25),
    ("DeepSeek-GRM", "2504.02495", "rewards", "judges that write their reasons, and vote", "15", 25),
    ("OLMo 3", "2512.13961", "preferences", "a whole open recipe, from SFT to RLVR", "16", 30),
    ("Magistral", "2506.10910", "systems", "an asynchronous loop with a loose clip", "22c", 20),
    ("Search-R1", "2503.09516", "agents", "a tool's tokens are masked", "08", 20),
)
ERAS = (
    ("2017-2022", "a reward model of some 30 thousand human comparisons (InstructGPT); a comparison takes 30 to 120 s"),
    ("2023", "the same comparisons as a supervised loss (DPO): two copies of the model in place of four"),
    ("2024", "verifiers that run: milliseconds an answer, and siblings in place of a critic (GRPO)"),
    ("2025", "mixed: a verifier where there is one, a model or a judge elsewhere (R1, Tulu 3, Qwen 3)"),
    ("2026", "more tasks are made verifiable, and agents act in environments"),
)


LEAD = (
    "RL post-training for language models, one idea a page. Each page has knobs, a picture that moves, and a setting "
    "that breaks training. What computes is the library itself: the same functions as in a real run."
)


def map_page(where: Where) -> str:
    """The whole map."""
    main = tag(
        "main",
        tag("h1", "The lab"),
        tag("p", LEAD, class_="lead"),
        tag("p", "New to reinforcement learning? ", tag("a", "Eight words", href="#words"), " come first."),
        _ways(),
        _search(),
        *(_part(part, where) for part in PARTS),
        tag("p", "No page has all of these words.", id="none", hidden=True),
        tag("h2", "The six roles around the loss"),
        _roles(),
        tag("div", _words(), tag("section", _papers(where), _eras()), class_="columns"),
        id="main",
    )  # fmt: skip
    whole = sum(e.whole for e in entries())
    foot = tag("footer", f"{whole + 1} of {len(entries()) + 1} pages are whole. ", _unfinished(), _move_freely(where))
    return document(
        "The map - posttrain lab",
        tag("header", tag("a", "to the page", href="#main", class_="skip"), tag("span", "posttrain lab"), class_="top"),
        _linked(main, where), foot,
        styles=tuple(file_address(s, where) for s in ("page.css", "lab.css")),
        scripts=(file_address("map.js", where),),
    )  # fmt: skip


def _linked(main: Markup, where: Where) -> Markup:
    """Puts the addresses of pages into the links that name a page by number, such as `page:04`."""
    for e in entries():
        main = Markup(main.replace(f'href="page:{e.number}"', f'href="{address(e, where)}"'))
    return main


def _unfinished() -> str:
    """The pages that wait for something, and for what; '' where all are whole."""
    missing = [f"{e.number} {e.title} ({e.missing})" for e in entries() if not e.whole]
    return f"Not yet: {'; '.join(missing)}. " if missing else ""


def _move_freely(where: Where) -> str:
    return "With the library installed, posttrain lab lets every knob move freely." if where == "site" else ""


def _by_number() -> dict[str, Entry]:
    return {e.number: e for e in entries()}


def _ways() -> Markup:
    def shown(name: str) -> Markup:
        pages = way(name)
        links = [tag("li", tag("a", f"{e.number} {e.title}", href=f"page:{e.number}")) for e in pages]
        minutes = sum(e.minutes for e in pages)
        return tag(
            "section", tag("h2", f"The {name}'s way: {len(pages)} pages, {minutes} minutes"),
            tag("ul", *links, class_="paths"),
        )  # fmt: skip

    rest = sum(e.minutes for e in entries())
    both = (shown("researcher"), shown("engineer"))
    return tag("div", tag("p", f"All pages in order take about {rest / 60:.1f} hours. Two shorter ways:"), *both)


def _search() -> Markup:
    label = tag("label", "Search the pages ", for_="search")
    field = tag("input", type="search", id="search", class_="search", autocomplete="off")
    forces = [
        tag("li", tag("span", class_=f"swatch {tone}", aria_hidden="true"), f"{name}: {words}")
        for (name, words), tone in zip(FORCES.items(), ("one", "two", "three"), strict=True)
    ]
    return tag(
        "div", tag("h2", "Pages"), label, field, tag("p", id="count", class_="soft"),
        tag("ul", *forces, class_="legend"),
    )  # fmt: skip


def _part(part: str, where: Where) -> Markup:
    pages = [e for e in entries() if e.part == part]
    if not pages:
        return Markup("")
    return tag(
        "section", tag("h3", f"{part.capitalize()}: {PART_WORDS[part]}"),
        tag("ul", *(_place(e, where) for e in pages), class_="places"), class_="part-of",
    )  # fmt: skip


def _place(e: Entry, where: Where) -> Markup:
    words = f"{e.number} {e.name} {e.title} {e.part} {e.force} {e.question}".lower()  # what the search looks through
    number = tag("span", tag("span", e.number if e.whole else f"{e.number}, not whole"), class_="number")
    return tag(
        "li", tag("a", number, tag("span", e.title), href=address(e, where), title=e.question),
        class_=f"place {e.force}{'' if e.whole else ' part'}", data_number=e.number, data_words=words,
    )  # fmt: skip


def _roles() -> Markup:
    boxes: list[Markup] = []  # in pixels: 190 x 64, a column every 250, a row every 110; `ARROWS` go between them
    for name, room, words, column, row in ROLES:
        x, y = 20 + column * 250, 20 + row * 110
        boxes.append(tag(
            "g", tag("rect", x=x, y=y, width=190, height=64, rx=8),
            tag("text", name, x=x + 95, y=y + 29, class_="name"), tag("text", room, x=x + 95, y=y + 48),
            tabindex="0", role="img", aria_label=f"{name}: {words}", data_told=f"{name}. {words}",
        ))  # fmt: skip
    head = tag(
        "marker", tag("path", d="M0 0 L8 4 L0 8"), id="tip", markerWidth=9, markerHeight=9,
        refX=7, refY=4, orient="auto",
    )  # fmt: skip
    drawn = tag(
        "svg", tag("defs", head), *(tag("path", d=d, marker_end="url(#tip)") for d, *_ in ARROWS),
        *(tag("text", words, x=x, y=y) for _, words, x, y in ARROWS), *boxes,
        viewBox="0 0 730 214", width="730", height="214", role="group", aria_label="the six roles", class_="roles",
    )  # fmt: skip
    first = (
        "One step of training goes round once. Below each name stands its place in the package. Point at a role, or go "
        "to it with the keyboard, to read what it does."
    )
    return tag("div", tag("div", drawn, class_="wide", tabindex="0", role="group", aria_label="the six roles"),
               tag("p", first, id="role-told", aria_live="polite"))  # fmt: skip


def _words() -> Markup:
    words = tag("dl", *(x for name, words in WORDS.items() for x in (tag("dt", name), tag("dd", words))))
    return tag("section", tag("h2", "Eight words", id="words"), words)


def _papers(where: Where) -> Markup:
    by_number = _by_number()
    rows = [
        tag("li", f"{name} ({arxiv}, {subject}), {minutes} min: {words}. ",
            *([tag("a", f"Page {number}", href=f"page:{number}")] if number in by_number else []))
        for name, arxiv, subject, words, number, minutes in PAPERS
    ]  # fmt: skip
    total = sum(p[-1] for p in PAPERS)
    return tag("div", tag("h2", f"Seven papers for {total // 60} hours"), tag("ol", *rows))


def _eras() -> Markup:
    rows = [tag("li", tag("b", years), " ", inline(words)) for years, words in ERAS]
    return tag("div", tag("h2", "Five eras of where reward came from"), tag("ul", *rows))


def listed() -> list[str]:
    """The lines of `posttrain lab --list`: number, title, whole or not."""
    rows = {e.number: (e.title, e.missing or "whole") for e in entries()}
    rows["00"] = ("The map", "whole")
    wide = max(len(title) for title, _ in rows.values())
    return [f"{n:>4}  {rows[n][0]:<{wide}}  {rows[n][1]}" for n in sorted(rows, key=order)]
