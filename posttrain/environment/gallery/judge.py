"""Judging as an environment: which of two completions is better, or whether one is good, in the form of a paper."""

from __future__ import annotations

import string
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.core.abilities import Abilities, Judgements, Judging
from posttrain.core.content import conversation
from posttrain.core.judgements import Label, Pair
from posttrain.core.ports import Attempt, Talk
from posttrain.core.seeds import generator
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.judged.judge_bias import biases
from posttrain.environment.judged.judge_rules import (
    HIGHEST,
    LOWEST,
    JudgeFormat,
    Scores,
    both_orders,
    chosen,
    judge_format,
    judge_prompt,
)
from posttrain.environment.judged.judged_world import inner_world, task_at
from posttrain.environment.single import HELDOUT_SEED, SingleTurn, require
from posttrain.system.errors import ConfigError
from posttrain.verifier.integers import last_integer

OTHER_ORDER = "other order"
"""The seat that judges the same pair with its sides exchanged."""
AGREEMENT = "agreement"
"""The source that says whether a verdict is that of the truth. It is measured, and pays nothing."""
LEVELS = 4
"""A feature is written as a whole number from 0 to this."""
WORLD_SEED = 20_261_123
"""Seed of the judged world's tasks. Which pairs there are does not depend on the run's seed."""


