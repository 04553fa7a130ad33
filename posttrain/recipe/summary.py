"""The table a run ends with: what each stage added, where the time went, what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from posttrain.controller.stages import StageResult
from posttrain.core.run import Reinforce, Run
from posttrain.recipe.console import PlainConsole
from posttrain.recipe.faults import find
from posttrain.recipe.shipped import RECIPES
from posttrain.role.evaluate import Report, interval


def table(results: Sequence[StageResult]) -> Table:
    """Held-out accuracy after each stage with its interval, what the stage added, and its seconds."""
    out = Table(title="held-out accuracy after each stage")
    for name in ("stage", "accuracy [95 %]", "added", "greedy", "steps", "seconds"):
        out.add_column(name, justify="left" if name == "stage" else "right")
    for r in results:
        accuracy = "-" if r.accuracy is None else interval(*r.accuracy)
        added = "-" if r.accuracy is None or r.before is None else f"{r.accuracy[0] - r.before:+.3f}"
        name = r.name if r.beside is None else f"{r.name} *"
        out.add_row(name, accuracy, added, "-" if r.greedy is None else f"{r.greedy:.3f}", str(r.steps), f"{r.seconds:.1f}")
    if beside := [r for r in results if r.beside is not None]:
        out.caption = "* " + "; ".join(f"instead of {r.beside}, from the same weights, for the same time" for r in beside)
    return out


def roles(results: Sequence[StageResult]) -> Table:
    """Seconds per role, over all stages."""
    names = list(dict.fromkeys(n for r in results for n in r.roles))
    out = Table(title="seconds per role")
    out.add_column("stage")
    for name in names:
        out.add_column(name, justify="right")
    for r in results:
        out.add_row(r.name, *(f"{r.roles[n]:.1f}" if n in r.roles else "-" for n in names))
    return out


def next_steps(run: Run, folder: Path) -> list[str]:
    """Commands worth trying now."""
    out = [
        (f"posttrain show {folder}", "read what it said, token by token"),
        (f"posttrain eval {folder} --samples 16", "accuracy and pass@k on more samples"),
        (f"posttrain export {folder} my-model", "a plain Hugging Face directory"),
    ]
    used = [s.algorithm.name for s in run.stages if isinstance(s, Reinforce)]
    if len(used) == 1 and run.recipe in RECIPES:
        other = "grpo" if not used[0].startswith("grpo") else "dapo"
        out.append((f"posttrain run {run.recipe} algorithm={other}", "another algorithm; posttrain ladder lists them"))
    width = max(len(command) for command, _ in out)
    return [f"{command:<{width}}  # {why}" for command, why in out]


def planted_lines(run: Run) -> list[str]:
    """Said at the beginning and at the end of a run with a bug in it, so that nobody takes its numbers for real."""
    if run.fault is None:
        return []
    return [f"PLANTED FAULT {run.fault}: {find(run.fault).what}. No number of this run means anything"]


def show(console: PlainConsole, run: Run, results: Sequence[StageResult], folder: Path) -> None:
    console.print()
    for line in planted_lines(run):
        console.print(line, style="bold red")
    console.print(table(results))
    console.print(roles(results))
    console.print(f"run folder: {folder}")
    console.print("next:")
    for line in next_steps(run, folder):
        console.print(f"  {line}")


def show_report(console: PlainConsole, target: str, environment: str, report: Report) -> None:
    """One evaluation as a table."""
    out = Table(title=f"{target} on held-out {environment}")
    for name in ("measure", "value [95 %]", "prompts"):
        out.add_column(name, justify="left" if name == "measure" else "right")
    out.add_row("accuracy (sampled)", str(report.accuracy), str(report.accuracy.prompts))
    if report.greedy is not None:
        out.add_row("accuracy (greedy)", str(report.greedy), str(report.greedy.prompts))
    for k, score in report.pass_at.items():
        out.add_row(f"pass@{k}", str(score), str(score.prompts))
    console.print(out)
    console.print(f"{report.mean_tokens:.1f} tokens a response, {report.truncated:.1%} cut off, {report.unjudged} unjudged")
