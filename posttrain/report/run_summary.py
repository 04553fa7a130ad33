"""The report of a run: held-out scores after each stage, the curve, whether it learned, where time and memory went, and
what to do next. `show_report` prints one evaluation.

The report of a run is printed at its end and by `posttrain summary`, and written as `summary.md` with `summary.svg`
into the run folder. All of it is read from the folder (`diagnose.run_outcome`), so it is the same for a run that was
killed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.build.weight_lineage import write_lineage
from posttrain.config.run import Run
from posttrain.core.gauge import Gauge, merge
from posttrain.core.measure.heldout_loss import perplexity
from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.number_text import number_text
from posttrain.diagnose.gauges.rollout_gauges import unjudged_words
from posttrain.diagnose.learning_verdict import Learning, learned
from posttrain.diagnose.next_steps import next_steps
from posttrain.diagnose.rules.notes_once import findings_of
from posttrain.diagnose.run_outcome import RunOutcome, StageOutcome, read_outcome
from posttrain.faults.planting import REGISTERED
from posttrain.record import run_reader
from posttrain.report.console import Group, PlainConsole, table
from posttrain.report.text_curve import curve_lines, picture
from posttrain.system import files
from posttrain.system.errors import ConfigError, PosttrainError
from posttrain.system.terminal_output import visible

if TYPE_CHECKING:
    from posttrain.role.heldout_evaluation import EvaluationReport

WIDTH = 80
"""Columns of the report. Only a path or a command may be wider."""
SUMMARY, PICTURE = "summary.md", "summary.svg"
"""Files of a run folder."""
HEADER = ("stage", "at step", "{} [95 %]", "gain [95 %]", "greedy", "seconds")


def score_rows(of: RunOutcome, what: str, word: str) -> list[list[str]]:
    """The rows of the table of a held-out score, one for each stage. The first row names the columns.

    A row has the step of the stage's last evaluation, the score, and the gain since the weights it started from.

    Args:
        what: "accuracy" or "reward".
        word: the name of the score in the head of its column.
    """
    rows = [[name.format(word) for name in HEADER]]
    for s in of.stages:
        gain: Gain | None = getattr(s, what)
        score: Score | None = getattr(s.end, what) if s.end is not None else None
        if what == "accuracy" and s.tells is None:
            gain = score = None
        at = "-" if s.end is None else f"{s.end.step}" + (f" of {s.steps}" if s.end.step != s.steps else "")
        rows.append(
            [
                s.name if s.stage.hands_on else f"{s.name} *",
                at,
                "-" if score is None else short(score.mean, score.low, score.high),
                "-" if gain is None else short(gain.mean, gain.low, gain.high, "+"),
                "-" if s.greedy is None or what != "accuracy" else f"{s.greedy:.3f}",
                "-" if s.seconds is None else f"{s.seconds:.1f}",
            ]
        )
    # The column of greedy answers is left out where no stage has such a figure.
    i = HEADER.index("greedy")
    return [row[:i] + row[i + 1 :] for row in rows] if all(row[i] == "-" for row in rows[1:]) else rows


def short(mean: float, low: float, high: float, sign: str = "") -> str:
    """A mean with its interval, in few columns.

    >>> short(0.6931, 0.611, 0.76), short(0.36, 0.273, 0.433, "+"), short(0.5, -math.inf, math.inf)
    ('0.693 [.61, .76]', '+0.360 [+.27, +.43]', '0.500 [one prompt]')
    """
    if math.isnan(mean):
        return "-"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{number_text(mean, f'{sign}.3f')} [one prompt]"
    # Half the interval is the smallest difference that matters (`number_text`). The ends save a column: 0.61 is .61.
    half = (high - low) / 2
    ends = (number_text(x, f"{sign}.2f", half) for x in (low, high))
    ends = (x.replace("0.", ".", 1) if x.lstrip("+-").startswith("0.") else x for x in ends)
    return f"{number_text(mean, f'{sign}.3f', half)} [{', '.join(ends)}]"


def measures(of: RunOutcome) -> tuple[str, ...]:
    """Returns the measures of held-out tasks, "accuracy" and "reward", the more important one first.

    It is the accuracy alone where rewards are pass or fail. Where they are grades it is the mean reward, then the
    accuracy if it says something. Empty for a run that answers no tasks, such as one that trains a reward model.
    """
    if all(s.end is None for s in of.stages):
        return ()
    accuracy = ("accuracy",) if any(s.tells is not None for s in of.stages if s.end is not None) else ()
    return ("reward", *accuracy) if any(s.graded for s in of.stages) else ("accuracy",)


def tables(of: RunOutcome) -> list[Group]:
    """A table for each of `measures`: the score after each stage."""
    out: list[Group] = []
    for what in measures(of):
        score = "accuracy" if what == "accuracy" else "mean reward"
        title = f"held-out {score} after each stage, and the gain over the same prompts"
        heads, *rows = score_rows(of, what, what)
        out.append(table(title, heads, rows, words=("stage",)))
    return out


def footnote(of: RunOutcome) -> str:
    """Returns a note about the stages whose weights the run did not go on with; '' where there is none.

    It says what each of them is to be compared with.
    """
    compared = [_compared(s, of.stages) for s in of.stages if not s.stage.hands_on]
    return "* " + "; ".join(compared) if compared else ""


def _compared(s: StageOutcome, stages: Sequence[StageOutcome]) -> str:
    """What a stage whose weights were not used further is to be compared with, in words."""
    timed = next((x for x in stages if x.name == s.stage.time_of), None)
    if timed is not None and timed.began == s.began:
        return f"instead of {timed.name}, from the same weights, for the same time"
    time = f", for the time of {s.stage.time_of}" if s.stage.time_of is not None else ""
    return f"from the weights of {s.began}{time}, handed to nobody"


def agreement_lines(of: RunOutcome) -> list[str]:
    """A line for each stage that learns from judgements: how many held-out pairs it orders as they were judged."""
    out: list[str] = []
    for s in of.stages:
        if s.agreement is not None:
            was = "" if s.agreement_before is None else f", {s.agreement_before:.3f} before"
            out.append(f"{s.name}: orders {s.agreement} of held-out pairs as judged{was}")
    return out


def loss_lines(of: RunOutcome) -> list[str]:
    """A line for each stage that imitates: the loss and perplexity of held-out demonstrations."""
    out: list[str] = []
    for s in of.stages:
        if (g := s.loss) is not None:
            pair = f"{perplexity(g.before):.4g} -> {perplexity(g.after):.4g}"
            out.append(
                f"{s.name}: held-out loss {g.means}, perplexity {pair}, change {g}, over {g.prompts} demonstrations"
            )
    return out


def proxy_lines(of: RunOutcome) -> list[str]:
    """A line for each stage whose reward pays for something else than what is measured."""
    return [
        f"{s.name}: its reward pays {s.proxy.means} for held-out answers, gain {s.proxy};"
        " the tables have what is measured"
        for s in of.stages
        if s.proxy is not None
    ]


def unjudged(of: RunOutcome) -> list[str]:
    """Lines about samples without a verdict, by stage: a source failed to judge them, or all sources abstained."""
    lines: list[str] = []
    steps = run_reader.steps(of.folder)
    for r in of.stages:
        gauges = merge(*(s.gauges for s in steps if s.stage == r.name))
        failed, abstained = (gauges.get(f"rollout/{x}", Gauge(0, 0)) for x in ("failed", "abstained"))
        kinds = ", ".join(
            f"{n.removeprefix('failed/')} x {g.sum:.0f}" for n, g in gauges.items() if n.startswith("failed/")
        )
        if failed.sum:
            lines.append(
                f"{r.name}: a source failed to judge {failed.sum:.0f} of {failed.count:.0f} samples ({kinds}): left"
                " out, as no wrong answers"
            )
        if abstained.sum:
            lines.append(
                f"{r.name}: every source abstained from {abstained.sum:.0f} of {abstained.count:.0f} samples: left out"
            )
    return lines


def role_lines(of: RunOutcome) -> list[str]:
    """Seconds by role, a line a stage, the slowest role first."""
    return _by_role("seconds by role", {s.name: s.roles for s in of.stages}, lambda x: f"{x:.1f}" if x >= 0.05 else "")


def memory_lines(of: RunOutcome) -> list[str]:
    """Peak memory by role, a line a stage, the largest first."""
    machine: Any = of.file.facts.get("machine")
    what = machine.get("memory") if isinstance(machine, dict) else None
    title = f"peak MiB by role ({what or 'resident'})"
    # The peak of a role contains those of its parts (ROLE/PART), so these are left out.
    whole = {s.name: {role: x for role, x in s.peaks.items() if "/" not in role} for s in of.stages}
    return _by_role(title, whole, lambda x: f"{x / 2**20:,.0f}")


def _by_role(title: str, stages: Mapping[str, Mapping[str, float]], as_text: Callable[[float], str]) -> list[str]:
    """A line for each stage with a number for each role, the largest first.

    Args:
        stages: the numbers by role, by stage.
        as_text: a number as text; '' leaves it out.
    """
    known = {stage: roles for stage, roles in stages.items() if roles}
    width = max((len(stage) for stage in known), default=0)
    out = [title] if known else []
    for stage, roles in known.items():
        rows = [(name, as_text(x)) for name, x in sorted(roles.items(), key=lambda row: -row[1])]
        text = ", ".join(f"{name} {word}" for name, word in rows if word)
        out += textwrap.wrap(text, WIDTH, initial_indent=f"  {stage:<{width}}  ", subsequent_indent=" " * (width + 4))
    return out


def finding_lines(of: RunOutcome) -> list[str]:
    """Returns the findings of the live rules with the steps at which they held (docs/help/diagnosis.md).

    Each rule is there once for each stage.
    """
    findings = [n.line for n in findings_of(run_reader.steps(of.folder))]
    out = ["what the rules saw"] if findings else []
    for line in findings:
        out += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return out


def planted_lines(run: Run) -> list[str]:
    """The warning of a run with a planted fault, printed at its beginning and at its end."""
    if run.fault is None:
        return []
    known = REGISTERED.get(run.fault)  # None: one of the tests, or of an earlier version
    about = f": {known.what}" if known else ""
    return [f"PLANTED FAULT {run.fault}{about}. No number of this run means anything"]


def answer_lines(of: RunOutcome, said: Learning) -> list[str]:
    """The answer to "did it learn?", and what to try. A command stays on one line, so that it can be copied."""
    last, state = of.last, ""
    # The sentence may have said it already.
    if last is not None and not of.finished and f"it took {last.steps} of" not in said.text:
        state = f" (not finished: {last.name} took {last.steps} of {last.stage.steps} steps)"
    out = textwrap.wrap(f"Did it learn? {said.text}{state}.", WIDTH, break_on_hyphens=False)
    for advice in said.advice:
        if "  # " in advice:
            out.append(f"  {advice}")
        else:
            out += textwrap.wrap(
                advice, WIDTH, initial_indent="  try: ", subsequent_indent="    ", break_on_hyphens=False
            )
    return out


def show(console: PlainConsole, of: RunOutcome) -> None:
    """Print the report of a run."""
    for line in planted_lines(of.run):
        console.print(line, style="bold red")
    for scores in tables(of):
        console.print(scores)
    console.print()
    for line in (
        *filter(None, [footnote(of)]),
        *agreement_lines(of),
        *(part for x in loss_lines(of) for part in textwrap.wrap(x, WIDTH, subsequent_indent="  ")),
        *proxy_lines(of),
        *unjudged(of),
    ):
        console.print(line)
    curve = of.drawn
    if curve is not None and (lines := picture(curve_lines(curve))):
        by = f" ({curve.stage.algorithm_name})" if curve.stage.algorithm_name else ""
        console.print()
        console.print(f"{curve.name}, {curve.steps} steps{by}")
        for line in lines:
            console.print(line)
    console.print()
    learning = learned(of)
    for line in (*finding_lines(of), *answer_lines(of, learning), "", *role_lines(of), *memory_lines(of)):
        console.print(line)
    console.print(f"run folder: {of.folder}")
    console.print("next:")
    for line in next_steps(of.run, of.folder, of.finished, learning.word == "got worse"):
        console.print(f"  {line}")


# --- summary.md ------------------------------------------------------------------------------------------------------


def markdown(of: RunOutcome, drawn_in: str = "") -> str:
    """The report as a page. `drawn_in` is the file of its picture, '' where there is none."""
    learning = learned(of)
    lines = [f"# {_plain(of.run.recipe)}: {learning.word}", "", f"Did it learn? {_plain(learning.text)}.", ""]
    lines += [f"**{_plain(line)}**\n" for line in planted_lines(of.run)]
    if not of.finished:
        done = ", ".join(f"{s.name} {s.steps} of {s.stage.steps} steps" for s in of.stages) or "no step was taken"
        lines += [f"The run is not finished: {_plain(done)}. `posttrain run --resume RUN` goes on with it.", ""]
    if drawn_in:
        lines += [f"![reward and held-out score by step]({drawn_in})", ""]
    for what in measures(of):
        heads, *rows = score_rows(of, what, what if what == "accuracy" else "mean reward")
        lines += [_row(heads), "|---|" + "---:|" * (len(heads) - 1), *(_row([*map(_plain, row)]) for row in rows), ""]
    lines += [
        _plain(line) + "\n"
        for line in (footnote(of), *agreement_lines(of), *loss_lines(of), *proxy_lines(of), *unjudged(of))
        if line
    ]
    if findings := findings_of(run_reader.steps(of.folder)):
        lines += ["## What the rules saw", "", *(f"- {_plain(n.line)}" for n in findings), ""]
    if learning.advice:
        lines += ["## What to try", "", *(f"- {_plain(line)}" for line in learning.advice), ""]
    lines += ["## What was run", "", *(f"- {_plain(line)}" for line in _about(of.run)), ""]
    lines += [
        "Each gain compares the same held-out prompts before and after. Its interval is about prompts like these; how"
        " much another seed would differ is told by `posttrain compare` of several runs.",
        "",
    ]
    return "\n".join(lines)


def _about(run: Run) -> list[str]:
    """Lines about the run's main settings."""
    model = run.model.path or f"{run.model.arch} built with {run.model.layers} layers of width {run.model.hidden}"
    out = [f"model: {model}", f"environment: {run.env.name}, {run.env.heldout} prompts held out", f"seed: {run.seed}"]
    for s in run.stages:
        what = f"{s.algorithm_name}, " if s.algorithm_name else ""
        what += "" if s.optimizer.kind == "adamw" else f"{s.optimizer.kind}, "
        out.append(f"{s.name}: {type(s).__name__.lower()}, {what}{s.steps} steps, learning rate {s.optimizer.lr:g}")
    return out


