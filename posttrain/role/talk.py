"""One episode's conversation: what the world shows and the policy says, under the episode's limits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from posttrain.core.errors import DataError, InvariantError
from posttrain.core.ports import Dialogue, PairRenderer, Sampler, Utterance
from posttrain.core.redact import scrubbed
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Message, Segment, Stop
from posttrain.core.verdict import Judged, Verdict


class Conversation:
    """An episode's verbs (`core.ports.Talk`) over one transcript; over several where its history was rewritten.

    Args:
        place: from a turn's number to the place its random numbers come from.
    """

    def __init__(
        self,
        sampler: Sampler,
        dialogue: Dialogue,
        sampling: Sampling,
        limits: EpisodeLimits,
        place: Callable[[int], int],
    ) -> None:
        self._sampler, self._dialogue, self._sampling, self._limits, self._place = (
            sampler,
            dialogue,
            sampling,
            limits,
            place,
        )
        self._transcript = Transcript(sampling)
        self._closed: list[Transcript] = []
        self._before, self._last = 0, np.zeros(0, np.int32)
        self.turns: list[str] = []
        self.lengths: list[int] = []
        """Tokens of each turn."""
        self.cut = False
        """Whether a turn was given up while it was being said (the clock, or the environment's own patience): nobody
        knows its tokens."""
        self.paid: list[Judged] = []
        self.state: Any = None

    @property
    def format(self) -> str | None:
        return self._dialogue.format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        ids = self._dialogue.see(content if not self.turns else without_secrets(content), tools)
        if self._dialogue.restarted:
            self._closed.append(self._transcript)
            self._transcript = Transcript(self._sampling)
        self._transcript.see(ids[: max(0, self._sampler.context - len(self._transcript))])

    async def say(self, most: int | None = None) -> Utterance:
        allowed, limit = self._room(most)
        if allowed < 1:
            return Utterance("", limit, 0)
        try:
            said = await self._sampler.generate(
                self._transcript.ids, _shorter(self._sampling, allowed), self._place(len(self.turns))
            )
        except BaseException:
            self.cut = True
            raise
        self._transcript.say(said)
        self.lengths.append(len(said.ids))
        text = self._dialogue.said(said.ids)
        self._before += len(self._last)
        self._last = said.ids
        self.turns.append(text)
        return Utterance(
            text, limit if said.stop is Stop.LENGTH and len(said.ids) == allowed else said.stop, len(said.ids)
        )

    def _room(self, most: int | None) -> tuple[int, Stop]:
        """(tokens the next turn may have, the reason it ends with where it needs more): the narrowest limit's."""
        limits = self._limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            return 0, Stop.TURNS
        room = self._sampler.context - len(self._transcript)
        if room < 1:
            return 0, Stop.CONTEXT
        allowed, reason = self._sampling.max_tokens, Stop.LENGTH
        if most is not None and most < allowed:
            allowed = most
        if limits.tokens is not None and limits.tokens - self.spoken < allowed:
            allowed, reason = limits.tokens - self.spoken, Stop.TOKENS
        return allowed, reason

    def pay(self, source: str, score: float) -> None:
        if not self.turns:
            raise InvariantError(f"reward {source!r} was paid before the policy said anything: pay() follows a turn")
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=self.spoken, paid=True))

    def leave(self, state: Any) -> None:
        self.state = state

    @property
    def spoken(self) -> int:
        """Tokens of the turns that have ended."""
        return self._before + len(self._last)

    def spoken_upto(self, characters: int) -> int:
        """Spoken tokens up to this character of the last turn's text, all earlier turns included."""
        return self._before + tokens_upto(self._dialogue, self._last, characters)

    def segments(self) -> tuple[Segment, ...]:
        """What was said, as sequences: the last one is left out where it was only shown and others hold the turns."""
        open_ = [self._transcript] if self._transcript.spoke or not self._closed else []
        return tuple(t.segment() for t in (*self._closed, *open_))


class DemonstrationTalk:
    """A `Talk` in which a demonstration says the turns; the world answers as it answers the policy.

    Asking for a turn beyond the demonstration is an error of the demonstration (DataError).
    """

    def __init__(
        self,
        renderer: PairRenderer,
        dialogue: Dialogue,
        turns: Sequence[str],
        sampling: Sampling,
        *,
        chat: bool,
        task: str,
    ) -> None:
        self._renderer, self._dialogue, self._turns, self._chat, self._task = (
            renderer,
            dialogue,
            tuple(turns),
            chat,
            task,
        )
        self.transcript = Transcript(sampling)
        self.turns: list[str] = []
        self.paid: list[Judged] = []
        self.state: Any = None
        self.spoken, self._before, self._last = 0, 0, np.zeros(0, np.int32)

    @property
    def format(self) -> str | None:
        return self._dialogue.format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        ids = self._dialogue.see(content if not self.turns else without_secrets(content), tools)
        if self._dialogue.restarted:
            raise DataError(
                f"task {self._task!r}: a demonstration of several turns is one sequence, and this chat template writes"
                " earlier turns anew. Use a template that only appends, or demonstrate answers of one turn"
            )
        self.transcript.see(ids)

    async def say(self, most: int | None = None) -> Utterance:
        if len(self.turns) == len(self._turns):
            raise DataError(
                f"task {self._task!r}: the demonstration has {len(self._turns)} turns, and the episode goes on: correct"
                " the environment's demonstrate()"
            )
        ids = self._renderer.completion_ids(self._turns[len(self.turns)], chat=self._chat, task=self._task)
        self.transcript.show(ids)
        self.turns.append(self._dialogue.said(ids))
        self._before, self._last = self.spoken, ids
        self.spoken += len(ids)
        return Utterance(self.turns[-1], Stop.SAID, len(ids))

    def pay(self, source: str, score: float) -> None:
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=self.spoken, paid=True))

    def spoken_upto(self, characters: int) -> int:
        """Spoken tokens up to this character of the last turn's text, all earlier turns included."""
        return self._before + tokens_upto(self._dialogue, self._last, characters)

    def leave(self, state: Any) -> None:
        self.state = state


def without_secrets(content: str | Sequence[Message]) -> str | list[Message]:
    """What the world answers, before the policy (and the record) sees it: a tool's error may quote a key of ours."""
    if isinstance(content, str):
        return scrubbed(content)
    return [cast("Message", {**m, "content": scrubbed(m["content"])}) for m in content]


def _shorter(sampling: Sampling, most: int) -> Sampling:
    """The same distribution at every token, and an earlier end."""
    if most >= sampling.max_tokens:
        return sampling
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def tokens_upto(dialogue: Dialogue, ids: np.ndarray, characters: int) -> int:
    """How many of `ids` it takes to say this many characters: text grows with every token, so the border is
    bisected."""
    return bisect_left(range(len(ids)), characters, key=lambda n: len(dialogue.text(ids[:n])))
