"""Law 4, "no spread": rewards that agree up to rounding are one reward, to credit, filters, scales, whitening and the
second opinion."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_symmetry import RELATIVE, bare

from posttrain.algorithm.credit.reward_shaping import shaped, sizes
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.checks.data_checks import filter_reads_outcomes
from posttrain.checks.learning.credit_by_definition import expected_credit
from posttrain.checks.learning.credit_checks import CREDIT_BOUND, StepCreditAudit
from posttrain.config.run import Reinforce
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, ScoredGroup
from posttrain.core.streams import WEIGHT
from posttrain.core.verdict import Judged, Verdict, size
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Value
from posttrain.ladder.pieces.shape import BestOf, Cosine, Gate, Overlong, Repetition, Signed
from posttrain.ladder.policy_rows import DR_GRPO, EMA, GRPO, LADDER, MAXRL, PPO, REINFORCE
from posttrain.role.pack import pack
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import PlainEpisode, scored_group

Terms = tuple[float, ...]
"""The weighted scores one reward is summed from."""

NO_SPREAD: dict[str, list[Terms]] = {
    "a sum rounded up": [(0.3,), (0.1 + 0.2,), (0.3,), (0.3,)],
    "two sums": [(0.3,), (0.1, 0.2), (0.2, 0.1), (0.3,)],
    "0 and what cancels to almost 0": [(0.0,), (0.1 + 0.2, -0.3), (0.0,), (0.0,)],
    "what cancels, and its own negative": [(0.1 + 0.2, -0.3), (-(0.1 + 0.2), 0.3)],
    "large terms that cancel": [(1e6, -1e6 + 0.1), (0.1,), (1e6 + 0.1, -1e6)],
    "a mean of tests": [(sum([0.1] * 10),), (1.0,), (1.0,)],
    "thirds": [(1 / 3 + 1 / 3 + 1 / 3,), (1.0,), (1 - 2**-53,)],
    "seven of .1": [(0.1,)] * 7,
    "large and one ulp apart": [(1e100,), (math.nextafter(1e100, math.inf),)],
    "one sibling": [(0.7,)],
}
every = pytest.mark.parametrize("a", RELATIVE, ids=[a.name for a in RELATIVE])


def siblings(name: str, rewards: Sequence[Terms], resolution: float = RESOLUTION, tokens: int = 2) -> ScoredGroup:
    """A prompt's answers, each with one verdict a term; every source's weight is the term, and its score 1."""
    one = np.full(tokens, -1.0)
    return scored_group(
        name,
        [
            PlainEpisode(
                0.0,
                [[tokens]],
                one,
                one,
                one,
                np.zeros(tokens),
                energy=np.ones(tokens),
                implicit=one,
                verdicts=tuple(
                    Judged(f"s{i}", 1.0, Verdict.value(x), resolution=resolution) for i, x in enumerate(terms)
                ),
            )
            for terms in rewards
        ],
    )


def first(credit: Credit, group: int = 0) -> np.ndarray:
    return np.array([e.advantage[0][0] for e in credit.groups[group].episodes])


def agree(a: Algorithm, groups: list[ScoredGroup]) -> Credit:
    """The step's credit, which the second opinion shares where it has one."""
    credit = credit_step(a, groups, max_tokens=20, ema=0.0)
    other = expected_credit(a, groups, max_tokens=20, ema=0.0)
    mine = [x for g in credit.groups for e in g.episodes for x in e.advantage]
    for x, o in zip(mine, other or [], strict=other is not None):
        assert np.all(np.abs(x - o.credit) <= CREDIT_BOUND * np.maximum(1, np.abs(x))), (a.name, x, o.credit)
    return credit


@every
@pytest.mark.parametrize("case", NO_SPREAD)
def test_rewards_that_agree_up_to_rounding_carry_no_credit(a: Algorithm, case: str) -> None:
    """Exactly 0, counted as silent, refused by the filter; the second opinion says the same."""
    group = siblings("t", NO_SPREAD[case])
    if a.rewards == "each":  # each source is compared alone, and none of them alone repeats the sum
        group = siblings("t", [(math.fsum(t),) for t in NO_SPREAD[case]], 2**-20 if "cancel" in case else RESOLUTION)
        if "almost 0" in case or "own negative" in case:
            return
    credit = agree(a, [group])
    assert credit.groups[0].silent and not np.any(first(credit)), first(credit)
    assert not group.group.mixed
    filter_reads_outcomes([], [group.group])
    with pytest.raises(InvariantError, match="kept the group"):
        filter_reads_outcomes([group.group], [])


@every
def test_the_same_number_with_small_terms_is_spread(a: Algorithm) -> None:
    """5.6e-17 that somebody said, and not what cancels to it, differs from 0."""
    if any(isinstance(s, Signed) for s in a.shape) or a.name == "maxrl":
        return  # 2 r - 1 has a term of size 1
    group = siblings("t", [(0.0,), (5.6e-17,), (0.0,), (0.0,), (0.0,), (0.0,)])
    assert group.group.mixed and np.any(first(agree(a, [group]))) == (a.rewards != "none")


