"""Tool calls in every format: what is right is read exactly, what is wrong is said, and nothing raises."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.verifier.calling import FORMATS, Malformed, Parsed, ToolCall, parse

DEEP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def write(format: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them."""
    dumps = lambda x: json.dumps(x, ensure_ascii=False)  # noqa: E731
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if format == "llama":
        return "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)
    if format == "pythonic":
        return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"
    if format == "mistral":
        return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a, "id": "123456789"} for n, a in calls])
    if format == "deepseek":
        begun, call, sep, end, ended = DEEP
        return begun + "\n".join(f"{call}function{sep}{n}\n```json\n{dumps(a)}\n```{end}" for n, a in calls) + ended
    if format == "cohere":
        return (
            "<|START_ACTION|>"
            + dumps([{"tool_call_id": "0", "tool_name": n, "parameters": a} for n, a in calls])
            + "<|END_ACTION|>"
        )
    if format == "harmony":
        return "<|call|>".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}"
            for n, a in calls
        )
    text = lambda v: v if isinstance(v, str) else dumps(v)  # noqa: E731
    if format == "glm":
        args = lambda a: "\n".join(f"<arg_key>{k}</arg_key>\n<arg_value>{text(v)}</arg_value>" for k, v in a.items())  # noqa: E731
        return "\n".join(f"<tool_call>{n}\n{args(a)}\n</tool_call>" for n, a in calls)
    args = lambda a: "".join(f"<parameter={k}>\n{text(v)}\n</parameter>\n" for k, v in a.items())  # noqa: E731
    return "\n".join(f"<tool_call>\n<function={n}>\n{args(a)}</function>\n</tool_call>" for n, a in calls)


CALLS = [
    [("look_up", {"city": "Oslo"})],
    [("ping", {})],
    [
        ("move", {"x": 3, "y": -1.5, "fast": True, "path": ["a", "b"], "more": {"k": None}}),
        ("look_up", {"city": 'naïve "quoted" 日本'}),
    ],
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("calls", CALLS)
def test_what_is_written_is_read(format: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    wanted = tuple(ToolCall(n, a) for n, a in calls)
    text = write(format, calls)
    assert parse(text, format) == Parsed("", "", wanted)
    thought = "<|channel|>analysis<|message|>hm<|end|>" if format == "harmony" else "<think>\nhm\n</think>\n\n"
    assert parse(thought + text, format) == Parsed("hm", "", wanted)
    if format not in ("llama", "pythonic", "harmony"):
        assert parse(f"I will look.\n{text}", format) == Parsed("", "I will look.", wanted)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "It is 3.", '{"answer": 3}', "[1, 2]", "a < b > c", "f(x=1) is a call", "[see note](x)"]
)
def test_an_answer_is_no_call(format: str, text: str) -> None:
    found = parse(text, format)
    assert found.calls == () and found.content == text


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 3}',
        '{"name": "Ann"}',
        '{"type": "circle", "r": 3}',
        '{"parameters": {"period": 3}}',
        '{"name": "Ann", "age": 3} and that is all',
        '{"name": "Ann"}; {"name": "Bob"}',
        '{"type": ["function"]}',
    ],
)
def test_json_that_names_no_tool_is_an_answer(text: str) -> None:
    """An object is a call by its keys, not by the word it begins with."""
    assert parse(text, "llama") == Parsed("", text, ())


