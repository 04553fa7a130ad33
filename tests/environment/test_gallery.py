"""Every task of the gallery proves itself; every reasoning-gym task generates and scores."""

from __future__ import annotations

import ast
import contextlib
import operator
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.env import Scalar
from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.environment.adapters.reasoning_gym import NO_GOLD, REFUSED, Gym
from posttrain.environment.conformance import prove
from posttrain.environment.expression import MAX_CHARACTERS, MAX_DEPTH, ExpressionError, evaluate
from posttrain.environment.gallery import GALLERY, gallery_class
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.gallery.countdown import Countdown
from posttrain.environment.make import environment
from posttrain.system.errors import ConfigError

SETTINGS: dict[str, list[dict[str, Scalar]]] = {
    "arithmetic": [{}, {"ops": "+-", "max_operand": 99}, {"min_terms": 3, "max_terms": 3, "max_operand": 20}],
    "countdown": [{}, {"numbers": 3, "ops": "+-"}],
    "calculator": [{}, {"ops": "+-*", "max_operand": 20, "turns": 3}, {"tape": 2}],
    "judge": [{}, {"format": "genrm"}, {"format": "rm_r1", "gap": 0.3}, {"format": "grm"}],
    "programs": [{}],
    "replies": [{}, {"numbers": 4, "max_number": 99, "noise": 0.2, "annotators": 3}],
    "shop": [{}, {"turns": 3}],
    "verify": [{}, {"format": "genprm", "world": "arithmetic min_terms=5 max_terms=6 ops=+-"}],
}
HELDOUT = {"programs": 30}
"""Fewer where an answer costs a process."""


def test_every_gallery_task_is_proved() -> None:
    assert set(SETTINGS) == {name for name, where in GALLERY.items() if where.startswith("posttrain.")}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        pytest.param(n, a, marks=[pytest.mark.prove] if n in ("shop", "programs") or i else [])
        for n, settings in SETTINGS.items()
        for i, a in enumerate(settings)
    ],
)
async def test_a_gallery_task_means_what_it_says(name: str, args: dict[str, Scalar]) -> None:
    held = HELDOUT.get(name, 200)
    checks = await prove(environment(Env(name=name, args=args, heldout=held), seed=3), samples=5 * held)
    assert len(checks) >= 9
    assert [c for c in checks if not c.passed] == []


class Leaky(Arithmetic):
    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(1.0)


class Contains(Arithmetic):
    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(float(str(attempt.task.answer) in attempt.text))


class Unsplit(Arithmetic):
    _held = frozenset()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("cls", "failing"),
    [
        (Leaky, "silence scores 0"),
        (Leaky, "constant answer earns its share"),
        (Contains, "distractor scores 0"),
        (Unsplit, "held-out is disjoint from train"),
    ],
)
async def test_a_broken_task_is_found_out(cls: type[Arithmetic], failing: str) -> None:
    assert failing in {c.name for c in await prove(cls(), samples=500) if not c.passed}


async def test_nothing_is_proved_without_tasks() -> None:
    assert not any(c.passed for c in (await prove(Arithmetic(heldout_count=0), samples=5))[2:5])


