"""Text to tokens, and tokens to text. The policy's own tokens are never decoded and encoded again.

A prompt is encoded once, and each observation is encoded separately. A turn of the policy is never encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from posttrain.core.content import content_of, mapped
from posttrain.core.conversation import LearnedConversation
from posttrain.core.types import Message
from posttrain.environment.encodable_text import EXACT, Tokenizer, Writable, leading_ids
from posttrain.environment.rows.row_reader import placed
from posttrain.environment.templates.chat_template import SHIELD, Chat, Tools, TurnEnding
from posttrain.environment.templates.conversation_tokens import weighed
from posttrain.environment.templates.rendering_differences import TAIL, continued, opening
from posttrain.environment.templates.tool_call_messages import MARK, turn_with_calls
from posttrain.system.errors import ConfigError, DataError, InvariantError

Content = str | Sequence[Message]
LONG = 1 << 14
"""A text of more characters takes some milliseconds to tokenize, so other threads may run meanwhile."""
History = Literal["append", "rewrite"]
"""If a template rewrites earlier turns, append: the conversation is refused. rewrite: each turn begins a sequence."""
PIECE = 1 << 16
"""Characters of the pieces in which a long text is first encoded, until it is known whether it can fit the context."""


class TooLongError(DataError):
    """A sequence of the user's data does not fit the context."""


