"""A per-token stream is declared in one place: this file declares two that the library does not know, and both reach
the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from law_toys import STAGE

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.minibatch_streams import CHOSEN, HEARD, IMITATE, MIX, WAS_SHOWN, WHOLE, MinibatchContext
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.checks.learning.credit_by_definition import expected_credit
from posttrain.checks.learning.credit_checks import StepCreditAudit
from posttrain.core import streams as declared
from posttrain.core.batch import Batch, Packed
from posttrain.core.ports import Learner
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, SCORED, START, VERSION, WEIGHT, Maker, Scoring, Stream
from posttrain.core.types import Group
from posttrain.ladder.policy_rows import GRPO, REINFORCE
from posttrain.role.pack import pack
from posttrain.role.score import score
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import SAMPLING, PlainEpisode, scored_group

SURPRISE = Stream("surprise", "float32", "minus the learner's log-prob before the step", "the loss of this test")
RANK = Stream(
    "rank", "int32", "the place of each token among the most surprising of its minibatch", "the loss of this test"
)
SURPRISES = Maker[Scoring](
    (SURPRISE,), lambda s: s.algorithm.name == "reinforce", lambda s: (-s.learner.score(s.packed),)
)
RANKS = Maker[MinibatchContext](
    (RANK,),
    lambda w: SURPRISE in w.batch,
    lambda w: (np.argsort(np.argsort(-w.batch[SURPRISE], kind="stable")).astype(np.int32),),
)


class Uneven:
    """A model that knows the ids alone: the log-prob of id i is -1 / (1 + i)."""

    def score(self, packed: Packed) -> np.ndarray:
        return (-1 / (1 + packed.target_M)).astype(np.float32)


@pytest.fixture
def added() -> Iterator[None]:
    """The two makers are registered inside the test, and gone after it."""
    before = list(SCORED), list(WHOLE)
    SCORED.append(SURPRISES)
    WHOLE.append(RANKS)
    yield
    SCORED.remove(SURPRISES)
    WHOLE.remove(RANKS)
    assert before == (SCORED, WHOLE)


def groups() -> list[Group]:
    """Two prompts of two answers; one answer in two turns with something seen between them."""
    rng = np.random.default_rng(5)

    def answer(reward: float, turns: list[list[int]]) -> PlainEpisode:
        n = sum(map(sum, turns))
        return PlainEpisode(
            reward, turns, -rng.random(n).astype(np.float32), ids=rng.integers(0, 90, n).astype(np.int32)
        )

    each = [[answer(1.0, [[3]]), answer(0.5, [[2, 1]])], [answer(2.0, [[1], [2]]), answer(1.0, [[4]])]]
    return [scored_group(str(i), answers).group for i, answers in enumerate(each)]


def scored_step() -> tuple[ScoredGroup, ...]:
    return score(groups(), REINFORCE, cast("Learner", Uneven()), None, optimizer_steps=1)


def minibatch() -> Batch:
    credit = credit_step(REINFORCE, scored_step(), max_tokens=SAMPLING.max_tokens, ema=0.0)
    (made,) = pack(credit, REINFORCE, STAGE, seed=0, step=0)
    assert made.batch is not None
    return made.batch


def wanted(batch: Batch) -> np.ndarray:
    return (1 / (1 + batch.target_M)).astype(np.float32)


def test_a_new_stream_is_scored_packed_selected_and_split(added: None) -> None:
    """Through the same functions as any other, each value beside its token."""
    for g in scored_step():
        for e in g.episodes:
            for segment, x in zip(e.episode.segments, e[SURPRISE], strict=True):
                assert x.tolist() == (1 / (1 + segment.ids[segment.mask])).astype(np.float32).tolist()
    batch = minibatch()
    assert batch.episodes == 4 and batch[SURPRISE].tolist() == wanted(batch).tolist()
    assert sorted(batch[RANK].tolist()) == list(range(batch.spoken))
    last = batch.select([1, 3])
    assert 0 < last.spoken < batch.spoken and last[SURPRISE].tolist() == wanted(last).tolist()
    parts = batch.split(1)
    assert len(parts) == 4 and all(p[SURPRISE].tolist() == wanted(p).tolist() for p in parts)
    assert [x for p in parts for x in p[RANK].tolist()] == batch[RANK].tolist(), (
        "made over the whole minibatch, before it is split"
    )


def test_a_loss_reads_a_new_stream(added: None) -> None:
    """As torch, in the dtype of the loss (integers as they are); micro-batches add up."""
    batch = minibatch()
    s = streams(batch, dtype=torch.float64)
    assert s[SURPRISE].dtype == torch.float64 and s[RANK].dtype == torch.int64

    def asked(part: Batch) -> torch.Tensor:
        s = streams(part, dtype=torch.float64)
        logp = torch.zeros(part.spoken, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(-(s[WEIGHT] * s[ADVANTAGE] * s[SURPRISE] * (s[RANK] < 5) * logp).sum(), logp)
        return grad

    right = -batch[WEIGHT] * batch[ADVANTAGE] * wanted(batch) * (batch[RANK] < 5)
    assert np.allclose(asked(batch).numpy(), right, rtol=0, atol=1e-15)
    assert torch.equal(torch.cat([asked(p) for p in batch.split(8)]), asked(batch))


def test_a_new_stream_out_of_step_is_found(added: None) -> None:
    """The check that compares a batch with what was scored knows every scored stream."""
    mine = expected_credit(REINFORCE, scored_step(), max_tokens=SAMPLING.max_tokens, ema=0.0)
    assert mine is not None
    batch = minibatch()
    StepCreditAudit(REINFORCE, mine, 1, SAMPLING.max_tokens).check(batch)
    with pytest.raises(InvariantError, match="'surprise' is out of step"):
        StepCreditAudit(REINFORCE, mine, 1, SAMPLING.max_tokens).check(
            batch.having({SURPRISE: np.roll(batch[SURPRISE], 1)})
        )


def test_a_missing_stream_is_named() -> None:
    """In what was scored, in the minibatch and in the loss: the error says what it is and who reads it; `in` and `find`
    ask first."""
    batch = minibatch()
    held = scored_step()[0].episodes[0], batch, streams(batch)
    for holder, where in zip(held, ("scored of an episode", "the minibatch", "the minibatch"), strict=True):
        assert SURPRISE not in holder and holder.find(SURPRISE) is None
        with pytest.raises(
            InvariantError,
            match=(
                f"'surprise' is missing from .*{where}.*is minus the learner's log-prob.*read by the loss of this test"
            ),
        ):
            holder[SURPRISE]
    assert [s.name for s in batch.streams] == ["mu", "version", "weight", "advantage"]
    assert {s.name for s in streams(batch).streams} == {s.name for s in batch.streams}


def test_streams_are_put_in_and_taken_out() -> None:
    batch = minibatch()
    more = batch.having({SURPRISE: wanted(batch)})
    assert SURPRISE in more and SURPRISE not in batch and SURPRISE not in more.having({SURPRISE: None})
    assert more.having({MU: more[MU] - 1})[MU].tolist() == (batch[MU] - 1).tolist() and more[MU] is batch[MU]


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda x: x[1:], "entries for .* spoken tokens"),
        (lambda x: x[:, None], "2 axes"),
        (lambda x: x.astype(np.float16), "float16, and float32 is declared"),
        (lambda x: x.astype(np.int64), "int64, and float32 is declared"),
    ],
    ids=["another length", "another shape", "too coarse", "another kind"],
)
def test_a_stream_is_checked_at_birth(spoil: Callable[[np.ndarray], np.ndarray], match: str) -> None:
    """Where it was scored and where it is packed. A finer type is taken: laws compute in float64."""
    batch = minibatch()
    assert batch.having({SURPRISE: wanted(batch).astype(np.float64)})[SURPRISE].dtype == np.float64
    with pytest.raises(InvariantError, match=match):
        batch.having({SURPRISE: spoil(wanted(batch))})
    episode = scored_step()[0].episodes[0]
    with pytest.raises(InvariantError, match=match):
        replace(episode, streams={SURPRISE: (spoil(np.zeros(episode.episode.spoken, np.float32)),)})


def test_scorers_are_asked_where_they_are_wanted() -> None:
    """In the order of the registry, and only what the algorithm reads; a reference that is not there is refused."""
    asked: list[str] = []

    class Listed:
        def score(self, packed: Packed) -> np.ndarray:
            asked.append("score")
            return np.zeros(packed.spoken, np.float32)

        def examine(self, packed: Packed, names: Sequence[str]) -> dict[str, np.ndarray]:
            asked.append(f"examine {', '.join(names)}")
            return {name: np.zeros(packed.spoken, np.float32) for name in names}

    learner, both = cast("Learner", Listed()), replace(GRPO, name="both")
    first, _ = score(groups(), both, learner, learner, optimizer_steps=2)
    assert asked == ["examine score", "score"] and [s.name for s in first.episodes[0].streams] == ["start", "reference"]
    once, _ = score(groups(), both, learner, learner, optimizer_steps=1)
    assert START not in once.episodes[0], "the policy is its own start where it takes one optimizer step"
    with pytest.raises(InvariantError, match="reads a reference"):
        score(groups(), both, learner, None, optimizer_steps=1)


def test_no_two_streams_share_a_name() -> None:
    known = [x for x in vars(declared).values() if isinstance(x, Stream)] + [MIX, CHOSEN, HEARD, IMITATE, WAS_SHOWN]
    assert len({s.name for s in known}) == len(known)
    made = {s for m in (*SCORED, *WHOLE) for s in m.makes}
    assert made <= set(known) and VERSION in known
