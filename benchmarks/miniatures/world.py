"""Small worlds that every miniature is played in: a policy over short answers, and the path from rewards to a gradient.

The path is the library's: `credit_step` makes credit, `weigh` the weights, `choose` the tokens, `objective` the loss.
What is written here only samples answers, lays tokens out as a `Batch`, and steps an optimizer.

Axis letters: P prompts, G siblings, E = P * G answers of T tokens each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.algorithm.choose import choose
from posttrain.algorithm.credit import credit_step, whitened
from posttrain.algorithm.minibatch import CHOSEN
from posttrain.algorithm.objective import objective
from posttrain.algorithm.streams import streams
from posttrain.algorithm.weigh import weigh
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.pieces.baseline import Ema, Value
from posttrain.core.ports import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, START, VALUE, VERSION, WEIGHT
from posttrain.core.types import Episode, Gauges, Group, Scored, ScoredGroup, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict

# --- policies ---------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A softmax of its own for every prompt and position: logits [P, T, V]; nothing is shared, nothing generalises."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits.double().clone())
        self.length = logits.shape[1]

    def at(self, prompt_E: Tensor, tokens_ET: Tensor, t: int) -> Tensor:
        return self.table[prompt_E, t]

    def forward(self, prompt_E: Tensor, tokens_ET: Tensor) -> Tensor:
        return self.table[prompt_E]


class Net(nn.Module):
    """A perceptron that reads features of the prompt [P, F], the position, and the tokens said so far; all prompts
    share it."""

    def __init__(self, features_PF: Tensor, length: int, vocabulary: int, hidden: int, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)

        def weights(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=made, dtype=torch.float64) * scale)

        self.features_PF, self.length = features_PF.double(), length
        self.prompt = weights(features_PF.shape[1], hidden, scale=0.5)
        self.place = weights(length, hidden, scale=0.5)
        self.said = weights(length, vocabulary, hidden, scale=0.5)
        self.middle = weights(hidden, hidden, scale=hidden**-0.5)
        self.bias = weights(hidden, scale=0.0)
        self.out = weights(hidden, vocabulary, scale=0.1)

    def forward(self, prompt_E: Tensor, tokens_ET: Tensor) -> Tensor:
        """Logits [E, T, V]; those at t read the tokens before t alone."""
        said_ETH = self.said[torch.arange(self.length), tokens_ET]
        before_ETH = torch.cumsum(said_ETH, 1) - said_ETH
        return self._read((self.features_PF @ self.prompt)[prompt_E][:, None] + self.place + before_ETH)

    def at(self, prompt_E: Tensor, tokens_ET: Tensor, t: int) -> Tensor:
        said_EH = self.said[torch.arange(t), tokens_ET[:, :t]].sum(1)
        return self._read((self.features_PF @ self.prompt)[prompt_E] + self.place[t] + said_EH)

    def _read(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x) @ self.middle + self.bias) @ self.out


Policy = Table | Net
Disturb = Callable[[Tensor], Tensor]
"""What stands between the policy's logits and the sampler's."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What the sampler said: prompt [E], tokens [E, T], the log-probs it drew them with [E, T]."""

    prompt_E: Tensor
    tokens_ET: Tensor
    mu_ET: Tensor


@torch.no_grad()
def ask(policy: Policy, prompt_E: Tensor, made: torch.Generator, disturb: Disturb | None = None) -> Answers:
    """One answer for each prompt in the list, token after token."""
    tokens_ET = torch.zeros(len(prompt_E), policy.length, dtype=torch.int64)
    mu_ET = torch.zeros(len(prompt_E), policy.length, dtype=torch.float64)
    for t in range(policy.length):
        logits_EV = policy.at(prompt_E, tokens_ET, t)
        logp_EV = torch.log_softmax(logits_EV if disturb is None else disturb(logits_EV), -1)
        below_EV = torch.cumsum(logp_EV.exp(), -1) < torch.rand(len(prompt_E), 1, generator=made, dtype=torch.float64)
        tokens_ET[:, t] = below_EV.sum(-1).clamp_(max=logp_EV.shape[-1] - 1)
        mu_ET[:, t] = logp_EV.gather(1, tokens_ET[:, t : t + 1])[:, 0]
    return Answers(prompt_E, tokens_ET, mu_ET)


def siblings(prompt_P: Tensor, g: int) -> Tensor:
    """Each prompt g times, [P * G]."""
    return prompt_P.repeat_interleave(g)


def said_logp(policy: Policy, answers: Answers) -> tuple[Tensor, Tensor]:
    """(log-prob [E, T] of the said tokens, entropy [E, T]), differentiable."""
    logp_ETV = torch.log_softmax(policy(answers.prompt_E, answers.tokens_ET), -1)
    return logp_ETV.gather(2, answers.tokens_ET[..., None])[..., 0], -(logp_ETV.exp() * logp_ETV).sum(-1)


