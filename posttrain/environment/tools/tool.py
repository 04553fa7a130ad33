"""A tool is a method. Its signature gives the schema that the policy gets and the check of the policy's arguments.

    class Clock(Toolbox):
        @tool
        def wait(self, minutes: Annotated[int, "how long"] = 1) -> str:
            "Waits, and says what time it is then."

A tool that cannot do what was asked raises `ToolError`, and the policy is shown its text. Any other exception is an
error of the environment.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from posttrain.core.redact_secrets import scrubbed
from posttrain.core.stop import EpisodeLimits
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.calling import Malformed, ToolCall

Kind = Literal["ok", "refused", "timeout", "unknown", "arguments", "malformed"]
"""How a call ended. `unknown`: there is no such tool; `arguments`: they do not fit its signature; `malformed`: the
policy's text could not be read as a call."""
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """The tool refuses a call. The policy is shown the text, and the episode continues."""


class OutOfTime(Exception):
    """A tool that measures its own time (`own_clock`) raises this if a call took too long, with a text to show."""

    def __init__(self, seconds: float, text: str = "") -> None:
        super().__init__(text)
        self.seconds = seconds


_clock: ContextVar[tuple[asyncio.Timeout, float] | None] = ContextVar("clock", default=None)
"""The clock of the running call, and the seconds that the call may take."""


def own_clock() -> float:
    """Seconds that the running call may take. From here on the call has no timeout.

    The tool measures its time itself and must raise `OutOfTime`. This is for tools that can tell their own work from
    waiting for others. Call it before the tool waits for anything.
    """
    if (running := _clock.get()) is None:
        return EpisodeLimits().tool_seconds
    clock, seconds = running
    clock.reschedule(None)
    return seconds


