"""Small worlds for the laws: episodes from plain lists, batches from credit, and a policy whose every response is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.credit import credit_step
from posttrain.algorithm.objective import objective
from posttrain.algorithm.streams import Streams
from posttrain.algorithm.trust import Look
from posttrain.algorithm.weigh import weigh
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.ports import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.types import Credit, Episode, EpisodeCredit, Group, Scored, ScoredGroup, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict

SAMPLING = Sampling(max_tokens=20, stop_ids=(0,))


@dataclass
class Answer:
    """One episode in plain numbers: per spoken token its log-probs and value, and where it is cut or interrupted.

    `turns` lists spoken tokens per (segment, turn): [[3, 2], [4]] is two segments, the first with an observation inside.
    """

    reward: float | None
    turns: Sequence[Sequence[int]]
    mu: np.ndarray
    start: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    stop: Stop = Stop.SAID
    observation: int = 2
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def spoken(self) -> int:
        return sum(sum(t) for t in self.turns)


def segments_of(answer: Answer) -> tuple[Segment, ...]:
    out: list[Segment] = []
    at = 0
    for turns in answer.turns:
        mask: list[bool] = [False, False]
        for i, n in enumerate(turns):
            mask += [False] * (answer.observation if i else 0) + [True] * n
        m = np.array(mask)
        logp = np.full(len(m), np.nan, np.float32)
        spoken = int(m.sum())
        logp[m] = np.minimum(answer.mu[at : at + spoken], 0)
        ids = np.full(len(m), 7, np.int32)
        if len(answer.ids):
            ids[m] = answer.ids[at : at + spoken]
        out.append(Segment(ids, m, logp, np.where(m, 0, -1).astype(np.int32), SAMPLING))
        at += spoken
    return tuple(out)


def episode_of(task: Task, sibling: int, answer: Answer) -> Episode:
    verdict = Verdict.failed("outage") if answer.reward is None else Verdict.value(answer.reward)
    return Episode(task, 0, sibling, segments_of(answer), answer.stop, (Judged("toy", 1.0, verdict),))


def _cut(x: np.ndarray | None, episode: Episode) -> tuple[np.ndarray, ...] | None:
    if x is None:
        return None
    return tuple(np.split(x, np.cumsum([s.spoken for s in episode.segments])[:-1]))


def scored_group(name: str, answers: Sequence[Answer]) -> ScoredGroup:
    task = Task(name, "?")
    episodes = [episode_of(task, i, a) for i, a in enumerate(answers)]
    scored = [
        Scored(e, _cut(a.start, e), _cut(a.reference, e), _cut(a.values, e))
        for e, a in zip(episodes, answers, strict=True)
        if e.reward is not None
    ]
    return ScoredGroup(Group(task, 0, tuple(episodes)), tuple(scored))


def rewarded(*groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None) -> list[ScoredGroup]:
    """Groups with these rewards, one token each unless `lengths` says more."""
    lengths = lengths or [[1] * len(g) for g in groups]
    return [
        scored_group(str(i), [Answer(r, [[n]], np.full(n, -1.0), np.full(n, -1.0)) for r, n in zip(g, ns, strict=True)])
        for i, (g, ns) in enumerate(zip(groups, lengths, strict=True))
    ]


def credits(a: Algorithm, *groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None) -> list[list[float]]:
    """Credit of the first token of every sample of every group."""
    credit = credit_step(a, rewarded(*groups, lengths=lengths), max_tokens=20, ema=0.0)
    return [[float(e.advantage[0][0]) for e in g.episodes] for g in credit.groups]


def members(credit: Credit) -> list[tuple[int, EpisodeCredit]]:
    return [(i, e) for i, g in enumerate(credit.groups) for e in g.episodes if not e.dropped]


def batch_of(a: Algorithm, credit: Credit, *, order: Sequence[int] | None = None, with_start: bool = True) -> Batch:
    """The step as one minibatch. `order` permutes episodes."""
    chosen = members(credit)
    weights = weigh(a.aggregate, [e.episode.spoken for _, e in chosen], [i for i, _ in chosen], SAMPLING.max_tokens)
    picked = list(range(len(chosen))) if order is None else list(order)
    eps = [chosen[i][1] for i in picked]
    segments = [s for e in eps for s in e.episode.segments]

    def stream(get: Callable[[EpisodeCredit], tuple[np.ndarray, ...] | None]) -> np.ndarray | None:
        parts = [get(e) for e in eps]
        return None if parts[0] is None else np.concatenate([x for p in parts for x in p or ()])

    return Batch.of(
        segments,
        [i for i, e in enumerate(eps) for _ in e.episode.segments],
        logp_mu_M=np.concatenate([s.logp[s.mask] for s in segments]),
        version_M=np.concatenate([s.version[s.mask] for s in segments]),
        advantage_M=stream(lambda e: e.advantage),
        return_M=stream(lambda e: e.returns),
        logp_start_M=stream(lambda e: e.scored.start) if with_start else None,
        logp_ref_M=stream(lambda e: e.scored.reference),
        value_M=stream(lambda e: e.scored.values),
        weight_M=np.concatenate([np.full(eps[j].episode.spoken, weights[i]) for j, i in enumerate(picked)]),
    )


def leaf(x: np.ndarray) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def gradient(
    a: Algorithm, streams: Streams, logp: Tensor, entropy: Tensor | None = None, value: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(loss, d/dlogp, d/dentropy, d/dvalue) of the library's objective; zeros where nothing is read."""
    inputs = [x for x in (logp, entropy, value) if x is not None]
    loss = objective(a, streams, TokenScores(logp, entropy, value)).loss
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return (loss.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)))


def look(ratio: Tensor, advantage: Tensor, sequence: np.ndarray | None = None) -> Look:
    """What a trust region sees of these tokens: each in an episode of its own, the anchor at log-prob -1."""
    log_ratio = ratio.log()
    places = np.arange(len(ratio)) if sequence is None else sequence
    streams = streams_of(advantage.numpy(), np.ones(len(ratio)), places, mu=np.full(len(ratio), -1.0))
    return Look(ratio, log_ratio, advantage, log_ratio - 1, streams)


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

    return Streams(
        put(mu),
        put(advantage),
        put(weight),
        torch.as_tensor(np.asarray(sequence, np.int64)),
        int(np.max(sequence)) + 1,
        None if start is None else put(start),
        None if ref is None else put(ref),
    )
