"""Turns the argument of `posttrain eval` (a run folder, a model or an address) into a run, whose environment and model
are what is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from posttrain.build.open_model import target_run
from posttrain.build.request.trust_prompt import to_stderr
from posttrain.build.request.user_objects import UserObjects
from posttrain.config import overrides as dotted
from posttrain.config.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.environment.gallery import GALLERY
from posttrain.evaluation.evaluate_endpoint import is_url, remote_run
from posttrain.evaluation.search_words import asks_search
from posttrain.record.run_reader import is_run
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line


def asked_run(
    target: str | Path, checkpoint: str, overrides: tuple[str, ...], handed: UserObjects, quiet: bool, trust: bool
) -> tuple[Run, Path | None, RuntimeObjects]:
    """The run to evaluate, the folder of weights to load into its policy (or None), and the objects that it names.

    Args:
        handed: objects that a program gave in the place of names of settings.
    """
    if asks_search(overrides):
        raise ConfigError(
            "searches have a report of their own:"
            " posttrain.evaluation.evaluate_search.evaluate_searches(target, *words)"
        )
    # `change` is called back with the run, once it is read, and leaves its objects here.
    named_objects: list[RuntimeObjects] = []

    def change(run: Run) -> Run:
        run, objects = handed.place(run)
        named_objects.append(objects)
        return run

    if not is_run(target):
        # An environment that was handed as an object has no name. `env=prompts` stands for it in the check below.
        stand_in = ("env=prompts",) if handed.env is not None else ()
        overrides = with_environment(str(target), (*stand_in, *overrides))
    if is_url(target):
        # The overrides are applied to a run that is made here, without the stand-in of the check above. An address is
        # no run folder, so `stand_in` exists.
        return dotted.apply(change(remote_run(str(target))), list(overrides[len(stand_in) :])), None, named_objects[0]
    say: Callable[[str], None] = (lambda _: None) if quiet else to_stderr
    parts = ("model", "env", "engine", "placement")
    run, weights = target_run(target, checkpoint, *overrides, parts=parts, allow=trust, change=change, say=say)
    # Rows that the run keeps are found in its folder.
    return run, weights, replace(named_objects[-1], folder=Path(target)) if is_run(target) else named_objects[-1]


def contract_of(run: Run, max_tokens: int | None, temperature: float | None) -> Sampling:
    """Returns the sampling of answers: that of the run's first stage of RL, else that of its first stage that
    samples."""
    sampling = [s for s in run.stages if s.contract is not None]
    # RL stages first: the sort is stable, so the order within each kind stays.
    sampling.sort(key=lambda s: not isinstance(s, Reinforce))
    contract = (sampling[0].contract if sampling else None) or Sampling()
    wanted = {"max_tokens": max_tokens, "temperature": temperature}
    return replace(contract, **{k: v for k, v in wanted.items() if v is not None})


def with_environment(target: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides, with `env=prompts` added where they give only prompts. ConfigError where they give neither."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    if keys & {"env", "env.name"}:
        return overrides
    if "env.prompts" in keys:
        return ("env=prompts", *overrides)
    raise ConfigError(
        f"{target} is a model, and a model has no tasks of its own: say what to evaluate it on.\n"
        f"  {command_line('eval', target, 'env.prompts=mine.jsonl', 'env.rewards=exact')}\n"
        f"  {command_line('eval', target, 'env=arithmetic')}  # or another of the gallery: {', '.join(GALLERY)}\n"
        "posttrain new env writes an environment of your own (env=mine.py:Mine); a run folder has one already"
    )
