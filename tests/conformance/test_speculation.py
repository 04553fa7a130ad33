"""Speculative decoding says what the target would say: token for token with prompt lookup, in distribution with a draft
model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers as tf
from scipy import stats
from torch import Tensor

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.cache.forward_plan import Drafts, Plan
from posttrain.engine.embedded.speculation import Draft, Lookup, verify
from posttrain.engine.embedded.token_sampler import Contracts, DrawDistributions
from posttrain.system.errors import EngineError

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def model(vocabulary: int, seed: int, scale: float = 3.0) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    config = tf.Qwen3Config(vocab_size=vocabulary, bos_token_id=None, eos_token_id=None, pad_token_id=None, **SMALL)
    built = tf.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for p in built.parameters():
            if p.ndim > 1:
                p.mul_(scale)
    return built


def engine(vocabulary: int = 5, scale: float = 3.0, **options: object) -> EmbeddedEngine:
    return EmbeddedEngine(model(vocabulary, 0, scale), **({"slots": 16, "context": 96} | options))  # type: ignore[arg-type]


async def ask(e: EmbeddedEngine, prompts: list[np.ndarray], contract: Sampling) -> list[SampledTurn]:
    return list(await asyncio.gather(*[e.generate(p, contract, i) for i, p in enumerate(prompts)]))


def contract(**changes: object) -> Sampling:
    return Sampling(**({"stop_ids": (), "max_tokens": 30} | changes))  # type: ignore[arg-type]


# --- the rule itself -------------------------------------------------------------------------------------------------

N = 40_000


def by_the_rule(p: list[float], q: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """(first tokens said, whether the draft was accepted) of N independent slots with one draft each."""
    chance = [np.random.default_rng(i).random(N) for i in range(3)]
    draft = np.searchsorted(np.cumsum(q), chance[0], side="right")
    rows: Tensor = torch.log(torch.tensor(p)).repeat(2 * N, 1)
    spread = DrawDistributions.of(rows, Contracts.plain(2 * N))
    drafts = Drafts(draft[:, None], np.ones(N, np.int64), [torch.tensor(q).repeat(N, 1)])
    drawn, accepted = verify(spread, drafts, np.repeat(chance[1], 2), np.repeat(chance[2], 2))
    return drawn.ids[::2], accepted


def test_the_published_example() -> None:
    """papers.md D06: p = (.5, .5), q = (.8, .2): accepted with probability .7, the residual all on token 1, frequencies
    .5 / .5."""
    said, accepted = by_the_rule([0.5, 0.5], [0.8, 0.2])
    assert abs(accepted.mean() - 0.7) < 4 * np.sqrt(0.7 * 0.3 / N)
    assert set(said[accepted == 0].tolist()) == {1}
    assert abs(said.mean() - 0.5) < 4 * np.sqrt(0.25 / N)


@pytest.mark.parametrize("q", [[0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.1, 0.8], [0.4, 0.3, 0.2, 0.1]])
def test_what_is_said_has_the_targets_distribution(q: list[float]) -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    said, accepted = by_the_rule(p, q)
    assert stats.chisquare(np.bincount(said, minlength=4), np.array(p) * N).pvalue > 1e-4
    assert abs(accepted.mean() - np.minimum(p, q).sum()) < 0.02
    moved = said.copy()
    moved[np.flatnonzero(said == 0)[: N // 50]] = 3
    assert stats.chisquare(np.bincount(moved, minlength=4), np.array(p) * N).pvalue < 1e-4


# --- the engine with it ----------------------------------------------------------------------------------------------


def looping(count: int, vocabulary: int) -> list[np.ndarray]:
    """Prompts that repeat themselves, so that there is something to look up."""
    rng = np.random.default_rng(0)
    return [
        np.tile(rng.integers(0, vocabulary, rng.integers(2, 5)), 4)[: rng.integers(6, 14)].astype(np.int32)
        for _ in range(count)
    ]


CONTRACTS = {
    "plain": contract(),
    "cold": contract(temperature=0.3),
    "truncated": contract(top_p=0.8, top_k=4, top=2),
    "greedy": contract(greedy=True),
    "penalty": contract(repetition_penalty=1.3, temperature=0.5),
    "ruled": contract(min_tokens=9, stop_ids=(2,), bad_ids=((1, 1),), temperature=0.6),
    "stops": contract(stop_ids=(0,)),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_prompt_lookup_says_the_very_same(name: str) -> None:
    prompts = looping(40, 8)
    plain = asyncio.run(ask(engine(8), prompts, CONTRACTS[name]))
    e = engine(8, speculate=Lookup(tokens=5))
    for a, b in zip(asyncio.run(ask(e, prompts, CONTRACTS[name])), plain, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.abs(a.logp - b.logp).max() < 2e-5
        assert a.stop is b.stop
        assert (a.kept is None) == (b.kept is None) and (a.top is None) == (b.top is None)
        if a.kept is not None and b.kept is not None:
            assert np.array_equal(a.kept.ids, b.kept.ids)
    gauges = e.gauges()
    assert gauges["engine/accepted"].sum > 20
    assert e.blocks_in_use == 0


def test_accepted_drafts_save_passes_and_give_way_with_the_rest() -> None:
    """Greedy text soon repeats itself. In a cache too small for all, who gives way says the same too."""
    prompts, asked = looping(8, 8), contract(greedy=True, max_tokens=60)
    slow, fast = engine(8, slots=8), engine(8, slots=8, speculate=Lookup(tokens=6))
    plain = asyncio.run(ask(slow, prompts, asked))
    for a, b in zip(asyncio.run(ask(fast, prompts, asked)), plain, strict=True):
        assert np.array_equal(a.ids, b.ids)
    assert fast.gauges()["engine/steps"].sum < 0.7 * slow.gauges()["engine/steps"].sum
    row = 16 * 2 * 8 * 4
    small = engine(8, slots=8, speculate=Lookup(tokens=6), cache_bytes=14 * row)
    for a, b in zip(asyncio.run(ask(small, prompts, asked)), plain, strict=True):
        assert np.array_equal(a.ids, b.ids)
    assert small.gauges()["engine/preempted"].sum > 0


@pytest.mark.parametrize("budget", [1, 9, 20, 27])
@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_drafts_stay_within_the_budget_of_a_pass(kind: str, budget: int) -> None:
    """Eight slots with up to six drafts each would compute 56 positions; one for each slot is always computed."""
    speculate = Lookup(tokens=6) if kind == "lookup" else Draft(model(8, 0), tokens=6)
    e, passes = engine(8, slots=8, budget=budget, speculate=speculate), []
    run = e._served.run

    def noted(plan: Plan) -> object:
        passes.append(len(plan.ids))
        return run(plan)

    e._served.run = noted  # type: ignore[method-assign, assignment]
    prompts, asked = looping(12, 8), contract(greedy=True, max_tokens=40)
    said = asyncio.run(ask(e, prompts, asked))
    assert max(passes) <= max(budget, 8)
    assert (e.gauges()["engine/accepted"].sum > 20) if budget > 16 else True
    for a, b in zip(said, asyncio.run(ask(engine(8), prompts, asked)), strict=True):
        assert np.array_equal(a.ids, b.ids)


def exact(target: tf.PreTrainedModel, prompt: np.ndarray, length: int, temperature: float) -> np.ndarray:
    """Probability of every continuation of this length, [V ** length], by one forward each."""
    vocabulary = target.config.vocab_size
    out = []
    for said in itertools.product(range(vocabulary), repeat=length):
        whole = torch.tensor([*prompt.tolist(), *said])
        with torch.no_grad():
            z = target(input_ids=whole[None]).logits[0].double() / temperature
        logp = z.log_softmax(-1)
        out.append(sum(float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(said)))
    return np.exp(out)


def test_a_draft_model_leaves_the_targets_distribution() -> None:
    """All 81 continuations of four tokens, 4,000 draws: they follow the target by enumeration and not the draft
    model."""
    vocabulary, length, count, heat = 3, 4, 4000, 1.3
    target, small = model(vocabulary, 0, 4.0), model(vocabulary, 1, 4.0)
    prompt = np.array([1, 2, 0], np.int32)
    e = EmbeddedEngine(model(vocabulary, 0, 4.0), slots=64, context=32, speculate=Draft(small, tokens=3))
    said = asyncio.run(ask(e, [prompt] * count, contract(max_tokens=length, temperature=heat)))
    counts = np.bincount(
        [int(s.ids @ vocabulary ** np.arange(length)[::-1]) for s in said], minlength=vocabulary**length
    )
    right, wrong = exact(target, prompt, length, heat), exact(model(vocabulary, 1, 4.0), prompt, length, heat)
    assert stats.chisquare(counts, right * count).pvalue > 1e-4
    assert stats.chisquare(counts, wrong / wrong.sum() * count).pvalue < 1e-9
    accepted = e.gauges()["engine/accepted"]
    assert 0.1 < accepted.mean < 0.9
    for s in said[:50]:
        at = int(s.ids @ vocabulary ** np.arange(length)[::-1])
        assert abs(float(s.logp.sum()) - float(np.log(right[at]))) < 1e-4


def test_the_target_as_its_own_draft_is_always_right() -> None:
    e = engine(6, speculate=Draft(model(6, 0), tokens=4))
    said = asyncio.run(ask(e, looping(20, 6), contract(max_tokens=25)))
    assert e.gauges()["engine/accepted"].mean > 0.99
    assert all(len(s.ids) == 25 for s in said)


def test_drafts_behind_a_stop_were_not_said() -> None:
    """Four drafts a pass, all of them right: a turn's tokens after the first are said five a pass, and what lies behind
    the stop counts as drafted, computed and neither said nor needed."""
    e, before_the_stop = engine(6, slots=1, speculate=Draft(model(6, 0), tokens=4)), set[int]()
    for i, prompt in enumerate(looping(24, 6)):
        (said,) = asyncio.run(ask(e, [prompt], contract(stop_ids=(i % 6,), max_tokens=70)))
        gauges, more = e.gauges(), len(said.ids) - 1
        if said.stop is not Stop.SAID or not more:
            continue
        before_the_stop.add(more % 5)
        assert gauges["engine/accepted"].sum == more - more // 5
        assert gauges["engine/accepted"].count == 4 * -(-more // 5)
        linear, pairs, needed = (
            gauges["engine/positions_linear"],
            gauges["engine/positions_attention"],
            len(prompt) + more,
        )
        found = gauges["engine/prefix_hits"].sum
        assert (linear.sum, linear.count) == (len(prompt) - found + 5 * -(-more // 5), needed - found)
        assert pairs.count == needed * (needed + 1) // 2 - found * (found + 1) // 2
    assert len(before_the_stop) > 2


def test_a_draft_model_under_a_greedy_contract_changes_nothing() -> None:
    prompts, asked = looping(12, 6), contract(greedy=True)
    e = engine(6, speculate=Draft(model(6, 1), tokens=3))
    for a, b in zip(asyncio.run(ask(e, prompts, asked)), asyncio.run(ask(engine(6), prompts, asked)), strict=True):
        assert np.array_equal(a.ids, b.ids)


def test_draws_belong_to_their_place() -> None:
    """Neighbours, order and time of arrival do not matter (law 8)."""
    prompts = looping(12, 6)
    many = asyncio.run(ask(engine(6, speculate=Draft(model(6, 1), tokens=3)), prompts, contract()))
    few = asyncio.run(ask(engine(6, slots=2, speculate=Draft(model(6, 1), tokens=3)), prompts, contract()))
    for a, b in zip(many, few, strict=True):
        assert np.array_equal(a.ids, b.ids)
    assert seeds.key(3, "draft") != seeds.key(3, "accept")


def test_what_cannot_be_speculated_is_refused() -> None:
    with pytest.raises(EngineError, match="deterministic"):
        engine(speculate=Lookup(), deterministic=True)
    with pytest.raises(EngineError, match="vocabulary of 6"):
        engine(5, speculate=Draft(model(6, 1)))
    with pytest.raises(EngineError, match="at least 1"):
        engine(speculate=Lookup(tokens=0))
    with pytest.raises(EngineError, match="at least 1"):
        engine(speculate=Draft(model(5, 1), tokens=0))


# --- rules, and contracts that lead nowhere ---------------------------------------------------------------------------

RULED = contract(
    max_tokens=4, repetition_penalty=1.5, bad_ids=((1, 1), (2, 0, 2)), min_tokens=1, stop_ids=(3,), temperature=1.2
)
DEAD_END = contract(max_tokens=4, bad_ids=((3, 0, 0), (3, 0, 1), (3, 0, 2), (3, 0, 3), (2, 2)))
"""After 3 0 nothing is left to say, so a request that says them before its end fails."""


def under_rules(target: tf.PreTrainedModel, prompt: np.ndarray, s: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every turn, by one forward a token; a turn that leads nowhere is the key ()."""
    out: dict[tuple[int, ...], float] = {}

    def walk(said: tuple[int, ...], p: float) -> None:
        if len(said) == s.max_tokens or (said and said[-1] in (s.stop_ids or ())):
            out[said] = p
            return
        with torch.no_grad():
            z = target(input_ids=torch.tensor([[*prompt.tolist(), *said]])).logits[0, -1].double().numpy()
        seen = [*set(prompt.tolist()) | set(said)]
        z[seen] = np.where(z[seen] < 0, z[seen] * s.repetition_penalty, z[seen] / s.repetition_penalty)
        z[[b[-1] for b in s.bad_ids if said[len(said) - len(b) + 1 :] == b[:-1] and len(said) >= len(b) - 1]] = -np.inf
        if len(said) < s.min_tokens:
            z[list(s.stop_ids or ())] = -np.inf
        if np.isneginf(z).all():
            out[()] = out.get((), 0.0) + p
            return
        q = np.exp(z / s.temperature - (z / s.temperature).max())
        for token in np.flatnonzero(q).tolist():
            walk((*said, token), p * float(q[token] / q.sum()))

    walk((), 1.0)
    return out


