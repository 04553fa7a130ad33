"""The math reward: which answers are the same, what an answer is, and that nothing a policy writes hurts."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from posttrain.config.env import Reward
from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.environment.make import environment
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.math.extract import final
from posttrain.verifier.math.grade import gold_of, grade
from posttrain.verifier.math.math_reward import MathSource, math_source
from posttrain.verifier.math.read_answer import Number, read
from posttrain.verifier.math.spelling import spelled


@pytest.fixture(scope="module")
def reward() -> Iterator[MathSource]:
    source = math_source(workers=1, timeout=1)
    yield source
    source.close()


def judged(reward: MathSource, gold: object, response: str) -> Verdict:
    return reward.verdict(Task(id="t", prompt="p", answer=gold), response)


def boxed(answer: str) -> str:
    return f"so it is \\boxed{{{answer}}}"


def here(gold: str, response: str) -> float | None:
    """The score by our own rules alone; None where they leave it open."""
    wanted = gold_of(gold)
    assert wanted is not None, gold
    graded = grade(wanted, response)
    return None if graded is None else graded.score


# --- the cases of papers.md C01, and the table of notations ----------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("1000", "1,000", 1.0),
        ("4", r"\boxed{3}\boxed{4}", 1.0),
        ("3", r"\boxed{3}\boxed{4}", 0.0),
        ("1,2", boxed("(1,2)"), 1.0),
        ("1,2", boxed("(2,1)"), 0.0),
        ("12", "it is 312", 0.0),
        ("12", "12 it is not, but 13", 0.0),
        ("2,3", boxed("3, 2"), 1.0),
        ("1/2", boxed(r"\dfrac12\text{ cm}"), 1.0),
        ("7", boxed("7.0"), 1.0),
        ("0.25", boxed(r"25\%"), 1.0),
    ],
    ids=[
        *(
            "C01 a fraction and a decimal",
            "C01 thousands",
            "C01 the last box",
            "C01 not the first box",
            "C01 a pair for a list",
            "C01 its order",
        ),
        *(
            "C01 no contains match",
            "C01 the last number",
            "C01 answer lists",
            "C01 units",
            "C01 trailing zeros",
            "C01 percent",
        ),
    ],
)
def test_cases_of_c01(gold: str, response: str, score: float) -> None:
    assert here(gold, response) == score


SAME = [
    ("1/2", "0.5"), ("1/2", ".5"), ("1/2", r"\frac12"), ("1/2", r"\dfrac{1}{2}"), ("1/2", "½"),
    ("-1/2", r"-\frac{1}{2}"), ("-1/2", r"\frac{-1}{2}"),
    ("-1/2", r"\frac{1}{-2}"), ("-7", "−7"), ("7", "007"), ("5", "5."), ("3", "3.0"), ("0", "-0"), ("12", "１２"),
    ("3", "٣"), ("3/2", r"1\frac{1}{2}"),
    ("3/2", "1 1/2"), ("7/2", "3½"), ("1000", "1,000"), ("1000", "1{,}000"), ("1000000", r"1\,000\,000"),
    ("1000", "10^3"), ("1000", "10^{3}"), ("100000", "10^{0000000005}"), ("1500", r"1.5\times10^3"),
    ("1500", r"1.5 \cdot 10^{3}"), ("1500", "1.5e3"), ("0.015", r"1.5\times 10^{-2}"),
    ("3/4", "3:4"), ("1/3", "0.333333"), ("2/3", "0.6666667"),
    ("50%", "0.5"), ("50%", "50"), ("50", r"50\%"), ("0.5", "50 percent"), ("5", "5 cm"), ("5 cm", "5"),
    (r"5\text{ cm}", "5 centimeters"), ("5 cm²", r"5\text{ square cm}"),
    ("90", r"90^\circ"), ("90°", "90 degrees"), ("5", r"\$5"), ("5", "$5"), ("5 dollars", "$5"), ("12.5", r"$\$12.50$"),
    ("5€", "€5"), ("12", "12 apples"), ("12", r"12\text{ apples}"),
    ("3", "x=3"), ("x=3", "3"), ("3", "f(2)=3"), ("4", "2+2=4"), ("x=3", "x = 3."), ("1,2", "2, 1"), ("1,2", "1 and 2"),
    ("1,2", r"1\text{ or }2"), ("1,2", "x=1 or x=2"), ("1,2", "x=2,1"),
    (r"\{1,2\}", "2,1"), (r"\{1,2\}", r"\left\{2,\;1\right\}"), ("(1,2)", "1,2"), ("(1,2)", r"\left(1,\,2\right)"),
    ("[1,2]", "1, 2"), ("[0,1)", r"\left[0,1\right)"), (r"\{3\}", "3"),
    ("100,200", r"\{200,100\}"), ("(100,200)", "100, 200"), (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
    ("(1/2, 0.25)", r"(0.5,\frac14)"), ("x>3", r"(3,\infty)"), ("1<x\\le 2", "(1,2]"), ("x \\in [1,2]", "[1,2]"),
    ("A", "(A)"), ("(B)", r"\textbf{(B)}"), ("C", r"\text{C}"), ("Tuesday", r"\text{tuesday}"), ("true", "True"),
    ("x^2+1", "x^{2} + 1"), (r"\infty", "∞"), ("1/3", r"0.\overline{3}"), ("7/6", r"1.1\overline{6}"),
    (r"\{x \mid x > 3\}", r"(3,\infty)"),
]  # fmt: skip
DIFFERENT = [
    ("3", "4"), ("1/3", "0.33"), ("0.5", "50"), ("0.1234567", "0.1234568"), ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"),
    ("[0,1)", "[0,1]"), (r"\{1,2\}", "(1,2)"), ("1,2", "1,2,3"), ("1,2", "1"),
    ("5 cm", "5 m"), ("5 cm", "0.05 m"), ("5 dollars", "5€"), ("x=3", "y=3"), ("3", "x^2=3"), ("2", "2x=2"),
    ("7", "3+4"), ("6", r"2\cdot 3"), ("6", "2(3)"), ("6", "(2)(3)"), ("7", r"\frac{3+4}{1}"),
    ("7", "7x"), ("7", "3+4+x-x"), ("1000000", "1.000.000"), ("12.5", "12,5"), ("A", "B"), ("A", "a"), ("12", "apples"),
    ("Monday", "Tuesday"), ("3", "9^{9^{9^9}}"), ("1", "10^{999999999}"), ("2", "(10^9)!"),
    ("1/2", "1/0"), ("x<3", "x>3"), ("1000", "1,0,0,0"), ("3", "{"), ("3", ""), ("3", "NaN"), ("3", "inf"),
    ("12", "__import__('os').system('x')"), ("0", "()"), ("2", "²"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "said"), SAME)
def test_the_same_in_another_notation(gold: str, said: str) -> None:
    assert here(gold, boxed(said)) == 1.0
    assert here(said, boxed(gold)) == 1.0


@pytest.mark.parametrize(("length", "why"), [(9, "says nothing"), (100, "says nothing"), (1001, "is too long")])
def test_an_answer_of_signs_says_nothing_and_only_a_long_one_is_too_long(length: int, why: str) -> None:
    gold = gold_of("3")
    assert gold is not None
    graded = grade(gold, boxed("-" * length))
    assert graded is not None and graded.kind == "unparsable" and graded.why.endswith(why)


@pytest.mark.parametrize(("gold", "said"), DIFFERENT)
def test_different_answers_differ(reward: MathSource, gold: str, said: str) -> None:
    v = judged(reward, gold, boxed(said))
    assert (v.state, v.score) == (State.VALUE, 0.0), v
    assert v.kind in ("wrong", "unparsable", "unevaluated", "too_large")


ALGEBRA = [
    ("x^2+1", "1+x^2", 1), ("x^2-1", "(x-1)(x+1)", 1), (r"2\sqrt2", r"\sqrt{8}", 1), ("sqrt(2)", "2^{1/2}", 1),
    ("5", r"\sqrt{25}", 1), ("1024", "2^{10}", 1), ("120", "5!", 1),
    (r"\pi", "3.141593", 1), (r"\frac{\pi}{2}", r"\pi/2", 1),
    ("y=2x+1", "1+2x", 1), (r"(\sqrt2,1)", r"(2^{1/2},1)", 1), ("3\\pm\\sqrt2", r"3-\sqrt{2},3+\sqrt{2}", 1),
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}", 1), ("1/3", "x=1/3=0.333", 1),
    ("2e3+x", "6e+x", 1), ("2e3+x", "2000+x", 0), ("0.1x+0.2x", "0.3x", 1), ("0.12345678901234567890x",
    "0.12345678901234567891x", 0),
    (r"(-\infty,3]\cup(4,5)", r"(4,5)\cup(-\infty,3]", 1), ("1+2i", "2i+1", 1), ("10", r"\binom{5}{2}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
    (r"\frac{x+1}{2}", "(x+1)/2", 1), ("x**2", "x*x", 1), (r"\sin(x)", "sin x", 1),
    (r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", r"\begin{pmatrix}-2\\-14\end{pmatrix}", 1), (r"13535\%", "1-1/e", 0),
    ("x^2+1", "x^2-1", 0), (r"\sqrt2", "1.41", 0), (r"\pi", "3.14", 0), ("x+y", "x+z", 0),
    (r"(-\infty,3]\cup(4,5)", r"(-\infty,3)\cup(4,5)", 0), (r"3\pm\sqrt2", r"3+\sqrt2", 0), ("x+1", r"\frac{x", 0),
]  # fmt: skip


def test_what_only_the_algebra_knows(reward: MathSource) -> None:
    for gold, said, score in ALGEBRA:
        v = judged(reward, gold, boxed(said))
        assert v.score == score, (gold, said, v)


# --- which part of a response is its answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}} and 7", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1}, or \boxed{2", None),
        (r"\boxed{12", None),
        (r"\fbox{8}", "8"),
        (r"<think>\boxed{3}</think> It is 4", "4"),
        (r"<think>\boxed{3} and so on", None),
        ("Steps: 3+4.\n#### 72\n", "72"),
        ("The answer is 12 because 3+9.", "12"),
        ("The final answer is: **-5**.", "-5"),
        ("Answer: (1,2)", "(1,2)"),
        ("The answer is $\\frac{1}{2}$ of 3", r"\frac{1}{2}"),
        ("The answer is Tuesday.", "Tuesday"),
        ("so x = 1/2 and we are done", "1/2"),
        ("first 3, then $x=4$ follows", "x=4"),
        ("$x=4$ in 2 steps", "2"),
        ("It is 1,234.", "1,234"),
        ("about -3.5e2 or so", "-3.5e2"),
        ("10-3", "10-3"),
        ("we get 10-3 apples", "3"),
        ("we get 10 -3 apples", "3"),
        ("So it is 12 34.", "34"),
        ("We get 1, 2 and 3.", "1, 2 and 3."),
        ("So 1,200 and 3", "3"),
        ("So it is 12 345.6 in all.", "12 345.6"),
        ("Tuesday", "Tuesday"),
        ("I do not know\nat all", None),
        ("", None),
        ("   \n", None),
    ],
)
def test_the_answer_of_a_response(text: str, answer: str | None) -> None:
    found = final(text)
    assert (found.text if found else None) == answer


def test_a_right_last_box_after_another_one_is_marked(reward: MathSource) -> None:
    v = judged(reward, "4", r"\boxed{3} no, \boxed{4}")
    assert (v.score, v.kind) == (1.0, "several_answers")
    assert judged(reward, "4", r"\boxed{4} \boxed{4}").kind == ""


def test_kinds_can_be_counted(reward: MathSource) -> None:
    cases = {
        "wrong": boxed("5"),
        "unparsable": "no idea\nsorry",
        "unevaluated": boxed("3+4"),
        "too_large": boxed("9^{9^{9}}"),
    }
    for kind, text in cases.items():
        v = judged(reward, "7", text)
        assert (v.score, v.kind) == (0.0, kind) and v.why
    assert judged(reward, "7", boxed("7")) == Verdict.value(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 10**6,
        "\\boxed{" * 150_000,
        "1" * 10**6,
        "$" * 10**6,
        "answer is " * 10**5,
        "9," * 500_000,
        "999 " * 200_000,
        "(\\(" * 300_000,
        "\\boxed{" + "(" * 10**6 + "}",
    ],
    ids=lambda t: t[:9],
)
def test_long_nonsense_is_quick(text: str) -> None:
    began = time.process_time()
    assert here("7", text) == 0.0
    assert time.process_time() - began < 3.0


# --- properties ------------------------------------------------------------------------------------------------------

NUMBERS = st.fractions(min_value=-(10**7), max_value=10**7, max_denominator=1000)


def notations(x: Fraction) -> list[str]:
    """Ways to write a number."""
    sign, n, d = ("-" if x < 0 else ""), abs(x.numerator), x.denominator
    out = [
        f"{sign}{n}/{d}",
        rf"{sign}\frac{{{n}}}{{{d}}}",
        rf"\frac{{{sign}{3 * n}}}{{{3 * d}}}",
        rf"${sign}\dfrac{{{n}}}{{{d}}}$",
        f"x = {sign}{n} / {d}",
    ]
    if n > d > 1:
        out.append(rf"{sign}{n // d}\frac{{{n % d}}}{{{d}}}" if n % d else f"{sign}{n // d}")
    if d == 1:
        out += [
            f"{sign}{n}",
            f"{sign}{n:,}",
            f"{sign}{n}.00",
            f"{sign}{n:,}".replace(",", "{,}"),
            f"\\text{{{sign}{n}}}",
            f"{sign}{n} units",
        ]
    if (10**6 % d) == 0:
        exact = f"{n * 10**6 // d / 10**6:.6f}"
        out += [
            sign + exact,
            sign + exact.rstrip("0"),
            f"{sign}{n * 100 * 10**6 // d // 10**6}\\%" if (n * 100) % d == 0 else sign + exact,
        ]
    return [o.replace("-", "−") if i % 2 else o for i, o in enumerate(out)]


@given(NUMBERS, st.data())
@settings(max_examples=150)
def test_equal_numbers_are_equal_in_every_notation(x: Fraction, data: st.DataObject) -> None:
    one, two = data.draw(st.sampled_from(notations(x))), data.draw(st.sampled_from(notations(x)))
    assert here(one, boxed(two)) == 1.0, (one, two)


@given(NUMBERS, NUMBERS, st.data())
@settings(max_examples=150)
def test_different_numbers_differ_in_every_notation(x: Fraction, y: Fraction, data: st.DataObject) -> None:
    one, two = data.draw(st.sampled_from(notations(x))), data.draw(st.sampled_from(notations(y)))
    percent = 100 if "%" in one + two else 1
    if x not in (y, y * percent, y / percent) and abs(x - y) > Fraction(1, 10**6):
        assert here(one, boxed(two)) == 0.0, (one, two)


@given(st.lists(st.integers(-999, 999), min_size=2, max_size=6), st.randoms())
@settings(max_examples=50)
def test_sets_have_no_order_and_tuples_have(items: list[int], random: object) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = ", ".join(map(str, items)), ",".join(map(str, shuffled))
    assert here(rf"\{{{one}\}}", boxed(two)) == 1.0
    assert here(f"({one})", boxed(f"({two})")) == float(items == shuffled)


PIECES = st.sampled_from(
    [*"0123456789.,+-*/^_=<>(){}[]|!%$&#\\ \n\tabxyzeiAB½²√π∞−٣", "\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\left(",
    "\\{", "\\cup", "\\pm", "\\infty", " and ", "answer is ", "####", "1,000", "\\begin{pmatrix}", "</think>", "\ud800",
    "\x00"]
)  # fmt: skip
JUNK = st.lists(PIECES, max_size=40).map("".join)


@given(JUNK, st.text(max_size=60))
@settings(max_examples=150)
def test_junk_never_raises(junk: str, text: str) -> None:
    for said in (junk, boxed(junk), text, boxed(text)):
        assert here("7", said) in (0.0, 1.0, None)
        values = read(spelled(said))
        assert values == read(spelled(said))
        gold_of(said)


@given(junk=JUNK)
@settings(max_examples=20)
def test_junk_never_breaks_the_algebra(reward: MathSource, junk: str) -> None:
    v = judged(reward, r"\sqrt{2}+x", boxed(junk.replace("}", "")))
    assert v.state is State.VALUE, v


# --- bounded, without eval, refused early ----------------------------------------------------------------------------


@pytest.mark.prove
def test_an_endless_comparison_is_the_candidates_and_the_next_one_is_answered(reward: MathSource) -> None:
    v = judged(reward, "(x-1)^{9999}=0", boxed("x^{10^{10}}=1"))
    assert (v.state, v.score, v.kind) == (State.VALUE, 0.0, "timeout"), v
    assert judged(reward, r"2\sqrt2", boxed(r"\sqrt{8}")).score == 1.0


def test_no_answer_is_evaluated_as_python(reward: MathSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "hacked"
    for text in (
        f"__import__('os').mkdir('{target}')",
        f"\\text{{open('{target}','w')}}",
        f'x+open("{target}","w")',
        f"\\sqrt{{__import__('os').mkdir('{target}')}}",
    ):
        assert judged(reward, "x^2+2", boxed(text)).score == 0.0
    assert not target.exists()
    from posttrain.verifier.math import algebra

    for name in (
        "sympy.parsing.sympy_parser",
        "sympy.parsing",
        "math_verify.parser",
        "latex2sympy2_extended.latex2sympy2",
    ):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "parse_expr", module.parse_expr)  # put back after the test
    algebra.handler()
    with pytest.raises(BaseException, match="1\\+1") as refused:
        __import__("sympy").sympify("1+1")
    assert not isinstance(refused.value, Exception)


def rows(tmp_path: Path, *answers: object) -> Env:
    import json

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"p{i}", "answer": a, "id": f"row{i}"}) for i, a in enumerate(answers))
    )
    return Env(name="prompts", prompts=str(path), rewards=(Reward(function="math"),))


@pytest.mark.prove
def test_a_gold_answer_that_cannot_be_read_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"answers of 3 of 5 tasks.*'row1'.*'row3'"):
        environment(rows(tmp_path, "3", "", r"\sqrt{2}", r"\frac{1}{", r"\frac{1}{"), 0)
    with pytest.raises(ConfigError, match="requires column 'answer', which task 'row1'"):
        environment(rows(tmp_path, "3", None), 0)


async def test_the_reward_of_a_users_prompts(tmp_path: Path) -> None:
    answers = [
        "3",
        4,
        2.5,
        r"\frac{1}{2}",
        r"\sqrt{2}",
        "He has 3 left.\n#### 72",
        r"So \boxed{(1,2)}",
        "Tuesday",
        "1,000",
        "x=5",
    ]
    env = environment(rows(tmp_path, *answers), 0)
    tasks = [*env.heldout, *(env.train.task(i) for i in range(env.train.count or 0))]
    assert len(tasks) == len(answers)
    for task in tasks:
        (own,) = await env.judge(Attempt(task=task, turns=env.gold(task), stop=Stop.SAID))
        assert own.verdict.score == 1.0, (task.answer, own.verdict)
        (wrong,) = await env.judge(Attempt(task=task, turns=(boxed("17"),), stop=Stop.SAID))
        assert (wrong.verdict.score, wrong.source) == (0.0, "math")
    env.close()


async def test_two_hundred_at_once(reward: MathSource) -> None:
    task = Task(id="t", prompt="p", answer=r"2\sqrt{2}")
    texts = [boxed(r"\sqrt{8}" if i % 2 else r"\sqrt{7}") for i in range(200)]
    out = await asyncio.gather(*(reward(Attempt(task=task, turns=(t,), stop=Stop.SAID)) for t in texts))
    assert [j.verdict.score for j in out] == [float(i % 2) for i in range(200)]
    assert reward.gauges()["verifier/math/queue"].sum > 1000


def test_numbers_are_exact() -> None:
    assert read(spelled("0.1"))[0] == Number(Fraction(1, 10), 1)
    assert read(spelled("1,234.50"))[0] == Number(Fraction(2469, 2), 2)