def test_an_unknown_gallery_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'countdown'"):
        gallery_class("countdow")


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text: str) -> Fraction:
    """The same value through Python's own grammar, on Fractions."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(n):
                return Fraction(n)
        raise AssertionError(ast.dump(node))

    return value(ast.parse(text, mode="eval").body)


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " * "]), inner).map("".join),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"-{e}"),
    ),
    max_leaves=8,
)


@given(expressions)
def test_the_parser_agrees_with_python_on_fractions(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        return
    try:
        wanted = by_python(text)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
        return
    got = evaluate(text)
    assert got.value == wanted
    assert Counter(got.numbers) == Counter(
        n.value for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Constant)
    )


@given(st.text(alphabet="0123456789+-*/() .xe_", max_size=40))
def test_the_parser_gives_a_value_or_its_own_error(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1+",
        "(1",
        "1)",
        "1 2",
        "2**3",
        "1//2",
        "+3",
        "9" * 13,
        "1" * 201,
        "(" * (MAX_DEPTH + 2) + "1",
        "-" * 100 + "1",
    ],
)
def test_the_parser_is_bounded_and_strict(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    ("said", "score", "kind"),
    [
        ("(9-5)*6", 1.0, ""),
        ("(9-5)*6=24", 1.0, ""),
        ("9+5=14;no\n(9\u22125)\u00d76", 1.0, ""),
        ("9-5*6", 0.0, "wrong"),
        ("(9-5)*6=25", 0.0, "wrong"),
        ("6*(9-5)=24=24", 0.0, "unparsable"),
        ("5*5-1", 0.0, "numbers"),
        ("24", 0.0, "numbers"),
        ("", 0.0, "unparsable"),
        ("__import__('os')", 0.0, "unparsable"),
    ],
)
def test_countdown_verdicts(said: str, score: float, kind: str) -> None:
    task = Task(id="t", prompt="<3,5,6,9:24>", answer="(9-5)*6", info={"numbers": [3, 5, 6, 9], "target": 24})
    verdict = Countdown().verify(Attempt(task=task, turns=(said,), stop=Stop.SAID))
    assert (verdict.score, verdict.kind) == (score, kind)


def gym_tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


@pytest.mark.prove
async def test_every_gym_task_generates_and_scores() -> None:
    """Exceptions by name: REFUSED (a mixture; a scorer that takes anything) and NO_GOLD (no answer to prove it
    with)."""
    wrong: list[str] = []
    for name in gym_tasks():
        if name in REFUSED:
            with pytest.raises(ConfigError, match="not offered"):
                Gym.of(name, {})
            continue
        env = Gym.of(name, {}, heldout_count=2)
        task = env.train.task(0)
        if task.prompt in {t.prompt for t in env.heldout}:
            wrong.append(f"{name}: held-out question in train")
        if (task.answer is None) != (name in NO_GOLD):
            wrong.append(f"{name}: gold {task.answer!r}")
        for said, fits in [(task.answer, lambda s: s == 1), ("zzz junk", lambda s: s < 1), ("", lambda s: s < 1)]:
            if said is None:
                continue
            verdict = (await env.judge(Attempt(task=task, turns=(said,), stop=Stop.SAID)))[0].verdict
            if verdict.state is not State.VALUE or not fits(verdict.score):
                wrong.append(f"{name}: {said!r:.60} scored {verdict}")
    assert wrong == []


@pytest.mark.prove
async def test_gym_tasks_prove_themselves_and_read_answer_tags() -> None:
    env = environment(Env(name="gym:chain_sum", heldout=100), seed=0)
    assert [c for c in await prove(env, samples=300) if not c.passed] == []
    task = env.train.task(0)
    tagged = Attempt(task=task, turns=(f"<answer>0.5</answer> no: <answer> {task.answer} </answer>",), stop=Stop.SAID)
    assert (await env.judge(tagged))[0].verdict.score == 1.0
    begun = time.process_time()
    assert isinstance(env, Gym) and env._asked(Attempt(task, ("<answer>" * 20_000,), Stop.SAID)).answer[:3] == "<an"
    assert time.process_time() - begun < 2.0  # linear in the length


def test_gym_training_goes_on_beyond_a_chunk_and_is_a_function_of_the_seed() -> None:
    a, b, c = (environment(Env(name="gym:chain_sum", heldout=5), seed=s) for s in (0, 0, 1))
    indices = [0, 999, 1000, 5001]
    assert [a.train.task(i) for i in indices] == [b.train.task(i) for i in reversed(indices)][::-1]
    assert [a.train.task(i).prompt for i in indices] != [c.train.task(i).prompt for i in indices]
    assert a.train.task(0).prompt != a.train.task(1000).prompt


@pytest.mark.prove
async def test_a_run_on_any_gym_task_passes_its_start_up_proofs() -> None:
    """What is checked before the first step holds for every task of the package, those with partial credit or no answer
    included."""
    from posttrain.build import preflight_checks

    for name in (n for n in gym_tasks() if n not in REFUSED):
        env = environment(Env(name=f"gym:{name}", heldout=2), 0)
        assert isinstance(env, Gym)
        tasks = [*env.heldout, env.train.task(0)]
        known = [t for t in tasks if env.knows_gold(t)]
        assert bool(known) == (name not in NO_GOLD), name
        await preflight_checks.gold_is_paid(env, known)
        await preflight_checks.near_misses_are_not(env, known)
