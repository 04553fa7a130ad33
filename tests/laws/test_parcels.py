"""Parcels of weights: what arrives is what was sent, bit by bit, for any tensors; what was damaged is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.engine.files.fingerprint import ROW, Spot, fingerprint
from posttrain.engine.transfer.block import DTYPES, HEAD, head_bytes, raw, read_block, table_bytes
from posttrain.engine.transfer.parcel import Parcel, ParcelBaseError, ParcelDamageError, ParcelEntry
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender


class TruncationSets:
    """A carrier and its `Fetch` in this process: blocks are bytes, which a test can change."""

    transport = "kept"

    def __init__(self) -> None:
        self.blocks: dict[str, bytearray] = {}
        self._count = 0

    def begin(self, version: int) -> KeptSink:
        self._count += 1
        return KeptSink(self, f"block {self._count}")

    def remove(self, place: str) -> None:
        del self.blocks[place]

    def close(self) -> None:
        self.blocks.clear()

    def fetch(self, parcel: Parcel) -> bytearray:
        return self.blocks[parcel.place]


class KeptSink:
    def __init__(self, carrier: TruncationSets, place: str) -> None:
        self._carrier, self._place, self._bytes = carrier, place, bytearray()

    def write(self, data: memoryview | bytes, at: int, tensor: str = "") -> None:
        self._bytes.extend(bytes(max(at + len(data) - len(self._bytes), 0)))
        self._bytes[at : at + len(data)] = data

    def announce(self) -> str:
        self._carrier.blocks[self._place] = self._bytes
        return self._place

    def drop(self) -> None:
        return None


def sides(carrier: TruncationSets, **options: object) -> tuple[ParcelSender, ParcelReceiver]:
    return ParcelSender(carrier, **options), ParcelReceiver({"kept": carrier.fetch})  # type: ignore[arg-type]


def bits(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits: infinities, NaNs of every kind, subnormals and negative zeros among them."""
    count = prod(shape)
    if dtype is torch.bool:
        return torch.tensor([random.Random(seed + i).random() < 0.5 for i in range(count)]).reshape(shape).bool()
    data = bytearray(random.Random(seed).randbytes(count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Some tensors, of any dtype and shape (none, one number, empty), in any order, some of them not contiguous."""
    out: dict[str, Tensor] = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=12), max_size=5, unique=True)):
        dtype = DTYPES[draw(st.sampled_from([*DTYPES]))]
        tensor = bits(draw(st.integers(0, 2**32)), dtype, tuple(draw(st.lists(st.integers(0, 7), max_size=3))))
        out[name] = tensor.t() if tensor.ndim == 2 and draw(st.booleans()) else tensor
    return out


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same names in the same order, and bit-equal tensors."""
    return [*a] == [*b] and all(
        x.dtype is y.dtype
        and x.shape == y.shape
        and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


@given(named_tensors())
def test_what_is_read_is_what_was_published(weights: dict[str, Tensor]) -> None:
    sender, receiver = sides(carrier := TruncationSets())
    parcel = sender.publish(3, weights.items())
    got = dict(receiver.read(parcel))
    assert same(got, weights)
    assert parcel.digest == fingerprint(weights.items())
    assert parcel.size == sum(t.nbytes for t in weights.values())
    assert read_block(carrier.blocks[parcel.place], "kept", parcel.place) == parcel


@given(named_tensors(), st.data())
def test_a_changed_byte_is_refused_and_its_tensor_named(weights: dict[str, Tensor], data: st.DataObject) -> None:
    sender, receiver = sides(carrier := TruncationSets())
    parcel = sender.publish(3, weights.items())
    block = carrier.blocks[parcel.place]
    full = [e for e in parcel.entries if e.size]
    if not full:
        return
    entry = data.draw(st.sampled_from(full))
    at = data.draw(st.integers(entry.offset, entry.offset + entry.size - 1))
    block[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ParcelDamageError, match="of version 3 arrived with checksum") as caught:
        receiver.read(parcel)
    assert f"tensor {entry.name!r}" in str(caught.value) and parcel.sender in str(caught.value)


@given(named_tensors(), st.data())
def test_half_of_a_block_is_refused(weights: dict[str, Tensor], data: st.DataObject) -> None:
    """However much of it is missing at the end: head, tensors, or table."""
    sender, receiver = sides(carrier := TruncationSets())
    parcel = sender.publish(3, weights.items())
    block = carrier.blocks[parcel.place]
    del block[data.draw(st.integers(0, len(block) - 1)) :]
    with pytest.raises(ParcelDamageError, match="cannot be read"):
        receiver.read(parcel)


@given(named_tensors(), named_tensors())
def test_a_block_in_which_parts_of_two_versions_lie_is_refused(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    sender, receiver = sides(carrier := TruncationSets())
    first, second = sender.publish(1, old.items()), sender.publish(2, new.items())
    a, b = carrier.blocks[first.place], carrier.blocks[second.place]
    if len(a) > len(b) and any(e.size for e in first.entries):
        b.extend(a[len(b) :])  # more bytes at the end are nobody's
        assert same(dict(receiver.read(second)), new)
    b[: HEAD.size] = a[: HEAD.size]
    with pytest.raises(ParcelDamageError):
        receiver.read(second)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Versions of weights: of each tensor some, all or no elements change, by little or to any bits; tensors go, and
    change their dtype and shape."""
    out = [draw(named_tensors())]
    for _ in range(draw(st.integers(1, 4))):
        new = dict(out[-1])
        for name, tensor in out[-1].items():
            how = draw(st.sampled_from(["same", "near", "any", "other", "gone"]))
            if how in ("near", "any") and tensor.numel():
                flat = tensor.detach().reshape(-1).view(torch.uint8).clone()
                for _ in range(draw(st.integers(1, 3)) if how == "near" else len(flat)):
                    at = draw(st.integers(0, len(flat) - 1))
                    flat[at] ^= draw(st.integers(1, 3)) if tensor.dtype is not torch.bool else 1
                new[name] = flat.view(tensor.dtype).reshape(tensor.shape)
            elif how == "other":
                new[name] = bits(draw(st.integers(0, 99)), torch.float32, (draw(st.integers(0, 9)),))
            elif how == "gone":
                del new[name]
        out.append(new)
    return out


@given(histories())
def test_deltas_are_the_versions_themselves(versions: list[dict[str, Tensor]]) -> None:
    """However many follow one another; and never more bytes than the whole version."""
    sender, receiver = sides(TruncationSets(), deltas=True)
    for number, weights in enumerate(versions):
        parcel = sender.publish(number, weights.items())
        assert parcel.base == (number - 1 if number else None)
        assert same(dict(receiver.read(parcel)), weights)
        assert parcel.digest == fingerprint(weights.items())
        assert parcel.size <= sum(t.nbytes for t in weights.values())


@given(histories(), st.data())
def test_a_receiver_without_the_base_says_so_and_the_whole_version_is_the_answer(
    versions: list[dict[str, Tensor]], data: st.DataObject
) -> None:
    """It never guesses: one that missed a version, or is new, refuses every delta until it got a version whole."""
    sender, receiver = sides(carrier := TruncationSets(), deltas=True)
    late = ParcelReceiver({"kept": carrier.fetch})
    held: int | None = None
    for number, weights in enumerate(versions):
        parcel = sender.publish(number, weights.items())
        receiver.read(parcel)
        if data.draw(st.booleans()):
            continue
        if parcel.base is not None and held != parcel.base:
            with pytest.raises(ParcelBaseError, match=f"version {number} is a delta against version {number - 1} "):
                late.read(parcel)
            parcel = sender.whole(number)
            assert parcel.base is None
        assert same(dict(late.read(parcel)), weights)
        held = number


@given(named_tensors(), st.data())
def test_a_delta_that_was_damaged_is_refused(weights: dict[str, Tensor], data: st.DataObject) -> None:
    """Any bytes in place of any of its: what comes out is refused by its checksum, or by the decoder."""
    sender, receiver = sides(carrier := TruncationSets(), deltas=True)
    weights["w"] = torch.arange(400.0).reshape(20, 20)
    receiver.read(sender.publish(0, weights.items()))
    weights["w"] = weights["w"].clone()
    few = data.draw(st.integers(1, 40))
    weights["w"].view(-1)[:: 400 // few] += 1
    parcel = sender.publish(1, weights.items())
    entry = next(e for e in parcel.entries if e.name == "w")
    assert entry.coding == ("sparse" if few <= 100 else "dense")
    block = carrier.blocks[parcel.place]
    at = data.draw(st.integers(0, entry.size - 1))
    before = bytes(block)
    block[entry.offset + at : entry.offset + entry.size] = data.draw(
        st.binary(min_size=entry.size - at, max_size=entry.size - at)
    )
    if bytes(block) == before:
        return
    try:
        got = dict(receiver.read(parcel))
    except ParcelDamageError as refused:
        assert "tensor 'w'" in str(refused) and parcel.sender in str(refused)
    else:
        assert same(got, weights)  # zlib has several forms of one stream
    assert receiver.read(sender.whole(1))


@given(st.integers(0, 200), st.integers(1, 80), st.integers(0, 2**31))
def test_a_spot_is_rows_of_the_tensor_and_every_row_has_its_turn(count: int, one_in: int, number: int) -> None:
    rows = Spot(number, one_in).rows(count).tolist()
    assert rows == sorted({*rows}) and all(0 <= r < count for r in rows)
    assert len(rows) == -(-count // one_in)
    if 0 < count <= 20:
        assert {r for n in range(1000) for r in Spot(n, one_in).rows(count).tolist()} == {*range(count)}


def test_large_models_are_checked_by_spots_with_an_audit_every_few_pushes() -> None:
    """A tensor of the version before is found at every push; one wrong word is found at an audit at the latest."""
    carrier = TruncationSets()
    sender, receiver = sides(carrier, large=1000, audit_every=4)
    wide = {"a": torch.randn(80 * 2 * ROW), "b": torch.arange(5)}
    found = list[bool]()
    for version in range(9):
        parcel = sender.publish(version, ((n, t + version) for n, t in wide.items()))
        assert parcel.audited is (version % 4 == 0)
        assert all(torch.equal(t, wide[n] + version) for n, t in receiver.read(parcel))
        first = parcel.entries[0]
        block = carrier.blocks[parcel.place]
        block[first.offset + 5000] ^= 1
        try:
            receiver.read(parcel)
        except ParcelDamageError as damage:
            found.append("tensor 'a'" in str(damage))
        else:
            assert not parcel.audited
        block[first.offset : first.offset + first.size] = raw(wide["a"] + version + 1).tobytes()
        with pytest.raises(ParcelDamageError, match="tensor 'a'"):
            receiver.read(parcel)
    assert 3 <= len(found) < 9 and all(found)


@settings(max_examples=300)
@given(st.data())
def test_no_bytes_are_read_as_something_else_than_a_parcel(data: st.DataObject) -> None:
    """Any bytes over a head or a table are refused with an error of ours, or were nobody's."""
    sender, receiver = sides(carrier := TruncationSets())
    weights = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    parcel = sender.publish(1, weights.items())
    block = carrier.blocks[parcel.place]
    at = data.draw(st.one_of(st.integers(0, HEAD.size - 1), st.integers(HEAD.size, len(block) - 1)))
    new = data.draw(st.binary(min_size=1, max_size=24))
    block[at : at + len(new)] = new
    try:
        got = dict(receiver.read(parcel))
    except ParcelDamageError:
        return
    assert same(got, weights)


GIB = 1 << 30
ENTRY = ParcelEntry("w", "float32", (2, 2), 64, "0" * 32, "whole", 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, entries=(ENTRY, ENTRY)), "a name is listed twice"),
        (lambda p: replace(p, entries=(replace(ENTRY, dtype="object"),)), "'w' is said to be of dtype 'object'"),
        (lambda p: replace(p, entries=(replace(ENTRY, shape=(GIB, GIB)),)), "'w' of float32 .* has 16 bytes instead"),
        (lambda p: replace(p, entries=(replace(ENTRY, shape=(2, -2)),)), "texts and numbers from 0"),
        (lambda p: replace(p, entries=(replace(ENTRY, shape=(2, 2.0)),)), "texts and numbers from 0"),
        (lambda p: replace(p, entries=(replace(ENTRY, offset=0),)), "does not lie within the block"),
        (lambda p: replace(p, entries=(replace(ENTRY, offset=65),)), "does not lie within the block"),
        (lambda p: replace(p, entries=(replace(ENTRY, offset=GIB),)), "does not lie within the block"),
        (lambda p: replace(p, entries=(ENTRY, replace(ENTRY, name="v"))), "tensors 'w' and 'v' share bytes"),
        (lambda p: replace(p, entries=(replace(ENTRY, coding="sparse"),)), "'w' is coded as 'sparse', and no base"),
        (lambda p: replace(p, version=True), "a version is no number"),
        (lambda p: replace(p, sender=None), "a name is no text"),
    ],
)
def test_a_table_that_lies_is_refused_before_any_tensor_is_made(change: Callable[[Parcel], Parcel], says: str) -> None:
    """Its digest is right, so it was made to be believed."""
    table = table_bytes(change(Parcel(1, None, "kept", "", (ENTRY,), "process 1 on a")))
    block = bytearray(head_bytes(1, 128, table) + bytes(64) + table)
    with pytest.raises(ParcelDamageError, match=says):
        read_block(block, "kept", "there")
