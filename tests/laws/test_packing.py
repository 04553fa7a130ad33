"""Laws of the packer: what is chosen over a whole minibatch, which weights sum to what, and who may stay away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from law_cases import ALL, NAMES
from law_toys import STAGE
from law_world import L_MAX, world

from posttrain.algorithm.choose import choose
from posttrain.algorithm.credit import credit_step, whitened, without_credit
from posttrain.algorithm.minibatch import CHOSEN, IMITATE, WAS_SHOWN
from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.errors import InvariantError
from posttrain.core.ladder import CHORD, CLIP_COV, DR_GRPO, GRPO, KL_COV, LADDER, LUFFY, PPO, SAPO, TOP_ENTROPY, VAPO
from posttrain.core.pieces.token import ClipCov, EntropyBonus, Imitate
from posttrain.core.run import Reinforce
from posttrain.core.streams import ADVANTAGE, MU, START, WEIGHT
from posttrain.role.pack import pack
from posttrain.toy.episodes import SAMPLING, PlainEpisode, rewarded, scored_group

every = pytest.mark.parametrize("a", ALL, ids=NAMES)


@every
def test_aggregations_sum_to_what_they_say(a: Algorithm) -> None:
    """Weights of all tokens: token_mean, prompt_mean and sequence_mean sum to 1; sequence_sum to the mean length;
    constant to its share."""
    everyone = patch(a, "all", "-", entropy=EntropyBonus(coef=0.0)) if a.entropy is None else a
    here = world(everyone, 0)
    mean = here.batch.spoken / here.batch.episodes
    right = {"sequence_sum": mean, "constant": mean / L_MAX}.get(a.aggregate, 1.0)
    assert here.batch[WEIGHT].sum() == pytest.approx(right, rel=1e-12)
    assert here.batch.episodes == len(here.eps), "every judged episode is there"


LEAVING = [a for a in LADDER.values() if not a.reads_silent_tokens]


@pytest.mark.parametrize("a", LEAVING, ids=[a.name for a in LEAVING])
def test_silent_episodes_may_stay_away(a: Algorithm) -> None:
    """Episodes without credit leave the forward pass and stay in the denominators: the gradient is that of the whole
    batch."""
    whole = patch(a, "all", "-", entropy=EntropyBonus(coef=0.0))
    for x, y in zip(world(a, 0).library(), world(whole, 0).library(), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-15)


@every
def test_minibatches_hold_every_group_once_an_epoch(a: Algorithm) -> None:
    """Two minibatches, two epochs: each epoch shares out the groups whole, in a new order; only the very first is on
    policy."""
    stage = Reinforce(name="laws", sampling=SAMPLING, prompts=4, minibatches=2, epochs=2)
    here = world(a, 0)
    parts = list(pack(here.credit, a, stage, seed=0, step=0, version=4))
    assert [p.first for p in parts] == [True, False, False, False]
    assert sum(p.episodes for p in parts) == 2 * len(here.eps)
    for i in (0, 2):
        said = [x for p in parts[i : i + 2] if p.batch is not None for x in p.batch.target_M.tolist()]
        assert sorted(said) == sorted(here.batch.target_M.tolist())


def test_imitated_tokens_weigh_alike() -> None:
    """VAPO imitates what the policy solved, CHORD what it was shown; weights sum to 1, or are all 0 where there is
    nothing."""
    vapo, chord = world(VAPO, 0), world(CHORD, 0)
    for here, wanted in ((vapo, [e for e in vapo.eps if e.R >= 1]), (chord, [e for e in chord.eps if e.shown])):
        found = here.batch[IMITATE]
        assert found.sum() == pytest.approx(1)
        assert set(found[found > 0]) == {1 / sum(len(e) for e in wanted)} and 0 < (found > 0).mean() < 1
    f = np.float32
    nobody = [PlainEpisode(r, [[2]], np.full(2, -1, f), np.full(2, -1, f), values=np.zeros(2, f)) for r in (0.0, 0.5)]
    credit = credit_step(VAPO, [scored_group("t", nobody)], max_tokens=20, ema=0.0)
    (made,) = pack(credit, VAPO, STAGE, seed=0, step=0)
    assert made.batch is not None and IMITATE in made.batch and not made.batch[IMITATE].any()


def test_shown_tokens_are_marked() -> None:
    here = world(LUFFY, 0)
    shown = here.batch[WAS_SHOWN]
    assert shown.sum() == sum(len(e) for e in here.eps if e.shown) and (here.batch[MU][shown] == 0).all()


def test_what_was_shown_is_not_the_policys_success() -> None:
    """imitate.of=solved takes what the policy said itself, also where a demonstration beside it is right."""
    a = patch(LUFFY, "both", "-", imitate=Imitate(coef=0.1))
    for seed in range(2):
        here = world(a, seed)
        weight, shown = here.batch[IMITATE], here.batch[WAS_SHOWN]
        assert weight.any() and not weight[shown].any()
    assert any(e.shown and e.R >= 1 for seed in range(2) for e in world(a, seed).eps)


# --- which tokens speak -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 1.0])
def test_clip_cov_draws_a_share_of_those_inside(share: float) -> None:
    """A33: floor(share * tokens) at random among low < cov < high, no more than there are; the draw belongs to its
    place in the run."""
    batch = world(CLIP_COV, 0).batch
    piece = ClipCov(share=share, low=0.1, high=1.0)
    rng = np.random.default_rng
    before = batch[START].astype(np.float64)
    cov = (batch[ADVANTAGE] - batch[ADVANTAGE].mean()) * (before - before.mean())
    inside = (cov > 0.1) & (cov < 1.0)
    speaks = choose(piece, batch, None, rng(1))
    assert (~speaks).sum() == min(int(share * batch.spoken), inside.sum()) and not (~speaks & ~inside).any()
    assert np.array_equal(speaks, choose(piece, batch, None, rng(1)))
    if 0 < share < 1:
        assert any(not np.array_equal(speaks, choose(piece, batch, None, rng(i))) for i in range(2, 6))
    with pytest.raises(InvariantError, match="no generator"):
        choose(piece, batch, None, None)


def test_the_draw_is_of_its_seed_and_step() -> None:
    """Clip-Cov in the packer: the same step draws the same tokens, another step or seed others."""
    a = patch(CLIP_COV, "wide", "-", tokens=ClipCov(share=0.3, low=0.01, high=9.0))
    credit = credit_step(a, world(a, 0).groups, max_tokens=L_MAX, ema=0.0)

    def drawn(seed: int, step: int) -> list[bool]:
        (made,) = pack(credit, a, STAGE, seed=seed, step=step)
        assert made.batch is not None and CHOSEN in made.batch
        return made.batch[CHOSEN].tolist()

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(0, 1) and drawn(0, 0) != drawn(1, 0)


def test_shares_round_up() -> None:
    """KL-Cov and the entropy mask take ceil(share * tokens)."""
    batch = world(KL_COV, 0).batch
    assert choose(KL_COV.tokens, batch, None, None).sum() == 1  # pyright: ignore[reportArgumentType]
    entropic = world(TOP_ENTROPY, 0).batch
    assert CHOSEN in entropic and entropic[CHOSEN].sum() == int(np.ceil(0.2 * entropic.spoken))
    with pytest.raises(InvariantError, match="entropy"):
        choose(TOP_ENTROPY.tokens, entropic, None, None)  # pyright: ignore[reportArgumentType]


# --- whitening and warm-up --------------------------------------------------------------------------------------------


def test_whitening_within_each_source() -> None:
    """`source` is `sample` among the tasks of one source: 0, 2 and 0, 20 both become -+.7071; one sample alone is
    centred."""
    credit = [np.full(n, x) for n, x in ((1, 0.0), (3, 2.0), (2, 0.0), (1, 20.0), (2, 5.0))]
    found = whitened("source", credit, ["a", "a", "b", "b", "c"])
    assert [x[0] for x in found] == pytest.approx([-np.sqrt(0.5), np.sqrt(0.5), -np.sqrt(0.5), np.sqrt(0.5), 0.0])
    assert [len(x) for x in found] == [1, 3, 2, 1, 2]
    together = whitened("sample", credit, ["a", "a", "b", "b", "c"])
    assert together[3][0] > together[1][0] + 1


def test_whitening_by_source_reads_the_tasks_column() -> None:
    """The column `source` of a task; tasks without one are one source."""
    a = patch(DR_GRPO, "s", "-", whiten="source")
    f = np.float32
    groups = [
        scored_group(
            str(i),
            [PlainEpisode(r * scale, [[1]], np.full(1, -1, f), np.full(1, -1, f)) for r in (0.0, 1.0)],
            info=info,
        )
        for i, (scale, info) in enumerate(((1, {"source": "x"}), (50, {"source": "y"}), (3, {}), (3, {})))
    ]
    found = credit_step(a, groups, max_tokens=20, ema=0.0)
    each = [float(e.advantage[0][0]) for g in found.groups for e in g.episodes]
    assert each[:4] == pytest.approx([-np.sqrt(0.5), np.sqrt(0.5)] * 2) and each[4:] == pytest.approx(
        [-np.sqrt(0.75), np.sqrt(0.75)] * 2
    )


def test_a_warm_up_moves_values_alone() -> None:
    """Without credit the policy's gradient is exactly zero and the value's is as before (A19)."""
    here = world(PPO, 0)
    (full,) = pack(here.credit, PPO, STAGE, seed=0, step=0)
    (still,) = pack(without_credit(here.credit), PPO, STAGE, seed=0, step=0)
    assert full.batch is not None and still.batch is not None
    right, found = (here.gradient(here.terms(b)[0].loss) for b in (full.batch, still.batch))
    assert torch.all(found[0] == 0) and torch.equal(found[2], right[2]) and right[0].abs().max() > 0


# --- lines of the ladder that must agree ------------------------------------------------------------------------------


def test_on_policy_sapo_is_grpo() -> None:
    """A16: on policy SAPO's gradient equals GRPO's without KL; so do all lines that differ from it in their trust
    region alone."""
    base = patch(GRPO, "bare", "-", pull=None)
    same = [
        SAPO,
        LADDER["gmpo"],
        LADDER["gspo"],
        LADDER["gspo_token"],
        LADDER["vespo"],
        LADDER["decoupled_ppo"],
        LADDER["a3po"],
    ]
    credit = credit_step(base, rewarded([1, 0, 0], [0.5, 0.2], lengths=[[3, 1, 2], [4, 2]]), max_tokens=20, ema=0.0)
    for a in same:
        found = credit_step(a, rewarded([1, 0, 0], [0.5, 0.2], lengths=[[3, 1, 2], [4, 2]]), max_tokens=20, ema=0.0)
        for g, h in zip(found.groups, credit.groups, strict=True):
            for e, f in zip(g.episodes, h.episodes, strict=True):
                assert np.array_equal(e.advantage[0], f.advantage[0])
        assert a.aggregate == base.aggregate


def test_gspo_token_is_gspo_where_credit_is_one_number() -> None:
    """A13: value, clip state and gradient agree."""
    here, there = world(LADDER["gspo"], 1), world(LADDER["gspo_token"], 1)
    for x, y in zip(here.library(), there.library(), strict=True):
        assert torch.equal(x, y)
    assert here.terms(here.batch)[0].gauges == there.terms(there.batch)[0].gauges