async def ask_all(e: EmbeddedEngine, prompt: np.ndarray, s: Sampling, count: int) -> list[tuple[int, ...]]:
    """What each request said; () where it failed because nothing was left."""
    got = await asyncio.gather(*[e.generate(prompt, s, i) for i in range(count)], return_exceptions=True)
    assert all(isinstance(x, SampledTurn) or (isinstance(x, EngineError) and "bans every token" in str(x)) for x in got)
    return [tuple(x.ids.tolist()) if isinstance(x, SampledTurn) else () for x in got]


@pytest.mark.parametrize("how", ["one at a time", "lookup", "draft"])
@pytest.mark.parametrize("s", [RULED, DEAD_END], ids=["ruled", "dead_end"])
def test_turns_under_rules_have_the_targets_distribution(how: str, s: Sampling) -> None:
    """Every turn of at most four tokens by enumeration; those that lead nowhere fail as often as they must, and
    alone."""
    prompt, count = np.array([1, 2, 1, 2], np.int32), 1200
    speculate = {"one at a time": None, "lookup": Lookup(tokens=3), "draft": Draft(model(4, 1, 4.0), tokens=3)}[how]
    few = 4  # a step in which a slot has nothing left to say drafts nothing
    e = EmbeddedEngine(model(4, 0, 4.0), slots=few if s is DEAD_END else 64, context=32, speculate=speculate)
    said = asyncio.run(ask_all(e, prompt, s, count))
    p = under_rules(model(4, 0, 4.0), prompt, s)
    assert set(said) <= set(p) and ((() in p) == (s is DEAD_END))
    common = [t for t in p if p[t] * count > 5]
    expected = np.array([*(p[t] for t in common), sum(x for t, x in p.items() if t not in common) + 1e-9])
    counts = np.array([*(said.count(t) for t in common), sum(t not in common for t in said)])
    assert stats.chisquare(counts, expected / expected.sum() * count).pvalue > 1e-4
    moved = counts.copy()
    moved[counts.argmax()] -= count // 40
    moved[counts.argmin()] += count // 40
    assert stats.chisquare(moved, expected / expected.sum() * count).pvalue < 1e-4
    assert e.blocks_in_use == 0
    if how == "draft":
        assert 0.05 < e.gauges()["engine/accepted"].mean < 0.95


