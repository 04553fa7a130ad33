"""Weights by file, by broadcast, and as deltas: the same tensors by each, and what goes wrong has a name."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from posttrain.core.errors import RunFolderError
from posttrain.engine.fingerprint import fingerprint
from posttrain.engine.parcel.carrier import Carrier
from posttrain.engine.parcel.collective import COLLECTIVE, CollectiveCarrier, CollectiveFetch
from posttrain.engine.parcel.parcel import (
    Parcel,
    ParcelBaseError,
    ParcelDamageError,
    ParcelError,
    ParcelGoneError,
    ParcelTimeoutError,
)
from posttrain.engine.parcel.receiver import FETCH, ParcelReceiver
from posttrain.engine.parcel.sender import ParcelSender, this_process
from posttrain.engine.parcel.shared import SharedCarrier
from posttrain.engine.parcel.shared_folder import FolderCarrier
from posttrain.faults import planted
from tests.rooms.parcel_parts import numbered, take_part

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
    receiver = ParcelReceiver({**FETCH, COLLECTIVE: CollectiveFetch(1, seconds=20)})
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


@pytest.mark.parametrize("transport", ["file", "collective"])
def test_pushes_leave_no_file_descriptor_or_key(transport: str, tmp_path: Path) -> None:
    """As for shared memory, where it is a thousand (`test_weight_parcels.py`)."""
    carrier = carriers(tmp_path)[transport]()
    sender, me = ParcelSender(carrier), psutil.Process()
    receiver = ParcelReceiver({**FETCH, COLLECTIVE: CollectiveFetch(1, seconds=20)})
    left = set[tuple[int, int, int]]()
    for version in range(60):
        parcel = sender.publish(version, numbered(version))
        assert all(float(t.max()) == version for _, t in receiver.read(parcel))
        sender.retire(version)
        keys = carrier.store.num_keys() if isinstance(carrier, CollectiveCarrier) else 0
        left.add((me.num_fds(), keys, len([*tmp_path.glob("weights/*")])))
    assert len(left) == 1 and left.pop()[1:] == (0, int(transport == "file"))  # the folder's lock
    sender.close()


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
        with pytest.raises(ParcelDamageError, match=f"'weight' of version {acts} arrived with checksum") as caught:
            receiver.read(parcel)
    assert caught.value.tensor == "weight"
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
    """Processes that take part in broadcasts, by rank."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.links = seconds, dict[int, Connection]()
        self._processes: dict[int, SpawnProcess] = {}

    def start(self, rank: int) -> None:
        """Start the engine of this rank. One that it has already is killed."""
        self.kill(rank)
        self.links[rank], theirs = SPAWN.Pipe()
        self._processes[rank] = SPAWN.Process(target=take_part, args=(theirs, rank, self._seconds), daemon=True)
        self._processes[rank].start()
        theirs.close()

    def kill(self, rank: int) -> None:
        if (process := self._processes.pop(rank, None)) is not None:
            process.kill()
            process.join()

    def stop(self) -> None:
        for rank in [*self._processes]:
            self.kill(rank)


def test_a_broadcast_that_an_engine_misses_names_it_and_the_next_one_works() -> None:
    """Two engines take part; then one does not come; then one that was started in its place does."""
    engines = Engines(seconds=2.5)
    for rank in (1, 2):
        engines.start(rank)
    sender = ParcelSender(CollectiveCarrier(2, seconds=1.5, bucket=5_000), deltas=True)

    def push(version: int, ranks: tuple[int, ...], parcel: Parcel | None = None) -> list[object]:
        parcel = parcel or sender.publish(version, numbered(version))
        for rank in ranks:
            engines.links[rank].send(parcel)
        return [engines.links[rank].recv() for rank in ranks]

    assert [link.recv() for link in engines.links.values()] == ["ready"] * 2
    assert push(0, (1, 2)) == [{0.0}, {0.0}]
    assert push(1, (1, 2)) == [{1.0}, {1.0}]
    (missed,) = push(2, (1,))
    assert isinstance(missed, ParcelTimeoutError) and (missed.tensor, missed.version) == ("layer.0", 2)
    assert missed.peer == this_process() and "did not send them to engine 1 within" in str(missed)
    with pytest.raises(ParcelTimeoutError, match=r"version 2: engine 2 did not come .* within 1.5 s") as caught:
        sender.retire(2)
    assert (caught.value.peer, caught.value.tensor) == ("engine 2", "layer.0")
    engines.start(2)
    assert engines.links[2].recv() == "ready"
    assert push(2, (1, 2), sender.whole(2)) == [{2.0}, {2.0}]
    assert push(3, (1, 2)) == [{3.0}, {3.0}]
    engines.stop()
    sender.close()
