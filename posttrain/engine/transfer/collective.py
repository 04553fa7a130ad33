"""A broadcast by torch.distributed: one sender, and receivers that take part whenever they need the version.

    publish     the block is made in the sender's memory, with the cast inside; from then on a thread serves it
    read        a receiver takes a ticket and waits. When all engines have one, or `GATHER` seconds after the first,
                those that have one are called: they make a group with the sender, and the block goes to them in buckets
    retire      ends the thread

A round that breaks is given up by all of its members. Those that live take a new ticket, and so does a process that was
started in the place of a dead one. So nothing is mended after a death, and nobody waits for a process that is being
started. Every wait ends, with an error that names the sender, the receiver and the first tensor that did not come.

gloo carries it. The group is made anew for each round (3 ms on one machine), over a store of keys in the sender's
process. The store listens at the sender's address only. It has no password, so use it where the network is your own.
What comes is checked against the parcel, which comes by another way.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise, repeat
from typing import Any

import torch
from torch import distributed

from posttrain.engine.transfer.block import largest
from posttrain.engine.transfer.parcel import Buffer, Parcel, ParcelDamageError, ParcelGoneError, ParcelTimeoutError
from posttrain.engine.transfer.sender import this_process

C10D: Any = distributed
"""torch.distributed as Any, because its stores and groups have no types."""
COLLECTIVE = "collective"
BUCKET = 64 << 20
"""Bytes of one broadcast."""
LOOPBACK = "127.0.0.1"
GATHER = 1.0
"""Seconds from the first ticket of a version until those are called that have one."""
CONNECT = 5.0
"""Seconds in which the members of a round must have found each other. A member that died meanwhile never comes."""
LOOKS, OFTEN, SELDOM = 200, 0.001, 0.05
"""A wait looks at the keys again and again: LOOKS times every OFTEN seconds, then every SELDOM seconds. torch's own
waits are not used, because torch writes a warning to the terminal whenever one of them ends."""
ROUNDS = 10
"""Broken rounds after which a receiver gives up."""
END = 1.0
"""Seconds that a thread has to end after its version was retired."""
OPEN, CAME, CALL = "open", "came", "go/{}"
"""Keys of a version: it is there; how many tickets were taken; of a called ticket: its round, rank and the members."""


@dataclass(frozen=True)
class BroadcastPlace:
    """`Parcel.place` of a broadcast."""

    address: str
    number: int
    size: int
    bucket: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.address}/{self.number}/{self.size}/{self.bucket}/{round(1000 * self.seconds)}"

    @classmethod
    def of(cls, parcel: Parcel) -> BroadcastPlace:
        """The place of a parcel; ParcelDamageError where `Parcel.place` is no place of a broadcast."""
        address, *numbers = parcel.place.split("/")
        # The size is bounded by what the entries can need: a receiver takes this much memory before it connects.
        if len(numbers) != 4 or not all(x.isdecimal() for x in numbers) or int(numbers[1]) > largest(parcel):
            raise ParcelDamageError(f"{parcel.place!r} is no place of a broadcast. Use parcels as they were published")
        number, size, bucket, milliseconds = map(int, numbers)
        return cls(address, number, size, max(bucket, 1), milliseconds / 1000)


class CollectiveCarrier:
    """A `parcel.Carrier` over torch.distributed.

    Args:
        engines: receivers that are waited for, at most `GATHER` seconds, before the first round of a version.
        host: the address at which receivers find this process.
        seconds: how long a bucket may take. A receiver waits twice as long until it is called.
    """

    transport = COLLECTIVE

    def __init__(self, engines: int, *, host: str = LOOPBACK, seconds: float = 60.0, bucket: int = BUCKET) -> None:
        self.engines, self.seconds, self.bucket = engines, seconds, bucket
        # The socket is made here and given to torch: its own store would listen at all addresses of the machine.
        listening = socket.create_server((host, 0))
        self.address = f"{host}:{listening.getsockname()[1]}"
        self.store = _store(self.address, seconds, listening.detach())
        self._count = 0
        self.open: dict[str, CollectiveSink] = {}
        """The sinks that are read, by place, so that `remove` can end them."""
        atexit.register(self.close)  # a thread that still waits in torch when Python ends would crash the process

    def begin(self, version: int) -> CollectiveSink:
        self._count += 1
        return CollectiveSink(self, self._count)

    def remove(self, place: str) -> None:
        if (sink := self.open.pop(place, None)) is not None:
            sink.end()

    def close(self) -> None:
        atexit.unregister(self.close)
        for place in [*self.open]:
            self.remove(place)


class CollectiveSink:
    """A `parcel.Sink`: memory of this process. From `announce` to `end` a thread sends it to all that come."""

    def __init__(self, carrier: CollectiveCarrier, number: int) -> None:
        self._carrier, self._number = carrier, number
        self._block = bytearray()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"weights {number}", daemon=True)

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        # Places grow, but the head, at byte 0, is written last. Gaps between tensors are zeros.
        self._block.extend(bytes(max(at + len(data) - len(self._block), 0)))
        self._block[at : at + len(data)] = data

    def announce(self) -> str:
        c = self._carrier
        place = str(BroadcastPlace(c.address, self._number, len(self._block), c.bucket, c.seconds))
        # Set before the thread runs: a receiver that finds no such key takes the version for retired.
        C10D.PrefixStore(str(self._number), c.store).set(OPEN, "1")
        c.open[place] = self
        self._thread.start()
        return place

    def drop(self) -> None:
        return None  # the block is memory of this object alone until it is announced

    def end(self) -> None:
        """End the thread and remove the keys of this version."""
        store = self._carrier.store
        # The thread first, because it may still set keys. Keys that are left would stay until the run ends.
        self._over.set()
        self._thread.join(END)
        for key in [k for k in store.list_keys() if k.startswith(f"{self._number}/")]:
            store.delete_key(key)

    def _serve(self) -> None:
        """What the thread runs: one round after the other, until the version is retired."""
        c, served, wanted = self._carrier, 0, self._carrier.engines
        with suppress(RuntimeError):  # the store is gone, and the run with it
            # A connection of its own: while a thread uses a connection, other threads must wait for it.
            keys = C10D.PrefixStore(str(self._number), _store(c.address, c.seconds))
            while last := self._await_tickets(keys, served, wanted):
                # The first round waits for all engines. Later ones serve receivers that came late or whose round broke,
                # as soon as there is one.
                self._round(keys, range(served + 1, last + 1))
                served, wanted = last, 1

    def _await_tickets(self, keys: Any, served: int, wanted: int) -> int:
        """Wait for tickets after `served`; returns the last one, 0 when the version was retired."""
        last, until = served, float("inf")
        for pause in _pauses():
            if last >= served + wanted or time.monotonic() > until:
                break
            if self._over.wait(pause):
                return 0
            # Adding 0 reads the counter.
            if (last := int(keys.add(CAME, 0))) > served:
                until = min(until, time.monotonic() + GATHER)
        return last

    def _round(self, keys: Any, tickets: Sequence[int]) -> None:
        """One broadcast to the receivers with these tickets. Those that it does not reach take a new ticket."""
        # The first ticket names the round, and no two rounds have the same. The sender is rank 0.
        c, round_number, world = self._carrier, tickets[0], len(tickets) + 1
        for rank, ticket in enumerate(tickets, 1):
            keys.set(CALL.format(ticket), f"{round_number} {rank} {world}")
        with suppress(RuntimeError):
            group = _group(keys, round_number, 0, world, c.address, c.seconds)
            for _, bucket in _buckets(self._block, c.bucket):
                _broadcast(group, bucket, c.seconds)
            _meet(group, c.seconds)


class CollectiveFetch:
    """A `parcel.Fetch`: takes part in the broadcasts of a parcel until one has brought it."""

    def __init__(self) -> None:
        self._store: tuple[str, Any] | None = None

    def __call__(self, parcel: Parcel) -> Buffer:
        """The block. ParcelGoneError where the version was retired; ParcelTimeoutError names the sender, this process
        and the first tensor that did not come."""
        place = BroadcastPlace.of(parcel)
        block, done, why = bytearray(place.size), 0, ""
        try:
            if self._store is None or self._store[0] != place.address:
                self._store = place.address, _store(place.address, place.seconds)
            keys = C10D.PrefixStore(str(place.number), self._store[1])
            for _ in range(ROUNDS):
                # Each round has a new ticket: the group of the broken one cannot be used again.
                called = _wait_for_call(keys, parcel, 2 * place.seconds)
                if called is None:
                    why = f"it did not call this engine within {2 * place.seconds:g} s"
                    break
                done, broken = self._take(keys, called, place, block)
                if not broken:
                    return block
                why = f"{ROUNDS} broadcasts broke, the last one by {broken}"
        except (RuntimeError, OSError) as lost:
            # Another attempt connects anew.
            self._store = None
            why = f"{place.address} does not answer ({lost})"
        tensor = tensor_at(sorted((e.offset, e.name) for e in parcel.entries), done)
        raise ParcelTimeoutError(
            f"weights of version {parcel.version}: {parcel.sender} did not send them to {this_process()}, from tensor"
            f" {tensor!r} on: {why}. Look whether the learner still runs and whether this machine can connect to it, or"
            " take another placement.transport"
        )

    def _take(
        self, keys: Any, called: tuple[int, int, int], place: BroadcastPlace, block: bytearray
    ) -> tuple[int, str]:
        """Take part in one round. Returns the first byte that did not come, and why; '' where all came.

        The group must end with a round that broke, because its end tells the other members. An error that left this
        call would keep the call's variables alive, and with them the group. So the error is returned as text.
        """
        done = 0
        try:
            group = _group(keys, *called, place.address, place.seconds)
            for at, part in _buckets(block, place.bucket):
                done = at
                _broadcast(group, part, place.seconds)
        except RuntimeError as broken:
            return done, str(broken)
        with suppress(RuntimeError):  # the bytes are here, even if another member lacks them
            _meet(group, place.seconds)
        return place.size, ""


def tensor_at(starts: list[tuple[int, str]], at: int) -> str:
    """The tensor that ends behind byte `at`, from (first byte, name) in order."""
    return next((name for (_, name), (end, _) in pairwise(starts) if end > at), starts[-1][1] if starts else "")


def _pauses() -> Iterator[float]:
    """Seconds until the next look."""
    return chain(repeat(OFTEN, LOOKS), repeat(SELDOM))


def _wait_for_call(keys: Any, parcel: Parcel, seconds: float) -> tuple[int, int, int] | None:
    """Take a ticket and wait: (round, rank, members). None where nobody calls, ParcelGoneError where it was retired."""
    until, ticket = time.monotonic() + seconds, 0
    for pause in _pauses():
        # Before each step: `end` may remove the keys at any time, and a ticket that is added then would wait in vain.
        if not keys.check([OPEN]):
            break
        ticket = ticket or int(keys.add(CAME, 1))
        if keys.check([CALL.format(ticket)]):
            round_number, rank, members = map(int, keys.get(CALL.format(ticket)).decode().split())
            return round_number, rank, members
        if time.monotonic() > until:
            return None
        time.sleep(pause)
    raise ParcelGoneError(
        f"the weights of version {parcel.version} are gone: {parcel.sender} retired them. Read a newer version"
    )


def _buckets(block: bytearray, bucket: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first byte, bytes) of each bucket, without a copy."""
    whole = torch.frombuffer(block, dtype=torch.uint8)
    return zip(range(0, len(block), bucket), whole.split(bucket), strict=True)


