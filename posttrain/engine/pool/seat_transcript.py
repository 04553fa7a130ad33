"""The accounts of what passed over the seats of one episode, kept on both sides: where the environment plays, and at
the conversation.

Messages between the two can be lost, doubled or given to another episode, and an episode whose process died is played
again. The two accounts are made from nothing that these ways share, so equal ones show that the environment heard what
the conversation holds, and wrote what stands in it, each once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.ports import Seat, Talk, Utterance
from posttrain.core.types import Message
from posttrain.system.errors import InvariantError

GIVEN_UP = ""
"""Stands in place of a turn's digest where nobody waited for the turn any more, or it has not ended."""


@dataclass(frozen=True)
class SeatAccount:
    """The account of what passed over one seat."""

    written: str
    """A digest of all that was written to it, in order; for the trained seat with what was paid."""
    turns: tuple[str, ...]
    """A digest of each turn, in the order in which they were asked."""


@dataclass
class TalkAccount:
    """Makes the accounts of all seats of an episode from what passes over them. A seat is known by its name; None is
    the trained one."""

    _written: dict[str | None, list[bytes]] = field(default_factory=dict[str | None, list[bytes]])
    _turns: dict[str | None, list[str]] = field(default_factory=dict[str | None, list[str]])

    def writes(self, seat: str | None, *what: Any) -> None:
        """Something was written to a seat, or paid."""
        self._written.setdefault(seat, []).append(_digest(what))

    def asks(self, seat: str | None) -> int:
        """A turn begins; returns its number at this seat."""
        turns = self._turns.setdefault(seat, [])
        # Until it is heard it counts as given up: so a turn that never ends has the right entry already.
        turns.append(GIVEN_UP)
        return len(turns) - 1

    def hears(self, seat: str | None, number: int, said: Utterance) -> None:
        """Turn `number` of a seat has ended."""
        self._turns[seat][number] = _digest((said.text, str(said.stop), said.tokens)).hex()

    def made(self) -> Mapping[str | None, SeatAccount]:
        """Returns the account of each seat so far."""
        return {
            seat: SeatAccount(
                hashlib.blake2b(b"".join(self._written.get(seat, ())), digest_size=8).hexdigest(),
                tuple(self._turns.get(seat, ())),
            )
            for seat in {*self._written, *self._turns}
        }


def _digest(what: Any) -> bytes:
    """Returns the digest of plain data. Other values count by their type alone."""
    # The same content must give the same digest on both sides, so addresses or versions of objects must not enter it.
    # Lists and tuples are written alike.
    text = json.dumps(what, default=lambda x: type(x).__name__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class AccountedSeat:
    """A `core.ports.Seat` that is the given one and keeps the account."""

    def __init__(self, seat: Seat, name: str | None, account: TalkAccount) -> None:
        self._seat, self._name, self._account = seat, name, account

    @property
    def format(self) -> str | None:
        return self._seat.format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._account.writes(self._name, content, tools)
        self._seat.see(content, tools)

    async def say(self, most: int | None = None) -> Utterance:
        number = self._account.asks(self._name)
        utterance = await self._seat.say(most)
        self._account.hears(self._name, number, utterance)
        return utterance


class AccountedTalk(AccountedSeat):
    """A `core.ports.Talk` that is the given one and keeps the account."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk, None, TalkAccount())
        self._talk = talk

    def account(self) -> Mapping[str | None, SeatAccount]:
        return self._account.made()

    def seat(self, name: str) -> Seat:
        return AccountedSeat(self._talk.seat(name), name, self._account)

    def pay(self, source: str, score: float) -> None:
        self._account.writes(None, source, score)
        self._talk.pay(source, score)

    def leave(self, state: Any) -> None:
        self._talk.leave(state)


def same_account(
    who: str, here: Mapping[str | None, SeatAccount], there: Mapping[str | None, SeatAccount] | None
) -> None:
    """Check that a conversation holds what its environment wrote and heard elsewhere, and nothing besides. A turn that
    the environment gave up may have been said meanwhile.

    Raises:
        InvariantError: the two accounts differ.
    """
    # A seat that one side never used equals one to which nothing was written.
    nothing = SeatAccount(hashlib.blake2b(digest_size=8).hexdigest(), ())
    for seat in {**here, **(there or {})}:
        ours, theirs = here.get(seat, nothing), (there or {}).get(seat, nothing)
        if difference := _differs(ours, theirs):
            name = "the trained seat" if seat is None else f"seat {seat!r}"
            raise InvariantError(
                f"{who}: {difference} at {name}. Messages between the two were lost, doubled or given to another"
                " episode, or an episode whose process died was not taken up where it was. What was judged and learned"
                " would not be what was said. Set placement.environments=0, or go on from the last checkpoint"
                " (--resume)"
            )


def _differs(ours: SeatAccount, theirs: SeatAccount) -> str:
    """Returns the difference between a conversation and its environment at one seat; '' where they do not differ."""
    if len(ours.turns) != len(theirs.turns):
        return f"the conversation has {len(ours.turns)} turns, and the environment asked for {len(theirs.turns)}"
    for number, (said, heard) in enumerate(zip(ours.turns, theirs.turns, strict=True), 1):
        if heard not in (said, GIVEN_UP):
            return f"the environment heard another turn {number} than the conversation holds"
    return "" if ours.written == theirs.written else "the environment wrote something else than the conversation holds"