def test_a_call_may_begin_with_any_of_its_keys() -> None:
    for text in (
        '{"parameters": {"a": 1}, "name": "f"}',
        '{"id": "0", "type": "function", "name": "f", "parameters": {"a": 1}}',
    ):
        assert parse(text, "llama") == Parsed("", "", (ToolCall("f", {"a": 1}),))


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "never closed"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "must be a JSON object, not str"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "has no arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ("hermes", '<tool_call>{"name": "f g", "arguments": {}}</tool_call>', "no tool's name"),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}}</tool_call>', "not 'parameters'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "given twice"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "after the JSON value"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large a number"),
        ("hermes", '<tool_call>["f"]</tool_call>', "a call is a JSON object, not list"),
        ("hermes", "<tool_call>" + "[" * 100_000, "never closed"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nest deeper"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("llama", '{"name": "f", "parameters": {"a": }', "not valid JSON"),
        ("llama", '{"name": "f", "parameters": {}} {"name": "g", "parameters": {}}', "separated by ;"),
        ("llama", '{"name": "f", "arguments": {"a": 1}}', "not 'arguments'"),
        ("llama", '{"name": "f", "parameters": "a"}', "must be a JSON object, not str"),
        ("llama", '{"name": "f g", "parameters": {}}', "no tool's name"),
        ("llama", '{"name": "f", "parameters": {}, "why": "x"}', "not 'why'"),
        ("llama", '{"type": "function", "name": "f"}', "has no arguments"),
        ("llama", '{"type": "function", "function": {"name": "f", "parameters": {}}}', "not 'function'"),
        ("llama", '<|python_tag|>{"name": "Ann", "age": 3}', "not 'age'"),
        ("llama", "<|python_tag|>print(1)", "not valid JSON"),
        ("pythonic", "[f(a=1), g(", "not a Python list of calls"),
        ("pythonic", "[f(1)]", "given by name"),
        ("pythonic", "[f(a=open('x'))]", "no literal value"),
        ("pythonic", "[f(**{'a': 1})]", "without **"),
        ("pythonic", "[f(a=1), 2]", "not a Python list of calls"),
        ("pythonic", "[f(a=1e999)]", "no literal value"),
        ("pythonic", "[f(a={1, 2})]", "no literal value"),
        ("pythonic", "[f(a=" + "(" * 5000 + ")]", "nest deeper"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "calls are a JSON list"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "not valid JSON"),
        ("deepseek", f"{DEEP[1]}function{DEEP[3]}", "stands"),
        ("deepseek", f"{DEEP[1]}function{DEEP[2]}f\n```json\n[1]\n```{DEEP[3]}", "must be a JSON object"),
        ("cohere", "<|START_ACTION|>{}<|END_ACTION|>", "actions are a JSON list"),
        ("glm", "<tool_call>f g h</tool_call>", "a call is written"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", "a call is written"),
        ("coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "a call is written"),
        (
            "coder",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "given twice",
        ),
        ("harmony", "<|channel|>commentary to=functions.f <|message|>{", "not valid JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(format: str, text: str, why: str) -> None:
    found = parse(text, format)
    (malformed,) = (c for c in found.calls if isinstance(c, Malformed))
    assert why in malformed.why, found
    assert len(malformed.text) <= 203


def test_a_good_call_beside_a_bad_one_is_kept_in_order() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and <tool_call>{"name": }</tool_call>'
    first, second = parse(text, "hermes").calls
    assert first == ToolCall("f", {}) and isinstance(second, Malformed)


def test_calls_in_thoughts_are_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(f"<think>maybe {call}</think>no", "hermes") == Parsed(f"maybe {call}", "no", ())
    assert parse(f"maybe {call}</think>no", "hermes").calls == (), "where the prompt opened the thought"
    assert parse(f"<think>cut off {call}", "hermes") == Parsed(f"cut off {call}", "", ())


def test_tags_inside_arguments_belong_to_them() -> None:
    arguments = {"html": "<tool_call>x</tool_call>", "more": "}"}
    assert parse(write("hermes", [("f", arguments)]), "hermes").calls == (ToolCall("f", arguments),)


def test_other_spellings_of_the_same_formats() -> None:
    assert parse('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "mistral").calls == (
        ToolCall("f", {"a": 1}),
        ToolCall("g", {}),
    )
    assert parse(f'{DEEP[0]}{DEEP[1]}f{DEEP[2]}{{"a": 1}}{DEEP[3]}{DEEP[4]}', "deepseek").calls == (
        ToolCall("f", {"a": 1}),
    )
    assert parse('<|python_tag|>{"name": "f", "parameters": {}}', "llama").calls == (ToolCall("f", {}),)
    assert parse("<|python_start|>[a.b(x=1)]<|python_end|>", "pythonic").calls == (ToolCall("a.b", {"x": 1}),)
    assert parse("<|channel|>final<|message|>done", "harmony") == Parsed("", "done", ())


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "f", "arguments": {}}',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "(",
        ")",
        "f(a=",
        "```json\n",
        "\n",
    ),
    *DEEP,
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<function=f>",
        "</function>",
    ),
    *(
        "<parameter=a>",
        "</parameter>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|start|>assistant",
        "<|python_tag|>",
        ";",
        "1",
        "x",
        "\0",
        "é",
    ),
]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=150)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30))
def test_no_text_raises(format: str, pieces: list[str]) -> None:
    found = parse("".join(pieces), format)
    assert all(isinstance(c, ToolCall | Malformed) for c in found.calls)
    assert all(json.dumps(dict(c.arguments), allow_nan=False) for c in found.calls if isinstance(c, ToolCall))


HOSTILE = {
    ("harmony", ""): ["<|channel|>a", "<|channel|>commentary to=functions.", "<|message|>", "to=functions. "],
    ("glm", "<tool_call>f<arg_key>"): ["</arg_key><arg_value>", "</arg_key>", "</arg_value>"],
    ("coder", "<tool_call><function=f>"): ["<parameter=a>", "</function> ", "</parameter>"],
    ("hermes", ""): ['<tool_call>{"</tool_call>', "<tool_call>{</tool_call>", "<tool_call>1</tool_call>"],
    ("llama", "<|python_tag|>"): ["{};", "1;", '{"name": "f", "parameters": {}};'],
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"): ["\n```\n", "<｜tool▁call▁end｜>"],
    ("cohere", ""): ['<|START_ACTION|>["<|END_ACTION|>', "<|START_ACTION|>"],
    ("mistral", ""): ["[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]"],
    ("pythonic", "[f(a="): ["(1,", "'a' ", "f.", "-"],
}
"""Beginnings of turns, and pieces that are repeated behind them."""


@pytest.mark.parametrize(("format", "begin", "piece"), [(f, b, p) for (f, b), ps in HOSTILE.items() for p in ps])
def test_the_time_of_a_hostile_turn_is_linear(format: str, begin: str, piece: str) -> None:
    """A quadratic reading takes 20 s and more."""
    begun = time.process_time()
    parse(begin + piece * (200_000 // len(piece)), format)
    assert time.process_time() - begun < 4.0


def test_a_turn_and_a_call_have_a_longest_length() -> None:
    (call,) = parse(f"<tool_call>f<arg_key>a</arg_key><arg_value>{'x' * 100_000}</arg_value></tool_call>", "glm").calls
    assert isinstance(call, Malformed) and call.why == "longer than 100000 characters"
    for format in FORMATS:
        (call,) = parse("x" * 1_000_001, format).calls
        assert isinstance(call, Malformed) and call.why == "longer than 1000000 characters" and len(call.text) < 300


def test_a_name_of_many_parts_is_no_name() -> None:
    (call,) = parse(f"[{'a.' * 960}f(x=1)]", "pythonic").calls
    assert isinstance(call, Malformed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("piece", PIECES)
def test_long_texts_are_read_in_time(format: str, piece: str) -> None:
    """100,000 characters of anything."""
    parse(piece * (100_000 // len(piece)), format)