def _store(address: str, seconds: float, listening: int | None = None) -> Any:
    """A connection to the store of keys at this address. `listening`: the socket where this process holds the store."""
    host, _, port = address.rpartition(":")
    return C10D.TCPStore(
        host,
        int(port),
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listening,
    )


def _group(keys: Any, round_number: int, rank: int, members: int, address: str, seconds: float) -> Any:
    """The processes of one round: none of torch.distributed's named groups, which a learner may use itself."""
    keys = C10D.PrefixStore(f"round/{round_number}", keys)
    options = C10D.ProcessGroupGloo._Options()
    # Short: members that died after they were called never connect, and the others should soon take new tickets.
    options._timeout = timedelta(seconds=min(seconds, CONNECT))
    options._threads = 1  # one bucket at a time; torch 2.13 keeps 120 bytes of every thread that has waited for one
    options._devices = [C10D.ProcessGroupGloo.create_device(hostname=_own_address(address))]
    return C10D.ProcessGroupGloo(keys, rank, members, options)


def _own_address(address: str) -> str:
    """The address of this machine on the way to that one. Nothing is sent."""
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, address_there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # A datagram socket sends nothing when it connects: the system only chooses the way, and with it the address.
        probe.connect(address_there)
        return str(probe.getsockname()[0])


def _broadcast(group: Any, bucket: torch.Tensor, seconds: float) -> None:
    """Send a bucket from rank 0 to all members, or receive it."""
    options = C10D.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=seconds)
    group.broadcast([bucket], options).wait(options.timeout)


def _meet(group: Any, seconds: float) -> None:
    """Wait until all members of the group are here."""
    # A reduction ends at no member before all have come. A broadcast can end at the sender while others still read.
    options = C10D.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    group.allreduce([torch.zeros(1)], options).wait(options.timeout)
