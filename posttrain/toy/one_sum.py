"""A policy that half knows the answer to one sum, over the tokens 0 to 9 and the sign that ends an answer.

It says two digits and the sign. `skill` is the probability of each right digit. The rest goes to the other digits, and
more of it to the nearer ones.

>>> policy = sum_policy(12, skill=0.7)
>>> [round(x, 2) for x in torch.softmax(policy.table[0, 0], -1).tolist()][:3]
[0.13, 0.7, 0.13]
>>> text(torch.tensor([1, 2, 10]))
'12#'
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.toy.policies import TabularPolicy

SIGNS = "0123456789#"
END = 10
"""Index of the sign that ends an answer."""


def sum_policy(answer: int, skill: float) -> TabularPolicy:
    """The policy for one prompt whose answer has two digits."""
    digits = [int(d) for d in f"{answer:02d}"]
    # Logits of -12: signs that are not written below are hardly ever said.
    table = torch.full((1, 3, len(SIGNS)), -12.0, dtype=torch.float64)
    for place, right in enumerate(digits):
        away = torch.tensor([abs(d - right) for d in range(10)], dtype=torch.float64)
        # Shares of the remaining probability: each digit further away has a fifth, and the right digit has none.
        share = torch.exp(-1.6 * (away - 1)) * (away > 0)
        table[0, place, :10] = torch.log((1 - skill) * share / share.sum() + skill * (away == 0) + 1e-9)
    table[0, 2, END] = 0.0
    return TabularPolicy(table)


def text(tokens_T: Tensor) -> str:
    """The tokens of one answer as text."""
    return "".join(SIGNS[int(t)] for t in tokens_T)
