"""Plays the searches that `posttrain.search.search_kinds` has as data: whole answers of which one is chosen, by a score
or by votes; beams over steps; and trees (`puct`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from posttrain.core.types import Task
from posttrain.search.puct import tree_search
from posttrain.search.search_checks import worth_is
from posttrain.search.search_kinds import BeamSearch, BestOfN, MajorityVote, SearchKind, TreeSearch
from posttrain.search.step_sampling import Beginning, StepSearch
from posttrain.system.errors import ConfigError, InvariantError
from posttrain.verifier.integers import last_integer
from posttrain.verifier.math.extract import final
from posttrain.verifier.thoughts import spoken


def best(scores: Sequence[float]) -> int:
    """The index of the highest score; the first of equal ones.

    >>> best([0.2, 0.9, 0.9])
    1
    """
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> int:
    """The index of the first answer of the largest class of equal answers; with weights, of the heaviest one
    (2203.11171, 2206.02336).

    An answer that is None, which nothing could be read of, is given only where there is no other.

    >>> vote(["7", "8", "8", None])
    1
    >>> vote(["7", "8", "8"], [0.9, 0.3, 0.4])
    0
    """
    # Weights are kept in lists and added by fsum, so a tie does not depend on the order of the answers. `max`
    # keeps the first of equal classes, and a dict the order in which they came.
    total: dict[str, list[float]] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            total.setdefault(answer, []).append(weight)
    if not total:
        return 0
    won = max(total, key=lambda a: math.fsum(total[a]))
    return answers.index(won)


async def beam(search: StepSearch, task: Task, *, width: int, expand: int, steps: int = 64) -> Beginning:
    """The best answer of a beam, of those that ended. Where none did, the best beginning is ended.

    Args:
        width: beginnings that are kept after each step.
        expand: continuations that each of them is given. The first step has width x expand.
        steps: most steps of an answer.
    """
    # `ones` holds ended answers and beginnings together. Both compete for the same places, so an ended answer
    # falls out when enough beginnings are worth more than it.
    ones = [Beginning(np.zeros(0, np.int32))]
    for number in range(steps):
        going = [b for b in ones if b.stop is None]
        if not going or not search.goes_on(task):
            break
        # The first step has one beginning only. With the factor `width` it is given as many continuations as a
        # later step gives to all of its beginnings.
        grown = await search.grown(task, going, expand if number else width * expand, f"beam/{number}")
        ones = sorted([*(b for b in ones if b.stop is not None), *grown], key=search.worth, reverse=True)[:width]
    return await search.ended(task, ones)


def _final(text: str) -> str | None:
    found = final(text)
    return None if found is None else "".join(found.text.split())


def _line(text: str) -> str | None:
    lines = spoken(text).strip().splitlines()
    return lines[-1].strip() if lines else None


ANSWERS: Mapping[str, Callable[[str], str | None]] = {"integer": last_integer, "math": _final, "line": _line}
"""Functions that read the part of an answer that a vote compares, by the setting `vote.answer`; None: nothing can be
read."""


async def play(kind: SearchKind, tools: StepSearch, task: Task) -> Beginning:
    """The answer that a search finds for a task.

    Raises:
        InvariantError: the search did not do what it says (`posttrain.search.search_checks`).
        ConfigError: a weighted vote met a score below 0.
    """
    search = replace(tools, aggregate=kind.aggregate)
    match kind:
        case BestOfN():
            found = await search.whole(task, kind.count)
            # An answer that could not be judged has no scores; it is chosen only where no other has any.
            chosen = found[best([search.worth(b) if b.scores else -math.inf for b in found])]
        case MajorityVote():
            found = await search.whole(task, kind.count)
            answers = [ANSWERS[kind.answer](search.text(b.ids)) for b in found]
            weights = [_weight(search, b) for b in found] if kind.weighted else None
            return found[vote(answers, weights)]
        case BeamSearch():
            chosen = await beam(search, task, width=kind.width, expand=kind.expand)
        case TreeSearch():
            size = {"expansions": kind.expansions, "expand": kind.expand}
            chosen = await tree_search(search, task, **size, exploration=kind.exploration, rule=kind.rule)
        case _:
            raise InvariantError(
                f"nothing plays a {type(kind).__name__}: give it a case in posttrain/search/play_search.py"
            )
    # The check makes the number again from the scores, by other code than the search used.
    if chosen.scores:
        worth_is(chosen.scores, kind.aggregate, search.worth(chosen), task.id)
    return chosen


def _weight(search: StepSearch, b: Beginning) -> float:
    if (worth := search.worth(b)) < 0:
        raise ConfigError(
            f"a weighted vote adds scores up, and an answer scores {worth:.3g}: weigh by a process reward model or a"
            " judge, whose scores are not negative, or take best_of"
        )
    return worth
