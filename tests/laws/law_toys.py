"""Small worlds for the laws: episodes from plain lists, batches from credit, and a policy whose every response is
known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.credit import credit_step
from posttrain.algorithm.streams import Streams
from posttrain.algorithm.trust import TrustInputs
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.run import Reinforce
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, ENERGY, ENTROPY, MU, REFERENCE, START, TOP_IDS, TOP_LOGP, VALUE, WEIGHT
from posttrain.core.types import SHOWN, Credit, Episode, Group, Scored, ScoredGroup, Segment, Stop, Task, Top
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.pack import pack

SAMPLING = Sampling(max_tokens=20, stop_ids=(0,))


@dataclass
class Answer:
    """One episode in plain numbers: per spoken token its log-probs and value, and where it is cut or interrupted.

    `turns` lists spoken tokens per (segment, turn): [[3, 2], [4]] is two segments, the first with an observation
    inside.
    """

    reward: float | None
    turns: Sequence[Sequence[int]]
    mu: np.ndarray
    start: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    entropy: np.ndarray | None = None
    energy: np.ndarray | None = None
    stop: Stop = Stop.SAID
    observation: int = 2
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    version: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    shown: bool = False
    """Whether a demonstration wrote it; `mu` is then not known."""
    verdicts: tuple[Judged, ...] = ()
    """In place of one verdict of value `reward`."""
    top: Top | None = None
    teacher: Top | None = None

    @property
    def spoken(self) -> int:
        return sum(sum(t) for t in self.turns)

    @property
    def judged(self) -> tuple[Judged, ...]:
        verdict = Verdict.failed("outage") if self.reward is None else Verdict.value(self.reward)
        return self.verdicts or (Judged("toy", 1.0, verdict),)


def segments_of(answer: Answer) -> tuple[Segment, ...]:
    out: list[Segment] = []
    at = 0
    for turns in answer.turns:
        mask: list[bool] = [False, False]
        for i, n in enumerate(turns):
            mask += [False] * (answer.observation if i else 0) + [True] * n
        m = np.array(mask)
        here = slice(at, at + int(m.sum()))
        logp, ids, version = (
            np.full(len(m), np.nan, np.float32),
            np.full(len(m), 7, np.int32),
            np.full(len(m), -1, np.int32),
        )
        logp[m] = 0.0 if answer.shown else np.minimum(answer.mu[here], 0)
        version[m] = SHOWN if answer.shown else answer.version[here] if len(answer.version) else 0
        if len(answer.ids):
            ids[m] = answer.ids[here]
        top = None if answer.top is None else Top(answer.top.ids[here], answer.top.logp[here])
        sampling = SAMPLING if top is None else replace(SAMPLING, top=top.ids.shape[1])
        out.append(Segment(ids, m, logp, version, sampling, top=top))
        at = here.stop
    return tuple(out)


def episode_of(task: Task, sibling: int, answer: Answer) -> Episode:
    return Episode(task, 0, sibling, segments_of(answer), answer.stop, answer.judged)


def _cut(x: np.ndarray, episode: Episode) -> tuple[np.ndarray, ...]:
    return tuple(np.split(x, np.cumsum([s.spoken for s in episode.segments])[:-1]))


def _scored(episode: Episode, a: Answer) -> Scored:
    held = {START: a.start, REFERENCE: a.reference, VALUE: a.values, ENTROPY: a.entropy, ENERGY: a.energy}
    held |= {} if a.teacher is None else {TOP_IDS: a.teacher.ids, TOP_LOGP: a.teacher.logp}
    return Scored(episode, streams={s: _cut(x, episode) for s, x in held.items() if x is not None})


def scored_group(
    name: str, answers: Sequence[Answer], greedy: float | None = None, info: Mapping[str, Any] | None = None
) -> ScoredGroup:
    """A prompt's siblings, scored; with `greedy` also its argmax answer of that reward. `info` are columns of the
    task."""
    task = Task(name, "?", info=info or {})
    episodes = [episode_of(task, i, a) for i, a in enumerate(answers)]
    best = None if greedy is None else episode_of(task, len(answers), Answer(greedy, [[1]], np.full(1, -1.0)))
    scored = [_scored(e, a) for e, a in zip(episodes, answers, strict=True) if e.reward is not None]
    return ScoredGroup(Group(task, 0, tuple(episodes), best), tuple(scored))


def rewarded(*groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None) -> list[ScoredGroup]:
    """Groups with these rewards, one token each unless `lengths` says more."""
    lengths = lengths or [[1] * len(g) for g in groups]
    return [
        scored_group(
            str(i),
            [
                Answer(r, [[n]], np.full(n, -1.0), np.full(n, -1.0), energy=np.ones(n))
                for r, n in zip(g, ns, strict=True)
            ],
        )
        for i, (g, ns) in enumerate(zip(groups, lengths, strict=True))
    ]


def credits(
    a: Algorithm, *groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None
) -> list[list[float]]:
    """Credit of the first token of every sample of every group."""
    credit = credit_step(a, rewarded(*groups, lengths=lengths), max_tokens=20, ema=0.0)
    return [[float(e.advantage[0][0]) for e in g.episodes] for g in credit.groups]


STAGE = Reinforce(name="laws", sampling=SAMPLING)
NOW = 4
"""Version of the weights at the start of a toy step; its one optimizer step makes the next."""


def batch_of(a: Algorithm, credit: Credit, *, turned: bool = False, with_start: bool = True) -> Batch:
    """The step as one minibatch, through the packer of real runs. `turned` puts the last group and the last sibling
    first."""
    if turned:
        credit = replace(credit, groups=tuple(replace(g, episodes=g.episodes[::-1]) for g in credit.groups[::-1]))
    (made,) = pack(credit, a, STAGE, seed=0, step=0, version=NOW)
    assert made.batch is not None, "every token is silent"
    return made.batch if with_start else made.batch.having({START: None})


def look(ratio: Tensor, advantage: Tensor, sequence: np.ndarray | None = None) -> TrustInputs:
    """What a trust region sees of these tokens: each in an episode of its own, the anchor at log-prob -1."""
    log_ratio = ratio.log()
    places = np.arange(len(ratio)) if sequence is None else sequence
    streams = streams_of(advantage.numpy(), np.ones(len(ratio)), places, mu=np.full(len(ratio), -1.0))
    return TrustInputs(ratio, log_ratio, advantage, log_ratio - 1, streams)


# --- a policy whose every response can be listed -------------------------------------------------------------------

VOCAB, LONGEST, EOS = 3, 4, 0


def responses() -> list[tuple[int, ...]]:
    """All 31 responses of 3 tokens and at most 4 of them: ended by EOS, or cut off at 4."""
    out: list[tuple[int, ...]] = []
    for n in range(1, LONGEST + 1):
        for y in product(range(VOCAB), repeat=n):
            if EOS not in y[:-1] and (y[-1] == EOS or n == LONGEST):
                out.append(y)
    return out


class Tabular:
    """A softmax over 3 tokens at each of the 15 prefixes: logits [15, 3], float64."""

    def __init__(self, seed: int, scale: float = 0.7) -> None:
        self.all = responses()
        self.states = sorted({y[:t] for y in self.all for t in range(len(y))})
        self.index = {s: i for i, s in enumerate(self.states)}
        draws = np.random.default_rng(seed).normal(size=(len(self.states), VOCAB)) * scale
        self.logits = torch.tensor(draws, dtype=torch.float64, requires_grad=True)

    def token_logp(self, y: Sequence[int], logits: Tensor | None = None) -> Tensor:
        """log pi(y_t | y_<t), [|y|]."""
        table = torch.log_softmax(self.logits if logits is None else logits, -1)
        return table[[self.index[tuple(y[:t])] for t in range(len(y))], list(y)]

    def probabilities(self) -> Tensor:
        """pi(y) of every response, differentiable; they sum to one."""
        return torch.stack([self.token_logp(y).sum().exp() for y in self.all])

    def exact(self, f: Tensor) -> Tensor:
        """Gradient of E[f(y)] for a constant f, [15, 3]."""
        return torch.autograd.grad((self.probabilities() * f).sum(), self.logits)[0]


def streams_of(
    advantage: np.ndarray,
    weight: np.ndarray,
    sequence: np.ndarray,
    mu: np.ndarray,
    start: np.ndarray | None = None,
    ref: np.ndarray | None = None,
) -> Streams:
    """Streams in float64 from plain arrays."""

    def put(x: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(x, np.float64))

    held = {MU: mu, ADVANTAGE: advantage, WEIGHT: weight, START: start, REFERENCE: ref}
    return Streams(
        torch.as_tensor(np.asarray(sequence, np.int64)),
        int(np.max(sequence)) + 1,
        streams={s: put(x) for s, x in held.items() if x is not None},
    )
