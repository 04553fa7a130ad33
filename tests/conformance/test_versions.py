"""New weights: every token carries the version that said it, nothing cached survives, and bad weights change
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from posttrain.core.types import SampledTurn, Stop
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import EngineError, InvariantError
from tests.conformance.subjects import Subject, contract, segment

LONG = "A prompt of several cache blocks, so that there is something to find again under the new weights: " + "=" * 60
"""158 tokens: more than the largest block of any engine (128, vLLM for CPU)."""


async def test_every_token_carries_the_version_that_said_it(subject: Subject) -> None:
    """Weights arrive while 64 sequences are being said or wait; each token agrees with the learner of its own
    version."""
    prompt, wanted = subject.ids("3+4="), contract(max_tokens=40)
    old = subject.sampler.version
    running = [asyncio.create_task(subject.sampler.generate(prompt, wanted, at)) for at in subject.places(64)]
    await asyncio.sleep(0.02)
    await subject.publish(2)
    said = await asyncio.gather(*running) + await subject.say([prompt] * 4, wanted)
    assert {v for s in said for v in s.version.tolist()} == {old, old + 1}
    assert all(s.version.tolist() == [old + 1] * 40 for s in said[-4:])
    newer = _gaps(subject, prompt, said)
    await subject.publish(1)
    older = _gaps(subject, prompt, said)
    for s, n, o in zip(said, newer, older, strict=True):
        assert np.where(s.version == old, o, n).max() < LEAST["float32"].worst
        assert np.where(s.version == old, n, o).mean() > 10 * LEAST["float32"].worst


def _gaps(subject: Subject, prompt: np.ndarray, said: Iterable[SampledTurn]) -> list[np.ndarray]:
    return [subject.gap([segment(prompt, s, contract())]) for s in said]


async def test_turns_go_on_under_new_weights(subject: Subject) -> None:
    """In flight: turns stand still while weights come and go on under them. Each token, also of a turn of both
    versions, agrees with the learner of its own version, so keys and values are computed again."""
    prompt, wanted, pause = subject.ids(LONG[:60]), contract(max_tokens=120), 0.2
    for _ in range(15):
        await subject.publish(1)
        old = subject.sampler.version
        with subject.inflight():
            running = [asyncio.create_task(subject.sampler.generate(prompt, wanted, at)) for at in subject.places(16)]
            await asyncio.sleep(pause)
            await subject.publish(2)
            said = await asyncio.gather(*running)
        # turns of the embedded engine end before this loop goes on; tests/engine/test_engine_schedule.py stops them
        if isinstance(subject.sampler, EmbeddedEngine) or any(len(set(s.version.tolist())) == 2 for s in said):
            break
        # The weights came after the last token, or before the first one. The factors never undo each other.
        pause *= 0.5 if all((s.version == old).all() for s in said) else 1.7
    else:
        pytest.fail("new weights never came into the middle of a turn")
    assert all((np.diff(s.version) >= 0).all() and len(s.ids) == 120 for s in said)
    newer = _gaps(subject, prompt, said)
    await subject.publish(1)
    older = _gaps(subject, prompt, said)
    for s, n, o in zip(said, newer, older, strict=True):
        assert np.where(s.version == old, o, n).max() < LEAST["float32"].worst
        assert np.where(s.version == old, n, o).mean() > 10 * LEAST["float32"].worst


async def _after_an_update(subject: Subject) -> float:
    """Worst gap of what is said after new weights, on a prompt that the old ones have cached."""
    prompt, wanted = subject.ids(LONG), contract()
    await subject.say([prompt] * 4, wanted)
    await subject.publish(3)
    said = await subject.say([prompt] * 4, wanted)
    assert all(s.stop is Stop.LENGTH for s in said)
    return float(subject.gap([segment(prompt, s, wanted) for s in said]).max())


async def test_nothing_cached_survives_an_update(subject: Subject) -> None:
    assert await _after_an_update(subject) < LEAST["float32"].worst


async def test_a_stale_block_would_be_seen(subject: Subject) -> None:
    """The same, with the fault planted."""
    with subject.stale():
        assert await _after_an_update(subject) > 10 * LEAST["float32"].worst
    await subject.publish(1)
    assert await _after_an_update(subject) < LEAST["float32"].worst


async def test_the_fingerprint_is_that_of_the_weights_served(subject: Subject) -> None:
    """Weights that differ in one bit from the learner's have another fingerprint, so the sync stops."""
    tensors = {name: t.clone() for name, t in whole_tensors(subject.learner.shards())}
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    tensors[name].view(torch.int32)[3, 5] ^= 1
    version = subject.sampler.version
    assert await subject.sampler.load(version + 1, tensors.items()) != subject.learner.fingerprint()
    assert (
        await subject.sampler.load(version + 2, whole_tensors(subject.learner.shards()))
        == subject.learner.fingerprint()
    )
    assert subject.sampler.version == version + 2


async def test_a_tensor_lost_on_the_way_would_be_seen(subject: Subject) -> None:
    """The fingerprint is read from what is served: were it an echo of what was sent, this would pass the sync."""
    with subject.lossy(), pytest.raises(InvariantError, match="weight sync of version"):
        await subject.publish(5)
    await subject.publish(1)
    assert await _after_an_update(subject) < LEAST["float32"].worst


async def test_weights_are_taken_whole_or_not_at_all(subject: Subject) -> None:
    tensors = {name: t + 1 for name, t in whole_tensors(subject.learner.shards())}
    first = next(iter(tensors))
    bad = {
        "missing": {n: t for n, t in tensors.items() if n != first},
        "unknown tensor 'model.embed'": {**tensors, "model.embed": tensors[first]},
        "must hold the same architecture": tensors | {first: tensors[first][1:]},
        "bfloat16": tensors | {first: tensors[first].bfloat16()},
    }
    version, prompt = subject.sampler.version, subject.ids("3+4=")
    for message, given in bad.items():
        with pytest.raises(EngineError, match=message):
            await subject.sampler.load(version + 1, given.items())
    with pytest.raises(EngineError, match="only increase"):
        await subject.sampler.load(version, tensors.items())
    assert subject.sampler.version == version
    (said,) = await subject.say([prompt], contract())
    assert subject.gap([segment(prompt, said, contract())]).max() < LEAST["float32"].worst


async def test_a_canary_sees_weights_that_are_computed_with_wrongly(subject: Subject) -> None:
    """Right fingerprint, wrong function: the sync stops."""
    score = subject.sampler.score

    async def another(ids: np.ndarray) -> np.ndarray:
        return await score(ids[::-1])

    subject.sampler.score = another  # type: ignore[method-assign]
    try:
        with pytest.raises(InvariantError, match="canary"):
            await subject.publish(4)
    finally:
        subject.sampler.score = score  # type: ignore[method-assign]
