"""A chat template, rendered turn by turn: the text that it writes between two turns of the policy.

The policy's turn stays as its own tokens. The template gives only the text *after* the turn: its end, the new messages
and the next generation prompt. That can be appended if the template changes nothing before it, which `Chat.proof` tests
with plain turns, reasoning and tool calls. If the test passes, the template never renders the policy's text
(`Chat.between`), so no text of the policy can break the rendering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from posttrain.core.content import content_of, text_of
from posttrain.core.types import Message
from posttrain.environment.encodable_text import Tokenizer
from posttrain.environment.templates import message_parts as parts
from posttrain.environment.templates import template_process
from posttrain.environment.templates.rendering_differences import REWRITES, common, differs, opening, squeezed
from posttrain.system.errors import DataError, PosttrainError
from posttrain.verifier.calling.parse import FORMATS, Parsed, ToolCall, parse

PROBE = "ok"
"""The assistant's turn in probes of what a template writes after a turn."""
MARKS = (
    "ok # one\n\n* two | three <x>four</x> {5} [6] https://a.b/c \\d \"e\" 'f' $g$ `h` --- i: j; (k) ~ @l 100% & m+n=o"
    " ^ p_q ?"
)
"""A turn with many characters at which a template might split it."""
THOUGHT, THOUGHT_ON = "<think>\nwhy\n</think>\n\nok", "why\n</think>\n\nok"
"""A turn with reasoning, as most families write it; the same turn behind a prompt that has the opening tag."""
REASONED = {
    "</think>": THOUGHT,
    "[/THINK]": "[THINK]why[/THINK]ok",
    "<|END_THINKING|>": "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>ok<|END_RESPONSE|>",
    "<|channel|>analysis": "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>ok",
}
"""Text that occurs in a template with support for reasoning -> a turn with reasoning in its form."""
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "Looks something up.", "parameters": _CITY},
}
"""A tool for probing templates."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""


@dataclass(frozen=True)
class TurnEnding:
    """The `text` that a template writes after an assistant's turn, and the `turn` as a message of the history."""

    text: str
    turn: Message


SHIELD = "\ufdd0"
"""A character put inside the name of a special token in a text, so that the name is not encoded as that token. It is a
noncharacter of Unicode, so no text contains it."""


