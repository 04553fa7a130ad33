"""The rules by which judges that write their reasoning are asked, read and paid: GenRM, J1, RM-R1 and DeepSeek-GRM
(docs/design/papers.md, C05).

A judge sees a question with one completion or two, writes what it thinks, and ends with a verdict. `JudgeFormat` holds
one paper's form of judging. The rules are pure functions of the text and of the side that is truly better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.thoughts import spoken

Scores = tuple[float, ...]
"""The score that a verdict gives each completion. A choice between two is (1, 0) or (0, 1)."""

LAST = 80
"""RM-R1 looks for the verdict in the last characters of a text: this many (2505.02387, the authors' code)."""
LOWEST, HIGHEST = 1, 10
"""The scale of a DeepSeek-GRM score."""
NAMES = ("A", "B")
"""The sides, as verdicts name them."""
YES, NO = "Yes", "No"

_CHOICE = re.compile(r"\[\[([AB])\]\]")  # `[[A]]`
_ANSWER = re.compile(r"<answer>\[\[([AB])\]\]</answer>")  # `<answer>[[B]]</answer>`
_BOXED = re.compile(r"\\boxed\{([0-9, ]+)\}")  # `\boxed{8, 6}`
_YES = re.compile(rf"\b({YES}|{NO})\b")


def read_choice(text: str) -> Scores | None:
    """The last `[[A]]` or `[[B]]`.

    >>> read_choice("A is polite. [[A]]"), read_choice("I cannot say.")
    ((1.0, 0.0), None)
    """
    return _side(_CHOICE.findall(spoken(text))[-1:])


def read_last_characters(text: str) -> Scores | None:
    """RM-R1: `<answer>[[A]]</answer>` within the last 80 characters, and not the other one there too.

    >>> read_last_characters("<answer>[[B]]</answer>"), read_last_characters("<answer>[[B]]</answer>" + 80 * ".")
    ((0.0, 1.0), None)
    """
    # The same verdict twice is one verdict. If both verdicts occur, there is none.
    return _side(sorted(set(_ANSWER.findall(spoken(text)[-LAST:]))))


def read_boxed(text: str) -> Scores | None:
    r"""DeepSeek-GRM: the scores of both completions, 1 to 10, in the last `\boxed{}`.

    >>> read_boxed(r"\boxed{8, 6}"), read_boxed(r"\boxed{8}"), read_boxed(r"\boxed{11, 6}")
    ((8.0, 6.0), None, None)
    """
    last_box = _BOXED.findall(spoken(text))[-1:]
    words = [w.strip() for w in last_box[0].split(",")] if last_box else []
    scores = tuple(float(w) for w in words if w.isdigit())
    fits = len(words) == len(scores) == len(NAMES) and all(LOWEST <= s <= HIGHEST for s in scores)
    return scores if fits else None


def read_yes(text: str) -> Scores | None:
    """GenRM: the last Yes (1) or No (0).

    >>> read_yes("The sum is right. Yes"), read_yes("Perhaps")
    ((1.0,), None)
    """
    last_word = _YES.findall(spoken(text))[-1:]
    return (float(last_word[0] == YES),) if last_word else None


def _side(named: Sequence[str]) -> Scores | None:
    """The scores of a choice, if exactly one side is named."""
    return None if len(named) != 1 else (1.0, 0.0) if named[0] == NAMES[0] else (0.0, 1.0)


def chosen(scores: Scores | None) -> int | None:
    """The side that a verdict prefers, 0 or 1; for a single completion 1 if the verdict calls it good, else 0. None
    without a verdict, or if both sides are worth the same.

    >>> chosen((8.0, 6.0)), chosen((8.0, 8.0)), chosen((0.0,)), chosen(None)
    (0, None, 0, None)
    """
    if scores is None:
        return None
    if len(scores) == 1:
        return int(scores[0] > 0.5)
    best = max(scores)
    return scores.index(best) if scores.count(best) == 1 else None


def right_or_nothing(scores: Scores | None, best: int) -> float:
    """1 for the right verdict, else 0 (GenRM's label, J1's verdict reward).

    >>> right_or_nothing((0.0, 1.0), 1), right_or_nothing(None, 1)
    (1.0, 0.0)
    """
    return float(chosen(scores) == best)


def right_or_minus_one(scores: Scores | None, best: int) -> float:
    """1 for the right verdict, else -1, also without a verdict or for a tie: RM-R1, and Eq. 11 of DeepSeek-GRM
    (2504.02495).

    >>> [right_or_minus_one(s, 1) for s in ((8, 6), (5, 7), (9, 4), (8, 8))]
    [-1.0, 1.0, -1.0, -1.0]
    """
    return 1.0 if chosen(scores) == best else -1.0


def both_orders(first: bool, second: bool) -> tuple[tuple[float, float], float]:
    """J1 (2505.10320): (the verdict rewards of the two orders of a pair, the consistency reward: 1 if both are right).

    >>> both_orders(True, False), both_orders(True, True), both_orders(False, False)
    (((1.0, 0.0), 0.0), ((1.0, 1.0), 1.0), ((0.0, 0.0), 0.0))
    """
    return (float(first), float(second)), float(first and second)


def summed(scores_KN: np.ndarray) -> np.ndarray:
    """[K, N] -> [N]: the vote of K judgements of N completions is the sum of their scores (2504.02495).

    >>> summed(np.array([[8, 6], [5, 7], [9, 4]])).tolist()
    [22, 17]
    """
    return scores_KN.sum(0)


def best_half(meta_K: np.ndarray) -> np.ndarray:
    """Indices of the half of K judgements that a meta reward model scores highest, in order; at least one, and of equal
    scores the earlier one.

    >>> best_half(np.array([0.1, 3.0, -1.0, 2.0])).tolist(), best_half(np.array([1.0])).tolist()
    ([1, 3], [0])
    """
    return np.sort(np.argsort(-meta_K, kind="stable")[: max(1, len(meta_K) // 2)])


def mean_yes(logp_yes_K: np.ndarray) -> float:
    """GenRM (2408.15240): the mean of p(Yes) over K judgements, each p(Yes) given that judgement's reasoning.

    >>> mean_yes(np.log(np.array([0.5, 1.0])))
    0.75
    """
    return float(np.exp(logp_yes_K).mean())


@dataclass(frozen=True, kw_only=True)
class JudgeFormat:
    """One paper's form of judging."""

    name: str
    paper: str
    sides: int
    """Completions that a judgement sees."""
    verdict: Callable[[Scores], str]
    """The text of a verdict, from the scores of the sides: 1 to 10 for two sides, 1 (good) or 0 for a single one."""
    read: Callable[[str], Scores | None]
    """The scores in a text's verdict; None where there is none."""
    pays: Callable[[Scores | None, int], float]
    """The reward of a verdict, from its scores and the side that is truly better (of one completion: 1 good, 0 bad)."""
    ends: tuple[str, ...]
    """Two verdicts as text: the first prefers the first side, or calls the one completion good; the second does not."""
    consistency: bool = False
    """Whether the other order of a pair is judged too, and pays half of the reward where both are right."""
    principles: bool = False
    """Whether the judge writes what it weighs before it weighs it."""


def _letter(scores: Scores) -> str:
    """The verdict `[[A]]` or `[[B]]` for the side with the higher score."""
    return f"[[{NAMES[int(scores[1] > scores[0])]}]]"


FORMATS: dict[str, JudgeFormat] = {
    f.name: f
    for f in (
        JudgeFormat(
            name="genrm",
            paper="2408.15240",
            sides=1,
            verdict=lambda scores: YES if scores[0] > 0.5 else NO,
            read=read_yes,
            pays=right_or_nothing,
            ends=(YES, NO),
        ),
        JudgeFormat(
            name="j1",
            paper="2505.10320",
            sides=2,
            verdict=_letter,
            read=read_choice,
            pays=right_or_nothing,
            ends=("[[A]]", "[[B]]"),
            consistency=True,
        ),
        JudgeFormat(
            name="rm_r1",
            paper="2505.02387",
            sides=2,
            verdict=lambda scores: f"<answer>{_letter(scores)}</answer>",
            read=read_last_characters,
            pays=right_or_minus_one,
            ends=("<answer>[[A]]</answer>", "<answer>[[B]]</answer>"),
        ),
        JudgeFormat(
            name="grm",
            paper="2504.02495",
            sides=2,
            verdict=lambda scores: rf"\boxed{{{scores[0]:.0f}, {scores[1]:.0f}}}",
            read=read_boxed,
            pays=right_or_minus_one,
            ends=(r"\boxed{10, 1}", r"\boxed{1, 10}"),
            principles=True,
        ),
    )
}
"""Each form by its name."""


def judge_format(name: str) -> JudgeFormat:
    """The form of that name. ConfigError gives the nearest one."""
    if name not in FORMATS:
        raise ConfigError(f"env judge: format={name!r} is no form of judging: {nearest(name, FORMATS)}")
    return FORMATS[name]


def judge_prompt(instruction: str, question: str, completions: Sequence[str]) -> str:
    """Returns the prompt that the judge is shown. It is a function of these alone, so no truth can be in it.

    >>> judge_prompt("", "<3,8>", ("hi 8", "3"))
    '<3,8>\\nA:hi 8\\nB:3\\n'
    """
    lines = [f"{name}:{text}" for name, text in zip(NAMES, completions, strict=False)]
    return "\n".join([*([instruction] if instruction else []), question, *lines, ""])
