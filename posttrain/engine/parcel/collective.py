"""A broadcast by torch.distributed: one sender, and receivers that all take part, each under its rank from 1.

    publish     the block is made in the sender's memory, with the cast inside; a thread waits for the receivers
    read        each receiver says that it is there; when all are, the block goes to all of them in buckets
    retire      waits for that thread, and raises what happened to it

gloo carries it between processors. NCCL carries it between GPUs by the same code: each bucket then goes through the
memory of the GPU. Who takes part is agreed on for each version, over a store of keys in the sender's process, and the
group of processes is made anew (3 ms for gloo on one machine). So a receiver that died and was replaced takes part in
the next version, and nothing of a broadcast that failed is left in it.

Every wait ends after `seconds` with an error that names who did not come, or where the bytes stopped.

The store listens at the sender's address only. It has no password, so use it where the network is your own.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import distributed

from posttrain.engine.parcel.block import Buffer, largest
from posttrain.engine.parcel.parcel import Parcel, ParcelDamageError, ParcelTimeoutError
from posttrain.engine.parcel.sender import this_process

C10D: Any = distributed
"""Its stores and groups have no types."""
COLLECTIVE = "collective"
BUCKET = 64 << 20
"""Bytes of one broadcast. On a GPU a bucket is also the memory that the transfer needs."""
LOOPBACK = "127.0.0.1"


class CollectiveCarrier:
    """A `carrier.Carrier` over torch.distributed, for receivers of ranks 1 to `engines`.

    Args:
        host: the address at which receivers find this process.
        device: `cuda` sends by NCCL.
        seconds: how long each wait lasts at most.
    """

    transport = COLLECTIVE

    def __init__(
        self, engines: int, *, host: str = LOOPBACK, device: str = "cpu", seconds: float = 60.0, bucket: int = BUCKET
    ) -> None:
        self.engines, self.device, self.seconds, self.bucket = engines, device, seconds, bucket
        listening = socket.create_server((host, 0))
        self.address = f"{host}:{listening.getsockname()[1]}"
        self.store = _store(self.address, seconds, listening.detach())
        self._count = 0
        self._rounds: dict[str, CollectiveSink] = {}

    def begin(self, version: int) -> CollectiveSink:
        self._count += 1
        return CollectiveSink(self, version, self._count)

    def announced(self, place: str, sink: CollectiveSink) -> None:
        self._rounds[place] = sink

    def remove(self, place: str) -> None:
        """Wait until the broadcast has ended.

        Raises:
            ParcelTimeoutError: a receiver did not come, or stopped taking part.
        """
        if (sink := self._rounds.pop(place, None)) is not None:
            sink.finish()

    def close(self) -> None:
        """Forget what was published. Broadcasts under way end by themselves, or by their time-out."""
        self._rounds.clear()


class CollectiveSink:
    """A `carrier.Sink`: memory of this process, which a thread broadcasts after `announce`."""

    def __init__(self, carrier: CollectiveCarrier, version: int, number: int) -> None:
        self._carrier, self._version, self._number = carrier, version, number
        self._block = bytearray()
        self._starts: list[tuple[int, str]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"weights of version {version}", daemon=True)

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        self._block.extend(bytes(max(at + len(data) - len(self._block), 0)))
        self._block[at : at + len(data)] = data
        self._starts.append((at, tensor or "the table"))

    def announce(self) -> str:
        c = self._carrier
        place = f"{c.address}/{c.engines + 1}/{self._number}/{len(self._block)}/{c.bucket}"
        c.announced(place, self)
        self._thread.start()
        return place

    def drop(self) -> None:
        return None

    def finish(self) -> None:
        """Wait for the thread, and raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._broadcast()
        except Exception as error:
            self._error = error
        finally:
            mine = f"{self._number}/"
            for key in [k for k in self._carrier.store.list_keys() if k.startswith(mine)]:
                self._carrier.store.delete_key(key)

    def _broadcast(self) -> None:
        c = self._carrier
        keys = C10D.PrefixStore(
            str(self._number), _store(c.address, c.seconds)
        )  # another wait would lock one they share
        ranks = range(1, c.engines + 1)
        try:
            keys.wait([f"here/{r}" for r in ranks], timedelta(seconds=c.seconds))
        except C10D.DistStoreError as late:
            missing = [f"engine {r}" for r in ranks if not keys.check([f"here/{r}"])]
            raise self._late(", ".join(missing), 0, f"did not come to take them within {c.seconds:g} s") from late
        keys.set("go", "1")
        done = 0
        try:
            group = _group(keys, 0, c.engines + 1, c.address, c.device, c.seconds)
            for at, bucket in _buckets(self._block, c.bucket):
                done = at
                _send(group, bucket, c.device, c.seconds)
            keys.wait([f"done/{r}" for r in ranks], timedelta(seconds=c.seconds))
        except RuntimeError as broken:  # what torch.distributed raises, DistStoreError among them
            names = {r: f"engine {r} ({keys.get(f'here/{r}').decode()})" for r in ranks}
            stopped = [names[r] for r in ranks if not keys.check([f"done/{r}"])]
            raise self._late(", ".join(stopped), done, f"stopped taking part ({broken})") from broken

    def _late(self, peer: str, at: int, what: str) -> ParcelTimeoutError:
        tensor = tensor_at(self._starts, at)
        return ParcelTimeoutError(
            f"weights of version {self._version}: {peer} {what}; the first tensor it lacks is {tensor!r}. Look whether"
            " it still runs, replace it, and publish again",
            version=self._version,
            peer=peer,
            tensor=tensor,
        )


