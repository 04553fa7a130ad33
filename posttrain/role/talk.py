"""One episode's conversation: what the world shows and the seats say, under limits. One seat is trained."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from posttrain.core.content import content_of, mapped
from posttrain.core.errors import ConfigError, DataError, InvariantError, nearest
from posttrain.core.ports import Dialogue, PairRenderer, Sampler, Seat, Utterance
from posttrain.core.redact import scrubbed
from posttrain.core.sampling import Sampling
from posttrain.core.seats import SeatTurn
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Message, Said, Segment, Stop
from posttrain.core.verdict import Judged, Verdict


@dataclass(frozen=True)
class Player:
    """Who speaks: a sampler with its own encoder, under its own contract. It may be the policy, or any other model."""

    sampler: Sampler
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    sampling: Sampling


@dataclass
class Spent:
    """What all seats of one episode have said so far, and what the other seats said."""

    limits: EpisodeLimits
    turns: int = 0
    """Begun and not given up, over all seats."""
    tokens: int = 0
    """Said, over all seats; of a turn that is being said, as many as it may have."""
    trained: int = 0
    """Turns of the trained seat that have ended."""
    others: list[SeatTurn] = field(default_factory=list[SeatTurn])


class SeatTalk:
    """A seat's verbs (`core.ports.Seat`) over one transcript; over several where its history was rewritten.

    Args:
        spent: of the whole episode; its limits hold over all seats.
        place: from the number of this seat's turn to the place its random numbers come from.
    """

    def __init__(self, player: Player, task: str, spent: Spent, place: Callable[..., int]) -> None:
        self._sampler, self._dialogue, self._sampling = player.sampler, player.dialogue(task), player.sampling
        self._spent, self._place = spent, place
        self._transcript = Transcript(player.sampling)
        self._closed: list[Transcript] = []
        self._before, self._last = 0, np.zeros(0, np.int32)
        self.turns: list[str] = []
        self.lengths: list[int] = []
        """Tokens of each turn."""
        self.cut = False
        """Whether a turn was given up while it was being said (the clock, or the environment's own patience). Nobody
        knows its tokens."""

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
        said = await self._generate(allowed)
        self._transcript.say(said)
        self.lengths.append(len(said.ids))
        text = self._dialogue.said(said.ids)
        self._before += len(self._last)
        self._last = said.ids
        self.turns.append(text)
        self._said(text, len(said.ids))
        return Utterance(
            text, limit if said.stop is Stop.LENGTH and len(said.ids) == allowed else said.stop, len(said.ids)
        )

    async def _generate(self, allowed: int) -> Said:
        """The next turn. Its tokens are set aside while it is said, so that seats that speak at once keep the limits
        too."""
        spent = self._spent
        spent.turns, spent.tokens = spent.turns + 1, spent.tokens + allowed
        try:
            said = await self._sampler.generate(
                self._transcript.ids, _shorter(self._sampling, allowed), self._place(len(self.turns))
            )
        except BaseException:
            spent.turns, spent.tokens = spent.turns - 1, spent.tokens - allowed
            self.cut = True
            raise
        spent.tokens += len(said.ids) - allowed
        return said

    def _room(self, most: int | None) -> tuple[int, Stop]:
        """(tokens the next turn may have, the reason it ends with where it needs more): the narrowest limit's."""
        spent, limits = self._spent, self._spent.limits
        if limits.turns is not None and spent.turns >= limits.turns:
            return 0, Stop.TURNS
        room = self._sampler.context - len(self._transcript)
        if room < 1:
            return 0, Stop.CONTEXT
        allowed, reason = self._sampling.max_tokens, Stop.LENGTH
        if most is not None and most < allowed:
            allowed = most
        if limits.tokens is not None and limits.tokens - spent.tokens < allowed:
            allowed, reason = limits.tokens - spent.tokens, Stop.TOKENS
        return allowed, reason

    def _said(self, text: str, tokens: int) -> None:
        """Take note of a turn that has ended."""
        raise NotImplementedError


class OtherSeat(SeatTalk):
    """A seat that is not trained. Of its transcript only words and counts are kept (`core.seats.SeatTurn`)."""

    def __init__(
        self, name: str, player: Player, task: str, spent: Spent, place: Callable[..., int], *, policy: bool
    ) -> None:
        super().__init__(player, task, spent, place)
        self._name, self._policy = name, policy

    def _said(self, text: str, tokens: int) -> None:
        self._spent.others.append(SeatTurn(self._name, scrubbed(text), tokens, self._spent.trained, self._policy))


class Conversation(SeatTalk):
    """An episode's verbs (`core.ports.Talk`): the trained seat, and whoever else speaks.

    Args:
        policy: plays the trained seat, and the others where no `players` are given.
        place: from the coordinates of a turn in this episode to the place its random numbers come from. They are (turn)
            of the trained seat, and ("seat", name, turn) of another.
        players: of the other seats, by name.
    """

    def __init__(
        self,
        policy: Player,
        task: str,
        limits: EpisodeLimits,
        place: Callable[..., int],
        players: Mapping[str, Player] = MappingProxyType({}),
    ) -> None:
        super().__init__(policy, task, Spent(limits), place)
        self._policy, self._task, self._players = policy, task, players
        self._seats: dict[str, OtherSeat] = {}
        self.paid: list[Judged] = []
        self.state: Any = None

    def seat(self, name: str) -> Seat:
        if name not in self._seats:
            if self._players and name not in self._players:
                raise ConfigError(
                    f"the environment asks seat {name!r} to speak, and the rollout has players for others only:"
                    f" {nearest(name, sorted(self._players))}. Give this one a player too; without any the policy"
                    " plays all"
                )
            player = self._players.get(name, self._policy)
            own, place = player.sampler is self._policy.sampler, partial(self._place, "seat", name)
            self._seats[name] = OtherSeat(name, player, self._task, self._spent, place, policy=own)
        return self._seats[name]

    def _said(self, text: str, tokens: int) -> None:
        self._spent.trained += 1

    def pay(self, source: str, score: float) -> None:
        if not self.turns:
            raise InvariantError(f"reward {source!r} was paid before the policy said anything: pay() follows a turn")
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=self.spoken, paid=True))

    def leave(self, state: Any) -> None:
        self.state = state

    @property
    def spoken(self) -> int:
        """Tokens of the trained seat's turns that have ended."""
        return self._before + len(self._last)

    @property
    def others(self) -> tuple[SeatTurn, ...]:
        """What the other seats said, in order."""
        return tuple(self._spent.others)

    @property
    def engine_tokens(self) -> int:
        """Tokens of all turns that the policy's engine said and that have ended, in whichever seat."""
        return self.spoken + sum(t.tokens for t in self._spent.others if t.policy)

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

    def seat(self, name: str) -> Seat:
        raise DataError(
            f"task {self._task!r}: a demonstration says the trained seat's turns only, and the environment asks seat"
            f" {name!r} to speak. Demonstrate tasks without other seats, or write the other's words into the prompt"
        )

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
    return [cast("Message", {**m, "content": mapped(content_of(m["content"]), scrubbed)}) for m in content]


def _shorter(sampling: Sampling, most: int) -> Sampling:
    """The same distribution at every token, and an earlier end."""
    if most >= sampling.max_tokens:
        return sampling
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def tokens_upto(dialogue: Dialogue, ids: np.ndarray, characters: int) -> int:
    """How many of `ids` it takes to say this many characters: text grows with every token, so the border is
    bisected."""
    return bisect_left(range(len(ids)), characters, key=lambda n: len(dialogue.text(ids[:n])))
