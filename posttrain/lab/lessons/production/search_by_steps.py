"""Page 17: outcome and process reward models, and search with each at the same cost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from posttrain.core.stop import Stop
from posttrain.core.types import Task
from posttrain.lab import lesson as lab
from posttrain.search.play_search import beam, best
from posttrain.search.puct import TreeNode
from posttrain.search.step_sampling import Beginning
from posttrain.web.picture import Bars, Branch, Tree

TASK = Task("a", "?")


@dataclass
class StepWorld:
    """Answers of some steps, each good with one probability; an answer is right where all are good. A process reward
    model says of each step whether it is good, and is wrong with a probability. It stands where the search over a
    model's steps stands (`posttrain.search.step_sampling.StepSearch`)."""

    steps: int
    good: float
    wrong: float
    made: np.random.Generator  # draws whether a step is good, and whether the reward model errs

    def goes_on(self, task: Task) -> bool:
        return True

    def worth(self, b: Beginning) -> float:
        return float(np.prod(b.scores)) if b.scores else 0.0

    async def grown(self, task: Task, ones: list[Beginning], count: int, place: str) -> list[Beginning]:
        """`count` continuations of each beginning by one step."""
        continued: list[Beginning] = []
        for b in ones:
            for _ in range(count):
                step_is_good = self.made.random() < self.good
                seems_good = step_is_good != (self.made.random() < self.wrong)
                ids = np.append(b.ids, np.int32(step_is_good)).astype(np.int32)
                stop = Stop.SAID if len(ids) == self.steps else None
                continued.append(Beginning(ids, (*b.scores, 0.9 if seems_good else 0.1), stop))
        return continued

    async def ended(self, task: Task, ones: list[Beginning]) -> Beginning:
        return max((b for b in ones if b.stop is not None), key=self.worth)

    async def whole(self, count: int) -> list[Beginning]:
        ones = [Beginning(np.zeros(0, np.int32))] * count
        for _ in range(self.steps):
            ones = [(await self.grown(TASK, [b], 1, ""))[0] for b in ones]
        return ones


