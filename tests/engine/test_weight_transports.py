"""Weights by file, by broadcast, and as deltas: the same tensors by each, and what goes wrong has a name."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from posttrain.config.placement import Local, Processes
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.transfer import collective
from posttrain.engine.transfer.collective import CollectiveCarrier
from posttrain.engine.transfer.parcel import (
    Carrier,
    Parcel,
    ParcelBaseError,
    ParcelDamageError,
    ParcelError,
    ParcelGoneError,
    ParcelTimeoutError,
    ParcelWriteError,
)
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender, this_process
from posttrain.engine.transfer.shared_folder import FolderCarrier
from posttrain.engine.transfer.shared_memory import SharedCarrier
from posttrain.system.errors import RunFolderError
from tests.engine.parcel_parts import numbered, take_part
from tests.killing import DEATHS, MARKS, MidBroadcastParts
from tests.late import nothing_lost_or_doubled
from tests.laws.test_placement import placed, played
from tests.mutants import planted

pytestmark = pytest.mark.prove
SPAWN = multiprocessing.get_context("spawn")


def carriers(folder: Path) -> dict[str, Callable[[], Carrier]]:
    return {
        "shared": SharedCarrier,
        "file": lambda: FolderCarrier(folder / "weights"),
        "collective": lambda: CollectiveCarrier(1, seconds=20, bucket=1 << 12),
    }


@pytest.mark.parametrize("transport", ["shared", "file", "collective"])
@pytest.mark.parametrize("deltas", [False, True])
def test_each_transport_carries_the_same_bits(transport: str, deltas: bool, tmp_path: Path) -> None:
    """Ten versions of a model in training, of which most bf16 weights do not change; the float32 masters all do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    sender = ParcelSender(carriers(tmp_path)[transport](), torch.bfloat16, deltas=deltas)
    receiver = ParcelReceiver()
    for version in range(10):
        parcel = sender.publish(version, model.state_dict().items())
        got = dict(receiver.read(parcel))
        sender.retire(version)
        wanted = {n: t.bfloat16() for n, t in model.state_dict().items()}
        assert parcel.transport == transport and (parcel.base is None) is (version == 0 or not deltas)
        assert all(torch.equal(got[n], t) for n, t in wanted.items())
        assert parcel.digest == fingerprint(got.items())
        model(torch.arange(50)).square().sum().backward()
        optimizer.step()
    sender.close()
    assert not [*tmp_path.glob("weights/*.weights*"), *tmp_path.glob("weights/.*.part")]


PUSHES, FIRST, EVERY = int(os.environ.get("POSTTRAIN_PUSHES", "100")), 100, 10
"""Pushes that must leave nothing, a thousand of them in `make everything`, after the first ones, in which libraries
take what they keep; and after how many of them memory is read."""


def threads_that_stay(process: psutil.Process) -> int:
    """Return the fewest of five counts within .1 s: a thread that has ended is counted until the kernel removes it."""
    counts = list[int]()
    for _ in range(5):
        counts.append(process.num_threads())
        time.sleep(0.02)
    return min(counts)


