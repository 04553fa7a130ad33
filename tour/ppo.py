"""PPO (Schulman et al., 1707.06347): REINFORCE with learned values, and several careful optimizer steps.

What is new against reinforce.py:

    value       a second read-out of the policy guesses, before each token, the reward that will come
    advantage   per token, how much better it went than guessed: generalised advantage estimation, then whitened
    ratio       pi / pi_start, where pi_start is the policy as the step began; 1 until the first optimizer step
    clip        a token whose ratio has left [1 - 0.2, 1 + 0.2] in the direction of its credit is pushed no further
    weight      1 / tokens of the minibatch, so that long answers count with all their tokens
    loss        the policy's term and the value's, each with its clip
    minibatches an optimizer step each, on answers of the one policy that began the step; the answers are used once

Letters for shapes: S answers of a step, T positions of the longest sequence, V tokens of the vocabulary. Numbers per
token are [S, T], and `mask` is True where the policy said the token.

Credit and loss are those of the library's `algorithm=ppo`, and one whole step moves the weights alike
(tests/test_tour.py). What is simpler here: answers are padded to one length and not packed, an answer is one turn,
sampling has no options, the learning rate has no warm-up, and no log-ratio is bounded before it is exponentiated. The
library's default is one minibatch a step, with which the ratio is always 1; four are its `rl.minibatches=4`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- the task: the distinct digits of the question in ascending order; 3 1 3 0 = becomes 0 1 3 and a stop ------------

DIGITS, LENGTH = 6, 4
EQUALS, STOP, VOCABULARY = DIGITS, DIGITS + 1, DIGITS + 2
MAX_TOKENS = 10
"""Most tokens of an answer, the stop included."""
PROMPTS, MINIBATCHES = 128, 4
"""Questions of a step, and the optimizer steps it is cut into."""


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
    """Tokens [S, T] to logits [S, T, V], at each position what comes next, and the value [S, T] of saying it."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH + 1 + MAX_TOKENS, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head, self.value = nn.Linear(width, VOCABULARY), nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.value.weight)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        embedded = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        hidden = self.blocks(embedded, mask=causal, is_causal=True)
        return self.head(hidden), self.value(hidden)[..., 0]


