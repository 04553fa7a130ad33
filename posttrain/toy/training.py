"""Takes training steps in a small world, with the library's code: from the rewards of its answers to a gradient and a
step of an optimizer. Axis letters: P prompts, G siblings, E = P * G answers of T tokens each, K reward sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step, whitened
from posttrain.algorithm.loss.minibatch_streams import CHOSEN
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.token_selection import choose
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauges
from posttrain.core.scored import ScoredGroup
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.baseline import Ema, Value
from posttrain.toy.answers import Answers, batch_of_answers, groups_of, logp_of, said_logp
from posttrain.toy.policies import ToyPolicy


def _short_group(rewards_GK: np.ndarray) -> ScoredGroup:
    """One group whose answers have one token each."""
    prompt_G = torch.zeros(len(rewards_GK), dtype=torch.int64)
    (group,) = groups_of(Answers(prompt_G, prompt_G[:, None], torch.full((len(prompt_G), 1), -1.0)), rewards_GK[None])
    return group


@cache
def _pattern_credit(a: Algorithm, rewards: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """Credit of each sibling of one group with these rewards [G, K]."""
    group = _short_group(np.array(rewards))
    return tuple(float(e.advantage[0][0]) for e in credit_step(a, [group], max_tokens=1, ema=0.0).groups[0].episodes)


def credit_by_pattern(a: Algorithm, rewards_PG: np.ndarray) -> np.ndarray:
    """Credit [P, G] of rewards [P, G], or [P, G, K] of K sources: one number an answer, all answers equally long.
    `credit_step` is called once for every different group of sorted rewards, since permuting siblings permutes credit
    (law 4). Whitening over the step comes afterwards."""
    # These choices read more than one group, or more than rewards: the rewards of a group do not decide its credit.
    assert (
        not isinstance(a.baseline, Ema | Value)
        and a.kl_in_credit is None
        and a.scale not in ("batch_std", "mixed_share")
    )
    plain = a if a.whiten is None else replace(a, whiten=None)
    p, g = rewards_PG.shape[:2]
    rewards_PGK = rewards_PG.reshape(p, g, -1)
    # Computed for siblings sorted by reward, and put back into their old places.
    order_PG = np.lexsort(np.moveaxis(rewards_PGK, 2, 0), axis=1)
    sorted_PGK = np.take_along_axis(rewards_PGK, order_PG[..., None], 1)
    # There are few different patterns: with rewards 0 and 1 a group of G has G + 1.
    patterns, which_P = np.unique(sorted_PGK.reshape(p, -1), axis=0, return_inverse=True)
    table = np.array([_pattern_credit(plain, tuple(map(tuple, x.reshape(g, -1).tolist()))) for x in patterns])
    out_PG = np.zeros((p, g))
    np.put_along_axis(out_PG, order_PG, table[which_P.reshape(-1)], 1)
    if a.whiten is None:
        return out_PG
    flat = [np.array([x]) for x in out_PG.ravel()]
    one_source = [""] * len(flat)
    return np.concatenate(whitened(a.whiten, flat, one_source)).reshape(out_PG.shape)


@cache
def _mixed_pattern(rewards: tuple[float, ...]) -> bool:
    return _short_group(np.array(rewards)[:, None]).group.mixed


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
    groups = groups_of(answers, rewards_PG, start_ET, reference_ET)
    credit = credit_step(a, groups, max_tokens=answers.tokens_ET.shape[1], ema=0.0)
    return np.stack([e.advantage[0] for group in credit.groups for e in group.episodes])


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
    batch = batch_of_answers(answers, credit_ET, weight_E, start_ET, reference_ET)
    return batch if a.tokens is None else batch.having({CHOSEN: choose(a.tokens, batch, None, rng)})


def loss_of(
    a: Algorithm, batch: Batch, policy: ToyPolicy, answers: Answers, value_ET: Tensor | None = None
) -> tuple[Tensor, Gauges]:
    """The library's loss of this minibatch under the policy as it is, and under these values where `a` learns them."""
    logp_ET, entropy_ET = said_logp(policy, answers)
    terms = objective(
        a,
        streams(batch, dtype=torch.float64),
        TokenScores(logp_ET.reshape(-1), entropy_ET.reshape(-1), None if value_ET is None else value_ET.reshape(-1)),
    )
    return terms.loss, terms.gauges


@dataclass(eq=False)
class ToyTrainer:
    """A policy, its optimizer, and how a step is cut: `minibatches` of whole groups, `epochs` times."""

    a: Algorithm
    policy: ToyPolicy
    optimizer: torch.optim.Optimizer
    g: int
    """Siblings of a prompt."""
    seed: int
    minibatches: int = 1
    epochs: int = 1
    updates: int = 0
    """Optimizer steps that were taken."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 7])  # 7: a stream apart from others of this seed

    def step(self, answers: Answers, credit: np.ndarray, reference_ET: Tensor | None = None) -> Gauges:
        """All optimizer steps of one batch of answers; credit [E] or [E, T]. Returns the last minibatch's gauges.

        As in `role.pack`, answers without credit are left out of the forward pass and stay in the denominators. A
        minibatch that has only such answers changes no weight.
        """
        groups = len(answers.prompt_E) // self.g
        flat = credit.reshape(len(answers.prompt_E), -1)
        start_ET = logp_of(self.policy, answers)
        gauges: Gauges = {}
        for epoch in range(self.epochs):
            # As in `role.pack`, the first epoch keeps the order of the prompts.
            order = np.arange(groups) if epoch == 0 else self.rng.permutation(groups)
            for groups_of_part in np.array_split(order, min(self.minibatches, groups)):
                # The answers of whole groups, sibling after sibling.
                at = torch.as_tensor((groups_of_part[:, None] * self.g + np.arange(self.g)).ravel())
                chosen = answers.subset(at)
                ref = None if reference_ET is None else reference_ET[at]
                batch = batch_of(self.a, chosen, flat[at.numpy()], self.g, start_ET[at], ref, self.rng)
                if not self.a.reads_silent_tokens:
                    has_credit = flat[at.numpy()].any(1)
                    if not has_credit.any():
                        continue
                    batch, chosen = batch.select(np.flatnonzero(has_credit)), chosen.subset(torch.as_tensor(has_credit))
                loss, gauges = loss_of(self.a, batch, self.policy, chosen)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.updates += 1
        return gauges
