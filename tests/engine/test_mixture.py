"""An engine that samples from the geometric mixture of two models: the distribution, the draws, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.policy_mixture import Mixture
from posttrain.engine.embedded.speculation import Lookup
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.model.policy_model import named_tensors
from posttrain.system.errors import EngineError
from tests.engine.embedded_parts import V, module, prompts, sampling


def mixed(share: float, dtype: torch.dtype = torch.float64, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        module("qwen3", 0, dtype),
        slots=options.pop("slots", 4),
        context=96,
        mixture=Mixture(module("llama", 1, dtype), share),
        **options,
    )


def logits(built: Any, ids: np.ndarray) -> torch.Tensor:
    """[T, V] float64: the logits after each token, without a cache."""
    out = read_out(built)
    with torch.no_grad():
        whole = torch.as_tensor(ids.astype(np.int64))
        return out.logits(out.hidden(whole, torch.arange(len(whole)), PackedLayout([len(whole)]))).double()


def textbook(share: float, ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: log of pi^(1 - share) ref^share, normalised, from the two distributions as probabilities."""
    pi, ref = (
        torch.softmax(logits(module(f, s, torch.float64), ids) / temperature, -1)
        for f, s in (("qwen3", 0), ("llama", 1))
    )
    product = pi ** (1 - share) * ref**share
    return torch.log(product / product.sum(-1, keepdim=True))


def say(e: EmbeddedEngine, asked: list[np.ndarray], how: Sampling, first: int = 0) -> list[SampledTurn]:
    async def all_of_them() -> list[SampledTurn]:
        return await asyncio.gather(*(e.generate(ids, how, first + i) for i, ids in enumerate(asked)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("share", "temperature"),
    [(0.5, 1.0), *(pytest.param(s, t, marks=pytest.mark.prove) for s in (0.0, 0.3, 1.0) for t in (1.0, 0.6))],
)
def test_the_log_probs_are_those_of_the_mixture(share: float, temperature: float) -> None:
    """Over prompts of several lengths, in float64, with a cache that prompts share."""
    how = sampling(temperature=temperature, max_tokens=12)
    shared = prompts(1)[0]
    asked = [*prompts(5), np.append(shared, 7).astype(np.int32), shared]
    for prompt, said in zip(asked, say(mixed(share), asked, how), strict=True):
        want = textbook(share, np.concatenate([prompt, said.ids]), temperature)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(
            said.logp, want.gather(1, torch.as_tensor(said.ids.astype(np.int64))[:, None])[:, 0], atol=2e-6
        )


@pytest.mark.prove
def test_truncation_is_of_the_mixture() -> None:
    asked = prompts(3)
    for prompt, said in zip(asked, say(mixed(0.5), asked, sampling(top_p=0.7, max_tokens=8)), strict=True):
        assert said.kept is not None
        want = textbook(0.5, np.concatenate([prompt, said.ids]))[len(prompt) - 1 : -1]
        for at, (row, kept) in enumerate(zip(want, said.kept.sets(), strict=True)):
            order = torch.argsort(row, descending=True)
            count = int((row[order].exp().cumsum(0) < 0.7).sum()) + 1
            assert sorted(order[:count].tolist()) == kept.tolist()
            inside = row[torch.as_tensor(kept.astype(np.int64))].logsumexp(0)
            assert said.logp[at] == pytest.approx(float(row[said.ids[at]] - inside), abs=2e-6)


@pytest.mark.prove
def test_tokens_are_drawn_as_often_as_the_mixture_says() -> None:
    """A chi-square test of 3,000 first tokens; against either model alone the same draws fail it by far."""
    prompt, count = prompts(1)[0], 3000
    e = mixed(0.5, torch.float32, slots=64)
    said = [int(s.ids[0]) for s in say(e, [prompt] * count, sampling(max_tokens=1))]
    counts = np.bincount(said, minlength=V)
    for share, right in ((0.5, True), (0.0, False), (1.0, False)):
        want = count * textbook(share, prompt)[-1].exp().numpy()
        rare = want < 5
        cells = [np.append(x[~rare], x[rare].sum() if rare.any() else []) for x in (counts, want)]
        pvalue = stats.chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue
        assert pvalue > 1e-4 if right else pvalue < 1e-9


@pytest.mark.prove
def test_the_ends_are_the_two_models() -> None:
    """Share 0 says token for token what the first model says alone, share 1 what the other says."""
    asked, how = prompts(4), sampling()
    for share, built in ((0.0, module("qwen3", 0, torch.float64)), (1.0, module("llama", 1, torch.float64))):
        alone = EmbeddedEngine(built, slots=4, context=96)
        for one, other in zip(say(mixed(share), asked, how), say(alone, asked, how), strict=True):
            assert one.ids.tolist() == other.ids.tolist()


def test_new_weights_reach_the_first_model_alone() -> None:
    """After a push the mixture is that of the new weights and the old reference; scores are the policy's."""
    e, new = mixed(0.5), module("qwen3", 5, torch.float64)
    asked, how = prompts(2), sampling(max_tokens=6)
    say(e, asked, how)

    async def pushed() -> np.ndarray:
        await e.load(1, list(named_tensors(new)))
        return await e.score(asked[0])

    scored = asyncio.run(pushed())
    want = logits(new, asked[0]).log_softmax(-1)[:-1]
    np.testing.assert_allclose(
        scored, want.gather(1, torch.as_tensor(asked[0][1:].astype(np.int64))[:, None])[:, 0], atol=2e-6
    )
    said = say(e, asked, how, first=9)[0]
    whole = np.concatenate([asked[0], said.ids])
    z = 0.5 * logits(new, whole) + 0.5 * logits(module("llama", 1, torch.float64), whole)
    want = z.log_softmax(-1)[len(asked[0]) - 1 : -1]
    np.testing.assert_allclose(
        said.logp, want.gather(1, torch.as_tensor(said.ids.astype(np.int64))[:, None])[:, 0], atol=2e-6
    )


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(EngineError, match="from 0 to 1"):
        Mixture(module(), 1.5)
    with pytest.raises(EngineError, match="leave speculate out"):
        mixed(0.5, speculate=Lookup(3))
    with pytest.raises(EngineError, match="both in one dtype"):
        EmbeddedEngine(module(), slots=2, context=32, mixture=Mixture(module(dtype=torch.float64), 0.5))
    small = module()
    small.resize_token_embeddings(24)
    with pytest.raises(EngineError, match="same number of rows"):
        EmbeddedEngine(module(), slots=2, context=32, mixture=Mixture(small, 0.5))
