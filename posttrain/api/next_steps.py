"""The commands that are worth trying after a run; each works as printed."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.run import Reinforce, Run
from posttrain.recipe.recipes import RECIPES


def next_steps(run: Run, folder: Path) -> list[str]:
    """Commands worth trying now."""
    out = [
        (f"posttrain show {folder}", "read what it said, token by token"),
        (f"posttrain eval {folder} --samples 16", "accuracy and pass@k on more samples"),
        (f"posttrain export {folder} my-model", "a plain Hugging Face directory"),
    ]
    used = [s.algorithm.name for s in run.stages if isinstance(s, Reinforce)]
    if len(used) == 1 and run.recipe in RECIPES:
        other = "grpo" if not used[0].startswith("grpo") else "dapo"
        out.append((f"posttrain run {run.recipe} algorithm={other}", "another algorithm; posttrain ladder lists them"))
    width = max(len(command) for command, _ in out)
    return [f"{command:<{width}}  # {why}" for command, why in out]
