"""The list of recipes: their purpose, content and cost.

A recipe is a function that returns a complete, frozen `Run`; to add one, write the function and a line of `RECIPES`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posttrain.config.run import Run
from posttrain.recipe import tutorials, your_data
from posttrain.system.errors import ConfigError, nearest

Kind = Literal["yours", "tutorial"]
KINDS: dict[Kind, str] = {
    "yours": "any model and data. Set model=PATH env.prompts=FILE env.rewards=mine.py:reward; else model and data are"
    " tiny",
    "tutorial": "to run as it is and to change: a tiny model with random weights learns a task of the gallery",
}
"""The purpose of each kind of recipe."""


@dataclass(frozen=True)
class Recipe:
    """One line of the list."""

    build: Callable[[], Run]
    minutes: float
    """Processor time as shipped, with seed 0; on one thread it is close to the wall time of an idle machine."""
    reaches: str
    """Held-out accuracy after each stage of that run."""
    shows: str
    """What the run does, or is an example of, in a line of the list."""

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def kind(self) -> Kind:
        return "yours" if self.build.__module__ == your_data.__name__ else "tutorial"


_ALL = (
    Recipe(your_data.sft, 0.3, "0.44", "imitates your conversations, texts or completions"),
    Recipe(your_data.grpo, 1.3, "0.00", "RL alone with GRPO, from the weights of the model that you give"),
    Recipe(
        your_data.verifiable, 0.7, "0.44, 0.90", "imitates the completions of your prompts, then GRPO with your rewards"
    ),
    Recipe(
        your_data.dpo,
        0.6,
        "0.45, 0.78",
        "imitates completions, then learns from pairs of a chosen and a rejected one (DPO and its family)",
    ),
    Recipe(
        your_data.reward_model,
        0.4,
        "none: nothing is sampled",
        "a reward model from pairs of a chosen and a rejected completion",
    ),
    Recipe(
        tutorials.rlhf,
        1.2,
        "0.11, none (a reward model), 0.38",
        "imitation, a reward model from pairs, RL against it: the reward model's score beside the truth",
    ),
    Recipe(
        tutorials.judge,
        1.8,
        "0.55, 0.98",
        "a judge that writes its reasons: SFT on the form, then RL with J1's rule on pairs of a known taste",
    ),
    Recipe(
        tutorials.prm,
        4.0,
        "0.52, none (labels), none (a reward model), 0.66",
        "a process reward model: completions label the policy's own steps, a model learns them, and pays RL",
    ),
    Recipe(
        tutorials.ladder,
        2.7,
        "0.00, 0.14, 0.54, 0.67, 0.97",
        "pretraining, SFT, chain of thought, preferences (DPO), RL: each does what the one before cannot",
    ),
    Recipe(
        tutorials.arithmetic,
        1.1,
        "0.47, 0.90",
        "a short SFT, then RL: the smallest run on which algorithms can be compared",
    ),
    Recipe(
        tutorials.reject,
        0.6,
        "0.49, 0.94",
        "a short SFT, then rejection sampling: sample, keep what is right, imitate it (RAFT, RFT, STaR, ReST)",
    ),
    Recipe(tutorials.calculator, 2.5, "0.25, 0.99", "a tool in two turns: ask the calculator, read its result, answer"),
    Recipe(
        tutorials.shop,
        3.3,
        "0.06, 0.92",
        "four tools in three turns, judged by the cart and the calendar that they leave",
    ),
    Recipe(tutorials.programs, 0.8, "0.28, 0.88", "short programs, judged by hidden tests in the sandbox"),
)
RECIPES: dict[str, Recipe] = {r.name: r for r in _ALL}
"""Every recipe by its name, those that take your model and data first."""


def recipe(name: str) -> Run:
    """The run of a recipe as shipped. ConfigError suggests the nearest name."""
    if name not in RECIPES:
        yours = ", ".join(r.name for r in of("yours"))
        raise ConfigError(
            f"no recipe is called {name!r}; {nearest(name, RECIPES)}. {yours} take your model and data, "
            "the others are tutorials"
        )
    return RECIPES[name].build()


def of(kind: Kind) -> list[Recipe]:
    """The recipes of a kind, in the order of the list."""
    return [r for r in RECIPES.values() if r.kind == kind]


def listed(columns: int = 80) -> str:
    """All recipes by kind, in lines of at most `columns`."""
    width = max(map(len, RECIPES))
    lines = ["recipes, with their minutes on one core as they are:"]
    for kind, purpose in KINDS.items():
        rows = [
            ("", f"{kind}: {purpose}"),
            *((f"  {r.name:<{width}}  {r.minutes:>3g} min  ", r.shows) for r in of(kind)),
        ]
        for lead, text in rows:
            indent = " " * (len(lead) or 2)
            lines += textwrap.wrap(
                text, max(columns, 40), initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False
            )
    return "\n".join(lines)
