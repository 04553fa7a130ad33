"""Runs compared, as people read it: a table of runs, of the settings that differ, and a sentence for each group."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from posttrain.api.console import PlainConsole
from posttrain.api.summary import WIDTH, bare_table, short
from posttrain.core.interval import Score
from posttrain.diagnose.compared import SAME_LOSS, ComparedRun, GroupGain, RunComparison, RunGroup, compare_runs

LONGEST = 24
"""Most characters of a setting's value in the table."""


def compare(*folders: str | Path, stage: str | None = None, quiet: bool = False) -> RunComparison:
    """Compare runs by held-out score, paired by prompt, the first run's settings against each of the others.

    Runs that differ in nothing but their seed make one group.

    Args:
        folders: two run folders or more.
        stage: compare at the end of this stage; default the last one of each run.
        quiet: print nothing.
    """
    found = compare_runs(folders, stage)
    if not quiet:
        show_comparison(PlainConsole(soft_wrap=True), found)
    return found


def show_comparison(console: PlainConsole, c: RunComparison) -> None:
    """Print a comparison."""
    console.print(_runs(c))
    if len(c.groups) > 1:
        console.print(_settings(c.groups))
    console.print()
    for note in c.notes:
        for line in textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ", break_long_words=False):
            console.print(line)
    for line in sentences(c):
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False):
            console.print(part)


def _runs(c: RunComparison) -> Table:
    what = _word(c)
    table = bare_table(f"held-out {what} of each run")
    for name in ("", "run", "seed", "stage", "at step", f"{what} [95 %]"):
        left = name in ("", "run", "stage")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name != "run")
    for group in c.groups:
        for run in group.runs:
            score = _score(c, run)
            table.add_row(
                group.letter,
                run.of.folder.name or str(run.of.folder),
                str(run.seed),
                run.stage.name,
                str(run.measured.step),
                short(score.mean, score.low, score.high),
            )
    return table


def _settings(groups: Sequence[RunGroup]) -> Table:
    table = bare_table("settings that differ")
    table.add_column("setting", overflow="fold")
    for group in groups:
        table.add_column(group.letter, overflow="fold")
    for name in groups[0].settings:
        table.add_row(name, *(_cut(g.settings[name]) for g in groups))
    return table


def _cut(text: str) -> str:
    """The end of a long value: paths differ there."""
    return text if len(text) <= LONGEST else "..." + text[3 - LONGEST :]


def sentences(c: RunComparison) -> list[str]:
    """What the comparison says, a sentence for each group after the first."""
    if len(c.groups) == 1:
        runs = c.groups[0].runs
        means = [_score(c, r).mean for r in runs]
        if len({r.seed for r in runs}) == 1:
            return [
                f"These runs have the same settings and the same seed, {runs[0].seed}: their held-out {_word(c)} is"
                f" between {min(means):.3f} and {max(means):.3f}. Give runs with other settings, or other seeds, to"
                " compare."
            ]
        return [
            f"These runs differ in nothing but their seed: their held-out {_word(c)} is between {min(means):.3f} and"
            f" {max(means):.3f}, {sum(means) / len(means):.3f} on average. Give runs with other settings to compare"
            " settings."
        ]
    return [_sentence(c, g) for g in c.gains]


def _word(c: RunComparison) -> str:
    return {"accuracy": "accuracy", "reward": "mean reward", "loss": "loss"}[c.what]


def _score(c: RunComparison, run: ComparedRun) -> Score:
    """What a run is compared by, as people read it: a loss is told as it is, and lower is better."""
    score = run.measured.accuracy if c.what == "accuracy" else run.measured.reward
    return Score(-score.mean, -score.high, -score.low, score.prompts) if c.what == "loss" else score


def _sentence(c: RunComparison, g: GroupGain) -> str:
    first, other, over = c.groups[0].letter, g.group.letter, g.over_prompts
    seeds = f"{g.seeds[0]} and {g.seeds[1]} seeds"
    how, each = "gain", "prompts"
    if c.what == "loss":
        how, each = "change", "rows"
        over = replace(over, before=-over.before, after=-over.after, low=-over.high, high=-over.low)
    figures = f"held-out {_word(c)} {over.before:.3f} -> {over.after:.3f}, {how} {over}, paired over"
    figures += f" {over.prompts} {each}"
    if (of := g.over_seeds) is not None:
        how = "paired by seed" if g.by_seed else "by Welch"
        of = Score(-of.mean, -of.high, -of.low, of.prompts) if c.what == "loss" else of
        figures += f"; over seeds ({seeds}, {how}) {of.mean:+.3f} [{of.low:+.3f}, {of.high:+.3f}]"
    elif min(g.seeds) > 1:
        figures += f". Its {seeds} agree to the last prompt, so they do not tell how much another seed would differ"
    else:
        figures += (
            ". This holds for these runs; another seed may differ by more: run each with seed=1 and seed=2 and compare"
            " all"
        )
    same = f"{SAME_LOSS} nats" if c.what == "loss" else "0.05 of the scale"
    said = {
        "better": f"{other} is better than {first}",
        "worse": f"{other} is worse than {first}",
        "the same": f"{other} and {first} are the same, as far as {same} matters",
        "cannot be told": f"it cannot be told which of {first} and {other} is better",
    }[g.word]
    return f"{said[0].upper()}{said[1:]}: {figures}."
