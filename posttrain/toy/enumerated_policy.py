"""A policy whose answers can all be listed, so that an expectation is a finite sum and its gradient is exact.

>>> policy = PrefixPolicy(0)
>>> len(policy.all), len(policy.states), tuple(policy.logits.shape)
(31, 15, (15, 3))
>>> round(policy.probabilities().sum().item(), 12)
1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from posttrain.core.sampling import Sampling
from posttrain.core.scored import ScoredGroup
from posttrain.core.types import Stop
from posttrain.toy.episodes import PlainEpisode, scored_group

Response = tuple[int, ...]


def responses(vocabulary: int = 3, longest: int = 4, eos: int = 0) -> list[Response]:
    """All responses of at most `longest` tokens: ended by `eos`, or cut off at `longest`. Shortest first.

    >>> responses(vocabulary=2, longest=2)
    [(0,), (1, 0), (1, 1)]
    """
    out: list[Response] = []
    for n in range(1, longest + 1):
        for y in product(range(vocabulary), repeat=n):
            # `eos` ends a response, so it is never followed by a token. Only responses of the full length may lack it.
            if eos not in y[:-1] and (y[-1] == eos or n == longest):
                out.append(y)
    return out


class PrefixPolicy:
    """A separate softmax after every prefix: `logits` [states, vocabulary], float64, drawn from N(0, scale).

    Axis letters: R responses, S states. `all` [R] are the responses, `states` [S] the prefixes that are not complete.
    """

    def __init__(self, seed: int, scale: float = 0.7, *, vocabulary: int = 3, longest: int = 4, eos: int = 0) -> None:
        self.eos, self.sampling = eos, Sampling(max_tokens=longest, stop_ids=(eos,))
        self.all = responses(vocabulary, longest, eos)
        self.lengths = [len(y) for y in self.all]
        # Every prefix of a response that is not complete has a row in the table.
        self.states = sorted({y[:t] for y in self.all for t in range(len(y))})
        self.index = {s: i for i, s in enumerate(self.states)}
        draws = np.random.default_rng(seed).normal(size=(len(self.states), vocabulary)) * scale
        self.logits = torch.tensor(draws, dtype=torch.float64, requires_grad=True)

    def states_of(self, y: Sequence[int]) -> list[int]:
        """The row of the table from which each token of a response is drawn, [|y|]."""
        return [self.index[tuple(y[:t])] for t in range(len(y))]

    def token_logp(self, y: Sequence[int]) -> Tensor:
        """log pi(y_t | y_<t), [|y|], differentiable."""
        return torch.log_softmax(self.logits, -1)[self.states_of(y), list(y)]

    def logp(self) -> Tensor:
        """log pi(y) of every response, [R], differentiable."""
        return torch.stack([self.token_logp(y).sum() for y in self.all])

    def probabilities(self) -> Tensor:
        """pi(y) of every response, [R], differentiable. They sum to one."""
        return self.logp().exp()

    def visits(self) -> Tensor:
        """Probability that an answer passes through each state, [S], a constant."""
        out = torch.zeros(len(self.states), dtype=torch.float64)
        for y, p in zip(self.all, self.probabilities().detach(), strict=True):
            out[self.states_of(y)] += p
        return out

    def gradient(self, f: Tensor) -> Tensor:
        """d f / d logits of a number f that was computed from this policy, [S, vocabulary]."""
        return torch.autograd.grad(f, self.logits)[0]

    def exact(self, f_R: Tensor) -> Tensor:
        """Gradient of E[f(y)] for a constant f, [S, vocabulary]."""
        return self.gradient((self.probabilities() * f_R).sum())

    def groups(self, siblings: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every group of siblings with its probability. A group is the indices of its responses in `all`.

        >>> small = PrefixPolicy(0, vocabulary=2, longest=2)
        >>> [chosen for chosen, p in small.groups(2)][:4], round(sum(p for _, p in small.groups(2)), 12)
        ([(0, 0), (0, 1), (0, 2), (1, 0)], 1.0)
        """
        p = self.probabilities().detach().numpy()
        for chosen in product(range(len(self.all)), repeat=siblings):
            yield chosen, float(np.prod(p[list(chosen)]))

    def plain(self, i: int, reward: float) -> PlainEpisode:
        """The i-th response as an episode that this policy sampled, with this reward."""
        y = self.all[i]
        stop = Stop.SAID if y[-1] == self.eos else Stop.LENGTH
        mu = self.token_logp(y).detach().numpy()
        return PlainEpisode(reward, [[len(y)]], mu, ids=np.array(y, np.int32), stop=stop, sampling=self.sampling)

    def draw(self, name: str, rewards_R: Sequence[float], siblings: int, rng: np.random.Generator) -> ScoredGroup:
        """A group of siblings drawn from this policy. `rewards_R` are the rewards of the responses.

        >>> policy = PrefixPolicy(0)
        >>> group = policy.draw("a", [float(len(y)) for y in policy.all], 4, np.random.default_rng(0))
        >>> len(group.episodes), group.group.rewards.tolist() == [float(e.episode.spoken) for e in group.episodes]
        (4, True)
        """
        chosen = rng.choice(len(self.all), size=siblings, p=self.probabilities().detach().numpy()).tolist()
        # Equal responses share one plain episode, so it is computed once.
        plain = {i: self.plain(i, float(rewards_R[i])) for i in set(chosen)}
        return scored_group(name, [plain[i] for i in chosen])


def answer_kl(policy: PrefixPolicy, reference: PrefixPolicy) -> Tensor:
    """KL(policy || reference) over whole answers, differentiable in the policy.

    >>> p, q = PrefixPolicy(0), PrefixPolicy(1)
    >>> bool(torch.isclose(answer_kl(p, q), state_kl(p, q, p.visits()), atol=1e-12))
    True
    """
    logp = policy.logp()
    return (logp.exp() * (logp - reference.logp().detach())).sum()


def state_kl(policy: PrefixPolicy, reference: PrefixPolicy, visits_S: Tensor, *, forward: bool = False) -> Tensor:
    """KL(policy || reference) of the next token, summed over states with the weights `visits_S` (constants).

    With `forward` it is KL(reference || policy). Differentiable in the policy.
    """
    table, ref = torch.log_softmax(policy.logits, -1), torch.log_softmax(reference.logits, -1).detach()
    each_S = (ref.exp() * (ref - table)).sum(-1) if forward else (table.exp() * (table - ref)).sum(-1)
    return (visits_S * each_S).sum()
