"""Whether tokens come from the reported distribution: what is certain about it, and bets that are right at every
moment.

Drawing again has no chance in it. A bet may raise a false alarm, and with no more than the stated probability, whatever
the distributions are, however long a run is and whenever one looks.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.checks.sampling import sampler_draws
from posttrain.checks.sampling.sampler_draws import (
    ALPHA,
    MOST,
    STAKES,
    TEMPERATURES,
    Bet,
    Bets,
    bet_on_answers,
    bet_on_draws,
    bet_on_siblings,
)
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.scores import Odds
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded import token_sampler as drawing
from posttrain.engine.layers.attention import PackedLayout, using
from posttrain.engine.learner.learner import HFLearner
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.rollout import Rollout
from posttrain.system.errors import InvariantError
from tests.laws.test_agreement import OPTIONS, PROMPTS, policy, sharpen

SEED, STREAM = 11, "train/rl"


def episodes(
    engine: EmbeddedEngine, sampling: Sampling, *, seed: int = SEED, sibling: Callable[[int], int] = lambda i: i
) -> list[Episode]:
    """Two turns of each prompt, four siblings, drawn where a run would draw them."""
    contract = replace(sampling, max_tokens=12).resolve((15,))

    async def one(task: Task, i: int, ids: list[int]) -> Episode:
        transcript, turns = Transcript(contract), list[int]()
        transcript.see(ids)
        for turn in range(2):
            place = seeds.key(seed, STREAM, task.id, 0, sibling(i), turn)
            said = await engine.generate(transcript.ids, contract, place)
            transcript.say(said)
            turns.append(len(said.ids))
        return Episode(
            task, 0, i, (transcript.segment(),), Stop.SAID, (Judged("v", 1.0, Verdict.value(0.0)),), turns=tuple(turns)
        )

    async def all_() -> list[Episode]:
        tasks = [
            (Task(str(p), text), i, [1 + ord(c) % 14 for c in text]) for p, text in enumerate(PROMPTS) for i in range(4)
        ]
        return await asyncio.gather(*[one(*t) for t in tasks])

    return asyncio.run(all_())


def again(learner: HFLearner, played: Sequence[Episode], *, seed: int = SEED, first: int = 0) -> Any:
    looked = sampler_draws.look(played, first)
    assert looked is not None
    odds = learner.odds(looked.packed, TEMPERATURES)
    return sampler_draws.drawn_again(
        looked,
        odds,
        sampler_draws.uniforms(looked, seed, STREAM),
        lambda: sampler_draws.SURE,
        lambda ids: str(ids.tolist()),
    )


@pytest.fixture(scope="module")
def made() -> tuple[HFLearner, EmbeddedEngine]:
    learner = HFLearner(policy())
    sharpen(learner, 2.0)
    return learner, EmbeddedEngine(learner.policy.clone().module, slots=8, context=64)


# --- drawn again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("first", [0, 7])
def test_every_token_can_be_drawn_again(name: str, first: int, made: tuple[HFLearner, EmbeddedEngine]) -> None:
    learner, engine = made
    played = episodes(engine, OPTIONS[name])
    told = again(learner, played, first=first)
    assert told["canary/drawn_again"].sum == min(sampler_draws.PROBED, sum(e.spoken for e in played)) > 100


def test_rules_before_the_temperature_are_drawn_again_too(made: tuple[HFLearner, EmbeddedEngine]) -> None:
    learner, engine = made
    ruled = Sampling(
        repetition_penalty=1.4, min_tokens=3, bad_ids=((4,), (5, 6)), logit_bias=((7, 1.5),), temperature=0.8, top_k=6
    )
    assert again(learner, episodes(engine, ruled))


FAULTS = {
    "colder": lambda logp, u, *a: drawing_pick((2 * logp).log_softmax(-1), u, *a),
    "hotter": lambda logp, u, *a: drawing_pick((0.8 * logp).log_softmax(-1), u, *a),
    "argmax": lambda logp, u, *a: logp.argmax(-1),
    "one number for all": lambda logp, u, *a: drawing_pick(logp, np.full_like(u, u[0]), *a),
    "neighbour's number": lambda logp, u, *a: drawing_pick(logp, np.roll(u, 1), *a),
}
drawing_pick = drawing.pick


@pytest.mark.parametrize("name", FAULTS)
def test_other_draws_are_found_at_once(
    name: str, made: tuple[HFLearner, EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, engine = made
    monkeypatch.setattr(drawing, "pick", FAULTS[name])
    played = episodes(engine, Sampling())
    with pytest.raises(InvariantError, match="does not draw from the distribution it reports"):
        again(learner, played)


def test_a_seed_that_is_not_the_run_s_and_siblings_that_share_numbers_are_found(
    made: tuple[HFLearner, EmbeddedEngine],
) -> None:
    learner, engine = made
    with pytest.raises(InvariantError, match="of this run's seed"):
        again(learner, episodes(engine, Sampling(), seed=SEED + 1))
    with pytest.raises(InvariantError, match="every task, visit, sibling"):
        again(learner, episodes(engine, Sampling(), sibling=lambda i: 0))


def test_odds_are_the_borders_of_the_inverse_of_the_cumulative_distribution(
    made: tuple[HFLearner, EmbeddedEngine],
) -> None:
    """Against a table of the whole distribution, made by the module itself."""
    learner, engine = made
    e = episodes(engine, Sampling(temperature=0.7, top_p=0.9))[0]
    looked = sampler_draws.look([e], 0)
    assert looked is not None
    packed, found = looked.packed, learner.odds(looked.packed, (0.5,))
    with torch.no_grad():
        ids, at = (torch.as_tensor(x[None].astype(np.int64)) for x in (packed.ids_N, packed.positions_N))
        with using(PackedLayout(packed.lengths_S)):
            z = learner.policy.module(input_ids=ids, position_ids=at, use_cache=False).logits
    z = z[0, packed.source_M].double() / 0.7
    assert packed.kept is not None
    for m, kept in enumerate(packed.kept.sets()):
        p = torch.softmax(z[m, kept.astype(np.int64)], 0).numpy()
        at = int(np.flatnonzero(kept == packed.target_M[m])[0])
        q = p**2 / (p**2).sum()
        assert found.below_M[m] == pytest.approx(p[:at].sum(), abs=1e-5) and found.upto_M[m] == pytest.approx(
            p[: at + 1].sum(), abs=1e-5
        )
        assert found.log_ratio_MK[m, 0] == pytest.approx(math.log(q[at] / p[at]), abs=1e-4)
        assert found.distance_MK[m, 0] == pytest.approx(0.5 * np.abs(q - p).sum(), abs=1e-5)


def test_beginnings_are_settled_before_they_are_known(made: tuple[HFLearner, EmbeddedEngine]) -> None:
    """Changing what an episode says behind the border changes nothing of what is looked at before it."""
    _, engine = made
    played = episodes(engine, Sampling())
    looked = sampler_draws.look(played, 3)
    assert looked is not None and looked.packed.spoken == min(sampler_draws.PROBED, sum(e.spoken for e in played))
    part = sampler_draws.beginning(played[0].segments[0], 3)
    assert part.spoken == 3 and bool(part.mask[-1])


def test_a_distribution_that_is_no_number_is_no_agreement(made: tuple[HFLearner, EmbeddedEngine]) -> None:
    _, engine = made
    looked = sampler_draws.look(episodes(engine, Sampling()), 0)
    assert looked is not None
    blank = np.full(looked.packed.spoken, np.nan)
    with pytest.raises(InvariantError, match="does not draw from the distribution it reports"):
        sampler_draws.drawn_again(
            looked,
            Odds(blank, blank, blank, blank),
            sampler_draws.uniforms(looked, SEED, STREAM),
            lambda: sampler_draws.SURE,
            str,
        )


# --- bets -------------------------------------------------------------------------------------------------------------


def odds_of(p: np.ndarray, said: np.ndarray) -> Odds:
    """[M, V] distributions and what was said."""
    rows = np.arange(len(said))
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    ratio, apart = [], []
    for t in TEMPERATURES:
        q = np.exp(logp / t)
        q /= q.sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            ratio.append(np.log(q[rows, said]) - logp[rows, said])
        apart.append(0.5 * np.abs(q - p).sum(1))
    below = np.cumsum(p, 1)[rows, said] - p[rows, said]
    return Odds(below, below + p[rows, said], np.stack(ratio, 1), np.stack(apart, 1))


@settings(max_examples=200)
@given(st.lists(st.floats(-30, 3), min_size=2, max_size=6), st.integers(0, 2**31), st.sampled_from([0.0, 2e-3, 0.25]))
def test_no_factor_is_worth_more_than_one_on_average(z: list[float], seed: int, noise: float) -> None:
    """By enumeration, also where the engine's log-probs are off by as much as the noise allows."""
    rng = np.random.default_rng(seed)
    p = np.exp(z) / np.exp(z).sum()
    theirs = p * np.exp(rng.uniform(-noise, noise, len(p)) / 2)
    theirs /= theirs.sum()
    assert np.all(np.abs(np.log(theirs / p)) <= noise + 1e-12)
    every = np.arange(len(p))
    o = odds_of(np.tile(p, (len(p), 1)), every)
    factor = np.exp(np.minimum(o.log_ratio_MK, math.log(MOST))) / (1 + 2 * o.distance_MK * math.expm1(noise))
    assert np.all(theirs @ factor <= 1 + 1e-9)


