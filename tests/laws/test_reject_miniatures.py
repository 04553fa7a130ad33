"""STaR against RFT where some prompts are never answered right, on a policy that can be listed, through the library's
own selection and likelihood.

docs/research/LOG.md (2026-11-23, rejection sampling) has what was predicted, written before the first run, with
what was measured beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.stages.keep_rule import Passing
from posttrain.config.stages.rejection import RFT, STAR, RejectionMethod
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.learning.demonstrations import imitated
from posttrain.role.learning.rejection_selection import HINTED, candidates_of, select, to_ask_again

EASY, HARD, HINT = 10, 11, 12
SOUND, COPIED, OTHER, RIGHT, WRONG = range(5)
TRUE = {SOUND: 0.95, COPIED: 0.05, OTHER: 0.0}
"""How often a rationale leads to the right result, without a hint."""
TASKS, SAMPLES, ROUNDS = 200, 8, 4
SAMPLING = Sampling(stop_ids=())


def started() -> torch.Tensor:
    """Logits of the rationale by the class of the prompt: easy ones are sound half of the time, hard ones never."""
    shares = torch.tensor([[0.5, 1e-9, 0.5], [1e-6, 1e-9, 1.0]], dtype=torch.float64)
    return (shares / shares.sum(1, keepdim=True)).log()


def played(group: str, kind: int, shares: np.ndarray, true: dict[int, float], rng: np.random.Generator) -> Group:
    """The samples of one prompt. A hinted one has a token more in its prompt."""
    task = Task(group, "p")
    out: list[Episode] = []
    for i in range(SAMPLES):
        rationale = int(rng.choice(3, p=shares))
        result = RIGHT if rng.random() < true[rationale] else WRONG
        transcript = Transcript(SAMPLING)
        transcript.see([kind, HINT] if group.endswith(HINTED) else [kind])
        transcript.say(
            SampledTurn(
                np.array([rationale, result], np.int32), np.full(2, -1, np.float32), np.zeros(2, np.int32), Stop.SAID
            )
        )
        verdict = Judged("own", 1.0, Verdict.value(float(result == RIGHT)))
        out.append(Episode(task, 0, i, (transcript.segment(),), Stop.SAID, (verdict,)))
    return Group(task, 0, tuple(out))


def trained(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Gradient descent on the likelihood of the rationales until it stands still. Results follow from rationales."""
    table: Any = logits.clone().requires_grad_(True)
    first_M = batch.target_M < RIGHT
    prompts = (batch.ids_N[batch.source_M[first_M]] == HARD).astype(int)
    assert not np.isin(batch.ids_N, HINT).any(), "no hint is imitated"
    for _ in range(400):
        logp_M: Any = torch.zeros(batch.spoken, dtype=torch.float64)
        said = table.log_softmax(1)[torch.tensor(prompts), torch.tensor(batch.target_M[first_M].astype(int))]
        logp_M = logp_M.index_put((torch.tensor(np.flatnonzero(first_M)),), said)
        loss = Likelihood().terms(batch, TokenScores(logp=logp_M, entropy=None, value=None)).loss
        (gradient,) = torch.autograd.grad(loss, table)
        with torch.no_grad():
            table -= 16 * gradient
    return table.detach()


def accuracies(method: RejectionMethod, copies: float, seed: int) -> np.ndarray:
    """Exact accuracy of (easy, hard) prompts without a hint after each round, [ROUNDS, 2]."""
    rng, policy = np.random.default_rng(seed), started()
    hinted_shares = np.array([1 - copies, copies, 0.0])
    found: list[list[float]] = []
    for _ in range(ROUNDS):
        shares = policy.softmax(1).numpy()
        plain = [
            played(f"{kind}-{i}", kind, shares[kind - EASY], TRUE, rng) for kind in (EASY, HARD) for i in range(TASKS)
        ]
        asked = to_ask_again(plain, method.keep) if method.rationalise else []
        hinted = [
            played(f"{g.task.id}{HINTED}", int(g.task.id[:2]), hinted_shares, {**TRUE, COPIED: 1.0}, rng) for g in asked
        ]
        kept = select(candidates_of(plain, hinted).candidates, method).kept
        policy = trained(started(), imitated([s for c in kept for s in c.segments]))
        now = policy.softmax(1).numpy()
        found.append([sum(now[k, r] * TRUE[r] for r in TRUE) for k in (0, 1)])
    return np.array(found)


@pytest.mark.prove
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rft_never_learns_what_it_never_says(seed: int) -> None:
    found = accuracies(RFT, 0.5, seed)
    assert found[:, 0] == pytest.approx([0.95] * ROUNDS, abs=0.03) and (found[:, 1] < 1e-3).all()


@pytest.mark.prove
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("copies", "hard"), [(0.5, (0.49, 0.90, 0.947, 0.95)), (0.0, (0.95, 0.95, 0.95, 0.95))])
def test_star_learns_it_as_far_as_hinted_rationales_are_sound(
    copies: float, hard: tuple[float, ...], seed: int
) -> None:
    found = accuracies(STAR, copies, seed)
    assert found[:, 0] == pytest.approx([0.95] * ROUNDS, abs=0.03)
    assert abs(found[0, 1] - hard[0]) <= 0.08
    assert found[1:, 1] == pytest.approx(hard[1:], abs=0.03)


@pytest.mark.prove
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_hints_are_only_copied_little_is_learned(seed: int) -> None:
    """Predicted was .05 in every round; seed 1 came to .38 in round 4. Gradient descent on copies alone lifts the sound
    rationale from 1e-6 to 1.5e-4: the logits of what is not imitated fall with their probability, so the unlikely one
    hardly falls. Then it is sampled by chance, and kept."""
    found = accuracies(STAR, 1.0, seed)
    assert found[0, 1] == pytest.approx(0.05, abs=0.01)
    assert found[:, 1].max() < 0.45 and (np.diff(found[:, 1]) >= -1e-9).all()
    copies = imitated(
        [
            s
            for c in candidates_of(
                [played(f"{HARD}-0", HARD, np.array([0, 1.0, 0]), {**TRUE, COPIED: 1}, np.random.default_rng(0))]
            ).candidates
            for s in c.segments
        ]
    )
    assert float(trained(started(), copies).softmax(1)[1, SOUND]) > 50 * 1e-6


def test_a_share_of_right_ones_is_what_imitation_of_right_ones_becomes() -> None:
    """Imitating the right samples to the end gives p(y) R(y) / sum p R: REINFORCE's fixed point of one step of
    filtering, here on one prompt with rewards of 0 and 1."""
    shares = np.array([0.2, 0.3, 0.5])
    rng = np.random.default_rng(0)
    group = [played(f"{EASY}-{i}", EASY, shares, TRUE, rng) for i in range(600)]
    kept = select(
        candidates_of(group).candidates, RejectionMethod(name="all", paper="", keep=Passing(), distinct=False)
    )
    now = trained(started(), imitated([s for c in kept.kept for s in c.segments])).softmax(1).numpy()[0]
    want = shares * [TRUE[r] for r in (SOUND, COPIED, OTHER)]
    share = want / want.sum()
    assert now == pytest.approx(share, abs=4 * math.sqrt(0.25 / len(kept.kept)))
