"""A gated reward head (2406.12845): the prompt weighs the attributes of the completion. Against the formula in float64.

    R(x, y) = sum_k softmax(G h_x)_k (W h_y)_k

h_x is the hidden state of the prompt's last token, h_y that of the completion's last one, or their mean over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.stages.reward_model_settings import HeadShape, Pool
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.streams import MARGIN, RATING, SIDE, WEIGHT, Stream
from posttrain.core.types import SHOWN, Segment
from posttrain.engine.head.value_heads import RewardHead

H, K = 5, 3
PROMPTS = (2, 2, 4, 4, 1, 1)
SPOKEN = (3, 1, 2, 4, 1, 2)
WEIGHTS = (0.5, 0.2, 0.3)
MARGINS = (0.0, 0.7, 0.3)


def batch(streams: Mapping[Stream, Any] = MappingProxyType({})) -> Batch:
    """Three pairs of completions of 1 to 4 tokens, after prompts of 1 to 4."""
    made: list[Segment] = []
    for prompt, spoken in zip(PROMPTS, SPOKEN, strict=True):
        mask = np.arange(prompt + spoken) >= prompt
        logp, version = np.where(mask, 0.0, np.nan).astype(np.float32), np.where(mask, SHOWN, -1).astype(np.int32)
        made.append(Segment(np.arange(prompt + spoken, dtype=np.int32), mask, logp, version, Sampling()))
    each = {SIDE: np.tile([1, 0], 3), WEIGHT: np.repeat(WEIGHTS, 2), MARGIN: np.repeat(MARGINS, 2), **streams}
    spread = {stream: np.repeat(np.asarray(x), SPOKEN, axis=0) for stream, x in each.items()}
    return Batch.of(made, unit_E=np.repeat(np.arange(3, dtype=np.int32), 2), streams=spread)


def head(pool: Pool) -> RewardHead:
    shape = HeadShape(pool=pool, outputs=("helpful", "short", "safe"), gate=True)
    return RewardHead(shape, H, dtype=torch.float64, seed=4)


def textbook(hidden_NH: Tensor, score_KH: Tensor, gate_KH: Tensor, pool: Pool) -> list[Tensor]:
    """R of each completion, token by token."""
    out: list[Tensor] = []
    begin = 0
    for prompt, spoken in zip(PROMPTS, SPOKEN, strict=True):
        asked = hidden_NH[begin + prompt - 1]
        said = [hidden_NH[begin + prompt + t] for t in range(spoken)]
        read = said[-1] if pool == "last" else sum(said[1:], said[0]) / spoken
        loud = [torch.exp(gate_KH[k] @ asked) for k in range(K)]
        total = sum(loud[1:], loud[0])
        each = [loud[k] / total * (score_KH[k] @ read) for k in range(K)]
        out.append(sum(each[1:], each[0]))
        begin += prompt + spoken
    return out


def hidden() -> Tensor:
    return torch.tensor(np.random.default_rng(6).normal(size=(sum(PROMPTS) + sum(SPOKEN), H)))


def of_head(own: RewardHead, made: Batch, hidden_NH: Tensor) -> Any:
    return own.read(made, hidden_NH[torch.from_numpy(own.places(made))])


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_scores_and_the_gradient_of_their_loss_are_the_textbooks(pool: Pool) -> None:
    """Of the hidden states of prompt and completion, of the attributes and of the gate."""
    made, own, ours = batch(), head(pool), hidden().requires_grad_()
    assert own.gate is not None
    rewards = of_head(own, made, ours)
    loss = RankingLoss(shape=own.shape, centre=0.05)
    found = loss.terms(made, TokenScores(None, None, None, rewards=rewards)).loss
    found.backward()

    theirs, score_KH, gate_KH = (t.detach().clone().requires_grad_() for t in (ours, own.score.weight, own.gate.weight))
    scores = textbook(theirs, score_KH, gate_KH, pool)
    wanted = theirs.new_zeros(())
    for u in range(3):
        c, r = scores[2 * u], scores[2 * u + 1]
        wanted = wanted + WEIGHTS[u] * (torch.log(1 + torch.exp(-(c - r - MARGINS[u]))) + 0.05 * (c + r) ** 2)
    wanted.backward()
    torch.testing.assert_close(rewards.score, torch.stack(scores), rtol=1e-12, atol=1e-14)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-13)
    for one, other in ((ours, theirs), (own.score.weight, score_KH), (own.gate.weight, gate_KH)):
        assert one.grad is not None and bool(one.grad.any())
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)


def test_weights_are_the_prompts_alone_and_sum_to_one() -> None:
    """Where all attributes are alike the gate is silent; a score is between the least and the largest output; another
    completion of the same prompt has the same weights; the same number added to all of the gate's changes nothing."""
    made, own, states = batch(), head("last"), hidden()
    assert own.gate is not None
    with torch.no_grad():
        before = of_head(own, made, states)
        assert bool((before.score <= before.outputs.amax(1)).all() & (before.score >= before.outputs.amin(1)).all())
        own.gate.weight += torch.randn(H, dtype=torch.float64)
        torch.testing.assert_close(of_head(own, made, states).score, before.score, rtol=1e-12, atol=1e-13)
        own.score.weight[:] = own.score.weight[0]
        alike = of_head(own, made, states)
        torch.testing.assert_close(alike.score, alike.outputs[:, 0], rtol=1e-12, atol=1e-13)


def test_ratings_teach_the_attributes_and_not_the_gate() -> None:
    """So two stages train it: ratings the attributes, pairs the gate."""
    made, own = batch({RATING: np.random.default_rng(7).normal(size=(6, K))}), head("last")
    assert own.gate is not None
    loss = RankingLoss(judged="rating", shape=own.shape)
    loss.terms(made, TokenScores(None, None, None, rewards=of_head(own, made, hidden()))).loss.backward()
    assert own.score.weight.grad is not None and bool(own.score.weight.grad.any())
    assert own.gate.weight.grad is None or not bool(own.gate.weight.grad.any())