@settings(max_examples=100)
@given(st.floats(1e-12, 0.5), st.floats(0, 1), st.sampled_from(STAKES))
def test_no_comparison_of_siblings_is_worth_more_than_one_on_average(p: float, share: float, c: float) -> None:
    """The world may make equal answers rarer than their words are, never more frequent."""
    true = p * share
    assert true * (1 + c * (1 - p) / p) + (1 - true) * (1 - c) <= 1 + 1e-9


def test_what_is_ever_added_to_a_bet_sums_to_one() -> None:
    assert sum(1 / (n * (n + 1)) for n in range(1, 100_000)) < 1
    bet = Bet()
    for _ in range(50):
        bet.play([0.0, 0.0])
    assert math.exp(bet.stakes[0]) == pytest.approx(sum(1 / (n * (n + 1)) for n in range(1, 51)))


def walk(rng: np.random.Generator, count: int, spread: float, tau: float, size: int = 12) -> tuple[Odds, float]:
    """Tokens drawn at `tau` times the reported temperature, and the mean entropy of what was reported."""
    z = rng.normal(size=(count, size)) * spread
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    q = p ** (1 / tau)
    q /= q.sum(1, keepdims=True)
    said = np.minimum((np.cumsum(q, 1) < rng.random((count, 1))).sum(1), size - 1)
    return odds_of(p, said), float(-(p * np.log(p)).sum(1).mean())


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0, 30.0])
def test_honest_draws_raise_no_alarm_however_long_one_looks(spread: float) -> None:
    """Nearly uniform to nearly certain, 15 runs of 2,000 tokens each; the largest evidence ever seen stays far below
    the bound."""
    worst = -math.inf
    for seed in range(15):
        bet = Bet()
        told = bet_on_draws(bet, walk(np.random.default_rng(seed), 2000, spread, 1.0)[0], 2e-3)
        worst = max(worst, told["canary/bet_on_draws"].sum)
    assert worst < math.log(1000) < -math.log(ALPHA)


