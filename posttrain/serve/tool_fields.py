"""The fields of a chat request that are about tools: what the caller offers, and the calls in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from posttrain.verifier.calling import read_data

MOST_TOOLS = 128
"""Most tools of a request, and most calls of a message."""
NAMED = r"^[A-Za-z_][\w.\-]{0,127}$"
"""Names that a call can have (`verifier.calling`)."""


class _ToolField(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def _not_enforced(strict: Any) -> Any:
    if strict:
        raise ValueError("arguments are not forced into the schema, since answers are sampled freely: leave it out")
    return strict


class FunctionSpec(_ToolField):
    """One function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str = Field(pattern=NAMED)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: Annotated[bool | None, BeforeValidator(_not_enforced)] = None


class ToolSpec(_ToolField):
    """One tool. Only functions are known."""

    type: Literal["function"]
    function: FunctionSpec

    def plain(self) -> dict[str, Any]:
        """In the form that chat templates read."""
        f = self.function
        told = {"name": f.name, "description": f.description, "parameters": f.parameters}
        return {"type": "function", "function": told}


def _arguments(text: Any) -> Any:
    """Arguments in JSON, as the model wrote them; an error where they are no object."""
    if not isinstance(text, str):
        raise ValueError("arguments are a text with a JSON object")
    try:
        value = read_data.json_value(text or "{}")
    except read_data.Unreadable as error:
        raise ValueError(f"arguments are a text with a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("arguments are a text with a JSON object")
    return text or "{}"


class CalledFunction(_ToolField):
    """A call that the assistant made: a name, and arguments as JSON text."""

    name: str = Field(pattern=NAMED)
    arguments: Annotated[str, BeforeValidator(_arguments)]


class PastCall(_ToolField):
    """A call in the history."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, as_text: bool) -> dict[str, Any]:
        """In the form that chat templates read: arguments as an object, or as text where a template wants that."""
        given = self.function.arguments
        told = {"name": self.function.name, "arguments": given if as_text else read_data.json_value(given)}
        return {"id": self.id, "type": "function", "function": told}


class ToolRequest(_ToolField):
    """The fields of a request about tools. They are offered unless `tool_choice` is none."""

    tools: list[ToolSpec] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
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
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else [t.plain() for t in self.tools]


def given_fields(message: Any) -> Any:
    """A message without its empty fields; clients send back what they received, `refusal: null` included. One with
    calls may have no content."""
    if not isinstance(message, Mapping):
        return message
    given = {k: v for k, v in message.items() if v is not None}
    if given.get("role") == "assistant" and given.get("tool_calls") and "content" not in given:
        given["content"] = ""
    return given


def past_calls(calls: Sequence[PastCall], as_text: bool) -> list[dict[str, Any]]:
    return [c.plain(as_text) for c in calls]
