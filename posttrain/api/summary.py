"""The summary printed at the end of a run: what each stage added, and seconds per role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from posttrain.api.console import PlainConsole
from posttrain.api.next_steps import next_steps
from posttrain.controller.stages import StageResult
from posttrain.core import reader
from posttrain.core.gauge import Gauge, merge
from posttrain.core.run import Run
from posttrain.diagnose.gauges import unjudged_words
from posttrain.faults import find
from posttrain.role.evaluate import EvaluationReport, interval


def table(results: Sequence[StageResult]) -> Table:
    """Held-out accuracy (share of right answers) after each stage with its interval, the change, and the seconds.

    Where a reward gives partial credit, its mean is shown too.
    """
    graded = any(r.graded for r in results)
    out = Table(title="held-out accuracy after each stage" + (", and mean reward" if graded else ""))
    for name in (
        "stage",
        "accuracy [95 %]",
        "added",
        "greedy",
        *(("mean reward [95 %]", "added ") if graded else ()),
        "steps",
        "seconds",
    ):
        out.add_column(name, justify="left" if name == "stage" else "right")
    for r in results:
        name = r.name if r.hands_on else f"{r.name} *"
        accuracy, reward = _added(r.accuracy, r.before), _added(r.reward, r.reward_before) if graded else ()
        out.add_row(
            name, *accuracy, "-" if r.greedy is None else f"{r.greedy:.3f}", *reward, str(r.steps), f"{r.seconds:.1f}"
        )
    if compared := [r for r in results if not r.hands_on]:
        out.caption = "* " + "; ".join(_compared(r, results) for r in compared)
    return out


def _compared(r: StageResult, results: Sequence[StageResult]) -> str:
    """What to compare a stage with whose weights the run did not continue from."""
    timed = next((x for x in results if x.name == r.time_of), None)
    if timed is not None and timed.start == r.start:
        return f"instead of {timed.name}, from the same weights, for the same time"
    time = f", for the time of {r.time_of}" if r.time_of is not None else ""
    return f"from the weights of {r.start}{time}, handed to nobody"


def _added(measured: tuple[float, float, float] | None, before: float | None) -> tuple[str, str]:
    """(mean with its interval, change since before the stage) as text."""
    if measured is None:
        return "-", "-"
    return interval(*measured), "-" if before is None else f"{measured[0] - before:+.3f}"


def unjudged(folder: Path, results: Sequence[StageResult]) -> list[str]:
    """Lines about samples without a verdict, by stage: those a source failed to judge, and those all sources abstained
    from."""
    out: list[str] = []
    steps = reader.steps(folder)
    for r in results:
        seen = merge(*(s.gauges for s in steps if s.stage == r.name))
        failed, abstained = (seen.get(f"rollout/{x}", Gauge(0, 0)) for x in ("failed", "abstained"))
        kinds = ", ".join(
            f"{n.removeprefix('failed/')} x {g.sum:.0f}" for n, g in seen.items() if n.startswith("failed/")
        )
        if failed.sum:
            out.append(
                f"{r.name}: a source failed to judge {failed.sum:.0f} of {failed.count:.0f} samples ({kinds}): left"
                " out, as no wrong answers"
            )
        if abstained.sum:
            out.append(
                f"{r.name}: every source abstained from {abstained.sum:.0f} of {abstained.count:.0f} samples: left out"
            )
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


def planted_lines(run: Run) -> list[str]:
    """The warning of a run with a planted fault, printed at its beginning and at its end."""
    if run.fault is None:
        return []
    return [f"PLANTED FAULT {run.fault}: {find(run.fault).what}. No number of this run means anything"]


def show(console: PlainConsole, run: Run, results: Sequence[StageResult], folder: Path) -> None:
    """Print the whole summary of a run."""
    console.print()
    for line in planted_lines(run):
        console.print(line, style="bold red")
    console.print(table(results))
    console.print(roles(results))
    for line in unjudged(folder, results):
        console.print(line)
    console.print(f"run folder: {folder}")
    console.print("next:")
    for line in next_steps(run, folder):
        console.print(f"  {line}")


def show_report(console: PlainConsole, target: str, environment: str, report: EvaluationReport) -> None:
    """One evaluation as a table."""
    out = Table(title=f"{target} on held-out {environment}")
    for name in ("measure", "value [95 %]", "prompts"):
        out.add_column(name, justify="left" if name == "measure" else "right")
    rows = [("accuracy (sampled)", report.accuracy), ("accuracy (greedy)", report.greedy)]
    if report.graded:
        rows += [("mean reward (sampled)", report.reward), ("mean reward (greedy)", report.greedy_reward)]
    for measure, score in (*rows, *((f"pass@{k}", s) for k, s in report.pass_at.items())):
        if score is not None:
            out.add_row(measure, str(score), str(score.prompts))
    if report.graded:
        out.caption = "accuracy: the share of answers with a reward of 1 or more (pass@1); mean reward: what was paid"
    console.print(out)
    console.print(
        f"{report.mean_tokens:.1f} tokens a response, {report.truncated:.1%} cut off, {report.unjudged} unjudged"
    )
    if words := unjudged_words(report.groups):
        console.print(f"unjudged samples are left out, as no wrong answers. {words}")