class CollectiveFetch:
    """A `carrier.Fetch`: takes part in the broadcast of a parcel as `rank`, which is this receiver's alone."""

    def __init__(self, rank: int, *, device: str = "cpu", seconds: float = 60.0) -> None:
        self.rank, self.device, self.seconds = rank, device, seconds
        self._store: tuple[str, Any] | None = None

    def __call__(self, parcel: Parcel) -> Buffer:
        """The block. ParcelTimeoutError names the sender and the first tensor that did not come."""
        starts = sorted((e.offset, e.name) for e in parcel.entries)
        address, world, number, size, bucket = _place(parcel)
        done = 0
        try:
            keys = C10D.PrefixStore(str(number), self._reach(address))
            keys.set(f"here/{self.rank}", this_process())
            keys.wait(["go"], timedelta(seconds=self.seconds))
            group = _group(keys, self.rank, world, address, self.device, self.seconds)
            block = bytearray(size)
            for at, part in _buckets(block, bucket):
                done = at
                _receive(group, part, self.device, self.seconds)
            keys.set(f"done/{self.rank}", "1")
            return block
        except (RuntimeError, OSError) as broken:
            self._store = None
            tensor = tensor_at(starts, done)
            raise ParcelTimeoutError(
                f"weights of version {parcel.version}: {parcel.sender} did not send them to engine {self.rank} within"
                f" {self.seconds:g} s, from tensor {tensor!r} on ({broken}). Look whether all engines of this"
                " broadcast and the learner still run, and publish again",
                version=parcel.version,
                peer=parcel.sender,
                tensor=tensor,
            ) from broken

    def _reach(self, address: str) -> Any:
        if self._store is None or self._store[0] != address:
            self._store = address, _store(address, self.seconds)
        return self._store[1]


def tensor_at(starts: list[tuple[int, str]], at: int) -> str:
    """The tensor that ends behind byte `at`, from (first byte, name) in order."""
    return next((name for (_, name), (end, _) in pairwise(starts) if end > at), starts[-1][1] if starts else "")


def _place(parcel: Parcel) -> tuple[str, int, int, int, int]:
    address, *numbers = parcel.place.split("/")
    if len(numbers) != 4 or not all(x.isdecimal() for x in numbers) or int(numbers[2]) > largest(parcel):
        raise ParcelDamageError(
            f"{parcel.place!r} is no place of a broadcast. Use parcels as they were published",
            version=parcel.version,
            peer=parcel.sender,
        )
    world, number, size, bucket = map(int, numbers)
    return address, world, number, size, max(bucket, 1)


def _buckets(block: bytearray, bucket: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first byte, bytes) of each bucket, without a copy."""
    whole = torch.frombuffer(block, dtype=torch.uint8)
    return zip(range(0, len(block), bucket), whole.split(bucket), strict=True)


def _store(address: str, seconds: float, listening: int | None = None) -> Any:
    host, _, port = address.rpartition(":")
    return C10D.TCPStore(
        host,
        int(port),
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listening,
    )


def _group(keys: Any, rank: int, world: int, address: str, device: str, seconds: float) -> Any:
    """The processes of one broadcast: none of torch.distributed's named groups, which a learner may use itself."""
    within = timedelta(seconds=seconds)
    if device != "cpu":
        options = C10D.ProcessGroupNCCL.Options()
        options._timeout = within
        return C10D.ProcessGroupNCCL(keys, rank, world, options)
    options = C10D.ProcessGroupGloo._Options()
    options._timeout = within
    gloo = C10D.ProcessGroupGloo
    near = address.startswith(f"{LOOPBACK}:")
    options._devices = [gloo.create_device(hostname=LOOPBACK) if near else gloo.create_default_device()]
    return gloo(keys, rank, world, options)


def _send(group: Any, bucket: torch.Tensor, device: str, seconds: float) -> None:
    group.broadcast(bucket.to(device), 0).wait(timedelta(seconds=seconds))


def _receive(group: Any, bucket: torch.Tensor, device: str, seconds: float) -> None:
    there = bucket if device == "cpu" else torch.empty_like(bucket, device=device)
    group.broadcast(there, 0).wait(timedelta(seconds=seconds))
    if there is not bucket:
        bucket.copy_(there)
