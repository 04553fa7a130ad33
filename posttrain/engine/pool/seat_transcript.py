"""The accounts of what passed over the seats of one episode, kept on both sides: where the environment plays, and at
the conversation.

Messages between the two can be lost, doubled or given to another episode, and an episode whose process died is played
again. Each side makes its account from the calls of its own seats, and not from the messages. So equal accounts show
that the environment heard what the conversation holds, and wrote what stands in it, each once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def _digest(what: Any) -> bytes:
    """Returns the digest of plain data. Other values count by their type alone."""
    # Both sides must give the same: addresses of objects must not enter it, and lists and tuples are written alike.
    text = json.dumps(what, default=lambda x: type(x).__name__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class AccountedSeat:
    """A `core.ports.Seat` that is the given one and keeps the account of what passes over it."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._written: list[bytes] = []
        self._turns: list[str] = []

    @property
    def format(self) -> str | None:
        return self._seat.format

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        # The other side gets tuples, so any other kind of sequence is digested as one here too.
        shown = content if isinstance(content, str) else tuple(content)
        self._written.append(_digest((shown, tuple(tools))))
        self._seat.see(shown, tuple(tools))

    async def say(self, most: int | None = None) -> Utterance:
        number = len(self._turns)
        # Until it is heard it counts as given up: so a turn that never ends has the right entry already.
        self._turns.append(GIVEN_UP)
        said = await self._seat.say(most)
        self._turns[number] = _digest((said.text, str(said.stop), said.tokens)).hex()
        return said

    def account(self) -> SeatAccount:
        written = hashlib.blake2b(b"".join(self._written), digest_size=8).hexdigest()
        return SeatAccount(written, tuple(self._turns))


class AccountedTalk(AccountedSeat):
    """A `core.ports.Talk` that is the given one and keeps the accounts of its seats."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        self._talk = talk
        self._seats: dict[str | None, AccountedSeat] = {None: self}

    def accounts(self) -> Mapping[str | None, SeatAccount]:
        """The account of each seat by its name; None is the trained one."""
        return {name: seat.account() for name, seat in self._seats.items()}

    def seat(self, name: str) -> Seat:
        if name not in self._seats:
            self._seats[name] = AccountedSeat(self._talk.seat(name))
        return self._seats[name]

    def pay(self, source: str, score: float) -> None:
        self._written.append(_digest((source, score)))
        self._talk.pay(source, score)

    def leave(self, state: Any) -> None:
        self._talk.leave(state)


def same_account(
    who: str, here: Mapping[str | None, SeatAccount], there: Mapping[str | None, SeatAccount] | None
) -> None:
    """InvariantError where a conversation does not hold what its environment wrote and heard elsewhere, and nothing
    besides. A turn that the environment gave up may have been said meanwhile."""

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