def pushed(transport: str, folder: Path, pushes: int, answer: Connection) -> None:
    """Push a million numbers so many times, both sides in this process; answer with what was there after each `EVERY`.

    Before memory is read the allocator gives back what is free. It keeps some megabytes of that, now more and now less,
    where blocks of 2 MB come and go. torch keeps its last 2,000 broadcasts for people who look for one that hangs, 1 kB
    each. They are 100 here, so that they are all there before the first push that counts.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    torch.set_num_threads(1)
    carrier = CollectiveCarrier(1, seconds=20) if transport == "collective" else carriers(folder)[transport]()
    sender, receiver, me = ParcelSender(carrier, torch.bfloat16), ParcelReceiver(), psutil.Process()
    weights = {f"w{i}": torch.zeros(1000, 125) for i in range(8)}
    left, trim = (
        list[tuple[int, ...]](),
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None),
    )  # not in each libc
    for version in range(pushes):
        for tensor in weights.values():
            tensor.fill_(version % 256)
        parcel = sender.publish(version, weights.items())
        assert all(torch.equal(t, torch.full_like(t, version % 256)) for _, t in receiver.read(parcel))
        sender.retire(version)
        if version % EVERY:
            continue
        trim(0)
        keys = carrier.store.num_keys() if isinstance(carrier, CollectiveCarrier) else 0
        files = len([*folder.glob("weights/*")])
        left.append((me.memory_info().rss, keys, files, threads_that_stay(me), me.num_fds()))
    sender.close()
    answer.send(left)


@pytest.mark.parametrize("transport", ["file", "collective"])
def test_many_pushes_of_a_million_numbers_leave_nothing(transport: str, tmp_path: Path) -> None:
    """As for shared memory (`test_weight_parcels.py`): descriptors, threads, keys, files and resident memory are what
    they were, of both sides, which are one process. All tensors of a version come at once."""
    ours, theirs = SPAWN.Pipe()
    pushing = SPAWN.Process(target=pushed, args=(transport, tmp_path, FIRST + PUSHES, theirs))
    begun = time.perf_counter()
    pushing.start()
    theirs.close()
    left = ours.recv()
    spent = time.perf_counter() - begun
    pushing.join()
    after = left[FIRST // EVERY :]
    counts, grown = {tuple(c) for _, *c in after}, after[-1][0] - after[0][0]
    print(f"{transport}: {1e3 * spent / (FIRST + PUSHES):.1f} ms a push, {grown / 1e6:+.2f} MB after {PUSHES}")
    assert len(counts) == 1 and counts.pop()[:2] == (0, int(transport == "file"))  # the folder's lock
    assert grown < 2e6, f"{PUSHES} pushes of 2 MB each left {grown / 1e6:.1f} MB"


def trained(steps: int, lr: float = 1e-6) -> Iterator[dict[str, Tensor]]:
    """Weights of the usual size under AdamW, whose gradients are noise around a mean, after each step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(400, 500) * 0.02)
    optimizer, mean = torch.optim.AdamW([weight], lr=lr), torch.randn(400, 500) * 1e-3
    for _ in range(steps):
        yield {"weight": weight.detach().clone()}
        weight.grad = mean + torch.randn(400, 500) * 1e-3
        optimizer.step()


def test_a_delta_of_bf16_weights_is_at_most_a_twentieth_of_their_bytes() -> None:
    """At a learning rate of 1e-6 a step is far below the distance of two bf16 numbers, so few of them change."""
    for dtype, most in ((torch.bfloat16, 0.05), (torch.float32, 0.6)):
        sender = ParcelSender(SharedCarrier(), dtype, deltas=True)
        parcels = [sender.publish(v, w.items()) for v, w in enumerate(trained(8))]
        shares = [p.size / parcels[0].size for p in parcels[1:]]
        assert 0 < max(shares) <= most, (dtype, shares)
        sender.close()


def test_a_receiver_that_lacks_the_base_of_a_delta_gets_it_whole(tmp_path: Path) -> None:
    """An engine that was started anew refuses the delta by name; what it then gets is what the others hold."""
    sender, old, new = ParcelSender(FolderCarrier(tmp_path), deltas=True), ParcelReceiver(), ParcelReceiver()
    for version in range(3):
        parcel = sender.publish(version, numbered(version))
        held = dict(old.read(parcel))
    with pytest.raises(ParcelBaseError, match=r"version 2 is a delta against version 1 .* this engine holds nothing"):
        new.read(parcel)
    whole = sender.whole(2)
    assert whole.base is None and whole.digest == parcel.digest
    assert all(torch.equal(t, held[n]) for n, t in new.read(whole))
    delta = sender.publish(3, numbered(3))
    assert delta.base == 2 and [n for n, _ in new.read(delta)] == [n for n, _ in old.read(delta)]
    missed = sender.publish(4, numbered(4))
    sender.publish(5, numbered(5))
    late = sender.publish(6, numbered(6))
    old.read(missed)
    with pytest.raises(ParcelBaseError, match=r"delta against version 5 .* holds version 4"):
        old.read(late)
    sender.close()


def test_weights_that_an_engine_wrote_into_are_noticed_at_the_next_delta() -> None:
    sender, receiver = ParcelSender(SharedCarrier(), deltas=True), ParcelReceiver()
    dict(receiver.read(sender.publish(1, numbered(1))))["layer.1"].mul_(2)
    with pytest.raises(ParcelDamageError, match=r"tensor 'layer.1' of version 2 arrived with checksum"):
        receiver.read(sender.publish(2, [(n, t if n == "layer.0" else t - 1) for n, t in numbered(2)]))
    sender.close()


