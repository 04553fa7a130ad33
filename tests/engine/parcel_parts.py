"""What other processes do in the tests of parcels."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from posttrain.engine.transfer import collective
from posttrain.engine.transfer.parcel import Parcel, ParcelError, ParcelGoneError
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_memory import FOLDER, PREFIX, SharedCarrier


def blocks() -> set[str]:
    """Names of the blocks of weights in this machine's shared memory."""
    return {name for name in os.listdir(FOLDER) if f"/{name}".startswith(PREFIX)}


def numbered(version: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of several sizes and dtypes that all hold the number of their version, made one after the other."""
    for i in range(6):
        yield f"layer.{i}", torch.full((60, 50 + i), float(version))
    yield "steps", torch.full((3,), version, dtype=torch.int64)


def read_again_and_again(link: Connection) -> None:
    """Read the newest parcel that came, over and over; answers (reads, versions, mixed ones, retired too early)."""
    link.send("ready")
    receiver, parcel = ParcelReceiver(), link.recv()
    reads, mixed, gone, seen = 0, 0, 0, set[int]()
    while parcel is not None:
        try:
            held = {float(x) for _, t in receiver.read(parcel) for x in t.unique()}
        except ParcelGoneError:
            gone += 1
        else:
            reads, mixed = reads + 1, mixed + (held != {float(parcel.version)})
            seen.add(parcel.version)
        while parcel is not None and link.poll():
            parcel = link.recv()
    link.send((reads, len(seen), mixed, gone))


def read_once(link: Connection) -> None:
    """Read one parcel, answer the digest of what came, and end."""
    parcel: Parcel = link.recv()
    tensors = dict(ParcelReceiver().read(parcel))
    link.send(float(sum(t.double().sum() for t in tensors.values())))


def take_part(link: Connection) -> None:
    """Read every parcel that comes by broadcast; answers the number that its tensors hold, or the error. A signal that
    comes with a parcel is sent to this process when the second bucket is due."""
    link.send("ready")
    receiver, plain = ParcelReceiver(), collective._broadcast
    while (told := link.recv()) is not None:
        parcel, number = told
        collective._broadcast = raises_at(plain, 2, number) if number else plain
        try:
            held = {float(x) for _, t in receiver.read(parcel) for x in t.unique()}
            link.send(held)
        except ParcelError as error:
            link.send(error)


def raises_at(broadcast: Callable[..., None], bucket: int, number: int) -> Callable[..., None]:
    """The broadcast of a bucket, before which this process gets the signal with this number."""
    count = itertools.count(1)

    def raises(*given: Any) -> None:
        if next(count) == bucket:
            os.kill(os.getpid(), number)
        broadcast(*given)

    return raises


def publish_and(then: str) -> None:
    """Publish a version, say its place, and then sleep or leave without a word."""
    sender = ParcelSender(SharedCarrier())
    print(sender.publish(1, numbered(1)).place, flush=True)
    if then == "sleep":
        time.sleep(60)
    os.environ["POSTTRAIN_TEST_KEPT"] = repr(sender)


if __name__ == "__main__":
    publish_and(sys.argv[1])
