"""Tool calls as objects in a message that is learned from. How a model writes them depends on its chat template.

Rows are read before any model is known. So such a message is kept as one text: its content, `MARK`, and the calls as
JSON. The renderer writes it as the model's template does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from posttrain.core.types import Message
from posttrain.system.errors import DataError
from posttrain.verifier.calling.parse import ToolCall, parse

if TYPE_CHECKING:
    from posttrain.environment.templates.chat_template import Chat, Tools

MARK = "\ufdd1"
"""Stands between a message's content and its calls. It is a noncharacter of Unicode; rows that have it are refused."""


def kept(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """A message with calls as one text; equal ones give equal texts. Arguments may be an object or, as OpenAI has them,
    an object in JSON text. DataError if they are neither."""
    return f"{content}{MARK}{json.dumps([plain_call(c) for c in calls], ensure_ascii=False)}"


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as its name, its arguments as an object, and its id where it has one."""
    inner = call["function"]
    arguments = inner.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        with suppress(ValueError, RecursionError):  # it is refused below
            arguments = json.loads(arguments)
    if arguments is not None and arguments != "" and not isinstance(arguments, Mapping):
        raise DataError(
            f"the arguments of a call of {inner['name']!r} are {arguments!r:.60}, wanted an object, or an object in"
            " JSON text"
        )
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "name": inner["name"], "arguments": dict(arguments or {})}


def turn_with_calls(chat: Chat, prompt: str | Sequence[Message], text: str, tools: Tools) -> tuple[str, str]:
    """(what the template writes for the turn, the stop token that it writes behind it).

    Args:
        text: a text that `kept` made.

    Raises:
        DataError: the prompt is text; or the template writes no calls, or other calls than these; or it does not begin
            the turn as its generation prompt ends.
    """
    content, _, calls_text = text.partition(MARK)
    calls = json.loads(calls_text)
    if isinstance(prompt, str):
        raise DataError(
            "the completion has tool calls, which a chat template writes, and the prompt is text: write the prompt as"
            " messages"
        )
    if chat.format is None:
        raise DataError(
            "the completion has tool calls as objects, and this chat template writes calls in no form that is known:"
            " write them into the content as the model says them"
        )
    before = chat.render(prompt, generate=True, tools=tools)
    turn = called(chat, content, calls)
    whole = chat.render([*prompt, turn], generate=False, tools=tools)
    # The policy speaks behind the generation prompt. It could not say a turn that begins elsewhere.
    if not whole.startswith(before):
        raise DataError(
            f"this chat template's generation prompt ends with {before[-30:]!r}, and it begins no turn with tool calls"
            f" so (it wrote ...{whole[-60:]!r}): write the calls into the content as the model says them"
        )
    turn_text, stop = _split_stop(chat, prompt, turn, whole[len(before) :], tools)
    wanted = tuple(ToolCall(c["name"], c["arguments"]) for c in calls)
    # It has to be parsed as the calls that were given. Otherwise the policy would learn other calls.
    parsed = parse(turn_text, chat.format)
    if parsed.calls != wanted or content.strip() not in turn_text:
        raise DataError(
            f"the chat template writes a turn with tool calls as {turn_text!r:.120}, and its calls are not those of the"
            " completion, or its text is lost: write the calls into the content as the model says them"
        )
    return turn_text, stop


def _split_stop(chat: Chat, prompt: Sequence[Message], turn: Message, body: str, tools: Tools) -> tuple[str, str]:
    """The text of a turn, and its stop token. Some templates (GLM) write the stop token only if a result follows."""
    at, stop = max(((body.rfind(s), s) for s in chat.stops), default=(-1, ""))
    if at >= 0:
        return body[:at], stop
    calls = turn.get("tool_calls", [])
    results = [Message(role="tool", content="ok", tool_call_id=c["id"], name=c["function"]["name"]) for c in calls]
    _, _, text_after = chat.render([*prompt, turn, *results], generate=True, tools=tools).partition(body)
    return body, next((s for s in chat.stops if text_after.lstrip().startswith(s)), "")


def called(chat: Chat, content: str, plain: Sequence[Mapping[str, Any]]) -> Message:
    """The assistant's turn with these calls, as chat templates read it. `plain`: calls as of `plain_call`."""
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(plain):
        arguments = json.dumps(call["arguments"], ensure_ascii=False) if chat.arguments_as_text else call["arguments"]
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": call.get("id", f"call{i:05}"), "type": "function", "function": function})
    return Message(role="assistant", content=content, tool_calls=calls)
