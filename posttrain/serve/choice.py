"""One answer in the making: tokens from the engine become text, log-probs and, at the end, a finish reason.

Text is released as it becomes certain, and every token with the text it belongs to. A stop string that ended the answer
is left out of the text; its tokens are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.types import Said, Stop, Top
from posttrain.serve.detokenize import Decoder, Stops, TokenText


@dataclass
class TextChunk:
    """What became certain together: text, the tokens it came from, their log-probs and alternatives."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(ids, log-probs) of the most probable tokens, where they were asked for."""
    offsets: list[int] = field(default_factory=list[int])
    """Characters of the answer that were complete before each token; the tokens of one character have the same."""

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
        self.index, self.prompt, self.sampling, self.place = index, ids, sampling, place
        self.whole = TextChunk()
        """Everything released so far."""
        self.finish = ""
        self.told: Callable[[TextChunk], None] | None = None
        """Called with each piece as it comes, where somebody listens before the end."""
        self._decoder, self._stops = Decoder(words), Stops(sampling.stop)
        self._waiting = TextChunk()
        self._decoded = 0
        """Characters that are complete, those held back for a stop string included."""
        self._heard = 0
        self._task: asyncio.Task[Said] | None = None

    async def run(self, generate: Callable[..., Any]) -> None:
        """Ask the engine, until it ends the turn or a stop string does. Cancelling it frees the slot.

        Alternatives come with the whole turn, and so do then the tokens beside them.
        """
        early = self.sampling.top == 0 and self.told is not None
        heard = {"heard": self._hear} if early else {}
        task = self._task = asyncio.ensure_future(generate(self.prompt, self.sampling, self.place, **heard))
        said: Said | None = None
        try:
            said = await task
        except asyncio.CancelledError:
            task.cancel()
            if not self._stops.found or _cancelled():
                raise
        if said is not None:
            self._take(said.ids[self._heard :], said.logp[self._heard :], said.top)
        self._end(said)

    def _hear(self, ids: np.ndarray, logp: np.ndarray) -> None:
        self._heard += len(ids)
        self._take(ids, logp, None)
        if self._stops.found and self._task is not None:
            self._task.cancel()

    def _take(self, ids: np.ndarray, logp: np.ndarray, top: Top | None) -> None:
        """Read tokens one by one, so that what is said does not depend on how many came at once."""
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

    def _end(self, said: Said | None) -> None:
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
    """Whether the running task itself is being cancelled, not only what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