@pytest.mark.parametrize(("fault", "deltas"), [("half_a_version_read", False), ("delta_of_wrong_base", True)])
def test_a_planted_fault_is_found_by_a_checksum_that_names_the_tensor(fault: str, deltas: bool) -> None:
    """At the first push at which it acts, before anything of it is served."""
    weights = [*trained(4, lr=1e-3)]
    sender, receiver = ParcelSender(SharedCarrier(), torch.bfloat16, deltas), ParcelReceiver()
    with planted(fault):
        acts = 2 if deltas else 1
        for version in range(acts):
            receiver.read(sender.publish(version, [("first", torch.ones(9)), *weights[version].items()]))
        parcel = sender.publish(acts, [("first", torch.ones(9)), *weights[acts].items()])
        with pytest.raises(ParcelDamageError, match=f"'weight' of version {acts} arrived with checksum"):
            receiver.read(parcel)
    sender.close()


def file_of(folder: Path) -> tuple[ParcelSender, Parcel, Path]:
    sender = ParcelSender(FolderCarrier(folder))
    parcel = sender.publish(1, numbered(1))
    return sender, parcel, Path(parcel.place)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """While the second of its tensors is made, nothing has a name that anybody reads."""
    seen = list[list[str]]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for named in numbered(1):
            seen.append([p.name for p in tmp_path.glob("*.weights")])
            yield named

    sender = ParcelSender(FolderCarrier(tmp_path))
    path = Path(sender.publish(1, tensors()).place)
    assert not any(seen) and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ParcelError, match="given twice"):
        sender.publish(2, [*numbered(2), *numbered(2)])
    assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == [path.name]


def test_a_file_that_gets_no_name_is_no_parcel(tmp_path: Path) -> None:
    carrier = FolderCarrier(tmp_path)
    sink = carrier.begin(3)
    next(tmp_path.glob(".*.part")).unlink()
    with pytest.raises(ParcelWriteError, match="weights of version 3: .* could not be written"):
        sink.announce()
    sink.drop()
    carrier.close()


def test_a_folder_has_one_sender_and_the_next_one_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    sender, _, path = file_of(tmp_path)
    with pytest.raises(RunFolderError, match="is in use by another process"):
        FolderCarrier(tmp_path)
    left = [tmp_path / "1-0.weights", tmp_path / ".2-0.weights.part"]
    sender.close()
    assert not path.exists()
    for each in left:
        each.write_bytes(b"of a sender that was killed")
    FolderCarrier(tmp_path).close()
    assert not any(each.exists() for each in left)


