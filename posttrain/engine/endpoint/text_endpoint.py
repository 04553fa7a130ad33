"""A sampler over an endpoint that takes and returns text only: for evaluation and judging, never for training.

The rollout works with ids, so each new piece of a conversation gets a new id (`TextVocabulary`). A text or message that
was shown is one id. A turn has as many ids as the endpoint counted tokens, and the first of them holds its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posttrain.core.content import content_of, text_of
from posttrain.core.sampling import Sampling
from posttrain.core.types import OUTSIDE, Message, SampledTurn, Stop
from posttrain.engine.endpoint.endpoint_sampler import EndpointSampler
from posttrain.system.errors import ConfigError, EngineError, InvariantError
from posttrain.verifier.discover import RemoteModel
from posttrain.verifier.http_client import Endpoint

Way = Literal["chat", "completions"]


@dataclass(frozen=True)
class TextPiece:
    """The content of one id: a message, or text that was shown (role "user") or said (role "assistant")."""

    role: str
    text: str
    message: bool = False


class TextVocabulary:
    """A growing vocabulary of text pieces."""

    def __init__(self) -> None:
        # Id 0 is the empty piece, so that any number of zeros behind a turn's first id adds nothing to its text.
        self._all: list[TextPiece] = [TextPiece("assistant", "")]
        self._ids: dict[TextPiece, int] = {self._all[0]: 0}

    def id(self, piece: TextPiece) -> int:
        """The piece's id; a new one for a new piece. 0 is the empty piece that fills up a turn."""
        if piece not in self._ids:
            self._ids[piece] = len(self._all)
            self._all.append(piece)
        return self._ids[piece]

    def of(self, ids: Sequence[int] | np.ndarray) -> list[TextPiece]:
        return [self._all[int(i)] for i in ids]


class TextDialogue:
    """`core.ports.Dialogue` over the ids of a `TextVocabulary`."""

    format: str | None = None
    restarted = False

    def __init__(self, pieces: TextVocabulary) -> None:
        self._pieces = pieces
        self._chat: bool | None = None

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Show a text, or messages; returns their ids. ConfigError where tools are given."""
        if tools:
            raise ConfigError(
                "tools reach an endpoint through the model's own chat template: give its tokenizer (--tokenizer)"
            )
        chat = not isinstance(content, str)
        # A request is either messages or a text to continue; the two cannot be put into one.
        if self._chat is not None and chat != self._chat:
            raise InvariantError("a dialogue shows messages throughout or text throughout, not both")
        self._chat = chat
        if isinstance(content, str):
            shown = [TextPiece("user", content)]
        else:
            # Parts of text are joined, because the endpoint's own template is not known here.
            shown = [TextPiece(m["role"], text_of(content_of(m["content"])), True) for m in content]
        return np.array([self._pieces.id(p) for p in shown], np.int32)

    def text(self, ids: np.ndarray) -> str:
        return "".join(p.text for p in self._pieces.of(ids))

    def said(self, ids: np.ndarray) -> str:
        return self.text(ids)


class TextSampler(EndpointSampler):
    """`core.ports.Sampler` over text. A turn ends where the endpoint ends it, so the contract's stop ids must be ().

    Args:
        way: chat sends messages, and a plain prompt as a user's message; completions sends plain text to continue.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        look: RemoteModel,
        pieces: TextVocabulary,
        *,
        way: Way = "chat",
        cut: Sampling | None = None,
    ) -> None:
        super().__init__(endpoint, look, cut=cut)
        self._pieces, self.way = pieces, way

    def dialogue(self, task: str) -> TextDialogue:
        return TextDialogue(self._pieces)

    @property
    def context(self) -> int:
        """The ids are not tokens, so there is no bound here. The endpoint refuses what is too long."""
        return 2**31 - 1

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """One turn after `ids`, which are ids of this sampler's vocabulary."""
        # The endpoint ends a turn at its own tokenizer's end. A contract that names stop ids could not be kept: ids of
        # this sampler's vocabulary mean nothing there.
        if sampling.stop_ids != ():
            raise EngineError(
                "an endpoint that speaks text ends a turn where its own tokenizer does: set stop_ids=(), not"
                f" {sampling.stop_ids}"
            )
        if sampling.top:
            raise ConfigError(
                f"sampling.top={sampling.top}: an endpoint that speaks text has no token ids to give log-probs for"
            )
        chat = self.way == "chat"
        content = {"messages": self._messages(ids)} if chat else {"prompt": self._prompt(ids)}
        choice, count = await self._choice(
            f"/{'chat/' if chat else ''}completions",
            self._body(sampling, place, chat=chat) | content,
            sampling.max_tokens,
        )
        message: Any = choice.get("message") or {}
        if not isinstance(message, dict):
            raise self.broken(f"its message is no object but {type(message).__name__}")
        text = message.get("content") if chat else choice.get("text")
        if text is not None and not isinstance(text, str):
            raise self.broken(f"what it said is no text but {type(text).__name__}")
        # As many ids as tokens were counted, for lengths and budgets: only the first has a text. An empty turn has one.
        turn_ids = [self._pieces.id(TextPiece("assistant", text or "")), *[0] * (count - 1)]
        n = len(turn_ids)
        return SampledTurn(
            np.array(turn_ids, np.int32),
            # Log-probs are unknown. The version OUTSIDE says so, so that nothing is learned from them.
            np.zeros(n, np.float32),
            np.full(n, OUTSIDE, np.int32),
            self._stop(choice.get("finish_reason")),
        )

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """Always EngineError: an endpoint that speaks text has no log-probs of tokens."""
        raise EngineError(f"{self.endpoint.role} ({self.endpoint.url}): an endpoint that speaks text scores nothing")

    async def for_training(self, sampling: Sampling) -> None:
        """Always ConfigError, because there are no token ids and no log-probs."""
        raise ConfigError(
            "samples of an endpoint that speaks text cannot be trained on: neither the tokens it said nor their"
            " log-probs are known. Use engine=embedded or engine=vllm"
        )

    def _messages(self, ids: np.ndarray) -> list[dict[str, str]]:
        """The conversation of these ids, as a chat request has it."""
        out: list[dict[str, str]] = []
        for piece in self._pieces.of(ids):
            # The zeros that fill up a turn follow its message. An empty turn is id 0 itself, and stays a message.
            filler = piece.role == "assistant" and not piece.message and not piece.text
            if not (filler and out and out[-1]["role"] == "assistant"):
                out.append({"role": piece.role, "content": piece.text})
        return out

    def _prompt(self, ids: np.ndarray) -> str:
        """The text of these ids, as a completions request has it. ConfigError where one of them is a message."""
        pieces = self._pieces.of(ids)
        if any(p.message for p in pieces):
            raise ConfigError(
                "these prompts are lists of messages, and completions take plain text: use chat, or give the model's"
                " tokenizer"
            )
        return "".join(p.text for p in pieces)

    def _stop(self, reason: Any) -> Stop:
        """The reason for the end of a turn, from the endpoint's finish_reason."""
        # An answer that was filtered is no answer of the model, so it does not count as ended by itself.
        stops = {"stop": Stop.SAID, "length": Stop.LENGTH, "content_filter": Stop.ERROR}
        if not isinstance(reason, str) or reason not in stops:
            raise self.broken(f"a turn ended with reason {reason!r}; known are {', '.join(stops)}")
        return stops[reason]
