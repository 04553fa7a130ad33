"""Advice as a table: for each piece a situation in which it is said, and one in which it must not be. And what counts
as right, by grades of several kinds."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.session import right_lines
from posttrain.config.env import Env, Reward
from posttrain.config.overrides import apply
from posttrain.config.run import Model, Reinforce, Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.right import Grades, Right, right_of
from posttrain.core.verdict import Judged, Verdict
from posttrain.diagnose.advice import Case, advice, chosen
from posttrain.diagnose.learning_verdict import stage_learned
from posttrain.diagnose.measurement import Measurement
from posttrain.diagnose.next_steps import next_steps
from posttrain.diagnose.run_outcome import NOTHING_ORDERED, StageOutcome
from posttrain.ladder.policy_rows import LADDER
from posttrain.recipe.recipes import recipe
from posttrain.record.run_folder import RunFolder
from posttrain.record.step_format import _verdict as plain_verdict  # pyright: ignore[reportPrivateUsage]
from posttrain.record.step_format import verdict_from_plain

RL = Reinforce(name="rl", algorithm=LADDER["grpo"], steps=40, eval_every=0)
PAIRS = Preference(name="dpo", steps=40)
RANKS = RewardModel(name="prm", steps=40)
EXACT = (Reward(function="exact"),)


def run(stage: Any = RL, **changed: Any) -> Run:
    base = recipe("grpo")
    env = replace(base.env, **{"rewards": EXACT, "heldout": 40, **changed.pop("env", {})})
    return replace(base, env=env, stages=(stage,), **changed)


def gain(before: float, after: float, width: float = 0.1, prompts: int = 40) -> Gain:
    return Gain(before, after, after - before - width, after - before + width, prompts, 1, 1)


def measured(value: float, step: int, graded: bool = False) -> Measurement:
    paid: dict[Hashable, float] = dict.fromkeys(range(40), value)
    return Measurement("rl", step, Score.of([value] * 40), Score.of([value] * 40), graded, paid, paid)


def case(stage: Any = RL, graded: bool = False, of: dict[str, Any] | None = None, **changed: Any) -> Case:
    """A stage that did not learn, by rewards of 0 and 1, with a flat reward in training; some of it changed."""
    usual = gain(0.4, 0.4)
    outcome = StageOutcome(
        stage=stage,
        steps=40,
        done=True,
        start=measured(0.4, 0, graded),
        end=measured(0.4, 40, graded),
        accuracy=usual,
        reward=usual,
        proxy=None,
        unpaired="",
        rewards=tuple((i, 0.4 + 0.01 * (i % 2)) for i in range(1, 41)),
        losses=(),
        heldout=((0, 0.4), (20, 0.4), (40, 0.4)),
        heldout_reward=((0, 0.4), (20, 0.4), (40, 0.4)),
        updates=40,
    )
    base = Case(run(stage), replace(outcome, **(of or {})), "runs/x", "did not learn", "reward", usual, 1.0, 0.0)
    return replace(base, **changed)


def blind(of: dict[str, Any] | None = None, at: Run | None = None, **changed: Any) -> Case:
    """A stage of which nothing can be told."""
    found = {"unpaired": "not measured", "accuracy": None, "reward": None, "start": None, "end": None, **(of or {})}
    nothing = case(of=found, verdict="cannot be told", by="nothing", gain=None, change=None, **changed)
    return nothing if at is None else replace(nothing, run=at)


def losses(*values: float, **changed: Any) -> Case:
    class Curved(StageOutcome):
        heldout_losses = tuple((20 * i, v) for i, v in enumerate(values))  # type: ignore[assignment]

    base = case(PAIRS, by="loss", verdict="got worse", gain=gain(values[0], values[-1]), change=values[0] - values[-1])
    found = Curved(**{n: getattr(base.s, n) for n in StageOutcome.__dataclass_fields__})
    return replace(base, s=found, **changed)


MODEL = Reward(function="model:rm")
RISING = tuple((i, 0.2 + i / 80) for i in range(1, 41))
TOO_EASY = "the tasks are too easy for this policy: 98% of the answers are right"
RATE = "the learning rate is far too low. Set rl.optimizer.lr=5e-2"
PAID = "paid more, not more often right"
FELL = {"verdict": "got worse", "gain": gain(0.8, 0.4), "change": -0.4}
BEST_AT_20 = {"heldout": ((0, 0.4), (20, 0.7), (40, 0.2))}
SAME_MEANS = {"rewards": tuple((i, 0.25) for i in range(1, 41))}
ONE = {**SAME_MEANS, "reward_stds": tuple((i, 1e-17) for i in range(1, 41))}
UNSURE = {"verdict": "cannot be told", "gain": gain(0.4, 0.45), "change": 0.05}
NEVER = gain(0.0, 0.0)
EASY = gain(0.95, 0.95)

TABLE: dict[str, tuple[Case, Case]] = {
    "hold prompts out": (blind(at=run(env={"heldout": 0})), blind()),
    "give more prompts": (blind(at=run(env={"heldout": 0}), prompts=1), blind(at=run(env={"heldout": 0}), prompts=2)),
    "give rewards": (blind(at=run(env={"rewards": ()})), blind(at=run(env={"name": "arithmetic", "rewards": ()}))),
    "hold judgements out": (blind(of={"stage": RANKS}), blind(of={"end": measured(0.4, 40)})),
    "measure it": (
        blind(at=run(replace(RL, eval=False, eval_every=0)), of={"stage": replace(RL, eval=False, eval_every=0)}),
        blind(),
    ),
    "record the answers": (blind(at=run(record_episodes=False)), blind()),
    "go on": (blind(of={"done": False}), blind(of={"end": measured(0.4, 40)})),
    "measure on the way": (blind(of={"done": False}), blind(at=run(env={"heldout": 0}))),
    "the score before": (blind(of={"end": measured(0.4, 40)}), blind(of={"end": measured(0.4, 40), "began": "sft"})),
    "what was said there": (
        blind(of={"start": measured(0.4, 0), "end": measured(0.4, 40)}),
        blind(of={"end": measured(0.4, 40)}),
    ),
    "what is paid now": (case(verdict=PAID), case(verdict="learned")),
    "a larger KL": (case(verdict=PAID, exploited=True), case(PAIRS, verdict=PAID, exploited=True)),
    "more judgements": (
        case(verdict=PAID, exploited=True, run=run(env={"rewards": (MODEL,)})),
        case(verdict=PAID, exploited=True),
    ),
    "lower other weights": (
        case(verdict=PAID, run=run(env={"rewards": (*EXACT, Reward(function="x.py:brief"))})),
        case(verdict=PAID),
    ),
    "more held out": (case(**UNSURE, prompts=4000), case(**UNSURE, prompts=60)),
    "more data": (case(**UNSURE, prompts=60), case(**UNSURE, prompts=4000)),
    "the rate that the rules name": (case(found=(RATE,)), case(found=(TOO_EASY,))),
    "what the rules saw": (case(found=(TOO_EASY,)), case()),
    "best at a step": (case(**FELL, of=BEST_AT_20), case(**FELL)),
    "learned by heart": (case(of={"rewards": RISING}), case()),
    "slower": (case(**FELL), case(verdict="learned")),
    "one reward for all, of grades": (case(graded=True, of=ONE), case(of=ONE)),
    "one reward for all": (case(of=ONE), case(graded=True, of=ONE)),
    "never right": (
        case(of={"accuracy": NEVER}, gain=NEVER),
        case(graded=True, of={"accuracy": NEVER}),
    ),
    "right before": (case(of={"accuracy": EASY}, gain=EASY), case(graded=True, of={"accuracy": EASY})),
    "it fell": (case(PAIRS, verdict="cannot be told", gain=gain(0.79, 0.56, 0.3), change=-0.23), case(PAIRS)),
    "faster": (case(), case(found=(TOO_EASY,))),
    "longer or faster": (
        case(PAIRS),
        case(PAIRS, verdict="cannot be told", gain=gain(0.79, 0.56, 0.3), change=-0.23),
    ),
    "read what it says": (case(), case(PAIRS)),
    "still rising": (
        case(verdict="learned", of={"heldout": ((0, 0.2), (20, 0.4), (40, 0.6))}),
        case(verdict="learned", of={"heldout": ((0, 0.2), (20, 0.9), (40, 0.98))}),
    ),
    "longer, or more pairs": (
        case(PAIRS, by="pairs", verdict="cannot be told", change=0.02),
        case(PAIRS, by="pairs", verdict="cannot be told", change=-0.23),
    ),
    "answers are not measured": (
        case(PAIRS, by="pairs", verdict="learned", run=run(PAIRS, env={"rewards": ()})),
        case(PAIRS, by="pairs", verdict="learned"),
    ),
    "stop at the lowest loss": (losses(3.0, 2.0, 3.5), losses(3.0, 3.2, 3.5)),
    "more rows, or longer": (losses(3.0, 2.99, verdict="cannot be told"), losses(3.0, 3.2, verdict="cannot be told")),
}


def test_every_piece_has_its_two_situations() -> None:
    pieces = re.findall(r'Advice\("([^"]+)"', inspect.getsource(inspect.getmodule(chosen) or Case))
    assert sorted(TABLE) == sorted(pieces)


@pytest.mark.parametrize("name", TABLE)
def test_a_piece_is_said_where_it_is_right_and_nowhere_else(name: str) -> None:
    right, wrong = ([a.name for a in chosen(c)] for c in TABLE[name])
    assert name in right, right
    assert name not in wrong, wrong


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (case(of=SAME_MEANS), "every answer"),
        (case(of={**ONE, "reward_stds": ((1, 0.39), *ONE["reward_stds"][1:])}), "every answer"),
        (case(graded=True, of=SAME_MEANS), "every answer"),
        (case(of={"accuracy": NEVER, "greedy": 0.1}, gain=NEVER), "no held-out answer"),
        (case(of={"rewards": ((1, 0.1875),)}), "hardly changed"),
        (case(**UNSURE, prompts=2), "one in 5"),
        (blind(at=run(env={"heldout": 0}), prompts=1), "heldout="),
    ],
)
def test_words_that_the_record_does_not_bear_out(found: Case, word: str) -> None:
    """Steps of one mean whose answers differ, or of which nothing more is recorded; a right greedy answer; the change
    of one step; a part of few prompts; and one prompt, of which none can be held out."""
    assert not any(word in x for x in advice(found, most=9))


def test_a_reward_model_that_could_order_nothing_is_told_why() -> None:
    """It measures itself at its end, and samples nothing: no evaluation on the way, and no answers to look at."""
    c = blind(of={"stage": RANKS, "unpaired": NOTHING_ORDERED})
    told = stage_learned(c.run, c.s, c.folder)
    assert told.text == f"cannot be told whether prm learned: {NOTHING_ORDERED}"
    assert told.advice == ("hold more judgements out, until some differ: env.heldout",)


def test_words_that_did_harm() -> None:
    """Of 60 prompts 12 are held out at most, so 100 are not advised; a stage that fell is not told to go on; tasks that
    are too easy are not answered with a higher rate."""
    few = advice(case(**UNSURE, prompts=60))
    assert "its data has 60 prompts" in few[0] and not any("heldout=" in x for x in few)
    assert advice(blind(at=run(env={"heldout": 0}), prompts=60)) == ("hold prompts out: env.heldout=12",)
    fell = advice(case(PAIRS, verdict="cannot be told", gain=gain(0.79, 0.56, 0.3), change=-0.23))
    assert any("it rather fell" in x for x in fell) and not any("more steps" in x for x in fell)
    assert not any("higher learning rate" in x for x in advice(case(found=(TOO_EASY,))))


def test_a_reward_model_is_used_with_its_own_model_and_prompts(tmp_path: Path) -> None:
    base = recipe("reward_model")
    of = replace(base, model=Model(path="org/m"), env=replace(base.env, prompts="pairs.jsonl"))
    for facts, more in (
        ({}, ""),
        ({"asked": {"recipe": "reward_model", "overrides": ["env.args.hint=x", "seed=3"]}}, " env.args.hint=x"),
    ):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        RunFolder.create(folder / "run", of, facts).close()
        said = " ".join(next_steps(of, folder / "run"))
        assert f"run grpo model=org/m env.prompts=pairs.jsonl{more} env.rewards=model:" in said and "seed=" not in said


# --- what counts as right --------------------------------------------------------------------------------------------


def judged(score: float, by_model: bool = False, source: str = "x", weight: float = 1.0, **more: Any) -> Judged:
    return Judged(source, weight, Verdict.value(score), by_model=by_model, **more)


@pytest.mark.parametrize(
    ("outcomes", "right", "leads", "tells"),
    [
        ([0, 1, 1], Right(), "accuracy", True),
        ([0.1, 0.5, 0.9], Right(), "reward", False),
        ([0.1, 0.5, 0.9], Right(0.9, True), "reward", True),
        ([16, 17, 18], Right(), "reward", False),
        ([-1, 1, -1], Right(), "reward", True),
        ([3.1, -0.4], Right(None), "reward", False),
        ([0, 1], Right(None), "reward", False),
        ([0.9, 17.0, -2.2], Right(None), "reward", False),
        ([0, 0], Right(), "accuracy", True),
        ([1e6, 1e6 + 1], Right(), "reward", False),
    ],
)
def test_what_leads(outcomes: list[float], right: Right, leads: str, tells: bool) -> None:
    """A rubric of at most .9, TRL's unique letters, a reward model's logit, a mix of the three, and others."""
    g = Grades.of(outcomes, right)
    assert ("reward" if g.graded else "accuracy", g.tells) == (leads, tells)


def test_the_score_of_a_model_is_never_right_unless_named() -> None:
    assert right_of([judged(3.0, True)], None) == Right(None) and right_of([judged(3.0)], None) == Right()
    assert right_of([judged(3.0, True)], 2.0) == Right(2.0, True)
    assert right_of([judged(1.0, resolution=1e-3)], None) == Right(), "a coarse function is no model"
    steps = [judged(1.0), judged(0.3, True, end=4)]
    assert right_of(steps, None) == Right(), "a score of a step is no part of the outcome"
    both = [judged(1.0, measured=True), judged(3.0, True)]
    assert right_of(both, None, measured=True) == Right() and right_of(both, None) == Right(None)


def test_one_is_full_marks_only_where_weights_sum_to_it() -> None:
    """A sum of two sources that pay up to 3 may have 1 as its largest outcome by chance."""
    for weights, full in (((1.0,), True), ((0.5, 0.5), True), ((1.0, 2.0), False), ((1.0, -0.2), True)):
        right = right_of([judged(0.4, source=f"s{i}", weight=w) for i, w in enumerate(weights)], None)
        assert right == Right(full=full) and Grades.of([-2.0, 0.5, 1.0], right).tells == full
        assert Grades.of([0.0, 1.0], right).tells, "of pass or fail it is told"


@pytest.mark.parametrize(
    ("function", "model"),
    [("exact", False), ("judge:https://judge.test/v1", True), ("model:PATH", True), ("judge:RUN", True)],
)
def test_a_run_says_once_what_is_right_and_that_no_score_of_a_model_is(function: str, model: bool) -> None:
    words = " ".join(right_lines(replace(recipe("verifiable"), env=Env(rewards=(Reward(function=function),)))))
    assert ("reward of at least 1" in words) is not model and ("score of a model is a grade" in words) is model


def test_a_record_keeps_whether_a_model_judged_and_an_older_one_is_read_by_its_resolution() -> None:
    both = {"a coarse function": judged(3.0, resolution=1e-3), "a vote": judged(0.5, True), "exact": judged(1.0)}
    for name, one in both.items():
        assert verdict_from_plain(plain_verdict(one)) == one, name
    older = {k: v for k, v in plain_verdict(judged(3.0, True, resolution=1e-5)).items() if k != "by_model"}
    assert verdict_from_plain(older).by_model and not verdict_from_plain(plain_verdict(judged(1.0))).by_model


def test_an_environment_names_what_is_right_where_it_alone_pays() -> None:
    own, more = Env(), Env(rewards=(Reward(function="exact"),))
    assert own.named_right(True) == 1 and own.named_right(False) is None and more.named_right(True) is None
    assert replace(more, measured=True).named_right(True) == 1 and replace(more, right=0.5).named_right(True) == 0.5
    # A verdict that is only measured is not paid.
    assert [len(e.paid_weights) for e in (own, more, replace(more, measured=True))] == [1, 2, 1]


def test_other_rewards_forget_what_was_right_by_the_ones_before() -> None:
    before = recipe("verifiable")
    assert before.env.right == 1 and apply(before, ["env.heldout=12"]).env.right == 1
    assert apply(before, ["env.rewards=exact"]).env.right is None
    assert apply(before, ["env.rewards=exact", "env.right=0.5"]).env.right == 0.5
    own = apply(before, ["rl.env=prompts", "rl.env.prompts=X", "rl.env.rewards=exact", "rl.env.right=0.5"])
    for word, right in {"rl.env.heldout=12": 0.5, "rl.env.rewards=contains": None}.items():
        after = apply(own, [word])
        assert after.env_of(after.stage("rl")).right == right, "a stage with rewards of its own"


@pytest.mark.parametrize(("idle", "told"), [(9, False), (10, True), (38, True)])
def test_steps_that_changed_no_weights_are_told_where_they_are_many(idle: int, told: bool) -> None:
    c = case(of={"idle": idle, "updates": 40 - idle})
    said = stage_learned(c.run, c.s, c.folder).text
    assert (f"; {idle} of its 40 steps changed no weights: they had no credit, or were skipped" in said) is told
