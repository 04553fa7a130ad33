"""Verifying steps as an environment: is an answer right up to the end of this step, in the form of a paper."""

from __future__ import annotations

import string
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.core.abilities import Abilities, Judging
from posttrain.core.content import conversation
from posttrain.core.measure.answer_steps import steps_of_text
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import SOLVED, Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.judged.judge_rules import chosen, right_or_nothing
from posttrain.environment.judged.judged_world import inner_world, task_at
from posttrain.environment.judged.verify_rules import RIGHT, WRONG, VerifyFormat, verify_format, verify_prompt
from posttrain.environment.single import SingleTurn, require
from posttrain.system.errors import ConfigError

WORLD_SEED = 20_261_126
"""Seed of the world's tasks. Which answers there are to verify does not depend on the run's seed."""

DRAWS = 64
"""How many answers are drawn until one is right, or wrong, as wanted."""


@dataclass(frozen=True, kw_only=True)
class VerifySteps(GeneratedTasks):
    """Answers of another world of the gallery, which judges every step, are shown to the policy up to the end of a
    step. It writes how it checks the steps, and whether all of them are right: 1 for the right verdict, else 0.

    Half of the beginnings are right. The world's held-out tasks are in none of them, so what is learned here can judge
    a policy that is measured on these.
    """

    format: str = "thinkprm"
    """thinkprm: every step is checked up to the first wrong one, then Yes or No (2504.16828). genprm: the last step
    alone is checked, after right ones, then `\\boxed{Yes}` or `\\boxed{No}` (2504.00891)."""
    world: str = "arithmetic min_terms=3 max_terms=4"
    """The environment whose answers are verified, and its settings, separated by spaces. It must judge steps
    (`judge_steps=true`) and write answers in steps, right ones and wrong ones."""
    world_heldout: int = 200
    """Held-out tasks of that world, of which no answer is shown: at least as many as a run holds out whose policy this
    one judges."""
    separator: str = ";"
    """The text that ends a step."""
    wrong: float = 0.6
    """Share of the written answers that have a wrong step."""
    instruction: str = ""
    """Stands before the question, for a model that can read it."""

    def __post_init__(self) -> None:
        verify_format(self.format)
        require(0 < self.wrong < 1, self.name, f"wrong={self.wrong:g}: must lie between 0 and 1")
        require(bool(self.separator), self.name, "separator is empty: give the text that ends a step")

    @property
    def name(self) -> str:
        return "verify"

    @property
    def form(self) -> VerifyFormat:
        return verify_format(self.format)

    @cached_property
    def verified_world(self) -> SingleTurn:
        """The environment whose answers are verified. ConfigError if there is none, or it judges no steps."""
        hint = ". It must be an environment that judges steps, with the setting judge_steps"
        world = inner_world(
            self.name, self.world, WORLD_SEED, heldout=self.world_heldout, more={"judge_steps": True}, hint=hint
        )
        if not world.judged_style:
            raise ConfigError(
                f"env verify: world={self.world!r} writes no right and wrong answers in steps (judged_style): use"
                " arithmetic"
            )
        return world

    @property
    def alphabet(self) -> str:
        further = "\n " + self.separator + RIGHT + WRONG + string.digits + self.instruction + "".join(self.form.ends)
        return "".join(dict.fromkeys(self.verified_world.alphabet + further))

    def _steps(self, inner: Task, text: str) -> tuple[bool, ...]:
        """Returns for each step of this answer, in order, whether the world judges it right."""
        attempt = Attempt(inner, (text,), Stop.SAID, lambda characters: characters)
        judged = sorted(self.verified_world.steps(attempt), key=lambda j: j.end or 0)
        return tuple((j.verdict.score or 0.0) >= SOLVED for j in judged)

    def draw(self, rng: np.random.Generator, name: str) -> Task | None:
        """A task whose beginning is right or wrong with equal probability; None if none was found."""
        wanted = bool(rng.random() < 0.5)
        for _ in range(DRAWS):
            if (beginning := self._beginning(rng, wanted)) is not None:
                return self._task(name, *beginning, int(wanted))
        return None

    def _beginning(self, rng: np.random.Generator, wanted: bool) -> tuple[int, str] | None:
        """(place of a task of the world, an answer to it up to the end of a step); None where it is not as wanted."""
        index = int(rng.integers(2**40))
        inner, world = task_at(self.verified_world, index), self.verified_world
        text = str(world.demonstrate(inner, world.judged_style, rng, self.wrong)[1])
        steps, right = steps_of_text(text, self.separator), self._steps(inner, text)
        upto = 1 + int(rng.integers(len(steps)))
        # If the world divides the answer into other steps, it is not known which verdict belongs to which step.
        if len(right) != len(steps) or all(right[:upto]) != wanted:
            return None
        # A form that checks the last step alone takes the steps before it as right.
        if not self.form.every and not all(right[: upto - 1]):
            return None
        return index, "".join(steps[:upto])

    def _task(self, task_id: str, index: int, beginning: str, good: int) -> Task:
        """A task. `good` is 1 where all steps are right, and is not shown."""
        return Task(
            id=task_id,
            prompt=self.asked(conversation(task_at(self.verified_world, index).prompt), (beginning,)),
            answer=self.form.ends[1 - good],
            info={"index": index, "beginning": beginning, "good": good},
        )

    def asked(self, question: str, texts: Sequence[str]) -> str:
        """Returns the prompt that a verifier is shown."""
        return verify_prompt(self.instruction, question, texts[0])

    def regraded(self, task: Task) -> Task:
        """The same task as if the other verdict were right."""
        return self._task(task.id, task.info["index"], task.info["beginning"], 1 - task.info["good"])

    def key(self, task: Task) -> Hashable:
        return task.prompt

    def verify(self, attempt: Attempt) -> Verdict:
        good, scores = int(attempt.task.info["good"]), self.form.read(attempt.text)
        kind = "" if chosen(scores) == good else "unread" if scores is None else "wrong"
        return Verdict.value(right_or_nothing(scores, good), kind)

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (next(end for end in self.form.ends if end != task.answer),)

    @cached_property
    def _abilities(self) -> Abilities:
        judging = Judging(
            sides=1,
            prompt=self.asked,
            read=self.form.read,
            ends=self.form.ends,
            regraded=self.regraded,
            better=lambda task: int(task.info["good"]),
            separator=self.separator,
        )
        return replace(super()._abilities, judging=judging)

    # --- texts -------------------------------------------------------------------------------------------------------

    @property
    def styles(self) -> tuple[str, ...]:
        """`verdict`: the verdict alone. `critique`: the steps that are checked, as they should be, and the verdict."""
        return ("verdict", "critique")

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, verification). A wrong one ends in the verdict that does not follow."""
        self._check_style(style)
        verdict = (self.distractor if rng.random() < wrong else self.gold)(task)[0]
        return str(task.prompt), verdict if style == "verdict" else f"{self.critique(task)} {verdict}"

    def critique(self, task: Task) -> str:
        """Returns the text that is written before the verdict."""
        inner, world = task_at(self.verified_world, task.info["index"]), self.verified_world
        rng = np.random.default_rng(0)  # the right answer does not depend on what is drawn
        solution: Any = world.demonstrate(inner, world.judged_style, rng, 0.0)[1]
        shown, right_steps = (self._bare(t) for t in (task.info["beginning"], solution))
        return self.form.critique(shown, right_steps)

    def _bare(self, text: str) -> list[str]:
        """The steps of a text without the separators at their ends."""
        return [s.removesuffix(self.separator) for s in steps_of_text(text, self.separator)]
