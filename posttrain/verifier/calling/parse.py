"""Splits a turn's text into reasoning, content and tool calls, in the format of the chat template.

    hermes    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>                       Hermes, Qwen 2.5 and 3
    llama     {"name": "f", "parameters": {"a": 1}}, alone, several with ; between              Llama 3.1
    pythonic  [f(a=1), g(b="x")], alone                                                         Llama 3.2 and 4
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}], or [TOOL_CALLS]f[ARGS]{...}   Mistral
    deepseek  its own tokens around name and JSON                                               DeepSeek V3, R1
    cohere    <|START_ACTION|>[{"tool_name": "f", "parameters": {...}}]<|END_ACTION|>           Command
    glm       <tool_call>f <arg_key>a</arg_key><arg_value>1</arg_value></tool_call>             GLM 4.5
    coder     <tool_call><function=f><parameter=a>1</parameter></function></tool_call>          Qwen 3 Coder
    harmony   <|channel|>commentary to=functions.f <|message|>{"a": 1}                          gpt-oss

Thoughts (`posttrain.verifier.thoughts`) are reasoning, and calls in them are ignored. No text makes the parser raise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.verifier.calling import read_data
from posttrain.verifier.calling.read_data import Unreadable
from posttrain.verifier.thoughts import thoughts


@dataclass(frozen=True)
class ToolCall:
    """One call: a tool's name, and its arguments as JSON values by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """Text that began like a call and cannot be read as one."""

    text: str
    why: str


@dataclass(frozen=True)
class Parsed:
    """One turn: its reasoning, its other text, and its calls in order."""

    reasoning: str
    content: str
    calls: tuple[ToolCall | Malformed, ...]


Found = tuple[str, list[ToolCall | Malformed]]
"""(text outside the calls, calls)"""
Reader = Callable[[str], list[tuple[str, dict[str, Any]]]]
"""Reads (name, arguments) of each call in a text. Raises Unreadable."""
EXCERPT = 200
"""The most characters of a `Malformed` text."""
TRIES = 8
"""How many JSON values of the longest length may fail in one turn. After that the first end tag ends a call, even if it
stands in a string of the call."""
_BETWEEN_CALLS = re.compile(r"\s*(;?)\s*")  # of Llama


def parse(text: str, format: str) -> Parsed:
    """Parse one turn in one of `FORMATS`, without its stop token, in linear time. A turn of more than
    `read_data.LONGEST_TURN` characters gives one `Malformed` call."""
    if len(text) > read_data.LONGEST_TURN:
        return Parsed("", "", (_bad(text[: EXCERPT + 1], f"longer than {read_data.LONGEST_TURN} characters"),))
    if format == "harmony":
        return _harmony(text)
    reasoning, rest = thoughts(text)
    content, calls = FORMATS[format](rest)
    return Parsed(reasoning.strip(), content.strip(), tuple(calls))


def _read(text: str, reader: Reader) -> list[ToolCall | Malformed]:
    """The calls that `reader` reads from a text; one `Malformed` where it cannot."""
    if len(text) > read_data.LONGEST:
        return [_bad(text, f"longer than {read_data.LONGEST} characters")]
    try:
        return [ToolCall(name, arguments) for name, arguments in reader(text)]
    except Unreadable as error:
        return [_bad(text, str(error))]