grid = st.lists(st.integers(-8, 8).map(lambda i: i / 10), min_size=2, max_size=8)
ulps = st.lists(st.integers(-64, 64), min_size=8, max_size=8)


@every
@settings(max_examples=30)
@given(r=grid, noise=ulps)
@example(r=[0.3, 0.3, 0.3, 0.3], noise=[0, 1, 0, 0, 0, 0, 0, 0])
@example(r=[-0.8, 0.8], noise=[1, 0, 0, 0, 0, 0, 0, 0])
def test_noise_in_the_last_places_changes_no_credit(a: Algorithm, r: list[float], noise: list[int]) -> None:
    """Rewards moved by up to 64 units in the last place get the credit of the rewards they were, to 1e-9, silent groups
    exactly 0."""
    moved = [2.0**-53 * n for _, n in zip(r, noise, strict=False)]
    clean, noisy = (
        agree(
            a, [siblings("t", [(x + 1 + d, -1.0) for x, d in zip(r, by, strict=True)]), siblings("u", [(0.0,), (1.0,)])]
        )
        for by in ([0.0] * len(r), moved)
    )
    if a.scale != "group_mean":  # a mean that cancels scales nothing, and one that is small scales its rounding
        assert first(noisy) == pytest.approx(first(clean), abs=1e-9)
    assert [g.silent for g in noisy.groups] == [g.silent for g in clean.groups]
    # few siblings have one best of many
    assert a.shape or [g.silent for g in clean.groups] == [max(r) == min(r), False]


@every
@settings(max_examples=30)
@given(r=st.lists(st.floats(0, 1), min_size=2, max_size=8), level=st.integers(0, 60))
def test_two_opinions_share_credit_at_every_width(a: Algorithm, r: list[float], level: int) -> None:
    """.3 plus differences of 1 down to 2^-60: the second opinion says the same on both sides of the resolution, and
    credit is centred."""
    group = siblings("t", [(0.3 + x * 2.0**-level,) for x in r])
    credit = agree(a, [group, siblings("u", [(0.0,), (1.0,), (0.5,)])])
    found = first(credit)
    assert credit.groups[0].silent == (not group.group.mixed) or a.shape
    if a in (GRPO, bare(GRPO)):
        assert abs(found.sum()) < 1e-9
        assert not np.any(found) or np.std(found, ddof=1) == pytest.approx(1.0)


def test_a_model_that_rewards_says_how_fine_it_is() -> None:
    """Differences below the resolution of the coarsest source are noise; those above are credit."""
    close, far = [(0.7,), (0.7003,), (0.6999,)], [(0.7,), (0.71,), (0.6999,)]
    for a in (GRPO, DR_GRPO):
        assert agree(a, [siblings("t", close, 1e-3)]).groups[0].silent
        assert not agree(a, [siblings("t", far, 1e-3)]).groups[0].silent
        assert not agree(a, [siblings("t", close)]).groups[0].silent
    exact, model = (
        Judged("verifier", 1.0, Verdict.value(1.0)),
        [Judged("model", 1.0, Verdict.value(x), resolution=1e-3) for x in (0.5, 0.5001)],
    )
    mixed = scored_group("t", [PlainEpisode(0.0, [[1]], np.full(1, -1.0), verdicts=(exact, m)) for m in model])
    assert not mixed.group.mixed
    with pytest.raises(InvariantError, match="resolution"):
        Judged("model", 1.0, Verdict.value(1.0), resolution=-1.0)


PLAIN = patch(REINFORCE, "plain_white", "-", whiten="sample")


@pytest.mark.parametrize(
    "a",
    [
        PLAIN,
        patch(REINFORCE, "by_token", "-", whiten="token"),
        patch(REINFORCE, "by_source", "-", whiten="source"),
        patch(PPO, "ppo_far", "-", baseline=Value(gae_lambda=1.0)),
        bare(LADDER["reinforce_pp_baseline"]),
    ],
    ids=lambda a: a.name,
)
def test_whitening_makes_nothing_of_rounding(a: Algorithm) -> None:
    """A whole step that agrees up to rounding is whitened to exact zeros, also where no siblings are compared."""
    for case in ("a sum rounded up", "two sums", "0 and what cancels to almost 0", "thirds"):
        credit = agree(a, [siblings("t", NO_SPREAD[case])])
        assert not np.any(first(credit)), case
    assert np.any(first(agree(a, [siblings("t", [(1.0,), (0.0,)])])))


