"""Completions with tool calls as objects: each chat template writes them, and what it cannot write is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.core.types import Message
from posttrain.environment.templates.chat_template import WEATHER
from posttrain.environment.templates.tool_call_messages import MARK, kept
from posttrain.role.learning.demonstrations import demonstration
from posttrain.system.errors import DataError
from posttrain.verifier.calling.parse import ToolCall, parse
from tests.environment.template_parts import FAMILIES, renderer, tokenizer
from tests.environment.test_judged_rows import LOOK, SKY, env, pair, segments
from tests.environment.test_shown_tools import env as shown

USER = [Message(role="user", content="Weather?")]
OSLO: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
ROME: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "arguments": {"city": 'Rome, "it"'}}}
CALLS = [n for n, f in FAMILIES.items() if f.format and n != "deepseek"]
ENDS = {"harmony": "<|call|>", "glm": "<|observation|>"}
"""Families whose calls end with another token than their answers."""


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    f = FAMILIES[name]
    r = renderer(f)
    asked, said = r.pair(USER, kept("", [OSLO]), "t", [WEATHER])
    assert r.decode(asked) == r.chat(USER, generate=True, tools=[WEATHER])
    assert parse(r.text(said), f.format or "").calls == (ToolCall("look_up", {"city": "Oslo"}),)
    assert r.decode(said[-1:]) == ENDS.get(name, f.stops[0]) and int(said[-1]) in r.stop_ids
    assert sum(int(i) in r.stop_ids for i in said) == 1
    turn = Message(role="assistant", content="", tool_calls=[{"id": "call00000", **OSLO}])
    assert r.chat([*USER, turn], generate=False, tools=[WEATHER]).startswith(r.decode([*asked, *said[:-1]]))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-coder", "mistral", "glm"])
def test_several_calls_and_the_words_before_them(name: str) -> None:
    f = FAMILIES[name]
    r = renderer(f)
    words = "" if name == "mistral" else "Two, then."
    _, said = r.pair(USER, kept(words, [OSLO, ROME]), "t", [WEATHER])
    found = parse(r.text(said), f.format or "")
    assert [c.arguments["city"] for c in found.calls if isinstance(c, ToolCall)] == ["Oslo", 'Rome, "it"']
    assert found.content == words


def test_arguments_as_text_are_the_same_call() -> None:
    text = {**OSLO, "function": {"name": "look_up", "arguments": '{"city":  "Oslo"}'}}
    assert kept("", [text]) == kept("", [OSLO])
    none = {"function": {"name": "look_up", "arguments": ""}}
    assert kept("", [none]) == kept("", [{"function": {"name": "look_up"}}])


def test_what_a_template_cannot_write_is_refused() -> None:
    with pytest.raises(DataError, match=r"task 't': the completion has tool calls as objects, and this chat template"):
        renderer(FAMILIES["phi"]).pair(USER, kept("", [OSLO]), "t")
    with pytest.raises(DataError, match=r"task 't': .* one call at a time"):
        renderer(FAMILIES["llama3"]).pair(USER, kept("", [OSLO, ROME]), "t", [WEATHER])
    with pytest.raises(DataError, match=r"or its text is lost: write the calls into the content"):
        renderer(FAMILIES["mistral"]).pair(USER, kept("Two, then.", [OSLO]), "t", [WEATHER])
    with pytest.raises(DataError, match=r"generation prompt ends with .*<think>.*, and it begins no turn with"):
        renderer(FAMILIES["deepseek"]).pair(USER, kept("", [OSLO]), "t", [WEATHER])
    with pytest.raises(DataError, match=r"the prompt is text: write the prompt as messages"):
        renderer(FAMILIES["qwen2.5"]).pair("Weather?", kept("", [OSLO]), "t")


def called(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_a_call_as_an_object_may_be_what_was_judged(tmp_path: Path) -> None:
    """Its tokens are those of the tokenizer's own template, as TRL's are."""
    row = {"prompt": [SKY], "chosen": [called({"at": "sky"})], "rejected": [called('{"at": "sea"}')], "tools": [LOOK]}
    render, words = renderer(FAMILIES["qwen2.5"]), tokenizer(FAMILIES["qwen2.5"])
    for part, at in zip(segments(pair(env(tmp_path, [row])), render, 4096), ("sky", "sea"), strict=True):
        whole = words.apply_chat_template([SKY, {**called({"at": at}), "content": ""}], tools=[LOOK], tokenize=False)
        asked = words.apply_chat_template([SKY], tools=[LOOK], add_generation_prompt=True, tokenize=False)
        assert render.decode(part.ids) == whole.rstrip("\n")
        assert render.decode(part.ids[: int(np.argmax(part.mask))]) == asked


@pytest.mark.parametrize("form", ["messages", "completion"])
def test_a_call_as_an_object_may_be_imitated(tmp_path: Path, form: str) -> None:
    said = called({"at": "sky"})
    row = {"messages": [SKY, said]} if form == "messages" else {"prompt": [SKY], "completion": [said]}
    made = shown(tmp_path, [{**row, "tools": [LOOK]}])
    task = made.train.task(0)
    found = demonstration(renderer(FAMILIES["qwen2.5"]), task, task.prompt, made.completion(task) or "", 4096)
    text = renderer(FAMILIES["qwen2.5"]).decode(found.ids[int(np.argmax(found.mask)) :])
    assert text == '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("side", "says"),
    [
        ([called([1])], r"rows\.jsonl:1: .* the arguments of a call of 'look' are \[1\], wanted an object"),
        ([called("{")], r"the arguments of a call of 'look' are '\{', wanted an object, or an object in JSON text"),
        ([called(100_000 * "[")], r"the arguments of a call of 'look' are '\[+, wanted an object"),
        ([{"role": "assistant", "content": f"a{MARK}[]"}], r"rows\.jsonl:1: .* has the character U\+FDD1"),
        (f"a{MARK}[]", r"rows\.jsonl:1: .* has the character U\+FDD1"),
    ],
)
def test_bad_rows_are_refused_with_their_place(tmp_path: Path, side: Any, says: str) -> None:
    text = isinstance(side, str)
    row = {"prompt": "Sky?" if text else [SKY], "chosen": side, "rejected": "no" if text else [called({})]}
    with pytest.raises(DataError, match=says):
        env(tmp_path, [row])


def test_equal_calls_in_two_spellings_are_an_identical_pair(tmp_path: Path) -> None:
    row = {"prompt": [SKY], "chosen": [called({"at": "sky"})], "rejected": [called(json.dumps({"at": "sky"}))]}
    with pytest.raises(DataError, match="are the same text"):
        env(tmp_path, [row])