def _bad(text: str, why: str) -> Malformed:
    """A text that cannot be read as a call, shortened for a message."""
    text = text.strip()
    return Malformed(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...", why)


def _in_tags(text: str, begin: str, end: str, reader: Reader, dropped: Sequence[str] = ()) -> Found:
    """The calls between these tags, each piece read by `reader`, and the text outside the tags without `dropped`."""
    content, calls = list[str](), list[ToolCall | Malformed]()
    # `budget` is a number of characters. Each JSON value that cannot be read takes its length from it. Without the
    # budget a text of nothing but begin tags would be read again from each of them, in quadratic time.
    at, budget = 0, TRIES * read_data.LONGEST
    while (tag_place := text.find(begin, at)) >= 0:
        content.append(text[at:tag_place])
        inside = behind = tag_place + len(begin)
        # An end tag inside a string of the call's JSON does not end the call, so it is searched behind the JSON value.
        if budget > 0:
            try:
                _, behind = read_data.json_prefix(text, inside)
            except Unreadable:
                budget -= min(read_data.LONGEST, len(text) - inside)
        closed = text.find(end, behind)
        if closed < 0:
            calls.append(_bad(text[tag_place:], f"{begin} is never closed by {end}"))
            at = len(text)
            break
        calls += _read(text[inside:closed], reader)
        at = closed + len(end)
    outside = "".join([*content, text[at:]])
    for mark in dropped:
        outside = outside.replace(mark, "")
    return outside, calls


def _llama(text: str) -> Found:
    """JSON calls, alone in the turn or after the token that announces them. JSON without a tool is an answer."""
    announced = "<|python_tag|>" in text
    before, _, body = text.partition("<|python_tag|>") if announced else ("", "", text)
    stripped = body.strip()
    # Without the token only the JSON itself shows whether it is a call, because an answer may be JSON too.
    if not announced and not _calls_a_tool(stripped):
        return text, []
    calls: list[ToolCall | Malformed] = []
    at = 0
    while at < len(stripped):
        try:
            value, end = read_data.json_prefix(stripped, at)
        except Unreadable as error:
            calls.append(_bad(stripped[at:], str(error)))
            break
        # The value is parsed already. `_read` limits its length, and makes a wrong call a `Malformed`.
        calls += _read(stripped[at:end], lambda _, v=value: [read_data.object_call(v, "name", "parameters")])
        following = _BETWEEN_CALLS.match(stripped, end)
        assert following is not None
        at = following.end()
        if at < len(stripped) and not following[1]:
            calls.append(_bad(stripped[at:], "several calls are separated by ;"))
            break
    return before, calls


def _calls_a_tool(text: str) -> bool:
    """Returns whether a text without an announcing token is meant as a call, well-formed or not.

    It is if it begins with a JSON object that has a name and arguments (under either key), or the type `function`.
    `{"name": "Ann", "age": 3}` is an answer. If the JSON cannot be read, its first key decides.
    """
    if not text.startswith("{"):
        return False
    try:
        value, _ = read_data.json_prefix(text)
    except Unreadable:
        return re.match(r'\{\s*"(name|parameters|type)"', text) is not None
    return ("name" in value and ("parameters" in value or "arguments" in value)) or value.get("type") == "function"


def _pythonic(text: str) -> Found:
    """A Python list of calls, alone in the turn: `[f(a=1)]`."""
    body = text.strip()
    marked = body.startswith("<|python_start|>")
    body = body.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    # A list without a call in it, such as `[1, 2]`, is an answer.
    if not marked and not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return text, []
    return "", _read(body, read_data.python_calls)


def _mistral(text: str) -> Found:
    """The calls after each `[TOOL_CALLS]`."""
    content, *pieces = text.split("[TOOL_CALLS]")
    return content, [call for piece in pieces for call in _read(piece, _mistral_calls)]


def _mistral_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in one piece: `NAME[ARGS]{...}`, perhaps with a call id after the name, or a JSON list."""
    name, marked, arguments = text.partition("[ARGS]")
    if marked:
        return _one_call(name.partition("[CALL_ID]")[0], arguments)
    return _calls_of_list(text, "name", "arguments")


def _one_call(name: str, arguments: str) -> list[tuple[str, dict[str, Any]]]:
    """The call of a name and its arguments in JSON, both checked."""
    return [(read_data.name_of(name.strip()), read_data.arguments_of(read_data.json_value(arguments)))]


def _calls_of_list(text: str, name: str, arguments: str, what: str = "calls") -> list[tuple[str, dict[str, Any]]]:
    """The calls of a JSON list of objects with these keys."""
    listed = read_data.json_value(text)
    if not isinstance(listed, list):
        raise Unreadable(f"{what} are a JSON list")
    return [read_data.object_call(x, name, arguments) for x in listed]


_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
# What stands behind the separator where the arguments are a block of JSON: the name, then "```json" and the block.
_FENCE = re.compile(r"(?P<name>[^\n]*)\n```json\n(?P<json>.*)\n```\s*", re.DOTALL)


def _deepseek_call(text: str) -> list[tuple[str, dict[str, Any]]]:
    """One call: TYPE, separator, NAME and a block of JSON; or NAME, separator, JSON."""
    before_separator, marked, after_separator = text.partition(_SEP)
    if not marked:
        raise Unreadable(f"between {_BEGIN} and {_END} stands {_SEP}")
    fenced = _FENCE.fullmatch(after_separator)
    name, arguments = (fenced["name"], fenced["json"]) if fenced else (before_separator, after_separator)
    return _one_call(name, arguments)


def _cohere_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of Command's list of actions."""
    return _calls_of_list(text, "tool_name", "parameters", "actions")


# Patterns of a call and of one of its arguments, for GLM and for Qwen 3 Coder (see the module's docstring).
_GLM = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?P<rest>(<arg_key>.*)?)", re.DOTALL)
# The groups `(?>...)` are atomic: the first end tag ends a key or a value, and no later one is tried.
_GLM_ARG = re.compile(
    r"\s*<arg_key>(?>(?P<key>.*?)</arg_key>)\s*<arg_value>(?>(?P<value>.*?)</arg_value>)\s*", re.DOTALL
)
_CODER = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<rest>.*)</function>\s*", re.DOTALL)
_CODER_ARG = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)


