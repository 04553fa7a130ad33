"""The model client of an environment of `verifiers`: it shows new messages to the policy, and returns its turn."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from posttrain.core.content import content_of
from posttrain.core.ports import Talk, Utterance
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Message, Stop
from posttrain.system.errors import DataError
from posttrain.verifier.calling.parse import Malformed, Parsed, ToolCall, parse
from posttrain.verifier.timed_calls import TimedOut, call

MODEL = "policy"
_asking: ContextVar[PolicyClient] = ContextVar("asking")
"""The client of the episode that the package's loop is running."""


class PolicyClient:
    """The policy as the model of one episode.

    Every request contains the whole conversation and must continue what was shown and said before; only its new
    messages are shown. A turn that was cut off ends the episode, as in all environments here.
    """

    def __init__(self, talk: Talk, task: str, limits: EpisodeLimits = EpisodeLimits()) -> None:
        self._talk, self._task, self._limits = talk, task, limits
        self._known: list[Message] = []
        """The conversation so far, in the package's messages."""
        self._refused: dict[str, str] = {}
        """Ids of calls that reached no tool -> the text that the policy is shown instead of the tool's answer."""
        self._names: dict[str, str] = {}
        """Ids of the other calls -> the name of the tool."""
        self._turns = 0
        self._last: Stop | None = None
        self.timeouts = 0
        """The number of tool calls that timed out."""
        self.state: Any = None
        """The package's state of the episode, as the last request had it."""

    def client(self) -> Any:
        """A client object for the package's loop, which is about to begin in this asyncio task."""
        _asking.set(self)
        return _client_class()(self)

    async def answer(self, prompt: Sequence[Any], tools: Sequence[Any], state: Any, most: int | None) -> Any:
        """One turn, as a `Response`."""
        self.state = state
        # The package's loop would go on after a turn that was cut off. Here such a turn ends the episode.
        if self._last is not None and not self._last.finished:
            raise self._end_of_loop(f"the turn before ended with {self._last.value}")
        if self.timeouts >= self._limits.tool_timeouts:
            raise self._end_of_loop(f"{self.timeouts} calls of tools ran out of time")
        new = self._new([from_package(m) for m in prompt])
        schemas = [_schema(t) for t in tools]
        if schemas and self._talk.format is None:
            raise DataError(
                f"task {self._task!r}: the environment has tools, and this model's chat template writes no tool calls"
                " that are read here. Use a model whose template does (docs/guides/templates.md)"
            )
        # Tools belong to the prompt, so they are shown with the first request only.
        self._talk.see([self._as_shown(m) for m in new], schemas if not self._turns else ())
        turn = await self._talk.say(most)
        self._last = turn.stop
        if not turn.tokens and not turn.stop.finished:
            raise self._end_of_loop(f"no turn was left: {turn.stop.value}")
        return self._response(turn, {t["function"]["name"] for t in schemas})

    def stop(self, state: Mapping[str, Any]) -> Stop:
        """The stop reason of the episode."""
        if self._last is not None and not self._last.finished:
            return self._last
        # An error is one of a tool here: `Verifiers.play` raises any other.
        if state.get("error") is not None or self.timeouts >= self._limits.tool_timeouts:
            return Stop.TOOLS
        if state.get("stop_condition") == "timeout_reached":
            return Stop.TIME
        # With one turn every answer reaches the limit, and its own stop reason says more.
        if state.get("stop_condition") == "max_turns_reached" and self._turns > 1:
            return Stop.TURNS
        return self._last or Stop.ERROR

    def _new(self, prompt: list[Message]) -> list[Message]:
        """The new messages of the conversation. DataError if it does not continue what was shown and said."""
        n = len(self._known)
        if prompt[:n] != self._known:
            at = next((i for i in range(n) if i >= len(prompt) or prompt[i] != self._known[i]), n)
            raise DataError(
                f"task {self._task!r}: the environment asks with another history than the policy saw (message {at + 1}"
                f" of {n}), so its turns are no one sequence. Environments that rewrite their conversation"
                " (get_prompt_messages) cannot be trained on here"
            )
        if n and len(prompt) == n:
            raise DataError(f"task {self._task!r}: the environment asks for another turn without showing anything new")
        self._known = prompt
        return prompt[n:]

    def _as_shown(self, message: Message) -> Message:
        """A new message as the policy is shown it: a tool's answer gets the tool's name. For a call that reached no
        tool, the reason replaces the answer."""
        if message["role"] != "tool":
            return message
        call_id = message.get("tool_call_id", "")
        content = self._refused.get(call_id, message["content"])
        return Message(role="tool", content=content, tool_call_id=call_id, name=self._names.get(call_id, "tool"))

    def _response(self, said: Utterance, tools: set[str]) -> Any:
        """The policy's turn as the package's `Response`, with its tool calls parsed."""
        types: Any = importlib.import_module("verifiers.types")
        parts = parse(said.opened + said.text, self._talk.format or "hermes") if tools else Parsed("", said.text, ())
        calls = [self._call(i, c, tools, types) for i, c in enumerate(parts.calls)] if said.stop.finished else []
        message: dict[str, Any] = {"content": parts.content, "tool_calls": calls or None}
        message["reasoning_content"] = parts.reasoning or None
        self._turns += 1
        # Through the package's own type, as the next request brings it: a field that the type drops would differ.
        self._known = [*self._known, from_package(types.AssistantMessage(**message))]
        reason = "tool_calls" if calls else "stop" if said.stop.finished else "length"
        n = said.tokens
        usage = types.Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=n, total_tokens=n)
        whole = types.ResponseMessage(**message, finish_reason=reason, is_truncated=not said.stop.finished, tokens=None)
        return types.Response(id=f"turn{self._turns}", created=0, model=MODEL, usage=usage, message=whole)

    def _call(self, number: int, parsed: ToolCall | Malformed, tools: set[str], types: Any) -> Any:
        """A call in the package's form. One that cannot be made gets arguments that no tool accepts: the package
        answers it with an error, which `_as_shown` replaces by the reason."""
        call_id = f"{self._turns:04}{number:05}"  # 9 characters, as Mistral's templates want
        why = ""
        if isinstance(parsed, Malformed):
            why = f"this call could not be read: {parsed.why}"
        elif parsed.name not in tools:
            why = f"there is no tool {parsed.name!r}; there are: {', '.join(sorted(tools))}"
        if why:
            self._refused[call_id] = why
            # These arguments are no JSON, so the package answers them with an error, whatever the tool is.
            return types.ToolCall(id=call_id, name="none", arguments=f"refused: {why}")
        assert isinstance(parsed, ToolCall)
        self._names[call_id] = parsed.name
        return types.ToolCall(id=call_id, name=parsed.name, arguments=json.dumps(dict(parsed.arguments)))

    def _end_of_loop(self, why: str) -> Exception:
        """The exception that ends the package's loop without an error."""
        return importlib.import_module("verifiers.errors").OverlongPromptError(why)


