"""The rewards of a run's configuration as sources: a verifier by its name, or a function in the user's file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.config.env import Reward, SandboxSettings
from posttrain.core.types import Task
from posttrain.record.runtime_objects import INLINE, RuntimeObjects, is_inline
from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.builtin import BUILTIN, NAMES
from posttrain.verifier.code.code_reward import Code
from posttrain.verifier.math.math_reward import math_source
from posttrain.verifier.reward_source import Checked
from posttrain.verifier.user_code import load
from posttrain.verifier.user_functions import TIMEOUT, FunctionSource, RewardFunction, source
from posttrain.verifier.workers.worker_functions import pooled


def sources(
    rewards: Sequence[Reward],
    tasks: Sequence[Task] = (),
    where: SandboxSettings = SandboxSettings(),
    given: RuntimeObjects = RuntimeObjects(),
) -> tuple[Checked, ...]:
    """The configured reward sources, in order. Reward models are no sources: they judge tokens
    (`core.ports.EpisodeJudge`).

    Args:
        tasks: checked for the columns that the rewards require.
        where: the sandbox of rewards that run programs.
        given: functions that a Python program handed to the run (`inline:NAME`).
    """
    out: list[Checked] = [_source(r, where, given) for r in rewards if not r.by_model]
    names = [s.name for s in out]
    for s in out:
        if names.count(s.name) > 1:
            raise ConfigError(
                f"reward {s.name!r} is given twice; give it once, with the weight you want, or rename one of the"
                " functions (of judges at endpoints: set judge.name)"
            )
        if not math.isfinite(s.weight):
            raise ConfigError(f"reward {s.name!r}: weight={s.weight} must be a finite number")
        s.check(tasks)
    return tuple(out)


def _source(reward: Reward, where: SandboxSettings, given: RuntimeObjects) -> Checked:
    """One configured reward: a verifier by its name, or a function in a thread or in worker processes."""
    if is_inline(reward.function):
        return _handed(reward, given)
    if reward.judge_url:
        from posttrain.verifier.judge_endpoint import RubricJudge  # a client of http, which most runs do without

        return RubricJudge.of(reward)
    name, timeout = reward.function, reward.timeout or TIMEOUT
    if reward.resolution is not None and ":" not in name:
        raise ConfigError(
            f"reward {name!r} is a verifier, and exact: leave resolution out, it is for functions that ask a model"
        )
    if name == "math":
        return math_source(reward.weight, reward.workers, reward.timeout)
    if name in ("code", "code_fraction"):
        box = open_sandbox(where.name, workers=reward.workers or None, token=where.token)
        scoring = "all" if name == "code" else "fraction"
        return Code(box, scoring=scoring, seconds=reward.timeout or 60.0, name=name, weight=reward.weight, owned=True)
    if name in BUILTIN:
        if reward.workers:
            raise ConfigError(f"reward {name!r} is a comparison and needs no workers: set workers=0")
        return FunctionSource(name, BUILTIN[name], reward.weight, "ours", timeout)
    if ":" not in name:
        raise ConfigError(f"reward {name!r} is neither path.py:function nor a built-in: {nearest(name, NAMES)}")
    path, _, attribute = name.rpartition(":")
    local = _local(load(Path(path), attribute), attribute, reward)
    return pooled(local, Path(path), attribute, reward.workers, timeout) if reward.workers else local


def _local(function: RewardFunction, name: str, reward: Reward) -> FunctionSource:
    """A function in a thread of this process."""
    local_source = source(function, name=name, weight=reward.weight, timeout=reward.timeout or TIMEOUT)
    return local_source if reward.resolution is None else replace(local_source, resolution=reward.resolution)


def _handed(reward: Reward, given: RuntimeObjects) -> FunctionSource:
    """A function that a Python program handed to the run. It runs in a thread of this process."""
    name = reward.function.removeprefix(INLINE)
    function = given.reward(reward.function)
    if reward.workers:
        raise ConfigError(
            f"reward {name!r} was handed as a Python object, which cannot go to a worker process: it runs in this"
            " process (workers=0). For worker processes put it into a file and name it path.py:function"
        )
    return _local(function, name, reward)
