"""The world that most miniatures share: a + b mod m, answered in a few tokens by a small network, which first imitates
answers of which only a share is right."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.toy.answers import Answers, imitate
from posttrain.toy.policies import NetworkPolicy


@dataclass(frozen=True)
class Sums:
    """All m * m prompts; an answer is `free` tokens that do not matter, then the sum."""

    m: int = 11
    free: int = 0
    skew: float = 0.0
    """The k-th choice of imitated tokens has weight k^-skew, and the right sum is the last, the least common one."""

    @property
    def prompts(self) -> int:
        return self.m * self.m

    @property
    def length(self) -> int:
        return self.free + 1

    @property
    def features_PF(self) -> Tensor:
        """Both numbers of each prompt as one-hot vectors, side by side."""
        a, b = torch.arange(self.prompts) // self.m, torch.arange(self.prompts) % self.m
        return torch.cat([torch.eye(self.m)[a], torch.eye(self.m)[b]], 1)

    @property
    def truth_P(self) -> Tensor:
        """int64: the right sum of each prompt."""
        return (torch.arange(self.prompts) // self.m + torch.arange(self.prompts) % self.m) % self.m

    def taught(self, seed: int, *, hidden: int, steps: int, right: float | tuple[float, float]) -> NetworkPolicy:
        """A network that imitated answers of which a share was correct, and the others random. Two shares are for
        prompts of even and of odd number."""
        return deepcopy(self._taught(seed, hidden, steps, right if isinstance(right, tuple) else (right, right)))

    @cache  # noqa: B019  (worlds live as long as the program)
    def _taught(self, seed: int, hidden: int, steps: int, right: tuple[float, float]) -> NetworkPolicy:
        """`taught` before it is copied. The copy is what its callers train, so the cached network stays as it is."""
        generator = torch.Generator().manual_seed(seed)
        policy = NetworkPolicy(self.features_PF, self.length, self.m, hidden, seed)
        prompt_E = torch.arange(self.prompts).repeat(20)
        choices = (1.0 + torch.arange(self.m, dtype=torch.float64)) ** -self.skew
        tokens_ET = torch.multinomial(
            choices, len(prompt_E) * self.length, replacement=True, generator=generator
        ).reshape(-1, self.length)
        # The token k + 1 places after the sum (modulo m): the last and least common choice is the sum itself.
        tokens_ET[:, -1] = (self.truth_P[prompt_E] + 1 + tokens_ET[:, -1]) % self.m
        # `prompt_E % 2` chooses between the shares of even and of odd prompts.
        good_E = torch.rand(len(prompt_E), generator=generator) < torch.tensor(right)[prompt_E % 2]
        tokens_ET[good_E, -1] = self.truth_P[prompt_E[good_E]]
        imitate(policy, prompt_E, tokens_ET, steps, 5e-3, generator)
        return policy

    def rewards(self, answers: Answers, g: int) -> np.ndarray:
        """1 for the sum, 0 for anything else, [P, G]."""
        return (answers.tokens_ET[:, -1] == self.truth_P[answers.prompt_E]).double().numpy().reshape(-1, g)

    @torch.no_grad()
    def solved(self, policy: NetworkPolicy) -> Tensor:
        """Exact probability of the right sum for every prompt [P]. The answers must have no free tokens."""
        assert self.free == 0
        everything = torch.arange(self.prompts)
        logits = policy(everything, torch.zeros(self.prompts, 1, dtype=torch.int64))[:, 0]
        return torch.softmax(logits, -1).gather(1, self.truth_P[:, None])[:, 0]

    def accuracy(self, policy: NetworkPolicy) -> float:
        """Mean probability of the right sum over all prompts."""
        return float(self.solved(policy).mean())
