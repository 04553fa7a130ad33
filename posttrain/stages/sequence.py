"""All stages of a run in order, from wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.run import Run
from posttrain.config.stages.stage import START
from posttrain.role.events import RestoredEvent
from posttrain.stages.interrupt import Stopper
from posttrain.stages.loop import DRIVERS, Driver
from posttrain.stages.progress import Progress
from posttrain.stages.run_parts import RunParts, keep
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, InvariantError


class Stages:
    """All stages of `parts.run`, from where `progress` stands."""

    def __init__(self, parts: RunParts, progress: Progress, stopper: Stopper) -> None:
        self.parts, self.progress, self.stopper = parts, progress, stopper

    def left(self, checkpoint: Path | None = None) -> Iterator[Driver[Any, Any, Any]]:
        """Yields the drivers of the stages that are left, in order. Run each one to its end before you take the next.
        `checkpoint`: the folder with the optimizer of a stage that was interrupted in its middle."""
        p, parts = self.progress, self.parts
        parts.watch.emit(RestoredEvent("weights", p.weights, parts.learner.fingerprint))
        parts.version = p.version
        if not p.stage and p.running is None:
            keep(parts, p, START)
        for stage in parts.run.stages[p.stage :]:
            # Only the first stage of this loop can be an interrupted one: when it has ended, `p.running` is None.
            resumed_from = checkpoint if p.running is not None else None
            yield DRIVERS[type(stage)](parts, p, stage, self.stopper, resumed_from)


def check_drivers(run: Run) -> None:
    """Raises ConfigError where a stage of the run has a kind without a driver."""
    for stage in run.stages:
        if type(stage) not in DRIVERS:
            raise ConfigError(
                f"stage {stage.name!r}: nothing takes the steps of a {type(stage).__name__}; import the file of its"
                " driver"
            )


def where(run: Run, state: Mapping[str, Any]) -> Progress:
    """Reads a checkpoint's state strictly, as a run's progress. ConfigError or InvariantError where it cannot be."""
    p = dataclass_json.from_plain(Progress, dict(state))
    # A finished run has no running stage.
    if not 0 <= p.stage <= len(run.stages) or (p.running is not None and p.stage == len(run.stages)):
        raise InvariantError(f"it says that {p.stage} of {len(run.stages)} stages are done")
    if (
        p.running is not None
        and (known := DRIVERS.get(type(run.stages[p.stage]))) is not None
        and type(p.running) is not known.state_type
    ):
        raise InvariantError(
            f"stage {run.stages[p.stage].name!r} remembers a {known.state_type.__name__}, and it holds a"
            f" {type(p.running).__name__}"
        )
    return p
