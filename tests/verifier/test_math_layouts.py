"""The math reward on what models and data sets really write: layouts, units, bases, unions, choices with values, times
of day."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("math_verify")

from posttrain.core.types import Task
from posttrain.verifier.math.math_reward import MathSource, math_source

UNION = r"(-\infty,1)\cup(2,\infty)"
CLOSED = r"(-\infty,1]\cup[2,\infty)"
CHOICES = [
    r"\textbf{(C)}\ 12",
    r"(C)\ 12",
    "C) 12",
    "C. 12",
    "C: 12",
    r"\text{(C) } 12",
    r"\textbf{(C) 12}",
    r"\textbf{C}\ 12",
    r"\textbf{(C)}\ $12$",
]
MULTIPLIED = [
    "million",
    "thousand",
    "dozen",
    "half",
    "squared",
    "hundred",
    "billion",
    "trillion",
    "cubed",
    "halves",
    "thirds",
    "factorial",
]

PAIRS: dict[str, list[tuple[str, str, int]]] = {
    "units after pi and roots": [
        (r"12\pi", r"12\pi\text{ cm}", 1), (r"12\pi", r"12\pi \text{ cm}^2", 1),
        (r"12\pi \text{ cm}^2", r"12\pi\text{ square centimeters}", 1), (r"36\pi", r"36\pi\,\mathrm{cm}^3", 1),
        (r"4\sqrt{2}", r"4\sqrt{2}\,\text{cm}^2", 1), (r"\frac{9\pi}{2} \text{ cm}^3", r"\frac{9\pi}{2}", 1),
        (r"\frac{\pi}{2}", r"\frac{\pi}{2}\text{ radians}", 1), (r"16\pi\text{ cm$^2$}", r"16\pi", 1),
        (r"12\pi", "12π cm²", 1), (r"2\sqrt{3}\text{ m/s}", r"2\sqrt3", 1), (r"2+\sqrt3", r"(2+\sqrt{3})\text{ cm}", 1),
        (r"3\pm\sqrt2", r"3\pm\sqrt2\text{ s}", 1), (r"8\pi\text{ cm and }4\pi\text{ cm}", r"8\pi,4\pi", 1),
        (r"3\pi\text{ ft}^3/\text{min}", r"3\pi\text{ cubic feet per minute}", 1),
        (r"4\sqrt2", r"\sqrt{32}\text{ in}", 1), ("6x", r"6x\text{ cm}", 1), (r"V=36\pi\text{ cm}^3", r"36\pi", 1),
        (r"\$4\sqrt2", r"4\sqrt2", 1),
        (r"12\pi\text{ cm}", r"12\pi\text{ m}", 0), (r"12\pi\text{ cm}", r"12\pi\text{ cm}^2", 0),
        (r"12\pi\text{ cm}^2", r"12\pi\text{ cm}^3", 0), (r"12\pi\text{ cm}", r"13\pi\text{ cm}", 0),
        (r"12\pi\text{ cm}", r"13\pi", 0),
        (r"2\sqrt{3}\text{ m/s}", r"2\sqrt3\text{ km/h}", 0), (r"6x\text{ cm}", r"6x\text{ m}", 0),
        (r"V=36\pi\text{ cm}^3", r"36\pi\text{ cm}^2", 0), (r"\frac{\pi}{2}\text{ radians}",
        r"\frac{\pi}{2}\text{ degrees}", 0),
        (r"12\pi", r"12\pi\text{ million}", 0), (r"12\pi", r"12\pi\text{ squared}", 0), ("2", "2xyz", 0),
        (r"\sqrt2", r"\sqrt2 abc", 0), (r"3\pi\text{ ft}^3/\text{min}", r"3\pi\text{ ft}^2/\text{min}", 0),
        (r"2\pi r", r"2\pi", 0),
    ],
    "units after numbers": [
        (r"5\text{ cm}^2", "5", 1), (r"5\text{ cm}^2", r"5\text{ cm squared}", 1), ("60 mph", "60 miles per hour", 1),
        ("60", "60 km per hour", 1), ("150 lbs", "150 pounds", 1), ("£5", "5 pounds", 1),
        (r"20^\circ", r"20^\circ\text{C}", 1),
        (r"1/3", r"0.\overline{3}\text{ cm}", 1), (r"5\text{ cm}^2", r"5\text{ cm}^3", 0),
        ("60 mph", r"60\text{ km/h}", 0), ("5 pounds", "5 dollars", 0), (r"20^\circ\text{C}", r"20^\circ\text{F}", 0),
        ("5 m/s", "5 m/s^2", 0),
    ],
    "a letter behind a number is a variable": [
        ("3", "1+2t", 0), ("2t+1", "1+2t", 1), ("95", "100-5m", 0), ("8", "v(t)=10-2t", 0), ("10-2t", "v(t)=10-2t", 1),
        ("x+2h", "2h+x", 1), ("2", "2h", 0), ("(2,3)", "(2t,3s)", 0), ("3", "y=1+2d", 0), ("1.5h", r"\frac{3h}{2}", 1),
        ("3", r"1+2\mathrm{h}", 0), ("5", "5m^2", 0), ("3m^2", r"3m\cdot m", 1), ("2N", "2n", 0), ("2e-1", "-1+2e", 1),
        ("2", "2 h", 1), ("2 h", r"2\text{ hours}", 1), (r"2\text{ h}", "2h", 1), ("2 h", "2 m", 0), ("5cm", "5", 1),
    ],
    "letters under roots and in logarithms": [
        (r"\sqrt{ab}", r"\sqrt a\sqrt b", 1), (r"a\sqrt b", r"\sqrt{a^2b}", 1), (r"x^{2/3}", r"\sqrt[3]{x^2}", 1),
        (r"\ln(ab)", r"\ln a+\ln b", 1), (r"3\ln x", r"\ln x^3", 1), (r"\log_a b", r"\frac{\ln b}{\ln a}", 1),
        (r"\sqrt{x^2}", "|x|", 1), ("|x|", "x", 0), (r"\sqrt{(x-1)^2}", "x-1", 0), (r"\sqrt{a+b}", r"\sqrt a+\sqrt b",
        0),
        (r"\ln(a+b)", r"\ln a+\ln b", 0), (r"-\sqrt[3]{2}", r"\sqrt[3]{-2}", 1), ("(-1)^n", r"\cos(n\pi)", 1),
        (r"\arctan\frac1x", r"\frac{\pi}{2}-\arctan x", 0), ("(-1)^{n+1}", "(-1)^{n-1}", 1), (r"\sqrt{3+2\sqrt2}",
        r"1+\sqrt2", 1),
    ],
    "tiny differences": [
        ("1/2^60", "1/2^61", 0), ("1/2^60", "2^{-60}", 1), ("1/20!", "1/21!", 0), ("e^{-50}", "e^{-51}", 0), ("0",
        "e^{-50}", 0),
        ("1-2^{-60}", "1-2^{-61}", 0), ("1-e^{-60}", "1-e^{-61}", 0), ("x+2^{-60}", "x+2^{-61}", 0), ("2^{100}",
        "2^{100}+1", 0),
        (r"\begin{pmatrix}2^{-60}\\1\end{pmatrix}", r"\begin{pmatrix}2^{-61}\\1\end{pmatrix}", 0), ("(0,e^{-50})",
        "(0,e^{-51})", 0),
        ("1/3^{40}", "0.0000000", 0), ("1/700000", "0.000001", 0), (r"\sqrt2", "1.414213562", 1), (r"\sqrt2",
        "1.414213", 0),
    ],
    "degrees and complex numbers": [
        (r"20\sin 40^\circ", r"20\sin 40", 0), (r"20\sin 40^\circ", "20 sin 40°", 1), ("1/2", r"\sin 30^\circ", 1),
        (r"\tan 20^\circ", r"\tan\frac{\pi}{9}", 1), (r"180^\circ-2\alpha", r"180-2\alpha", 1), (r"\frac{\pi}{4}",
        r"45^\circ", 0),
        (r"e^{i\pi/4}", r"\frac{1+i}{\sqrt2}", 1), (r"\frac{1+i}{2}", r"\frac{1}{1-i}", 1), ("3+4i", "(2+i)^2", 1),
        ("-1", "i^2", 1),
        ("2i", r"\sqrt{-4}", 1), ("2i", "-2i", 0), ("x+iy", "x+yi", 1), ("x+iy", "x-iy", 0), ("1+2i",
        r"1+2\mathrm{i}", 1),
    ],
    "commands of layout": [
        *[("42", said, 1) for said in (r"\textcolor{red}{42}", r"\color{red}{42}", r"\color[rgb]{1,0,0} 42",
        r"\underline{42}",
        r"{\Large 42}", r"\large{42}", r"\framebox{42}", r"\mathbf{\underline{42}}", r"\fcolorbox{red}{white}{42}",
        r"\bold{42}")],
        ("42", r"\textcolor{red}{43}", 0), ("1/2", r"{1\over2}", 1), ("1/2", r"\\frac{1}{2}", 1), (r"\frac{a+b}{2}",
        r"a+b\over2", 1),
        (r"\frac{\pi}{3}", r"\frac\pi3", 1), (r"\frac{\sqrt3}{2}", r"\frac{\sqrt{3}}2", 1), (r"\sqrt[3]{2}",
        r"\sqrt[3]2", 1),
        ("10", r"\binom52", 1), ("10", r"{5\choose2}", 1), (r"\binom{n}{2}", r"\binom n2", 1), (r"\binom{n}{2}",
        r"\binom2n", 0),
    ],
    "several choices": [
        ("A, B, D", "ABD", 1), ("A, B, D", r"\text{A, B, D}", 1), ("A, B, D", r"\text{(A), (B), (D)}", 1),
        ("A, B, D", "ABC", 0),
        ("A, B", "ABD", 0), ("A, B", "ABB", 0), ("A", "AB", 0), ("2x+3y=6", "6=2x+3y", 1), ("2x+3y=6", "6=2x-3y", 0),
    ],
    "words that change a number": [
        *[("5", rf"5 \text{{ {word}}}", 0) for word in MULTIPLIED], *[("5", f"5 {word}", 0) for word in MULTIPLIED],
        ("5", "5 and a half", 0), ("5", "5 times two", 0), ("1", "1 half", 0),
        ("5000000", r"5\text{ million}", 1), ("60", "5 dozen", 1), ("5 million dollars", r"\$5,000,000", 1),
        ("5 hundred thousand", "500000", 1), ("1.5 million", "1500000", 1), ("5.5", "5 and a half", 1),
        (r"60\sqrt{2}", r"5\sqrt{2}\text{ dozen}", 1),
        ("5000000", r"6\text{ million}", 0), ("5 million dollars", "5 million euros", 0), ("5", "5 half-lives", 1),
        ("3", "3 third graders", 1), ("5", "5 one-dollar bills", 1), ("5", "5 pairs", 1),
    ],
    "bases": [
        ("1011_2", "1011_3", 0), ("1011_2", "1011_8", 0), ("1011_2", "1010_2", 0), ("1011_2", "11", 0),
        ("2A_{16}", "2A_{12}", 0), ("1011_2,110_2", "1011_2, 110_3", 0), ("x=1011_2", "1011_3", 0),
        ("121_3", "16_{10}", 0), ("3x_1", "3x_2", 0),
        ("1011_2", "1011", 1), ("1011_2", "1011_{2}", 1), ("1011_2", "(1011)_2", 1),
        ("1011_2", r"1011_{\text{two}}", 1), ("1011_2", r"1011\text{ base }2", 1), ("2A_{16}", "2A", 1),
        ("x=1011_2", "1011_2", 1), ("11_{10}=1011_2", "1011_2", 1),
    ],
    "unions": [
        (UNION, r"x<1 \text{ or } x>2", 1), (UNION, r"x<1 \lor x>2", 1), (UNION, "x>2 or x<1", 1),
        (UNION, r"x<1 \text{ or } 2<x", 1), (UNION, r"\{x \mid x<1 \text{ or } x>2\}", 1),
        (UNION, r"x \in (2,\infty)\cup(-\infty,1)", 1), (UNION, "(-∞,1) U (2,∞)", 1),
        (UNION, r"x\in(-\infty,1)\text{ or }x\in(2,\infty)", 1), (UNION, r"x \lt 1 \text{ or } x \gt 2", 1),
        (CLOSED, r"x\le 1 \text{ or } x\ge 2", 1), (CLOSED, r"x\leq 1 \lor x\geq 2", 1),
        (r"(0,1)\cup(2,3)", r"0<x<1 \text{ or } 2<x<3", 1),
        (r"(-\infty,-\sqrt2)\cup(\sqrt2,\infty)", r"x<-\sqrt{2} \text{ or } x>\sqrt{2}", 1),
        (r"(-\infty,1]\cup\{3\}", r"x\le1 \text{ or } x=3", 1), (r"(-\infty,2)\cup(2,\infty)", r"x \ne 2", 1),
        ("(1,2)", r"x>1 \text{ and } x<2", 1), ("[2,5]", r"x \le 5 \text{ and } x \ge 2", 1),
        (r"(-2,1)\cup[1,2)", "(-2,2)", 1), (UNION, r"x<1 \text{ or } x>3", 0), (UNION, r"x<0 \lor x>2", 0),
        (UNION, r"x\le 1 \text{ or } x>2", 0), (CLOSED, r"x<1 \text{ or } x\ge 2", 0),
        (UNION, r"x<1 \text{ and } x>2", 0), (UNION, r"x>1 \text{ or } x<2", 0),
        (UNION, r"x<1 \text{ or } y>2", 0), (UNION, "x<1", 0), (UNION, "1,2", 0),
        (UNION, r"x<1 \text{ or } x>2 \text{ or } x=1.5", 0), (r"(-\infty,2)\cup(2,\infty)", r"x \ne 3", 0),
        ("[2,5]", r"x < 5 \text{ and } x \ge 2", 0), (r"(-2,1)\cup(1,2)", "(-2,2)", 0),
    ],
    "choices with their values": [
        *[(gold, said, score) for said in CHOICES for gold, score in (("C", 1), ("12", 1), ("(C) 12", 1), ("B", 0),
        ("13", 0), ("(B) 12", 0), ("(C) 13", 0))],
        ("Paris", "C. Paris", 1), ("London", "C. Paris", 0), (r"2\sqrt3", r"\mathrm{(C)}\ 2\sqrt{3}", 1),
        ("(1,2)", "(C) (1,2)", 1), ("-3", r"\textbf{(D) } -3", 1), ("3", r"\textbf{(D) } -3", 0),
        ("12 cm", r"(C) 12\text{ m}", 0), ("B", r"\textbf{(C)} B", 0),
        ("A,C", "(A) and (C)", 1), ("A,C", "(A) 1, (C) 3", 1), ("A", "(A) and (B)", 0), ("A,C", "(A) 1, (B) 3", 0),
        ("A:B", "B:A", 0), ("Cx^2", "(C)x^2", 1),
    ],
    "ordinals, lists, complex numbers": [
        ("5", r"5^{\text{th}}", 1), ("11", r"11\text{th}", 1), ("22", "22nd", 1), ("3", "3^{rd}", 1),
        ("5", r"6^{\text{th}}", 0), ("5", "5^t", 0), ("5^{10}", r"5^{\text{th}}", 0), ("1,2,3", "1, 2, and 3", 1),
        ("1,2", r"1\text{, and }2", 1), ("1,2,3", "1, 2, and 4", 0),
        ("0.5+0.5i", r"\frac{1+i}{2}", 1), ("1.5i", r"\frac{3}{2}i", 1),
        (r"0.5+0.5\sqrt{3}i", r"\frac{1+\sqrt3 i}{2}", 1), ("0.5+0.5i", r"\frac{1-i}{2}", 0),
        ("1.5i", r"\frac{3}{4}i", 0), ("0.33i", r"\frac{i}{3}", 0), ("1.5i", "1.5", 0),
    ],
    "times of day and ratios": [
        ("2:30", "1:15", 0), ("10:30", "1:3", 0), ("10:30", "1/3", 0), ("2:30", "2:31", 0), ("2:30 am", "2:30 pm", 0),
        ("20:15", "8:15", 0), ("12:30 am", "12:30 pm", 0), ("1:2", "3:4", 0), ("3:2", "2:3", 0),
        ("02:30", "2:30", 1), ("2:30", r"2:30\text{ p.m.}", 1), ("14:30", "2:30 pm", 1), ("2:4", "1:2", 1),
        ("3:2", "6:4", 1), ("25:50", "1:2", 1), ("12:60", "1:5", 1), ("1/12", "1:12", 1), ("2:200", "1:100", 1),
        ("5 pm", "5:00 PM", 1),
    ],
}  # fmt: skip

RESPONSES = [
    ("15", "One costs $5, so 3 cost $15.", 1), ("5", "The answer is $5, not $6.", 1),
    ("72", "The answer is:\n\\[\n72\n\\]", 1), ("72", "Answer:\n$$\n72\n$$", 1), ("72", "#### Final Answer\n\n72", 1),
    ("72", "#### Step 1: add\n48+24=72\nThe answer is 72.", 1), ("72", "#### Answer: 72", 1), ("72", "#### 72", 1),
    ("Paris", "#### Paris", 1),
    ("71", "The answer is:\n\\[\n72\n\\]", 0), ("1", "#### Step 1: add\n48+24=72\nThe answer is 72.", 0),
    ("72", "#### Step 1: 72\n48+24=73\nThe answer is 73.", 0), ("72", "#### 72 apples\n(48 + 24 = 72, 3 steps)", 1),
    ("72", "#### 72 cm\n\nHope this helps!", 1),
    ("72", "#### Total: 72", 1), ("72", "#### Step 2\nWe add 3.\n#### 72", 1),
    ("Paris", "#### Final Answer\n\nParis", 1), ("72", "#### Conclusion\nSo $48+24=72$", 1),
    ("72", "**Final Answer**\n\n$72$, as 48 + 24", 1), ("3,5", "### Answer\n$x=3$ or $x=5$", 1),
    ("72", "The answer is given by:\n\\[72\\]\nas 1 + 71.", 1), ("72", "Answer:\n```\n72\n```", 1),
    ("72", "The answer is:\n- 72", 1), ("-72", "The answer is:\n-72", 1), ("72", "Clips in all:72\nDone", 1),
    ("x=72", "The answer is:\n$$x = 72$$\nCheck: 72 - 2 = 70", 1), ("1,2,3", "The answer is 1, 2, and 3.", 1),
    ("1,2,3", "The answer is $1$, $2$, and $3$.", 1),
    ("1,2,3", "The answer is 1, 2, and 3 apples.", 1), ("1", "The answer is 1, 2, and 3 apples.", 0),
    ("3", "The answers are $x=3$ and $x=5$.", 0), ("12", "The answer is 12, 4 times as many.", 1),
    (UNION, "The answer is $x<1$ or $x>2$.", 1),
    ("5", "The answer is 5 million.", 0), ("5 million", "The answer is 5 million.", 1),
    ("5", "The answer is $5$ million.", 0), ("5", "We get 5 million\nin all.", 0),
    ("5", "The answer is 5 and a half.", 0), ("5", "The answer is 5 for each one.", 1),
    ("5 cm", "The answer is 5 in total.", 1),
    ("12 cm", "The answer is 12 km.", 0), ("12 cm", "The answer is 12 cm.", 1), (r"12\pi", "The answer is 12π cm.", 1),
    ("12", "The answer is 12π cm.", 0), (r"12\pi cm", r"The answer is $12\pi$ m.", 0),
    (r"12\pi cm", r"The answer is $12\pi$ cm.", 1), ("5", "We find\nthat it is 5π.", 0),
    ("10:30 am", "The answer is 10:30 am.", 1), ("10:30", "It happens at 10:30.\nok", 1),
    ("3:4", "so the ratio is 3:4.\nDone", 1), ("C", "The answer is (C) 12.", 1), ("C", "The answer is (B) 12.", 0),
    ("C", "The answer is (C) because 12 > 3.", 1), ("12", "The answer is (B) 12 apples.", 1),
    ("C", "The answer is: C. 12 cm", 1), ("B", "The answer is: C. 12 cm", 0),
    ("No", "The answer is: No, because 3 > 2.", 1), ("3.5", "The answer is 3 1/2 hours.", 1),
    ("5", r"\boxed 5", 1), ("5", r"so $\boxed 5$, after 3 steps", 1), ("6", r"\boxed 5", 0),
    ("1/2", r"$\boxed\frac12$", 1), ("A", r"\boxed A", 1), ("6", r"\boxed 5 \boxed{6}", 1),
    ("5", r"\boxed{5} \boxed 6", 0), ("5", "I put it in \\boxed as asked: 5", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> Iterator[MathSource]:
    source = math_source(workers=1, timeout=2)
    yield source
    source.close()


def score(reward: MathSource, gold: str, response: str) -> float | None:
    return reward.verdict(Task(id="t", prompt="p", answer=gold), response).score


@pytest.mark.parametrize("what", PAIRS)
def test_two_notations_in_both_directions(reward: MathSource, what: str) -> None:
    for one, two, wanted in PAIRS[what]:
        for gold, said in ((one, two), (two, one)):
            assert score(reward, gold, f"so it is \\boxed{{{said}}}") == wanted, (gold, said)


def test_the_answer_in_the_layouts_of_models(reward: MathSource) -> None:
    for gold, response, wanted in RESPONSES:
        assert score(reward, gold, response) == wanted, (gold, response)


@pytest.mark.parametrize(
    "piece",
    [r"\times ", r"\pi ", r"\text{cm}", r"\text{cm}/", "x<1 or ", r"(1,2)\cup", "C. ", "(A) ", "million ",
    " and a half", "1_2", "1:", "$1$, ", "12π", "**answer\n"],
)  # fmt: skip
def test_repeated_pieces_are_quick(reward: MathSource, piece: str) -> None:
    """No pattern has two ways to read the same text, so that none backtracks without end in the run's own process."""
    began = time.process_time()
    for text in (f"\\boxed{{{piece * (900 // len(piece))}x}}", f"answer is 5{piece * 20_000}!", piece * 20_000):
        assert score(reward, "7", text) == 0.0
    assert time.process_time() - began < 3.0
