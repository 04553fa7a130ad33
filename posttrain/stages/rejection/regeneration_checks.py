"""Checks that wrong answers were generated anew from their first wrong step.

The first wrong step is found a second time here, from the verdicts alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from posttrain.checks.judging.step_label_checks import said, step_lengths, token_ends
from posttrain.config.stages.rejection import Regenerate
from posttrain.core.types import Episode
from posttrain.role.judges.regenerate import RegeneratedAnswer
from posttrain.system.errors import InvariantError


def goes_on_from_its_step(a: RegeneratedAnswer, settings: Regenerate, text: Callable[[np.ndarray], str]) -> None:
    """Checks one answer that was generated anew: it is wrong, its steps end at the recorded tokens, each completion
    begins with its tokens up to a step, and the first wrong step follows from the verdicts or the scores."""
    e, ids = a.episode, said(a.episode)
    named = f"an answer to task {e.task.id!r} that is said anew, {text(ids)!r},"
    if e.figure is None or e.right.of(e.figure):
        judged_as = "not judged" if e.figure is None else "right"
        raise InvariantError(f"{named} was {judged_as}: only wrong ones are")
    by_completions = settings.by == "completions"
    ends = token_ends(text, ids, step_lengths(text(ids), settings.separator)) if by_completions else _scored(e)[0]
    if list(a.ends) != ends:
        raise InvariantError(
            f"{named} has steps that end at tokens {ends}, and was cut at {list(a.ends)}: completions would begin"
            " inside a step"
        )
    # The first wrong step is searched by bisection, so only some steps have completions.
    for number, completions in a.asked.items():
        upto = ends[number - 1]
        for c in completions:
            if c.task.id != e.task.id or said(c)[:upto].tolist() != ids[:upto].tolist():
                raise InvariantError(
                    f"{named} has a completion from the end of step {number} that begins with"
                    f" {text(said(c)[:upto])!r}, and not with {text(ids[:upto])!r}: it goes on from another place"
                )
    kept = _furthest(a) if by_completions else _right_by_scores(e, settings.at)
    if a.kept != kept:
        raise InvariantError(
            f"{named} keeps {a.kept} of its {len(ends)} steps, and the first wrong one comes after {kept}: right steps"
            " would be said anew, or the error stay"
        )
    # Bisection ends with two neighbours: the last right step, and the step after it, which was asked and found wrong.
    # If that is the last step of the answer, it was not asked, since the whole answer is wrong.
    if by_completions and kept + 1 < len(ends) and kept + 1 not in a.asked:
        raise InvariantError(
            f"{named} was right from the end of step {kept} of {len(ends)}, and step {kept + 1} was not asked: nothing"
            " says that it is the first wrong one"
        )


def said_anew(a: RegeneratedAnswer, settings: Regenerate) -> tuple[Episode, ...]:
    """The completions that go on from the end of the last right step; () where there are none."""
    kept = _right_by_scores(a.episode, settings.at) if settings.by == "scores" else _furthest(a)
    return a.asked.get(kept, ())


def _furthest(a: RegeneratedAnswer) -> int:
    """The number of the last step (from 1) from whose end a completion was right; 0 where there is none.

    The step after it is wrong: it was asked too and had no right completion, or it is the last step of a wrong answer.
    """
    right_steps = [
        n
        for n, completions in a.asked.items()
        if any(completion.right.of(completion.figure) for completion in completions)
    ]
    return max(right_steps, default=0)


def _scored(e: Episode) -> tuple[list[int], list[float]]:
    """(token at which each step ends, score of each step). Of several scores at one token the lowest counts."""
    scored = [(j.end, j.verdict.score) for j in e.verdicts if not j.paid and j.end is not None]
    ends = sorted({end for end, score in scored if score is not None})
    return ends, [min(score for at, score in scored if at == end and score is not None) for end in ends]


def _right_by_scores(e: Episode, at: float) -> int:
    """How many steps from the first one have a score of at least `at`, up to the first that has not."""
    scores, right_steps = _scored(e)[1], 0
    while right_steps < len(scores) and scores[right_steps] >= at:
        right_steps += 1
    return right_steps
