"""Checks for what may be wrong with judged data although every row can be read. `posttrain check prompts` and a run,
before training, print the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from posttrain.core.abilities import LintFinding
from posttrain.core.measure.interval import Score
from posttrain.core.types import Task
from posttrain.environment.rows.row_reader import PromptRow, texts_of

Length = Callable[[Task, str], int]
"""Tokens of a task's prompt and a completion of it."""
FEW = 20
"""With fewer prompts, no warning is given about lengths."""
LONG = 60
"""Two completions of together this many characters are not the same by chance."""


def lint(
    rows: Sequence[PromptRow],
    held: Set[str],
    without: Sequence[str] = (),
    length: Length | None = None,
    context: int = 0,
) -> tuple[LintFinding, ...]:
    """The findings about judged rows.

    Args:
        held: keys of the prompts that are held out.
        without: lines about rows that were left out, or that can be read in two ways.
        length: counts tokens. Without it, sides over the context are not looked for.
        context: the most tokens that a model reads.
    """
    # `data_rows` gives these lines as text; its words tell of which kind each is.
    findings = [LintFinding("left out" if "left out" in line else "read as", line, warns=True) for line in without]
    pairs = list(pairs_of(rows))
    if pairs:
        findings += [length_bias(pairs), alike(pairs), contradictory(pairs), across_the_split(pairs, held)]
    findings += one_class(rows)
    if length is not None and pairs:
        findings += one_side_cut(pairs, length, context)
    return tuple(findings)


def pairs_of(rows: Iterable[PromptRow]) -> Iterator[tuple[PromptRow, str, str]]:
    """(row, chosen, rejected) of every pair; of a ranking its best and its worst completion."""
    for row in rows:
        if (judged := row.judged) is not None and judged.kind in ("pair", "ranking"):
            ascending = sorted(zip(judged.values, judged.completions, strict=True), key=lambda v: v[0])
            yield row, ascending[-1][1], ascending[0][1]


def length_bias(pairs: Sequence[tuple[PromptRow, str, str]]) -> LintFinding:
    """How often the chosen side is the longer one, with its 95 % interval over prompts. Equal lengths count half."""
    shares: dict[str, list[float]] = {}
    for row, chosen, rejected in pairs:
        longer = 0.5 if len(chosen) == len(rejected) else float(len(chosen) > len(rejected))
        # The share is computed for each prompt first. Pairs of one prompt are not independent, so an interval over
        # single pairs would be too narrow.
        shares.setdefault(row.key, []).append(longer)
    score = Score.of([sum(x) / len(x) for x in shares.values()])
    warns = len(shares) >= FEW and not score.low <= 0.5 <= score.high
    seen = f"the chosen side is the longer one in {score} of {len(pairs)} pairs ({len(shares)} prompts)"
    learned = "length" if score.mean > 0.5 else "brevity"
    advice = (
        f"a model can learn {learned} in place of quality: compare held-out pairs of equal length too, or use a loss"
        " that takes the mean over tokens"
    )
    return LintFinding("length bias", seen, warns=warns, advice=advice if warns else "")


def alike(pairs: Sequence[tuple[PromptRow, str, str]]) -> LintFinding:
    """Pairs whose sides differ in case and white space alone."""
    return _places(
        "identical pairs",
        [row for row, chosen, rejected in pairs if normalised(chosen) == normalised(rejected)],
        "{} of {} pairs have sides that differ in case and white space alone",
        len(pairs),
        "they teach spelling and spaces: leave them out where that is not meant",
    )


def contradictory(pairs: Sequence[tuple[PromptRow, str, str]]) -> LintFinding:
    """Pairs that are also in the data with their sides swapped."""
    present = {(row.key, chosen, rejected) for row, chosen, rejected in pairs}
    return _places(
        "contradictory pairs",
        [row for row, chosen, rejected in pairs if (row.key, rejected, chosen) in present],
        "{} of {} pairs are also there with their sides swapped",
        len(pairs),
        "they cancel out: keep the majority's judgement, or a loss with label noise",
    )


def across_the_split(pairs: Sequence[tuple[PromptRow, str, str]], held: Set[str]) -> LintFinding:
    """Held-out pairs whose completions are also trained on.

    Two completions of together `LONG` characters or more are compared without their prompts, because they are hardly
    equal by chance. Shorter ones have to follow the same prompt, apart from case and white space.
    """

    def compared(row: PromptRow, chosen: str, rejected: str) -> tuple[str, ...]:
        texts = (normalised(chosen), normalised(rejected))
        prompt = "" if len("".join(texts)) >= LONG else normalised("\n".join(texts_of(row.task.prompt)))
        return (*texts, prompt)

    trained = {compared(*pair) for pair in pairs if pair[0].key not in held}
    tested = [pair for pair in pairs if pair[0].key in held]
    return _places(
        "duplicates across the split",
        [pair[0] for pair in tested if compared(*pair) in trained],
        "{} of {} held-out pairs are also trained on, after a prompt that is written differently",
        len(tested),
        "held-out accuracy measures memory there: write equal prompts alike, so that they are on one side of the split",
    )


def one_class(rows: Sequence[PromptRow]) -> list[LintFinding]:
    """Labels that are all good or all bad."""
    labels = [r.judged.values[0] for r in rows if r.judged is not None and r.judged.kind == "label"]
    if not labels:
        return []
    share, warns = sum(labels) / len(labels), len(set(labels)) == 1
    seen = f"{share:.1%} of {len(labels)} completions are labelled good"
    advice = "all labels are equal, so that nothing tells good from bad: add the other kind" if warns else ""
    return [LintFinding("labels", seen, warns=warns, advice=advice)]


def one_side_cut(pairs: Sequence[tuple[PromptRow, str, str]], length: Length, context: int) -> list[LintFinding]:
    """Pairs in which only one side is longer than the context, so that only this side would be cut."""
    too_long = [(row, [length(row.task, text) > context for text in (c, r)]) for row, c, r in pairs]
    finding = _places(
        "one side over the context",
        [row for row, (chosen_long, rejected_long) in too_long if chosen_long != rejected_long],
        f"{{}} of {{}} pairs have one side alone that is longer than the context of {context} tokens",
        len(pairs),
        "cut there, a side would lose its end and the other not: leave such pairs out, or raise the context",
    )
    return [finding] if finding.warns else []


def normalised(text: str) -> str:
    """The text without differences of case and white space."""
    return " ".join(text.casefold().split())


def _places(name: str, rows: Sequence[PromptRow], words: str, count: int, advice: str) -> LintFinding:
    """A finding about some of `count` pairs, with the place of the first one. It warns if there is any."""
    at = f" (first: {rows[0].place})" if rows else ""
    return LintFinding(name, words.format(len(rows), count) + at, warns=bool(rows), advice=advice if rows else "")
