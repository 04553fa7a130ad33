"""The conversation of one episode: observations of the environment and turns of the seats, within limits. One seat is
trained. The others may be played by the policy or any other model. A `DemonstrationTalk` plays a demonstration through
the same interface: nothing is sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from posttrain.core.content import Content, ContentPart, content_of, mapped
from posttrain.core.exchange.other_seats import SeatTurn
from posttrain.core.ports import Dialogue, PairRenderer, Sampler, Seat, Utterance
from posttrain.core.redact_secrets import scrubbed
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Message, SampledTurn, Segment, Stop
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.templates.rendering_differences import TAIL, opening
from posttrain.system.errors import ConfigError, DataError, InvariantError, nearest


@dataclass(frozen=True)
class Player:
    """The player of a seat, the policy or any other model: a sampler with its own encoder and sampling settings."""

    sampler: Sampler
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    sampling: Sampling


@dataclass
class SeatUsage:
    """Turns and tokens that all seats of one episode have used so far, and the turns of the untrained seats."""

    limits: EpisodeLimits
    turns: int = 0
    """Turns begun over all seats, without those that were cancelled."""
    tokens: int = 0
    """Tokens over all seats. A turn that is being sampled counts with the most it may have."""
    trained: int = 0
    """Turns of the trained seat that have ended."""
    others: list[SeatTurn] = field(default_factory=list[SeatTurn])


class SeatConversation:
    """A seat (`core.ports.Seat`) with its transcript. It has several if a template rewrote the history.

    Args:
        spent: of the whole episode, since its limits hold over all seats together.
        place: maps the number of this seat's turn to the key of its random numbers.
    """

    def __init__(self, player: Player, task: str, spent: SeatUsage, place: Callable[..., int]) -> None:
        self._sampler, self._dialogue, self._sampling = player.sampler, player.dialogue(task), player.sampling
        self._spent, self._place = spent, place
        self._transcript = Transcript(player.sampling)
        self._closed: list[Transcript] = []
        """Ended transcripts, whose history the template then wrote anew."""
        # The spoken tokens of all turns before the last one, and the ids of the last one.
        self._before, self._last = 0, np.zeros(0, np.int32)
        self.turns: list[str] = []
        self.lengths: list[int] = []
        """Tokens of each turn."""
        self.cut = False
        """Whether a turn ended by an exception while it was sampled: the time limit, the environment, or an error of
        the engine. Its tokens are unknown."""

    @property
    def format(self) -> str | None:
        return self._dialogue.format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        # What comes after the task's own prompt is the world's, such as the error of a tool that quotes its key.
        ids = self._dialogue.see(content if not self.turns else without_secrets(content), tools)
        if self._dialogue.restarted:
            # The template wrote earlier turns anew. What was sampled stays as it was in a segment of its own: its
            # log-probs are those under the old context.
            self._closed.append(self._transcript)
            self._transcript = Transcript(self._sampling)
        # Cut to the context, so that the sequence can be packed; the next `say` finds no room and ends with `context`.
        self._transcript.see(ids[: max(0, self._sampler.context - len(self._transcript))])

    async def say(self, most: int | None = None) -> Utterance:
        allowed, limit = self._room(most)
        if allowed < 1:
            return Utterance("", limit, 0)
        # Read before the turn is in the transcript: a template may end the prompt with the tag that opens a thought.
        opened = opening(self._dialogue.text(self._transcript.ids[-TAIL:]))
        said = await self._generate(allowed)
        self._transcript.say(said)
        self.lengths.append(len(said.ids))
        text = self._dialogue.said(said.ids)
        # Characters are counted in the last turn alone (`spoken_upto`), so its ids are kept apart.
        self._before += len(self._last)
        self._last = said.ids
        self.turns.append(text)
        self._record_turn(text, len(said.ids))
        # The engine knows only the tokens that it was given. Which limit made them so few is known here.
        stop = limit if said.stop is Stop.LENGTH and len(said.ids) == allowed else said.stop
        return Utterance(text, stop, len(said.ids), opened)

    async def _generate(self, allowed: int) -> SampledTurn:
        """Sample the next turn, with its tokens reserved: seats that speak at once stay within the limits."""
        spent = self._spent
        # Two seats may sample at once, each before the other has ended: so the most that the turn may have is taken
        # now, and what it did not use is given back.
        spent.turns, spent.tokens = spent.turns + 1, spent.tokens + allowed
        try:
            said = await self._sampler.generate(
                self._transcript.ids, shorter(self._sampling, allowed), self._place(len(self.turns))
            )
        # A cancelled turn (time, an aborted sibling) is a BaseException. Its tokens are lost: they count for nobody.
        except BaseException:
            spent.turns, spent.tokens = spent.turns - 1, spent.tokens - allowed
            self.cut = True
            raise
        spent.tokens += len(said.ids) - allowed
        return said

    def _room(self, most: int | None) -> tuple[int, Stop]:
        """(tokens the next turn may have, the stop reason if it would need more), by the narrowest limit
        of the episode. The engine keeps the context's own."""
        # Turns first, since they need no count of tokens. The context is no part of
        # `allowed`: the engine itself ends a turn there, with a reason of its own.
        spent, limits = self._spent, self._spent.limits
        if limits.turns is not None and spent.turns >= limits.turns:
            return 0, Stop.TURNS
        room = self._sampler.context - len(self._transcript)
        if room < 1:
            return 0, Stop.CONTEXT
        allowed, reason = self._sampling.max_tokens, Stop.LENGTH
        # What the environment asks for is a shorter turn, not another limit: the reason stays `length`.
        if most is not None and most < allowed:
            allowed = most
        if limits.tokens is not None and limits.tokens - spent.tokens < allowed:
            allowed, reason = limits.tokens - spent.tokens, Stop.TOKENS
        return allowed, reason

    def _record_turn(self, text: str, tokens: int) -> None:
        """Called after each ended turn of this seat, with its text and its number of tokens."""
        raise NotImplementedError


