"""Dr. GRPO (2503.20783): GRPO without what biases it, two divisions and the KL.

What is new against grpo.py:

    advantage   r - mean over the answers to one question; not divided by their standard deviation, which makes
                questions that are nearly always or nearly never right count more than the others
    weight      each token counts 1 / (answers * MAX_TOKENS); not divided by the length of its answer, which makes a
                token of a long wrong answer cost less than one of a short wrong answer
    no KL       the policy may go as far from where it began as the reward leads it

Letters for shapes: S answers of a step, T positions of the longest sequence, V tokens of the vocabulary. Numbers per
token are [S, T], and `mask` is True where the policy said the token. Of the S answers, `group` says to which question
each belongs: P questions, G siblings each.

Credit and loss are those of the library's `algorithm=dr_grpo`, and one whole step moves the weights alike
(tests/test_tour.py). What is simpler here: answers are padded to one length and not packed, an answer is one turn,
sampling has no options, the learning rate has no warm-up, and no log-ratio is bounded before it is exponentiated. The
library's default is one minibatch a step, with which the ratio is always 1; two are its `rl.minibatches=2`.
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
PROMPTS, SIBLINGS, MINIBATCHES = 16, 8, 2
"""Questions of a step, answers to each, and the optimizer steps it is cut into."""


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

CLIP = 0.2
RESOLUTION = 2.0**-40
"""Rewards whose relative difference is below this are equal: what is left is rounding, as in .1 + .2 against .3."""


def advantages(reward: Tensor, group: Tensor) -> Tensor:
    """[S]: r less the mean of its group. Exactly 0 in a group of one, or of equal rewards."""
    advantage = torch.zeros_like(reward)
    for own in (group == g for g in group.unique()):
        over = reward[own] - reward[own].min()
        if over.max() > RESOLUTION * reward[own].abs().max():
            advantage[own] = over - over.mean()
    return advantage


def weights(mask: Tensor) -> Tensor:
    """[S, T]: the same for all tokens, however long their answers are. In the library: aggregate=constant."""
    return mask.double() / len(mask) / MAX_TOKENS


def loss(logp: Tensor, logp_start: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """The clipped surrogate of ppo.py."""
    ratio = (logp - logp_start).exp()
    policy_term = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return (weight * policy_term).sum()


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
    """Learn from one experience. Without any credit a minibatch is no optimizer step: momentum alone moves nothing."""
    with torch.no_grad():
        logp_start = log_probs(policy, e.tokens, e.mask)
    advantage = advantages(e.reward, e.group)[:, None] * e.mask
    for groups in e.group.unique().tensor_split(MINIBATCHES):
        own = torch.isin(e.group, groups)
        if advantage[own].any():
            logp = log_probs(policy, e.tokens[own], e.mask[own])
            update(policy, optimizer, loss(logp, logp_start[own], advantage[own], weights(e.mask[own])))


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
        e = rollout(policy, train[torch.randint(len(train), (PROMPTS,))], SIBLINGS)
        gap = (log_probs(policy, e.tokens, e.mask) - e.logp_mu).abs().max().item()
        step(policy, optimizer, e)
        if index % 10 == 0:  # the gap between sampler and learner is rounding; more would be a bug
            length = e.mask.sum(1).double().mean()
            print(f"step {index:4}   reward {e.reward.mean():.2f}   tokens {length:.1f}   gap {gap:.0e}")
    after = rollout(policy, heldout).reward.mean().item()
    print(f"held-out accuracy after {steps} steps of RL: {after:.0%}, before it {before:.0%}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Dr. GRPO on a tiny task, in one file.")
    parser.add_argument("--steps", type=int, default=100, help="steps of RL (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and samples (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    learn(args.steps, args.seed, lr=args.lr)
