"""Replies to a question, judged by a hidden taste over correctness, politeness and length."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from posttrain.core.abilities import Judgements
from posttrain.core.ports import Attempt
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.judged.synthetic_preferences import Taste
from posttrain.environment.single import require
from posttrain.verifier.integers import last_integer

# (the numbers in sorted order, whether the task asks for the order too)
Key = tuple[tuple[int, ...], bool]

POLITE = ("hi", "ty", "sir")
"""Polite words: a greeting, thanks, and a form of address."""
FILLERS = ("so", "um")
"""Words that only make a reply longer."""
WEIGHTS = {"correctness": 0.4, "politeness": 0.3, "length": 0.3}
"""Weights of what the judges want. A wrong reply is worth 0.6 at most."""
WORST_RIGHT = 0.6
"""A reply that is worth no more than this scores 0: a wrong reply can be worth as much."""
BEST_POLITE = 2
"""The number of polite words that is best. One more is as bad as one less, and four are as bad as none."""
TOLERANCE = 6
"""A reply that is this many characters longer or shorter than wanted gets nothing for its length."""
POLITE_SHARES = (0.3, 0.35, 0.25, 0.1)
"""Shares of the written replies with 0, 1, 2 and 3 polite words. More than two are rare, so the judgements rarely show
that there can be too many."""

FILLER_SHARES = (0.6, 0.25, 0.15)
"""Shares of the written replies with 0, 1 and 2 fillers."""


@dataclass(frozen=True, kw_only=True)
class Replies(GeneratedTasks):
    """Tasks that ask for the largest number: `<3,11,7>` is best answered by `hi 11 ty`, and `<3,11,7?>`, which asks for
    the order as well, by `hi 3<7<11 ty`.

    The judges' taste is hidden from the policy and known to the environment. A reply is worth 0.4 if its last number is
    right, up to 0.3 for politeness (two polite words are best, four are flattery and worth nothing), and up to 0.3 for
    a length near that of the best reply, which depends on the question. The reward is 0 up to a utility of 0.6, which
    is the best that a wrong reply can be worth, and rises from there to 1 for the best reply.

    `noise`, `temperature` and `annotators` change the judgements alone. Two tasks are the same if they have the same
    numbers in any order and ask for the same.
    """

    numbers: int = 3
    """How many numbers there are to choose from."""
    max_number: int = 29
    """Largest number; the smallest is 0. All numbers of a task differ."""
    noise: float = 0.0
    """Share of judgements that are flipped."""
    temperature: float = 0.0
    """Judges decide by Bradley-Terry with this temperature, on the scale of the utility (0..1). 0: without error."""
    annotators: int = 1
    """Number of judges, each with weights of its own. Their mean is the true taste."""
    ranked: int = 4
    """Replies in a ranking."""
    margins: bool = False
    """Whether pairs say by how much the judge preferred one."""

    def __post_init__(self) -> None:
        require(2 <= self.numbers <= 10, self.name, f"numbers={self.numbers}: must lie in 2..10")
        least = self.numbers + 2
        require(
            least <= self.max_number <= 10**6, self.name, f"max_number={self.max_number}: must lie in {least}..1000000"
        )
        require(0 <= self.noise <= 0.5, self.name, f"noise={self.noise}: must lie in 0..0.5")
        require(0 <= self.temperature <= 100, self.name, f"temperature={self.temperature}: must lie in 0..100")
        require(1 <= self.annotators <= 1000, self.name, f"annotators={self.annotators}: must lie in 1..1000")
        require(2 <= self.ranked <= 8, self.name, f"ranked={self.ranked}: must lie in 2..8")

    @property
    def name(self) -> str:
        return "replies"

    @property
    def alphabet(self) -> str:
        letters = sorted(set("".join((*POLITE, *FILLERS))))
        return "0123456789,<>? " + "".join(letters)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        numbers = [int(n) for n in rng.choice(self.max_number + 1, size=self.numbers, replace=False)]
        ordered = bool(rng.random() < 0.5)
        prompt = f"<{','.join(map(str, numbers))}{'?' if ordered else ''}>"
        return Task(id=name, prompt=prompt, answer=str(max(numbers)), info={"numbers": numbers, "ordered": ordered})

    def key(self, task: Task) -> Key:
        return tuple(sorted(task.info["numbers"])), task.info["ordered"]

    @cached_property
    def taste(self) -> Taste:
        """The judges: what they want, and their errors."""
        settings = {name: getattr(self, name) for name in ("noise", "temperature", "annotators", "ranked", "margins")}
        return Taste(features=features, weights=WEIGHTS, **settings)

    @property
    def judgements(self) -> Judgements:
        return self.taste.judgements(self.written)

    def verify(self, attempt: Attempt) -> Verdict:
        """The score rises with the true utility: 0 for a wrong reply, 1 for the best one."""
        values = features(attempt.task, attempt.text)
        utility = self.taste.utility(attempt.task, attempt.text)
        # The sum of the weights may differ from 1 in its last bit, and the best reply has to score exactly 1.
        score = 1.0 if all(f == 1.0 for f in values.values()) else max(0.0, (utility - WORST_RIGHT) / (1 - WORST_RIGHT))
        kind = "" if score == 1.0 else "manner" if values["correctness"] else "wrong"
        why = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        return Verdict.value(score, kind, "" if score == 1.0 else why)

    @property
    def pays_parts(self) -> bool:
        return True

    def gold(self, task: Task) -> tuple[str, ...]:
        return (best_reply(task),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The best reply with another number of the task."""
        wrong = min(task.info["numbers"])
        core = "<".join(map(str, sorted(task.info["numbers"], reverse=True))) if task.info["ordered"] else str(wrong)
        return (f"hi {core} ty",)

    def written(self, task: Task, rng: np.random.Generator) -> str:
        """A reply of any quality: half of them are right, polite and long to different degrees."""
        numbers: list[int] = task.info["numbers"]
        ordered = sorted(numbers)
        # Half of the replies are right; a wrong one ends in another number of the task.
        last = ordered[-1] if rng.random() < 0.5 else ordered[int(rng.integers(len(ordered) - 1))]
        in_order = rng.random() < 0.5
        core = "<".join(map(str, [*(n for n in ordered if n != last), last])) if in_order else str(last)
        words = [POLITE[int(rng.integers(len(POLITE)))] for _ in range(_count(rng, POLITE_SHARES))]
        words += [FILLERS[int(rng.integers(len(FILLERS)))] for _ in range(_count(rng, FILLER_SHARES))]
        rng.shuffle(words)
        words_before = int(rng.integers(len(words) + 1))
        return " ".join([*words[:words_before], core, *words[words_before:]])

    @property
    def styles(self) -> tuple[str, ...]:
        """`reply`: the best reply, or with `wrong` one of any lower quality, as those that are judged."""
        return ("reply",)

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        """(prompt, completion)."""
        self._check_style(style)
        if rng.random() >= wrong:
            return str(task.prompt), best_reply(task)
        while True:
            text = self.written(task, rng)
            if min(features(task, text).values()) < 1:
                return str(task.prompt), text