def _row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Somebody else's text, escaped so that nothing in it is read as Markdown or HTML."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!$" else c for c in visible(text))


def write_summary(of: RunOutcome) -> list[str]:
    """Write summary.md and its picture into the run folder. Returns what could not be written, as lines."""
    from posttrain.report.plots import NO_MATPLOTLIB, summary_picture

    notes: list[str] = []
    try:
        data = summary_picture(of)
        if data is not None:
            files.write_file(of.folder / PICTURE, data, durable=False)
    except ImportError:
        data = None
        notes.append(f"{SUMMARY} has no picture: {NO_MATPLOTLIB}")
    except ConfigError as error:
        data = None
        notes.append(f"{SUMMARY} has no picture: {error}")
    files.write_file(of.folder / SUMMARY, markdown(of, PICTURE if data is not None else "").encode(), durable=False)
    return notes


def summarize(folder: str | Path, as_markdown: bool = False) -> None:
    """Print the report of a run folder, finished or not, as `posttrain summary` does. Nothing is written."""
    of = read_outcome(folder)
    console = PlainConsole(soft_wrap=True)
    if as_markdown:
        console.print(markdown(of))
    elif not of.stages:
        console.print(f"{folder}: no step was taken yet, and nothing was measured")
    else:
        show(console, of)


