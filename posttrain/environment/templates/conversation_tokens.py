"""A conversation as tokens: what the chat template writes for it, and how much each token counts.

The template writes the whole conversation, and it is cut where the policy would speak. The text before a learned turn
must be the prompt that a rollout of that turn gets, with the generation prompt at its end. The turn ends with the first
stop token behind it. Each part is encoded by itself, as in a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.content import text_of
from posttrain.core.conversation import LearnedConversation
from posttrain.core.types import Message
from posttrain.environment.templates.rendering_differences import common, continued, differs, opening, squeezed
from posttrain.environment.templates.tool_call_messages import called, plain_call
from posttrain.system.errors import DataError
from posttrain.verifier.calling.parse import ToolCall, parse

if TYPE_CHECKING:
    from posttrain.environment.templates.chat_template import Chat, Tools
    from posttrain.environment.templates.renderer import Renderer

Weighed = tuple[np.ndarray, np.ndarray]
"""(ids int32 [T], the weight of each as a target, float64 [T]). Weight 0 is seen and not learned."""
OTHER: Mapping[str, Any] = {"other": "argument"}
"""Arguments that replace those of a call. Where the text changes, the arguments stand."""


@dataclass(frozen=True)
class WrittenTurn:
    """A learned turn, as the template writes it."""

    before: str
    """The whole text before it."""
    said: str
    """The text of the turn, without its stop token."""
    stop: str
    """The stop token behind it; '' where the template writes none."""

    @property
    def end(self) -> int:
        return len(self.before) + len(self.said) + len(self.stop)


def weighed(render: Renderer, c: LearnedConversation, tools: Tools, arguments: bool) -> list[Weighed]:
    """The tokens of a conversation, as one sequence or several.

    With `model.history=rewrite` there is one more sequence for each turn that the template writes in another way once
    other messages follow.

    Args:
        arguments: whether the arguments of tool calls are learned.

    Raises:
        DataError: there is nothing to learn; the template loses text, rewrites earlier turns, or marks no end.
    """
    if isinstance(c.messages, str):
        return [_text(render, c.messages, c.weights[0])]
    chat, messages = render.template, [_readable(render.template, m) for m in c.messages]
    if not c.learned:
        raise DataError("no message of the assistant counts: give one a weight above 0, or leave the row out")
    # Messages behind the last learned one are left out. They are not learned, but could make a template rewrite turns.
    whole = chat.render(messages[: c.learned[-1] + 1], generate=False, tools=tools)
    together: list[tuple[int, WrittenTurn]] = []
    apart: list[tuple[int, WrittenTurn]] = []
    for i in c.learned:
        before = chat.render(messages[:i], generate=True, tools=tools)
        written = _written(chat, whole, before, messages[i], i == c.learned[-1])
        if isinstance(written, WrittenTurn):
            # A turn whose prompt is a beginning of `whole` is part of the one sequence. Any other is a sequence
            # of its own.
            (together if whole.startswith(written.before) else apart).append((i, written))
            continue
        alone = written
        # The template writes this turn in another way once messages follow. Rendered as the last turn, it has the form
        # that a rollout has.
        if render.history == "rewrite" and i != c.learned[-1]:
            whole_until = chat.render(messages[: i + 1], generate=False, tools=tools)
            alone = _written(chat, whole_until, before, messages[i], True)
        if isinstance(alone, str):
            raise DataError(f"message {i + 1}: {alone}")
        apart.append((i, alone))
    weights = lambda i, turn, ids: _weights(render, messages[: i + 1], turn, ids, c.weights[i], tools, arguments)  # noqa: E731
    sequences = [_sequence(render, whole, together, weights)] if together else []
    return [*sequences, *(_sequence(render, t.before, [(i, t)], weights) for i, t in apart)]


def _text(render: Renderer, text: str, weight: float) -> Weighed:
    """A text that is learned whole, except the tokens that the tokenizer puts before it, or else its first token."""
    ids = render.text_ids(text).tolist()
    ids += () if ids and ids[-1] in render.stop_ids else render.stop_ids[:1]
    weight_T = np.full(len(ids), weight)
    # The first token has no position before it that could predict it.
    weight_T[: max(1, len(render.leading))] = 0.0
    if not weight_T.any():
        raise DataError(f"the text {text!r:.40} has no token to learn after its first one: leave the row out")
    return np.array(ids, np.int32), weight_T


def _readable(chat: Chat, message: Message) -> Message:
    """The message with its calls in the form that the template reads."""
    if "tool_calls" not in message:
        return message
    return called(chat, text_of(message["content"]), [plain_call(c) for c in message["tool_calls"]])


def _written(chat: Chat, whole: str, before: str, message: Message, last: bool) -> WrittenTurn | str:
    """The turn behind `before` in `whole`, the rendered conversation; or the reason why it cannot be learned there.
    `last`: whether `message` is the last one in it."""
    if not whole.startswith(before):
        if not last:
            return f"{differs(before, whole)}. Or learn the last turn alone: turns=last"
        if opened := opening(before):  # the turn goes on behind a thought
            return WrittenTurn(before, continued(chat, text_of(message["content"]), opened), "")
        return (
            f"the chat template's generation prompt ends with {before[-30:]!r}, and it begins no turn so (it wrote"
            f" ...{whole[-60:]!r}): turns=last learns the completion as it is given, behind that prompt"
        )
    # The turn ends at the first stop token behind `before`. Without one, only the last turn ends, with the text.
    body = whole[len(before) :]
    at, stop = min(((body.find(s), s) for s in chat.stops if s in body), default=(len(body), ""))
    if not stop and not last:
        return "the chat template ends no turn with a stop token, so it is not known where a turn ends: set turns=last"
    turn, content = WrittenTurn(before, body[:at], stop), text_of(message["content"])
    if squeezed(content) not in squeezed(turn.said):
        return (
            f"the chat template writes the turn {content!r:.60} as {turn.said!r:.60}, so text of it is lost. Set"
            " model.history=rewrite where it is lost only once messages follow; turns=last learns the completion as"
            " it is given"
        )
    calls = [ToolCall(c["name"], c["arguments"]) for c in map(plain_call, message.get("tool_calls", ()))]
    if calls and (chat.format is None or parse(turn.said, chat.format).calls != tuple(calls)):
        return (
            f"the chat template writes a turn with tool calls as {turn.said!r:.120}, in which its calls are not found"
            " again: write the calls into the content as the model says them"
        )
    return turn


def _sequence(render: Renderer, whole: str, turns: Sequence[tuple[int, WrittenTurn]], weights: Any) -> Weighed:
    """The ids and weights of a text with learned turns. Each turn, and the text before it, is encoded by itself."""
    ids: list[np.ndarray] = []
    weight: list[np.ndarray] = []
    at = 0
    for i, turn in turns:
        # Encoded apart, as in a rollout: no token may contain the end of the seen text and the start of the turn.
        seen_ids = render.encode(whole[at : len(turn.before)])
        said_ids = render.completion_ids(turn.said, chat=True)
        # The stop token that the template wrote here replaces the usual one.
        end = render.encode(turn.stop)
        said_ids = np.array([*said_ids[: len(said_ids) - len(end)], *end], np.int32)
        ids += [seen_ids, said_ids]
        weight += [np.zeros(len(seen_ids)), weights(i, turn, said_ids)]
        at = turn.end
    return np.concatenate(ids).astype(np.int32), np.concatenate(weight)


def _weights(
    render: Renderer,
    messages: Sequence[Message],
    turn: WrittenTurn,
    ids: np.ndarray,
    weight: float,
    tools: Tools,
    arguments: bool,
) -> np.ndarray:
    """float64 [T]: the weight of each token of a turn, which is the last of `messages`. Without `arguments` the tokens
    of its calls' arguments have the weight 0."""
    weight_T = np.full(len(ids), weight)
    if arguments or "tool_calls" not in messages[-1]:
        return weight_T
    spans = list(_argument_spans(render.template, messages, turn, tools))
    for t, (start, end) in enumerate(render.offsets(turn.said)[: len(ids)]):
        # A token that overlaps with arguments only in part has the weight 0 too.
        if any(start < b and end > a for a, b in spans):
            weight_T[t] = 0.0
    return weight_T


