"""A policy that reads one character and says the next: a table of logits, taught on a few sentences.

>>> round(float(taught().exp().sum(-1)[0]), 6)
1.0
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.core.transcript import Transcript

SENTENCES = (
    "the policy says a token and the world pays it",
    "a reward is a number and a verifier is a program",
    "the trainer takes one step and sends the weights",
    "a sampler draws the next letter from what it knows",
    "the mask hides what the policy did not say",
)
LETTERS = " abcdefghijklmnopqrstuvwxyz"


def ids(text: str) -> np.ndarray:
    """int32: the place of each character in `LETTERS`."""
    return np.array([LETTERS.index(c) for c in text], np.int32)


@cache
def taught(steps: int = 60, lr: float = 300.0) -> Tensor:
    """Log-probs [V, V] of the next character (column) after each character (row), by maximum likelihood. `lr` is large
    because the loss is a mean over all characters, and a row gets the gradient of its own few."""
    segments = []
    for sentence in SENTENCES:
        t = Transcript(Sampling(stop_ids=()))
        t.see(ids(" "))
        t.show(ids(sentence + " "))
        segments.append(t.segment())
    spoken = sum(int(s.mask.sum()) for s in segments)
    batch = Batch.of(
        segments, unit_E=np.arange(len(segments), dtype=np.int32), streams={WEIGHT: np.full(spoken, 1 / spoken)}
    )
    # A token's row in the table is the character before it, at the packed position `source_M`.
    before, target = (torch.as_tensor(x, dtype=torch.int64) for x in (batch.ids_N[batch.source_M], batch.target_M))
    table = torch.zeros(len(LETTERS), len(LETTERS), dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        logp = torch.log_softmax(table, -1)[before, target]
        loss = Likelihood().terms(batch, TokenScores(logp, None, None)).loss
        with torch.no_grad():
            table.sub_(lr / len(LETTERS) * torch.autograd.grad(loss, table)[0])
    return torch.log_softmax(table.detach(), -1)