@pytest.mark.parametrize("tau", [0.5, 0.7, 1.5])
def test_other_temperatures_are_found(tau: float) -> None:
    with pytest.raises(InvariantError, match="times likelier"):
        bet_on_draws(Bet(), walk(np.random.default_rng(0), 4000, 2.0, tau)[0], 2e-3)


def test_a_fault_that_begins_late_is_found() -> None:
    bet, rng = Bet(), np.random.default_rng(1)
    bet_on_draws(bet, walk(rng, 4000, 2.0, 1.0)[0], 2e-3)
    with pytest.raises(InvariantError, match="times likelier"):
        bet_on_draws(bet, walk(rng, 1500, 2.0, 0.5)[0], 2e-3)


def test_bets_come_back_from_a_checkpoint() -> None:
    bets = Bets()
    bet_on_draws(bets.draws, walk(np.random.default_rng(2), 50, 2.0, 1.0)[0], 2e-3)
    assert Bets.of(json.loads(json.dumps(bets.plain(), allow_nan=False))) == bets
    assert Bets.of(None) == Bets()


# --- siblings ---------------------------------------------------------------------------------------------------------


def group(answers: Sequence[tuple[Sequence[int], float]], **more: Any) -> Group:
    """Siblings with these ids, each of this log-prob in all."""
    task, out = Task("t", "?"), list[Episode]()
    for i, (ids, logp) in enumerate(answers):
        t = Transcript(Sampling(stop_ids=()))
        t.see([1])
        n = len(ids)
        t._append(ids, np.ones(n, bool), np.full(n, logp / n, np.float32), np.zeros(n, np.int32))
        out.append(Episode(task, 0, i, (t.segment(),), Stop.SAID, (Judged("v", 1.0, Verdict.value(0.0)),), turns=(n,)))
    return Group(task, 0, tuple(out), **more)