class OtherSeat(SeatConversation):
    """A seat that is not trained. The record keeps its text and token counts only (`SeatTurn`). `policy`: whether the
    policy's engine speaks for it."""

    def __init__(
        self, name: str, player: Player, task: str, spent: SeatUsage, place: Callable[..., int], *, policy: bool
    ) -> None:
        super().__init__(player, task, spent, place)
        self._name, self._by_policy = name, policy

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Without secrets from the first word on: its prompt is written during the episode."""
        super().see(without_secrets(content), tools)

    def _record_turn(self, text: str, tokens: int) -> None:
        self._spent.others.append(SeatTurn(self._name, scrubbed(text), tokens, self._spent.trained, self._by_policy))


class Conversation(SeatConversation):
    """The `core.ports.Talk` of an episode: the trained seat, with access to the other seats.

    Args:
        policy: plays the trained seat. It plays the others too if there are no `players`.
        place: maps the coordinates of a turn to the key of its random numbers. They are (turn) for the trained seat and
            ("seat", name, turn) for another.
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
        super().__init__(policy, task, SeatUsage(limits), place)
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
            # The seat's name is in the place of its random numbers, so
            # that a seat that speaks more changes no draw of another.
            by_policy, place = player.sampler is self._policy.sampler, partial(self._place, "seat", name)
            self._seats[name] = OtherSeat(name, player, self._task, self._spent, place, policy=by_policy)
        return self._seats[name]

    def _record_turn(self, text: str, tokens: int) -> None:
        self._spent.trained += 1

    def pay(self, source: str, score: float) -> None:
        if not self.turns:
            raise InvariantError(f"reward {source!r} was paid before the policy said anything: pay() follows a turn")
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=self.spoken, paid=True))

    def leave(self, state: Any) -> None:
        self.state = state

    @property
    def spoken(self) -> int:
        """Tokens of the trained seat's ended turns."""
        return self._before + len(self._last)

    @property
    def others(self) -> tuple[SeatTurn, ...]:
        return tuple(self._spent.others)

    @property
    def engine_tokens(self) -> int:
        """Tokens of all ended turns that the policy's engine sampled, in any seat."""
        return self.spoken + sum(t.tokens for t in self._spent.others if t.policy)

    def spoken_upto(self, characters: int) -> int:
        """Spoken tokens up to this character of the last turn's text, with those of all earlier turns."""
        return self._before + tokens_upto(self._dialogue.text, self._last, characters)

    def segments(self) -> tuple[Segment, ...]:
        """The transcripts as segments. A last one without a spoken token is left out if there are others."""
        # A rewritten history in which nothing was said has no token to learn. One
        # transcript is always left, also of an episode in which nobody spoke.
        open_ = [self._transcript] if self._transcript.spoke or not self._closed else []
        return tuple(t.segment() for t in (*self._closed, *open_))


