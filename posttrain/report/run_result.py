"""Results of a run, for people who read them in Python: held-out figures, a table of steps, a plot, rollouts."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.run import Run
from posttrain.core.content import conversation
from posttrain.core.measure.interval import interval
from posttrain.core.measure.number_text import number_text
from posttrain.core.verdict import Judged
from posttrain.core.verdict import failed as broken
from posttrain.record import run_reader
from posttrain.record.checkpoint import newest
from posttrain.record.run_reader import EpisodeFile, damage_is_named
from posttrain.record.step_format import Recorded
from posttrain.system.errors import ConfigError, RunFolderError, nearest
from posttrain.system.terminal_output import visible, visible_lines

if TYPE_CHECKING:
    from posttrain.stages import StageResult

WIDTH = 100
"""The most characters of a line in a `repr`."""


@dataclass(frozen=True, repr=False)
class RolloutView:
    """One recorded answer, for reading. `record` has its tokens, log-probs and advantages."""

    stage: str
    step: int
    heldout: bool
    """Whether it is an answer to a held-out task."""
    record: Recorded = field(repr=False)

    @property
    def prompt(self) -> str:
        """The prompt as text; of a conversation its messages, one a line."""
        return conversation(self.record.episode.task.prompt)

    @property
    def said(self) -> str:
        """The text that the policy said."""
        return self.record.episode.text

    @property
    def answer(self) -> Any:
        """The task's right answer, if it has one."""
        return self.record.episode.task.answer

    @property
    def reward(self) -> float | None:
        """The reward; None where the episode could not be judged."""
        return self.record.episode.reward

    @property
    def stop(self) -> str:
        """The reason why the episode ended."""
        return self.record.episode.stop.value

    @property
    def verdicts(self) -> tuple[Judged, ...]:
        """The verdict of each reward source."""
        return self.record.episode.verdicts

    def __repr__(self) -> str:
        reward = "not judged" if self.reward is None else f"reward {self.reward:.3g}"
        answer = _short(self.said, 44)
        wanted = "" if self.answer is None else f", wanted {_short(str(self.answer), 16)!r}"
        return f"<{reward}: {_short(self.prompt, 44)!r} -> {answer!r}{wanted}, {self.stop}>"

    def _repr_html_(self) -> str:
        rows = [
            ("prompt", self.prompt),
            ("said", self.said),
            *([("wanted", str(self.answer))] if self.answer is not None else []),
            ("reward", "not judged" if self.reward is None else f"{self.reward:.3g}"),
            *((f"{j.source} (weight {j.weight:g})", _verdict(j)) for j in self.verdicts),
            ("ended", f"{self.stop}, {self.record.episode.spoken} tokens"),
        ]
        return _table(rows)


def _verdict(j: Judged) -> str:
    """A verdict in one line: its score or else its state, its kind, and its reason."""
    v = j.verdict
    score = v.state.value if v.score is None else f"{v.score:.3g}"
    return "  ".join(x for x in (score, v.kind, v.why) if x)


