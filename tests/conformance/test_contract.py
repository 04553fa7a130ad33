"""Every engine draws what its contract says and stores the log-prob of that: law 5 on the engine's own words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.system.errors import ConfigError, DataError, EngineError
from tests.conformance.subjects import CONTEXT, Subject, contract, segment

OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "truncated": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "top": {"top": 5},
    "penalty": {"repetition_penalty": 1.4},
    "boost": {"repetition_penalty": 0.7, "temperature": 0.8},
    "bias": {"logit_bias": ((40, 3.0), (41, -2.5), (257, 1.0))},
    "allowed": {"allowed_ids": tuple(range(30, 90))},
    "bad": {"bad_ids": ((40,), (41,), (254,))},
    "bad_sequences": {"bad_ids": ((40,), *((a, b) for a in range(30, 90) for b in range(30, 90, 7)))},
    "min_tokens": {"min_tokens": 6, "stop_ids": (256, *range(60))},
    "strings": {"stop": ("a", "é", "zz"), "stop_ids": (256,)},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "logit_bias": ((40, 3.0),),
        "bad_ids": ((41,),),
        "min_tokens": 3,
        "stop_ids": (256, *range(20)),
    },
}
"""Everything an engine may be asked for in training."""
TEXTS = ("3+4=", "The quick brown fox", "naïve café: 3 €", "日本語", "x")
COUNT = 40


def prompts(subject: Subject) -> list[np.ndarray]:
    return [subject.ids(TEXTS[i % len(TEXTS)]) for i in range(COUNT)]


@pytest.mark.beside
@pytest.mark.parametrize("option", OPTIONS)
async def test_stored_log_probs_are_the_learners(subject: Subject, option: str) -> None:
    asked, wanted = prompts(subject), contract(**OPTIONS[option])
    if option in subject.refuses:
        with pytest.raises((ConfigError, EngineError), match=subject.refuses[option]):
            await subject.say(asked, wanted)
        return
    said = await subject.say(asked, wanted.for_training(subject.sampler.keeps_sets))
    gap = subject.gap([segment(p, s, wanted) for p, s in zip(asked, said, strict=True)])
    assert gap.max() < LEAST["float32"].worst and gap.mean() < LEAST["float32"].mean
    assert all(s.logp.dtype == np.float32 and s.ids.dtype == np.int32 for s in said)
    for s in said:
        kept_to(wanted, s)


def kept_to(c: Sampling, s: SampledTurn) -> None:
    """Nothing was said that the contract bans."""
    ids = s.ids.tolist()
    assert c.allowed_ids is None or set(ids) <= set(c.allowed_ids)
    assert not any(tuple(ids[i : i + len(b)]) == b for b in c.bad_ids for i in range(len(ids)))
    assert not set(ids[: c.min_tokens]) & set(c.stop_ids or ())


async def test_a_log_prob_of_another_contract_would_be_seen(subject: Subject) -> None:
    """The same tokens under the contract next door: what the parity test would find if an option were forgotten."""
    asked = prompts(subject)
    said = await subject.say(asked, contract(temperature=0.6))
    gap = subject.gap([segment(p, s, contract()) for p, s in zip(asked, said, strict=True)])
    assert gap.max() > 10 * LEAST["float32"].worst and gap.mean() > 10 * LEAST["float32"].mean


async def test_kept_sets_hold_what_was_said_and_what_top_k_allows(subject: Subject) -> None:
    wanted = contract(top_k=5)
    if not subject.sampler.keeps_sets:
        with pytest.raises(ConfigError, match="does not store the kept sets"):
            wanted.for_training(subject.sampler.keeps_sets)
        return
    for said in await subject.say(prompts(subject), wanted):
        assert said.kept is not None
        for token, kept in zip(said.ids, said.kept.sets(), strict=True):
            assert len(kept) == 5 and token in kept and np.all(np.diff(kept) > 0)


async def test_top_tokens_are_the_learners(subject: Subject) -> None:
    asked, wanted = prompts(subject)[:5], contract(top=5)
    said = await subject.say(asked, wanted)
    theirs = subject.learner.top(Packed.of([segment(p, s, wanted) for p, s in zip(asked, said, strict=True)]), 5)
    assert all(s.top is not None for s in said)
    ids, logp = (np.concatenate([getattr(s.top, name) for s in said]) for name in ("ids", "logp"))
    assert np.abs(logp - theirs.logp).max() < LEAST["float32"].worst
    assert np.mean(ids == theirs.ids) > 0.99


async def test_greedy_is_the_learners_argmax(subject: Subject) -> None:
    asked = prompts(subject)[:5]
    said = await subject.say(asked, contract(greedy=True))
    best = subject.learner.top(
        Packed.of([segment(p, s, contract(greedy=True)) for p, s in zip(asked, said, strict=True)]), 1
    )
    assert np.concatenate([s.ids for s in said]).tolist() == best.ids[:, 0].tolist()
    assert not any(s.logp.any() for s in said)


# --- how a turn ends -------------------------------------------------------------------------------------------------


async def test_stop_reasons_are_true(subject: Subject) -> None:
    stops = tuple(range(26))
    said = await subject.say(prompts(subject), contract(stop_ids=stops))
    assert {s.stop for s in said} == {Stop.SAID, Stop.LENGTH}
    for s in said:
        assert not np.isin(s.ids[:-1], stops).any()
        assert (s.stop is Stop.SAID) == (int(s.ids[-1]) in stops)
        assert s.stop is Stop.SAID or len(s.ids) == 12


async def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(subject: Subject) -> None:
    """Strings of one token, of one character in two tokens, and of two characters; none counts before min_tokens."""
    read, strings = subject.policy.tokenizer.decode, ("a", "é", "zz")
    wanted = contract(
        stop=strings,
        min_tokens=3,
        stop_ids=(256,),
        max_tokens=30,
        logit_bias=((64, 2.0), (127, 3.0), (102, 4.0), (89, 3.0)),
    )
    said = await subject.say(prompts(subject) * 3, wanted)
    assert {Stop.STRING, Stop.LENGTH} <= {s.stop for s in said}
    for s in said:
        complete = [
            n
            for n in range(wanted.min_tokens + 1, len(s.ids) + 1)
            if _new(read(s.ids[:n]), read(s.ids[: n - 1]), strings)
        ]
        assert complete == ([len(s.ids)] if s.stop is Stop.STRING else [])


def _new(whole: str, before: str, strings: tuple[str, ...]) -> bool:
    """Whether the last token brought a string that was not there."""
    return any(whole.count(x) > before.count(x) for x in strings)


async def test_only_the_contracts_stop_ids_end_a_turn(subject: Subject) -> None:
    """Neither the tokenizer's end nor the model's own generation config does."""
    said = await subject.say(prompts(subject) * 2, contract(max_tokens=60))
    assert all(s.stop is Stop.LENGTH and len(s.ids) == 60 for s in said)
    assert any(subject.policy.tokenizer.eos_token_id in s.ids[:-1] for s in said)


@pytest.mark.beside
async def test_the_context_ends_a_turn(subject: Subject) -> None:
    full, near = np.full(CONTEXT - 1, 40, np.int32), np.full(CONTEXT - 5, 41, np.int32)
    (last,) = await subject.say([full], contract())
    assert (last.stop, len(last.ids)) == (Stop.CONTEXT, 1)
    (last,) = await subject.say([full], contract(max_tokens=1))
    assert (last.stop, len(last.ids)) == (Stop.LENGTH, 1)
    (few,) = await subject.say([near], contract())
    assert (few.stop, len(few.ids)) == (Stop.CONTEXT, 5)
    assert subject.gap([segment(near, few, contract())]).max() < LEAST["float32"].worst


@pytest.mark.parametrize(
    ("ids", "message"), [([], "non-empty"), ([1] * CONTEXT, "leaves no room"), ([258], "0..257"), ([5, -1], "0..257")]
)
async def test_a_prompt_that_cannot_be_served_is_refused(subject: Subject, ids: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        await subject.sampler.generate(np.array(ids, np.int32), contract(), 0)


async def test_a_contract_that_is_not_resolved_is_refused(subject: Subject) -> None:
    with pytest.raises(EngineError, match="resolve"):
        await subject.sampler.generate(subject.ids("x"), replace(contract(), stop_ids=None), 0)


# --- tokens in, tokens out -------------------------------------------------------------------------------------------


async def test_tokens_are_taken_and_given_as_they_are(subject: Subject) -> None:
    """A second turn goes on after exactly the ids of the first, half characters and all, and a sibling prompt that
    decodes to the same text is another prompt."""
    halves = [subject.ids("€")[:2], subject.ids("日本")[:4], np.array([200, 10, 255], np.int32)]
    wanted = contract(max_tokens=9)
    first = await subject.say(halves, wanted)
    seen = [np.concatenate([p, s.ids, subject.ids("é")[:1]]) for p, s in zip(halves, first, strict=True)]
    second = await subject.say(seen, wanted)
    assert (
        subject.gap([segment(p, s, wanted) for p, s in zip(seen, second, strict=True)]).max() < LEAST["float32"].worst
    )
    text = [subject.policy.tokenizer.decode(p) for p in (halves[0], halves[0][:1])]
    assert text[0] == text[1]
    once, twice = (
        subject.learner.top(Packed.of([segment(p, _one(7), contract())]), 0).logp for p in (halves[0], halves[0][:1])
    )
    assert np.abs(np.sort(once) - np.sort(twice)).max() > 0.01


async def test_characters_that_span_tokens_are_said_whole(subject: Subject) -> None:
    """Every byte said comes back: the ids decode to the text, and no id is dropped, merged or doubled on the way."""
    said = await subject.say(prompts(subject), contract(max_tokens=40))
    lengths = {len(s.ids) for s in said}
    assert lengths == {40}
    assert any("\ufffd" in subject.policy.tokenizer.decode(s.ids) for s in said)
    assert max(int(s.ids.max()) for s in said) > 127


@pytest.mark.beside
async def test_the_score_of_a_sequence_is_the_learners(subject: Subject) -> None:
    ids = subject.ids("naïve café")
    given = SampledTurn(ids[1:], np.zeros(len(ids) - 1, np.float32), np.zeros(len(ids) - 1, np.int32), Stop.LENGTH)
    theirs = subject.learner.score(Packed.of([segment(ids[:1], given, contract())]))
    assert np.abs(await subject.sampler.score(ids) - theirs).max() < LEAST["float32"].worst


async def test_gauges_count_what_was_delivered(subject: Subject) -> None:
    said = await subject.say(prompts(subject), contract(stop_ids=tuple(range(26))))
    tokens = subject.sampler.gauges()["engine/tokens"]
    assert (tokens.sum, tokens.count) == (sum(len(s.ids) for s in said), len(said))
    assert subject.sampler.gauges()["engine/tokens"].count == 0


def test_every_loop_may_ask(subject: Subject) -> None:
    """One engine serves event loops that follow each other."""
    place = subject.places(1)
    one, two = (asyncio.run(subject.say([subject.ids("x")], contract(), place)) for _ in range(2))
    assert one[0].ids.tolist() == two[0].ids.tolist()


def _one(token: int) -> SampledTurn:
    return SampledTurn(np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), Stop.LENGTH)


def test_options_are_for_training() -> None:
    for changes in OPTIONS.values():
        assert Sampling(**changes).for_training() is not None  # type: ignore[arg-type]