def test_scales_make_nothing_of_rounding() -> None:
    """A deviation of the whole step, and a mean that cancels, are no scale where they are rounding."""
    batch = patch(DR_GRPO, "batch_scale", "-", scale="batch_std")
    assert not np.any(first(agree(batch, [siblings("t", NO_SPREAD["a sum rounded up"]), siblings("u", [(0.3,)] * 3)])))
    assert not np.any(first(agree(bare(MAXRL), [siblings("t", [(0.1, 0.2), (-0.3,)])])))
    best = patch(LADDER["pass_at_k"], "best_of_2", "-", shape=(BestOf(k=2),))
    assert not np.any(first(agree(best, [siblings("t", NO_SPREAD["a sum rounded up"])])))


def test_baselines_that_compare_no_siblings_are_not_touched() -> None:
    """The moving average and no baseline at all pay what was earned."""
    r = NO_SPREAD["a sum rounded up"]
    assert np.array_equal(first(agree(REINFORCE, [siblings("t", r)])), [x for (x,) in r])
    assert first(agree(EMA, [siblings("t", r)])) == pytest.approx([0.3, 0.285, 0.27075, 0.2572125])


@pytest.mark.parametrize(
    "piece",
    [Signed(), Overlong(), Repetition(n=1), Cosine(), Gate(source="s0"), BestOf(k=2)],
    ids=lambda p: type(p).__name__,
)
def test_shaping_adds_its_terms(piece: object) -> None:
    """A shaped reward is at most the sum of its absolute terms, and never of finer terms than a part of it."""
    group = siblings("t", [(0.1 + 0.2, -0.3), (1.0, 0.0), (0.5, 0.5)], tokens=19)
    episodes = [e.episode for e in group.episodes]
    raw, terms = np.array([e.reward for e in episodes], np.float64), np.array([size(e.verdicts) for e in episodes])
    after, _ = shaped((piece,), raw, episodes, 20)  # type: ignore[arg-type]
    found = sizes((piece,), raw, terms, episodes, 20)  # type: ignore[arg-type]
    assert np.all(np.abs(after) <= found + 1e-12)
    assert terms == pytest.approx([0.6, 1.0, 1.0]) and found.max() >= terms.max() * (not isinstance(piece, Cosine))


AUDITED = [
    a
    for a in RELATIVE
    if not a.reads and expected_credit(a, [siblings("t", [(1.0,), (0.0,)])], max_tokens=20, ema=0.0) is not None
]


@settings(max_examples=150)
@given(
    st.sampled_from(AUDITED),
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
)
@example(bare(LADDER["magistral"]), [[1.0, 0.5, 0.0], [0.5, 0.5]], 2)
@example(bare(LADDER["magistral"]), [[0.1, 0.3, 0.5], [0.1, 0.1, 0.1, 0.1]], 1)
def test_the_second_opinion_misses_no_minibatch_for_rounding(
    a: Algorithm, rewards: list[list[float]], minibatches: int
) -> None:
    """Whitening leaves 0 or its rounding where credit is 0: neither is an episode that was lost, nor one minibatch
    less."""
    groups = [siblings(f"t{i}", [(x,) for x in r], tokens=i + 2) for i, r in enumerate(rewards)]
    stage = Reinforce(name="rl", algorithm=a, prompts=4, minibatches=minibatches, sampling=Sampling(max_tokens=20))
    mine = expected_credit(a, groups, max_tokens=20, ema=0.0)
    assert mine is not None
    books = StepCreditAudit(a, mine, minibatches, 20)
    for minibatch in pack(agree(a, groups), a, stage, seed=0, step=1):
        if minibatch.batch is not None:
            books.check(minibatch.batch)
    books.complete()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_answers_of_two_prompts_that_are_alike_to_the_last_bit(minibatches: int) -> None:
    """Equal tokens, log-probs and credit in a group of two and in one of four: their weights differ, and each is right.
    A weight that is neither's is told."""
    a = patch(DR_GRPO, "by_prompt", "-", aggregate="prompt_mean")
    groups = [siblings(f"t{i}", [(1.0,), (0.0,)] * count) for i, count in enumerate((1, 2))]
    stage = Reinforce(name="rl", algorithm=a, prompts=2, minibatches=minibatches, sampling=Sampling(max_tokens=20))
    mine = expected_credit(a, groups, max_tokens=20, ema=0.0)
    assert mine is not None and len({o.key for o in mine}) == 1
    batches = [m.batch for m in pack(agree(a, groups), a, stage, seed=0, step=1) if m.batch is not None]
    books = StepCreditAudit(a, mine, minibatches, 20)
    for batch in batches:
        books.check(batch)
    books.complete()
    assert len({float(w) for b in batches for w in b[WEIGHT]}) == 2
    batches[-1][WEIGHT][-1] *= 3
    with pytest.raises(InvariantError, match="weights are wrong"):
        again = StepCreditAudit(a, mine, minibatches, 20)
        for batch in batches:
            again.check(batch)
