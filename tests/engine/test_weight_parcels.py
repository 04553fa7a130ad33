"""Weights between real processes: no reader sees half of a version, nothing is left behind, what is wrong is named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.transfer import shared_memory
from posttrain.engine.transfer.parcel import ParcelError, ParcelGoneError, ParcelOrderError, ParcelWriteError
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_memory import SharedCarrier, remove_orphans
from tests.engine.parcel_parts import blocks, numbered, read_again_and_again, read_once

pytestmark = pytest.mark.prove
SPAWN = multiprocessing.get_context("spawn")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Which blocks that this process made are still there. Other runs on the machine have blocks too."""
    made, create = list[tuple[str, int]](), shared_memory._create

    def noted() -> tuple[str, int]:
        made.append(create())
        return made[-1]

    monkeypatch.setattr(shared_memory, "_create", noted)
    return lambda: {name.removeprefix("/") for name, _ in made} & blocks()


@pytest.fixture
def sender(own: Callable[[], set[str]]) -> Iterator[ParcelSender]:
    """One over shared memory, which leaves nothing behind."""
    made = ParcelSender(SharedCarrier())
    yield made
    made.close()
    assert not own()


def test_a_reader_never_sees_half_of_a_version(sender: ParcelSender) -> None:
    """Another process reads without pause while 200 versions are published, of which two exist at a time."""
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=read_again_and_again, args=(theirs,))
    reader.start()
    assert ours.recv() == "ready"
    for version in range(200):
        ours.send(sender.publish(version, numbered(version)))
        sender.retire(version - 2)
    ours.send(None)
    reads, seen, mixed, gone = ours.recv()
    reader.join()
    assert mixed == 0 and reads >= 20 and seen >= 10, (reads, seen, mixed, gone)


def test_a_thousand_pushes_leak_nothing(sender: ParcelSender, own: Callable[[], set[str]]) -> None:
    """Blocks, descriptors and resident memory are what they were, on both sides."""
    receiver, weights = ParcelReceiver(), {f"w{i}": torch.randn(100, 64) for i in range(8)}
    me = psutil.Process()

    def push(version: int) -> None:
        parcel = sender.publish(version, weights.items())
        assert sum(t.numel() for _, t in receiver.read(parcel)) == 8 * 6400
        sender.retire(version)

    for version in range(50):
        push(version)
    before = len(own()), me.num_fds(), me.memory_info().rss
    for version in range(50, 1050):
        push(version)
    after = len(own()), me.num_fds(), me.memory_info().rss
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 5e6, "1,000 pushes of 200 kB each left more than 5 MB"


def test_a_reader_that_ends_does_not_take_the_block_along(sender: ParcelSender) -> None:
    """Neither a child, which shares the resource tracker of its parent, nor its end touches what others read."""
    parcel = sender.publish(7, numbered(7))
    wanted = float(sum(t.double().sum() for _, t in numbered(7)))
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=read_once, args=(theirs,))
    reader.start()
    ours.send(parcel)
    assert ours.recv() == wanted
    reader.join()
    assert float(sum(t.double().sum() for _, t in ParcelReceiver().read(parcel))) == wanted


