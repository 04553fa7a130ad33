"""What takes a policy refuses a run whose weights are a reward model's, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunFolderError
from posttrain.core.reader import run_file
from posttrain.core.reward_model import trained_at


def refuse_reward_model(folder: Path, state: Mapping[str, Any], what: str, otherwise: str) -> None:
    """RunFolderError where the weights of a checkpoint of this run are a reward model's."""
    stage = trained_at(run_file(folder).run.stages, state)
    if stage is not None:
        raise RunFolderError(f"{folder} holds the reward model that {stage.name} trained, and {what}. {otherwise}")
