"""Answers in the format of OpenAI's API: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.serve.detokenize import HALF, TokenText
from posttrain.serve.generated_answer import Choice, TextChunk
from posttrain.serve.protocol import ChatRequest, GenerationRequest
from posttrain.serve.tool_answer import ToolAnswer

Json = dict[str, Any]


@dataclass
class Shape:
    """Writes the answers to one request."""

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
        out = self._frame(
            "chat.completion" if self.chat else "text_completion", [self._choice(c, c.whole, c.finish) for c in choices]
        )
        out["usage"] = usage(choices)
        if scores is not None:
            for c, choice in zip(choices, out["choices"], strict=True):
                choice["prompt_logprobs"] = self._prompt(c, scores[id(c.prompt)])
        if self.chat and self.request.return_token_ids:
            out["prompt_token_ids"] = choices[0].prompt.tolist()
        return out

    def first(self, choice: Choice) -> Json:
        """The first chunk of a choice."""
        out = self._chunk([self._choice(choice, TextChunk(), None, role=True)])
        if self.chat and self.request.return_token_ids:
            out["prompt_token_ids"] = choice.prompt.tolist()
        return out

    def next(self, choice: Choice, piece: TextChunk, finish: str | None) -> list[Json]:
        """The chunks of a choice's next text, or of its end. Each call comes as its name, then its arguments."""
        if self.format is None:
            return [self._chunk([self._choice(choice, piece, finish)])]
        answer = self._answers.setdefault(choice.index, ToolAnswer(self.format))
        if finish is None:
            return [self._chunk([self._choice(choice, replace(piece, text=answer.add(piece.text)), None)])]
        rest, calls, finish = answer.finish(finish)
        out = [self._choice(choice, TextChunk(text=rest), None)] if rest else []
        for i, call in enumerate(calls):
            told = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            out.append(self._choice(choice, TextChunk(), None) | {"delta": {"tool_calls": [{"index": i, **told}]}})
            more = {"index": i, "function": {"arguments": call["function"]["arguments"]}}
            out.append(self._choice(choice, TextChunk(), None) | {"delta": {"tool_calls": [more]}})
        return [self._chunk([c]) for c in (*out, self._choice(choice, TextChunk(), finish))]

    def last(self, choices: Sequence[Choice]) -> Json:
        """The last chunk, with the token counts where they were requested."""
        return self._chunk([]) | {"usage": usage(choices)}

    def _chunk(self, choices: list[Json]) -> Json:
        out = self._frame("chat.completion.chunk" if self.chat else "text_completion", choices)
        return out | {"usage": None} if (o := self.request.stream_options) and o.include_usage else out

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(self, c: Choice, piece: TextChunk, finish: str | None, role: bool = False) -> Json:
        out: Json = {"index": c.index, "finish_reason": finish, "logprobs": self._logprobs(piece, role)}
        if not self.chat:
            out["text"] = piece.text
        elif self.request.stream:
            out["delta"] = (
                {"role": "assistant", "content": ""} if role else {"content": piece.text} if piece.text else {}
            )
        else:
            out["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            if self.format is not None:
                self._with_calls(out, piece.text, finish or "")
        if self.request.return_token_ids:
            out["token_ids"] = piece.ids
            if not self.chat and (role or not self.request.stream):
                out["prompt_token_ids"] = c.prompt.tolist()
        return out

    def _with_calls(self, choice: Json, text: str, finish: str) -> None:
        """Put the calls of a whole answer into its message."""
        answer = ToolAnswer(self.format or "")
        before = answer.add(text)
        rest, calls, choice["finish_reason"] = answer.finish(finish)
        if calls:
            choice["message"] |= {"content": (before + rest).strip() or None, "tool_calls": calls}

    def _logprobs(self, piece: TextChunk, role: bool) -> Json | None:
        if self.request.alternatives is None or role:
            return None
        if self.chat:
            return {
                "content": [
                    self._token(t, p, piece.top[i] if piece.top else None)
                    for i, (t, p) in enumerate(zip(piece.ids, piece.logp, strict=True))
                ]
            }
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
        out: Json = {"token": self._name(token), "logprob": logp, "bytes": list(self.words.bytes(token))}
        shown = self.request.alternatives or 0
        ids, values = ([], []) if top is None else (top[0].tolist()[:shown], top[1].tolist()[:shown])
        return out | {
            "top_logprobs": [
                {"token": self._name(i), "logprob": p, "bytes": list(self.words.bytes(i))}
                for i, p in zip(ids, values, strict=True)
            ]
        }

    def _table(self, ids: Any, values: Any) -> Json:
        """Alternatives by their text; of several with one text, the most probable."""
        out: Json = {}
        shown = self.request.alternatives
        for i, p in zip(ids.tolist()[:shown], values.tolist()[:shown], strict=True):
            out.setdefault(self._name(i), p)
        return out

    def _name(self, token: int) -> str:
        """A token as text. An incomplete character is written as its bytes, so that names are unique."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        raw = self.words.bytes(token)
        text = raw.decode(errors="replace")
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw) if HALF in text and HALF.encode() not in raw else text


def usage(choices: Sequence[Choice]) -> Json:
    """Token counts of a request: each prompt once, and all answers."""
    prompts = {id(c.prompt): len(c.prompt) for c in choices}
    asked, said = sum(prompts.values()), sum(len(c.whole.ids) for c in choices)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
