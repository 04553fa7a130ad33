"""Law 1: the gradient of the library's loss is that of each textbook objective, in float64, off policy.

The textbook side (`textbooks*.py`) is written out episode by episode from the papers and knows nothing of credit, push
or weight.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from law_cases import CASES, THE_LADDER
from law_world import Book, world

from posttrain.algorithm.loss.minibatch_streams import CHOSEN, IMITATE, MIX, WAS_SHOWN
from posttrain.algorithm.loss.policy_loss import objective, supervised
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.streams import (
    ADVANTAGE,
    ENERGY,
    ENTROPY,
    IMPLICIT,
    MU,
    REFERENCE,
    RETURN,
    START,
    TOP_IDS,
    TOP_LOGP,
    VALUE,
    VERSION,
    WEIGHT,
    Stream,
)
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.policy_rows import (
    A3PO,
    DPPO_TOP,
    DR_GRPO,
    GKD,
    GRPO,
    KL_COV,
    LADDER,
    LUFFY,
    PPO,
    TOP_ENTROPY,
    VAPO,
)
from posttrain.system.errors import InvariantError


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("a", "book"), CASES, ids=[a.name for a, _ in CASES])
def test_gradient_is_the_textbooks(a: Algorithm, book: Book, seed: int) -> None:
    """Law 1: d loss / d logits, d entropy and d value equal those of the published objective, to 1e-12."""
    here = world(a, seed)
    found = here.library()
    for x, right in zip(found, here.textbook(book), strict=True):
        assert torch.allclose(x, right, rtol=0, atol=1e-12), (x - right).abs().max()
    assert found[0].abs().max() > 1e-4


def test_every_algorithm_of_the_ladder_has_a_textbook() -> None:
    """Law 1 covers the whole ladder, with the defaults of each line: a new one there needs a textbook here."""
    assert [a for a in LADDER.values() if a not in [b for b, _ in THE_LADDER]] == []
    assert len(THE_LADDER) == len(LADDER) and len({a.name for a, _ in CASES}) == len(CASES)


def seen(name: str, seed: int = 0) -> dict[str, float]:
    """Means of the gauges of a case."""
    here = world(next(a for a, _ in CASES if a.name == name), seed)
    return {n: g.mean for n, g in here.terms(here.batch)[0].gauges.items()}


@pytest.mark.parametrize(
    ("name", "gauge"),
    [
        *[
            (n, "policy/clip_low")
            for n in ("grpo", "gspo_wide", "luspo_wide", "gmpo_tight", "dppo", "dppo_kl", "dppo_top2_kl", "ppo")
        ],
        *[
            (n, "policy/clip_high")
            for n in ("grpo", "gspo_wide", "gmpo_tight", "dppo_capped", "two_sided_tight", "dapo", "ppo")
        ],
        *[
            (n, "correction/silenced")
            for n in (
                "icepop_tight",
                "mis",
                "kpop",
                "geo_rs",
                "veto",
                "negative_mask",
                "tis_geo_rs_veto",
                "sapo_icepop_veto",
                "deepseek_tight",
            )
        ],
    ],
)
def test_the_world_visits_every_branch(name: str, gauge: str) -> None:
    """The textbooks are compared where something is silent and something is not."""
    assert 0 < seen(name)[gauge] < 0.9, seen(name)[gauge]


@pytest.mark.parametrize("name", ["clip_cov_band", "kl_cov_share", "top_entropy", "m2po", "m2po_tight", "m2po_all"])
def test_the_world_makes_a_choice(name: str) -> None:
    chosen = world(next(a for a, _ in CASES if a.name == name), 0).batch[CHOSEN]
    assert 0 < chosen.mean() < 1


def test_the_world_is_as_rich_as_it_claims() -> None:
    """Both signs of credit, values inside and outside the clip, the overlong ramp, an episode nobody judged, a source
    that abstained."""
    here = world(PPO, 0)
    batch = here.batch
    assert set(np.sign(batch[ADVANTAGE])) == {-1.0, 1.0}
    assert 0 < int(sum((e.v - e.v_old).abs().lt(0.2).sum() for e in here.eps)) < batch.spoken
    assert (
        any(16 < len(e) <= 20 for e in here.eps) and any(e.R >= 1 for e in here.eps) and any(e.R < 1 for e in here.eps)
    )
    assert len(here.eps) == 14 and sum(len(g.group.episodes) for g in here.groups) == 15
    assert any("form" not in e.parts for e in here.eps) and len(set(here.version.tolist())) == 5
    lambdas = [1 - 1 / (0.5 * len(e)) for e in here.eps]
    assert min(lambdas) < 0 < max(lambdas), "VAPO's length-adaptive lambda is clamped, and is not"


def test_supervised_is_weighted_likelihood() -> None:
    """SFT: -sum w log pi, whose gradient is -w."""
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    w = torch.tensor([0.25, 0.75])
    assert torch.equal(torch.autograd.grad(supervised(w, lp), lp)[0], -w)
    assert supervised(w, lp).item() == pytest.approx(1.75)


MISSING: list[tuple[Algorithm, str | Stream, str]] = [
    (patch(DR_GRPO, "e", "-", entropy=EntropyBonus()), "H", "entropy"),
    (PPO, "v", "value"),
    (GKD, "near", "candidates"),
    (PPO, RETURN, "returns"),
    (GKD, TOP_LOGP, "teacher"),
    (GRPO, REFERENCE, "reference"),
    (KL_COV, CHOSEN, "chosen"),
    (TOP_ENTROPY, CHOSEN, "chosen"),
    (LUFFY, WAS_SHOWN, "shown"),
    (VAPO, IMITATE, "imitate"),
    (A3PO, MIX, "mix"),
    (DPPO_TOP, TOP_LOGP, "top-k divergence"),
]


@pytest.mark.parametrize(
    ("a", "what", "name"), MISSING, ids=[f"{a.name} {getattr(what, 'name', what)}" for a, what, _ in MISSING]
)
def test_objective_names_what_is_missing(a: Algorithm, what: str | Stream, name: str) -> None:
    """A score or stream that the algorithm reads is never made up."""
    here = world(a, 0)
    batch = here.batch
    scores, s = here.scores(batch), streams(batch, dtype=torch.float64)
    gone = {"H": "entropy", "v": "value", "near": "candidates"}
    if isinstance(what, str):
        scores = replace(scores, **{gone[what]: None})
    else:
        assert what in s
        s = s.having({what: None})
    with pytest.raises(InvariantError, match=name):
        objective(a, s, scores)


@pytest.mark.parametrize("a", [a for a, _ in THE_LADDER], ids=[a.name for a, _ in THE_LADDER])
def test_no_stream_is_made_that_is_not_read(a: Algorithm) -> None:
    """Taking any optional stream of the batch away changes the gradient, or stops the objective: none is scored for
    nothing."""
    here = world(a, 0)
    batch = here.batch
    scores, s = here.scores(batch), streams(batch, dtype=torch.float64)
    right = here.gradient(objective(a, s, scores).loss)
    before = {
        REFERENCE: a.kl_in_credit is not None or "implicit" in a.reads,
        IMPLICIT: True,
        START: a.start_before_loss,
        ENTROPY: True,
        ENERGY: True,
        TOP_IDS: True,
        VALUE: a.learns_values is not None and a.learns_values.clip is None,
    }
    always = (MU, VERSION, ADVANTAGE, WEIGHT)
    for what in s.streams:
        if what in always or before.get(what):
            continue
        try:
            found = here.gradient(objective(a, s.having({what: None}), scores).loss)
        except InvariantError:
            continue
        assert any(not torch.equal(x, y) for x, y in zip(found, right, strict=True)), what.name


LOST = {
    "the policy lost it": (-200.0, None),
    "the policy is sure of it": (-1e-7, None),
    "the sampler lost it": (None, -200.0),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("a", [a for a, _ in THE_LADDER], ids=[a.name for a, _ in THE_LADDER])
def test_a_lost_token_stays_finite(a: Algorithm, how: str) -> None:
    """In float32, a token that one side has all but lost is silenced or bounded: neither loss, gradient nor gauge
    overflows."""
    now, before = LOST[how]
    here = world(a, 0)
    scores, s = here.scores(here.batch), streams(here.batch)
    plain = {n: None if x is None else x.detach().float() for n, x in vars(scores).items() if n != "logp"}
    lp = (scores.logp.detach().float() if now is None else torch.full_like(s[MU], now)).requires_grad_()
    if before is not None:
        gone = torch.full_like(s[MU], before)
        s = s.having({MU: gone, START: gone if START in s else None})
    terms = objective(a, s, TokenScores(lp, **plain))
    (grad,) = torch.autograd.grad(terms.loss, lp, allow_unused=True, materialize_grads=True)
    assert torch.isfinite(terms.loss) and torch.isfinite(grad).all()
    assert [n for n, g in terms.gauges.items() if not math.isfinite(g.sum)] == []


def test_shown_tokens_have_no_mismatch() -> None:
    """A demonstration has no sampler: its tokens add nothing to the gap between sampler and learner that canaries
    watch."""
    said = [e for e in world(LUFFY, 0).eps if not e.shown]
    total = sum(float((e.old - e.mu).abs().sum()) for e in said)
    assert seen("luffy")["mismatch/logp_gap"] * world(LUFFY, 0).batch.spoken == pytest.approx(total)