class Renderer:
    """Prompts, observations and completions as int32 ids, and ids as text.

    Args:
        tokenizer: a transformers tokenizer.
        stop_ids: ids of the tokens that end a turn. Demonstrations end with the first one, unless the chat template
            itself writes another of them. If empty, no token ends a turn.
        context: most tokens of a sequence. A prompt must leave room for at least one more. None: not checked.
        history: what to do if the chat template rewrites earlier turns (`RenderedDialogue`).
        advice: what to change where a prompt is too long, for messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        context: int | None = None,
        history: History = "append",
        advice: str = "shorten it, or raise model.context where the model has more positions",
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.context, self.history, self.advice = context, history, advice
        self.leading = leading_ids(tokenizer)
        """Special ids that the tokenizer puts before plain text, usually BOS. Prompts do not get those after it."""
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        """The Rust tokenizer inside a fast tokenizer. It gives the same ids at a tenth of the wrapper's cost."""
        if self._backend is not None:
            # A tokenizer may have been saved with both settings, and would then cut or fill up texts silently.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.writable = Writable(self._ids)
        """Replaces characters of observations that this tokenizer has no token for."""
        self.template = Chat(tokenizer, [self.decode([i]) for i in self.stop_ids])
        self._proofs: dict[tuple[str, bool], str] = {}

    def prompt(self, prompt: Content, task: str = "", tools: Tools = ()) -> np.ndarray:
        """int32 [T] of a first prompt. Plain text gets the leading special tokens exactly once. Messages are rendered
        by its chat template with the generation prompt.

        Raises:
            DataError: the prompt is empty, longer than the context, or has characters without a token; or it is
                messages and there is no template. The error names the task.
        """
        with placed(_named(task)):
            is_text = isinstance(prompt, str)
            ids = self.text_ids(prompt) if is_text else self.encode(self.chat(prompt, generate=True, tools=tools))
        return self.fits(ids, task)

    def fits(self, ids: np.ndarray, task: str = "") -> np.ndarray:
        """The ids. DataError, which names the task, if there are none; TooLongError if they leave no room for an
        answer."""
        if not len(ids):
            raise DataError(f"{_named(task)}: the prompt has no tokens; the policy cannot speak after nothing")
        if self.context is not None and len(ids) >= self.context:
            # Of a longer text `encode` gives the beginning alone, so its length is not known.
            count = f"{len(ids)}" if len(ids) <= 2 * self.context else f"more than {2 * self.context}"
            raise TooLongError(
                f"{_named(task)}: the prompt has {count} tokens, and a context of {self.context} leaves no room to"
                f" answer; {self.advice}"
            )
        return ids

    def start(self) -> np.ndarray:
        """int32 [n >= 1]: the first ids of a document: the leading special tokens, else BOS, else the first stop id."""
        if self.leading:
            return np.array(self.leading, np.int32)
        bos = self.tokenizer.bos_token_id
        if bos is None and not self.stop_ids:
            raise ConfigError(
                "documents need a token to begin with, and this tokenizer has neither a BOS nor a stop token"
            )
        return np.array([self.stop_ids[0] if bos is None else bos], np.int32)

    def pair(
        self, prompt: Content, completion: str, task: str = "", tools: Tools = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(prompt ids, completion ids) of a demonstration. An empty prompt makes a document, which gets `start`. The
        chat template writes calls that the completion has as objects."""
        chat = not isinstance(prompt, str)
        before = self.prompt(prompt, task, tools) if len(prompt) else self.start()
        if MARK not in completion:
            return before, self.completion_ids(completion, chat=chat, task=task, behind=before)
        with placed(_named(task)):
            turn_text, stop = turn_with_calls(self.template, prompt, completion, tools)
        # No `behind`: what the template wrote behind its generation prompt continues a thought that is opened there.
        ids, end = self.completion_ids(turn_text, chat=chat, task=task), self.encode(stop)
        # Behind calls the template may write another stop token than the usual one of `completion_ids`, and then
        # replaces it. Where it writes none (`end` is empty), the usual one stays.
        return before, np.array([*ids[: len(ids) - len(end)], *end], np.int32)

    def conversation(
        self, c: LearnedConversation, task: str = "", tools: Tools = (), arguments: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids int32 [T], weight of each float64 [T]) of each sequence of a conversation. DataError if nothing of it
        can be learned, or the chat template does not write it so that it could be."""
        with placed(_named(task)):
            return weighed(self, c, tools, arguments)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters of each token of a text: their beginning and end."""
        if self._backend is None:
            raise DataError("this tokenizer does not say which characters a token has; take a fast tokenizer")
        return self._backend.encode(text, add_special_tokens=False).offsets

    def completion_ids(self, text: str, *, chat: bool = False, task: str = "", behind: Any = ()) -> np.ndarray:
        """int32 ids of a demonstration. No special tokens are added, and exactly one stop id is at the end.

        Args:
            behind: ids of the prompt. If a chat template opened a thought there, the text goes on behind it.

        Raises:
            DataError: a stop token is in the middle. The policy could never generate the text after it.
        """
        if chat and (opened := self.opening(behind)):
            text = continued(self.template, text, opened)
        ids = self.encode(text).tolist()
        # The text may have no stop token at its end, one, or several. All are removed, and one is added below.
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        if inside := [i for i in ids if i in self.stop_ids]:
            raise DataError(
                f"{_named(task)}: the completion has stop token {inside[0]}"
                f" ({self.tokenizer.decode(inside[:1], **EXACT)!r}) before its end"
            )
        end = self.stop_ids[:1] if not chat else (self.chat_stop,) if self.stop_ids else ()
        return np.array([*ids, *end], np.int32)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a turn, without the stop token that ended it. Other special tokens are kept."""
        turn_ids = _plain(ids)
        return self.decode(turn_ids[:-1] if turn_ids and turn_ids[-1] in self.stop_ids else turn_ids)

    def opening(self, prompt: Sequence[int] | np.ndarray) -> str:
        """The tag of a thought that these ids open at their end; '' if none."""
        return opening(self.decode(prompt[-TAIL:])) if len(prompt) else ""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of all ids, special tokens included."""
        if self._backend is not None:
            return self._backend.decode(_plain(ids), skip_special_tokens=False)
        return self.tokenizer.decode(_plain(ids), **EXACT)

    def spell(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences of a word: alone, and after a space if the space becomes part of its first token.

        Raises:
            ConfigError: this tokenizer cannot write it.
        """
        alone = self._exact_ids(word)
        if alone is None:
            raise ConfigError(
                f"this tokenizer cannot write {word!r}: correct sampling.bad_words or allowed_words, or name token ids"
            )
        spaced = self._exact_ids(f" {word}")
        # If the space is a token of its own, one spelling is enough.
        space_apart = spaced is None or spaced[len(spaced) - len(alone) :] == alone
        return (alone,) if space_apart else (alone, cast("tuple[int, ...]", spaced))

    def _exact_ids(self, text: str) -> tuple[int, ...] | None:
        """The ids of a text, if decoding them gives the text again; else None."""
        try:
            ids = tuple(self.encode(text).tolist())
        except Exception:  # the tokenizers library raises plain exceptions for what a vocabulary lacks
            return None
        return ids if ids and self.decode(ids).strip() == text.strip() else None

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text, with nothing added. No token spans a `SHIELD`, which gets none itself. Of a text that
        cannot fit the context, only the beginning: more than twice as many tokens as fit. DataError if a character has
        no token."""
        if self.context is not None and len(text) > PIECE:
            pieces = (part[i : i + PIECE] for part in text.split(SHIELD) for i in range(0, len(part), PIECE))
            if (ids := self._until_too_long(pieces, 2 * self.context)) is not None:
                return ids
        if SHIELD in text:
            return np.concatenate([self._encode(part) for part in text.split(SHIELD)])
        return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        """int32 ids of a text. DataError if a character has no token."""
        try:
            return np.array(self._ids(text), np.int32)
        except Exception as error:  # the tokenizers library raises plain exceptions for what a vocabulary lacks
            raise DataError(
                f"this tokenizer has no token for some of {text!r:.80} ({error}). Keep to what it can write, or use one"
                " that writes every text (bytes, byte fallback, or an <unk> token)"
            ) from error

    def _ids(self, text: str) -> list[int]:
        """Ids of a text, as the tokenizer gives them."""
        if self._backend is not None and len(text) > LONG:  # the same ids, and other threads may run meanwhile
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    def with_stand_ins(self, message: Message) -> Message:
        """A message of the environment, with stand-ins for characters that have no token."""
        fields: dict[str, Any] = dict(message)
        if fields.get("content") is not None:
            fields["content"] = mapped(content_of(fields["content"]), self.writable.text)
        if isinstance(fields.get("name"), str):
            fields["name"] = self.writable.text(fields["name"])
        return cast("Message", fields)

    def _until_too_long(self, pieces: Iterable[str], most: int) -> np.ndarray | None:
        """The ids of the first pieces, as soon as they are more than `most`; None if all together have no more. A
        tokenizer needs up to 500 bytes for a character, so it gets a whole text only if the tokens may fit. A word that
        is cut at the end of a piece adds a few tokens, so `most` is twice the context."""
        encoded: list[np.ndarray] = []
        count = 0
        for piece in pieces:
            encoded.append(self._encode(piece))
            count += len(encoded[-1])
            if count > most:
                return np.concatenate(encoded)
        return None

    def chat(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str:
        """Messages rendered by the chat template. DataError if there is no template or it refuses them."""
        return self.template.render(messages, generate=generate, tools=tools)

    def offers(self, prompt: Content, tools: Tools) -> bool:
        """Returns whether the prompt, as it is rendered, shows these tools. Text shows none."""
        if isinstance(prompt, str):
            return False
        return self.chat(prompt, generate=True, tools=tools) != self.chat(prompt, generate=True)

    def rewrites(self, new: Sequence[Message], tools: Tools) -> str:
        """The reason why the template cannot append such messages after a turn; '' if it can."""
        # The proof renders dozens of conversations, and depends only on who speaks next and on whether there are tools.
        key = ("tool" if any(m["role"] == "tool" for m in new) else "user", bool(tools))
        if key not in self._proofs:
            self._proofs[key] = self.template.proof(key[0], tools=tools)
        return self._proofs[key]

    @cached_property
    def chat_stop(self) -> int:
        """The stop id that the chat template writes after an assistant's turn, else the first stop id."""
        tail = self.encode(self.template.end()).tolist()
        return tail[0] if tail and tail[0] in self.stop_ids else self.stop_ids[0]

    def text_ids(self, text: str) -> np.ndarray:
        """int32 [T] of a plain text, with the leading special tokens exactly once."""
        ids = self.encode(text)
        n = len(self.leading)
        # The text may begin with the BOS token already.
        has_leading = n > 0 and tuple(ids[:n].tolist()) == self.leading
        return ids if has_leading or not n else np.concatenate([np.array(self.leading, np.int32), ids])


class RenderedDialogue:
    """Encodes one conversation. Each `see` returns the ids to append after the policy's last turn.

    The policy's own tokens are not changed. Of messages, an observation is the text that the chat template adds after
    the assistant's turn. A template that drops or changes earlier turns (such as their reasoning) is refused, because
    the policy would be trained on a history it never saw. If the renderer's history is `rewrite`, the conversation as
    rendered now begins a new sequence instead (`restarted`).
    """

    def __init__(self, renderer: Renderer, task: str = "") -> None:
        self._renderer, self._task = renderer, task
        self._history: list[Message] | None = None
        """The messages shown so far, with a message for each turn of the policy; None before the prompt."""
        self._chat = False
        """True if the conversation is messages, false if it is text."""
        self._tools: Tools = ()
        self._said: list[int] | None = None
        """The ids of the policy's last turn, until messages follow it."""
        self.restarted = False
        """True if the ids that `see` returned last are a new prompt and no continuation."""

    @property
    def format(self) -> str | None:
        """The format in which this conversation's template writes tool calls; None if there is none."""
        return self._renderer.template.format if self._renderer.tokenizer.chat_template else None

    def see(self, content: Content, tools: Tools = ()) -> np.ndarray:
        """int32 ids of the prompt (first call, with the tools) or of an observation (later calls)."""
        messages = None if isinstance(content, str) else list(content)
        self.restarted = False
        if self._history is None:
            self._chat, self._tools = messages is not None, tools
            self._history = messages or []
            return self._renderer.prompt(content, self._task, tools)
        if (messages is not None) != self._chat:
            raise InvariantError(
                f"{_named(self._task)}: a dialogue shows messages throughout or text throughout, not both"
            )
        if messages is None:
            return self._renderer.encode(self._renderer.writable.text(str(content)))
        if self._said is None:
            raise InvariantError(
                f"{_named(self._task)}: messages were shown twice without a turn of the policy between them"
            )
        return self._observe([self._renderer.with_stand_ins(m) for m in messages], self._said)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of these ids, without the stop token."""
        return self._renderer.text(ids)

    def said(self, ids: Sequence[int] | np.ndarray) -> str:
        """Record the policy's turn. Returns its text."""
        self._said = _plain(ids)
        return self._renderer.text(self._said)

    def _observe(self, new: list[Message], said: list[int]) -> np.ndarray:
        """The ids of new messages behind the policy's turn `said`."""
        render, history, tools = self._renderer, self._history or [], self._tools
        with placed(_named(self._task)):
            why = render.rewrites(new, tools)
            if why and render.history == "append":
                raise DataError(why)
            if why:
                ending = self._appended_or_restarted(history, render.text(said), new)
            else:
                ending = render.template.between(history, new, tools)
        self._history, self._said = [*history, ending.turn, *new], None
        # The text that a template writes after a turn begins with the stop token. If the policy ended its turn, it has
        # already said this token, so it is left out here. Behind a turn that was cut off, the token is part of the
        # observation.
        turn_ended = not self.restarted and said and said[-1] in render.stop_ids
        if turn_ended and ending.text.lstrip().startswith(render.decode(said[-1:])):
            return render.encode(ending.text.lstrip())[1:]
        return render.encode(ending.text)

    def _appended_or_restarted(self, history: list[Message], text: str, new: list[Message]) -> TurnEnding:
        """The text to append if this turn can be continued, else the whole conversation as rendered now."""
        try:
            return self._renderer.template.after(history, text, new, self._tools)
        except DataError:
            self.restarted = True
            return self._renderer.template.rewritten(history, text, new, self._tools)


def _plain(ids: Sequence[int] | np.ndarray) -> list[int]:
    """The ids as a list of Python's integers. An array is converted in one call, which is faster."""
    return ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]


def _named(task: str) -> str:
    """The task for a message."""
    return f"task {task!r}" if task else "prompt"
