"""RLOO (2402.14740): several answers to each question, and each is compared with the others.

What is new against reinforce.py:

    KL          a fee on each answer: 0.03 times the sum of log mu - log ref over its tokens is taken from its reward,
                where mu is the policy that sampled and ref a frozen reference, the policy as RL began
    advantage   an answer's reward less the mean reward of its siblings, the other answers to the same question

The baseline does not depend on the answer it is taken from, so it moves no gradient on average and takes most of its
noise. Nothing else changes: no ratio, no clip, one optimizer step.

Letters for shapes: S answers of a step, T positions of the longest sequence, V tokens of the vocabulary. Numbers per
token are [S, T], and `mask` is True where the policy said the token. Of the S answers, `group` says to which question
each belongs: P questions, G siblings each.

Credit and loss are those of the library's `algorithm=rloo`, and one whole step moves the weights alike
(tests/test_tour.py). What is simpler here: answers are padded to one length and not packed, an answer is one turn,
sampling has no options, and the learning rate has no warm-up.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- the task: the distinct digits of the question in ascending order; 3 1 3 0 = becomes 0 1 3 and a stop ------------

DIGITS, LENGTH = 6, 4
EQUALS, STOP, VOCABULARY = DIGITS, DIGITS + 1, DIGITS + 2
MAX_TOKENS = 10
"""Most tokens of an answer, the stop included."""
PROMPTS, SIBLINGS = 16, 8
"""Questions of a step, and answers to each."""


def questions(seed: int) -> tuple[Tensor, Tensor]:
    """All questions in random order, [n, LENGTH + 1] each: those to train on, and 200 held out."""
    every = F.pad(torch.cartesian_prod(*[torch.arange(DIGITS)] * LENGTH), (0, 1), value=EQUALS)
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))]
    return every[200:], every[:200]


def solution(question: list[int]) -> list[int]:
    return [*sorted({x for x in question if x < DIGITS}), STOP]


def verify(question: list[int], answer: list[int]) -> float:
    """The reward: 1 where the answer is right and ended by a stop, else 0."""
    return float(answer == solution(question))


# --- the policy: a causal transformer --------------------------------------------------------------------------------


class Policy(nn.Module):
    """Tokens [S, T] to logits [S, T, V]: at each position, what comes next."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH + 1 + MAX_TOKENS, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        embedded = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(embedded, mask=causal, is_causal=True))


