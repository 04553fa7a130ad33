"""One answer as it is generated: tokens from the engine become text, log-probs and, at the end, a finish reason.

Text is released once it cannot change any more, and each token with the text it belongs to. A stop string that ended
the answer is removed from the text; its tokens are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop, Top
from posttrain.serve.detokenize import Decoder, Stops, TokenText


@dataclass
class TextChunk:
    """Text released together, with its tokens, their log-probs and alternatives."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(ids, log-probs) of the most probable tokens, where they were requested."""
    offsets: list[int] = field(default_factory=list[int])
    """Complete characters of the answer before each token. Tokens of one character have the same offset."""

    def __bool__(self) -> bool:
        return bool(self.text or self.ids)

    def extend(self, other: TextChunk) -> None:
        self.text += other.text
        self.ids += other.ids
        self.logp += other.logp
        self.top += other.top
        self.offsets += other.offsets


class Choice:
    """Answer `index` to one prompt."""

    def __init__(self, index: int, ids: np.ndarray, sampling: Sampling, place: int, words: TokenText) -> None:
        self.index, self.prompt, self.sampling, self.place, self._words = index, ids, sampling, place, words
        self.whole = TextChunk()
        """All text released so far."""
        self.finish = ""
        self.told: Callable[[TextChunk], None] | None = None
        """Called with each released piece, for a stream; None without one."""
        self._decoder, self._stops = Decoder(words), Stops(sampling.stop)
        self._waiting = TextChunk()
        self._decoded = 0
        """Number of complete characters, with those held back for a stop string."""
        self._received = 0
        self._task: asyncio.Task[SampledTurn] | None = None

    def drawn_again(self, draw: int) -> Choice:
        """A choice in its place with random numbers of its own."""
        return Choice(self.index, self.prompt, self.sampling, seeds.key(self.place, "again", draw), self._words)

    async def run(self, generate: Callable[..., Any]) -> None:
        """Generate until the engine or a stop string ends the turn. Cancelling it frees the slot.

        Alternatives arrive only with the whole turn; where they are requested, so do the tokens.
        """
        early = self.sampling.top == 0 and self.told is not None
        heard = {"heard": self._receive} if early else {}
        task = self._task = asyncio.ensure_future(generate(self.prompt, self.sampling, self.place, **heard))
        said: SampledTurn | None = None
        try:
            said = await task
        except asyncio.CancelledError:
            task.cancel()
            if not self._stops.found or _cancelled():
                raise
        if said is not None:
            self._take(said.ids[self._received :], said.logp[self._received :], said.top)
        self._end(said)

    def _receive(self, ids: np.ndarray, logp: np.ndarray) -> None:
        self._received += len(ids)
        self._take(ids, logp, None)
        if self._stops.found and self._task is not None:
            self._task.cancel()

    def _take(self, ids: np.ndarray, logp: np.ndarray, top: Top | None) -> None:
        """Add tokens one by one, so that the text does not depend on how many arrived together."""
        for i, (token, p) in enumerate(zip(ids.tolist(), logp.tolist(), strict=True)):
            if self._stops.found:
                return
            self._waiting.ids.append(token)
            self._waiting.offsets.append(self._decoded)
            if top is not None:
                order = np.isfinite(top.logp[i])
                self._waiting.top.append((top.ids[i][order], top.logp[i][order]))
                p = float(top.logp[i][0]) if self.sampling.greedy else p
            self._waiting.logp.append(p)
            if token in (self.sampling.stop_ids or ()):
                continue
            armed = len(self.whole.ids) + len(self._waiting.ids) > self.sampling.min_tokens
            complete = self._decoder.add(token)
            self._decoded += len(complete)
            if text := self._stops.add(complete, armed):
                self._waiting.text = text
                self._release()

    def _end(self, said: SampledTurn | None) -> None:
        if not self._stops.found:
            text = self._stops.add(self._decoder.finish(), said is not None and said.stop is Stop.STRING)
            self._waiting.text = text + self._stops.finish()
        self.finish = "stop" if self._stops.found or (said is not None and said.stop.finished) else "length"
        self._release()

    def _release(self) -> None:
        piece, self._waiting = self._waiting, TextChunk()
        if piece:
            self.whole.extend(piece)
            if self.told is not None:
                self.told(piece)


def _cancelled() -> bool:
    """True where the running task itself is being cancelled, and not only a future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