class Chat:
    """One chat template.

    Messages of users, tools and systems are text even if they contain the names of special tokens. Such a name is split
    by `SHIELD`, and `Renderer.encode` splits the text there.

    Args:
        tokenizer: a tokenizer with a chat template.
        stops: texts of the tokens that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        # A token without a text ends no turn that could be found in a text.
        self.stops = tuple(s for s in stops if s)
        # Longer names first: with a shield inside a shorter name, a longer one around it would not be found. A name of
        # one character cannot be split.
        specials = (t for t in getattr(tokenizer, "all_special_tokens", ()) if len(t) > 1)
        self._specials = sorted(specials, key=len, reverse=True)
        source = str(tokenizer.chat_template or "")
        self._reasoned = [said for mark, said in REASONED.items() if mark in source]
        """Turns with reasoning in this template's forms. A template without them treats reasoning as plain text."""

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str:
        """Messages rendered by the template. DataError without one, or if it refuses them; LimitError if it took too
        much time or memory."""
        written = self.readable(messages)
        if not self._tokenizer.chat_template:
            raise DataError(
                "the prompt is a list of messages, but this tokenizer has no chat template: give text prompts, or a"
                " model whose tokenizer has one"
            )
        try:
            return template_process.apply(
                self._tokenizer, [self._shielded(m) for m in written], generate=generate, tools=tools
            )
        except PosttrainError:
            raise
        except Exception as error:  # a template may raise anything it likes
            by_template = isinstance(error, template_process.RefusedError)
            reason = str(error) if by_template else f"{type(error).__name__}: {error}"
            raise DataError(
                f"the chat template refused messages with roles {[m['role'] for m in messages]}: {reason}"
            ) from error

    def readable(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with content in the form that this template reads: parts if it can, else their joined text.
        DataError with the number of a message that has a part that is not text or is malformed."""
        readable_messages = list(messages)
        for i, message in enumerate(messages):
            content = message.get("content")
            if content is None or isinstance(content, str):
                continue
            try:
                several = content_of(content)
                joined = text_of(several)  # also for a template that reads parts, so that each refuses what is no text
            except DataError as error:
                raise DataError(f"message {i + 1}: {error}") from error
            readable_messages[i] = cast("Message", {**message, "content": several if self.reads_parts else joined})
        return readable_messages

    @cached_property
    def reads_parts(self) -> bool:
        """True where the template writes each text of a list of parts (`environment.templates.message_parts`)."""
        return parts.read_by(self._tokenizer)

    def _shielded(self, message: Message) -> Message:
        """A message with `SHIELD` inside the names of special tokens. An assistant's message stays as it is."""
        content = message.get("content")
        # A policy may say special tokens, so an assistant's message stays as it is.
        if message["role"] == "assistant" or content is None or not self._specials:
            return message
        if isinstance(content, str) and not any(s in content for s in self._specials):
            return message
        return cast("Message", {**message, "content": parts.shielded(content, self._specials, SHIELD)})

    def between(self, history: Sequence[Message], new: Sequence[Message], tools: Tools = ()) -> TurnEnding:
        """The text that the template writes after any turn of the assistant if `new` messages follow, with a message in
        place of the turn. DataError if it refuses the messages."""
        before = self.render(history, generate=True, tools=tools)
        problems: list[DataError] = []
        # Some templates refuse results of tools without calls before them. Others accept only one call in a turn, or
        # none. The first number of calls that renders is used. If all fail, the error of the first one is raised,
        # because that number matches the messages.
        for call_count in _call_counts(new):
            try:
                return TurnEnding(
                    self._suffix(history, before, new, call_count, tools),
                    self._turn("" if call_count else PROBE, call_count, new),
                )
            except DataError as error:
                problems.append(error)
        raise problems[0]

    def after(self, history: Sequence[Message], said: str, new: Sequence[Message], tools: Tools = ()) -> TurnEnding:
        """The text that the template writes after the turn `said` if `new` messages follow, and the turn as a message.

        Raises:
            DataError: it refuses the messages, or changes text before or in the turn.
        """
        before = self.render(history, generate=True, tools=tools)
        problems: list[DataError] = []
        for call_count in _call_counts(new):
            turns = [self._turn(said, call_count, new)]
            # A template may take reasoning as part of the text, or only in a field of its own.
            for turn in turns if call_count else [*turns, self._structured(said)]:
                try:
                    text = self._suffix(history, before, new, call_count, tools)
                    whole = self.render([*history, turn, *new], generate=bool(new), tools=tools)
                    self._keeps(before, whole, said, call_count, new)
                    return TurnEnding(text, turn)
                except DataError as error:
                    problems.append(error)
        raise problems[0]

    def rewritten(self, history: Sequence[Message], said: str, new: Sequence[Message], tools: Tools = ()) -> TurnEnding:
        """The whole conversation as the template writes it now, to be used as a new prompt."""
        problems: list[DataError] = []
        turns = [self._turn(said, call_count, new) for call_count in _call_counts(new)]
        for turn in [*turns, self._structured(said)]:
            try:
                return TurnEnding(self.render([*history, turn, *new], generate=True, tools=tools), turn)
            except DataError as error:
                problems.append(error)
        raise problems[0]

    def end(self) -> str:
        """The text that the template writes after an assistant's last turn."""
        history = [Message(role="user", content="hi")]
        before = self.render(history, generate=True)
        # Several turns are tried, for the templates that `_suffix` names.
        for content in (PROBE, THOUGHT, THOUGHT_ON):
            whole = self.render([*history, Message(role="assistant", content=content)], generate=False)
            if (at := whole.find(PROBE, len(common(before, whole)))) >= 0:
                return whole[at + len(PROBE) :]
        raise DataError(f"{REWRITES} (an assistant's turn of {PROBE!r} is written as {whole[-60:]!r})")

    def _suffix(
        self, history: Sequence[Message], before: str, new: Sequence[Message], call_count: int, tools: Tools
    ) -> str:
        """The text after a turn. It is found with a known turn: a probe, or as many calls as `new` answers."""
        if call_count:
            turns = [self._turn(said, call_count, new) for said in ("", *self._reasoned)]
            return self._behind(history, before, turns, new, tools)
        # A known turn is put in the place of the policy's turn. Some templates write one unchanged only if it has
        # reasoning, or only if it continues a thought that the prompt has opened.
        for content in (PROBE, THOUGHT, THOUGHT_ON):
            turn = Message(role="assistant", content=content)
            whole = self.render([*history, turn, *new], generate=bool(new), tools=tools)
            if whole.startswith(before) and (after_prompt := whole[len(before) :].lstrip()).startswith(content):
                return after_prompt[len(content) :]
        return self._behind(history, before, [Message(role="assistant", content=PROBE)], new, tools)

    def _behind(
        self, history: Sequence[Message], before: str, turns: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> str:
        """The text from the end of a turn on, for a template that may write the turn in its own form.

        The turn ends at its last stop token. Of `turns`, the first one is used that is rendered alike with and without
        `new`. Some templates add an empty thought to a last turn without reasoning, so not every turn is.
        """
        first_reason = ""
        for turn in turns:
            alone = self.render([*history, turn], generate=False, tools=tools)
            whole = self.render([*history, turn, *new], generate=bool(new), tools=tools)
            # Searched behind the history, which has stop tokens too. A turn with calls may have several.
            at = max((alone.rfind(s, len(common(before, alone))) for s in self.stops), default=-1)
            # The template changes nothing before the turn, and writes it alike with and without what follows.
            if at >= 0 and whole.startswith(before) and whole.startswith(alone[:at]):
                return whole[at:]
            if at < 0:
                stops = ", ".join(self.stops)
                reason = f"the chat template ends an assistant's turn with none of the stop tokens {stops}"
            else:
                reason = differs(alone[:at], whole) if whole.startswith(before) else differs(before, whole)
            first_reason = first_reason or reason
        raise DataError(first_reason)

    def _keeps(self, before: str, whole: str, said: str, call_count: int, new: Sequence[Message]) -> None:
        """DataError if the template changes the text that the policy saw, or the policy's turn.

        White space in and around the turn may differ. In a turn with calls only the reasoning is compared, because the
        template writes the calls itself.
        """
        if not whole.startswith(before):
            raise DataError(differs(before, whole))
        # Compared without white space, because templates trim turns. The tokens of the turn stay the policy's in any
        # case.
        after_prompt = squeezed(whole[len(before) :])
        reasoning_kept = not self._reasoned or squeezed(self._parsed(said).reasoning) in after_prompt
        if not (reasoning_kept if call_count else after_prompt.startswith(squeezed(said))):
            next_role = new[0]["role"] if new else "nothing"
            raise DataError(
                f"{REWRITES} (a turn that said {said[:60]!r} is written as {whole[len(before) :][:60]!r} once a"
                f" {next_role} message follows)"
            )

    def _turn(self, said: str, call_count: int, new: Sequence[Message]) -> Message:
        """An assistant's turn as a message: its text, or its parsed parts if `new` answers calls. The calls in it are
        placeholders for those that the policy wrote."""
        if not call_count:
            return Message(role="assistant", content=said)
        # Templates may compare the ids of calls with those of results, so the placeholders have the ids of the results.
        # Invented ids have 9 characters, as Mistral's templates want them.
        ids = [m.get("tool_call_id", f"call{i:05}") for i, m in enumerate(m for m in new if m["role"] == "tool")]
        turn = self._structured(said)
        turn["tool_calls"] = [_probe_call(i, self._call_form[1]) for i in ids[:call_count]]
        return turn

    def _parsed(self, said: str) -> Parsed:
        """A turn in its parts, by the template's format of calls. Without a known one only reasoning and content of the
        result are of use, and for these `hermes` stands."""
        return parse(said, self.format or "hermes")

    def _structured(self, said: str) -> Message:
        """A turn with its reasoning in the fields from which templates read it."""
        parsed = self._parsed(said)
        turn = Message(role="assistant", content=parsed.content)
        if parsed.reasoning:
            turn["reasoning_content"] = turn["thinking"] = parsed.reasoning
        return turn

    def proof(self, follow: str, *, turns: int = 3, tools: Tools = ()) -> str:
        """The reason why `follow` messages (user or tool) cannot be appended after a turn; '' if they can. Tested over
        several turns, with plain turns and with reasoning."""
        tools = tools or ([WEATHER] if follow == "tool" else [])
        start = [Message(role="user", content="hi")]
        try:
            # If the prompt opens a thought, every turn has one. Then a plain turn cannot occur, and is not tried.
            opened = opening(self.render(start, generate=True, tools=tools))
            plain = self._canonical(start, tools)
            for said in [THOUGHT_ON] if opened else [plain, plain.replace(PROBE, MARKS), *self._reasoned]:
                history = start
                # Several turns, because some templates rewrite only turns that are not among the last ones.
                for number in range(turns):
                    new = [_answer(follow, number)]
                    ending = self.after(history, said, new, tools)
                    # A second rendering has to be equal, or the template depends on a clock or on chance. And
                    # `between`, which rollouts use and which does not know the turn, has to give the same text.
                    again = self.after(history, said, new, tools)
                    if ending != again or ending.text != self.between(history, new, tools).text:
                        return (
                            "the chat template writes the same messages in two ways (the time of day?), so nothing can"
                            " be proved about it"
                        )
                    history = [*history, ending.turn, *new]
        except DataError as error:
            return str(error)
        return ""

    def _canonical(self, history: Sequence[Message], tools: Tools) -> str:
        """A plain turn as the template writes it. Some put marks around a turn, and the policy says these marks."""
        before = self.render(history, generate=True, tools=tools)
        alone = self.render([*history, Message(role="assistant", content=PROBE)], generate=False, tools=tools)
        at = max((alone.rfind(s, len(common(before, alone))) for s in self.stops), default=-1)
        turn_text = alone[len(before) : at] if at >= 0 else ""
        return turn_text.strip() if alone.startswith(before) and PROBE in turn_text else PROBE

    @property
    def format(self) -> str | None:
        """The format of `calling.FORMATS` in which this template writes tool calls; None if it has none of them."""
        return self._call_form[0]

    @property
    def arguments_as_text(self) -> bool:
        """True where the template wants the arguments of past calls as JSON text instead of objects."""
        return self.format is not None and isinstance(self._call_form[1], str)

    @cached_property
    def _call_form(self) -> tuple[str | None, Any]:
        """(the format whose parser reads the call that the template wrote, or None; arguments of a call in the form
        that the template accepts: an object, or JSON text)."""
        history = [Message(role="user", content="hi")]
        wanted = (ToolCall("probe_tool", {"city": "a b"}),)
        arguments: Any = None
        for arguments in ({"city": "a b"}, '{"city": "a b"}'):
            turn = Message(role="assistant", content="", tool_calls=[_probe_call("call00000", arguments)])
            try:
                before = self.render(history, generate=True, tools=[WEATHER])
                whole = self.render([*history, turn], generate=False, tools=[WEATHER])
            except DataError:
                continue
            body = whole[len(common(before, whole)) :]
            for name in FORMATS:
                # The format is found by parsing what the template wrote, and not by its source: only the right parser
                # reads the call back.
                if any(parse(text, name).calls == wanted for text in self._without_end(body)):
                    return name, arguments
        return None, arguments

    def _without_end(self, body: str) -> Iterator[str]:
        """The text of a turn up to each of its stop tokens, and then all of it."""
        for stop in self.stops:
            at = body.rfind(stop)
            while at >= 0:
                yield body[:at]
                at = body.rfind(stop, 0, at)
        yield body


def _call_counts(new: Sequence[Message]) -> Iterator[int]:
    """Numbers of calls to try in the turn before these messages: as many as are answered, then one, then none."""
    answered = sum(m["role"] == "tool" for m in new)
    yield from dict.fromkeys((answered, min(answered, 1), 0))


def _probe_call(call_id: str, arguments: Any) -> dict[str, Any]:
    """A call in a turn that the template is tried with."""
    return {"id": call_id, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}


def _answer(role: str, number: int) -> Message:
    """A message of the user, or the result of a tool, for a probe."""
    if role == "tool":
        return Message(role="tool", content=f"r{number}", name="probe_tool", tool_call_id=f"call{number:05}")
    return Message(role=role, content=f"r{number}")
