"""Page 26: from the signal, the estimator and the cost to a recipe, as the decision table that it is."""

from __future__ import annotations

from posttrain.lab import lesson as lab
from posttrain.plan.forces import CELLS, MIDDLE, Cell
from posttrain.web.picture import Bars, TextTile, Tiles

AXES = ("signal", "estimator", "cost")


def distances(*asked: float) -> list[float]:
    """How far each cell lies from a case (signal, estimator, cost). The axes have one scale, so none weighs more."""
    return [sum((a - b) ** 2 for a, b in zip(c.at, asked, strict=True)) ** 0.5 for c in CELLS]


def nearest_cell(*asked: float) -> Cell:
    """The cell that is nearest to a case; the first of equally near ones."""
    away = distances(*asked)
    return CELLS[away.index(min(away))]


def compute(k: lab.Values) -> lab.Readout:
    asked = tuple(float(k[a]) for a in AXES)
    cell, away = nearest_cell(*asked), distances(*asked)
    rows = {
        c.recipe: [
            TextTile(c.reward, "good" if c is cell else "plain"),
            TextTile(c.algorithm, "good" if c is cell else "plain"),
            TextTile(c.topology, "good" if c is cell else "plain"),
        ]
        for c in CELLS
    }
    return lab.Readout(
        pictures=(
            Tiles("The table: reward, algorithm, topology of each recipe", rows),
            Bars("How far your case lies from each", [c.recipe.split()[0].strip(",") for c in CELLS],
                 {"distance": away}, low=0),
        ),
        sentence=f"**{cell.signal}; {cell.estimator}; {cell.cost}**: reward from {cell.reward}, algorithm "
        f"**{cell.algorithm}**, {cell.topology}, as {cell.recipe}. Because {cell.why}. Here: `{cell.command}`.",
        values={"recipe": float(CELLS.index(cell) + 1), "distance": min(away)},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="26", name="forces", title="Three forces: signal, estimator, cost", part="synthesis", force="signal",
    minutes=6,
    question="Given a task and a machine, which recipe do the papers take, and why?",
    idea=f"""
        Three forces shape every recipe. The *signal*: what can say that an answer is right, from people who compare
        two of them to a program that runs in milliseconds. The *estimator*: how the gradient is made, from pairs that
        are given, over one sample with a critic, to many siblings that are each other's baseline. The *cost*: the
        machines that there are.

        They form a chain. A better signal allows a cheaper estimator: with a program that decides, siblings replace
        the critic. A cheaper estimator allows a simpler topology, or the same one to grow.

        The middle of all three: {MIDDLE}.
    """,
    formula="(signal, estimator, cost) -> reward, algorithm, topology: the nearest cell of the table",
    knobs=(
        lab.Slider("signal", "signal: people compare ... a program decides", 0.6, 0, 1, 0.05),
        lab.Slider("estimator", "estimator: nothing sampled ... many siblings", 0.7, 0, 1, 0.05),
        lab.Slider("cost", "cost: one device ... many machines", 0.4, 0, 1, 0.05),
    ),
    compute=compute,
    breaks=(
        lab.Break({"signal": 0, "estimator": 0, "cost": 0},
                  "Comparisons and one device: the pairs are the loss, and nothing is sampled.", None, "pairs alone"),
        lab.Break({"signal": 1, "estimator": 1, "cost": 1},
                  "A program and many machines: long answers leave engines idle, so they work ahead.", None,
                  "many machines"),
    ),
    claims=(
        lab.Claim("signal 0, estimator 0: DPO alone is nearest (1: yes)", "curriculum 26", 1,
                  lambda: float(nearest_cell(0, 0, 0).algorithm == "dpo")),
        lab.Claim("signal 1, siblings, one machine: R1-Zero (1: yes)", "curriculum 26", 1,
                  lambda: float("R1-Zero" in nearest_cell(1, 1, 0.3).recipe)),
        lab.Claim("signal 1, siblings, many machines: DAPO, asynchronous (1: yes)", "curriculum 26", 1,
                  lambda: float("DAPO" in nearest_cell(1, 1, 1).recipe)),
        lab.Claim("signal 0, a critic, some devices: InstructGPT (1: yes)", "curriculum 26", 1,
                  lambda: float("InstructGPT" in nearest_cell(0, 0.4, 0.5).recipe)),
    ),
    exercises=(
        lab.AskChoice("Why does GRPO need no critic?",
                      ("Siblings of one prompt are the baseline", "Its reward has no noise", "It samples less"), 0,
                      why="The mean of the siblings' rewards estimates what a critic would predict for the prompt."),
        lab.AskKnobs("Find the case in which nothing is sampled and pairs are learned from (recipe 2).", "recipe", 2,
                     2, {"signal": 0, "estimator": 0, "cost": 0}),
    ),
    code=("posttrain.lab.lessons.synthesis.three_forces.nearest_cell", "posttrain.plan.forces.Cell"),
    docs="guides/planning.md", command="posttrain plan --forces", grid=("signal", "estimator"),
)  # fmt: skip
