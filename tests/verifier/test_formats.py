"""Rewards for form, and for tool calls by the rules of Tool-N1 (E02): exactly the wanted calls, or nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.env import Reward
from posttrain.core.types import Task
from posttrain.core.verdict import State
from posttrain.environment.judged.judge_rules import read_boxed, read_choice, read_last_characters, read_yes
from posttrain.environment.judged.verify_rules import read_boxed_yes
from posttrain.search.play_search import ANSWERS
from posttrain.system.errors import DataError
from posttrain.verifier.builtin import BUILTIN
from posttrain.verifier.calling.parse import parse
from posttrain.verifier.code.fences import blocks_of
from posttrain.verifier.configured import sources
from posttrain.verifier.format_rewards import answer_format, think_format, tool_call
from posttrain.verifier.math.extract import final
from posttrain.verifier.thoughts import spoken

GOLD = [{"name": "f", "arguments": {"a": 1, "b": 2}}]
TWICE = [
    {"name": "f", "arguments": {}},
    {"name": "g", "arguments": {"x": [1, {"y": None}]}},
    {"name": "f", "arguments": {}},
]


def said(calls: Any, thought: str = "<think>so</think>") -> str:
    return f"{thought}<tool_call>{calls if isinstance(calls, str) else json.dumps(calls)}</tool_call>"


def score(text: str, gold: Any = GOLD) -> tuple[float | None, str]:
    verdict = tool_call(Task("t", "p", info={"calls": gold}), text)
    assert verdict.state is State.VALUE and (verdict.score == 1.0 or verdict.why)
    return verdict.score, verdict.kind


CASES: dict[str, tuple[str, float, str]] = {
    "E02 the same": (said(GOLD), 1.0, ""),
    "E02 keys in another order": (said('[{"arguments": {"b": 2, "a": 1}, "name": "f"}]'), 1.0, ""),
    "E02 white space": (f"  <think>\n</think>\n<tool_call>\n {json.dumps(GOLD, indent=2)} \n</tool_call>\n", 1.0, ""),
    "E02 an extra call": (said([*GOLD, {"name": "g", "arguments": {}}]), 0.0, "wrong"),
    "E02 the call twice": (said(GOLD * 2), 0.0, "wrong"),
    "E02 no call": (said([]), 0.0, "wrong"),
    "E02 another name": (said([{"name": "g", "arguments": {"a": 1, "b": 2}}]), 0.0, "wrong"),
    "E02 text for a number": (said('[{"name": "f", "arguments": {"a": "1", "b": 2}}]'), 0.0, "wrong"),
    "E02 a float for an integer": (said('[{"name": "f", "arguments": {"a": 1.0, "b": 2}}]'), 0.0, "wrong"),
    "E02 true for 1": (said('[{"name": "f", "arguments": {"a": true, "b": 2}}]'), 0.0, "wrong"),
    "E02 an argument more": (said('[{"name": "f", "arguments": {"a": 1, "b": 2, "c": 3}}]'), 0.0, "wrong"),
    "E02 missing think": (said(GOLD, ""), 0.0, "no_thought"),
    "E02 a thought that never ends": (said(GOLD, "<think>so"), 0.0, "no_thought"),
    "E02 no tag": ("<think>so</think>" + json.dumps(GOLD), 0.0, "no_call"),
    "E02 a tag that never ends": ("<think>so</think><tool_call>" + json.dumps(GOLD), 0.0, "no_call"),
    "E02 the last one counts": (said([]) + said(GOLD, ""), 1.0, ""),
    "E02 the last one counts, wrong": (said(GOLD) + said([], ""), 0.0, "wrong"),
    "E02 an object, not a list": (said(GOLD[0]), 0.0, "malformed"),
    "E02 no JSON": (said("[{'name': 'f'}]"), 0.0, "malformed"),
    "E02 a list of text": (said(["f"]), 0.0, "malformed"),
    "E02 no arguments": (said([{"name": "f"}]), 0.0, "malformed"),
    "E02 more than a call": (said([{"name": "f", "arguments": {"a": 1, "b": 2}, "id": 3}]), 0.0, "malformed"),
    "E02 a key twice": (said('[{"name": "f", "arguments": {"a": 0, "a": 1, "b": 2}}]'), 0.0, "malformed"),
    "E02 nested without end": (said("[" * 10**5), 0.0, "malformed"),
}


@pytest.mark.parametrize("case", CASES)
def test_tool_n1(case: str) -> None:
    text, wanted, kind = CASES[case]
    assert score(text) == (wanted, kind)


def test_calls_are_a_multiset() -> None:
    assert score(said(TWICE[::-1]), TWICE) == (1.0, "")
    assert score(said(TWICE[:2]), TWICE) == (0.0, "wrong")
    assert score(said([]), []) == (1.0, "")


def test_what_is_wanted_is_read_before_the_run() -> None:
    reward = (Reward(function="tool_call"),)
    good = [Task("a", "p", info={"calls": GOLD}), Task("b", "p", answer=json.dumps(GOLD)), Task("c", "p", answer="[]")]
    (source,) = sources(reward, good)
    for bad in (
        Task("x", "p"),
        Task("x", "p", answer="f(1)"),
        Task("x", "p", answer='{"name": "f"}'),
        Task("x", "p", info={"calls": [{"name": 1}]}),
        Task("x", "p", info={"calls": [{"name": "f", "arguments": {"a": {1}}}]}),
        Task("x", "p", info={"calls": [{"name": "f", "arguments": {"a": float("nan")}}]}),
    ):
        with pytest.raises(DataError, match="task 'x': reward 'tool_call' wants a column 'calls'"):
            source.check([bad])  # type: ignore[attr-defined]


@given(
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "[",
                "]",
                "{",
                "}",
                '"name"',
                ":",
                "1",
                ",",
                "\\",
                "é",
                " ",
            ]
        )
    )
)
def test_no_text_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    score(text)
    for form in (think_format, answer_format):
        assert form(Task("t", "p"), text).score in (0.0, 1.0)


FORMS = [
    ("<think>a</think>b", 1, 0),
    (" <think>\na\n</think>\nb ", 1, 0),
    ("<think></think>b", 1, 0),
    ("<think>a</think>", 0, 0),
    ("<think>a</think>  \n", 0, 0),
    ("a</think>b", 0, 0),
    ("b", 0, 0),
    ("", 0, 0),
    ("x<think>a</think>b", 0, 0),
    ("<think>a</think>b<think>c</think>", 0, 0),
    ("<think><think>a</think>b", 0, 0),
    ("<think>a</think><answer>b</answer>", 1, 1),
    ("<think>a</think>\n<answer>\nb</answer>\n", 1, 1),
    ("<think>a</think><answer>b", 1, 0),
    ("<think>a</think><answer></answer>", 1, 0),
    ("<think>a</think><answer>b</answer>c", 1, 0),
    ("<think>a</think>c<answer>b</answer>", 1, 0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 1, 0),
    ("<think>a</think><answer>", 1, 0),
    ("<answer>b</answer><think>a</think>", 0, 0),
    ("<think>the tag '</think>' ends</think>b", 1, 0),
    ("<think>write `<think>` first</think><answer>b</answer>", 1, 1),
]


@pytest.mark.parametrize(("text", "think", "answer"), FORMS, ids=[f"C03 {t!r}" for t, _, _ in FORMS])
def test_forms(text: str, think: int, answer: int) -> None:
    assert (think_format(Task("t", "p"), text).score, answer_format(Task("t", "p"), text).score) == (think, answer)


CALL = '<tool_call>{"name": "f", "arguments": {"s": "x </think> y"}}</tool_call>'
READERS: list[tuple[Callable[[str], object], str, object]] = [
    (spoken, '<think>I get "3"</think>4', "4"),
    (spoken, "<think>I get `3`</think>```x```", "```x```"),
    (spoken, '<think>I get "3"</think>"4"', '"4"'),
    (spoken, 'It is 4."<think>or 5', 'It is 4."'),
    (spoken, "tags = ['<think>', \"</think>\", `<think>`]", "tags = ['<think>', \"</think>\", `<think>`]"),
    (spoken, "[THINK]3[/THINK]It is 4", "It is 4"),
    (spoken, "[THINK]3</think> and", ""),
    (spoken, "4 <think>hm</think> in all", "4  in all"),
    (spoken, "3</think>4</think>5", "4</think>5"),
    (lambda t: getattr(final(t), "text", None), '<think>I get "3"</think>\\boxed{4}', "4"),
    (lambda t: getattr(final(t), "text", None), "[THINK]\\boxed{3} and", None),
    (lambda t: blocks_of(t)[-1].body, "[THINK]```python\nx\n```[/THINK]```python\ny\n```", "y\n"),
    (lambda t: builtin("contains", t), "<think>4?</think>It is 5", 0.0),
    (lambda t: builtin("exact", t), "<think>2+2</think>4", 1.0),
    (lambda t: builtin("last_integer", t), "<think>maybe 4", 0.0),
    (lambda t: score(t)[0], f"<think>{said(GOLD)[20:]}</think>", 0.0),
    (lambda t: parse(t, "hermes").calls, f"Sure. <think>{CALL}</think>no", ()),
    (lambda t: parse(t, "hermes").calls, f"<think>the tag '</think>' and {CALL}</think>no", ()),
    (lambda t: parse(t, "hermes").content, f"<think>hm</think>{CALL}no", "no"),
    (read_choice, "<think>[[A]]</think>[[B]]<think>[[A]]", (0.0, 1.0)),
    (read_last_characters, "<think><answer>[[A]]</answer></think>", None),
    (read_yes, "No<think>or Yes", (0.0,)),
    (read_boxed, r"<think>\boxed{8, 6}", None),
    (read_boxed_yes, r"<think>\boxed{Yes}</think>", None),
    (ANSWERS["integer"], "4 <think>or 5", "4"),
    (ANSWERS["line"], "4\n<think>or 5", "4"),
]


def builtin(name: str, text: str) -> float | None:
    return BUILTIN[name](Task("t", "p", answer="4"), text).score


@pytest.mark.parametrize(("read", "text", "wanted"), READERS, ids=[f"{i} {t!r}" for i, (_, t, _) in enumerate(READERS)])
def test_every_reader_passes_over_thoughts(read: Callable[[str], object], text: str, wanted: object) -> None:
    assert read(text) == wanted


def test_long_texts_take_linear_time() -> None:
    begun = time.process_time()
    for text in ("'" * 10**6, "'</think>'" * 10**5, "</think>" * 10**5, "<think></think>" * 10**5):
        spoken(text)
    for text in ("<think>" * 10**5, "<tool_call>" * 10**5, said("9" * 10**6), "<think>a</think>" + "<answer>" * 10**5):
        score(text)
        think_format(Task("t", "p"), text)
        answer_format(Task("t", "p"), text)
    for block, fence in (("a ```py\nx```\n", "~~~\n"), ("a ````py\nx````\n", "```\n")):
        assert len(blocks_of(500 * block + 50_000 * fence)) == 500
    assert time.process_time() - begun < 5.0