def test_siblings_that_say_the_same_improbable_words_are_found_at_once() -> None:
    with pytest.raises(InvariantError, match="siblings repeat each other"):
        bet_on_siblings(Bet(), [group([((3, 4, 5, 6), -22.0)] * 2)], 2e-3)


def test_siblings_of_a_policy_that_is_certain_may_say_the_same_for_ever() -> None:
    bet = Bet()
    for _ in range(200):
        bet_on_siblings(bet, [group([((3, 4), -0.05)] * 8)], 2e-3)
    assert bet.rounds == 0


def test_chance_repeats_are_no_fault() -> None:
    """Two words, a fair coin: 300 groups of eight that agree half of the time."""
    bet, rng = Bet(), np.random.default_rng(0)
    for _ in range(300):
        bet_on_siblings(bet, [group([((int(rng.integers(3, 5)),), math.log(0.45)) for _ in range(8)])], 2e-3)
    assert bet.log_evidence < math.log(1000)


LIKELY, LONG = 3, 4
"""A word, and one that is so long to say that the clock always cuts it."""


def answers(rng: np.random.Generator, count: int, likely: float) -> Group:
    """Honest draws of one word each; of a long one nothing is known but that it was begun."""
    out = list[Episode]()
    for i in range(count):
        t = Transcript(Sampling(stop_ids=()))
        t.see([1, 2])
        if cut := rng.random() >= likely:
            out.append(Episode(Task("t", "?"), 0, i, (t.segment(),), Stop.TIME, (), cut=True))
            continue
        t.say(
            SampledTurn(
                np.array([LIKELY], np.int32),
                np.array([math.log(likely)], np.float32),
                np.array([0], np.int32),
                Stop.SAID,
            )
        )
        out.append(Episode(Task("t", "?"), 0, i, (t.segment(),), Stop.SAID, (), turns=(1,), cut=cut))
    return Group(Task("t", "?"), 0, tuple(out))


def test_turns_cut_by_what_they_say_raise_no_alarm() -> None:
    """Steps with such turns are no reason to look only at others: these hold the likely word alone, as a sharper policy
    says it."""
    rng, bet, chosen = np.random.default_rng(3), Bet(), Bet()
    p = np.array([1e-9, 1e-9, 1e-9, 0.7, 0.3])

    def odds(packed: Packed) -> Odds:
        return odds_of(np.tile(p / p.sum(), (packed.spoken, 1)), packed.target_M)

    whole = list[Group]()
    for step in range(600):
        g = answers(rng, 4, 0.7)
        bet_on_answers(bet, g.episodes, step % 4, odds, lambda packed: 2e-3)
        whole += [g] if not any(e.cut for e in g.episodes) else []
    assert bet.log_evidence < math.log(1000)
    with pytest.raises(InvariantError, match="times likelier"):
        for g in whole:
            bet_on_answers(chosen, g.episodes, 0, odds, lambda packed: 2e-3)