def _short(text: str, most: int) -> str:
    """The text in one line of at most `most` characters."""
    flat = visible(text.replace("\n", " "))
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and texts as an HTML table. All text is escaped."""
    cells = "".join(
        "<tr><th style='text-align:left;vertical-align:top'>"
        f"{html.escape(visible_lines(name))}</th><td style='text-align:left'>"
        "<pre style='margin:0;white-space:pre-wrap'>"
        f"{html.escape(visible_lines(text))}</pre></td></tr>"
        for name, text in rows
    )
    return f"<table>{cells}</table>"


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run: its folder, its settings and the results of its stages."""

    folder: Path
    run: Run
    stages: tuple[StageResult, ...]
    """Results of the stages that are done."""

    @property
    def accuracy(self) -> float | None:
        """Share of held-out answers that are right, with the final weights.

        None if it was not measured, or if rewards are grades that do not say what is right (`core.measure.right`). Then
        `reward` is the figure to look at.
        """
        return self._last.accuracy[0] if self._last is not None and self._last.accuracy is not None else None

    @property
    def reward(self) -> float | None:
        """Mean held-out reward of the same weights. It differs from `accuracy` where a reward gives partial credit."""
        return self._last.reward[0] if self._last is not None and self._last.reward is not None else None

    @property
    def loss(self) -> float | None:
        """Held-out loss of the last stage whose weights the run goes on with, in nats a token; its exp is the
        perplexity.

        None where that stage has no held-out loss.
        """
        last = next((s for s in reversed(self.stages) if s.hands_on), None)
        return last.loss[0] if last is not None and last.loss is not None else None

    @property
    def _last(self) -> StageResult | None:
        """The stage whose weights the run ended with; None if it was measured on an environment of its own."""
        last = next((s for s in reversed(self.stages) if s.hands_on), None)
        return last if last is not None and self.run.env_of(self.run.stage(last.name)) == self.run.env else None

    # --- to look at it ------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        lines = [f"Result of {visible(self.run.recipe)}, seed {self.run.seed}, in {visible(str(self.folder))}"]
        lines += [f"  {visible(name)}: {text}" for name, text in self._rows()]
        if not self.stages:
            lines.append("  no stage has ended yet")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        begun = [("recipe", f"{self.run.recipe}, seed {self.run.seed}"), ("folder", str(self.folder))]
        return _table([*begun, *self._rows()])

    def _rows(self) -> list[tuple[str, str]]:
        return [(s.name, _stage_line(s)) for s in self.stages]

    # --- steps --------------------------------------------------------------------------------------------------------

    def frame(self) -> Any:
        """The steps as a pandas data frame: one row a step, one column a gauge (its mean). Needs pandas.

        Columns of wall times begin with `clock/`, those of peak bytes with `memory/`. docs/reference/metrics.md says
        what each gauge means.
        """
        pandas = _package("pandas", "result.frame()")
        return pandas.DataFrame([_row(s) for s in run_reader.steps(self.folder)])

    def plot(self, *gauges: str, out: str | Path | None = None) -> Any:
        """A figure of gauges by step, by default the reward and the held-out score. Needs matplotlib.

        `out` is a file to which it is also written (.svg, .png or .pdf). `posttrain plot` draws several runs.
        """
        from posttrain.report.plots import DEFAULT, plot

        return plot(self.folder, gauges or DEFAULT, out)

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def rollouts(
        self,
        *,
        worst: int | None = None,
        best: int | None = None,
        failed: int | None = None,
        stage: str | None = None,
        step: int | None = None,
        heldout: bool = False,
    ) -> list[RolloutView]:
        """Recorded answers of one step: all of them, or the worst, the best, or those that could not be judged.

        Args:
            worst, best, failed: at most this number of answers, those with the lowest reward first, with the highest
                first, or those without a reward because something failed. Give one of the three.
            stage: by default the last stage that was recorded.
            step: by default the stage's last recorded step.
            heldout: take the answers of the held-out evaluation after that step, instead of those of its training.
        """
        choices = {name: n for name, n in (("worst", worst), ("best", best), ("failed", failed)) if n is not None}
        if len(choices) > 1:
            raise ConfigError(f"rollouts: {' and '.join(choices)} are two choices; give one")
        for name, n in choices.items():
            if n < 0:
                raise ConfigError(f"rollouts: {name}={n} is no number of answers; give 0 or more")
        chosen = self._file(stage, step, "eval" if heldout else "train")
        views = [RolloutView(chosen.stage, chosen.index, heldout, r) for r in run_reader.read_episodes(chosen.path)]
        if failed is not None:
            return [r for r in views if broken(r.verdicts) or r.record.episode.error][:failed]
        if worst is None and best is None:
            return views
        judged = [r for r in views if r.reward is not None]
        judged.sort(key=lambda r: r.reward or 0.0, reverse=best is not None)
        return judged[: worst if best is None else best]

    def _file(self, stage: str | None, step: int | None, kind: str) -> EpisodeFile:
        """The last episode file of this stage, step and kind. An error says which ones there are."""
        of_kind = [f for f in run_reader.episode_files(self.folder) if f.kind == kind]
        if not of_kind:
            why = "" if self.run.record_episodes else ": the run was started with record_episodes=false"
            raise RunFolderError(f"{self.folder} has no {'held-out' if kind == 'eval' else 'training'} episodes{why}")
        stages = list(dict.fromkeys(f.stage for f in of_kind))
        if stage is not None and stage not in stages:
            raise ConfigError(f"rollouts: no episodes of stage {stage!r}; {nearest(stage, stages)}")
        of_stage = [f for f in of_kind if f.stage == (stage or of_kind[-1].stage)]
        steps = [f.index for f in of_stage]
        if step is None:
            return of_stage[-1]
        if step not in steps:
            near = min(steps, key=lambda i: abs(i - step))
            raise ConfigError(
                f"rollouts: no episodes of step {step}; the nearest is {near} (of {steps[0]} to {steps[-1]})"
            )
        return of_stage[steps.index(step)]


def _stage_line(s: StageResult) -> str:
    """The figures of a stage in one line."""
    parts = [f"{s.steps} steps in {s.seconds:.0f} s"]
    measures = [("accuracy", s.accuracy, s.before)]
    for what, measured, before in [("reward", s.reward, s.reward_before), *measures] if s.graded else measures:
        if measured is not None:
            parts.append(
                f"held-out {what} {interval(*measured)}" + ("" if before is None else f", before {number_text(before)}")
            )
    if s.loss is not None:
        was = "" if s.loss_before is None else f", before {s.loss_before:.3f}"
        parts.append(f"held-out loss {interval(*s.loss)}{was}")
    if s.agreement is not None:
        was = "" if s.agreement_before is None else f", before {s.agreement_before:.3f}"
        parts.append(f"held-out pairs ordered as judged {interval(*s.agreement)}{was}")
    return "; ".join(parts)


def _row(step: Any) -> dict[str, Any]:
    """A step as a row of `Result.frame`."""
    return {
        "stage": step.stage,
        "step": step.index,
        "version": step.version,
        **{name: g.mean for name, g in step.gauges.items()},
        **{f"clock/{name}": seconds for name, seconds in step.clock.items()},
        **{f"memory/{name}": count for name, count in step.memory.items()},
        "notes": "; ".join(step.notes),
    }


def _package(name: str, what: str) -> Any:
    """An optional package. ConfigError, which says that `what` needs it, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what} needs the package {name}: pip install {name}") from error


def load(folder: str | Path) -> Result:
    """A run folder, finished or not, to read: `posttrain.load("runs/x").rollouts(worst=5)`. Nothing in it is run."""
    folder = Path(folder)
    run = run_reader.run_file(folder).run
    checkpoint = newest(folder)
    stages: tuple[StageResult, ...] = ()
    if checkpoint is not None:
        from posttrain.stages import where  # imports torch

        with damage_is_named(f"{checkpoint.folder}/state.json"):
            stages = where(run, checkpoint.state).results
    return Result(folder, run, stages)