@pytest.mark.parametrize("wrong", ["cut", "longer", "empty", "pipe", "folder", "other", "gone"])
def test_a_file_of_somebody_else_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    sender, parcel, path = file_of(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    if wrong == "pipe":
        os.mkfifo(path)
    elif wrong == "folder":
        path.mkdir()
    elif wrong != "gone":
        other = Path(sender.publish(2, numbered(2)).place).read_bytes()
        content = {"cut": whole[:-9], "longer": b"", "empty": b"", "other": other}[wrong]
        path.write_bytes(content)
    if wrong == "longer":
        os.truncate(path, 1 << 40)  # without blocks: nothing of it may be read into memory
    kind = ParcelGoneError if wrong == "gone" else ParcelDamageError
    with pytest.raises(kind, match=str(path)):
        ParcelReceiver().read(parcel)
    if path.is_dir():
        path.rmdir()
    sender.close()


class Engines:
    """Processes that take part in broadcasts, by number."""

    def __init__(self) -> None:
        self.links = dict[int, Connection]()
        self._processes: dict[int, SpawnProcess] = {}

    def start(self, number: int) -> None:
        """Start this engine. One that it has already is killed."""
        self.kill(number)
        self.links[number], theirs = SPAWN.Pipe()
        self._processes[number] = SPAWN.Process(target=take_part, args=(theirs,), daemon=True)
        self._processes[number].start()
        theirs.close()
        assert self.links[number].recv() == "ready"

    def read(self, parcel: Parcel, *numbers: int, signals: Mapping[int, int] = {}) -> list[object]:
        """What these engines answer. Those in `signals` get one at their second bucket, and do not answer."""
        for number in (*numbers, *signals):
            self.links[number].send((parcel, signals.get(number, 0)))
        return [self.links[number].recv() for number in numbers]

    def kill(self, number: int) -> None:
        if (process := self._processes.pop(number, None)) is not None:
            process.kill()
            process.join()

    def stop(self) -> None:
        for number in [*self._processes]:
            self.kill(number)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    for number in (1, 2):
        made.start(number)
    yield made
    made.stop()


@pytest.mark.parametrize("deltas", [False, True])
def test_an_engine_that_dies_in_a_broadcast_costs_the_others_a_round(deltas: bool, engines: Engines) -> None:
    """Two engines take part. One is killed at its second bucket: the other gets the version, and so does the process
    that is started in its place, whenever it comes."""
    sender, at = ParcelSender(CollectiveCarrier(2, seconds=20, bucket=5_000), deltas=deltas), 4 * deltas
    for version in (at, at + 1):
        assert engines.read(sender.publish(version, numbered(version)), 1, 2) == [{float(version)}] * 2
    begun = time.monotonic()
    parcel = sender.publish(at + 2, numbered(at + 2))
    assert engines.read(parcel, 1, signals={2: signal.SIGKILL}) == [{at + 2.0}]
    assert time.monotonic() - begun < 10, "a death is noticed at once, and not by a time-out"
    engines.start(2)
    assert engines.read(sender.whole(at + 2), 2) == [{at + 2.0}]
    assert engines.read(sender.publish(at + 3, numbered(at + 3)), 1, 2) == [{at + 3.0}] * 2
    sender.close()


def test_an_engine_that_hangs_in_a_broadcast_holds_the_others_up_for_one_time_out(engines: Engines) -> None:
    """And one that is late holds nobody up."""
    sender = ParcelSender(CollectiveCarrier(2, seconds=1.5, bucket=5_000))
    begun = time.monotonic()
    assert engines.read(sender.publish(10, numbered(10)), 1, signals={2: signal.SIGSTOP}) == [{10.0}]
    assert 1.4 < time.monotonic() - begun < 15
    engines.start(2)
    parcel = sender.publish(11, numbered(11))
    assert engines.read(parcel, 1) == [{11.0}] and engines.read(parcel, 2) == [{11.0}]
    sender.retire(11)
    (gone,) = engines.read(parcel, 1)
    assert isinstance(gone, ParcelGoneError) and "version 11 are gone: process" in str(gone)
    sender.close()


def last_bucket_fails(plain: Callable[..., None]) -> Callable[..., None]:
    def broadcast(group: object, bucket: Tensor, seconds: float) -> None:
        if len(bucket) < 20_000:
            raise RuntimeError("a cable was pulled")
        plain(group, bucket, seconds)

    return broadcast


@pytest.mark.parametrize("what", ["silent", "dead", "breaks"])
def test_weights_that_do_not_come_by_broadcast_name_both_sides_and_the_tensor(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = CollectiveCarrier(1, seconds=0.5, bucket=20_000)
    sender, words = ParcelSender(carrier), "did not call this engine within 1 s"
    if what == "silent":
        monkeypatch.setattr(collective.CollectiveSink, "_serve", lambda sink: None)
    elif what == "breaks":
        words = f"{collective.ROUNDS} broadcasts broke, the last one by a cable was pulled"
        monkeypatch.setattr(collective, "_broadcast", last_bucket_fails(collective._broadcast))
    parcel = sender.publish(1, numbered(1))
    if what == "dead":
        words, numbers = "127.0.0.1:9 does not answer", parcel.place.partition("/")[2]
        parcel = replace(parcel, place=f"127.0.0.1:9/{numbers}")
    with pytest.raises(ParcelTimeoutError, match=words) as caught:
        ParcelReceiver().read(parcel)
    found, lacks = str(caught.value), "layer.4" if what == "breaks" else "layer.0"
    assert "version 1" in found and f"from tensor {lacks!r} on" in found
    assert found.count(this_process()) == 2 and "placement.transport" in found
    sender.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_by_broadcast_change_no_bit_though_engines_die_in_it(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deltas in the asynchronous run: an engine that was started anew then gets the version whole."""
    local = played(placed(Local(), staleness), tmp_path / "local")
    (marks := tmp_path / "marks").mkdir()
    monkeypatch.setenv(MARKS, str(marks))
    monkeypatch.setattr("posttrain.build.spawn_engines.EngineParts", MidBroadcastParts)
    how = Processes(engines=2, transport="collective", delta=staleness > 0, deaths=DEATHS + 1)
    assert played(placed(how, staleness), tmp_path / "placed") == local
    assert len(os.listdir(marks)) == DEATHS, "so many died in a broadcast"
    nothing_lost_or_doubled(tmp_path / "placed", placed(how, staleness))
