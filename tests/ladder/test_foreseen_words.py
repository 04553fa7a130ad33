"""Learning to foresee what the policy is told between its turns (ECHO): which tokens, in which distribution, and that
nothing else changes by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.api import main
from posttrain.config.run import Reinforce
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.learner.learner import HFLearner
from posttrain.ladder.policy_rows import ECHO, PRIME_RL
from posttrain.record import checkpoint as checkpoints
from posttrain.role.pack import pack
from posttrain.role.weights.saved_weights import WEIGHTS
from posttrain.toy.episodes import SAMPLING, PlainEpisode, scored_group
from tests.engine.engine_parts import ARCHS, policy, segments
from tests.late import late_run, rl_steps
from tests.tiny import tiny_run

COEF = 0.1
"""What the line multiplies the term by."""


def told(masks: list[list[bool]]) -> Packed:
    """Segments with these masks, of ids that count up."""
    out = list[Segment]()
    for said in masks:
        m = np.array([False, *said])
        logp, version = np.where(m, -1.0, np.nan).astype(np.float32), np.where(m, 0, -1).astype(np.int32)
        out.append(Segment(np.arange(len(m), dtype=np.int32), m, logp, version, SAMPLING))
    return Packed.of(out)


@settings(max_examples=100)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9).filter(any), min_size=1, max_size=5))
def test_what_was_heard_follows_the_first_word_and_was_not_said(masks: list[list[bool]]) -> None:
    """By counting, in every segment; and a selection hears what its segments heard."""
    batch = told(masks)
    each = [[i + 1 for i, said in enumerate(m) if not said and any(m[:i])] for m in masks]
    heard = batch.heard()
    assert [heard.target_M[heard.segment_M == s].tolist() for s in range(len(masks))] == each
    assert heard.sampling.temperature == 1 and heard.kept is None
    last = batch.select([len(masks) - 1]).heard()
    assert last.target_M.tolist() == each[-1]


@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_scored_as_the_model_alone_would_say_it(arch: str) -> None:
    """In float64, with a temperature that the policy's own tokens have and these have not, beside the same log-probs
    of what was said; and the gradient is that of transformers' own forward pass."""
    learner = HFLearner(policy(arch, dtype=torch.float64))
    batch = Packed.of(segments(24, longest=20, sampling=Sampling(temperature=0.7)))
    heard = batch.heard()
    assert heard.spoken > 3
    scores = learner.forward(batch, Reads(heard=True))
    plain = learner.forward(batch)
    assert scores.heard is not None and plain.heard is None and torch.equal(scores.logp, plain.logp)
    other, total = HFLearner(learner.policy.clone()), torch.zeros((), dtype=torch.float64)
    module = other.policy.module
    module.set_attn_implementation("sdpa")
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S
    for s, (start, length) in enumerate(zip(starts.tolist(), batch.lengths_S.tolist(), strict=True)):
        ids = torch.from_numpy(batch.ids_N[start : start + length].astype(np.int64))
        logp = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        at = torch.from_numpy(heard.source_M[heard.segment_M == s] - start)
        own = logp[at, ids[at + 1]]
        here = torch.from_numpy(heard.segment_M == s)
        assert torch.allclose(own, scores.heard[here], rtol=0, atol=1e-9)
        total = total + own.sum()
    found, right = gradients(learner, scores.heard.sum()), gradients(other, total)
    assert apart(found, right) < 1e-8


def apart(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest gradient."""
    gap, size = (max(float(x.abs().max()) for x in of) for of in ([found[n] - right[n] for n in right], right.values()))
    return gap / size


def gradients(learner: HFLearner, loss: Tensor) -> dict[str, Tensor]:
    named = {n: p for n, p in learner.parameters().items() if not n.startswith("value_head")}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True))


def minibatch(turns: list[list[list[int]]]) -> Batch:
    rng = np.random.default_rng(3)

    def answer(reward: float, of: list[list[int]]) -> PlainEpisode:
        n = sum(map(sum, of))
        mu = rng.uniform(-3, -1, n).astype(np.float32)
        return PlainEpisode(reward, of, mu, mu, ids=rng.integers(0, 9, n).astype(np.int32))

    group = scored_group("t", [answer(float(i % 2), of) for i, of in enumerate(turns)])
    stage = Reinforce(name="rl", algorithm=ECHO, sampling=SAMPLING, prompts=1, siblings=len(turns))
    credit = credit_step(ECHO, [group], max_tokens=SAMPLING.max_tokens, ema=0.0)
    (made,) = pack(credit, ECHO, stage, seed=0, step=1)
    assert made.batch is not None
    return made.batch


def loss(a: Any, learner: HFLearner, parts: list[Batch]) -> Tensor:
    terms = [PolicyLoss(a).terms(p, learner.forward(p, Reads(heard=a.hears))) for p in parts]
    return torch.stack([t.loss for t in terms]).sum()


def test_the_term_is_a_mean_over_the_minibatch_whatever_is_split() -> None:
    """ECHO less prime_rl is -.1 times the mean log-prob of what was heard, in one part and in many."""
    learner, batch = HFLearner(policy(dtype=torch.float64)), minibatch([[[2, 1, 3]], [[1, 2]], [[4]], [[2], [1, 1]]])
    heard = learner.forward(batch, Reads(heard=True)).heard
    assert heard is not None and len(heard) == 2 * 4, "two tokens before each later turn of a segment"
    right = gradients(learner, loss(PRIME_RL, learner, [batch]) - COEF * heard.mean())
    for parts in ([batch], batch.split(1), batch.split(12)):
        found = gradients(learner, loss(ECHO, learner, parts))
        assert apart(found, right) < 1e-6


@pytest.mark.prove
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_policy_learns_to_foresee_its_tool(staleness: int, tmp_path: Path) -> None:
    """What the world shows between the turns becomes more probable, with every check on."""
    run = late_run(staleness, algorithm=ECHO, steps=8, checkpoint_every=0, eval_every=0)
    main.run(run, out=tmp_path / "run", quiet=True)
    seen = [s.gauges["policy/heard"] for s in rl_steps(tmp_path / "run")]
    assert all(g.count for g in seen) and seen[-1].mean > seen[0].mean + 0.01


@pytest.mark.prove
def test_where_nothing_is_heard_it_is_its_parent(tmp_path: Path) -> None:
    """Answers of one turn: the same run as `prime_rl`, bit for bit."""
    found = [tmp_path / a.name for a in (ECHO, PRIME_RL)]
    for folder, a in zip(found, (ECHO, PRIME_RL), strict=True):
        run = tiny_run(algorithm=replace(a, name="same"), checkpoint_every=3)
        main.run(run, out=folder, quiet=True)
    echo, parent = (weights(f) for f in found)
    assert echo == parent
    assert all(s.gauges["policy/heard"].count == 0 for s in rl_steps(found[0]))


def weights(folder: Path) -> bytes:
    return (checkpoints.find(folder).folder / WEIGHTS).read_bytes()