def test_other_draws_are_found_where_some_turns_are_cut() -> None:
    """One answer in a hundred, by chance: the bet before it counts, and after it a new one begins."""
    rng, bet = np.random.default_rng(4), Bet()
    p = np.array([1e-9, 1e-9, 1e-9, 0.6, 0.4])

    def odds(packed: Packed) -> Odds:
        return odds_of(np.tile(p / p.sum(), (packed.spoken, 1)), packed.target_M)

    with pytest.raises(InvariantError, match="times likelier"):
        for _ in range(100):
            played = list[Episode]()
            for i in range(256):
                t = Transcript(Sampling(stop_ids=()))
                t.see([1, 2])
                t.say(
                    SampledTurn(
                        np.array([3 + (rng.random() < 0.05)], np.int32),
                        np.array([-0.5], np.float32),
                        np.array([0], np.int32),
                        Stop.SAID,
                    )
                )
                played.append(
                    Episode(
                        Task("t", "?"), 0, i, (t.segment(),), Stop.SAID, (), turns=(1,), cut=bool(rng.random() < 0.01)
                    )
                )
            bet_on_answers(bet, played, 0, odds, lambda packed: 2e-3)


def test_siblings_of_which_only_the_short_ones_are_known_raise_no_alarm() -> None:
    """All that is ever heard is one word of probability 0.2; the others were cut by the clock, so no two known ones
    differ."""
    bet, rng = Bet(), np.random.default_rng(5)
    for _ in range(400):
        bet_on_siblings(bet, [answers(rng, 8, 0.2)], 2e-3)
    assert bet.rounds and bet.log_evidence < math.log(1000)


def test_a_lost_stake_is_lost_and_begins_again() -> None:
    bet = Bet()
    for _ in range(20):
        bet.play([1.0, 0.0])
    bet.lose()
    assert bet.log_evidence == -math.inf and bet.rounds == 20
    assert Bets.of(json.loads(json.dumps(Bets(bet, Bet()).plain(), allow_nan=False))).draws == bet
    bet.play([0.0, 0.0])
    assert math.exp(bet.log_evidence) == pytest.approx(1 / (21 * 22))


def test_groups_lie_in_the_order_they_were_asked_whatever_passes() -> None:
    """Whoever takes the first of them takes them by place: a filter reads what was said."""

    class Played(Rollout):
        async def group(self, task: Task, visit: int, *args: Any, **options: Any) -> Group:
            said = group([((3,), -1.0), ((4,), -1.0)])
            judged = [
                replace(
                    e, task=task, visit=visit, verdicts=(Judged("x", 1.0, Verdict.value(float(passes[visit] and i))),)
                )
                for i, e in enumerate(said.episodes)
            ]
            return replace(said, task=task, visit=visit, episodes=tuple(judged))

    passes = [False, True, False, True, True, False, True, False, False]
    prompts = ((Task(str(i), "?"), i) for i in range(100))
    rollout = Played(None, None, lambda name: None, SEED)  # type: ignore[arg-type]
    played, passed = asyncio.run(
        rollout.until(prompts, RolloutRequest(groups=3, siblings=1, mixed=True), Sampling(), STREAM)
    )
    # 3, then 2 missing at a rate of 1 / 3
    assert [g.visit for g in played] == list(range(9)) and list(passed) == passes
    asked = Experience(1, 0, played, passed, 3)
    assert [g.visit for g in asked.groups] == [1, 3, 4] and [g.visit for g in asked.refused] == [0, 2, 5, 7, 8]
    assert [g.visit for g in asked.spare] == [6]
