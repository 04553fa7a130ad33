"""Runs of examples with fewer steps and a smaller model. As a program: `toy_sizes.py SCRIPT ...` runs a script so."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

SIZES = {"model.hidden": "32", "model.ffn": "64", "model.heads": "2", "model.kv_heads": "1", "slots": "16"}
SHORT = {"env.heldout": "4", "evaluation.samples": "1", "threads": "1"}
SFT = {"sft.steps": "3", "sft.batch": "8"}
RL = {"rl.steps": "2", "rl.prompts": "4", "rl.siblings": "4", "rl.eval_every": "0", "rl.checkpoint_every": "1"}


def toy(words: list[str]) -> list[str]:
    """The words of `posttrain ...` at toy size: only what the command can be told, and only of stages that it has."""
    if words[0] != "run":
        return words
    if "--resume" in words:
        return [re.sub(r"^rl\.steps=\d+$", "rl.steps=3", w) for w in words]
    built = not any(w.startswith("model=") for w in words)
    stages = {**({} if "sft=none" in words or words[1] == "grpo" else SFT), **({} if words[1] == "sft" else RL)}
    small = {**(SIZES if built else {}), **SHORT, **stages}
    kept = [w for w in words if w.partition("=")[0] not in small]
    return [*kept, *(f"{k}={v}" for k, v in small.items())]


def script(words: list[str]) -> None:
    """A Python script as `python SCRIPT ...` runs it, but that its runs have toy size."""
    import posttrain

    real = posttrain.run

    def small(named: str, *words: str, **more: object) -> object:
        return real(named, *toy(["run", named, *words])[2:], **more)  # pyright: ignore[reportArgumentType]

    posttrain.run = small  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    script(sys.argv[1:])
