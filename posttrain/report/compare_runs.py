"""Prints a comparison of runs: a sentence for each group, a table of runs, and a table of the settings that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.core.measure.interval import Score, interval
from posttrain.core.measure.number_text import number_text
from posttrain.diagnose.run_comparison import SAME_LOSS, ComparedRun, GroupGain, RunComparison, RunGroup, compare_runs
from posttrain.report.console import Group, PlainConsole, table
from posttrain.report.run_summary import WIDTH, short

LONGEST = 24
"""Most characters of a setting's value in the table."""
MOST = 10
"""Most settings that differ, in the table."""


def compare(*folders: str | Path, stage: str | None = None, quiet: bool = False, every: bool = False) -> RunComparison:
    """Compare runs by held-out score, paired by prompt.

    Runs that differ in nothing but their seed make one group. The group of the first run is compared with each other.

    Args:
        folders: two run folders or more.
        stage: compare at the end of this stage; default the last one of each run.
        quiet: print nothing.
        every: print all settings that differ, instead of the first ten.
    """
    comparison = compare_runs(folders, stage)
    if not quiet:
        show_comparison(PlainConsole(soft_wrap=True), comparison, every)
    return comparison


def show_comparison(console: PlainConsole, c: RunComparison, every: bool = False) -> None:
    """Print a comparison: its sentences, its notes and the tables. `every`: all settings that differ."""
    for line in (*sentences(c), *(f"note: {note}" for note in c.notes)):
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False):
            console.print(part)
    console.print(_runs(c))
    if len(c.groups) > 1:
        console.print(_settings(c.groups, every))


def _runs(c: RunComparison) -> Group:
    """The table of runs."""
    what = _word(c)
    heads = ("", "run", "seed", "stage", "at step", f"{what} [95 %]")
    rows = list[tuple[str, ...]]()
    for letter, run in ((g.letter, r) for g in c.groups for r in g.runs):
        score, name = _score(c, run), run.of.folder.name or str(run.of.folder)
        figures = (str(run.measured.step), short(score.mean, score.low, score.high))
        rows.append((letter, name, str(run.seed), run.stage.name, *figures))
    return table(f"held-out {what} of each run", heads, rows, words=("", "run", "stage"))


def _settings(groups: Sequence[RunGroup], every: bool) -> Group:
    """The table of the settings that differ."""
    heads = ("setting", *(g.letter for g in groups))
    names = [*groups[0].settings]
    shown = names if every else names[:MOST]
    title = "settings that differ" + (f", the first {MOST} of {len(names)} (all: --all)" if shown != names else "")
    rows = [(name, *(_cut(g.settings[name]) for g in groups)) for name in shown]
    return table(title, heads, rows, words=heads)


def _cut(text: str) -> str:
    """The value, or the end of a long one: paths differ at their ends."""
    return text if len(text) <= LONGEST else "..." + text[3 - LONGEST :]


def sentences(c: RunComparison) -> list[str]:
    """Returns the comparison in words, a sentence for each group after the first."""
    if len(c.groups) == 1:
        runs = c.groups[0].runs
        means = [_score(c, r).mean for r in runs]
        least, most = number_text(min(means)), number_text(max(means))
        if len({r.seed for r in runs}) == 1:
            return [
                f"These runs have the same settings and the same seed, {runs[0].seed}: their held-out {_word(c)} is"
                f" between {least} and {most}. Give runs with other settings, or other seeds, to"
                " compare."
            ]
        return [
            f"These runs differ in nothing but their seed: their held-out {_word(c)} is between {least} and"
            f" {most}, {number_text(sum(means) / len(means))} on average. Give runs with other settings to compare"
            " settings."
        ]
    return [_sentence(c, g) for g in c.gains]


def _word(c: RunComparison) -> str:
    """The name of the figure by which runs are compared."""
    if any(r.stage.misordered and r.stage.end is None for g in c.groups for r in g.runs):
        return "share of pairs ordered as judged"
    return {"accuracy": "accuracy", "reward": "mean reward", "loss": "loss"}[c.what]


def _score(c: RunComparison, run: ComparedRun) -> Score:
    """Returns the score by which a run is compared, as people read it.

    Comparisons hold losses as negative numbers. Here a loss is positive again, and lower is better.
    """
    return _as_read(c, run.measured.accuracy if c.what == "accuracy" else run.measured.reward)


def _as_read(c: RunComparison, score: Score) -> Score:
    """A score or a gain of the comparison, with the sign that people read."""
    return Score(-score.mean, -score.high, -score.low, score.prompts) if c.what == "loss" else score


def _sentence(c: RunComparison, g: GroupGain) -> str:
    """The comparison of a group with the first one, as a sentence with its figures."""
    first, other, paired = c.groups[0].letter, g.group.letter, g.over_prompts
    seeds = f"{g.seeds[0]} and {g.seeds[1]} seeds"
    difference, units = "gain", "prompts"
    if c.what == "loss":
        difference, units = "change", "rows"
        paired = replace(paired, before=-paired.before, after=-paired.after, low=-paired.high, high=-paired.low)
    figures = f"held-out {_word(c)} {paired.means}, {difference} {paired}, paired over {paired.prompts} {units}"
    if (by_seeds := g.over_seeds) is not None:
        pairing = "paired by seed" if g.by_seed else "by Welch"
        by_seeds = _as_read(c, by_seeds)
        figures += f"; over seeds ({seeds}, {pairing}) {interval(by_seeds.mean, by_seeds.low, by_seeds.high, '+')}"
    elif min(g.seeds) > 1:
        figures += f". Its {seeds} agree to the last prompt, so they do not tell how much another seed would differ"
    else:
        figures += (
            ". This holds for these runs; another seed may differ by more: run each with seed=1 and seed=2 and compare"
            " all"
        )
    margin = f"{SAME_LOSS} nats" if c.what == "loss" else "0.05 of the scale"
    claim = {
        "better": f"{other} is better than {first}",
        "worse": f"{other} is worse than {first}",
        "the same": f"{other} and {first} are the same, as far as {margin} matters",
        "cannot be told": f"it cannot be told which of {first} and {other} is better",
    }[g.word]
    return f"{claim[0].upper()}{claim[1:]}: {figures}."
