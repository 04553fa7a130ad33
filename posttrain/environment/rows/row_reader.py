"""Single rows of the user's data, read strictly (`row_of`), and where they are (`source_rows`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from posttrain.core.content import content_of, mapped, shown, text_of
from posttrain.core.conversation import LearnedConversation
from posttrain.core.judgements import Kind
from posttrain.core.types import Message, Task
from posttrain.environment.rows.columns import Columns
from posttrain.environment.templates.tool_call_messages import MARK, kept
from posttrain.system.errors import ConfigError, DataError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that chat templates accept."""

BESIDE: Mapping[str, tuple[str, ...]] = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}
"""Fields that a message may have beside role and content, by its role: calls of tools, or the call that it answers."""

CONVERSATIONS = "conversations"
"""The column of messages in data of the form ShareGPT."""
SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of speakers (its field `from`) -> roles. `ROLES` may stand there too."""

Place = str
"""The place of a row in the data, for error messages: `file:line`, or `name row n`."""


@dataclass(frozen=True)
class JudgedRow:
    """The judged completions of a row, and what the row says of them."""

    kind: Kind
    completions: tuple[str, ...]
    """One completion, or several; or the steps of one."""
    values: tuple[float, ...] = ()
    """How good each completion is; higher is better. Without numbers in the data only their order has a meaning."""
    scored: bool = False
    """True if `values` are numbers of the data."""
    margin: float | None = None
    weight: float = 1.0
    ratings: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: tuple[int, ...] = ()
    """Label of each step: 1 right, 0 neutral, -1 wrong."""
    chances: tuple[float, ...] = ()
    """Chance of a right answer after each step, where steps were judged; empty where the data has none."""
    zero_is_neutral: bool = False
    """Whether the form of the data says that a label 0 is neutral."""


@dataclass(frozen=True)
class PromptRow:
    """One checked row of the user's data. `key` is the digest of its prompt."""

    task: Task
    completion: str | None
    key: str
    place: Place = "a row"
    judged: JudgedRow | None = None
    conversation: LearnedConversation | None = None
    """The conversation that the row says to learn, where its prompt is messages, or the row is a text."""


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """Puts the place of the row in front of the message of an error that is raised inside."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{place}: {error}") from error


def digest(prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """16 hex digits that depend only on the prompt and the tools that it offers. Equal prompts have equal digests."""
    text = prompt if isinstance(prompt, str) else ""
    if not isinstance(prompt, str):
        text = json.dumps([[m["role"], shown(m["content"]), *m.get("tool_calls", ())] for m in prompt])
    text += json.dumps(list(tools), sort_keys=True) if tools else ""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def row_of(data: Mapping[str, Any], c: Columns) -> PromptRow:
    """One row of data, checked. What was judged in it is read by `judged_rows.read_row`."""
    column = _prompt_column(data, c)
    # A row may have several of these columns. A prompt is read before messages, and both are read before a text.
    if column is None and isinstance(text := data.get(c.text_column), str) and text.strip():
        text = without_halves(c.text_column, text)
        conversation = LearnedConversation(text, (1.0,))
        return PromptRow(task_of(data, c, "", {c.text_column}), text, digest(text), conversation=conversation)
    prompt_value = data.get(column) if column is not None else None
    weights = weights_of(column or "", prompt_value)
    prompt, completion = prompt_of(data, c)
    # A completion is needed as text to imitate, and as messages whose calls a template writes (`turns`).
    turns = () if completion is None else (_last(column or "", prompt_value),)
    if (written := data.get(c.completion_column)) is not None:
        prompt_ending, completion, turns = completion, completion_of(written, c), _messages_of(written, c)
        if prompt_ending not in (None, completion):
            raise DataError(
                f"{column!r} ends with an assistant's message, and {c.completion_column!r} is another text: take the"
                " message out, or put it before the text"
            )
        # If the row has a completion of its own, nothing of the prompt is learned, not even the assistant's messages.
        weights = (*(0.0 for _ in prompt), *weights_of(c.completion_column, written))
        if isinstance(prompt, str) and len(turns) > 1:
            raise DataError(
                f"{c.completion_column!r} is {len(turns)} messages and {column!r} is text: write the prompt as messages"
                ' too, [{"role": "user", "content": ...}]'
            )
    task = task_of(data, c, prompt, {c.completion_column})
    learned = None if isinstance(prompt, str) or not any(weights) else LearnedConversation((*prompt, *turns), weights)
    return PromptRow(task, completion, digest(prompt), conversation=learned)


def _prompt_column(data: Mapping[str, Any], c: Columns) -> str | None:
    """The column that asks something: the prompt's, or that of messages."""
    return next((n for n in (c.prompt_column, c.messages_column, CONVERSATIONS) if data.get(n) is not None), None)


def weights_of(column: str, value: Any) -> tuple[float, ...]:
    """The weight of each message of a list: the assistant's have their field `weight`, else 1, and others 0. A text has
    the weight 1."""
    if not isinstance(value, list):
        return (1.0,)
    return tuple(_weight(f"message {i} of {column!r}", m) for i, m in enumerate(value, 1))