async def _solved_by_each_way(k: lab.Values, rng: np.random.Generator) -> tuple[bool, bool, bool, bool]:
    """Returns for each of `WAYS` whether it finds a right answer of one problem."""
    world: Any = StepWorld(int(k["steps"]), float(k["good"]), float(k["prm"]), rng)  # in place of a `StepSearch`
    n, width = int(k["N"]), min(int(k["beam"]), int(k["N"]))
    answers = await world.whole(n)
    right = [bool(b.ids.all()) for b in answers]
    # 1 for an answer that the outcome model takes to be right, else 0. A little noise decides between equal scores.
    orm = [float(r != (rng.random() < float(k["orm"]))) + 1e-6 * rng.random() for r in right]
    prm = [world.worth(b) for b in answers]
    from_beam = await beam(world, TASK, width=width, expand=max(1, n // width), steps=int(k["steps"]))
    return right[0], right[best(orm)], right[best(prm)], bool(from_beam.ids.all())


@cache
def rates(
    steps: int, good: float, n: int, width: int, orm: float, prm: float, trials: int, seed: int
) -> tuple[float, ...]:
    """Share of problems solved by one answer, by best of n with an outcome and a process model, and by a beam."""
    k = {"steps": steps, "good": good, "N": n, "beam": width, "orm": orm, "prm": prm}

    async def every() -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.array([await _solved_by_each_way(k, rng) for _ in range(trials)], float)

    return tuple(asyncio.run(every()).mean(0).tolist())


WAYS = ("one answer", "best of N, outcome", "best of N, process", "beam, process")


def tree(c: float, seed: int) -> tuple[Branch, float]:
    """(a tree of 24 visits, the share of visits of the most visited first step). Four first steps lead to a right
    answer with probabilities .2 .4 .6 .8; each is tried once, and 20 times UCB chooses."""
    rng, chance = np.random.default_rng(seed), (0.2, 0.4, 0.6, 0.8)
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in range(4)]
    for child, p in zip(root.children, chance, strict=True):
        child.back_up(float(rng.random() < p))
    for _ in range(20):
        child = root.chosen(c, "ucb")
        child.back_up(float(rng.random() < chance[int(child.beginning.ids[0])]))
    most_visited = max(root.children, key=lambda x: x.visits)
    rows = [
        Branch(f"{p}: {x.visits} visits,", "good" if x is most_visited else "plain", x.value)
        for i, (x, p) in enumerate(zip(root.children, chance, strict=True))
    ]
    return Branch(f"{root.visits} visits, mean", "plain", root.value, rows), most_visited.visits / root.visits


def compute(k: lab.Values) -> lab.Readout:
    arguments = (float(k["good"]), int(k["N"]), int(k["beam"]), float(k["orm"]), float(k["prm"]), 100, int(k["seed"]))
    solved = rates(int(k["steps"]), *arguments)
    branches, visit_share = tree(float(k["c"]), int(k["seed"]))
    best_way = int(np.argmax(solved))
    return lab.Readout(
        pictures=(
            Bars("Problems solved; the first at the cost of one answer, the others at that of N at most", WAYS,
                 {"solved": list(solved)}, low=0, high=1),
            Tree("UCB: each first step's true chance, its visits, the mean found", branches),
        ),
        sentence=f"One answer solves **{solved[0]:.0%}**. "
        f"None of the four solves more than **{WAYS[best_way]}**: **{solved[best_way]:.0%}**.",
        values={
            "one answer": solved[0],
            "outcome": solved[1],
            "process": solved[2],
            "beam": solved[3],
            "most visited": visit_share,
        },
    )  # fmt: skip


LESSON = lab.Lesson(
    number="17", name="search", title="Outcome, process, and search", part="production", force="signal", minutes=8,
    question="With the compute of N answers, is it better to judge answers or steps?",
    idea="""
        An outcome reward model (ORM) scores whole answers. A process reward model (PRM) scores each step. Best of N
        samples N answers and gives the one with the best score. A beam keeps the best beginnings after every step, so
        that compute goes where it is still worth something. A tree search tries steps by their mean so far and by how
        seldom they were tried: q + c sqrt(ln N / n).

        A step's score is only useful if it is right often enough: its errors add up over the steps.
    """,
    formula="UCB: q + c * sqrt( ln N / n )            solved by one answer: p_good ^ steps",
    knobs=(
        lab.Slider("steps", "steps of an answer", 6, 2, 10),
        lab.Slider("good", "probability of a good step", 0.75, 0.5, 0.95, 0.05),
        lab.Slider("N", "N, answers", 16, 2, 32),
        lab.Slider("beam", "beam", 4, 1, 8),
        lab.Slider("orm", "outcome model wrong", 0.1, 0, 0.5, 0.05),
        lab.Slider("prm", "process model wrong, a step", 0.15, 0, 0.5, 0.05),
        lab.Slider("c", "c of UCB", 1.0, 0, 3, 0.1),
        lab.Slider("seed", "seed", 0, 0, 5),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"prm": 0.5},
                  "A process model that guesses is worth no more than one answer, however many are sampled.", None),
    ),
    claims=(
        lab.Claim("One answer: .75 ^ 6", "curriculum 17", 0.75**6,
                  lambda: rates(6, 0.75, 16, 4, 0.1, 0.15, 500, 1)[0], within=0.15),
    ),
    exercises=(
        lab.AskNumber("p_good .9, 10 steps: how often is one answer right?", 0.349, why=".9 ^ 10."),
        lab.AskKnobs("Make the beam solve at least 90 %.", "beam", 0.9, None, {"prm": 0.0}),
        lab.AskChoice("The process model is wrong half of the time. What is best of N with it worth?",
                      ("As much as with a right one", "As much as one answer", "Nothing"), 1,
                      why="It chooses at random."),
    ),
    code=("posttrain.search.play_search.beam", "posttrain.search.puct.TreeNode.chosen",
          "posttrain.search.play_search.best"),
    docs="guides/search.md", command="posttrain eval runs/mine search=beam.width=2,expand=2", grid=("prm", "N"),
)  # fmt: skip
