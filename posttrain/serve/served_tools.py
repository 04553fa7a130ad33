"""Tools of a chat request: what the caller offers, the calls in its messages, and those in an answer.

In a stream, text is sent as long as no call can have begun in it.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain.serve.detokenize import begun
from posttrain.serve.response_format import RequestPart
from posttrain.verifier.calling import Malformed, ToolCall, parse, read_data
from posttrain.verifier.thoughts import THOUGHTS

MOST_TOOLS = 128
"""Most tools of a request, and most calls of a message."""
NAMED = r"^[A-Za-z_][\w.\-]{0,127}$"
"""Names that a call can have (`verifier.calling`)."""


def _not_enforced(strict: Any) -> Any:
    """Refuses `strict: true`, which cannot be kept."""
    if strict:
        raise ValueError("arguments are not forced into the schema, since answers are sampled freely: leave it out")
    return strict


class FunctionSpec(RequestPart):
    """One function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str = Field(pattern=NAMED)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: Annotated[bool | None, BeforeValidator(_not_enforced)] = None


class ToolSpec(RequestPart):
    """One tool. Only functions are known."""

    type: Literal["function"]
    function: FunctionSpec


def _arguments(text: Any) -> Any:
    """Arguments in JSON, as the model wrote them; an error where they are no object."""
    try:
        value = read_data.json_value(text or "{}") if isinstance(text, str) else None
    except read_data.Unreadable as error:
        raise ValueError(f"arguments are a text with a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("arguments are a text with a JSON object")
    return text or "{}"


class CalledFunction(RequestPart):
    """A call that the assistant made: a name, and arguments as JSON text."""

    name: str = Field(pattern=NAMED)
    arguments: Annotated[str, BeforeValidator(_arguments)]


class PastCall(RequestPart):
    """A call in an earlier message of the assistant, which the caller sends back."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, as_text: bool) -> dict[str, Any]:
        """In the form that chat templates read: arguments as an object, or as text where a template wants that."""
        arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments if as_text else read_data.json_value(arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ToolRequest(RequestPart):
    """The fields of a request about tools. The tools are offered unless `tool_choice` is none."""

    tools: list[ToolSpec] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        # Demands that cannot be met are refused: a client that relies on them would silently get wrong answers.
        if self.tool_choice not in (None, "none", "auto"):
            wanted = "required" if self.tool_choice == "required" else "a named function"
            raise ValueError(
                f"tool_choice: {wanted} cannot be enforced, since answers are sampled freely. Send 'auto' or 'none',"
                " and ask for the call in the messages"
            )
        if self.tool_choice == "auto" and not self.tools:
            raise ValueError("tool_choice='auto' without tools: name them in tools")
        if self.parallel_tool_calls is False and self.tools:
            raise ValueError(
                "parallel_tool_calls=false cannot be enforced, since answers are sampled freely: leave it out"
            )
        names = [t.function.name for t in self.tools]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"two tools are called {twice!r}: give each a name of its own")
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the prompt shows to the model."""
        tools = () if self.tool_choice == "none" else self.tools
        return [t.model_dump(exclude={"function": {"strict"}}) for t in tools]


WITHIN = {
    "hermes": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "coder": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "cohere": ("<|START_ACTION|>",),
    "llama": ("<|python_tag|>",),
}
"""Marks with which a call may begin anywhere in a turn, by format."""
AT_BEGIN = {
    "llama": ("{", "<|python_tag|>"),
    "pythonic": ("[", "<|python_start|>"),
    "harmony": ("<|channel|>", "<|start|>"),
}
"""Marks that mean a call, or other parts of a turn, only at its beginning."""


@dataclass
class ToolAnswer:
    """One answer in a conversation with tools: says which text can be sent already, and finds the calls at the end."""

    format: str
    text: str = ""
    sent: int = 0
    """Characters that were released as text."""

    def add(self, piece: str) -> str:
        """The text that can be sent now."""
        self.text += piece
        end = self._certain()
        sendable, self.sent = self.text[self.sent : end], max(self.sent, end)
        return sendable

    def finish(self, finish: str) -> tuple[str, list[dict[str, Any]], str]:
        """(the rest of the text, the calls in the form of OpenAI's API, the reason why the answer ended).

        An answer that was cut off, or in which a call cannot be read, is text.
        """
        rest = self.text[self.sent :]
        # An answer that was cut off may end inside a call, which must not be run.
        calls = parse(self.text, self.format).calls if finish == "stop" else ()
        if not calls or any(isinstance(c, Malformed) for c in calls):
            return rest, [], finish
        outside = parse(rest, self.format).content
        listed = [_call(c) for c in calls if isinstance(c, ToolCall)]
        return outside, listed, "tool_calls"

    def _certain(self) -> int:
        """Number of characters that are text, whatever follows."""
        # In some formats a call is a whole turn that begins with a mark such as `{`. While the text begins with one, or
        # may still become one, nothing is sent, and `finish` decides. The tag of a thought counts like a mark.
        stripped = self.text.lstrip()
        for mark in (*AT_BEGIN.get(self.format, ()), *(dict(THOUGHTS) if self.format in AT_BEGIN else ())):
            if stripped.startswith(mark) or mark.startswith(stripped):
                return self.sent
        # Other marks may stand anywhere. Text before the first one, or before an end that may begin one, is certain.
        places = [i for m in WITHIN.get(self.format, ()) if (i := self.text.find(m, self.sent)) >= 0]
        if places:
            return max(self.sent, min(places))
        return max(self.sent, len(self.text) - begun(self.text, WITHIN.get(self.format, ())))


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
