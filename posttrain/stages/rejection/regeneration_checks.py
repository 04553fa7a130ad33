"""Checks that a wrong answer was said anew from its first wrong step. That step is found again, from the verdicts
alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from posttrain.checks.judging.step_label_checks import said, step_lengths, token_ends
from posttrain.config.stages.rejection import Regenerate
from posttrain.core.types import Episode
from posttrain.role.judges.regenerate import RegeneratedAnswer
from posttrain.system.errors import InvariantError


def goes_on_from_its_step(a: RegeneratedAnswer, how: Regenerate, text: Callable[[np.ndarray], str]) -> None:
    """The answer is wrong, its steps end where they do, completions go on from them, and the first wrong step is that
    of the completions' verdicts or of the scores.

    Raises:
        InvariantError: names the task and the step.
    """
    e, own = a.episode, said(a.episode)
    named = f"an answer to task {e.task.id!r} that is said anew, {text(own)!r},"
    if e.figure is None or e.right.of(e.figure):
        told = "not judged" if e.figure is None else "right"
        raise InvariantError(f"{named} was {told}: only wrong ones are")
    by_text = how.by == "completions"
    ends = token_ends(text, own, step_lengths(text(own), how.separator)) if by_text else _scored(e)[0]
    if list(a.ends) != ends:
        raise InvariantError(
            f"{named} has steps that end at tokens {ends}, and was cut at {list(a.ends)}: completions would begin"
            " inside a step"
        )
    # Steps are asked by halves, so only some of them have completions.
    for number, completions in a.asked.items():
        upto = ends[number - 1]
        for c in completions:
            if c.task.id != e.task.id or said(c)[:upto].tolist() != own[:upto].tolist():
                raise InvariantError(
                    f"{named} has a completion from the end of step {number} that begins with"
                    f" {text(said(c)[:upto])!r}, and not with {text(own[:upto])!r}: it goes on from another place"
                )
    kept = _furthest(a) if by_text else _right_by_scores(e, how.at)
    if a.kept != kept:
        raise InvariantError(
            f"{named} keeps {a.kept} of its {len(ends)} steps, and the first wrong one comes after {kept}: right steps"
            " would be said anew, or the error stay"
        )
    # Bisection ends between two neighbours: the last right step, and one that was asked and found wrong. The last step
    # needs no asking, since the whole answer is wrong.
    if by_text and kept + 1 < len(ends) and kept + 1 not in a.asked:
        raise InvariantError(
            f"{named} was right from the end of step {kept} of {len(ends)}, and step {kept + 1} was not asked: nothing"
            " says that it is the first wrong one"
        )


def said_anew(a: RegeneratedAnswer, how: Regenerate) -> tuple[Episode, ...]:
    """The completions from the end of the last right step."""
    kept = _right_by_scores(a.episode, how.at) if how.by == "scores" else _furthest(a)
    return a.asked.get(kept, ())


def _furthest(a: RegeneratedAnswer) -> int:
    """The last step from whose end a completion was right. What comes after it is wrong: that step was asked too, or it
    is the last one, and the answer itself is wrong."""
    right = [n for n, own in a.asked.items() if any(c.right.of(c.figure) for c in own)]
    return max(right, default=0)


def _scored(e: Episode) -> tuple[list[int], list[float]]:
    """Ends and scores of the steps; of those that end with one token the lowest."""
    scored = [(j.end, j.verdict.score) for j in e.verdicts if not j.paid and j.end is not None]
    ends = sorted({end for end, score in scored if score is not None})
    return ends, [min(score for at, score in scored if at == end and score is not None) for end in ends]


def _right_by_scores(e: Episode, at: float) -> int:
    scores, kept = _scored(e)[1], 0
    while kept < len(scores) and scores[kept] >= at:
        kept += 1
    return kept