@torch.no_grad()
def logp_of(policy: Policy, answers: Answers) -> Tensor:
    return said_logp(policy, answers)[0]


# --- credit -----------------------------------------------------------------------------------------------------------


@cache
def contract(length: int) -> Sampling:
    return Sampling(max_tokens=length, stop_ids=())


def scored_group(
    rewards_GK: np.ndarray,
    mu_GT: np.ndarray,
    reference_GT: np.ndarray | None = None,
    start_GT: np.ndarray | None = None,
    values_GT: np.ndarray | None = None,
) -> ScoredGroup:
    """Siblings as the library holds them: K reward sources each, one segment of a prompt token and T said ones."""
    task, length = Task("toy", "?"), mu_GT.shape[1]
    mask = np.array([False] + [True] * length)
    scored: list[Scored] = []
    for i, (rewards, mu) in enumerate(zip(rewards_GK, mu_GT, strict=True)):
        logp = np.concatenate([[np.nan], np.minimum(mu, 0)]).astype(np.float32)
        segment = Segment(
            np.zeros(length + 1, np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32), contract(length)
        )
        verdicts = tuple(Judged(str(k), 1.0, Verdict.value(float(r))) for k, r in enumerate(rewards))
        episode = Episode(task, 0, i, (segment,), Stop.LENGTH, verdicts)
        held = {START: start_GT, REFERENCE: reference_GT, VALUE: values_GT}
        scored.append(Scored(episode, streams={s: (x[i],) for s, x in held.items() if x is not None}))
    return ScoredGroup(Group(task, 0, tuple(s.episode for s in scored)), tuple(scored))


