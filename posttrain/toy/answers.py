"""Answers drawn from a small policy, their log-probs, and the library's groups and batches of them.

Axis letters: P prompts, G siblings, K reward sources, E = P * G answers of T tokens each, V vocabulary.

>>> from posttrain.toy.policies import TabularPolicy
>>> policy = TabularPolicy(torch.zeros(2, 3, 4))
>>> answers = ask(policy, siblings(torch.arange(2), 2), torch.Generator().manual_seed(0))
>>> answers.prompt_E.tolist(), tuple(answers.tokens_ET.shape)
([0, 0, 1, 1], (4, 3))
>>> torch.equal(answers.mu_ET, logp_of(policy, answers))
True
>>> [g.group.rewards.tolist() for g in groups_of(answers, np.array([[1, 0], [0, 1]]))]
[[1.0, 0.0], [0.0, 1.0]]
>>> batch_of_answers(answers, np.ones(4), np.full(4, 1 / 12)).spoken
12
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Batch
from posttrain.core.sampling import Sampling
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, START, VERSION, WEIGHT
from posttrain.core.types import Stop
from posttrain.core.verdict import Judged, Verdict
from posttrain.toy.episodes import PlainEpisode, scored_group
from posttrain.toy.policies import ToyPolicy

Disturb = Callable[[Tensor], Tensor]
"""Changes the policy's logits into those that the sampler draws from."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Sampled answers: prompt [E], tokens [E, T], and the sampler's log-probs [E, T]. For answers that nobody sampled,
    such as demonstrations, `mu_ET` is empty."""

    prompt_E: Tensor
    tokens_ET: Tensor
    mu_ET: Tensor

    def subset(self, at: Tensor) -> Answers:
        """The answers at these indices [n], or where a bool [E] is True."""
        return Answers(self.prompt_E[at], self.tokens_ET[at], self.mu_ET[at])


@torch.no_grad()
def ask(policy: ToyPolicy, prompt_E: Tensor, generator: torch.Generator, disturb: Disturb | None = None) -> Answers:
    """Sample one answer for each prompt in the list, token by token."""
    tokens_ET = torch.zeros(len(prompt_E), policy.length, dtype=torch.int64)
    mu_ET = torch.zeros(len(prompt_E), policy.length, dtype=torch.float64)
    for t in range(policy.length):
        logits_EV = policy.at(prompt_E, tokens_ET, t)
        logp_EV = torch.log_softmax(logits_EV if disturb is None else disturb(logits_EV), -1)
        # Inverse of the cumulative distribution: the index of the drawn token is the number of tokens whose
        # cumulative probability is below the uniform number. The clamp is for a sum that rounds to less than 1.
        below_EV = torch.cumsum(logp_EV.exp(), -1) < torch.rand(
            len(prompt_E), 1, generator=generator, dtype=torch.float64
        )
        tokens_ET[:, t] = below_EV.sum(-1).clamp_(max=logp_EV.shape[-1] - 1)
        mu_ET[:, t] = logp_EV.gather(1, tokens_ET[:, t : t + 1])[:, 0]
    return Answers(prompt_E, tokens_ET, mu_ET)


def siblings(prompt_P: Tensor, g: int) -> Tensor:
    """Each prompt g times, [P * G]."""
    return prompt_P.repeat_interleave(g)


def said_logp(policy: ToyPolicy, answers: Answers) -> tuple[Tensor, Tensor]:
    """(log-prob [E, T] of the sampled tokens, entropy [E, T]), differentiable."""
    logp_ETV = torch.log_softmax(policy(answers.prompt_E, answers.tokens_ET), -1)
    return logp_ETV.gather(2, answers.tokens_ET[..., None])[..., 0], -(logp_ETV.exp() * logp_ETV).sum(-1)


@torch.no_grad()
def logp_of(policy: ToyPolicy, answers: Answers) -> Tensor:
    """Log-prob [E, T] of the sampled tokens."""
    return said_logp(policy, answers)[0]


@cache
def contract(length: int) -> Sampling:
    """The sampling contract of answers of one length: only the length ends them."""
    return Sampling(max_tokens=length, stop_ids=())


def groups_of(
    answers: Answers,
    rewards_PG: np.ndarray,
    start_ET: Tensor | None = None,
    reference_ET: Tensor | None = None,
    values_ET: Tensor | None = None,
) -> list[ScoredGroup]:
    """The answers as the library's scored groups, with the log-probs and values that credit reads. The siblings of a
    prompt must follow each other. Rewards are [P, G], or [P, G, K] of K sources of weight 1, named by number."""
    # Answer e = i * G + j is sibling j of prompt i.
    p, g = rewards_PG.shape[:2]
    rewards_EK = rewards_PG.reshape(p * g, -1)
    mu_ET, t = answers.mu_ET.numpy(), answers.tokens_ET.shape[1]
    ids_ET = answers.tokens_ET.numpy().astype(np.int32)

    def row(x_ET: Tensor | None, e: int) -> np.ndarray | None:
        return None if x_ET is None else x_ET[e].numpy()

    def plain(e: int) -> PlainEpisode:
        verdicts = tuple(Judged(str(k), 1.0, Verdict.value(float(r))) for k, r in enumerate(rewards_EK[e]))
        scored = [row(x_ET, e) for x_ET in (start_ET, reference_ET, values_ET)]
        return PlainEpisode(
            None, [[t]], mu_ET[e], *scored, ids=ids_ET[e], stop=Stop.LENGTH, verdicts=verdicts, sampling=contract(t)
        )

    return [scored_group(str(int(answers.prompt_E[i * g])), [plain(i * g + j) for j in range(g)]) for i in range(p)]


def batch_of_answers(
    answers: Answers,
    credit_ET: np.ndarray,
    weight_E: np.ndarray,
    start_ET: Tensor | None = None,
    reference_ET: Tensor | None = None,
) -> Batch:
    """One minibatch of these answers, each after a prompt of one token. Credit is that of every token, [E, T], or one
    number per answer, [E]; weights [E] are those of `token_weights`."""
    e, t = answers.tokens_ET.shape
    ids = np.concatenate([np.zeros((e, 1), np.int32), answers.tokens_ET.numpy().astype(np.int32)], 1)
    return Batch(
        ids_N=ids.ravel(),
        lengths_S=np.full(e, t + 1, np.int32),
        # A prompt token and T answer tokens make 1 + T. Answer token t is predicted at position t of these.
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


def imitate(
    policy: ToyPolicy,
    prompt_E: Tensor,
    tokens_ET: Tensor,
    steps: int,
    lr: float,
    generator: torch.Generator,
    batch: int = 128,
) -> None:
    """Supervised learning on these answers, `batch` of them per step. It gives a policy its prior."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    for _ in range(steps):
        at = torch.randint(len(prompt_E), (batch,), generator=generator)
        logp_ET, _ = said_logp(policy, Answers(prompt_E[at], tokens_ET[at], torch.zeros(0)))
        optimizer.zero_grad()
        (-logp_ET.sum(1).mean()).backward()
        optimizer.step()