def _weight(where: str, message: Any) -> float:
    """The weight of one message."""
    if not isinstance(message, Mapping):
        return 0.0
    assistant = _role(message) == "assistant"
    weight = message.get("weight")
    if weight is None:
        return float(assistant)
    if not assistant:
        raise DataError(f"{where} has 'weight', and only the assistant's messages are learned: leave it out")
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise DataError(f"{where}: 'weight' is {weight!r:.40}, wanted a number: 0 masks the message, 1 is usual")
    return float(weight)


def _role(message: Mapping[str, Any]) -> Any:
    """The role of a message, or the word that stands in its place; None without one."""
    role = message.get("role", message.get("from"))
    return SPEAKERS.get(role, role) if isinstance(role, str) else role


def _last(column: str, value: Any) -> Message:
    """The last message of a list, checked."""
    return message_of(column, len(value) - 1, value[-1], weighs=True)


def _messages_of(written: Any, c: Columns) -> tuple[Message, ...]:
    """The messages of a completion."""
    if isinstance(written, str):
        return (Message(role="assistant", content=written),)
    return tuple(message_of(c.completion_column, i, m, weighs=True) for i, m in enumerate(written))


def task_of(data: Mapping[str, Any], c: Columns, prompt: str | tuple[Message, ...], read: Set[str]) -> Task:
    """The task of a row with this prompt; its further columns but those in `read` are its info."""
    known = {c.prompt_column, c.messages_column, c.id_column, *read}
    known |= {CONVERSATIONS} if _prompt_column(data, c) == CONVERSATIONS else set[str]()
    # Rewards get the answer under the name `answer`. If another column is the answer, `answer` is a further column.
    info = {k: v for k, v in data.items() if k not in known and k != "answer"}
    if c.answer_column != "answer" and "answer" in data:
        info["answer"] = data["answer"]
    answer = data.get(c.answer_column)
    if answer is not None and not isinstance(answer, str | int | float | bool | list):
        inner_fields = [f"{c.answer_column}.{k}" for k in answer] if isinstance(answer, Mapping) else []
        note = f"; name a field of it: env.args.answer_column={' or '.join(inner_fields[:8])}" if inner_fields else ""
        raise DataError(f"{c.answer_column!r} is {kind_words(answer)}, wanted text, a number or a list{note}")
    for a in answer if isinstance(answer, list) else [answer]:
        if isinstance(a, float) and not math.isfinite(a):
            raise DataError(
                f"{c.answer_column!r} is {a}, which nothing equals; leave the row out, or give it its answer"
            )
    answer = [_whole(a) for a in answer] if isinstance(answer, list) else _whole(answer)
    return Task(id=_id(data, c), prompt=prompt, answer=answer, info=info)


def answer_text(answer: Any) -> str:
    """An answer as a response would give it; of a list of answers the first."""
    return str(answer[0] if isinstance(answer, list) and answer else answer)


def _whole(answer: Any) -> Any:
    """A whole float as an integer; anything else as it is. Tables turn a column of integers with gaps into floats."""
    # From 2**53 on a float may stand for several integers, so it stays as it is.
    return int(answer) if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53 else answer


def _id(data: Mapping[str, Any], c: Columns) -> str:
    """The row's own name; '' if it has none."""
    row_id = data.get(c.id_column)
    if row_id is None:
        return ""
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise DataError(f"{c.id_column!r} is {kind_words(row_id)}, wanted non-empty text or a whole number")
    return without_halves(c.id_column, str(row_id))


def prompt_of(data: Mapping[str, Any], c: Columns) -> tuple[str | tuple[Message, ...], str | None]:
    """(the prompt of a row, the text of the assistant's message behind it or None)."""
    column = _prompt_column(data, c)
    if column is None:
        have = sorted(k for k, v in data.items() if v is not None)
        hint = nearest(c.prompt_column, have) if have else "the row is empty"
        raise DataError(
            f"no column {c.prompt_column!r} (env.args.prompt_column), {c.messages_column!r}, {CONVERSATIONS!r} nor"
            f" {c.text_column!r}: {hint}"
        )
    value = data[column]
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{column!r} is empty")
        return without_halves(column, value), None
    if not isinstance(value, list):
        raise DataError(f"{column!r} is {kind_words(value)}, wanted text or a list of messages")
    messages = [message_of(column, i, m, weighs=True) for i, m in enumerate(value)]
    completion = None
    if messages and messages[-1]["role"] == "assistant":
        completion = said_of(f"the last message of {column!r}", messages.pop())
    if not messages:
        raise DataError(f"{column!r} has no message for the policy to answer")
    return tuple(messages), completion