def _call_with_tags(
    text: str, call: re.Pattern[str], argument: re.Pattern[str], shape: str
) -> list[tuple[str, dict[str, Any]]]:
    """The one call of a text that has a name and tagged arguments. A value that is not JSON is text. `shape`: the form
    that messages show."""
    call_match = call.fullmatch(text)
    if call_match is None:
        raise Unreadable(f"a call is written {shape}")
    arguments: dict[str, Any] = {}
    at, rest = 0, call_match["rest"].rstrip()
    while at < len(rest):
        argument_match = argument.match(rest, at)
        if argument_match is None:
            raise Unreadable(f"a call is written {shape}, not {rest[at : at + 40].strip()!r}")
        # It is unknown which of two equal arguments was meant, so the tool is not called.
        if argument_match["key"].strip() in arguments:
            raise Unreadable(f"argument {argument_match['key'].strip()!r} is given twice")
        arguments[argument_match["key"].strip()] = read_data.loose_value(argument_match["value"])
        at = argument_match.end()
    return [(read_data.name_of(call_match["name"].strip()), arguments)]


def _tool_call_format(reader: Reader) -> Callable[[str], Found]:
    """A format of calls between `<tool_call>` tags, each piece read by `reader`."""
    return lambda text: _in_tags(text, "<tool_call>", "</tool_call>", reader)


_GLM_SHAPE = "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
_CODER_SHAPE = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")  # `<|channel|>analysis`
_TO = re.compile(r"to=functions\.(\S+?)(?=\s|<|$)")  # `to=functions.search`


def _harmony(text: str) -> Parsed:
    """A turn of messages in several channels. A message that is addressed to functions.NAME is a call. The prompt may
    have written the header of the first message."""
    reasoning, content, calls = [], [], list[ToolCall | Malformed]()
    # A message is a header (channel, recipient), the mark, and a body. A piece without both marks is plain text.
    for message in re.split(r"<\|start\|>assistant|<\|end\|>|<\|call\|>", text):
        channel = _CHANNEL.search(message)
        mark_place = message.find("<|message|>", channel.end()) if channel is not None else -1
        head, body = message[: mark_place + len("<|message|>")], message[mark_place + len("<|message|>") :]
        if channel is None or mark_place < 0:
            content.append(message)
        elif recipient := _TO.search(head):
            calls += _read(body, lambda t, n=recipient[1]: _one_call(n, t))
        elif channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return Parsed("\n".join(reasoning).strip(), "".join(content).strip(), tuple(calls))


def _harmony_without_thoughts(text: str) -> Found:
    """(text outside the calls, calls) of a turn of messages."""
    parsed = _harmony(text)
    return parsed.content, list(parsed.calls)


FORMATS: dict[str, Callable[[str], Found]] = {
    "hermes": _tool_call_format(lambda t: [read_data.object_call(read_data.json_value(t), "name", "arguments")]),
    "llama": _llama,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "deepseek": lambda t: _in_tags(t, _BEGIN, _END, _deepseek_call, ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    "cohere": lambda t: _in_tags(
        t, "<|START_ACTION|>", "<|END_ACTION|>", _cohere_calls, ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "glm": _tool_call_format(lambda t: _call_with_tags(t, _GLM, _GLM_ARG, _GLM_SHAPE)),
    "coder": _tool_call_format(lambda t: _call_with_tags(t, _CODER, _CODER_ARG, _CODER_SHAPE)),
    "harmony": _harmony_without_thoughts,
}
"""Each format's function: text without thoughts -> (text outside the calls, calls). `parse` calls `_harmony` itself,
because there the thoughts are a channel."""
