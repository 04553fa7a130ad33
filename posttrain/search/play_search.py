"""Plays the searches that `posttrain.search.search_kinds` has as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from posttrain.core.types import Task
from posttrain.search.beam import beam
from posttrain.search.puct import tree_search
from posttrain.search.search_checks import worth_is
from posttrain.search.search_kinds import BeamSearch, BestOfN, MajorityVote, SearchKind, TreeSearch
from posttrain.search.step_sampling import Beginning, StepSearch
from posttrain.search.votes import best, vote
from posttrain.system.errors import ConfigError, InvariantError
from posttrain.verifier.integers import last_integer
from posttrain.verifier.math.extract import final
from posttrain.verifier.thoughts import spoken


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
            chosen = found[best([search.worth(b) if b.scores else -math.inf for b in found])]
        case MajorityVote():
            found = await search.whole(task, kind.count)
            answers = [ANSWERS[kind.answer](search.text(b.ids)) for b in found]
            weights = [_weight(search, b) for b in found] if kind.weighted else None
            return found[vote(answers, weights)]
        case BeamSearch():
            chosen = await beam(search, task, width=kind.width, expand=kind.expand)
        case TreeSearch():
            chosen = await tree_search(
                search,
                task,
                expansions=kind.expansions,
                expand=kind.expand,
                exploration=kind.exploration,
                rule=kind.rule,
            )
        case _:
            raise InvariantError(
                f"nothing plays a {type(kind).__name__}: give it a case in posttrain/search/play_search.py"
            )
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
