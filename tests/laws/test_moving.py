"""Laws of moving baselines: one of all tasks, and one of each source of tasks (RAE)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.core.scored import Credit, ScoredGroup
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import EMA, RAE
from posttrain.stages.reinforce.reinforce_stage import ReinforceState
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.toy.episodes import PlainEpisode, scored_group

laws = settings(max_examples=60)
Step = list[tuple[str, list[float]]]
"""Groups: (source, rewards)."""
steps = st.lists(
    st.tuples(
        st.sampled_from(["", "first", "second"]), st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=6,
)


def groups(step: Step) -> list[ScoredGroup]:
    return [
        scored_group(
            str(i), [PlainEpisode(r, [[1]], np.full(1, -1.0)) for r in rewards], info={"source": of} if of else {}
        )
        for i, (of, rewards) in enumerate(step)
    ]


def credit(a: Algorithm, step: Step, before: Credit | None = None) -> Credit:
    ema, emas = (0.0, {}) if before is None else (before.ema, before.emas)
    return credit_step(a, groups(step), max_tokens=20, ema=ema, emas=emas)


def flat(found: Credit) -> list[float]:
    return [float(e.advantage[0][0]) for g in found.groups for e in g.episodes]


def test_in_numbers() -> None:
    """decay .95: the second of `first` is compared with .05, the first of `second` with 0, whatever came between."""
    found = credit(RAE, [("first", [1.0]), ("second", [-1.0]), ("first", [1.0])])
    assert flat(found) == pytest.approx([1, -1, 0.95])
    assert found.emas == pytest.approx({"first": 0.05 + 0.95 * 0.05, "second": -0.05}) and found.ema == 0


@laws
@given(steps)
def test_of_one_source_it_is_the_moving_average_of_all(step: Step) -> None:
    same = [("chess/white", rewards) for _, rewards in step]
    assert flat(credit(RAE, same)) == flat(credit(EMA, step))
    assert credit(RAE, same).emas == {"chess/white": credit(EMA, step).ema}


@laws
@given(steps)
def test_no_source_sees_another(step: Step) -> None:
    """The credit of a source is what it would be if there were no other."""
    whole, at = flat(credit(RAE, step)), 0
    apart: dict[str, list[float]] = {}
    for of, rewards in step:
        apart.setdefault(of, []).extend(whole[at : at + len(rewards)])
        at += len(rewards)
    for of, found in apart.items():
        assert found == flat(credit(EMA, [(s, r) for s, r in step if s == of]))


@laws
@given(steps, steps)
def test_it_goes_on_from_step_to_step_and_from_a_checkpoint(one: Step, two: Step) -> None:
    """Two steps are as one of both; what a checkpoint keeps of it comes back."""
    first = credit(RAE, one)
    assert flat(first) + flat(credit(RAE, two, first)) == flat(credit(RAE, one + two))
    state = ReinforceState(memory=AdaptiveState(ema=first.ema, emas=first.emas))
    assert from_plain(ReinforceState, to_plain(state)).memory == state.memory


def test_an_edge_of_a_role_is_no_credit() -> None:
    """A zero-sum game in which the first player wins 4 in 5: one average of all gives each role its edge as credit for
    ever, an average of each role does not (2506.24119)."""
    rng = np.random.default_rng(0)
    won = np.where(rng.random(600) < 0.8, 1.0, -1.0)
    step: Step = [(of, [float(r if of == "first" else -r)]) for r in won for of in ("first", "second")]
    late = {name: np.array(flat(credit(a, step)))[600:].reshape(-1, 2).mean(0) for name, a in (("a", EMA), ("r", RAE))}
    assert late["a"] == pytest.approx([0.6, -0.6], abs=0.15)
    assert late["r"] == pytest.approx([0, 0], abs=0.05)
