"""Trackers: the gauges of a run in TensorBoard, Weights & Biases or trackio (`core.ports.Tracker`).

Every gauge is logged as `STAGE/gauge` (its mean) over the stage's own step, every clock entry as `STAGE/clock/role`,
the peak bytes of every role as `STAGE/memory/role`. With `log_completions=N` the first N completions of each step go
along as a table (`CompletionTables`), for a tracker that has `table`.
`steps.jsonl` remains the complete record. A tracker that fails during a run is reported once and not called again.
A run prints for each tracker where to look (`tracker_lines`); docs/guides/trackers.md says what is logged and what is
sent.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from posttrain.config.run import Run
from posttrain.core.content import conversation
from posttrain.core.gauge import Step
from posttrain.core.ports import Tracker
from posttrain.record.run_reader import episode_name, read_episodes
from posttrain.system.dataclass_json import to_plain
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell, visible, visible_lines

PROJECT = "posttrain"
COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "stop")
"""Columns of a table of completions."""


def _variable(name: str, default: str) -> str:
    """The value of an environment variable, such as WANDB_PROJECT, or the default."""
    return os.environ.get(name) or default


@dataclass(frozen=True)
class CompletionTables:
    """Tables of a run's completions, read from its folder: the first `count` of each step."""

    folder: Path
    count: int

    def rows(self, step: Step) -> list[list[Any]]:
        """A row for each completion, with `COLUMNS`; no rows where the record has none of the step."""
        path = self.folder / "episodes" / episode_name(step.stage, step.index, "train")
        if not self.count or not path.is_file():
            return []
        return [
            [
                step.index,
                visible_lines(conversation(r.episode.task.prompt)),
                visible_lines(r.episode.text),
                r.episode.reward,
                None if r.advantage is None or not r.episode.spoken else float(np.mean(np.concatenate(r.advantage))),
                r.episode.stop.value,
            ]
            for r in read_episodes(path)[: self.count]
        ]


def scalars(step: Step) -> dict[str, float]:
    """The finite numbers of a step, by the name they are logged under."""
    named = {f"{step.stage}/{name}": gauge.mean for name, gauge in step.gauges.items()}
    named |= {f"{step.stage}/clock/{name}": seconds for name, seconds in step.clock.items()}
    named |= {f"{step.stage}/memory/{name}": count for name, count in step.memory.items()}
    return {name: float(x) for name, x in named.items() if math.isfinite(x)}


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        named_folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        events = Path(named_folder, folder.name) if named_folder else folder / "trackers" / "tensorboard"
        self._writer: Any = SummaryWriter(str(events))
        self.where = f"tensorboard --logdir {shlex.quote(str(events))}"
        self._writer.add_text("run", "\n".join(f"    {line}" for line in _readable(run)))

    def log(self, step: Step) -> None:
        for name, x in scalars(step).items():
            self._writer.add_scalar(name, x, step.index)

    def table(self, step: Step, rows: list[list[Any]]) -> None:
        """Each completion as an indented block below a line of its figures."""
        for i, (_, prompt, said, reward, advantage, stop) in enumerate(rows):
            text = "\n".join(f"    {line}" for line in (*prompt.splitlines(), "-" * 20, *said.splitlines()))
            head = f"reward {reward}, advantage {advantage}, {stop}"
            self._writer.add_text(f"{step.stage}/completions/{i}", f"{head}\n\n{text}", step.index)

    def say(self, line: str) -> None:
        """Does nothing: lines of text are only printed in the terminal."""

    def close(self, summary: Mapping[str, float]) -> None:
        for name, x in summary.items():
            self._writer.add_scalar(name, x, 0)
        self._writer.close()


class _Online:
    """What W&B and trackio share. Each stage counts its steps from 1."""

    _run: Any

    def _table(self, rows: list[list[Any]]) -> Any:
        """The package's own table of completions."""
        raise NotImplementedError

    def log(self, step: Step) -> None:
        self._run.log({**scalars(step), f"{step.stage}/step": step.index})

    def table(self, step: Step, rows: list[list[Any]]) -> None:
        self._run.log({f"{step.stage}/completions": self._table(rows), f"{step.stage}/step": step.index})

    def say(self, line: str) -> None:
        """Does nothing: lines of text are only printed in the terminal."""