def _count(rng: np.random.Generator, shares: tuple[float, ...]) -> int:
    """A random index into `shares`, each with its share as the probability. The shares sum to 1."""
    return min(bisect_right(tuple(accumulate(shares)), rng.random()), len(shares) - 1)


def best_reply(task: Task) -> str:
    """The best reply: right, with two polite words, and as long as wanted."""
    ordered = "<".join(map(str, sorted(task.info["numbers"])))
    return f"hi {ordered if task.info['ordered'] else task.answer} ty"


def features(task: Task, text: str) -> Mapping[str, float]:
    """Returns the features that the judges look at, each in 0..1.

    >>> task = Task(id="a", prompt="<3,11,7>", answer="11", info={"numbers": [3, 11, 7], "ordered": False})
    >>> features(task, "hi 11 ty")
    {'correctness': 1.0, 'politeness': 1.0, 'length': 1.0}
    >>> features(task, "hi 7")
    {'correctness': 0.0, 'politeness': 0.5, 'length': 0.333}
    """
    polite = sum(word in POLITE for word in re.findall(r"[a-z]+", text))
    away = abs(len(text) - len(best_reply(task)))
    return {
        "correctness": float(last_integer(text) == task.answer),
        "politeness": max(0.0, 1 - abs(polite - BEST_POLITE) / BEST_POLITE),
        "length": round(max(0.0, 1 - away / TOLERANCE), 3),
    }
