"""Accuracy against tokens spent, of searches with a process reward model.

    posttrain run prm --out runs/prm
    python -m benchmarks.search_curves runs/prm

The policy is the imitation of the run (its stage `sft`), before RL, on the run's held-out tasks. Tokens are those that
were said: continuations share their beginnings in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.api.build import make_roles
from posttrain.api.reward_models import FrozenRewards, stage_policy
from posttrain.api.target import kept_policy
from posttrain.core.checkpoint import kept_folder
from posttrain.core.process import Aggregate, aggregated
from posttrain.core.reader import run_file
from posttrain.core.reward_model import RewardModel
from posttrain.core.types import Task
from posttrain.environment.make import environment
from posttrain.role.concurrency import together
from posttrain.role.weights import load_weights
from posttrain.search.beam import beam
from posttrain.search.puct import tree_search
from posttrain.search.steps import Beginning, StepSearch
from posttrain.search.votes import best, vote
from posttrain.verifier.integers import last_integer

Search = Callable[[StepSearch, Task], Awaitable[Beginning]]


@dataclass(frozen=True)
class CurvePoint:
    """One search at one budget."""

    name: str
    accuracy: float
    error: float
    """Standard error of the accuracy."""
    tokens: float
    """Tokens said a task."""


def best_of(count: int, how: Aggregate) -> Search:
    async def search(s: StepSearch, task: Task) -> Beginning:
        found = await s.whole(task, count)
        return found[best([aggregated(b.scores, how) if b.scores else 0.0 for b in found])]

    return search


def voted(count: int, weighted: bool) -> Search:
    async def search(s: StepSearch, task: Task) -> Beginning:
        found = await s.whole(task, count)
        answers = [last_integer(s.text(b.ids)) for b in found]
        return found[vote(answers, [s.worth(b) for b in found] if weighted else None)]

    return search


def searches(budgets: Sequence[int]) -> dict[str, Search]:
    """The searches by name. A beam of width w that gives each beginning w steps costs about w * w answers."""
    out: dict[str, Search] = {"one answer": best_of(1, "min")}
    for n in budgets:
        hows: tuple[Aggregate, ...] = ("min", "product", "mean", "last")
        out |= {f"best of {n}, {how}": best_of(n, how) for how in hows}
        out |= {f"vote of {n}": voted(n, False), f"weighted vote of {n}": voted(n, True)}
    for w in (2, 3):
        out[f"beam of {w} x {w}"] = lambda s, t, w=w: beam(s, t, width=w, expand=w)  # type: ignore[misc]
    for e in (6, 12):
        out[f"tree of {e} x 3"] = lambda s, t, e=e: tree_search(s, t, expansions=e, expand=3)  # type: ignore[misc]
    return out


async def point(name: str, search: Search, tools: StepSearch, tasks: Sequence[Task], runs: int) -> CurvePoint:
    """The accuracy of a search over tasks, each searched `runs` times with other seeds."""
    right: list[float] = []
    spent = 0
    for seed in range(runs):
        own = replace(tools, seed=seed, spent=0)

        async def one(task: Task, own: StepSearch = own) -> bool:
            return await own.right(task, await search(own, task))

        right += [float(x) for x in await together([one(t) for t in tasks])]
        spent += own.spent
    x = np.array(right)
    return CurvePoint(name, float(x.mean()), float(x.std() / len(x) ** 0.5), spent / len(x))


async def curve(folder: Path, start: str, tasks: int, runs: int, budgets: Sequence[int]) -> list[CurvePoint]:
    run = run_file(folder).run
    stage = next(s for s in run.stages if isinstance(s, RewardModel) and s.judgement == "steps")
    env = environment(replace(run.env, rewards=()), run.seed)
    roles: Any = make_roles(run, kept_policy(folder, allow=False), env, ())
    load_weights(kept_folder(folder, start), roles.learner)
    await roles.sync.push(1)
    contract = next(s.contract for s in run.stages if s.contract is not None)
    dialogue = roles.rollout.dialogue
    tools = StepSearch(
        roles.engine,
        FrozenRewards(stage_policy(folder, stage.name)),
        env,
        lambda task: dialogue(task.id).see(task.prompt, task.tools),
        dialogue("").text,
        contract.resolve(tuple(kept_policy(folder, allow=False).stop_ids)),
        stage.separator,
    )
    try:
        found = searches(budgets)
        return [await point(name, search, tools, env.heldout[:tasks], runs) for name, search in found.items()]
    finally:
        roles.close()


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--start", default="sft")
    given.add_argument("--tasks", type=int, default=200)
    given.add_argument("--runs", type=int, default=2)
    given.add_argument("--budgets", type=int, nargs="*", default=[4, 8, 16])
    o = given.parse_args()
    begun = time.perf_counter()
    print(f"{'search':>24} | accuracy       | tokens a task")
    for p in sorted(asyncio.run(curve(o.folder, o.start, o.tasks, o.runs, o.budgets)), key=lambda p: p.tokens):
        print(f"{p.name:>24} | {p.accuracy:.3f} +- {p.error:.3f} | {p.tokens:.1f}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
