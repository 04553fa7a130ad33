"""Many requests at once: each gets its own draw of the right distribution, whoever runs beside it, and none is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from scipy import stats

from posttrain.core.batch import Packed
from posttrain.core.types import SampledTurn, Stop
from posttrain.role.learning.logprob_tolerance import LEAST
from tests.conformance.subjects import Subject, contract, segment


async def test_a_thousand_requests_follow_the_learners_distribution(subject: Subject) -> None:
    """Chi-square of a thousand first tokens; the same draws with a fifth of the mass moved fail it."""
    prompt, wanted = subject.ids("3+4="), contract(max_tokens=3)
    said = await subject.say([prompt] * 1000, wanted)
    assert len(said) == 1000 and all(len(s.ids) == 3 for s in said)
    assert subject.gap([segment(prompt, s, wanted) for s in said[:50]]).max() < LEAST["float32"].worst
    first = np.array([s.ids[0] for s in said])
    top = subject.learner.top(Packed.of([segment(prompt, said[0], wanted)]), 0)
    probability = np.zeros(top.ids.shape[1])
    probability[top.ids[0]] = np.exp(top.logp[0].astype(np.float64))
    assert p_value(first, probability) > 1e-4
    moved = first.copy()
    moved[:200] = top.ids[0, 0]
    assert p_value(moved, probability) < 1e-4


def p_value(ids: np.ndarray, probability: np.ndarray) -> float:
    """Of the counts of `ids`; tokens expected less than eight times are one bin."""
    counts, expected = (
        np.bincount(ids, minlength=len(probability)).astype(float),
        probability / probability.sum() * len(ids),
    )
    common = expected >= 8
    return float(
        stats.chisquare(
            np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
        ).pvalue
    )


@pytest.mark.beside
async def test_a_seed_says_the_same_again(subject: Subject) -> None:
    """Alone, beside others, and in another order; another seed says something else."""
    asked = [subject.ids(t) for t in ("3+4=", "abc", "naïve", "The quick brown fox jumps", "x", "12345678901234567890")]
    wanted, places = contract(max_tokens=20), subject.places(6)
    together = await subject.say(asked, wanted, places)
    backwards = (await subject.say(asked[::-1], wanted, places[::-1]))[::-1]
    alone = [(await subject.say([p], wanted, [at]))[0] for p, at in zip(asked, places, strict=True)]
    crowded = (await subject.say(asked + asked * 6, wanted, places + subject.places(36)))[:6]
    for other in (backwards, alone, crowded):
        for a, b in zip(together, other, strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert np.abs(a.logp - b.logp).max() < 1e-4
    elsewhere = await subject.say(asked, wanted)
    assert all(a.ids.tolist() != b.ids.tolist() for a, b in zip(together, elsewhere, strict=True))


async def test_siblings_do_not_repeat_each_other(subject: Subject) -> None:
    said = await subject.say([subject.ids("3+4=")] * 16, contract(max_tokens=20))
    assert len({s.ids.tobytes() for s in said}) == 16


async def test_a_cancelled_request_leaves_nothing_and_harms_nobody(subject: Subject) -> None:
    asked, wanted = [subject.ids("The quick brown fox")] * 60, contract(max_tokens=100)
    places = subject.places(60)
    tasks = [asyncio.create_task(subject.sampler.generate(p, wanted, at)) for p, at in zip(asked, places, strict=True)]
    await asyncio.sleep(0.02)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(d, asyncio.CancelledError) for d in done[::2])
    kept = [d for d in done[1::2] if isinstance(d, SampledTurn)]
    assert len(kept) == 30 and all(len(s.ids) == 100 and s.stop is Stop.LENGTH for s in kept)
    assert subject.gap([segment(asked[0], s, wanted) for s in kept]).max() < LEAST["float32"].worst
    for _ in range(200):
        if subject.idle():
            break
        await asyncio.sleep(0.05)
    assert subject.idle()
    tokens = subject.sampler.gauges()["engine/tokens"]
    assert (tokens.sum, tokens.count) == (3000, 30)


async def test_one_bad_request_does_not_spoil_the_others(subject: Subject) -> None:
    good = [
        asyncio.create_task(subject.sampler.generate(subject.ids("abc"), contract(), at)) for at in subject.places(8)
    ]
    with pytest.raises(Exception, match="non-empty"):
        await subject.sampler.generate(np.zeros(0, np.int32), contract(), 0)
    assert all(len(s.ids) == 12 for s in await asyncio.gather(*good))


async def test_prompts_that_are_longer_than_one_pass_together_are_answered(subject: Subject) -> None:
    """32 prompts of 150 tokens, beginning with different ones: more than the 2,048 positions of a pass."""
    asked, wanted = [subject.ids(f"{i:03d}" + "=" * 147) for i in range(32)], contract(max_tokens=4)
    said = await subject.say(asked, wanted)
    assert all(len(s.ids) == 4 for s in said)
    gaps = [subject.gap([segment(p, s, wanted)]).max() for p, s in zip(asked, said, strict=True)]
    assert max(gaps) < LEAST["float32"].worst