def wait_for(what: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    return what()


@pytest.mark.parametrize("end", ["killed", "leaves"])
def test_a_sender_that_is_killed_or_leaves_without_a_word_leaves_no_block(end: str) -> None:
    then = "sleep" if end == "killed" else "leave"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.parcel_parts", then],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip().removeprefix("/")
    if end == "killed":
        assert name in blocks()
        child.send_signal(signal.SIGKILL)
    assert child.wait(20) == (-signal.SIGKILL if end == "killed" else 0)
    child.stdout.close()
    assert name and wait_for(lambda: name not in blocks())


def test_blocks_of_a_dead_owner_are_removed_and_those_of_a_living_one_are_not(sender: ParcelSender) -> None:
    """A fork has the descriptors, and so the locks; when both are closed, nobody owns the block."""
    kept, other = sender.publish(1, numbered(1)), SharedCarrier()
    place = other.begin(1).announce()
    os.close(other._held[place])  # as the kernel does when a process is killed
    remove_orphans()
    assert place.removeprefix("/") not in blocks() and kept.place.removeprefix("/") in blocks()
    other._held[place] = os.open(os.devnull, os.O_RDONLY)
    other.close()


def test_a_forked_child_leaves_its_parents_blocks_alone(sender: ParcelSender) -> None:
    parcel = sender.publish(1, numbered(1))
    child = os.fork()
    if not child:
        sender.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert parcel.place.removeprefix("/") in blocks()


def test_what_was_mapped_stays_readable_when_it_is_retired(sender: ParcelSender) -> None:
    parcel = sender.publish(3, numbered(3))
    tensors = dict(ParcelReceiver().read(parcel))
    sender.retire(3)
    sender.publish(4, numbered(4))
    assert all(float(t.min()) == float(t.max()) == 3 for t in tensors.values())
    with pytest.raises(ParcelGoneError, match="version 3 are gone.*retired them") as caught:
        ParcelReceiver().read(parcel)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ParcelGoneError) and str(again) == str(caught.value) and parcel.sender in str(again)


def test_versions_go_forward_on_both_sides(sender: ParcelSender) -> None:
    first, second = sender.publish(1, numbered(1)), sender.publish(2, numbered(2))
    again = sender.publish(2, numbered(5))
    assert [p.place.removeprefix("/") in blocks() for p in (second, again)] == [True, True]
    with pytest.raises(ParcelOrderError, match="version 1 was to be published after version 2"):
        sender.publish(1, numbered(1))
    receiver = ParcelReceiver()
    receiver.read(second)
    assert float(dict(receiver.read(again))["layer.0"].max()) == 5
    with pytest.raises(ParcelOrderError, match="version 1 came from process .* after version 2") as caught:
        receiver.read(first)
    assert first.sender in str(caught.value)
    sender.retire(2)  # the first of two publications
    assert [p.place.removeprefix("/") in blocks() for p in (first, second, again)] == [True, False, True]
    assert sender.whole(2) == again
    sender.retire(2)
    with pytest.raises(ParcelGoneError, match="version 2 was retired, and nothing was kept"):
        sender.whole(2)


def test_a_push_that_fails_leaves_nothing_and_names_the_tensor(
    sender: ParcelSender, own: Callable[[], set[str]]
) -> None:
    with pytest.raises(ParcelError, match="tensor 'layer.0' was given twice"):
        sender.publish(1, [*numbered(1), *numbered(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(ParcelWriteError, match=r"'layer.2' could not be written .*--shm-size"):
            sender.publish(1, numbered(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not own()
    with pytest.raises(ParcelError, match="float16 cannot hold. Serve bfloat16"):
        ParcelSender(SharedCarrier(), torch.float16).publish(1, [("big", torch.tensor([1e5]))])


def test_the_cast_is_inside_and_the_digest_is_the_fingerprint_of_what_is_served() -> None:
    weights = {"w": torch.randn(40, 30), "ids": torch.arange(5), "half": torch.randn(3).half()}
    sender = ParcelSender(SharedCarrier(), torch.bfloat16)
    parcel = sender.publish(1, weights.items())
    got = dict(ParcelReceiver().read(parcel))
    wanted = {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()}
    assert all(torch.equal(got[n], t) and got[n].dtype is t.dtype for n, t in wanted.items())
    assert parcel.digest == fingerprint(got.items()) == fingerprint(wanted.items())
    spent = sender.clock()
    assert {*spent} == {f"sync/{x}" for x in ("gather", "cast", "reshard", "transfer", "install")}
    assert all(s >= 0 for s in spent.values()) and not sender.clock()
    sender.close()