def scores(policy: nn.Module, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[S, T] each: log pi of each said token, and the value before it; 0 elsewhere. Position t - 1 predicts token t."""
    logits, value = policy(tokens[:, :-1])
    logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return F.pad(logp, (1, 0)).masked_fill(~mask, 0.0), F.pad(value, (1, 0)).masked_fill(~mask, 0.0)


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
        (-scores(policy, tokens, mask)[0].sum() / mask.sum()).backward()
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


@torch.no_grad()
def rollout(policy: nn.Module, prompts: Tensor) -> Experience:
    """Sample an answer to each prompt at temperature 1, and judge it."""
    tokens, mask, logp_mu = prompts, torch.zeros_like(prompts).bool(), torch.zeros(prompts.shape)
    ended = torch.zeros(len(prompts)).bool()
    for _ in range(MAX_TOKENS):
        logp = policy(tokens)[0][:, -1].log_softmax(-1)
        said = torch.multinomial(logp.exp(), 1)
        said[ended] = STOP
        tokens, mask = torch.cat([tokens, said], 1), torch.cat([mask, ~ended[:, None]], 1)
        logp_mu = torch.cat([logp_mu, logp.gather(1, said).masked_fill(ended[:, None], 0.0)], 1)
        ended |= said[:, 0] == STOP
    reward = [verify(q.tolist(), row[own].tolist()) for q, row, own in zip(prompts, tokens, mask, strict=True)]
    return Experience(tokens, mask, logp_mu, torch.tensor(reward, dtype=torch.float64))


# --- the algorithm: credit, weights, loss ----------------------------------------------------------------------------

GAMMA, LAMBDA = 1.0, 0.95
CLIP, VALUE_CLIP, VALUE_COEF = 0.2, 0.2, 0.5
RESOLUTION = 2.0**-40
"""Numbers whose relative difference is below this are equal: what is left is rounding."""


def advantages(reward: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(advantage, returns) [S, T] from values before each token; the reward comes with the last said token.

    delta_t = r_t + gamma * V_(t+1) - V_t      A_t = delta_t + gamma * lambda * A_(t+1)      return_t = A_t + V_t

    Tokens that the policy did not say are no steps: the recursion jumps over them. After the last token V and A are 0.
    """
    advantage, last = torch.zeros(mask.shape, dtype=torch.float64), mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    next_value, next_advantage = torch.zeros(len(mask)), torch.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = reward * last[:, t] + GAMMA * next_value - value[:, t]
        next_advantage = torch.where(mask[:, t], delta + GAMMA * LAMBDA * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        advantage[:, t] = next_advantage * mask[:, t]
    size = reward.abs() + advantage.abs().amax(1) + 2 * value.abs().amax(1)
    return whitened(advantage, mask, RESOLUTION * size.max()), advantage + value


def whitened(advantage: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (ddof 1, no epsilon) over all said tokens; 0 where they are all equal."""
    over = advantage[mask] - advantage[mask].min()
    if over.max() <= noise:
        return torch.zeros_like(advantage)
    return torch.zeros_like(advantage).masked_scatter(mask, (over - over.mean()) / over.std())


def weights(mask: Tensor) -> Tensor:
    """[S, T]: the mean over all said tokens of the minibatch. In the library: aggregate=token_mean."""
    return mask.double() / mask.sum()


def loss(
    logp: Tensor,
    logp_start: Tensor,
    advantage: Tensor,
    value: Tensor,
    value_start: Tensor,
    returns: Tensor,
    weight: Tensor,
) -> Tensor:
    """The clipped surrogate (Eq. 7), and half the squared error of the values, also clipped.

    The library writes the policy's term as -sg[push] * advantage * logp, where push is the ratio, or 0 where the clip
    holds it back. The two have one gradient.
    """
    ratio = (logp - logp_start).exp()
    policy_term = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    near = value_start + (value - value_start).clamp(-VALUE_CLIP, VALUE_CLIP)
    value_term = 0.5 * torch.maximum((value - returns).square(), (near - returns).square())
    return (weight * (policy_term + VALUE_COEF * value_term)).sum()


# --- the step and the loop -------------------------------------------------------------------------------------------


def optimizer_of(policy: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, objective: Tensor) -> None:
    """One optimizer step; the norm of the whole gradient is scaled down to 1 where it is larger."""
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def step(policy: nn.Module, optimizer: torch.optim.Optimizer, e: Experience) -> None:
    """Learn from one experience: what does not change is computed once, then one optimizer step a minibatch."""
    with torch.no_grad():
        logp_start, value_start = scores(policy, e.tokens, e.mask)
    advantage, returns = advantages(e.reward, value_start, e.mask)
    for own in torch.arange(len(e.tokens)).tensor_split(MINIBATCHES):
        logp, value = scores(policy, e.tokens[own], e.mask[own])
        policy_reads, value_reads = (logp, logp_start[own], advantage[own]), (value, value_start[own], returns[own])
        update(policy, optimizer, loss(*policy_reads, *value_reads, weights(e.mask[own])))


def learn(steps: int = 100, seed: int = 0, lr: float = 3e-4, demonstrations: int = 150) -> tuple[float, float]:
    """Imitate, then reinforce; the accuracy on held-out questions before and after RL."""
    torch.manual_seed(seed)
    train, heldout = questions(seed)
    policy = Policy()
    imitate(policy, train, demonstrations)
    optimizer = optimizer_of(policy, lr)
    before = rollout(policy, heldout).reward.mean().item()
    print(f"held-out accuracy before RL: {before:.0%}")
    for index in range(1, steps + 1):
        e = rollout(policy, train[torch.randint(len(train), (PROMPTS,))])
        gap = (scores(policy, e.tokens, e.mask)[0] - e.logp_mu).abs().max().item()
        step(policy, optimizer, e)
        if index % 10 == 0:  # the gap between sampler and learner is rounding; more would be a bug
            length = e.mask.sum(1).double().mean()
            print(f"step {index:4}   reward {e.reward.mean():.2f}   tokens {length:.1f}   gap {gap:.0e}")
    after = rollout(policy, heldout).reward.mean().item()
    print(f"held-out accuracy after {steps} steps of RL: {after:.0%}, before it {before:.0%}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on a tiny task, in one file.")
    parser.add_argument("--steps", type=int, default=100, help="steps of RL (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and samples (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    learn(args.steps, args.seed, lr=args.lr)