@dataclass(frozen=True, kw_only=True)
class Judge(GeneratedTasks):
    """Completions of another world of the gallery, whose true utility is known, are shown to the policy, which writes
    its reasoning and a verdict. It is rewarded by the rule of `format`; the utility is in no prompt.

    Which side comes first is drawn for each pair. Held-out pairs are judged in both orders, and no pair of them is in
    training, in either order. Held-out accuracy is the agreement with the truth, whatever the rule pays.
    """

    format: str = "j1"
    """genrm: is this completion good, Yes or No (2408.15240). j1: which is better, `[[A]]` or `[[B]]`, and half of the
    reward only where the other order is judged right too (2505.10320). rm_r1: 1 or -1 by an answer in the last 80
    characters (2505.02387). grm: principles, a critique and a score of 1 to 10 for each, 1 or -1 (2504.02495)."""
    world: str = "replies numbers=2 max_number=9"
    """The judged environment and its settings, separated by spaces. It must know the utility of completions."""
    gap: float = 0.2
    """Pairs whose utilities differ by less are left out."""
    instruction: str = ""
    """Stands before the question, for a model that can read it."""

    def __post_init__(self) -> None:
        judge_format(self.format)
        # With such a gap the sides' scores in whole numbers (`_scored`) always differ (9 * 1/8 > 1), so no critique
        # ends in a tie.
        require(1 / 8 <= self.gap <= 0.5, self.name, f"gap={self.gap:g}: must lie in 0.125..0.5")

    @property
    def name(self) -> str:
        return "judge"

    @property
    def form(self) -> JudgeFormat:
        return judge_format(self.format)

    @cached_property
    def judged_world(self) -> SingleTurn:
        """The environment whose completions are judged. ConfigError if there is none, or it knows no utility."""
        world = inner_world(self.name, self.world, WORLD_SEED, heldout=0)
        offered = world.abilities.judgements
        if offered is None or offered.utility is None or offered.features is None or "pair" not in offered.kinds:
            raise ConfigError(
                f"env judge: world={self.world!r}: this environment does not know what its completions are worth: use"
                " replies, or one whose judgements have a utility and features (environment.taste)"
            )
        return world

    @property
    def _offered(self) -> Judgements:
        offered = self.judged_world.abilities.judgements
        assert offered is not None
        return offered

    @property
    def alphabet(self) -> str:
        ends = "".join(self.form.ends)
        letters = "".join(_initials(self._features(task_at(self.judged_world, 0), "")).values())
        further = "AB:\n =;,." + string.digits + self.instruction + letters + ends
        return "".join(dict.fromkeys(self.judged_world.alphabet + further))

    def _features(self, task: Task, text: str) -> Mapping[str, float]:
        features = self._offered.features
        assert features is not None
        return features(task, text)

    def _utility(self, task: Task, text: str) -> float:
        utility = self._offered.utility
        assert utility is not None
        return utility(task, text)

    def draw(self, rng: np.random.Generator, name: str) -> Task | None:
        """A task from a random place of the judged world; None if the drawn completions do not fit."""
        # A task stores only this place in the source of the world. There are so many that hardly one is drawn twice.
        index = int(rng.integers(2**40))
        inner = task_at(self.judged_world, index)
        # `wanted` is drawn first, and a completion that does not fit is refused (None), so that half of the completions
        # are good whatever the world writes.
        if self.form.sides == 1:
            wanted = bool(rng.random() < 0.5)
            label = self._offered.draw(inner, "label", rng)
            assert isinstance(label, Label)
            good = int(wanted)
            return self._task(name, index, (label.completion,), good, good) if label.good == wanted else None
        pair = self._offered.draw(inner, "pair", rng)
        assert isinstance(pair, Pair)
        true_gap = self._utility(inner, pair.chosen) - self._utility(inner, pair.rejected)
        if abs(true_gap) < self.gap:
            return None
        texts, gold = self._ordered(pair, rng)
        # The judge of the world may err. Then `gold`, the side that was judged better, is not the side that is truly
        # better.
        return self._task(name, index, texts, gold, gold if true_gap > 0 else 1 - gold)

    def _ordered(self, pair: Pair, rng: np.random.Generator) -> tuple[tuple[str, str], int]:
        """The two sides in an order drawn at random, and the place of the chosen one."""
        if rng.random() < 0.5:
            return (pair.chosen, pair.rejected), 0
        return (pair.rejected, pair.chosen), 1

    def _task(self, task_id: str, index: int, texts: tuple[str, ...], gold: int, best: int) -> Task:
        """A task. `gold` is the side that was judged better, and `best` the one that truly is; neither is shown. Of one
        completion they are 1 (good) or 0, so the verdict `ends[0]`, Yes, belongs to 1."""
        return Task(
            id=task_id,
            prompt=self.asked(conversation(task_at(self.judged_world, index).prompt), texts),
            answer=self.form.ends[gold if self.form.sides == 2 else 1 - gold],
            info={"pair": task_id, "index": index, "completions": list(texts), "gold": gold, "best": best},
        )

    def asked(self, question: str, texts: Sequence[str]) -> str:
        """Returns the prompt that a judge is shown."""
        return judge_prompt(self.instruction, question, texts)

    def regraded(self, task: Task) -> Task:
        """The same task as if the other verdict were right."""
        info = task.info
        return self._task(task.id, info["index"], tuple(info["completions"]), 1 - info["gold"], 1 - info["best"])

    def exchanged(self, task: Task, task_id: str) -> Task:
        """The same pair in the other order."""
        info = task.info
        first, second = info["completions"]
        swapped = self._task(task_id, info["index"], (second, first), 1 - info["gold"], 1 - info["best"])
        return replace(swapped, info={**swapped.info, "pair": info["pair"]})

    def key(self, task: Task) -> Hashable:
        return task.prompt

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        """Each pair in both orders, one after the other."""
        rng, tasks = generator(HELDOUT_SEED, f"{self.name}/heldout"), dict[Hashable, Task]()
        while len(tasks) < self.heldout_count:
            task_id = f"{self.name}-heldout-{len(tasks) + 1}"
            task = self._new(rng, task_id, tasks)
            tasks[self.key(task)] = task
            if self.form.sides == 2:
                other = self.exchanged(task, f"{task_id}-other")
                tasks[self.key(other)] = other
        return tuple(tasks.values())[: self.heldout_count]

    @cached_property
    def _held(self) -> frozenset[Hashable]:
        # With an odd number of held-out tasks the other order of the last pair is missing in `heldout`, so the other
        # orders of all of them are made here again.
        both = [self.exchanged(t, t.id) for t in self.heldout] if self.form.sides == 2 else []
        return frozenset(self.key(t) for t in (*self.heldout, *both))

    async def play(self, task: Task, talk: Talk) -> Stop:
        """The policy judges. Where consistency pays, another seat, which is the policy too, judges the other order."""
        talk.see(task.prompt)
        turn = await talk.say()
        if self.form.consistency:
            other = talk.seat(OTHER_ORDER)
            other.see(self.exchanged(task, task.id).prompt)
            talk.leave({"other": (await other.say()).text})
        return turn.stop

    def verify(self, attempt: Attempt) -> Verdict:
        gold, scores = int(attempt.task.info["gold"]), self.form.read(attempt.text)
        right = chosen(scores) == gold
        # `play` leaves the text of the other order. What was not played, such as a demonstration, has none.
        if self.form.consistency and isinstance(attempt.state, Mapping):
            state: Any = attempt.state
            (this_order, _), consistency = both_orders(right, chosen(self.form.read(state["other"])) == 1 - gold)
            score = (this_order + consistency) / 2
        else:
            score = self.form.pays(scores, gold)
        if right:
            return Verdict.value(score, "" if score == 1 else "inconsistent")
        return Verdict.value(score, "unread" if scores is None else "tie" if chosen(scores) is None else "wrong")

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        agrees = chosen(self.form.read(attempt.text)) == attempt.task.info["best"]
        agreement = Judged(AGREEMENT, 1.0, Verdict.value(float(agrees)), measured=True)
        return (*await super().judge(attempt), agreement)

    @property
    def pays_parts(self) -> bool:
        # One order of two may pay half, and some forms pay -1. So a wrong verdict need not earn exactly 0.
        return self.form.consistency or self.form.pays(None, 0) != 0

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (next(end for end in self.form.ends if end != task.answer),)

    @cached_property
    def _abilities(self) -> Abilities:
        form = self.form
        judging = Judging(
            sides=form.sides,
            prompt=self.asked,
            read=form.read,
            ends=form.ends,
            regraded=self.regraded,
            better=lambda task: int(task.info["gold"]),
        )
        return replace(
            super()._abilities,
            judging=judging,
            measures=(lambda groups: biases(groups, form.read)) if form.sides == 2 else None,
            seats=(lambda task: {OTHER_ORDER: self.gold(self.exchanged(task, task.id))}) if form.consistency else None,
        )

    # --- texts -------------------------------------------------------------------------------------------------------

    @property
    def styles(self) -> tuple[str, ...]:
        """`verdict`: the verdict alone. `critique`: an answer of one's own, the features of each side, its score, and
        the verdict."""
        return ("verdict", "critique")

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, judgement). A wrong critique ends in the verdict that does not follow from it."""
        self._check_style(style)
        false = bool(rng.random() < wrong)
        if style == "verdict":
            return str(task.prompt), (self.distractor if false else self.gold)(task)[0]
        return str(task.prompt), self.critique(task, false)

    def critique(self, task: Task, false: bool = False) -> str:
        """A judgement: the world's own answer, what each side answers, its features and score, and the verdict. A false
        one ends in the verdict that does not follow."""
        inner = task_at(self.judged_world, task.info["index"])
        texts = task.info["completions"]
        scores = tuple(float(_scored(self._utility(inner, t))) for t in texts)
        sides = [f"{_answered(inner, t)}{self._levels(inner, t)}={s:.0f}" for t, s in zip(texts, scores, strict=True)]
        world_answer = [] if inner.answer is None else [str(inner.answer)]
        # The features in the order in which they are weighed.
        initials = "".join(_initials(self._features(inner, "")).values()) + ";"
        principles = [initials] if self.form.principles else []
        # What the verdict says: the scores of two sides, or 1 (good) or 0 of a single completion.
        if len(scores) == 2:
            verdict_scores: Scores = scores[::-1] if false else scores
        else:
            good = self._utility(inner, texts[0]) >= self._offered.good
            verdict_scores = (float(good != false),)
        return " ".join([*principles, *world_answer, *sides, self.form.verdict(verdict_scores)])

    def _levels(self, inner: Task, text: str) -> str:
        """Each feature of a completion as its initial and a whole number, such as `c4p2l3`."""
        features = self._features(inner, text)
        initials = _initials(features)
        return "".join(f"{initials[name]}{round(LEVELS * value)}" for name, value in features.items())


def _answered(task: Task, text: str) -> str:
    """Returns the answer of a completion, where the world's answers are whole numbers; else ''."""
    return (last_integer(text) or "") if last_integer(str(task.answer)) is not None else ""


def _scored(utility: float) -> int:
    """A utility in 0..1 as a whole number from 1 to 10."""
    return round(LOWEST + utility * (HIGHEST - LOWEST))


def _initials(features: Mapping[str, float]) -> Mapping[str, str]:
    """The first letters of the features, or their names where two begin alike."""
    first = {name[0] for name in features}
    return {name: name[0] if len(first) == len(features) else name for name in features}
