"""Policies over answers of one length, to many prompts at once: a table, and a network that shares its weights.

Axis letters: P prompts, E answers of T tokens each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class ToyPolicy(Protocol):
    """A policy that answers are drawn from, and that learns from them."""

    length: int
    """Tokens of an answer."""

    def at(self, prompt_E: Tensor, tokens_ET: Tensor, t: int) -> Tensor:
        """Logits [E, V] of token t; they read the prompt and the tokens before t alone."""
        ...

    def __call__(self, prompt_E: Tensor, tokens_ET: Tensor) -> Tensor:
        """Logits [E, T, V] of every token."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that an optimizer changes."""
        ...


class TabularPolicy(nn.Module):
    """A separate softmax for every prompt and position: logits [P, T, V]. Nothing is shared, so nothing generalises.

    >>> policy = TabularPolicy(torch.zeros(2, 3, 4))
    >>> policy(torch.tensor([0, 1, 1]), torch.zeros(3, 3, dtype=torch.int64)).shape
    torch.Size([3, 3, 4])
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits.double().clone())
        self.length = logits.shape[1]

    def at(self, prompt_E: Tensor, tokens_ET: Tensor, t: int) -> Tensor:
        return self.table[prompt_E, t]

    def forward(self, prompt_E: Tensor, tokens_ET: Tensor) -> Tensor:
        return self.table[prompt_E]


class NetworkPolicy(nn.Module):
    """A perceptron that reads features of the prompt [P, F], the position and the tokens so far. All prompts share its
    weights.

    >>> policy = NetworkPolicy(torch.eye(2), length=3, vocabulary=4, hidden=8, seed=0)
    >>> prompt_E, tokens_ET = torch.tensor([0, 1, 1]), torch.randint(4, (3, 3))
    >>> torch.allclose(policy(prompt_E, tokens_ET)[:, 2], policy.at(prompt_E, tokens_ET, 2))
    True
    """

    def __init__(self, features_PF: Tensor, length: int, vocabulary: int, hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * scale)

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
        # The sum over the tokens strictly before t: the logits at t must not read token t.
        before_ETH = torch.cumsum(said_ETH, 1) - said_ETH
        return self._read((self.features_PF @ self.prompt)[prompt_E][:, None] + self.place + before_ETH)

    def at(self, prompt_E: Tensor, tokens_ET: Tensor, t: int) -> Tensor:
        said_EH = self.said[torch.arange(t), tokens_ET[:, :t]].sum(1)
        return self._read((self.features_PF @ self.prompt)[prompt_E] + self.place[t] + said_EH)

    def _read(self, x: Tensor) -> Tensor:
        """Logits from the sum of the inputs, through one hidden layer."""
        return torch.relu(torch.relu(x) @ self.middle + self.bias) @ self.out
