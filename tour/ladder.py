"""The whole pipeline in one file: pretraining, SFT, preferences (DPO), and RL with verifiable rewards (GRPO).

A policy of some 60 thousand weights goes through four stages. Each has one loss and its own source of truth:

    pretraining   texts of the world: every token is learned, the question too. Form without meaning: in these texts
                  an answer is the question's digits shuffled
    SFT           demonstrations: the answer is learned, the question only seen. One in three is right
    DPO           pairs (2305.18290): the log-odds of the better answer against the worse one grow, measured from a
                  frozen reference, the policy as the stage began. Nobody says what is right, only what is better
    RLVR          the policy's own answers, judged by a program (grpo.py). Only here does it learn from what it says

Each stage begins with the weights of the one before, and prints what share of 200 held-out questions is then answered
rightly. Run it with `python tour/ladder.py`. The library has such pipelines as recipes: `posttrain run ladder`.

Letters for shapes: S answers of a step, T positions of the longest sequence, V tokens of the vocabulary. Numbers per
token are [S, T], and `mask` is True where a token is learned. Of the S answers, `group` says to which question each
belongs: P questions, G siblings each.

The losses are those of the library (tests/test_tour.py). What is simpler here: answers are padded to one length and not
packed, an answer is one turn, sampling has no options, and no learning rate has a warm-up.
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


# --- stage 1: pretraining, on texts of the world --------------------------------------------------------------------


def likelihood(logp: Tensor, mask: Tensor) -> Tensor:
    """The mean of - log pi over all learned tokens: the loss of pretraining and of SFT, which differ in their mask."""
    return -logp.sum() / mask.sum()


def pretrain(policy: nn.Module, train: Tensor, steps: int) -> None:
    """Learn whole texts: a question, and an answer in its form. The first token has nothing before it and is given."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        prompts = train[torch.randint(len(train), (64,))]
        answers = torch.stack([q[torch.randperm(LENGTH)] for q in prompts])
        tokens = torch.cat([prompts, answers, torch.full((64, 1), STOP)], 1)
        mask = torch.ones_like(tokens).bool()
        mask[:, 0] = False
        optimizer.zero_grad()
        likelihood(log_probs(policy, tokens, mask), mask).backward()
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


# --- the optimizer ----------------------------------------------------------------------------------------------------


def optimizer_of(policy: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, objective: Tensor) -> None:
    """One optimizer step; the norm of the whole gradient is scaled down to 1 where it is larger."""
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


# --- stage 3: preferences, by DPO ------------------------------------------------------------------------------------

BETA = 0.1
"""How far the log-odds of a pair must move from the reference's before its gradient fades: some 1 / BETA nats."""