class ToolTimeout(Exception):
    """A call took too long. The package shows the message to the policy."""


def bounded(tool: Callable[..., Any], name: str, seconds: float) -> Callable[..., Any]:
    """The tool with a timeout. A synchronous tool runs in a thread, so that it does not block other episodes."""

    @functools.wraps(tool, updated=())
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return await call(tool, seconds, *args, **kwargs)
        except TimedOut:
            # Tools are wrapped once for all episodes. The context variable has the client of the episode that called.
            _asking.get().timeouts += 1
            raise ToolTimeout(f"error: {name} took longer than {seconds:g} s and was stopped") from None

    return run


@functools.cache
def _client_class() -> Any:
    """A subclass of the package's model client that asks our policy."""
    base: Any = importlib.import_module("verifiers.clients").Client

    class Client(base):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Any:
            """A request of the package's loop. Limits that the environment sets itself narrow those of the run."""
            most = sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens")
            return await self._client.answer(prompt, tools or [], more.get("state"), most)

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, *args: Any, **more: Any) -> Any:
            return await self.get_response(*args, **more)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return Client


def from_package(message: Any) -> Message:
    """One of the package's messages in our form. DataError if its content is not text."""
    data = dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    converted = Message(role=data["role"], content=content_of(data.get("content") or ""))
    if data.get("reasoning_content"):
        converted["reasoning_content"] = data["reasoning_content"]
    if data.get("tool_call_id"):
        converted["tool_call_id"] = data["tool_call_id"]
    if data.get("tool_calls"):
        converted["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in data["tool_calls"]
        ]
    return converted


def _schema(tool: Any) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