def log_probs(policy: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """[S, T]: log pi of each said token; 0 elsewhere. Position t - 1 predicts token t, and nothing else shifts."""
    logp = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return F.pad(logp, (1, 0)).masked_fill(~mask, 0.0)


def imitate(policy: nn.Module, train: Tensor, steps: int) -> None:
    """Before RL: learn from demonstrations. Two in three are the question's digits shuffled, so mostly wrong."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        prompts = train[torch.randint(len(train), (64,))]
        wrong = [[*q[torch.randperm(LENGTH)].tolist(), STOP] for q in prompts]
        shown = [solution(q.tolist()) if torch.rand(()) < 1 / 3 else w for q, w in zip(prompts, wrong, strict=True)]
        padded = torch.tensor([a + [-1] * (LENGTH + 1 - len(a)) for a in shown])
        tokens, mask = torch.cat([prompts, padded.clamp(min=0)], 1), F.pad(padded >= 0, (LENGTH + 1, 0))
        optimizer.zero_grad()
        (-log_probs(policy, tokens, mask).sum() / mask.sum()).backward()
        optimizer.step()


# --- the rollout: ask, answer, judge ---------------------------------------------------------------------------------


@dataclass
class Experience:
    """What a step learns from."""

    tokens: Tensor
    """[S, T]: question, answer, and stops as padding."""
    mask: Tensor
    """bool [S, T]: True where the policy said the token."""
    logp_mu: Tensor
    """[S, T]: log-prob of each said token when it was sampled, 0 elsewhere. Mu is the policy that sampled."""
    reward: Tensor
    """float64 [S]: what the verifier said of each answer."""
    group: Tensor
    """int64 [S]: the question each answer belongs to, in ascending order."""


@torch.no_grad()
def rollout(policy: nn.Module, prompts: Tensor, siblings: int = 1) -> Experience:
    """Sample `siblings` answers to each prompt at temperature 1, and judge them."""
    group, prompts = torch.arange(len(prompts)).repeat_interleave(siblings), prompts.repeat_interleave(siblings, 0)
    tokens, mask, logp_mu = prompts, torch.zeros_like(prompts).bool(), torch.zeros(prompts.shape)
    ended = torch.zeros(len(prompts)).bool()
    for _ in range(MAX_TOKENS):
        logp = policy(tokens)[:, -1].log_softmax(-1)
        said = torch.multinomial(logp.exp(), 1)
        said[ended] = STOP
        tokens, mask = torch.cat([tokens, said], 1), torch.cat([mask, ~ended[:, None]], 1)
        logp_mu = torch.cat([logp_mu, logp.gather(1, said).masked_fill(ended[:, None], 0.0)], 1)
        ended |= said[:, 0] == STOP
    reward = [verify(q.tolist(), row[own].tolist()) for q, row, own in zip(prompts, tokens, mask, strict=True)]
    return Experience(tokens, mask, logp_mu, torch.tensor(reward, dtype=torch.float64), group)


# --- the algorithm: credit, weights, loss ----------------------------------------------------------------------------

KL_COEF = 0.03
RESOLUTION = 2.0**-40
"""Rewards whose relative difference is below this are equal: what is left is rounding, as in .1 + .2 against .3."""


def charged(reward: Tensor, logp_mu: Tensor, logp_ref: Tensor) -> tuple[Tensor, Tensor]:
    """[S] each: the reward less the fee, and the sum of the absolute values of all its terms."""
    fee = KL_COEF * (logp_mu.double() - logp_ref)
    return reward - fee.sum(1), reward.abs() + fee.abs().sum(1)


def advantages(reward: Tensor, size: Tensor, group: Tensor) -> Tensor:
    """[S]: the reward less the mean of its siblings' rewards. Exactly 0 in a group of one, or of equal rewards.

    Equal is relative to `size`, the sum of the absolute terms of a reward: a reward less its fee may be near 0.
    """
    advantage = torch.zeros_like(reward)
    for own in (group == g for g in group.unique()):
        over = reward[own] - reward[own].min()
        if over.max() > RESOLUTION * size[own].max():
            advantage[own] = over - (over.sum() - over) / (len(over) - 1)
    return advantage


def weights(mask: Tensor) -> Tensor:
    """[S, T]: the sum over an answer's tokens, then the mean over answers. In the library: aggregate=sequence_sum."""
    return mask.double() / len(mask)


def loss(logp: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """Its value means nothing, its gradient does: it makes the tokens of better answers likelier."""
    return -(weight * advantage * logp).sum()


# --- the step and the loop -------------------------------------------------------------------------------------------


def optimizer_of(policy: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, objective: Tensor) -> None:
    """One optimizer step; the norm of the whole gradient is scaled down to 1 where it is larger."""
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def step(policy: nn.Module, reference: nn.Module, optimizer: torch.optim.Optimizer, e: Experience) -> None:
    """Learn from one experience. Without any credit there is no optimizer step: momentum alone moves no weight."""
    with torch.no_grad():
        logp_ref = log_probs(reference, e.tokens, e.mask)
    advantage = advantages(*charged(e.reward, e.logp_mu, logp_ref), e.group)[:, None] * e.mask
    if advantage.any():
        logp = log_probs(policy, e.tokens, e.mask)
        update(policy, optimizer, loss(logp, advantage, weights(e.mask)))


def learn(steps: int = 100, seed: int = 0, lr: float = 3e-4, demonstrations: int = 150) -> tuple[float, float]:
    """Imitate, then reinforce; the accuracy on held-out questions before and after RL."""
    torch.manual_seed(seed)
    train, heldout = questions(seed)
    policy = Policy()
    imitate(policy, train, demonstrations)
    reference, optimizer = copy.deepcopy(policy).requires_grad_(False), optimizer_of(policy, lr)
    before = rollout(policy, heldout).reward.mean().item()
    print(f"held-out accuracy before RL: {before:.0%}")
    for index in range(1, steps + 1):
        e = rollout(policy, train[torch.randint(len(train), (PROMPTS,))], SIBLINGS)
        gap = (log_probs(policy, e.tokens, e.mask) - e.logp_mu).abs().max().item()
        step(policy, reference, optimizer, e)
        if index % 10 == 0:  # the gap between sampler and learner is rounding; more would be a bug
            length = e.mask.sum(1).double().mean()
            print(f"step {index:4}   reward {e.reward.mean():.2f}   tokens {length:.1f}   gap {gap:.0e}")
    after = rollout(policy, heldout).reward.mean().item()
    print(f"held-out accuracy after {steps} steps of RL: {after:.0%}, before it {before:.0%}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="RLOO on a tiny task, in one file.")
    parser.add_argument("--steps", type=int, default=100, help="steps of RL (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and samples (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    learn(args.steps, args.seed, lr=args.lr)
