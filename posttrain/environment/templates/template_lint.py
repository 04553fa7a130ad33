"""Checks, on the conversations of the data, that a chat template writes what it is given.

It has to write every message, and to begin the policy's turn as the prompt ends. A thought that it opens is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from posttrain.core.abilities import LintFinding
from posttrain.core.content import ContentPart, content_of, text_of
from posttrain.core.ports import Environment
from posttrain.core.types import Message, Task
from posttrain.environment.templates.chat_template import SHIELD, WEATHER, Chat, Tools
from posttrain.environment.templates.renderer import Renderer
from posttrain.environment.templates.rendering_differences import SAID, closing, common, squeezed
from posttrain.system.errors import DataError
from posttrain.verifier.thoughts import THOUGHTS

MOST = 16
"""The most conversations that are rendered: one for each order of roles, the longest."""
ASKED = Message(role="user", content="hi")
_THOUGHT = re.compile("|".join(rf"{re.escape(b)}\s*(?:{re.escape(e)}\s*)?\Z" for b, e in THOUGHTS))
"""A thought that is opened, or left empty, at the end of a generation prompt."""


def template_findings(
    render: Renderer, env: Environment, tasks: Sequence[Task], follows: Sequence[str] = (), learns: bool = True
) -> list[LintFinding]:
    """Returns findings about what the chat template does with these tasks and the rows of the data. There are none if
    no prompt is messages.

    Args:
        follows: roles of messages that the environment may show after a turn, besides results of tools.
        learns: whether completions of the data are learned from.

    Raises:
        DataError: the template refuses a prompt.
    """
    rows = env.abilities.rows or ()
    by_roles: dict[Any, Any] = {}
    # One conversation for each order of roles. The longest come last, so each replaces shorter ones of its order.
    for task in sorted([*tasks, *(r.task for r in rows)], key=lambda t: len(str(t.prompt))):
        if not isinstance(task.prompt, str):
            by_roles[tuple((m["role"], len(m.get("tool_calls") or ())) for m in task.prompt)] = task
    chats, chat = list(by_roles.values())[:MOST], render.template
    if not chats:
        return []
    tools = env.abilities.tools is not None or any(t.tools for t in chats)
    lost = [f"{m} of task {t.id!r}" for t in chats for m in left_out(chat, t.prompt, t.tools)]
    lost += [m for role in (*follows, *(["tool"] if tools else [])) for m in _lost_after_a_turn(chat, role)]
    difference = _begins_otherwise(chat)
    demonstrations = [(r.task, r.completion) for r in rows if learns and r.completion is not None]
    judged_rows = [r for r in rows if learns and r.judged is not None and r.judged.kind != "steps"]
    messages_seen = f"the chat template leaves out {lost[0]}" if lost else "the chat template writes every message"
    message_advice = "the policy never sees it: correct the template, or write it into another message"
    prompt_seen = difference or "the prompt ends where the policy's turn begins"
    prompt_advice = "let the template begin an assistant's turn where add_generation_prompt is set"
    return [
        LintFinding("template: messages", messages_seen, warns=bool(lost), advice=message_advice),
        LintFinding("template: generation prompt", prompt_seen, warns=bool(difference), advice=prompt_advice),
        *_opened(
            render, chats, [*demonstrations, *((r.task, text) for r in judged_rows for text in r.judged.completions)]
        ),
    ]


def left_out(chat: Chat, messages: Sequence[Message], tools: Tools = ()) -> list[str]:
    """Descriptions of the messages whose content, or whose calls of tools, the template does not write. White space,
    thoughts of the assistant and text beside its calls do not count. DataError if it refuses the messages."""
    # A mark at the end of each message, so that a short one is not found by chance.
    tried = [_marked(m, f" zq{i}x") for i, m in enumerate(messages)]
    try:
        written = chat.render(tried, generate=True, tools=tools)
    except DataError:
        # Some templates check the contents, and refuse the marks.
        tried = list(messages)
        written = chat.render(tried, generate=True, tools=tools)
    text = squeezed(written.replace(SHIELD, ""))
    return [
        f"the {m['role']} message {_words(m)[-1][:60]!r} ({i} of {len(messages)})"
        for i, (m, marked) in enumerate(zip(messages, tried, strict=True), 1)
        # Templates write some contents with `tojson`, so the escaped forms count as written too.
        if not all(any(squeezed(form) in text for form in _forms(w)) for w in _words(marked))
    ]


def _marked(message: Message, mark: str) -> Message:
    """A message with a mark at the end of its content, or of the names of its calls."""
    if calls := message.get("tool_calls"):
        marked_calls = [
            {**c, "function": {**c["function"], "name": c["function"]["name"] + mark.strip()}} for c in calls
        ]
        return cast("Message", {**message, "tool_calls": marked_calls})
    content = content_of(message.get("content") or "")
    with_mark = content + mark if isinstance(content, str) else (*content, ContentPart("text", mark))
    return cast("Message", {**message, "content": with_mark})


def _words(message: Message) -> list[str]:
    """Returns the words of a message that must be written."""
    if calls := message.get("tool_calls"):
        return [c["function"]["name"] for c in calls]
    text = text_of(content_of(message.get("content") or ""))
    for _, end in THOUGHTS if message["role"] == "assistant" else ():
        text = text.rpartition(end)[2]
    return [text.strip()]


def _forms(words: str) -> tuple[str, ...]:
    """These words, and the two forms in which JSON may write them."""
    return words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1]


def _lost_after_a_turn(chat: Chat, role: str) -> list[str]:
    """The messages that the template leaves out if one of this role follows a turn. Empty if it refuses the messages,
    which other checks report."""
    tool_fields = {"name": "probe_tool", "tool_call_id": "call00000"} if role == "tool" else {}
    for arguments in ({"city": "a b"}, '{"city": "a b"}'):
        call = {"id": "call00000", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        turn = {"content": "", "tool_calls": [call]} if tool_fields else {"content": SAID}
        conversation: Any = [ASKED, {"role": "assistant", **turn}, {"role": role, "content": "r0", **tool_fields}]
        try:
            return left_out(chat, conversation, [WEATHER] if tool_fields else [])
        except DataError:
            continue
    return []


def _begins_otherwise(chat: Chat) -> str:
    """The difference between the generation prompt and the beginning of an assistant's turn; '' if there is none."""
    try:
        before, bare = (chat.render([ASKED], generate=generate) for generate in (True, False))
        whole = chat.render([ASKED, Message(role="assistant", content=SAID)], generate=False)
    except DataError:
        return ""
    # The turn is searched behind the beginning that both renderings share.
    whole = whole[: max(0, whole.find(SAID, len(common(bare, whole))))]
    # Many templates open a thought in the prompt and leave it out of past turns, so one at the end does not count.
    prompt = _THOUGHT.sub("", before).rstrip()
    turn_start = _THOUGHT.sub("", whole[len(prompt) :]).strip()
    # The turn has to begin as the prompt ends. A template without a generation prompt (`before == bare`) must write
    # nothing between the prompt and the turn's text.
    if not whole or (whole.startswith(prompt) and (before != bare or not turn_start)):
        return ""
    return (
        f"a prompt ends in {before[-30:]!r}, and the chat template begins an assistant's turn with {whole[-30:]!r},"
        " which the policy would have to say itself"
    )


def _opened(render: Renderer, chats: Sequence[Task], completions: Iterable[tuple[Task, str]]) -> Iterator[LintFinding]:
    """A thought that the template opens, and the completions that have none."""
    opened = next((o for t in chats if (o := render.opening(render.prompt(t.prompt, t.id, t.tools)))), "")
    if not opened:
        return
    begin, end = next((b, e) for b, e in THOUGHTS if b == opened.strip())
    yield LintFinding("template: thought", f"prompts end in {begin}; rewards read the policy's turn with it in front")
    texts = [text for task, text in completions if not isinstance(task.prompt, str)]
    if bare := sum(end not in text for text in texts):
        close, by_template = closing(render.template, opened)
        yield LintFinding(
            "template: completions without a thought",
            f"prompts end in {begin}, and {bare} of {len(texts)} completions have no {end}; they are learned behind an"
            f" empty thought ({opened + close!r}), "
            + ("as the template writes it" if by_template else "while the template writes such a turn without any"),
            warns=True,
            advice=f"to teach thoughts, write completions as THOUGHT{end}ANSWER",
        )
