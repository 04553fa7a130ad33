"""Generative judges of finished episodes: a trained judge reads answers, writes its reasons and votes. It compares the
answers of a group in pairs, each in both orders, or says of single answers whether each is good, `votes` times. The
votes are in the verdict's `why`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core import seeds
from posttrain.core.abilities import Judging
from posttrain.core.batch import Packed
from posttrain.core.content import conversation
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import shown_segment
from posttrain.core.types import Episode, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.judged.judge_rules import best_half, chosen, mean_yes
from posttrain.environment.templates.renderer import Renderer
from posttrain.role.judges.reward_judge import JudgeMember
from posttrain.role.learning.logprob_tolerance import READ
from posttrain.system.concurrency import LoopThread, together
from posttrain.system.errors import DataError, InvariantError
from posttrain.verifier.thoughts import whole

DRAWS = 3
"""How often a judgement is drawn until it has a verdict."""
UNREAD, LEFT_OUT = "-", "*"
"""Marks of a vote in `why`: it has no verdict; the meta reward model left it out."""


@dataclass(frozen=True)
class Vote:
    """One judgement of one comparison."""

    sides: tuple[int, ...]
    """The answers in the order in which they were shown, as places in the group."""
    ids: np.ndarray
    """int32: the prompt, and then what the judge said from `spoken` on."""
    spoken: int
    scores: tuple[float, ...] | None
    """Score that the vote gives each side; None where it has no verdict."""
    text: str
    why: str = ""
    """The reason why there is no judgement at all; '' where there is one."""


@dataclass(eq=False)
class GenerativeJudge:
    """`core.ports.EpisodeJudge` of a policy that learned to judge. The score of an answer is a mean over its votes. A
    vote counts 1 (won), 0 (lost) or 1/2 (tie); or its points, whose mean ranks answers as their sum does (2504.02495);
    or, where one answer is judged alone, p(Yes). An answer that is alone in its group is compared with itself."""

    name: str
    weight: float
    judging: Judging
    sampler: Sampler
    """The judge's own engine."""
    renderer: Renderer
    """The judge's own tokenizer."""
    sampling: Sampling
    """The sampling contract of the judgements, resolved."""
    seed: int
    votes: int = 1
    rivals: int = 0
    """Each answer is compared with this many answers after it and before it, on a circle of its group; 0: with all."""
    meta: JudgeMember | None = None
    """A reward model of judgements. Of the votes about one comparison, the half that it scores highest counts."""
    resolution: float = RESOLUTION
    """Relative difference up to which two scores count as equal."""
    measured: bool = False
    """Whether its score is measured and not paid."""
    line: str = ""
    """Description of the judge and of what it reads, as a line for people."""
    _thread: LoopThread = field(default_factory=lambda: LoopThread("posttrain-judge"))
    """Judges in an event loop of its own, so that the episodes in the main loop are not delayed."""

    @property
    def compares(self) -> bool:
        """True where a verdict about an answer depends on the others of its group."""
        return self.judging.sides == 2

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        verdicts: list[Verdict] = await self.run(self.verdicts(episodes))
        # None and False: each is about the whole answer, not paid at a token.
        return [
            (Judged(self.name, self.weight, v, None, False, self.resolution, self.measured, by_model=True),)
            for v in verdicts
        ]

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._thread.run(work)

    def close(self) -> None:
        self._thread.close()

    async def verdicts(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """The verdict about each answer of a group."""
        # Indices: n counts comparisons, i answers of the group, k the votes about one comparison. yes[n][k] is the
        # log p(Yes) of a vote.
        compared = comparisons(len(episodes), self.judging.sides, self.rivals)
        votes = await together([self._votes(episodes, sides) for sides in compared])
        kept = [self.kept(each) for each in votes]
        yes = await together([self._yes(each) for each in votes]) if self.judging.sides == 1 else []
        out: list[Verdict] = []
        for i, episode in enumerate(episodes):
            its_comparisons = [n for n, sides in enumerate(compared) if i in sides]
            why = " ".join(self._written(episodes, i, votes[n], kept[n]) for n in its_comparisons)
            values = [v for n in its_comparisons for v in self._values(i, votes[n], kept[n])]
            if yes and values:
                # The mean chance of Yes is finer than the share of votes that said Yes.
                values = [mean_yes(np.array([yes[n][k] for k in kept[n]])) for n in its_comparisons]
            out.append(self._verdict(episode, values, why, [v for n in its_comparisons for v in votes[n]]))
        return out

    async def _votes(self, episodes: Sequence[Episode], sides: tuple[int, ...]) -> list[Vote]:
        """All votes about one comparison: `votes` in each order."""
        # Judges prefer the first or the second place: both orders are asked, so that this cancels.
        orders = [sides] if len(sides) == 1 else [sides, sides[::-1]]
        order_and_vote = [(order, n, k) for n, order in enumerate(orders) for k in range(self.votes)]
        return await together([self._vote(episodes, *numbers) for numbers in order_and_vote])

    async def _vote(self, episodes: Sequence[Episode], sides: tuple[int, ...], order: int, vote: int) -> Vote:
        """Vote number `vote` about the answers at `sides`, shown in this order."""
        first = episodes[sides[0]]
        task = first.task
        question = task.prompt if isinstance(task.prompt, str) else conversation(task.prompt)
        # The random numbers follow from the siblings and the order in which they are shown, not from list positions.
        siblings = [episodes[i].sibling for i in sides]
        prompt = self.judging.prompt(question, [whole(episodes[i].text) for i in sides])
        try:
            return await self.vote(prompt, sides, task.id, first.visit, *siblings, order, vote)
        # A prompt that is too long is a vote without a verdict, and an answer without any is `failed`, never bad.
        except DataError as error:
            return Vote(sides, np.zeros(0, np.int32), 0, None, "", str(error))

    async def vote(self, prompt: str, sides: tuple[int, ...], *place: seeds.Coordinate) -> Vote:
        """One judgement of this prompt, with the random numbers of `place` (the task's id first), drawn up to `DRAWS`
        times until it has a verdict. DataError where the prompt cannot be encoded, or is too long."""
        ids = self.renderer.prompt(prompt, str(place[0]))
        drawn: Vote | None = None
        # Each draw has a random place of its own: with the same place the judge would write the same text again.
        for draw in range(DRAWS):
            turn = await self.sampler.generate(ids, self.sampling, seeds.key(self.seed, "judge", *place, draw))
            text = self.renderer.text(turn.ids)
            drawn = Vote(sides, np.concatenate([ids, turn.ids]), len(ids), self.judging.read(text), text)
            if drawn.scores is not None:
                break
        assert drawn is not None
        return drawn

    async def _yes(self, votes: Sequence[Vote]) -> list[float]:
        """log p(Yes) of each vote about one answer, given its own reasoning; -inf where it has no verdict."""
        return await together([self._log_yes(v) for v in votes])

    async def _log_yes(self, vote: Vote) -> float:
        return -np.inf if vote.scores is None else await self.log_says(vote, self.judging.ends[0])

    async def log_says(self, vote: Vote, end: str) -> float:
        """log p(this verdict) after the reasoning of a vote that has a verdict."""
        # Before the last verdict in the text, since the reasoning may name both. A verdict is a whole word: the No of
        # "Note" is none.
        ends = "|".join(rf"\b{e}\b" if e.isalpha() else re.escape(e) for e in self.judging.ends)
        before = vote.text[: max((m.start() for m in re.finditer(ends, vote.text)), default=len(vote.text))]
        ids = self._verdict_ids(before + end)
        # True as long as `_verdict_ids` encodes with this renderer. Ids of another tokenizer would be scored silently.
        tokens_are_of_text(self.renderer, ids, before + end)
        # logp[i] belongs to token i + 1, so the judgement's tokens begin at spoken - 1. The tokens of the
        # reasoning are the same for every verdict. The verdict begins where `ids` and `before` differ.
        logp = await self.sampler.score(np.concatenate([vote.ids[: vote.spoken], ids]))
        return float(logp[vote.spoken - 1 + _shared(self.renderer.encode(before), ids) :].sum())

    def _verdict_ids(self, text: str) -> np.ndarray:
        """int32: a judgement in the judge's own tokens (`tokens_are_of_text` proves it)."""
        return self.renderer.encode(text)

    def kept(self, votes: Sequence[Vote]) -> list[int]:
        """The votes about one comparison that count: those with a verdict; with a meta reward model its better half."""
        # A vote without a verdict is no vote against anybody.
        with_verdict = [k for k, v in enumerate(votes) if v.scores is not None]
        if self.meta is None or len(with_verdict) < 2:
            return with_verdict
        scores = self.meta_scores([votes[k] for k in with_verdict])
        return [with_verdict[k] for k in best_half(scores)]

    def meta_scores(self, votes: Sequence[Vote]) -> np.ndarray:
        """float64 [K]: the meta reward model's score of each judgement, read after its prompt."""
        assert self.meta is not None
        segments = [shown_segment(v.ids, np.arange(len(v.ids)) >= v.spoken, READ) for v in votes]
        return np.asarray(self.meta.scorer.rewards(Packed.of(segments)), np.float64)

    @staticmethod
    def _values(i: int, votes: Sequence[Vote], kept: Sequence[int]) -> list[float]:
        """The scores that the votes which count give answer i."""
        # Compared with itself an answer has both sides, and so both scores.
        return [s for k in kept for side, s in zip(votes[k].sides, votes[k].scores or (), strict=True) if side == i]

    def _written(self, episodes: Sequence[Episode], i: int, votes: Sequence[Vote], kept: Sequence[int]) -> str:
        """The votes about answer i in one comparison, for the record: `vs SIBLING:` and what each says of it."""
        sides = votes[0].sides
        other = next((s for s in sides if s != i), i)
        marks = [
            mark + ("" if k in kept or v.scores is None else LEFT_OUT)
            for k, v in enumerate(votes)
            for mark in _marks(v, i)
        ]
        return (f"vs {episodes[other].sibling}:" if len(sides) == 2 else "") + ",".join(marks)

    def _verdict(self, episode: Episode, values: Sequence[float], why: str, votes: Sequence[Vote]) -> Verdict:
        """The mean of the scores; `failed` where no vote has a verdict."""
        if values:
            return Verdict.value(float(np.mean(values)), why=why)
        sample = next((v.why or f"such as {v.text[-60:]!r}" for v in votes), "")
        return Verdict.failed("unread", f"none of {len(votes)} votes has a verdict: {sample}")


def _marks(vote: Vote, i: int) -> list[str]:
    """The score that a vote gives answer i, as a short number; twice where it is compared with itself."""
    if vote.scores is None:
        return [UNREAD]
    return [f"{s:.12g}" for side, s in zip(vote.sides, vote.scores, strict=True) if side == i]


def comparisons(count: int, sides: int, rivals: int = 0) -> list[tuple[int, ...]]:
    """Returns the comparisons in a group of `count` answers: each answer alone, or each pair once.

    With `rivals` each answer is compared only with the `rivals` answers after it, around a circle. A single answer is
    compared with itself.

    >>> comparisons(3, 1), comparisons(3, 2), comparisons(4, 2, rivals=1), comparisons(1, 2)
    ([(0,), (1,), (2,)], [(0, 1), (0, 2), (1, 2)], [(0, 1), (1, 2), (2, 3), (0, 3)], [(0, 0)])
    """
    if sides == 1:
        return [(i,) for i in range(count)]
    if count == 1:
        return [(0, 0)]
    # Each answer meets `rivals` answers after it and `rivals` before it on the circle. Where
    # 2 * rivals reaches count - 1 it meets all others, and the circle would give some pairs twice.
    if not rivals or 2 * rivals >= count - 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    return [(min(i, j), max(i, j)) for i in range(count) for j in ((i + d) % count for d in range(1, rivals + 1))]


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    shorter_length = min(len(a), len(b))
    # The True at the end is found where the shorter array is a beginning of the longer one.
    return int(np.argmax(np.append(a[:shorter_length] != b[:shorter_length], True)))


def tokens_are_of_text(renderer: Renderer, ids: np.ndarray, text: str) -> None:
    """InvariantError where the judge's tokenizer does not read a verdict's ids as its text."""
    # Written and read once: a tokenizer may normalise a text (NFC), and its own tokens then read otherwise too.
    if (decoded := renderer.decode(ids)) != renderer.decode(renderer.encode(text)):
        raise InvariantError(
            f"the tokens whose probability counts as the verdict read {decoded[-20:]!r} in the judge's tokenizer, not"
            f" {text[-20:]!r}: they are another tokenizer's. Encode the verdict with the tokenizer of the judge"
        )


@dataclass(frozen=True)
class JudgedTask:
    """A task of the environment `judge` with a judge's votes about it."""

    task: Task
    votes: tuple[Vote, ...]


async def asked(judge: GenerativeJudge, tasks: Sequence[Task], votes: int) -> list[JudgedTask]:
    """`votes` judgements of the prompt of each task."""
    sides = tuple(range(judge.judging.sides))

    async def one(task: Task) -> JudgedTask:
        votes_of_task = await together([judge.vote(str(task.prompt), sides, task.id, k) for k in range(votes)])
        return JudgedTask(task, tuple(votes_of_task))

    return await together([one(task) for task in tasks])


def right(judging: Judging, task: Task, vote: Vote) -> bool:
    """Whether the better side has the highest score (2504.02495, Eq. 10), as the pair's label says it, never a vote."""
    return chosen(vote.scores) == judging.better(task)


def labels(judging: Judging, each: JudgedTask) -> list[bool | None]:
    """Returns for each vote about a task whether it is right; None for one without a verdict."""
    return [None if v.scores is None else right(judging, each.task, v) for v in each.votes]


def meta_rows(judging: Judging, judged: Sequence[JudgedTask]) -> list[dict[str, str | bool]]:
    """Rows with prompt, completion and label, for a stage that trains a reward model with `judgement=label`. Left out
    are judgements without a verdict, and tasks whose judgements are all right, or all wrong. DataError where nothing is
    left, InvariantError where the labels are not those of the pairs."""
    rows: list[dict[str, str | bool]] = []
    labelled = list[tuple[Task, Vote, bool]]()
    for each in judged:
        marked = [(v, g) for v, g in zip(each.votes, labels(judging, each), strict=True) if g is not None]
        # A task on which all judgements agree shows no difference between a good and a bad one.
        if len({good for _, good in marked}) == 2:
            labelled += [(each.task, v, good) for v, good in marked]
    for task, vote, good in labelled:
        rows.append({"prompt": str(task.prompt), "completion": vote.text, "label": good})
    labels_are_the_pairs(judging, labelled)
    if not rows:
        raise DataError(
            f"all judgements of each of {len(judged)} pairs are right, or all wrong, so they teach a meta reward model"
            " nothing: take more votes, harder pairs, or a judge that is less sure"
        )
    return rows


def labels_are_the_pairs(judging: Judging, labelled: Sequence[tuple[Task, Vote, bool]]) -> None:
    """InvariantError where a judgement that is labelled good names another side than the pair's better one, counted
    over all pairs."""
    named: Counter[tuple[str, int | None]] = Counter()
    better = {task.id: judging.better(task) for task, _, _ in labelled}
    for task, vote, good in labelled:
        if good:
            named[task.id, chosen(vote.scores)] += 1
    if wrong := [key for key in named if key[1] != better[key[0]]]:
        raise InvariantError(
            f"{sum(named[k] for k in wrong)} of {len(labelled)} judgements are labelled right and name the worse side,"
            f" such as of task {wrong[0][0]!r}: a meta reward model that learns this, learns what the judge likes to"
            " say. Label by the pair, not by the votes"
        )