@cache
def _of_pattern(a: Algorithm, rewards: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    group = scored_group(np.array(rewards), np.full((len(rewards), 1), -1.0))
    return tuple(float(e.advantage[0][0]) for e in credit_step(a, [group], max_tokens=1, ema=0.0).groups[0].episodes)


def credit_by_pattern(a: Algorithm, rewards_PG: np.ndarray) -> np.ndarray:
    """Credit [P, G] of rewards [P, G], or [P, G, K] of K sources: one number an answer, all answers equally long.

    `credit_step` is asked once for every pattern of sorted siblings and remembered, since permuting siblings permutes
    credit (law 4); whitening over the step is the library's own, afterwards.
    """
    assert (
        not isinstance(a.baseline, Ema | Value)
        and a.kl_in_credit is None
        and a.scale not in ("batch_std", "mixed_share")
    )
    plain = a if a.whiten is None else replace(a, whiten=None)
    p, g = rewards_PG.shape[:2]
    rewards_PGK = rewards_PG.reshape(p, g, -1)
    order_PG = np.lexsort(np.moveaxis(rewards_PGK, 2, 0), axis=1)
    sorted_PGK = np.take_along_axis(rewards_PGK, order_PG[..., None], 1)
    patterns, which_P = np.unique(sorted_PGK.reshape(p, -1), axis=0, return_inverse=True)
    table = np.array([_of_pattern(plain, tuple(map(tuple, x.reshape(g, -1).tolist()))) for x in patterns])
    out_PG = np.zeros((p, g))
    np.put_along_axis(out_PG, order_PG, table[which_P.reshape(-1)], 1)
    if a.whiten is None:
        return out_PG
    flat = [np.array([x]) for x in out_PG.ravel()]
    return np.concatenate(whitened(a.whiten, flat, [""] * len(flat))).reshape(out_PG.shape)


@cache
def _mixed_pattern(rewards: tuple[float, ...]) -> bool:
    return scored_group(np.array(rewards)[:, None], np.full((len(rewards), 1), -1.0)).group.mixed


def mixed(rewards_PG: np.ndarray) -> np.ndarray:
    """bool [P]: which groups `filter="mixed"` keeps, asked of the library's `Group`."""
    return np.array([_mixed_pattern(tuple(sorted(r.tolist()))) for r in rewards_PG])


def credit_in_full(
    a: Algorithm,
    rewards_PG: np.ndarray,
    answers: Answers,
    reference_ET: Tensor | None = None,
    start_ET: Tensor | None = None,
) -> np.ndarray:
    """Credit [E, T] by one `credit_step` over the whole step: for a KL in the credit, or a baseline that moves."""
    p, g = rewards_PG.shape[:2]
    rewards_PGK = rewards_PG.reshape(p, g, -1)

    def cut(x_ET: Tensor | None) -> list[np.ndarray] | list[None]:
        return [None] * p if x_ET is None else list(x_ET.numpy().reshape(p, g, -1))

    mu, ref, start = cut(answers.mu_ET), cut(reference_ET), cut(start_ET)
    groups = [scored_group(*x) for x in zip(rewards_PGK, mu, ref, start, strict=True)]  # pyright: ignore[reportArgumentType]
    credit = credit_step(a, groups, max_tokens=answers.tokens_ET.shape[1], ema=0.0)
    return np.stack([e.advantage[0] for group in credit.groups for e in group.episodes])


# --- from credit to a step of the optimizer ---------------------------------------------------------------------------


def batch_of(
    a: Algorithm,
    answers: Answers,
    credit_ET: np.ndarray,
    g: int,
    start_ET: Tensor | None = None,
    reference_ET: Tensor | None = None,
    rng: np.random.Generator | None = None,
) -> Batch:
    """One minibatch of whole groups of `g` siblings. Credit may be [E] or [E, T]."""
    e, t = answers.tokens_ET.shape
    weight_E = weigh(a.aggregate, [t] * e, (np.arange(e) // g).tolist(), t)
    ids = np.concatenate([np.zeros((e, 1), np.int32), answers.tokens_ET.numpy().astype(np.int32)], 1)
    batch = Batch(
        ids_N=ids.ravel(),
        lengths_S=np.full(e, t + 1, np.int32),
        source_M=(np.arange(e)[:, None] * (t + 1) + np.arange(t)).ravel().astype(np.int64),
        target_M=ids[:, 1:].ravel(),
        segment_M=np.repeat(np.arange(e, dtype=np.int32), t),
        sequence_S=np.arange(e, dtype=np.int32),
        sampling=contract(t),
        streams={
            MU: answers.mu_ET.numpy().ravel(),
            ADVANTAGE: np.broadcast_to(credit_ET.reshape(e, -1), (e, t)).ravel().astype(np.float64),
            WEIGHT: np.repeat(weight_E, t),
            VERSION: np.zeros(e * t, np.int32),
        },
    ).having(
        {
            START: None if start_ET is None else start_ET.numpy().ravel(),
            REFERENCE: None if reference_ET is None else reference_ET.numpy().ravel(),
        }
    )
    return batch if a.tokens is None else batch.having({CHOSEN: choose(a.tokens, batch, None, rng)})


def loss_of(
    a: Algorithm, batch: Batch, policy: Policy, answers: Answers, value_ET: Tensor | None = None
) -> tuple[Tensor, Gauges]:
    """The library's loss of this minibatch under the policy as it is, and under these values where `a` learns them."""
    logp_ET, entropy_ET = said_logp(policy, answers)
    terms = objective(
        a,
        streams(batch, dtype=torch.float64),
        TokenScores(logp_ET.reshape(-1), entropy_ET.reshape(-1), None if value_ET is None else value_ET.reshape(-1)),
    )
    return terms.loss, terms.gauges


def subset(answers: Answers, at: Tensor) -> Answers:
    return Answers(answers.prompt_E[at], answers.tokens_ET[at], answers.mu_ET[at])


@dataclass(eq=False)
class Trainer:
    """A policy, its optimizer, and how a step is cut: `minibatches` of whole groups, `epochs` times."""

    a: Algorithm
    policy: Policy
    optimizer: torch.optim.Optimizer
    g: int
    seed: int
    minibatches: int = 1
    epochs: int = 1
    updates: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 7])

    def step(self, answers: Answers, credit: np.ndarray, reference_ET: Tensor | None = None) -> Gauges:
        """All optimizer steps of one batch of answers; credit [E] or [E, T]. Returns the last minibatch's gauges.

        As in the library's packer, answers without credit leave the forward pass and stay in the denominators, and a
        minibatch of nothing else moves no weight.
        """
        groups = len(answers.prompt_E) // self.g
        flat = credit.reshape(len(answers.prompt_E), -1)
        start_ET = logp_of(self.policy, answers)
        gauges: Gauges = {}
        for epoch in range(self.epochs):
            order = np.arange(groups) if epoch == 0 else self.rng.permutation(groups)
            for part in np.array_split(order, self.minibatches):
                at = torch.as_tensor((part[:, None] * self.g + np.arange(self.g)).ravel())
                mine = subset(answers, at)
                ref = None if reference_ET is None else reference_ET[at]
                batch = batch_of(self.a, mine, flat[at.numpy()], self.g, start_ET[at], ref, self.rng)
                if not self.a.reads_silent_tokens:
                    loud = flat[at.numpy()].any(1)
                    if not loud.any():
                        continue
                    batch, mine = batch.select(np.flatnonzero(loud)), subset(mine, torch.as_tensor(loud))
                loss, gauges = loss_of(self.a, batch, self.policy, mine)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.updates += 1
        return gauges


def imitate(
    policy: Policy, prompt_E: Tensor, tokens_ET: Tensor, steps: int, lr: float, made: torch.Generator, batch: int = 128
) -> None:
    """Supervised learning on these answers: how every policy here gets its prior."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    for _ in range(steps):
        at = torch.randint(len(prompt_E), (batch,), generator=made)
        logp_ET, _ = said_logp(policy, Answers(prompt_E[at], tokens_ET[at], torch.zeros(0)))
        optimizer.zero_grad()
        (-logp_ET.sum(1).mean()).backward()
        optimizer.step()