def tool(function: F) -> F:
    """Mark a method of a `Toolbox` as a tool. It must be `async def` if it waits for anything, and quick otherwise."""
    function.is_tool = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Tool:
    """One tool of one episode."""

    name: str
    description: str
    arguments: type[BaseModel]
    run: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates take: a function with a JSON schema of its arguments."""
        parameters = _without_titles(self.arguments.model_json_schema())
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}


@dataclass(frozen=True)
class Observation:
    """The result of a call."""

    name: str
    """Name of the tool; '' if the call names none."""
    text: str
    kind: Kind
    seconds: float = 0.0


class Toolbox:
    """One episode's tools and their state. Use it with `async with`, so that `close` runs however the episode ends."""

    @functools.cached_property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by name, in the order of their definition."""
        # Base classes come first, so that a subclass adds its tools behind theirs. `getattr` below finds the overriding
        # method.
        members = [item for cls in reversed(type(self).__mro__) for item in vars(cls).items()]
        names = [name for name, f in members if getattr(f, "is_tool", False)]
        return {name: _tool(name, getattr(self, name)) for name in dict.fromkeys(names)}

    def state(self) -> Any:
        """The current state as plain data. A verifier of the final state reads it."""
        return None

    async def open(self) -> None:
        """Acquire what the tools need, waiting if necessary, before the first call. `close` runs even if this fails."""

    async def close(self) -> None:
        """Release what the tools hold."""

    async def __aenter__(self) -> Toolbox:
        try:
            await self.open()
        except BaseException:  # a cancelled episode too
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(t.schema for t in self.tools.values())

    async def call(self, call: ToolCall | Malformed, limits: EpisodeLimits) -> Observation:
        """The result of a call. It does not raise, whatever the policy wrote."""
        begun, name = time.monotonic(), "" if isinstance(call, Malformed) else call.name
        text, kind = await _answered(self.tools, call, limits.tool_seconds)
        # The text goes into a prompt and into the record, so known secrets are removed. This comes before the text is
        # shortened, which could cut a secret in half. Errors are shortened too: they quote what the policy wrote.
        return Observation(name, _shortened(scrubbed(text), limits.observation), kind, time.monotonic() - begun)


class Toolboxes(Toolbox):
    """Several toolboxes as one. The state maps the name of each class, in lower case, to its state.

    Raises ConfigError if two of them have a tool of the same name.
    """

    def __init__(self, boxes: Sequence[Toolbox]) -> None:
        self._boxes = tuple(boxes)
        names = [name for box in self._boxes for name in box.tools]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"two tools are called {twice[0]!r}: leave one of them out")

    @functools.cached_property
    def tools(self) -> Mapping[str, Tool]:
        return {name: t for box in self._boxes for name, t in box.tools.items()}

    def state(self) -> Any:
        return {type(box).__name__.lower(): box.state() for box in self._boxes}

    async def open(self) -> None:
        for box in self._boxes:
            await box.open()

    async def close(self) -> None:
        """Close all of them, even if one raises."""
        results = await asyncio.gather(*(box.close() for box in self._boxes), return_exceptions=True)
        if error := next((e for e in results if isinstance(e, BaseException)), None):
            raise error


@dataclass
class CallCounts:
    """Counts of the results of all episodes' calls, and their seconds, since they were last read."""

    kinds: dict[str, int] = field(default_factory=dict[str, int])
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By tool: the seconds of all calls that reached it, and their number."""
    tried: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """By tool: the calls that reached it and got no result, and all that reached it."""

    def add(self, seen: Observation) -> None:
        self.kinds[seen.kind] = self.kinds.get(seen.kind, 0) + 1
        if seen.kind in ("ok", "refused", "timeout"):  # any other call reached no tool
            entry = self.seconds.setdefault(seen.name, [0.0, 0])
            entry[0] += seen.seconds
            entry[1] += 1
            tried = self.tried.setdefault(seen.name, [0, 0])
            tried[0] += seen.kind != "ok"
            tried[1] += 1


async def _answered(tools: Mapping[str, Tool], call: ToolCall | Malformed, seconds: float) -> tuple[str, Kind]:
    """(text, kind) of the result of a call."""
    if isinstance(call, Malformed):
        return f"error: this is no call: {call.why}", "malformed"
    if (chosen := tools.get(call.name)) is None:
        return f"error: no tool {call.name!r}: {nearest(call.name, tools)}", "unknown"
    try:
        arguments = chosen.arguments.model_validate(dict(call.arguments))
    except ValidationError as error:
        return f"error: {_wrong(error)}", "arguments"
    return await _run(chosen, arguments, seconds)


async def _run(chosen: Tool, arguments: BaseModel, seconds: float) -> tuple[str, Kind]:
    """(text, kind) of the result of a call with checked arguments."""
    values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
    # The clock is a context variable, because calls of other episodes run at the same time and have other clocks.
    outer_clock = _clock.set(None)
    try:
        async with asyncio.timeout(seconds) as clock:
            _clock.set((clock, seconds))
            returned = chosen.run(**values)
            return _text(await returned if inspect.isawaitable(returned) else returned), "ok"
    except ToolError as error:
        return f"error: {error}", "refused"
    except OutOfTime as error:
        note = f"; {error}" if str(error) else ""
        return f"error: {chosen.name} took longer than {error.seconds:g} s and was stopped{note}", "timeout"
    except TimeoutError:
        # A TimeoutError that the tool itself raised is an error of the environment.
        if not clock.expired():
            raise
        return f"error: {chosen.name} took longer than {seconds:g} s and was stopped", "timeout"
    finally:
        _clock.reset(outer_clock)


def _tool(name: str, method: Callable[..., Any]) -> Tool:
    """The tool of a method. ConfigError if it has no docstring, or if its signature lacks the type of an argument."""
    where = f"tool {name!r} of {type(method.__self__).__name__}"  # type: ignore[attr-defined]
    description = inspect.cleandoc(method.__doc__ or "")
    if not description:
        raise ConfigError(f"{where} has no docstring: the policy is told what it says")
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        unnamed = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        if parameter.kind in unnamed or parameter.name not in hints:
            raise ConfigError(f"{where}: parameter {parameter.name!r} needs a type, and to be given by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (_described(hints[parameter.name]), default)
    # Strict: "3" is no number. A conversion would teach the policy that types do not matter.
    arguments = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    return Tool(name, description, arguments, method)


def _described(hint: Any) -> Any:
    """The type in pydantic's form: `Annotated[int, "how many"]` gets a `Field` with that description."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *notes = get_args(hint)
    return Annotated[(kind, *(Field(description=n) if isinstance(n, str) else n for n in notes))]


def _wrong(error: ValidationError) -> str:
    """The first three problems with their places, in one line."""
    errors = error.errors(include_url=False, include_input=False)
    lines = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in errors]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _without_titles(schema: Any) -> Any:
    """The schema without the titles that pydantic adds at every level. They only repeat the names."""
    if isinstance(schema, dict):
        return {
            # Under `properties` the keys are arguments' names, and one of them may be called title.
            k: {n: _without_titles(s) for n, s in v.items()} if k == "properties" else _without_titles(v)
            for k, v in schema.items()
            if k != "title"
        }
    return [_without_titles(x) for x in schema] if isinstance(schema, list) else schema


def _text(value: Any) -> str:
    """The value that a tool returned, as text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str, most: int) -> str:
    """The text; if it is longer than `most` characters, its beginning and its end."""
    if len(text) <= most:
        return text
    note = " ...({} characters left out)... "
    kept = most - len(note.format(len(text)))
    if kept <= 0:
        return text[:most]
    # Two thirds from the beginning, one third from the end, where errors and totals often stand.
    head = kept * 2 // 3
    return text[:head] + note.format(len(text) - kept) + text[len(text) - (kept - head) :]