def _argument_spans(chat: Chat, messages: Sequence[Message], turn: WrittenTurn, tools: Tools) -> list[tuple[int, int]]:
    """The spans (begin, end) of the arguments of each call in a turn, in characters of `turn.said`: where the text
    changes when the turn is rendered again with other arguments."""
    *before, last = messages
    calls = [plain_call(c) for c in last.get("tool_calls", ())]
    text = text_of(last["content"])
    rendered = _turn_text(chat, [*before, last], turn, tools)
    spans: list[tuple[int, int]] = []
    for i, call in enumerate(calls):
        changed = called(chat, text, [*calls[:i], {**call, "arguments": OTHER}, *calls[i + 1 :]])
        rendered_changed = _turn_text(chat, [*before, changed], turn, tools)
        # Where characters repeat, the longest common beginning and end could overlap, so the end is limited.
        start = len(common(rendered, rendered_changed))
        shorter = min(len(rendered), len(rendered_changed)) - start
        end = min(len(common(rendered[::-1], rendered_changed[::-1])), shorter)
        spans.append((start, len(rendered) - end))
    # The learned text may begin later than the rendered turn, so the spans are moved by the difference.
    shift = len(rendered) - len(turn.said)
    if not rendered.endswith(turn.said):
        raise DataError("the chat template writes this turn otherwise where it is the last: set tool_arguments=true")
    return [(a - shift, b - shift) for a, b in spans]


def _turn_text(chat: Chat, messages: Sequence[Message], turn: WrittenTurn, tools: Tools) -> str:
    """The last turn of `messages` as the template writes it, without the stop token."""
    body = chat.render(messages, generate=False, tools=tools)[len(turn.before) :]
    return body[: min((body.find(s) for s in chat.stops if s in body), default=len(body))]
