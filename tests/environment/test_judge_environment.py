"""Judging as an environment: the papers' rules by hand, what the judge is shown, both orders, and its biases."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.checks.judging.generative_judge_checks import order_is_random, shows_no_verdict, tail
from posttrain.config.env import Env
from posttrain.core.judgements import Pair
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import generator
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict, outcome, truth
from posttrain.environment.gallery.judge import OTHER_ORDER, Judge
from posttrain.environment.judged.judge_bias import surface_baselines
from posttrain.environment.judged.judge_rules import (
    FORMATS,
    best_half,
    both_orders,
    chosen,
    mean_yes,
    read_boxed,
    read_choice,
    read_last_characters,
    right_or_minus_one,
    summed,
)
from posttrain.environment.make import environment
from posttrain.environment.scripted_policy import ScriptedPolicy
from posttrain.system.errors import ConfigError, InvariantError


@cache
def world(format: str = "j1") -> Judge:
    made = environment(Env(name="judge", args={"format": format}, heldout=40), seed=1)
    assert isinstance(made, Judge)
    return made


def score(env: Judge, task: Task, text: str) -> float:
    found = env.verify(Attempt(task, (text,), Stop.SAID)).score
    assert found is not None
    return found


# --- the rules --------------------------------------------------------------------------------------------------------


def test_deepseek_grm_by_hand() -> None:
    """C05: scores (8,6), (5,7), (9,4) sum to (22,17), so the first wins; if the second is better each is paid -1, 1,
    -1; a tie is paid -1."""
    scores = np.array([[8, 6], [5, 7], [9, 4]])
    assert summed(scores).tolist() == [22, 17] and chosen(tuple(map(float, summed(scores)))) == 0
    assert [right_or_minus_one((float(a), float(b)), 1) for a, b in scores] == [-1, 1, -1]
    assert right_or_minus_one((8.0, 8.0), 0) == right_or_minus_one((8.0, 8.0), 1) == -1
    assert read_boxed(r"A is better. \boxed{8, 6}") == (8.0, 6.0)
    assert [read_boxed(t) for t in (r"\boxed{8}", r"\boxed{0, 6}", r"\boxed{8, 6, 1}", "8, 6")] == [None] * 4


def test_j1_by_hand() -> None:
    """C05: AB right and BA wrong: verdict rewards (1, 0), consistency 0; both right: (1, 1) and 1."""
    assert both_orders(True, False) == ((1.0, 0.0), 0.0)
    assert both_orders(True, True) == ((1.0, 1.0), 1.0)
    assert read_choice("[[A]] or rather [[B]]") == (0.0, 1.0)


@given(st.text("<answer>[[AB]]/ .", max_size=30), st.sampled_from("AB"), st.integers(0, 90), st.booleans())
def test_rm_r1_reads_the_last_80_characters(before: str, side: str, after: int, twice: bool) -> None:
    """Against the rule as the survey has it: the side's answer is in the last 80 characters, and the other's is not."""
    other = "B" if side == "A" else "A"
    text = before + (f"<answer>[[{other}]]</answer>" if twice else "") + f"<answer>[[{side}]]</answer>" + "." * after
    end = text[-80:]
    found = {s for s in "AB" if f"<answer>[[{s}]]</answer>" in end}
    wanted = {"A": (1.0, 0.0), "B": (0.0, 1.0)}[found.pop()] if len(found) == 1 else None
    assert read_last_characters(text) == wanted
    assert right_or_minus_one(wanted, 0) == (1.0 if wanted == (1.0, 0.0) else -1.0)


def test_the_votes_of_genrm_and_of_a_meta_reward_model() -> None:
    assert mean_yes(np.log([0.9, 0.5, 0.1])) == pytest.approx(0.5)
    assert best_half(np.array([0.1, 3.0, -1.0, 2.0])).tolist() == [1, 3]
    assert best_half(np.array([1.0, 1.0, 1.0])).tolist() == [0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_written_verdict_is_read_as_it_was_meant(name: str) -> None:
    form = FORMATS[name]
    for scores in ((9.0, 3.0), (2.0, 5.0)):
        text = form.verdict(scores if form.sides == 2 else (float(scores[0] > scores[1]),))
        assert chosen(form.read(text)) == (scores.index(max(scores)) if form.sides == 2 else int(scores[0] > 5))
    best = 0 if form.sides == 2 else 1
    assert form.pays(form.read(form.ends[0]), best) == 1 and form.pays(None, best) < 1
    assert form.pays(form.read(form.ends[1]), best) == form.pays(None, best)


# --- the world --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
async def test_nothing_that_is_shown_depends_on_the_verdict(name: str) -> None:
    env = world(name)
    judging = env.abilities.judging
    assert judging is not None
    for task in (*env.heldout[:10], *(env.train.task(i) for i in range(10))):
        other = judging.regraded(task)
        assert other.prompt == task.prompt and other.info["gold"] == 1 - task.info["gold"]
        assert score(env, task, env.gold(task)[0]) == 1 and score(env, other, env.gold(task)[0]) < 1
        subject: Any = env
        await shows_no_verdict(subject, judging, task)


class Tells(Judge):
    def _task(self, name: str, index: int, texts: tuple[str, ...], gold: int, best: int) -> Task:
        made = super()._task(name, index, texts, gold, best)
        return replace(made, prompt=f"{made.prompt}{'AB'[gold]}")


async def test_a_prompt_with_the_verdict_is_told() -> None:
    env = Tells(heldout_count=4)
    judging = env.abilities.judging
    assert judging is not None
    with pytest.raises(InvariantError, match="depends on the right verdict"):
        subject: Any = env
        await shows_no_verdict(subject, judging, env.heldout[0])


def test_held_out_pairs_come_in_both_orders_and_in_no_training_task() -> None:
    env = world()
    held = env.heldout
    assert len(held) == 40 and len({t.info["pair"] for t in held}) == 20
    for a, b in zip(held[::2], held[1::2], strict=True):
        assert a.info["completions"] == b.info["completions"][::-1] and a.info["gold"] == 1 - b.info["gold"]
    known = {t.prompt for t in held}
    train = [env.train.task(i) for i in range(300)]
    assert not [t for t in train if t.prompt in known or env.exchanged(t, "x").prompt in known]
    assert env.train.task(3) == environment(Env(name="judge", heldout=40), seed=1).train.task(3)


def test_the_order_of_the_sides_is_drawn() -> None:
    env = world()
    firsts = [env.train.task(i).info["gold"] == 0 for i in range(256)]
    assert 100 < sum(firsts) < 156
    order_is_random(firsts)
    with pytest.raises(InvariantError, match="comes first in 256 of 256"):
        order_is_random([True] * 256)


def test_the_chance_of_an_order_is_exact() -> None:
    """Against all sequences of ten draws."""
    every = [sum(map(int, f"{i:010b}")) for i in range(1024)]
    for count in range(11):
        assert tail(count, 10) == pytest.approx(np.mean([abs(c - 5) >= abs(count - 5) for c in every]))


def test_no_surface_feature_tells_the_better_side() -> None:
    """The best of all of them, chosen on other pairs, and the length alone."""
    env = world()

    def pairs(name: str, count: int = 1500) -> list[Pair]:
        out: list[Pair] = []
        for i in range(count):
            task = env.draw(generator(0, name, i), name)
            if task is not None:
                texts, gold = task.info["completions"], task.info["gold"]
                out.append(Pair(task=task, chosen=texts[gold], rejected=texts[1 - gold]))
        return out

    found = surface_baselines(pairs("known"), pairs("held"))
    best = max(found, key=lambda b: b.accuracy.mean)
    print(f"best surface feature: {best.feature}, {best.accuracy}; chosen on other pairs: {found[0].feature}")
    assert best.accuracy.high < 0.82


async def test_consistency_is_paid_where_both_orders_are_right() -> None:
    env = world()
    task = env.heldout[0]
    right, wrong = env.gold(task)[0], env.distractor(task)[0]
    other = env.exchanged(task, "x")
    for here, there, paid in (
        (right, env.gold(other)[0], 1.0),
        (right, env.distractor(other)[0], 0.5),
        (wrong, env.gold(other)[0], 0.0),
        ("nothing", env.gold(other)[0], 0.0),
    ):
        talk = ScriptedPolicy((here,), seats={OTHER_ORDER: (there,)})
        await env.play(task, talk)
        assert talk.others[OTHER_ORDER].seen == [other.prompt] and talk.state == {"other": there}
        verdicts = await env.judge(Attempt(task, (here,), Stop.SAID, state=talk.state))
        assert outcome(verdicts) == paid and truth(verdicts) == float(here == right)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"format": "j2"}, "is no form of judging: use one of genrm, j1"),
        ({"gap": 0.05}, r"must lie in 0\.125\.\.0\.5"),
        ({"world": "arithmetic"}, "does not know what its completions are worth"),
        ({"world": "replies colour=3"}, "world='replies colour=3'.*no such setting"),
    ],
)
def test_a_wrong_setting_is_refused(args: dict[str, str | float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        environment(Env(name="judge", args=args), seed=0).train.task(0)


# --- biases -----------------------------------------------------------------------------------------------------------


def answered(task: Task, *texts: str) -> Group:
    def one(i: int, text: str) -> Episode:
        ids, mask = np.array([1, 2], np.int32), np.array([False, True])
        logp, version = np.array([np.nan, -1.0], np.float32), np.array([-1, 0], np.int32)
        segment = Segment(ids, mask, logp, version, Sampling(stop_ids=()))
        return Episode(task, 0, i, (segment,), Stop.SAID, (Judged("judge", 1.0, Verdict.value(0.0)),), text)

    return Group(task, 0, tuple(one(i, text) for i, text in enumerate(texts)))


def test_biases_by_hand() -> None:
    """Two pairs in both orders. A judge that always names the first side is right in one order of each."""

    def pair(name: str, best: int, texts: tuple[str, str]) -> Task:
        return Task(name, name, info={"pair": name[0], "best": best, "completions": list(texts)})

    tasks = [
        pair("p1", 0, ("long text", "short")),
        pair("p2", 1, ("short", "long text")),
        pair("q1", 0, ("ab", "a")),
        pair("q2", 1, ("a", "ab")),
    ]
    measures = world().abilities.measures
    assert measures is not None
    always = measures([answered(t, "[[A]]") for t in tasks])
    assert (always["eval/first_chosen"].mean, always["eval/both_orders"].mean) == (1.0, 0.0)
    assert always["eval/length_bias"].mean == -0.5  # the longer one is better each time, and named in one order
    right = measures([answered(t, f"[[{'AB'[t.info['best']]}]]", "?") for t in tasks])
    assert (right["eval/first_chosen"].mean, right["eval/length_bias"].mean) == (0.5, 0.0)
    assert (right["eval/both_orders"].sum, right["eval/both_orders"].count, right["eval/unread"].mean) == (2, 4, 0.5)
    wrong = measures([answered(t, f"[[{'BA'[t.info['best']]}]]") for t in tasks])
    assert wrong["eval/length_bias"].mean == -1.0 and wrong["eval/both_orders"].mean == 0.0


def test_a_critique_ends_in_the_verdict_of_its_scores() -> None:
    for name in FORMATS:
        env = world(name)
        for i in range(30):
            task = env.train.task(i)
            for wrong in (0.0, 1.0):
                prompt, text = env.demonstrate(task, "critique", generator(0, "t", i), wrong)
                said = chosen(env.form.read(text))
                assert prompt == task.prompt and (said == task.info["gold"]) is not bool(wrong)
                points = [int(x) for x in re.findall(r"=(\d+)", text)]
                assert len(points) == env.form.sides
                if env.form.sides == 2:  # a wrong one does not follow from what it says
                    assert (said == int(points[1] > points[0])) is not bool(wrong)