class DemonstrationTalk:
    """A `Talk` whose turns are those of a demonstration. The environment answers them as it answers the policy; where
    it asks for more turns, that is a DataError. `chat`: whether its prompt is messages, not plain text."""

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
        self._renderer, self._dialogue, self._script = renderer, dialogue, tuple(turns)
        self._chat, self._task = chat, task
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
        # `most` limits what is sampled. A demonstrated turn is said whole.
        if len(self.turns) == len(self._script):
            raise DataError(
                f"task {self._task!r}: the demonstration has {len(self._script)} turns, and the episode goes on:"
                " correct the environment's demonstrate()"
            )
        ids = self._renderer.completion_ids(
            self._script[len(self.turns)], chat=self._chat, task=self._task, behind=self.transcript.ids
        )
        opened = opening(self._dialogue.text(self.transcript.ids[-TAIL:]))
        self.transcript.show(ids)
        self.turns.append(self._dialogue.said(ids))
        self._before, self._last = self.spoken, ids
        self.spoken += len(ids)
        return Utterance(self.turns[-1], Stop.SAID, len(ids), opened)

    def seat(self, name: str) -> Seat:
        raise DataError(
            f"task {self._task!r}: a demonstration says the trained seat's turns only, and the environment asks seat"
            f" {name!r} to speak. Demonstrate tasks without other seats, or write the other's words into the prompt"
        )

    def pay(self, source: str, score: float) -> None:
        self.paid.append(Judged(source, 1.0, Verdict.value(score), end=self.spoken, paid=True))

    def spoken_upto(self, characters: int) -> int:
        return self._before + tokens_upto(self._dialogue.text, self._last, characters)

    def leave(self, state: Any) -> None:
        self.state = state


def without_secrets(content: str | Sequence[Message]) -> str | list[Message]:
    """An observation without secrets, since a tool's error may quote a key. It is applied before policy and record."""
    if isinstance(content, str):
        return scrubbed(content)
    return [cast("Message", {**m, "content": _without_secrets(content_of(m["content"]))}) for m in content]


def _without_secrets(content: Content) -> Content:
    """Parts are joined later, so a secret that is cut over several of them makes them one part."""
    clean = mapped(content, scrubbed)
    # Both are texts or neither is. Both are tested, so that a type checker knows of both.
    if isinstance(clean, str) or isinstance(content, str):
        return clean
    # Joined, more is scrubbed than in the parts: a secret lay across their borders.
    whole = scrubbed("".join(part.text for part in content))
    if whole == "".join(part.text for part in clean):
        return clean
    return (ContentPart("text", whole), *(part for part in clean if part.type != "text"))


def shorter(sampling: Sampling, most: int) -> Sampling:
    """The same distribution at every token, with at most `most` tokens."""
    if most >= sampling.max_tokens:
        return sampling
    # A turn that may have fewer tokens than it must have could never end.
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def tokens_upto(text: Callable[[np.ndarray], str], ids: np.ndarray, characters: int) -> int:
    """Number of tokens of `ids` that make this many characters, found by bisection. `text` decodes ids."""
    # The bytes of half a character at the end of a beginning may decode to more characters than the whole one (U+FFFD
    # for each): they are left out, so that text never shrinks.
    return bisect_left(range(len(ids)), characters, key=lambda n: len(text(ids[:n]).rstrip("\ufffd")))
