"""The list of recipes: their purpose, content and cost.

A recipe is a function that returns a complete, frozen `Run`; to add one, write the function and a line of `RECIPES`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posttrain.config.run import Run
from posttrain.recipe.dpo import dpo
from posttrain.recipe.gallery import arithmetic, calculator, programs, shop
from posttrain.recipe.grpo import grpo
from posttrain.recipe.judge import judge
from posttrain.recipe.ladder import ladder
from posttrain.recipe.prm import prm
from posttrain.recipe.reject import reject
from posttrain.recipe.rlhf import rlhf
from posttrain.recipe.score_pairs import reward_model
from posttrain.recipe.sft import sft
from posttrain.recipe.verifiable import verifiable
from posttrain.system.errors import ConfigError, nearest

Kind = Literal["yours", "tutorial"]
KINDS: dict[Kind, str] = {
    "yours": "any model and data. Set model=PATH env.prompts=FILE env.rewards=mine.py:reward; else model and data are"
    " tiny",
    "tutorial": "to run as it is and to change: a tiny model with random weights learns a task of the gallery",
}
"""The purpose of each kind of recipe."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One line of the list."""

    name: str
    kind: Kind
    shows: str
    """What the run does, or is an example of, in a line of the list."""
    build: Callable[[], Run]
    minutes: float
    """Processor time as shipped, with seed 0; on one thread it is close to the wall time of an idle machine."""
    reaches: str
    """Held-out accuracy after each stage of that run."""


_ALL = (
    Recipe(
        name="sft",
        kind="yours",
        shows="imitates your conversations, texts or completions",
        build=sft,
        minutes=0.3,
        reaches="0.44",
    ),
    Recipe(
        name="grpo",
        kind="yours",
        shows="RL alone with GRPO, from the weights of the model that you give",
        build=grpo,
        minutes=1.3,
        reaches="0.00",
    ),
    Recipe(
        name="verifiable",
        kind="yours",
        shows="imitates the completions of your prompts, then GRPO with your rewards",
        build=verifiable,
        minutes=0.7,
        reaches="0.44, 0.90",
    ),
    Recipe(
        name="dpo",
        kind="yours",
        shows="imitates completions, then learns from pairs of a chosen and a rejected one (DPO and its family)",
        build=dpo,
        minutes=0.6,
        reaches="0.45, 0.78",
    ),
    Recipe(
        name="reward_model",
        kind="yours",
        shows="a reward model from pairs of a chosen and a rejected completion",
        build=reward_model,
        minutes=0.4,
        reaches="none: nothing is sampled",
    ),
    Recipe(
        name="rlhf",
        kind="tutorial",
        shows="imitation, a reward model from pairs, RL against it: the reward model's score beside the truth",
        build=rlhf,
        minutes=1.2,
        reaches="0.11, none (a reward model), 0.38",
    ),
    Recipe(
        name="judge",
        kind="tutorial",
        shows="a judge that writes its reasons: SFT on the form, then RL with J1's rule on pairs of a known taste",
        build=judge,
        minutes=1.8,
        reaches="0.55, 0.98",
    ),
    Recipe(
        name="prm",
        kind="tutorial",
        shows="a process reward model: completions label the policy's own steps, a model learns them, and pays RL",
        build=prm,
        minutes=4.0,
        reaches="0.52, none (labels), none (a reward model), 0.66",
    ),
    Recipe(
        name="ladder",
        kind="tutorial",
        shows="pretraining, SFT, chain of thought, preferences (DPO), RL: each does what the one before cannot",
        build=ladder,
        minutes=2.7,
        reaches="0.00, 0.14, 0.54, 0.67, 0.97",
    ),
    Recipe(
        name="arithmetic",
        kind="tutorial",
        shows="a short SFT, then RL: the smallest run on which algorithms can be compared",
        build=arithmetic,
        minutes=1.1,
        reaches="0.47, 0.90",
    ),
    Recipe(
        name="reject",
        kind="tutorial",
        shows="a short SFT, then rejection sampling: sample, keep what is right, imitate it (RAFT, RFT, STaR, ReST)",
        build=reject,
        minutes=0.6,
        reaches="0.49, 0.94",
    ),
    Recipe(
        name="calculator",
        kind="tutorial",
        shows="a tool in two turns: ask the calculator, read its result, answer",
        build=calculator,
        minutes=2.5,
        reaches="0.25, 0.99",
    ),
    Recipe(
        name="shop",
        kind="tutorial",
        shows="four tools in three turns, judged by the cart and the calendar that they leave",
        build=shop,
        minutes=3.3,
        reaches="0.06, 0.92",
    ),
    Recipe(
        name="programs",
        kind="tutorial",
        shows="short programs, judged by hidden tests in the sandbox",
        build=programs,
        minutes=0.8,
        reaches="0.28, 0.88",
    ),
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
            lines += textwrap.wrap(
                text,
                max(columns, 40),
                initial_indent=lead,
                subsequent_indent=" " * (len(lead) or 2),
                break_on_hyphens=False,
            )
    return "\n".join(lines)
