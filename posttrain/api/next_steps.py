"""The commands that are worth trying after a run; each works as printed."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.run import Reinforce, Run
from posttrain.core.shell import command_line, with_reasons
from posttrain.recipe.recipes import RECIPES


def next_steps(run: Run, folder: Path) -> list[str]:
    """Commands worth trying now."""
    out = [
        (command_line("show", folder), "read what it said, token by token"),
        (command_line("eval", folder, "--samples", "16"), "accuracy and pass@k on more samples"),
        (command_line("export", folder, "my-model"), "a plain Hugging Face directory"),
    ]
    used = [s.algorithm.name for s in run.stages if isinstance(s, Reinforce)]
    if len(used) == 1 and run.recipe in RECIPES:
        other = "grpo" if not used[0].startswith("grpo") else "dapo"
        command = command_line("run", run.recipe, f"algorithm={other}")
        out.append((command, "another algorithm; posttrain ladder lists them"))
    return with_reasons(out)
