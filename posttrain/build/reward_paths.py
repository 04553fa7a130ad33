"""Checks that the paths of reward models and judges name such a model. No torch is needed, so errors come at once."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.env import STAGE, Env
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import RewardModel, trained_at
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.engine.files.reward_form import form_of
from posttrain.engine.model.locate_model import check_source
from posttrain.record.checkpoint import Checkpoint, find
from posttrain.record.run_reader import is_run, run_file
from posttrain.system.errors import ConfigError


def check_reward_models(run: Run) -> None:
    """Checks all reward models and judges that the run's rewards name. A hub id is only looked at when it is loaded.

    Raises:
        ConfigError, DataError: a path has no reward model or judge, or a stage trains none, or trains it too late.
    """
    for prefix, env in _environments(run):
        for i, reward in enumerate(env.rewards):
            for name in reward.stages:
                _check_stage(run, f"{prefix}.rewards.{i}.function", env, name)
            if reward.judge_run:
                check_judge_path(f"{prefix}.rewards.{i}.function", reward.judge_run)
            if reward.meta is not None:
                check_reward_path(f"{prefix}.rewards.{i}.meta", reward.meta)
            for path in reward.models:
                if not path.startswith(STAGE):
                    check_reward_path(f"{prefix}.rewards.{i}.function", path)


def _environments(run: Run) -> list[tuple[str, Env]]:
    """(path of the setting, environment) of the run and of each stage that has its own."""
    return [("env", run.env), *((f"{s.name}.env", s.env) for s in run.stages if s.env is not None)]


def _check_stage(run: Run, setting: str, env: Env, name: str) -> None:
    """ConfigError where no stage of this name trains a reward model, or one that samples from this environment comes
    before it."""
    trained = [s.name for s in run.stages if isinstance(s, RewardModel)]
    if name not in trained:
        known = f"those that train one are {', '.join(trained)}" if trained else "no stage of this run trains one"
        raise ConfigError(
            f"{setting}=model:{STAGE}{name}: {known}. Name such a stage, or a directory with a reward model: model:PATH"
        )
    names = [s.name for s in run.stages]
    # A stage that labels steps needs no reward model, since its labels come from the truth. So it may come before.
    before = [s for s in run.stages[: names.index(name)] if not isinstance(s, StepLabeling)]
    early = [s.name for s in before if s.contract is not None and run.env_of(s) == env]
    if early:
        raise ConfigError(
            f"{setting}=model:{STAGE}{name}: {early[0]} learns from what it samples before {name} has trained its"
            f" reward model: give {early[0]} rewards of its own ({early[0]}.env), or put it behind {name}"
        )


def check_judge_path(setting: str, path: str) -> None:
    """ConfigError where `setting=judge:PATH` names no policy that could judge."""
    folder = Path(path).expanduser()
    if not is_run(folder):
        raise ConfigError(
            f"{setting}=judge:{path}: {path} is no run folder. Train a judge first (posttrain run judge --out FOLDER),"
            " and name its folder"
        )
    checkpoint = find(folder, "last")
    if trained_at(run_file(folder).run.stages, checkpoint.state) is not None:
        raise ConfigError(f"{setting}=judge:{path}: its weights are a reward model's; use env.rewards=model:{path}")


def check_reward_path(setting: str, path: str) -> None:
    """ConfigError or DataError where `setting=model:PATH` names no reward model."""
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
    saved, run = find(folder, checkpoint), run_file(folder).run
    stage = trained_at(run.stages, saved.state)
    if stage is None:
        raise ConfigError(
            f"{folder} is no reward model: the weights of its checkpoint {saved.name} are a policy's. Give a run whose"
            " last stage trains a reward model, or a directory that posttrain export wrote of one"
        )
    return stage, saved
