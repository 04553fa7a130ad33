"""The stage that the weights of a checkpoint come from, and names without the paths of a machine."""

from __future__ import annotations

import re
from typing import Any

from posttrain.config.run import Run
from posttrain.config.stages.stage import Stage, starts
from posttrain.record.checkpoint import Checkpoint
from posttrain.system.errors import RunFolderError

PLACE = re.compile(r"(?<![\w.:/<~-])(?:~[\w-]*/|/)(?:[^\s/\"'`,;:|\\)\]]+/)+[^\s/\"'`,;:|\\)\]]*")
"""An absolute path, or one below a home folder, of two parts or more."""
CHECKPOINT = re.compile(r"\d+-(?P<stage>[\w-]+)-(?P<step>\d+)")


def stage_of(run: Run, checkpoint: Checkpoint) -> tuple[Stage, int | None]:
    """The stage that the weights come from, and the step after which they were kept; None: its end."""
    found = CHECKPOINT.fullmatch(checkpoint.name)
    stage = next((s for s in run.stages if found and s.name == found["stage"]), run.stages[-1])
    step = int(found["step"]) if found else 0
    if step and stage.hands_on:
        return stage, step
    done: Any = checkpoint.state.get("stage")  # at the end of a stage its name is with step 0, and this counts it
    if not isinstance(done, int):
        raise RunFolderError(f"checkpoint {checkpoint.name}: its state.json does not say how many stages were done")
    last = next((s for s in reversed(run.stages[: max(0, done)]) if s.hands_on), None)
    return (stage, 0) if last is None else (last, None)


def stages_to(run: Run, last: Stage) -> list[Stage]:
    """The stages that made the weights, first to last."""
    out, here = [last], last
    while (before := starts(run.stages, here)) in {s.name for s in run.stages}:
        here = run.stage(before)
        out.append(here)
    return out[::-1]


def local_names(text: str) -> str:
    """The text with each absolute path of this machine, and each path below a home folder, as its last part.

    >>> local_names("/home/me/data/mine.jsonl, /opt/r.py:right, runs/x, </think>, https://host/a/b")
    'mine.jsonl, r.py:right, runs/x, </think>, https://host/a/b'
    """
    return PLACE.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)
