"""The rules by which verifiers that write their reasoning judge the steps of an answer: ThinkPRM and GenPRM
(docs/design/papers.md, C06).

A verifier sees a question and an answer up to the end of a step, writes what it thinks of the steps, and ends with Yes
or No. The step's score is p(Yes) / (p(Yes) + p(No)) after that reasoning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.environment.judged.judge_rules import NO, YES, Scores, read_yes
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.thoughts import spoken

RIGHT, WRONG = "ok", "no"
"""Words that a verifier writes behind a step that it checked."""
# `\boxed{Yes}` or `\boxed{No}`.
_BOXED_YES = re.compile(rf"\\boxed\{{({YES}|{NO})\}}")


def read_boxed_yes(text: str) -> Scores | None:
    r"""GenPRM: the last `\boxed{Yes}` (1) or `\boxed{No}` (0).

    >>> read_boxed_yes(r"7+5=12 \boxed{Yes}"), read_boxed_yes("Yes")
    ((1.0,), None)
    """
    last_box = _BOXED_YES.findall(spoken(text))[-1:]
    return (float(last_box[0] == YES),) if last_box else None


def chance_of_yes(logp_yes: float, logp_no: float) -> float:
    """p(Yes) / (p(Yes) + p(No)) (2504.16828).

    >>> round(chance_of_yes(math.log(0.6), math.log(0.2)), 12)
    0.75
    """
    # The result is sigmoid(-gap). Of its two forms, the one whose exponential cannot overflow is used.
    gap = logp_no - logp_yes
    return 1 / (1 + math.exp(gap)) if gap < 0 else math.exp(-gap) / (1 + math.exp(-gap))


@dataclass(frozen=True, kw_only=True)
class VerifyFormat:
    """One paper's form of verifying a step."""

    name: str
    paper: str
    every: bool
    """True if all steps are checked in order, up to the first wrong one. False if only the last step is checked, and
    the steps before it are taken as right."""
    read: Callable[[str], Scores | None]
    """The score in a text's verdict, 1 or 0; None where there is none."""
    ends: tuple[str, str]
    """The verdicts: the step is right, it is not."""

    def critique(self, answer_steps: Sequence[str], right_steps: Sequence[str]) -> str:
        """Returns the text that is written before the verdict.

        It has the right form of each step that is checked. With `every`, a word behind each says whether the answer
        has the same step.

        >>> FORMATS["thinkprm"].critique(["3+4=7", "7+5=13", "13+1=14"], ["3+4=7", "7+5=12", "12+1=13"])
        '3+4=7 ok 7+5=12 no'
        >>> FORMATS["genprm"].critique(["3+4=7", "7+5=13"], ["3+4=7", "7+5=12"])
        '7+5=12'
        """
        if not self.every:
            return right_steps[len(answer_steps) - 1] if len(answer_steps) <= len(right_steps) else WRONG
        words: list[str] = []
        for i, step in enumerate(answer_steps):
            right = i < len(right_steps) and step == right_steps[i]
            words += [*right_steps[i : i + 1], RIGHT if right else WRONG]
            if not right:
                break
        return " ".join(words)


FORMATS: dict[str, VerifyFormat] = {
    f.name: f
    for f in (
        VerifyFormat(name="thinkprm", paper="2504.16828", every=True, read=read_yes, ends=(YES, NO)),
        VerifyFormat(
            name="genprm",
            paper="2504.00891",
            every=False,
            read=read_boxed_yes,
            ends=(rf"\boxed{{{YES}}}", rf"\boxed{{{NO}}}"),
        ),
    )
}
"""Each form by its name."""


def verify_format(name: str) -> VerifyFormat:
    """The form of that name. ConfigError gives the nearest one."""
    if name not in FORMATS:
        raise ConfigError(f"env verify: format={name!r} is no form of verifying: {nearest(name, FORMATS)}")
    return FORMATS[name]


def verify_prompt(instruction: str, question: str, beginning: str) -> str:
    """Returns the prompt that the verifier is shown. It is a function of these alone, so no truth can be in it.

    >>> verify_prompt("", "<3+4+5>", "3+4=7;")
    '<3+4+5>\\n3+4=7;\\n'
    """
    return "\n".join([*([instruction] if instruction else []), question, beginning, ""])
