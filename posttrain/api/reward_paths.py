"""Whether the paths of reward models hold one. This needs no torch, so a wrong one is refused at once."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.checkpoint import Checkpoint, find
from posttrain.core.env import Env
from posttrain.core.errors import ConfigError
from posttrain.core.reader import is_run, run_file
from posttrain.core.reward_model import RewardModel, trained_at
from posttrain.core.run import Run
from posttrain.engine.locate import check_source
from posttrain.engine.reward_form import form_of


def check_reward_models(run: Run) -> None:
    """Refuse a path that is no reward model. Needs no torch; a hub id is looked at when it is loaded.

    Raises:
        ConfigError, DataError: as said.
    """
    for prefix, env in _environments(run):
        for i, reward in enumerate(env.rewards):
            for path in reward.models:
                _check(f"{prefix}.rewards.{i}.function", path)


def _environments(run: Run) -> list[tuple[str, Env]]:
    return [("env", run.env), *((f"{s.name}.env", s.env) for s in run.stages if s.env is not None)]


def _check(setting: str, path: str) -> None:
    folder = Path(path).expanduser()
    try:
        if is_run(folder):
            trained_model(folder)
        elif folder.is_dir():
            form_of(folder)
            check_source("", path)
        else:
            check_source("", path)
    except ConfigError as error:
        raise ConfigError(f"{setting}=model:{path}: {error}") from error


def trained_model(folder: Path, checkpoint: str = "last") -> tuple[RewardModel, Checkpoint]:
    """The stage whose reward model a checkpoint of a run holds, and the checkpoint.

    Raises:
        ConfigError: its weights are a policy's.
    """
    found, run = find(folder, checkpoint), run_file(folder).run
    stage = trained_at(run.stages, found.state)
    if stage is None:
        raise ConfigError(
            f"{folder} is no reward model: the weights of its checkpoint {found.name} are a policy's. Give a run whose"
            " last stage trains a reward model, or a directory that posttrain export wrote of one"
        )
    return stage, found
