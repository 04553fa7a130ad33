"""Progress of a run: one live line in a terminal or a notebook, plain lines elsewhere.

A run whose roles are in several processes has a table of its roles below the live line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from posttrain.config.run import Run
from posttrain.core.gauge import Step
from posttrain.core.measure.heldout_loss import agreement_words, loss_words
from posttrain.core.measure.number_text import number_text
from posttrain.diagnose.rules.notes_once import RULE, SaidOnce
from posttrain.diagnose.run_outcome import LOSSES
from posttrain.report.console import PlainConsole
from posttrain.report.live.notebook import NotebookLine, in_kernel
from posttrain.report.live.role_table import RoleWatch, drawn
from posttrain.system.shell import wrapped

TOKENS = ("engine/tokens", "sft/tokens", "preference/tokens", "ranking/tokens")
"""Gauges that count the tokens of a step."""
PLAIN_EVERY = 5.0
"""Seconds between two plain lines of the same stage."""
LINES_A_SECOND, TABLES_A_SECOND = 10, 4
"""How often the live line is drawn anew, alone and with the table of roles."""


class RoleProgress(Progress):
    """The live line, with the table of roles below it, where there is one. A thread of its own draws both, so the table
    goes on while the learner computes."""

    def __init__(self, columns: tuple[ProgressColumn, ...], console: PlainConsole, roles: RoleWatch | None) -> None:
        self._roles = roles
        redraws = LINES_A_SECOND if roles is None else TABLES_A_SECOND
        super().__init__(*columns, console=console, transient=True, refresh_per_second=redraws)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self._roles is not None:
            yield drawn(self._roles.rows())


@dataclass
class Terminal:
    """A tracker that prints (`core.ports.Tracker`)."""

    run: Run
    console: PlainConsole = field(default_factory=lambda: PlainConsole(file=sys.stdout, soft_wrap=True))
    notebook: bool = field(default_factory=in_kernel)
    """Whether it prints into a notebook's cell."""
    roles: RoleWatch | None = None
    """Present activity of each role, where engines are in other processes; else None."""
    _bar: Progress | None = None
    """The live line of a terminal, while it is open."""
    _line: NotebookLine | None = None
    _task: TaskID | None = None
    _stage: str = ""
    """Stage of the last step; '' opens the line anew at the next step."""
    _begun: float = 0.0
    """Time at which the first step of the open line had ended."""
    _first: int = 0
    """Number of that step."""
    _printed: float = 0.0
    """Time of the last plain line."""
    _tokens: float = 0.0
    """Tokens of the steps since `_begun`."""
    _measured: str = ""
    """Words of the last held-out measurement."""
    _measured_at: int = 0
    """Its step."""
    _once: SaidOnce = field(default_factory=SaidOnce)

    def log(self, step: Step) -> None:
        """Show a step, and print those of its notes that are new."""
        if step.stage != self._stage:
            # The first step only starts the clock: its tokens were made before.
            self._open(step)
        else:
            self._tokens += sum(step.gauges[n].sum for n in TOKENS if n in step.gauges)
        total = self.run.stage(step.stage).steps
        if "eval/reward" in step.gauges and (rewards := step.gauges["eval/reward"]).count:
            accuracy = step.gauges["eval/accuracy"]
            figures = [f"accuracy {accuracy.mean:.3f}"] if accuracy.count else []
            # Where rewards are 0 and 1 both are the same number.
            if not figures or abs(accuracy.mean - rewards.mean) > 1e-9:
                figures = [f"mean reward {number_text(rewards.mean, '.4g')}", *figures]
            self._measured, self._measured_at = f"held-out {', '.join(figures)}", step.index
        for name, words in (("heldout/loss", loss_words), ("heldout/agreement", agreement_words)):
            if name in step.gauges:
                # Measurements of the same step stand together. An earlier one is replaced.
                same_step = f"{self._measured}, " if self._measured and self._measured_at == step.index else ""
                self._measured, self._measured_at = same_step + words(step.gauges[name].mean), step.index
        known_total = None if self._open_ended(step) else total
        count = _count(step.index, known_total)
        if self._line is not None:
            self._line.update(step.stage, step.index, known_total, f"{self._facts(step)}{self._left(step, total)}")
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step.index, total=known_total, count=count, facts=self._facts(step))
        # In a log a line is printed for the last step, for a measured one, and otherwise every few seconds.
        elif (
            step.index == total
            or {"eval/reward", "heldout/loss", "heldout/agreement"} & step.gauges.keys()
            or time.monotonic() - self._printed > PLAIN_EVERY
        ):
            self._printed = time.monotonic()
            self.console.print(f"{step.stage} {count}  {self._facts(step)}{self._left(step, total)}")
        for note in self._once.new(step):
            self.say(f"  {noted(step, note)}")
        if self.roles is not None and self._draws and self._bar is None and step.index < total:
            # Printing a note has closed the table, and the next step may take long: so it is drawn again. The stage is
            # set again too, else the next step would open it anew (`_close`).
            self._stage = step.stage
            self._draw(step)

    def say(self, line: str) -> None:
        """Print a line, wrapped in a terminal. In a log it stays whole, so that it can be searched."""
        # The bar is closed before a line is printed, or the two would write into each other.
        self._close()
        for part in wrapped(line, self.console.width) if self.console.is_terminal else (line,):
            self.console.print(part)

    def close(self, summary: Mapping[str, float]) -> None:
        self._close()
        self._line = None
        for count in self._once.take_counts():
            self.say(f"note: {count}")

    def _open(self, step: Step) -> None:
        """Begin a stage: its clock, and its live line where there is one."""
        self._close()
        now = time.monotonic()
        self._stage, self._begun, self._first = step.stage, now, step.index
        self._printed, self._tokens, self._measured = 0.0, 0.0, ""
        if self.notebook:
            self._line = NotebookLine()
        elif self._draws:
            self._draw(step)

    @property
    def _draws(self) -> bool:
        """True where a live line is drawn."""
        return self.console.is_terminal and not self.notebook

    def _draw(self, step: Step) -> None:
        """Open the live line of a terminal."""
        name, done, facts = (_plain(w) for w in ("{task.description}", "{task.fields[count]}", "{task.fields[facts]}"))
        columns = (name, BarColumn(bar_width=24), done, facts, TimeRemainingColumn())
        self._bar = RoleProgress(columns, self.console, self.roles)
        total = None if self._open_ended(step) else self.run.stage(step.stage).steps
        count = _count(step.index, total)
        self._task = self._bar.add_task(step.stage, facts="", count=count, total=total, completed=step.index)
        self._bar.start()

    def _close(self) -> None:
        """End the live line, so that other lines can be printed."""
        if self._line is not None:
            self._line.flush()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            # The next step counts as the first of its stage, so that the bar is drawn again.
            self._stage = ""

    def _open_ended(self, step: Step) -> bool:
        """True where the number of steps is unknown, because the stage runs for the time that another one took."""
        return self.run.stage(step.stage).time_of is not None

    def _facts(self, step: Step) -> str:
        """The figures of a step, for its line."""
        g = step.gauges
        words: list[str] = []
        if "rollout/reward" in g and g["rollout/reward"].count:
            words.append(f"reward {number_text(g['rollout/reward'].mean)}")
        words += [f"loss {g[n].mean:.3f}" for n in LOSSES if n in g]
        if "preference/accuracy" in g:
            words.append(f"ordered as judged {g['preference/accuracy'].mean:.1%}")
        unjudged = {what: g.get(f"rollout/{what}") for what in ("failed", "abstained")}
        words += [f"{what} {x.mean:.1%}" for what, x in unjudged.items() if x is not None and x.sum]
        if self._measured:
            words.append(self._measured + (f" (step {self._measured_at})" if self._measured_at != step.index else ""))
        spent = time.monotonic() - self._begun
        if step.index > self._first and spent > 0 and self._tokens:
            words.append(f"{self._tokens / spent:,.0f} tokens/s")
        # With a live line the table below it shows the roles.
        if self.roles is not None and self._bar is None:
            words.append(self.roles.line())
        return "  ".join(words)

    def _left(self, step: Step, total: int) -> str:
        """Words with the seconds that the stage still takes at this speed; '' where that is not known."""
        done = step.index - self._first
        if not done or step.index >= total or self._open_ended(step):
            return ""
        return f"  {(time.monotonic() - self._begun) / done * (total - step.index):.0f} s left"


def _count(done: int, total: int | None) -> str:
    """The steps done, of all where that is known: "3/20"."""
    return f"{done}" if total is None else f"{done}/{total}"


def noted(step: Step, note: str) -> str:
    """A note of a step as it is printed. A rule's name stands before its message (docs/help/diagnosis.md)."""
    if not note.startswith(RULE):
        return f"note: step {step.index}: {note}"
    name, _, message = note.removeprefix(RULE).partition(": ")
    return f"note: step {step.index}, {name}: {message}"


def _plain(form: str) -> TextColumn:
    """A column that shows its text without interpreting markup."""
    return TextColumn(form, markup=False)