def conclude(folder: Path, console: PlainConsole | None) -> None:
    """Write the lineage record and the summary at the end of a run, also of one that was cut.

    The summary is printed where there is a console. If it cannot be made, a note says so: the error must not hide how
    the run ended.
    """
    # Each of the two is tried on its own: if one fails, the other is written all the same.
    try:
        write_lineage(folder)
    except (PosttrainError, OSError) as error:
        if console is not None:
            console.print(f"note: no lineage record was written: {error}")
    try:
        of = read_outcome(folder)
        if console is not None:
            show(console, of)
        if of.stages:
            for note in write_summary(of):
                if console is not None:
                    console.print(f"note: {note}")
    except (PosttrainError, OSError) as error:
        if console is not None:
            console.print(f"note: no summary was written: {error}")


def show_report(console: PlainConsole, target: str, environment: str, report: EvaluationReport) -> None:
    """Print one evaluation as a table."""
    rows = [("accuracy (sampled)", report.accuracy), ("accuracy (greedy)", report.greedy)]
    if report.graded:
        accuracy = rows if report.accuracy.prompts else []
        rows = [("mean reward (sampled)", report.reward), ("mean reward (greedy)", report.greedy_reward), *accuracy]
    rows.append(("what is paid (sampled)", report.proxy))
    rows += [(f"pass@{k}", s) for k, s in report.pass_at.items()]
    cells = [(measure, str(score), str(score.prompts)) for measure, score in rows if score is not None]
    heads = ("measure", "value [95 %]", "prompts")
    console.print(table(f"{target} on held-out {environment}", heads, cells, words=("measure",)))
    if report.graded:
        what = "what was paid" if report.proxy is None else "what is measured and not paid"
        at, legend = report.grades.right.at, f"mean reward: {what}"
        if report.accuracy.prompts and at is not None:
            legend = f"accuracy: the share of answers with a reward of {at:g} or more (pass@1); {legend}"
        console.print(legend)
    console.print(
        f"{report.mean_tokens:.1f} tokens a response, {report.truncated:.1%} cut off, {report.unjudged} unjudged"
    )
    if words := unjudged_words(report.groups):
        console.print(f"unjudged samples are left out, as no wrong answers. {words}")
