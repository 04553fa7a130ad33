"""One answer as it is generated, and its form in OpenAI's API: whole, and in the chunks of a stream.

Text is released once it cannot change any more, and each token with the text it belongs to. A stop string that ended
the answer is removed from the text; its tokens are reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop, Top
from posttrain.serve.detokenize import HALF, Decoder, Stops, TokenText
from posttrain.serve.protocol import ChatRequest, GenerationRequest
from posttrain.serve.served_tools import ToolAnswer


@dataclass
class TextChunk:
    """Text released together, with its tokens, their log-probs and alternatives."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(ids, log-probs) of the most probable tokens, where they were requested."""
    offsets: list[int] = field(default_factory=list[int])
    """Number of complete characters of the answer before each token; tokens of one character have the same."""

    def __bool__(self) -> bool:
        return bool(self.text or self.ids)

    def extend(self, other: TextChunk) -> None:
        self.text += other.text
        self.ids += other.ids
        self.logp += other.logp
        self.top += other.top
        self.offsets += other.offsets


class Choice:
    """One answer while it is generated: it takes the engine's tokens, and releases text that cannot change any more.
    `index`: its number among the answers to the request. `place`: the key of its random numbers."""

    def __init__(self, index: int, ids: np.ndarray, sampling: Sampling, place: int, words: TokenText) -> None:
        self.index, self.prompt, self.sampling, self.place, self._words = index, ids, sampling, place, words
        self.whole = TextChunk()
        """All text released so far."""
        self.finish = ""
        """OpenAI's word for why it ended, `stop` or `length`; '' until then."""
        self.told: Callable[[TextChunk], None] | None = None
        """Called with each released piece, for a stream; None without one."""
        self._decoder, self._stops = Decoder(words), Stops(sampling.stop)
        self._waiting = TextChunk()
        self._decoded = 0
        """Number of complete characters, including those that are held back for a stop string."""
        self._received = 0
        """Number of tokens that came before the whole turn."""
        self._task: asyncio.Task[SampledTurn] | None = None

    def drawn_again(self, draw: int) -> Choice:
        """A new choice in the same place, with other random numbers."""
        return Choice(self.index, self.prompt, self.sampling, seeds.key(self.place, "again", draw), self._words)

    async def run(self, generate: Callable[..., Any]) -> None:
        """Generate until the engine or a stop string ends the turn. Cancelling it frees the slot.

        Alternatives arrive only with the whole turn; where they are requested, so do the tokens.
        """
        # Without a stream nobody reads pieces, so the whole turn is taken at its end.
        early = self.sampling.top == 0 and self.told is not None
        callback = {"heard": self._receive} if early else {}
        task = self._task = asyncio.ensure_future(generate(self.prompt, self.sampling, self.place, **callback))
        turn: SampledTurn | None = None
        try:
            turn = await task
        except asyncio.CancelledError:
            # Either `_receive` found a stop string and cancelled the engine's task: the answer is complete. Or this
            # task itself is cancelled, and the engine's slot must be freed.
            task.cancel()
            if not self._stops.found or _cancelled():
                raise
        if turn is not None:
            # The tokens that `_receive` has not taken yet: all of them, if it was not used.
            self._take(turn.ids[self._received :], turn.logp[self._received :], turn.top)
        self._end(turn)

    def _receive(self, ids: np.ndarray, logp: np.ndarray) -> None:
        """Takes tokens that the engine has sampled so far."""
        self._received += len(ids)
        self._take(ids, logp, None)
        if self._stops.found and self._task is not None:
            self._task.cancel()

    def _take(self, ids: np.ndarray, logp: np.ndarray, top: Top | None) -> None:
        """Add tokens one by one, so that the text does not depend on how many arrived together."""
        for i, (token, p) in enumerate(zip(ids.tolist(), logp.tolist(), strict=True)):
            # The engine may be some tokens ahead. Tokens behind a stop string are not part of the answer.
            if self._stops.found:
                return
            self._waiting.ids.append(token)
            self._waiting.offsets.append(self._decoded)
            if top is not None:
                # Where fewer tokens than `top` are allowed, the others have the log-prob -inf, which is no JSON.
                allowed = np.isfinite(top.logp[i])
                self._waiting.top.append((top.ids[i][allowed], top.logp[i][allowed]))
                p = float(top.logp[i][0]) if self.sampling.greedy else p
            self._waiting.logp.append(p)
            # The stop token is reported with the others, but it has no text.
            if token in (self.sampling.stop_ids or ()):
                continue
            # As in the engine, a stop string may be complete only after more than `min_tokens` tokens.
            armed = len(self.whole.ids) + len(self._waiting.ids) > self.sampling.min_tokens
            complete = self._decoder.add(token)
            self._decoded += len(complete)
            if text := self._stops.add(complete, armed):
                self._waiting.text = text
                self._release()

    def _end(self, said: SampledTurn | None) -> None:
        """Releases the rest of the text, and sets the reason why the answer ended."""
        if not self._stops.found:
            # The decoder may have bytes that never became a character. They may complete a stop string only if the
            # engine says that a stop string ended the turn.
            text = self._stops.add(self._decoder.finish(), said is not None and said.stop is Stop.STRING)
            self._waiting.text = text + self._stops.finish()
        self.finish = "stop" if self._stops.found or (said is not None and said.stop.finished) else "length"
        self._release()

    def _release(self) -> None:
        """Adds the waiting text to the answer, and sends it."""
        piece, self._waiting = self._waiting, TextChunk()
        if piece:
            self.whole.extend(piece)
            if self.told is not None:
                self.told(piece)


