"""Every live rule on a healthy and on a sick log; notes are said once and counted; what the data says at the start."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO

import numpy as np
import pytest

from posttrain.build.request.chat_or_plain import clearly_better
from posttrain.checks.stage_history import FIRST, KEPT
from posttrain.config.run import Optimizer, Reinforce
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.core.gauge import Gauge, Step
from posttrain.core.sampling import Sampling
from posttrain.core.types import Message, Task
from posttrain.diagnose.rules.all_rules import findings
from posttrain.diagnose.rules.data_notes import data_notes
from posttrain.diagnose.rules.notes_once import SaidOnce, findings_of, kind_of, notes_of
from posttrain.diagnose.rules.rule import PLAYED_RULES, RULES, rounded, trend
from posttrain.environment.single import Listed
from posttrain.report.console import PlainConsole
from posttrain.report.live.live_terminal import Terminal
from tests.tiny import tiny_run

STAGE = Reinforce(name="rl", optimizer=Optimizer(lr=5e-4, warmup=5), sampling=Sampling(max_tokens=16))
Shape = Callable[[int], float]


def steady(value: float, scatter: float = 0.0) -> Shape:
    return lambda i: value + scatter * (random.Random(i).random() - 0.5)


def ramp(a: float, b: float, steps: int, scatter: float = 0.02) -> Shape:
    return lambda i: a + (b - a) * (i - 1) / (steps - 1) + scatter * (random.Random(i).random() - 0.5)


def rises_and_falls(a: float, b: float, c: float, steps: int = 40, scatter: float = 0.02) -> Shape:
    half = steps // 2
    return lambda i: ramp(a, b, half, scatter)(i) if i <= half else ramp(b, c, half, scatter)(i - half)


HEALTHY: dict[str, Shape] = {
    "rollout/reward": ramp(0.4, 0.8, 40, 0.1),
    "rollout/solved": ramp(0.4, 0.8, 40, 0.1),
    "rollout/reward_std": steady(0.4),
    "rollout/mixed": steady(0.7),
    "rollout/tokens": steady(8, 1),
    "rollout/truncated": steady(0.02),
    "rollout/failed": steady(0),
    "rollout/special": steady(0),
    "rollout/entropy": ramp(0.6, 0.2, 40),
    "credit/silent": steady(0.3, 0.2),
    "credit/advantage_abs": steady(0.5),
    "optim/grad_norm": steady(1.0, 0.5),
    "optim/lr": steady(5e-4),
    "optim/steps": steady(1),
    "optim/update": steady(1e-3),
    "policy/kl_step": steady(2e-3, 2e-3),
    "policy/kl_reference": ramp(0.001, 0.1, 40, 0),
    "canary/mute_sources": steady(0),
}


def log(steps: int = 40, clock: dict[str, Shape] | None = None, grades: bool = False, **changed: Shape) -> list[Step]:
    """A record of one stage: the healthy gauges with some changed; `rollout__reward` is rollout/reward. `grades`:
    rewards are grades, so no share of right answers is recorded."""
    shapes = HEALTHY | {n.replace("__", "/"): shape for n, shape in changed.items()}
    if grades:
        del shapes["rollout/solved"]
    return [
        Step("rl", i, i, {n: Gauge(f(i), 1) for n, f in shapes.items()}, {n: f(i) for n, f in (clock or {}).items()})
        for i in range(1, steps + 1)
    ]


def said(steps: Sequence[Step], stage: Reinforce | OnlinePreference = STAGE) -> dict[str, str]:
    """The first finding of each rule while the stage goes on, as `LiveRules` asks for them."""
    out: dict[str, str] = {}
    history: list[Step] = []
    for step in steps:
        history.append(step)
        del history[FIRST:-KEPT]
        for f in findings(history, stage):
            out.setdefault(f.rule, f.message)
    return out


@dataclass(frozen=True)
class Sick:
    """A log in which a rule must speak, words that it must say, and rules that may speak too."""

    steps: list[Step]
    words: tuple[str, ...]
    also: tuple[str, ...] = ()
    stage: Reinforce = STAGE


def at(step: int, then: float, before: Shape) -> Shape:
    return lambda i: then if i >= step else before(i)


def evaluated(steps: list[Step], **at_step: float) -> list[Step]:
    out = list(steps)
    for name, reward in at_step.items():
        i = int(name.removeprefix("s")) - 1
        out[i] = replace(out[i], gauges={**out[i].gauges, "eval/reward": Gauge(reward * 200, 200)})
    return out


SICK: dict[str, Sick] = {
    "collapse": Sick(
        log(
            12,
            rollout__reward=at(8, 0.012, steady(0.445, 0.1)),
            rollout__solved=at(8, 0.012, steady(0.445, 0.1)),
            policy__kl_step=at(7, 4.2, steady(2e-3)),
        ),
        (
            "fell from 0.4",
            "to 0.012 after step 7",
            "4.2 nats a token",
            "rl.optimizer.lr=1e-5",
            "nats from the reference",
        ),
        ("update_too_large",),
    ),
    "update_too_large": Sick(
        log(6, policy__kl_step=steady(2.0)), ("far too high", "2 nats a token", "rl.optimizer.lr=2e-5")
    ),
    "update_too_small": Sick(
        log(12, policy__kl_step=steady(2e-7), rollout__reward=steady(0.4, 0.1)),
        ("far too low", "2e-07 nats", "rl.optimizer.lr=5e-2"),
    ),
    "policy_runs_away": Sick(log(6, policy__kl_start=steady(0.6)), ("0.6 nats a token within one step",)),
    "entropy_collapses": Sick(
        log(24, rollout__entropy=ramp(0.6, -0.5, 12), rollout__reward=steady(0.4, 0.1), rollout__solved=steady(0.4)),
        ("the entropy has collapsed", "60% of the answers are wrong", "rl.sampling.temperature (now 1)"),
    ),
    "length_drifts": Sick(
        log(24, rollout__tokens=ramp(5, 16, 24), rollout__truncated=ramp(0, 0.6, 24), rollout__reward=steady(0.4, 0.1)),
        ("have become longer", "cut off at rl.sampling.max_tokens=16"),
    ),
    "reward_is_constant": Sick(
        log(
            8, rollout__reward=steady(1), rollout__solved=steady(1), rollout__mixed=steady(0), credit__silent=steady(1)
        ),
        ("same reward (1)", "posttrain check"),
    ),
    "too_hard": Sick(
        log(
            8, rollout__reward=steady(0), rollout__solved=steady(0), rollout__mixed=steady(0), credit__silent=steady(1)
        ),
        ("too hard", "0.0% of the answers", "teach it first", "rl.siblings=32"),
    ),
    "too_easy": Sick(
        log(8, rollout__reward=steady(0.98, 0.02), rollout__solved=steady(0.98, 0.02), credit__silent=steady(0.9)),
        ("too easy", "dapo"),
    ),
    "cut_off_before_the_answer": Sick(
        log(6, rollout__truncated=steady(0.97), rollout__solved=steady(0), rollout__reward=steady(0)),
        ("97% of the answers are cut off at max_tokens=16", "rl.sampling.max_tokens=64"),
    ),
    "never_stops": Sick(
        log(6, rollout__truncated=steady(1), rollout__special=steady(0.9), rollout__solved=steady(0.5)),
        ("never stop", "the stop id is wrong", "eos_token_id"),
    ),
    "reward_without_quality": Sick(
        log(24, rollout__reward=ramp(0.2, 0.9, 24), reward__exact=ramp(0.5, 0.1, 24), reward__loud=ramp(0, 0.8, 24)),
        ("while exact falls", "raises the reward and gets worse"),
    ),
    "reward_without_truth": Sick(
        log(40, rollout__reward=ramp(-0.4, 3.2, 40, 0.2), rollout__truth=rises_and_falls(0.1, 0.3, 0.1)),
        ("the reward is exploited", "while what is measured and not paid falls (0.", "a larger KL"),
    ),
    "reward_outruns_truth": Sick(
        log(40, rollout__reward=ramp(0.3, 0.9, 40, 0.1), rollout__truth=steady(0.4, 0.05)),
        ("rises (0.", "stays (0.", "not what is meant", "rubric"),
    ),
    "heldout_falls": Sick(
        evaluated(log(40), s10=0.6, s20=0.55, s30=0.4),
        ("held-out reward fell from 0.6 (step 10) to 0.4 (step 30)", "learned by heart", "step 10"),
    ),
    "reward_is_flat": Sick(
        log(40, rollout__reward=steady(0.5, 0.1), rollout__truncated=steady(0.4), policy__kl_step=steady(1e-5)),
        (
            "the reward is flat: 0.",
            "1. 40% of the answers are cut off (rl.sampling.max_tokens=32)",
            "2. a step changes",
        ),
    ),
    "siblings_agree": Sick(
        log(8, grades=True, rollout__reward=steady(17, 0.4), credit__silent=steady(0.95)),
        ("siblings earn the same reward in 95% of the groups", "If this is the most", "rl.sampling.temperature"),
    ),
    "judges_fail": Sick(log(4, rollout__failed=steady(0.2)), ("20% of the samples could not be judged",)),
    "source_is_mute": Sick(log(6, canary__mute_sources=steady(0.5)), ("given 0 to every answer",)),
    "tool_is_dead": Sick(
        log(5, {"tools/failed/get": steady(1), "tools/failed/add": steady(0.1), "tools/timeout": steady(0.5)}),
        ("no call of the tool get has succeeded in 4 steps", "ran out of time", "env.limits.tool_seconds"),
    ),
    "reference_follows": Sick(log(5, policy__kl_reference=steady(0)), ("Freeze a copy",)),
    "old_policy_is_the_new_one": Sick(
        log(4, optim__steps=steady(2), policy__kl_start=steady(0)),
        ("old log-probs",),
        stage=replace(STAGE, minibatches=2),
    ),
}


def test_a_reward_that_falls_slowly_to_less_than_half_is_a_collapse_and_not_flat() -> None:
    found = said(log(40, rollout__reward=ramp(0.45, 0.03, 40, 0.1), rollout__solved=ramp(0.45, 0.03, 40, 0.1)))
    assert set(found) == {"collapse"} and "within " in found["collapse"] and "No step was large" in found["collapse"]


def test_a_reward_that_falls_a_little_is_not_called_flat() -> None:
    found = said(log(40, rollout__reward=ramp(0.6, 0.45, 40, 0.05), rollout__solved=ramp(0.6, 0.45, 40, 0.05)))
    assert set(found) == {"reward_is_flat"} and found["reward_is_flat"].startswith("the reward falls: 0.")


GRADED: dict[str, Sick] = {
    "collapse": Sick(
        log(
            12,
            grades=True,
            rollout__reward=at(8, -9.1, steady(-2.2, 0.3)),
            rollout__reward_std=steady(1.5),
            policy__kl_step=at(7, 4.2, steady(2e-3)),
        ),
        ("fell from -2.", "to -9.1 after step 7"),
        ("update_too_large",),
    ),
    "entropy_collapses": Sick(
        log(24, grades=True, rollout__entropy=ramp(0.6, -0.5, 12), rollout__reward=steady(-0.4, 0.1)),
        ("the entropy has collapsed", "the reward went from -0."),
    ),
    "reward_is_constant": Sick(
        log(8, grades=True, rollout__reward=steady(-1), rollout__mixed=steady(0), credit__silent=steady(1)),
        ("same reward (-1)", "the least that it pays"),
    ),
    "cut_off_before_the_answer": Sick(
        log(
            6, grades=True, rollout__truncated=steady(0.97), rollout__reward=steady(0.3, 0.1), credit__silent=steady(1)
        ),
        ("97% of the answers are cut off", "100% of the groups have no spread", "rl.sampling.max_tokens=64"),
    ),
    "reward_without_quality": Sick(
        log(24, grades=True, rollout__reward=ramp(2, 9, 24), reward__grade=ramp(-3, -6, 24)),
        ("while grade falls (-3",),
    ),
    "heldout_falls": Sick(
        evaluated(
            log(grades=True, rollout__reward=ramp(17, 19, 40, 0.5), rollout__reward_std=steady(3)),
            s10=18.0,
            s20=17.5,
            s30=16.0,
        ),
        ("held-out reward fell from 18 (step 10) to 16 (step 30)",),
    ),
    "reward_is_flat": Sick(
        log(
            40,
            grades=True,
            rollout__reward=steady(17, 0.4),
            rollout__reward_std=steady(1.5),
            credit__silent=steady(0.75),
        ),
        ("the reward is flat: 1", "1. 75% of the groups have no spread: siblings earn the same (use finer grades"),
    ),
}


@pytest.mark.parametrize("name", GRADED)
def test_of_grades_a_rule_says_nothing_of_right_and_wrong(name: str) -> None:
    sick = GRADED[name]
    found = said(sick.steps, sick.stage)
    assert name in found and set(found) <= {name, *sick.also}, found
    assert not [w for w in sick.words if w not in found[name]], found[name]
    assert not [w for w in ("are right", "are wrong", "too easy", "too hard") if w in found[name]]


def on_another_scale(steps: list[Step], factor: float, shift: float) -> list[Step]:
    """The same steps with 256 answers each, and each reward times `factor` and `shift` more."""
    out: list[Step] = []
    for s in steps:
        told = {
            n: Gauge(256 * (factor * g.mean + shift * (n != "rollout/reward_std")), 256)
            for n, g in s.gauges.items()
            if n in ("rollout/reward", "rollout/reward_std", "rollout/truth", "eval/reward") or n.startswith("reward/")
        }
        out.append(replace(s, gauges={**s.gauges, **told}))
    return out


SHIFTED = GRADED | {
    name: Sick(log(40, grades=True, rollout__reward=paid, rollout__truth=truth), ())
    for name, paid, truth in (
        ("reward_without_truth", ramp(-0.4, 3.2, 40, 0.2), rises_and_falls(2.1, 2.9, 2.1, scatter=0.5)),
        ("reward_outruns_truth", ramp(-0.4, 3.2, 40, 0.2), steady(2.0, 0.02)),
    )
}


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (0.5, -30.0), (1e4, 1e6), (1e-4, 5e-3)])
@pytest.mark.parametrize("name", SHIFTED)
def test_of_grades_a_rule_says_the_same_on_every_scale(name: str, factor: float, shift: float) -> None:
    sick = SHIFTED[name]
    found = said(on_another_scale(sick.steps, factor, shift), sick.stage)
    assert name in found and set(found) <= {name, *sick.also}, found


def test_a_fall_that_its_own_numbers_do_not_show_is_not_told() -> None:
    truth = rises_and_falls(1e-17, 9e-17, 1e-17, scatter=1e-18)
    sick = Sick(log(40, grades=True, rollout__reward=ramp(-0.4, 3.2, 40, 0.2), rollout__truth=truth), ())
    told = [x for x in said(sick.steps, sick.stage) if x == "reward_without_truth"]
    assert not told


def test_every_rule_has_a_sick_log() -> None:
    assert set(SICK) == set(RULES)


@pytest.mark.parametrize("name", SICK)
def test_a_sick_log_is_named_and_nothing_else(name: str) -> None:
    sick = SICK[name]
    found = said(sick.steps, sick.stage)
    assert name in found, found
    assert set(found) <= {name, *sick.also}
    assert not [w for w in sick.words if w not in found[name]], found[name]


@pytest.mark.parametrize("name", SICK)
def test_rules_of_what_was_played_speak_in_a_stage_of_sampled_pairs_too(name: str) -> None:
    found = set(said(SICK[name].steps, OnlinePreference(name="online")))
    assert found <= {name, *SICK[name].also} & set(PLAYED_RULES) and (name in found) == (name in PLAYED_RULES)
    assert findings([], OnlinePreference(name="online")) == []


HEALTHY_LOGS: dict[str, list[Step]] = {
    "learns": log(),
    "goes on long": log(120),
    "learns everything": log(
        60,
        rollout__reward=lambda i: min(1.0, 0.4 + i / 40),
        rollout__solved=lambda i: min(1.0, 0.4 + i / 40),
        rollout__mixed=lambda i: float(i < 24),
        credit__silent=lambda i: min(1.0, 0.2 + i / 30),
        rollout__entropy=lambda i: 0.6 / i,
        credit__advantage_abs=lambda i: float(i < 24),
        policy__kl_step=lambda i: 2e-3 if i < 24 else 0.0,
    ),
    "learns slowly from little": log(
        40, rollout__reward=ramp(0.02, 0.2, 40, 0.03), rollout__solved=ramp(0.02, 0.2, 40, 0.03)
    ),
    "a bad step": log(rollout__reward=lambda i: 0.2 if i == 20 else 0.4 + i / 100),
    "one large update": log(policy__kl_step=lambda i: 1.2 if i == 9 else 2e-3),
    "ten times the learning rate": log(policy__kl_step=steady(0.2, 0.2)),
    "a tenth of the learning rate": log(policy__kl_step=steady(2e-5, 2e-5)),
    "warms up": log(12, optim__lr=lambda i: 5e-4 * min(1, i / 200), policy__kl_step=steady(1e-7)),
    "answers grow longer and better": log(rollout__tokens=ramp(6, 14, 40), rollout__truncated=ramp(0, 0.3, 40)),
    "one step without spread": log(credit__silent=lambda i: float(i == 5), rollout__solved=lambda i: 0.4 * (i != 5)),
    "grades below 1": log(grades=True, rollout__reward=ramp(0.2, 0.6, 40)),
    "grades far from 0 to 1": log(grades=True, rollout__reward=ramp(-5, 3, 40), rollout__reward_std=steady(3)),
    "grades that wobble about 0": log(grades=True, rollout__reward=steady(0, 0.8)),
    "grades that are all above 1": log(
        grades=True, rollout__reward=ramp(17, 19, 40, 0.5), credit__silent=steady(0.7), rollout__reward_std=steady(2)
    ),
    "held-out grades wobble": evaluated(
        log(grades=True, rollout__reward=ramp(17, 19, 40, 0.5), rollout__reward_std=steady(3)),
        s10=17.9,
        s20=17.4,
        s30=18.1,
        s40=17.5,
    ),
    "grades rise and are sure": log(
        grades=True,
        rollout__reward=ramp(-9, -1, 40),
        rollout__entropy=ramp(0.6, -0.5, 40),
        rollout__reward_std=steady(4),
    ),
    "named grades": log(rollout__solved=steady(0), rollout__reward=ramp(0.2, 0.6, 40)),
    "held-out wobbles": evaluated(log(40), s10=0.5, s20=0.56, s30=0.52, s40=0.6),
    "a source trades off a little": log(reward__exact=ramp(0.3, 0.8, 40), reward__brief=ramp(0.9, 0.8, 40)),
    "a tool is used wrongly at times": log(clock={"tools/failed/get": steady(0.6)}),
    "learns more slowly than 36 answers a step show": log(
        36, rollout__reward=ramp(0.49, 0.55, 36, 0.5), rollout__solved=ramp(0.49, 0.55, 36, 0.5)
    ),
    "right and sure of it": log(
        20,
        policy__kl_step=steady(1e-6),
        rollout__reward=steady(0.96, 0.01),
        rollout__solved=steady(0.96, 0.01),
        rollout__entropy=steady(0.05),
    ),
    "the truth follows the reward": log(
        40, rollout__reward=ramp(-0.4, 3.2, 40, 0.2), rollout__truth=ramp(0.1, 0.5, 40, 0.1)
    ),
    "whether the truth rises cannot be seen": log(
        60, rollout__reward=ramp(-0.4, 3.2, 60, 0.2), rollout__truth=steady(0.3, 0.4)
    ),
    "the truth is reached": log(40, rollout__reward=ramp(0.3, 0.9, 40, 0.1), rollout__truth=steady(0.96, 0.02)),
    "the truth rises by a third of the reward": log(
        40, rollout__reward=ramp(0.3, 0.9, 40, 0.1), rollout__truth=ramp(0.4, 0.6, 40, 0.05)
    ),
    "the truth stays and the reward too": log(
        40, rollout__reward=ramp(0.5, 0.54, 40, 0.1), rollout__truth=steady(0.4, 0.02)
    ),
    "noisy": log(10, rollout__reward=steady(0.4, 0.6), rollout__solved=steady(0.4, 0.6)),
}


@pytest.mark.parametrize("name", HEALTHY_LOGS)
def test_a_healthy_log_is_not_spoken_about(name: str) -> None:
    assert said(HEALTHY_LOGS[name]) == {}


@pytest.mark.parametrize(("factor", "shift"), [(0.5, -30.0), (1e4, 1e6), (1e-4, 5e-3)])
@pytest.mark.parametrize("name", [n for n in HEALTHY_LOGS if "grade" in n and n != "named grades"])
def test_of_healthy_grades_no_rule_speaks_on_any_scale(name: str, factor: float, shift: float) -> None:
    assert said(on_another_scale(HEALTHY_LOGS[name], factor, shift)) == {}


def test_a_policy_that_is_certain_of_every_token_has_an_old_policy_and_a_reference_of_its_own() -> None:
    """PPO under top_k=1: values learn, and no log-prob can move."""
    none = steady(0)
    still = log(8, optim__steps=steady(2), policy__kl_start=none, policy__kl_step=none, policy__kl_reference=none)
    assert not {"old_policy_is_the_new_one", "reference_follows"} & said(still, replace(STAGE, minibatches=2)).keys()


def test_all_rules_together_take_less_than_a_millisecond() -> None:
    steps = log(72)
    best = 1.0
    for _ in range(5):
        begun = time.perf_counter()
        findings(steps, STAGE)
        best = min(best, time.perf_counter() - begun)
    assert best < 1e-3 * 4, f"{best * 1e3:.2f} ms on this machine"


def test_a_trend_knows_its_noise() -> None:
    up = trend(log(30), "rollout/reward", 12)
    assert up is not None and up.gain > 0.15 and up.sure > 5
    assert trend(log(8), "rollout/reward", 12) is None
    gap = [*log(40)[:8], *log(40)[20:]]
    seen = trend(gap, "rollout/reward", 12)
    assert seen is not None and seen.steps == 20, "only steps that follow one another count"
    assert rounded(4.6e-4) == "5e-4" and rounded(1.0) == "1"


# --- said once, then counted ------------------------------------------------------------------------------------------


def noted(index: int, *notes: str) -> Step:
    return Step("rl", index, index, {}, notes=notes)


REPEATED = [
    noted(1, "no group has spread (all siblings agree; rewards seen: 0), so this step carries no credit"),
    noted(2, "rule collapse: it fell from 0.5 to 0.1"),
    noted(3, "no group has spread (all siblings agree; rewards seen: 0, 1), so this step carries no credit"),
    noted(4, "rule collapse: it fell from 0.5 to 0.05", "the reference is now the policy of step 4"),
]


def test_notes_are_told_apart_by_what_they_say_and_not_by_their_numbers() -> None:
    assert kind_of("rule collapse: 0.1") == "collapse"
    assert kind_of("only 3 of 8 groups passed (1)") == kind_of("only 12 of 8 groups passed (x)")
    assert kind_of("only 3 of 8 groups passed") != kind_of("only 3 of 8 groups failed")


def test_a_note_is_said_once_and_counted() -> None:
    once = SaidOnce()
    assert [len(once.new(s)) for s in REPEATED] == [1, 1, 0, 1]
    told = notes_of(REPEATED)
    assert [(s.rule, s.steps) for s in told] == [("", (1, 3)), ("collapse", (2, 4)), ("", (4,))]
    (finding,) = findings_of(REPEATED)
    assert finding.line == "rl: it fell from 0.5 to 0.1 [steps 2, 4 (2 times)]"
    assert [len(once.new(replace(s, stage="second"))) for s in REPEATED] == [1, 1, 0, 1], "each stage says it once"


def test_the_terminal_prints_each_kind_of_note_once() -> None:
    out = StringIO()
    terminal = Terminal(tiny_run(), PlainConsole(file=out, soft_wrap=True))
    for step in REPEATED:
        terminal.log(step)
    said = out.getvalue()
    assert said.count("no group has spread") == 1 and said.count("it fell from") == 1
    assert "note: step 2, collapse: it fell from 0.5 to 0.1" in said and "note: step 4: the reference" in said
    terminal.close({})
    counted = out.getvalue().removeprefix(said)
    assert " ".join(counted.split()) == (
        "note: rl: no group has spread (all siblings agree; rewards seen: 0), ... held at steps 1, 3 (2 times)"
    ), "findings of rules stand in the report of the run"
    terminal.close({})
    assert out.getvalue().removeprefix(said) == counted, "it is counted once"


# --- before the first step --------------------------------------------------------------------------------------------


def tasks(*prompts: str | tuple[Message, ...]) -> tuple[Task, ...]:
    return tuple(Task(id=f"t{i}", prompt=p, answer="1", info={}) for i, p in enumerate(prompts))


MANY = tuple(f"question {i}" for i in range(40))


def test_distinct_prompts_are_not_spoken_about() -> None:
    assert data_notes(Listed(tasks(*MANY)), tasks("another", "question 99")) == []
    assert data_notes(Listed(tasks(*MANY, "question 3")), ()) == [], "one repeat in forty is no fault"


def test_repeated_prompts_are_counted() -> None:
    (note,) = data_notes(Listed(tasks(*MANY, *["question 3"] * 5)), ())
    assert "duplicated prompts: 5 of 45" in note and "'question 3' comes 6 times" in note


def test_a_held_out_prompt_in_other_white_space_is_a_leak() -> None:
    chat = (Message(role="user", content="Question  7 "),)
    (note,) = data_notes(Listed(tasks(*MANY)), tasks("Question  7 ", "new", chat))
    assert "leaked held-out prompts: 1 of 3" in note and "question 7" in note


# --- the form of the prompts ------------------------------------------------------------------------------------------


def nats(mean: float, scatter: float = 0.1) -> np.ndarray:
    """Log-probs a token of eight answers."""
    return mean + scatter * np.linspace(-1, 1, 8)


@pytest.mark.parametrize(
    ("here", "there", "better"),
    [
        (nats(-2.6), nats(-0.3), True),
        (nats(-1.0), nats(-0.7, 0.2), True),
        (nats(-0.08), nats(-1.8), False),
        (nats(-0.25), nats(-0.2, 0.2), False),
        (nats(-3.93), nats(-3.71, 0.13), False),
        (nats(-1.0), nats(-0.7, 0.6), False),
    ],
    ids=["other form", "less well known", "right form", "both forms are known", "neither is known", "chance"],
)
def test_the_other_form_must_be_known_clearly_better(here: np.ndarray, there: np.ndarray, better: bool) -> None:
    assert clearly_better(here, there) is better


def test_a_policy_that_lost_its_end_has_the_right_stop_ids() -> None:
    """Answers ended by themselves in the first steps, so a policy that never stops after a collapse is no wrong id."""
    history = log(8, rollout__truncated=lambda i: 0.1 if i < 3 else 1.0, rollout__special=steady(0.9))
    assert "never_stops" not in said(history)