class Wandb(_Online):
    """One W&B run per run folder; a resumed run continues it."""

    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        own_folder = folder / "trackers" / "wandb"
        own_folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=_variable("WANDB_PROJECT", PROJECT),
                name=_variable("WANDB_NAME", folder.name),
                # The same id after a resume, so that W&B continues the run instead of beginning one.
                id=_variable("WANDB_RUN_ID", _identity(own_folder)),
                resume="allow",
                dir=_variable("WANDB_DIR", str(own_folder)),
                config=to_plain(run),
            )
        except Exception as error:
            raise ConfigError(
                f"trackers=wandb: {error}. Run `wandb login`, or set WANDB_MODE=offline to keep it on this machine"
            ) from error
        self.where = _wandb_place(getattr(self._run, "url", None), Path(_variable("WANDB_DIR", str(own_folder))))
        for stage in run.stages:
            # Each stage counts its steps from 1, and W&B's own step may never fall.
            self._run.define_metric(f"{stage.name}/step")
            self._run.define_metric(f"{stage.name}/*", step_metric=f"{stage.name}/step")

    def _table(self, rows: list[list[Any]]) -> Any:
        import wandb

        return wandb.Table(columns=list(COLUMNS), data=rows)

    def close(self, summary: Mapping[str, float]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


class Trackio(_Online):
    """A local trackio project, in the folder `TRACKIO_DIR`."""

    def __init__(self, run: Run, folder: Path) -> None:
        import trackio

        project = _variable("TRACKIO_PROJECT", PROJECT)
        self._run: Any = trackio.init(project=project, name=folder.name, config=to_plain(run), resume="allow")
        self._finish: Callable[[], None] = trackio.finish
        self.where = f"trackio show --project {shlex.quote(project)}   (on this machine, as {folder.name})"

    def _table(self, rows: list[list[Any]]) -> Any:
        import pandas as pd
        import trackio

        return trackio.Table(dataframe=pd.DataFrame(rows, columns=list(COLUMNS)))

    def close(self, summary: Mapping[str, float]) -> None:
        if summary:
            self._run.log(dict(summary))
        self._finish()


class GuardedTracker:
    """A tracker whose failure does not end the run. The first failure is reported; then it is not called again."""

    def __init__(self, name: str, inner: Tracker, completions: CompletionTables | None = None) -> None:
        self.name, self._inner, self._failed, self._completions = name, inner, False, completions
        self._unread = False
        """Whether it was reported that completions could not be read."""

    @property
    def where(self) -> str:
        """The place to look at the logged values: a command or an address."""
        return str(getattr(self._inner, "where", "see its own documentation"))

    def log(self, step: Step) -> None:
        self._try(lambda: self._inner.log(step))
        if rows := self._rows(step):
            self._try(lambda: cast("Any", self._inner).table(step, rows))

    def say(self, line: str) -> None:
        self._try(lambda: self._inner.say(line))

    def close(self, summary: Mapping[str, float]) -> None:
        self._try(lambda: self._inner.close(summary))

    def _rows(self, step: Step) -> list[list[Any]]:
        """The rows of the step's completions, for a tracker that takes them."""
        if self._failed or self._completions is None or not hasattr(self._inner, "table"):
            return []
        try:
            return self._completions.rows(step)
        except Exception as error:
            # The run's own files are at fault here and not the tracker, so it goes on.
            if not self._unread:
                tell(
                    f"tracker {self.name} gets no completions of {step.stage} step {step.index}: the run's own record"
                    f" of them cannot be read: {error!r}",
                    file=sys.stderr,
                )
            self._unread = True
            return []

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            # It is not called again: a service that does not answer would cost its time-out at every step.
            self._failed = True
            tell(
                f"tracker {self.name} failed and is left out from here on (steps.jsonl has everything): {error!r}",
                file=sys.stderr,
            )


TRACKERS: dict[str, tuple[str, Callable[[Run, Path], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
    "trackio": ("trackio", Trackio),
}
"""Name -> (package, constructor)."""


def check_trackers(run: Run) -> None:
    """ConfigError with the install command where a tracker's package is missing. Called before anything is started."""
    missing = [TRACKERS[name][0] for name in run.trackers if importlib.util.find_spec(TRACKERS[name][0]) is None]
    if missing:
        packages = " ".join(missing)
        raise ConfigError(
            f"trackers={','.join(run.trackers)}: {packages} is not installed. Run: {sys.executable} -m pip install"
            f" {packages}"
        )


def make_trackers(run: Run, folder: Path) -> list[Tracker]:
    """The trackers of a run, each guarded. ConfigError where a package is missing."""
    check_trackers(run)
    completions = CompletionTables(folder, run.log_completions)
    return [GuardedTracker(name, TRACKERS[name][1](run, folder), completions) for name in run.trackers]


def tracker_lines(trackers: Iterable[object]) -> list[str]:
    """A line for each tracker of a run: where to look at what it logs."""
    return [f"tracker {t.name}: {t.where}" for t in trackers if isinstance(t, GuardedTracker)]


def _wandb_place(url: object, folder: Path) -> str:
    """The address of a W&B run. For a run that is kept on this machine: the command that sends it."""
    if url:
        return str(url)
    return f"kept in {folder}; send it with: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def _identity(folder: Path) -> str:
    """An id of this run folder, kept in a file so that a resumed run has the same one."""
    path = folder / "id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def _readable(run: Run) -> list[str]:
    """The run tree, one setting per line."""

    def walk(node: Any, path: str) -> list[str]:
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            return [line for key, child in items for line in walk(child, f"{path}.{key}" if path else str(key))]
        return [visible(f"{path} = {node}")]

    return walk(to_plain(run), "")
