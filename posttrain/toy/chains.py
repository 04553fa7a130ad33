"""Sums of several numbers modulo 7 as a task for a small network: the answer alone, or all partial sums before it.

>>> chain = Chain(3, step_by_step=True, seed=0)
>>> len(chain.digits_PL), chain.trained, chain.length
(343, 240, 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posttrain.toy.answers import Answers
from posttrain.toy.policies import NetworkPolicy

MODULUS, TRAINED, HELD_OUT = 7, 3000, 300
"""The modulus of the sums; the most problems that are trained on; the most that are held out."""


@dataclass(frozen=True)
class Chain:
    """Different problems of `depth` numbers. Seven in ten of all possible ones are trained on, at most 3,000; of the
    others at most 300 are held out."""

    depth: int
    step_by_step: bool
    seed: int

    @property
    def length(self) -> int:
        """Tokens of an answer: every partial sum, or the last alone."""
        return self.depth if self.step_by_step else 1

    @property
    def trained(self) -> int:
        """Number of problems that are trained on. They are the first ones of `digits_PL`; the rest is held out."""
        return min(TRAINED, 7 * MODULUS**self.depth // 10)

    @cached_property
    def digits_PL(self) -> Tensor:
        """int64 [P, depth]: the numbers of each problem, all different."""
        generator = torch.Generator().manual_seed(self.seed)
        # A problem is a number whose digits in base 7 are the summands, so different numbers are different problems.
        drawn = torch.randperm(MODULUS**self.depth, generator=generator)[: self.trained + HELD_OUT]
        return torch.stack([drawn // MODULUS**place % MODULUS for place in range(self.depth)], 1)

    @cached_property
    def truth_PT(self) -> Tensor:
        """int64 [P, T]: the right answers."""
        sums = self.digits_PL.cumsum(1) % MODULUS
        return sums if self.step_by_step else sums[:, -1:]

    def policy(self, width: int) -> NetworkPolicy:
        """A network that reads all numbers of a problem, and the tokens of the answer so far."""
        features = torch.nn.functional.one_hot(self.digits_PL, MODULUS).flatten(1)
        return NetworkPolicy(features, self.length, MODULUS, width, self.seed)

    def batch(self, count: int, generator: torch.Generator) -> Answers:
        """Right answers to `count` of the problems that are trained on."""
        prompt_E = torch.randint(self.trained, (count,), generator=generator)
        return Answers(prompt_E, self.truth_PT[prompt_E], torch.zeros(0))

    @torch.no_grad()
    def accuracy(self, policy: NetworkPolicy) -> float:
        """Share of the held-out problems whose last token is right, each token the most probable one."""
        prompt_E = torch.arange(self.trained, len(self.digits_PL))
        said_ET = torch.zeros(len(prompt_E), self.length, dtype=torch.int64)
        for t in range(self.length):
            said_ET[:, t] = policy.at(prompt_E, said_ET, t).argmax(-1)
        return float((said_ET[:, -1] == self.truth_PT[prompt_E, -1]).double().mean())

    def written(self, problem: int) -> tuple[list[str], list[str]]:
        """(the signs of a problem, the tokens of its answer), as a person reads them."""
        numbers = [str(int(d)) for d in self.digits_PL[problem]]
        return [*"+".join(numbers), "="], [str(int(t)) for t in self.truth_PT[problem]]
