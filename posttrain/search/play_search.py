"""Plays the searches that `posttrain.search.search_kinds` has as data.

Of several whole answers one is chosen by its score or by votes. Beams work over steps, and so do trees (`puct`).
"""

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
    """The index of the first answer of the largest class of equal answers (2203.11171). With weights, of the class with
    the largest sum (2206.02336).

    None is an answer that could not be read. Its index is returned only if there is no other answer.

    >>> vote(["7", "8", "8", None])
    1
    >>> vote(["7", "8", "8"], [0.9, 0.3, 0.4])
    0
    """
    # The weights of a class are added by fsum, which is exact, so that a tie does not depend on the order of the
    # answers. Of equal classes `max` takes the first, in the order in which they came.
    weights_of: dict[str, list[float]] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            weights_of.setdefault(answer, []).append(weight)
    if not weights_of:
        return 0
    winner = max(weights_of, key=lambda a: math.fsum(weights_of[a]))
    return answers.index(winner)


async def beam(search: StepSearch, task: Task, *, width: int, expand: int, steps: int = 64) -> Beginning:
    """The best of the answers that ended in a beam search. If none ended, the best beginning is continued to its end.

    Args:
        width: beginnings that are kept after each step.
        expand: continuations that each of them is given. The first step has width x expand.
        steps: most steps of an answer.
    """
    # `places` holds ended answers and beginnings together. They compete for the same places, so an ended answer is
    # dropped when `width` others are worth more.
    places = [Beginning(np.zeros(0, np.int32))]
    for number in range(steps):
        open_ones = [b for b in places if b.stop is None]
        if not open_ones or not search.goes_on(task):
            break
        # The first step has only one beginning. It gets `width` times as many continuations, as many as all beginnings
        # of a later step together.
        continued = await search.grown(task, open_ones, expand if number else width * expand, f"beam/{number}")
        places = sorted([*(b for b in places if b.stop is not None), *continued], key=search.worth, reverse=True)[
            :width
        ]
    return await search.ended(task, places)


def _final(text: str) -> str | None:
    """The final answer of a text without white space, as the verifier of mathematics finds it."""
    answer = final(text)
    return None if answer is None else "".join(answer.text.split())


def _line(text: str) -> str | None:
    """The last line of a text outside its thoughts."""
    lines = spoken(text).strip().splitlines()
    return lines[-1].strip() if lines else None


ANSWERS: Mapping[str, Callable[[str], str | None]] = {"integer": last_integer, "math": _final, "line": _line}
"""For each value of the setting `vote.answer`, the function that reads the part of an answer that a vote compares. It
returns None if it can read nothing."""


async def play(kind: SearchKind, tools: StepSearch, task: Task) -> Beginning:
    """The answer that a search finds for a task.

    Raises:
        InvariantError: the search did not do what it says (`posttrain.search.search_checks`).
        ConfigError: a weighted vote met a score below 0.
    """
    search = replace(tools, aggregate=kind.aggregate)
    match kind:
        case BestOfN():
            sampled = await search.whole(task, kind.count)
            # An answer that could not be judged has no scores. It is chosen only if no answer has any.
            chosen = sampled[best([search.worth(b) if b.scores else -math.inf for b in sampled])]
        case MajorityVote():
            sampled = await search.whole(task, kind.count)
            answers = [ANSWERS[kind.answer](search.text(b.ids)) for b in sampled]
            weights = [_weight(search, b) for b in sampled] if kind.weighted else None
            # Its own score does not choose this answer, so the check below has no number to look at.
            return sampled[vote(answers, weights)]
        case BeamSearch():
            chosen = await beam(search, task, width=kind.width, expand=kind.expand)
        case TreeSearch():
            settings = {"expansions": kind.expansions, "expand": kind.expand}
            chosen = await tree_search(search, task, **settings, exploration=kind.exploration, rule=kind.rule)
        case _:
            raise InvariantError(
                f"nothing plays a {type(kind).__name__}: give it a case in posttrain/search/play_search.py"
            )
    # The check computes the number again from the scores, by other code than the search.
    if chosen.scores:
        worth_is(chosen.scores, kind.aggregate, search.worth(chosen), task.id)
    return chosen


def _weight(search: StepSearch, b: Beginning) -> float:
    """The weight of an answer in a vote: its score, which must not be negative."""
    if (worth := search.worth(b)) < 0:
        raise ConfigError(
            f"a weighted vote adds scores up, and an answer scores {worth:.3g}: weigh by a process reward model or a"
            " judge, whose scores are not negative, or take best_of"
        )
    return worth
