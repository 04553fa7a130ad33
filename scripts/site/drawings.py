"""Pictures of ideas, drawn from the library's own data: `python -m scripts.site.drawings [NAME ...]` writes them into
docs/pictures. `scripts.site.curves` draws runs, and hands the record of one to `staleness`."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

INTO = Path(__file__).parents[2] / "docs/pictures"
INK, LINE, PALE = "#24292f", "#57606a", "#f6f8fa"
BLUE, GREEN, ORANGE, RED = "#0b57d0", "#1a7f37", "#9a6700", "#b3261e"
FILLS = {BLUE: "#e8f0fe", GREEN: "#e6f4ea", ORANGE: "#fdf3dc", RED: "#fce8e6", LINE: PALE}
SANS, MONO = "system-ui, sans-serif", "ui-monospace, Menlo, Consolas, monospace"


@dataclass
class Drawing:
    """Boxes, arrows and words at places in pixels."""

    width: int
    height: int
    says: str
    """What it shows, read aloud where nobody sees it."""
    parts: list[str] = field(default_factory=list[str])

    def box(
        self, x: float, y: float, w: float, h: float, lines: Sequence[str], colour: str = LINE, size: int = 14
    ) -> None:
        """A box; its first line is bold, and all stand in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{FILLS[colour]}" stroke="{colour}"/>'
        )
        top = y + h / 2 - (len(lines) - 1) * (size + 4) / 2 + size / 3
        for i, line in enumerate(lines):
            self.word(x + w / 2, top + i * (size + 4), line, size, INK, "middle", bold=i == 0)

    def bar(self, x: float, y: float, w: float, h: float, colour: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}"/>')

    def word(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 14,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
        font: str = SANS,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
            f'{weight} xml:space="preserve">{escape(text)}</text>'
        )

    def fixed(self, x: float, y: float, text: str, wide: float) -> None:
        """Words of one width, stretched to `wide` whatever the reader's font is."""
        self.word(x, y, text, 14, INK, font=MONO)
        self.parts[-1] = self.parts[-1].replace(
            "<text ", f'<text textLength="{wide:g}" lengthAdjust="spacingAndGlyphs" ', 1
        )

    def arrow(self, *points: tuple[float, float], colour: str = LINE) -> None:
        """A line through the points, with a head at the last one."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>'
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        back = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>'
        title = f"<title>{escape(self.says)}</title>"
        body = "\n".join([title, head, back, *self.parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n</svg>\n'


def roles() -> Drawing:
    """The step as a ring through the six roles."""
    d = Drawing(
        860, 400, "The step as a ring through six roles: ask, answer, judge, score, credit, pack, learn, publish"
    )
    d.word(
        430,
        30,
        "The controller calls the six roles in this order; it sees no logit and no parameter",
        14,
        LINE,
        "middle",
    )
    w, h, top, low = 210, 92, 62, 242
    one, two, three = 30, 325, 620
    d.box(one, top, w, h, ["environment", "tasks, turns,", "verifiers, rewards"], GREEN)
    d.box(two, top, w, h, ["rollout", "samples; keeps the", "log-prob of every token"], BLUE)
    d.box(three, top, w, h, ["weight sync", "versioned, fingerprinted", "on both sides"], BLUE)
    d.box(one, low, w, h, ["reference", "frozen; scores"], LINE)
    d.box(two, low, w, h, ["algorithm", "credit and loss,", "pure functions"], ORANGE)
    d.box(three, low, w, h, ["trainer", "the only backward(),", "the only optimizer"], RED)
    for x1, x2, y, text, at in (
        (one + w, two, top + 30, "1 ask", -8),
        (two, one + w, top + 66, "2 answer", 18),
        (three, two + w, top + 46, "8 publish", -8),
        (one + w, two, low + 46, "4 score", -8),
        (two + w, three, low + 46, "5 credit", -26),
    ):
        d.arrow((x1, y), (x2, y))
        d.word((x1 + x2) / 2, y + at, text, 14, INK, "middle", bold=True)
    d.word((two + w + three) / 2, low + 38, "6 pack", 14, INK, "middle", bold=True)
    d.arrow((one + w / 2, top + h), (one + w / 2, low))
    d.word(one + w / 2 + 10, (top + h + low) / 2 + 5, "3 judge", 14, bold=True)
    d.arrow((three + w / 2, low), (three + w / 2, top + h))
    d.word(three + w / 2 + 10, (top + h + low) / 2 + 5, "7 learn", 14, bold=True)
    d.box(
        one,
        352,
        800,
        34,
        ["9 write down: the run folder has every token, its log-prob, its version and its credit"],
        LINE,
        13,
    )
    return d


QUESTIONS = (
    ("1  Is there a teacher instead of a reward?", "a model with the same tokenizer", "opd, iw_opd, gkd, mopd"),
    ("", "the policy itself, shown a hint", "sdpo, sdft"),
    ("", "demonstrations, and a reward nearly always 0", "luffy, chord"),
    ("2  Does the reward come on the way?", "verdicts about steps", "grpo_process"),
    ("", "turns that are paid one by one", "mt_grpo, gigpo"),
    ("", "thousands of tokens, and a critic", "vapo, ppo"),
    ("3  How hard are the prompts?", "many too easy, many too hard", "dapo"),
    ("", "solved one time in fifty", "maxrl"),
    ("", "one of k samples shall be right", "pkpo, pass_at_k"),
    ("4  Are there several rewards?", "with spreads that differ", "gdpo"),
    ("5  Are samples older than the weights?", "a few updates a step", "grpo, dapo, cispo"),
    ("", "many updates a step", "gspo, luspo, vespo, vcpo"),
    ("", "another engine, or bfloat16", "dppo, tis, icepop"),
    ("", "some steps old", "vcpo, decoupled_ppo, m2po"),
)
"""(question, answer, algorithms) of docs/guides/which-algorithm.md."""


def tree() -> Drawing:
    """The five questions from top to bottom, each with its answers."""
    row, gap = 30, 16
    firsts = [i for i, q in enumerate(QUESTIONS) if q[0]]
    height = 60 + len(QUESTIONS) * row + len(firsts) * gap + 64
    d = Drawing(960, height, "A decision tree: five questions, the first sure yes decides, and dr_grpo where none is")
    d.word(20, 30, "Ask from top to bottom. The first answer that you are sure of decides.", 14, LINE)
    y, places = 50.0, list[tuple[float, float]]()
    for i, first in enumerate(firsts):
        end = firsts[i + 1] if i + 1 < len(firsts) else len(QUESTIONS)
        tall = (end - first) * row
        d.box(20, y, 330, max(tall - 6, 24), [QUESTIONS[first][0]], BLUE, 13)
        places.append((y, y + max(tall - 6, 24)))
        for j in range(first, end):
            at = y + (j - first) * row + (tall - 6) / (2 * (end - first))
            d.arrow((350, at), (380, at))
            d.word(388, at + 5, QUESTIONS[j][1], 14)
            d.word(726, at + 5, QUESTIONS[j][2], 14, GREEN, bold=True, font=MONO)
        y += tall + gap
    for (_, one), (two, _) in pairwise(places):
        d.arrow((185, one), (185, two))
        d.word(193, (one + two) / 2 + 5, "else", 12, LINE)
    d.arrow((185, places[-1][1]), (185, y + 4))
    d.box(20, y + 4, 330, 40, ["none of these, or not sure"], LINE)
    d.arrow((350, y + 24), (380, y + 24))
    d.word(388, y + 29, "needs a reward and nothing else", 14)
    d.word(726, y + 29, "dr_grpo", 14, GREEN, bold=True, font=MONO)
    return d


# --- masks, as the library makes them ---------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = (
    ("system", "Be brief."),
    ("user", "What is 3+4?"),
    ("assistant", "It is 7."),
    ("user", "And twice that?"),
    ("assistant", "14."),
)


def masked(turns: str) -> list[tuple[str, bool]]:
    """A dialogue in runs of text, each with whether it is learned, as an SFT stage with these `turns` makes it."""
    from posttrain.config.env import Env
    from posttrain.config.run import Supervised
    from posttrain.engine.model.tiny_models import raw_bytes
    from posttrain.environment.make import environment
    from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
    from posttrain.role.learning.demonstrations import shown

    words = raw_bytes()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # type: ignore[dict-item]
    words.eos_token, words.chat_template = "<|im_end|>", CHAT
    renderer = Renderer(words, (int(words.convert_tokens_to_ids("<|im_end|>")),), 2048)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chat.jsonl"
        file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in TALK]}) + "\n")
        env = environment(Env(name="prompts", prompts=str(file), heldout=0), 0)
        stage = Supervised(name="sft", style="completion", turns=turns)  # type: ignore[arg-type]
        one = asyncio.run(
            shown(
                env,
                renderer,
                lambda task: RenderedDialogue(renderer, task),
                stage,
                env.train.task(0),
                np.random.default_rng(0),
                2048,
            )
        )
    out = list[tuple[str, bool]]()
    for segment in one.segments:
        edges = [0, *(np.flatnonzero(np.diff(segment.mask)) + 1).tolist(), len(segment.ids)]
        for a, b in pairwise(edges):
            out.append((words.decode(segment.ids[a:b].tolist()), bool(segment.mask[a])))
    return out


def mask() -> Drawing:
    """What is learned of one dialogue: with all turns, and with the last alone."""
    d = Drawing(
        860, 322, "A dialogue as the chat template writes it; what the assistant says is learned, the rest is masked"
    )
    d.bar(20, 16, 16, 16, "#b7e1c0")
    d.word(44, 29, "learned: what the assistant says, with the stop token behind it", 14)
    d.word(500, 29, "not marked: seen, no gradient", 14, LINE)
    for left, turns in ((20, "all"), (440, "last")):
        d.word(left, 64, f"sft.turns={turns}" + " (the default)" * (turns == "all"), 14, BLUE, bold=True, font=MONO)
        x, y, wide = left, 90.0, 8.43
        for text, learned in masked(turns):
            for k, line in enumerate(text.split("\n")):
                if k:
                    x, y = left, y + 23
                if line and learned:
                    d.bar(x - 1, y - 15, len(line) * wide + 2, 20, "#b7e1c0")
                if line:
                    d.fixed(x, y, line, len(line) * wide)
                x += len(line) * wide
    return d


# --- who waits for whom -----------------------------------------------------------------------------------------------


def laid_out(asked: Sequence[float], learned: Sequence[float], ahead: int) -> tuple[list[float], list[float]]:
    """When each step begins to be asked and to be learned: a step is asked when the one before it is played and at most
    `ahead` steps are not yet learned; it is learned when it is played and the one before it is learned."""
    asks, learns = list[float](), list[float]()
    for i, cost in enumerate(asked):
        free = asks[-1] + asked[i - 1] if i else 0.0
        due = learns[i - 1 - ahead] + learned[i - 1 - ahead] if i > ahead else 0.0
        asks.append(max(free, due))
        before = learns[-1] + learned[i - 1] if i else 0.0
        learns.append(max(asks[-1] + cost, before))
    return asks, learns


def staleness(folder: Path) -> Drawing:
    """Sampler and learner of a run's steps in time, for three bounds; the seconds are those that its record has."""
    from posttrain.record.run_reader import steps

    taken = [s for s in steps(folder) if s.stage == "rl"][:STEPS]
    asked = [s.clock["rollout"] for s in taken]
    learned = [sum(s.clock.get(n, 0.0) for n in ("score", "learn", "sync", "check", "book")) for s in taken]
    ends = [laid_out(asked, learned, k)[1][-1] + learned[-1] for k in BOUNDS]
    scale = 690 / max(ends)
    d = Drawing(
        860,
        378,
        "Sampler and learner in time: they take turns at staleness 0, and overlap at 1 and 2, which ends sooner",
    )
    d.word(20, 28, "One row samples, the other learns. A gap is waiting; the number is the step.", 14, LINE)
    for n, (bound, end) in enumerate(zip(BOUNDS, ends, strict=True)):
        top = 50 + n * 108
        asks, learns = laid_out(asked, learned, bound)
        d.word(20, top + 12, f"rl.staleness={bound}", 14, BLUE, bold=True, font=MONO)
        for row, (name, begun, cost, colour) in enumerate(
            (("sampler", asks, asked, BLUE), ("learner", learns, learned, RED))
        ):
            y = top + 22 + row * 32
            d.word(20, y + 18, name, 13)
            for i, (at, seconds) in enumerate(zip(begun, cost, strict=True)):
                d.box(
                    90 + at * scale,
                    y,
                    max(seconds * scale - 2, 3),
                    26,
                    [f"{i + 1}"] if seconds * scale > 12 else [],
                    colour,
                    12,
                )
        d.word(92 + end * scale, top + 50, f"{end:.1f} s", 13, INK, bold=True)
    d.word(
        20,
        366,
        f"Seconds of the first {STEPS} steps of a run of arithmetic, as recorded, laid out by the rule of the queue.",
        12,
        LINE,
    )
    return d


STEPS, BOUNDS = 8, (0, 1, 2)
DRAWINGS: dict[str, Callable[[], Drawing]] = {"roles": roles, "tree": tree, "mask": mask}
"""Those that need no run."""


def main() -> None:
    INTO.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        if name in sys.argv[1:] or not sys.argv[1:]:
            (INTO / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
            print(f"docs/pictures/{name}.svg", flush=True)


if __name__ == "__main__":
    main()