def test_stop_strings_end_a_turn_among_accepted_drafts() -> None:
    letters = "abcdefgh"

    def read(ids: np.ndarray) -> str:
        return "".join(letters[i] for i in ids)

    s = contract(stop=("ab", "cc", "h"), min_tokens=3)
    plain = asyncio.run(ask(engine(8, text=read), looping(40, 8), s))
    e = engine(8, text=read, speculate=Lookup(tokens=5))
    for a, b in zip(asyncio.run(ask(e, looping(40, 8), s)), plain, strict=True):
        assert np.array_equal(a.ids, b.ids) and a.stop is b.stop
    assert e.gauges()["engine/accepted"].sum > 5
    assert {a.stop for a in plain} == {Stop.STRING, Stop.LENGTH} or all(a.stop is Stop.STRING for a in plain)


@pytest.mark.parametrize("speculate", [lambda: Lookup(tokens=3), lambda: Draft(model(6, 1), tokens=3)])
def test_an_engine_that_failed_remembers_nobody(
    speculate: Callable[[], Lookup | Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error requests are counted from 0 again, and draw from their own places all the same."""
    e, fresh = (engine(6, slots=4, speculate=speculate()) for _ in range(2))
    with monkeypatch.context() as patch:
        calls = iter(range(10**6))

        def breaks(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def after_a_while(hidden: Tensor) -> Tensor:
                if next(calls) > 6:
                    raise RuntimeError("no logits")
                return logits(hidden)

            return after_a_while

        patch.setattr(e._served, "logits", breaks(e._served.logits))
        with pytest.raises(RuntimeError, match="no logits"):
            asyncio.run(ask(e, looping(4, 6), contract()))

    async def elsewhere(which: EmbeddedEngine) -> list[SampledTurn]:
        return list(
            await asyncio.gather(*[which.generate(p, contract(), 100 + i) for i, p in enumerate(looping(8, 6)[4:])])
        )

    for a, b in zip(asyncio.run(elsewhere(e)), asyncio.run(elsewhere(fresh)), strict=True):
        assert np.array_equal(a.ids, b.ids)
