"""Trains a tiny model to keep a persona in the conversations of host.py (`posttrain new env host --dialog`), paid by a
judge. What host.py knows of the truth, right sums in the persona, is measured beside it and pays nothing."""

from __future__ import annotations

from judge import served

import posttrain


def main() -> None:
    """Imitation in which the persona is often dropped, then RL by the judge."""
    with served() as url:
        posttrain.run(
            "calculator",
            "env=host.py:Host",
            f"env.rewards=judge:{url}",
            "env.rewards.0.judge.rubric=host.md",
            "env.measured=true",
            "env.heldout=60",
            "sft.style=answer",
            "sft.wrong=0.7",
            "sft.steps=200",
            "rl.steps=30",
            "rl.prompts=16",
            out="runs/host",
        )


if __name__ == "__main__":
    main()