def dpo_loss(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """The mean over pairs of - log sigmoid(BETA * (h of the chosen - h of the rejected)), h = log pi - log ref of an
    answer. Rows [2 S, T]: the chosen answers, then the rejected ones in the same order (Eq. 7)."""
    h_chosen, h_rejected = (logp - logp_ref).sum(1).chunk(2)
    return -F.logsigmoid(BETA * (h_chosen - h_rejected)).mean()


def prefer(policy: nn.Module, train: Tensor, steps: int) -> None:
    """Learn from pairs: the right answer is better than the question's digits shuffled."""
    reference, optimizer = copy.deepcopy(policy).requires_grad_(False), optimizer_of(policy, 1e-3)
    for _ in range(steps):
        prompts = train[torch.randint(len(train), (64,))]
        better = [solution(q.tolist()) for q in prompts]
        worse = [[*q[torch.randperm(LENGTH)].tolist(), STOP] for q in prompts]
        padded = torch.tensor([a + [-1] * (LENGTH + 1 - len(a)) for a in (*better, *worse)])
        tokens, mask = torch.cat([prompts.repeat(2, 1), padded.clamp(min=0)], 1), F.pad(padded >= 0, (LENGTH + 1, 0))
        with torch.no_grad():
            logp_ref = log_probs(reference, tokens, mask)
        update(policy, optimizer, dpo_loss(log_probs(policy, tokens, mask), logp_ref))


# --- stage 4: RL with verifiable rewards, by GRPO; credit, weights, loss ---------------------------------------------

CLIP, KL_COEF = 0.2, 0.04
RESOLUTION = 2.0**-40
"""Rewards whose relative difference is below this are equal: what is left is rounding, as in .1 + .2 against .3."""


def advantages(reward: Tensor, group: Tensor) -> Tensor:
    """[S]: (r - mean) / std of its group, ddof 1 and no epsilon. Exactly 0 in a group of one, or of equal rewards."""
    advantage = torch.zeros_like(reward)
    for own in (group == g for g in group.unique()):
        over = reward[own] - reward[own].min()
        if over.max() > RESOLUTION * reward[own].abs().max():
            advantage[own] = (over - over.mean()) / over.std()
    return advantage


def weights(mask: Tensor) -> Tensor:
    """[S, T]: the mean over an answer's tokens, then over answers. In the library: aggregate=sequence_mean."""
    return mask.double() / mask.sum(1, keepdim=True) / len(mask)


def loss(logp: Tensor, logp_start: Tensor, logp_ref: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """The clipped surrogate of ppo.py, and the estimator k3 of the KL to the reference (Eq. 3 and 4)."""
    ratio = (logp - logp_start).exp()
    policy_term = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    k3 = (logp_ref - logp).exp() - (logp_ref - logp) - 1
    return (weight * (policy_term + KL_COEF * k3)).sum()


def step(policy: nn.Module, reference: nn.Module, optimizer: torch.optim.Optimizer, e: Experience) -> None:
    """Learn from one experience: what does not change is computed once, then one optimizer step a minibatch."""
    with torch.no_grad():
        logp_start, logp_ref = log_probs(policy, e.tokens, e.mask), log_probs(reference, e.tokens, e.mask)
    advantage = advantages(e.reward, e.group)[:, None] * e.mask
    for groups in e.group.unique().tensor_split(MINIBATCHES):
        own = torch.isin(e.group, groups)
        logp = log_probs(policy, e.tokens[own], e.mask[own])
        update(policy, optimizer, loss(logp, logp_start[own], logp_ref[own], advantage[own], weights(e.mask[own])))


# --- the ladder ------------------------------------------------------------------------------------------------------


def accuracy(policy: nn.Module, heldout: Tensor) -> float:
    return rollout(policy, heldout).reward.mean().item()


def learn(steps: int = 60, seed: int = 0, lr: float = 3e-4, demonstrations: int = 120) -> tuple[float, float]:
    """The four stages; the accuracy on held-out questions before and after the last of them, RL."""
    torch.manual_seed(seed)
    train, heldout = questions(seed)
    policy = Policy()
    print(f"random weights   {accuracy(policy, heldout):.0%} right")
    pretrain(policy, train, demonstrations)
    print(f"pretraining      {accuracy(policy, heldout):.0%}")
    imitate(policy, train, demonstrations)
    print(f"SFT              {accuracy(policy, heldout):.0%}")
    prefer(policy, train, demonstrations)
    before = accuracy(policy, heldout)
    print(f"DPO              {before:.0%}")
    reference, optimizer = copy.deepcopy(policy).requires_grad_(False), optimizer_of(policy, lr)
    for index in range(1, steps + 1):
        e = rollout(policy, train[torch.randint(len(train), (PROMPTS,))], SIBLINGS)
        gap = (log_probs(policy, e.tokens, e.mask) - e.logp_mu).abs().max().item()
        step(policy, reference, optimizer, e)
        if index % 10 == 0:  # the gap between sampler and learner is rounding; more would be a bug
            length = e.mask.sum(1).double().mean()
            print(f"step {index:4}   reward {e.reward.mean():.2f}   tokens {length:.1f}   gap {gap:.0e}")
    after = accuracy(policy, heldout)
    print(f"held-out accuracy after {steps} steps of RL: {after:.0%}, before it {before:.0%}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pretraining, SFT, DPO and RLVR of a tiny policy, in one file.")
    parser.add_argument("--steps", type=int, default=60, help="steps of RL (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and samples (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    learn(args.steps, args.seed, lr=args.lr)