def _cancelled() -> bool:
    """True where the running task itself is being cancelled, and not only a future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


Json = dict[str, Any]


@dataclass
class Shape:
    """Writes the answers to one request in OpenAI's JSON, whole or as the chunks of a stream."""

    request: GenerationRequest
    words: TokenText
    id: str
    model: str
    fingerprint: str
    format: str | None = None
    """The format of tool calls that are looked for in the answers; None: answers are text."""
    created: int = 0

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self._answers: dict[int, ToolAnswer] = {}
        self.chat = isinstance(self.request, ChatRequest)

    def whole(self, choices: Sequence[Choice], scores: Mapping[int, Any] | None = None) -> Json:
        """The answer to a request without stream.

        Args:
            scores: log-probs [T - 1] of each prompt, by Python `id` of its array of ids, where they were requested.
        """
        answer = self._frame(
            "chat.completion" if self.chat else "text_completion", [self._choice(c, c.whole, c.finish) for c in choices]
        )
        answer["usage"] = usage(choices)
        if scores is not None:
            for c, choice in zip(choices, answer["choices"], strict=True):
                choice["prompt_logprobs"] = self._prompt(c, scores[id(c.prompt)])
        if self.chat and self.request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt.tolist()
        return answer

    def first(self, choice: Choice) -> Json:
        """The first chunk of a choice."""
        chunk = self._chunk([self._choice(choice, TextChunk(), None, role=True)])
        if self.chat and self.request.return_token_ids:
            chunk["prompt_token_ids"] = choice.prompt.tolist()
        return chunk

    def next(self, choice: Choice, piece: TextChunk, finish: str | None) -> list[Json]:
        """The chunks of a choice's next text, or of its end. Each call comes as its name, then its arguments."""
        if self.format is None:
            return [self._chunk([self._choice(choice, piece, finish)])]
        answer = self._answers.setdefault(choice.index, ToolAnswer(self.format))
        if finish is None:
            return [self._chunk([self._choice(choice, replace(piece, text=answer.add(piece.text)), None)])]
        # OpenAI's clients join the arguments of a call by its index. Here they come in one chunk, at the end.
        rest, calls, finish = answer.finish(finish)
        parts = [self._choice(choice, TextChunk(text=rest), None)] if rest else []
        for i, call in enumerate(calls):
            opening = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            parts.append(self._choice(choice, TextChunk(), None) | {"delta": {"tool_calls": [{"index": i, **opening}]}})
            arguments = {"index": i, "function": {"arguments": call["function"]["arguments"]}}
            parts.append(self._choice(choice, TextChunk(), None) | {"delta": {"tool_calls": [arguments]}})
        return [self._chunk([c]) for c in (*parts, self._choice(choice, TextChunk(), finish))]

    def last(self, choices: Sequence[Choice]) -> Json:
        """The last chunk, with the token counts where they were requested."""
        return self._chunk([]) | {"usage": usage(choices)}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._frame("chat.completion.chunk" if self.chat else "text_completion", choices)
        return chunk | {"usage": None} if (options := self.request.stream_options) and options.include_usage else chunk

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        """The fields that an answer and its chunks have in common."""
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "system_fingerprint": self.fingerprint, "choices": choices}

    def _choice(self, c: Choice, piece: TextChunk, finish: str | None, role: bool = False) -> Json:
        """One choice in OpenAI's form, whole or as the part of a stream. `role`: it is the first part."""
        choice: Json = {"index": c.index, "finish_reason": finish, "logprobs": self._logprobs(piece, role)}
        if not self.chat:
            choice["text"] = piece.text
        elif self.request.stream:
            choice["delta"] = (
                {"role": "assistant", "content": ""} if role else {"content": piece.text} if piece.text else {}
            )
        else:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            if self.format is not None:
                self._with_calls(choice, piece.text, finish or "")
        if self.request.return_token_ids:
            choice["token_ids"] = piece.ids
            if not self.chat and (role or not self.request.stream):
                choice["prompt_token_ids"] = c.prompt.tolist()
        return choice

    def _with_calls(self, choice: Json, text: str, finish: str) -> None:
        """Put the calls of a whole answer into its message."""
        answer = ToolAnswer(self.format or "")
        text_before = answer.add(text)
        rest, calls, choice["finish_reason"] = answer.finish(finish)
        if calls:
            choice["message"] |= {"content": (text_before + rest).strip() or None, "tool_calls": calls}

    def _logprobs(self, piece: TextChunk, role: bool) -> Json | None:
        """The log-probs of a text's tokens in OpenAI's form; None if they were not requested."""
        if self.request.alternatives is None or role:
            return None
        if self.chat:
            tops = piece.top or [None] * len(piece.ids)
            return {"content": [self._token(*x) for x in zip(piece.ids, piece.logp, tops, strict=True)]}
        return {
            "tokens": [self._name(t) for t in piece.ids],
            "token_logprobs": piece.logp,
            "top_logprobs": [self._table(*top) for top in piece.top] if self.request.alternatives else None,
            "text_offset": piece.offsets,
        }

    def _prompt(self, c: Choice, logp: Any) -> list[Json | None]:
        """Log-probs of a prompt in vLLM's format: null for the first token, then one table per token, by token id."""
        later = zip(c.prompt[1:].tolist(), logp.tolist(), strict=True)
        return [None, *({str(i): {"logprob": p, "rank": None, "decoded_token": self._name(i)}} for i, p in later)]

    def _token(self, token: int, logp: float, top: tuple[Any, Any] | None) -> Json:
        """A token of a chat with its log-prob and its alternatives."""
        count = self.request.alternatives or 0
        ids, values = ([], []) if top is None else (top[0].tolist()[:count], top[1].tolist()[:count])
        others = [self._scored(i, p) for i, p in zip(ids, values, strict=True)]
        return self._scored(token, logp) | {"top_logprobs": others}

    def _scored(self, token: int, logp: float) -> Json:
        """A token of a chat with its log-prob and its bytes."""
        return {"token": self._name(token), "logprob": logp, "bytes": list(self.words.bytes(token))}

    def _table(self, ids: Any, values: Any) -> Json:
        """Log-probs of alternatives by their text. Of several tokens with one text, the most probable counts."""
        by_text: Json = {}
        count = self.request.alternatives
        for i, p in zip(ids.tolist()[:count], values.tolist()[:count], strict=True):
            by_text.setdefault(self._name(i), p)
        return by_text

    def _name(self, token: int) -> str:
        """A token as text. An incomplete character is written as its bytes, so that names are unique."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        raw = self.words.bytes(token)
        text = raw.decode(errors="replace")
        # A token that really is U+FFFD has its bytes, and stays text.
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw) if HALF in text and HALF.encode() not in raw else text


def usage(choices: Sequence[Choice]) -> Json:
    """Token counts of a request: each prompt once, and all answers."""
    prompts = {id(c.prompt): len(c.prompt) for c in choices}
    of_prompts, of_answers = sum(prompts.values()), sum(len(c.whole.ids) for c in choices)
    return {"prompt_tokens": of_prompts, "completion_tokens": of_answers, "total_tokens": of_prompts + of_answers}
