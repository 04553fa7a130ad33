"""The commands that are worth trying after a run. Each has the user's own settings in it, and works as printed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from posttrain.config.overrides import address
from posttrain.config.run import Reinforce, Run
from posttrain.core.redact_secrets import scrubbed_data
from posttrain.record.run_reader import episode_files, run_file
from posttrain.record.runtime_objects import is_inline
from posttrain.system.errors import PosttrainError
from posttrain.system.shell import command_line, with_reasons

LONG = 60
"""The most characters of a command that has its reason beside it."""
WIDTH = 78
"""The most columns of a command with its reason. Where one is wider, each reason stands above its command."""
ASKED = "asked"
"""The entry of run.json with the words that the run was started with."""


def asked_words(recipe: str | Run, overrides: Sequence[str]) -> dict[str, Any]:
    """The entry of run.json for a run that was asked for in words; empty where a `Run` was given."""
    if isinstance(recipe, Run):
        return {}
    return {ASKED: {"recipe": recipe, "overrides": scrubbed_data(list(overrides))}}


def next_steps(run: Run, folder: Path, finished: bool = True, worse: bool = False) -> list[str]:
    """Commands worth trying now. A long command stands on a line of its own, below the line that says what it is for.

    Args:
        finished: False for a run that was cut. Then the first advice is to resume it, and nothing is said that needs
            its end.
        worse: whether its held-out score fell. Then no command continues it, repeats it as it is, or exports it.
    """
    if run.fault is not None:
        return _lines(_of_fault(run, folder))
    if not finished:
        show = [(command_line("show", folder), "read what it said so far")] if episode_files(folder) else []
        return _lines([(command_line("run", "--resume", folder), "go on from its last checkpoint"), *show])
    # The weights that the run ended with, which are what can be shown, exported or trained on.
    final_stage = next((s for s in reversed(run.stages) if s.hands_on), run.stages[-1])
    if not final_stage.leaves_policy:
        return _lines(_of_reward_model(run, folder, worse))
    start_words, reinforce_stages = _words(folder), [s for s in run.stages if isinstance(s, Reinforce)]
    recipe, overrides = start_words if start_words is not None else ("", [])
    commands: list[tuple[str, str]] = []
    if run.env.judges:  # else nothing was sampled
        commands.append((command_line("show", folder), "read what it said, and what it was paid"))
    # Functions of a program that is gone cannot be named on a command line.
    named_parts = not any(is_inline(name) for name in (run.env.name, *(r.function for r in run.env.rewards)))
    if run.env.heldout and run.env.judges and named_parts:
        commands.append((command_line("eval", folder, "--samples", "16"), "its held-out score on more samples"))
    if not worse:
        commands.append((command_line("export", folder, _free("my-model")), "a plain Hugging Face directory"))
    last = run.stages[-1]
    # A stage with an end of its own (a time, or a rate that has run down to 0) gains nothing from more steps. The chain
    # of `is` says that both times are None.
    open_end = isinstance(last, Reinforce) and last.hands_on and last.wall_time is last.time_of is None
    open_end = open_end and (last.optimizer.schedule == "constant" or last.optimizer.floor > 0)
    if open_end and named_parts and not worse:
        longer = command_line("run", "--resume", folder, f"{last.name}.steps={2 * last.steps}")
        commands.append((longer, "go on for as many steps again"))
    if start_words is not None and not worse:
        # The new seed replaces the user's own.
        others = [w for w in overrides if _changed_part(run, w) != "seed"]
        command = command_line("run", recipe, *others, f"seed={run.seed + 1}")
        commands.append((command, "the same with another seed: is the gain more than chance?"))
    if start_words is not None and len(reinforce_stages) == 1 and not worse:
        other = "dapo" if reinforce_stages[0].algorithm.name.startswith("grpo") else "grpo"
        others = [w for w in overrides if _changed_part(run, w) != "algorithm"]
        command = command_line("run", recipe, *others, f"algorithm={other}")
        commands.append((command, "another algorithm; posttrain ladder lists them"))
    if not named_parts:
        again = f"posttrain.evaluate({str(folder)!r}, ...) or posttrain.run(resume={str(folder)!r}, ...)"
        return [*_lines(commands), f"# from Python, with the same environment and rewards: {again}"]
    return _lines(commands)


def _of_fault(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Returns the next steps of a run with a planted fault. Its numbers mean nothing, so nothing goes on with it."""
    commands = [(command_line("show", folder), "read what it said")] if episode_files(folder) else []
    if (words := _words(folder)) is not None:
        others = [w for w in words[1] if _changed_part(run, w) != "fault"]
        commands.append((command_line("run", words[0], *others), "the same without the fault"))
    return commands


def _of_reward_model(run: Run, folder: Path, worse: bool) -> list[tuple[str, str]]:
    """Returns the next steps with a reward model.

    They export it, and use it to reward a policy: the model that it began with, on the run's own prompts.
    """
    if worse:
        return []
    words = _words(folder)
    # A reward model's data come along as the policy's prompts; what was its reward does not.
    data = [w for w in (words[1] if words is not None else ()) if _changed_part(run, w) in ("model", "env")]
    kept = [w for w in data if not w.startswith(("env.rewards", "rewards"))]
    # Settings from a recipe are not among the words, so the two that a policy needs are taken from the run.
    needed = (("model", run.model.path), ("env.prompts", run.env.prompts))
    kept = [*(f"{k}={v}" for k, v in needed if v and not any(w.startswith(f"{k}=") for w in kept)), *kept]
    return [
        (command_line("export", folder, _free("my-reward-model")), "for transformers and every library that reads it"),
        (command_line("run", "grpo", *kept, f"env.rewards=model:{folder}"), "reward a policy with it"),
    ]


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    """The lines of (command, reason) pairs, in the order given.

    Commands stand side by side with their reasons up to the first long one. From there on each stands below its reason.
    The order must not depend on how long the path of the program is.
    """
    side_by_side = list(takewhile(lambda row: len(row[0]) <= LONG, rows))
    return [*with_reasons(side_by_side, WIDTH), *(x for c, why in rows[len(side_by_side) :] for x in (f"# {why}", c))]


def _words(folder: Path) -> tuple[str, list[str]] | None:
    """(recipe or file, overrides) that the run was started with; None where they are not recorded."""
    entry: Any = run_file(folder).facts.get(ASKED)
    if not isinstance(entry, dict):
        return None
    recipe, overrides = (cast("dict[str, Any]", entry).get(k) for k in ("recipe", "overrides"))
    if not isinstance(recipe, str) or not isinstance(overrides, list):
        return None
    words = [str(w) for w in cast("list[Any]", overrides)]
    if recipe.startswith("-") or any(w.startswith("-") or "=" not in w for w in words):
        # The folder may be somebody else's. An option such as --trust or a second recipe must not get into a command.
        return None
    return recipe, words


def _changed_part(run: Run, word: str) -> str:
    """Returns the part of a run that an override changes; '' where this version does not know the setting.

    It is `algorithm` for anything inside an algorithm, else the first word of the path: "env" for `env.heldout=9`.
    """
    # An address that this version does not know is kept as it is.
    try:
        path = address(run, word.partition("=")[0].strip())
    except PosttrainError:
        return ""
    return "algorithm" if path[1:2] == ("algorithm",) else path[0]


def _free(name: str) -> str:
    """The name, with a number where such a folder is there already."""
    names = (name, *(f"{name}-{i}" for i in range(2, 100)))
    return next((n for n in names if not Path(n).exists()), name)