def message_of(column: str, index: int, value: Any, *, weighs: bool = False) -> Message:
    """A checked message of a row; `index` counts from 0. `weighs`: whether it may have a `weight` (`weights_of`)."""
    where = f"message {index + 1} of {column!r}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {kind_words(value)}, wanted an object with role and content")
    role, body = _role(value), "value" if "from" in value and "role" not in value else "content"
    if not isinstance(role, str):
        raise DataError(f"{where}: 'role' is {kind_words(role)}, wanted text")
    if role not in ROLES:
        known_roles = ROLES if body == "content" else (*ROLES, *SPEAKERS)
        raise DataError(f"{where} has role {role!r}, which chat templates do not know: {nearest(role, known_roles)}")
    known_fields = ("role", "content") if body == "content" else ("from", "value")
    known_fields = (*known_fields, "weight") if weighs else known_fields
    # In a table every row has every field. An empty field counts as absent.
    beside = {k: v for k, v in value.items() if v not in (None, []) and k not in known_fields}
    # A message that only calls tools may have no content.
    body_value = "" if value.get(body) is None and "tool_calls" in beside else value.get(body)
    if not isinstance(body_value, str | list) or body_value == []:
        raise DataError(f"{where}: {body!r} is {kind_words(body_value)}, wanted text or a list of parts")
    further_fields = BESIDE.get(role, ())
    if extra := sorted(beside.keys() - {*further_fields}):
        note = f", and with role {role} {' or '.join(further_fields)}" if further_fields else ""
        raise DataError(f"{where} has {extra[0]!r}; messages are role and content{note}")
    with placed(where):
        content = content_of(body_value)
    message = Message(role=role, content=mapped(content, lambda text: without_halves(column, text)))
    if "tool_calls" in beside:
        message["tool_calls"] = _calls(where, beside["tool_calls"])
    for key in ("name", "tool_call_id"):
        if key in beside:
            if not isinstance(beside[key], str):
                raise DataError(f"{where}: {key!r} is {kind_words(beside[key])}, wanted text")
            message = cast("Message", {**message, key: without_halves(column, beside[key])})
    return message


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as chat templates read them."""
    if not isinstance(calls, list):
        raise DataError(f"{where}: 'tool_calls' is {kind_words(calls)}, wanted a list")
    for call in calls:
        inner = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise DataError(
                f"{where}: a call is {kind_words(call)} without a function's name; write"
                ' {"type": "function", "function": {"name": ..., "arguments": {...}}}'
            )
    return [without_nulls(call) for call in calls]


def without_nulls(value: Any) -> Any:
    """The value without null fields of its objects: in a table every object has the fields of all others, and a
    template would write them. TRL leaves them out too."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def said_of(where: str, message: Message) -> str:
    """The text of a message that is learned from. Calls as objects are kept in it behind `MARK`, for the template."""
    with placed(where):
        content = text_of(message["content"])
        return kept(content, message["tool_calls"]) if "tool_calls" in message else content


def completion_of(value: Any, c: Columns) -> str:
    """The text of a demonstration: the value itself, or the text of its last message, which is the assistant's."""
    name = c.completion_column
    if isinstance(value, str):
        return without_halves(name, value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{name!r} is {kind_words(value)}, wanted text or a list of messages")
    last = _last(name, value)
    if last["role"] != "assistant":
        raise DataError(f"the last message of {name!r} has role {last['role']!r}, and it must be the assistant's")
    return said_of(f"{name!r}", last)


def without_halves(column: str, value: str) -> str:
    """The text itself. DataError if it has half of a surrogate pair, which no tokenizer accepts, or `MARK`, which would
    begin tool calls."""
    if MARK in value:
        raise DataError(f"{column!r} has the character U+FDD1, which Unicode keeps for programs: take it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{column!r} has half of a surrogate pair at character {error.start}, which is no text"
        ) from None
    return value


def kind_words(value: Any) -> str:
    """Returns the kind of a value, in the words of messages."""
    words = {int: "a number", float: "a number", bool: "true or false", type(None): "missing"}
    words |= {str: "text", list: "a list", dict: "an object"}
    return "empty " * (value in ("", [])) + words.get(type(value), type(value).__name__)


def texts_of(prompt: str | Sequence[Message]) -> Iterable[str]:
    """The texts of a prompt."""
    return [prompt] if isinstance(prompt, str) else [shown(m["content"]) for m in prompt]


def source_rows(path: str, split: str) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Rows with their places, from a file, a saved data set or one on the hub."""
    from posttrain.environment.rows import data_files

    file = Path(path)
    try:
        folder, exists = file.is_dir(), file.exists()
    except OSError as error:
        raise DataError(f"env.prompts={path[:200]}: {error.strerror}") from error
    if folder:
        return data_files.saved(path, split)
    if exists:
        return data_files.parquet(file) if file.suffix == ".parquet" else data_files.json_rows(file)
    # A name with at most one slash may be an id of the hub. What looks like a path is not looked up there, so that a
    # misspelt file name does not leave this machine.
    of_file = (".jsonl", ".json", ".parquet", ".ndjson", ".csv", ".tsv", ".xlsx", ".gz", ".zst", ".zip")
    if file.suffix in of_file or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise DataError(f"no such file or folder: {path}")
    return data_files.hub(path, split)
