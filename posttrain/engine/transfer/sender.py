"""The learner's side: casts weights to what is served, writes them into a block, and announces it when it is whole."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.transfer.block import DTYPES, HEAD, aligned, dtype_name, head_bytes, table_bytes
from posttrain.engine.transfer.delta import SAME, encode
from posttrain.engine.transfer.parcel import (
    Carrier,
    Parcel,
    ParcelEntry,
    ParcelError,
    ParcelGoneError,
    ParcelOrderError,
    Sink,
)


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class ParcelSender:
    """The learner's side over any carrier.

    Checksums cover every bit of small models and of deltas, and of large models at the first push and every n-th one.
    In between they cover one row in 64 (`engine.files.fingerprint.Spot`), other rows at each push. That costs a
    sixtieth and still finds what goes wrong in practice: a tensor, a layer or a half that is of another version.

    Args:
        dtype: what floating tensors of two bytes and more are cast to, such as torch.bfloat16; None: as they come.
        deltas: send what changed since the last version, from the second version on. Both sides then keep a copy of the
            weights as served.
        large: bytes as served from which a model is large. Two full checks of 256 MiB take .3 s on one core.
        audit_every: pushes from one check of every bit of a large model to the next.
    """

    def __init__(
        self,
        carrier: Carrier,
        dtype: torch.dtype | None = None,
        deltas: bool = False,
        large: int = 1 << 28,
        audit_every: int = 16,
    ) -> None:
        if dtype is not None and dtype not in DTYPES.values():
            raise ParcelError(f"weights cannot be sent as {dtype}; use one of {', '.join(DTYPES)}")
        self._carrier, self._dtype, self._deltas = carrier, dtype, deltas
        self._large, self._audit_every = large, audit_every
        self._pushes = 0
        self._seconds: dict[str, float] = {}
        # Of each version its publications, and of each of these the places of its blocks (`whole` adds one).
        self._places: dict[int, list[list[str]]] = {}
        self._last: Parcel | None = None
        self._kept: dict[str, Tensor] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Parcel:
        """Write all tensors as `version`, and only then announce them: they appear at once. The same version may be
        published again, with other weights. ParcelError where a name comes twice, there is no room, or the version is
        older than the last one."""
        last = self._last
        if last is not None and version < last.version:
            raise ParcelOrderError(
                f"version {version} was to be published after version {last.version}: an engine that took both would go"
                " back. Publish versions in their order"
            )
        # The size of this push is known only when its tensors have come, so the size of the last one decides. With
        # deltas every push is audited, because the digest of the base must cover all its bits.
        audited = last is None or self._deltas or last.size < self._large or self._pushes % self._audit_every == 0
        # Without base, place and entries, which come below.
        parcel = Parcel(
            *(version, None, self._carrier.transport, "", (), this_process()), followed=self._deltas, audited=audited
        )
        if last is not None and self._deltas:
            parcel = replace(parcel, base=last.version, base_digest=last.digest)
        self._last = self._write(parcel, tensors)
        self._places.setdefault(version, []).append([self._last.place])
        self._pushes += 1
        return self._last

    def whole(self, version: int) -> Parcel:
        """Returns the last published version, as a parcel that needs no base, for a receiver that lacks it.
        ParcelOrderError where `version` is not the last one, ParcelGoneError where it was retired and nothing kept."""
        last = self._last
        if last is None or last.version != version:
            newest = "nothing" if last is None else f"version {last.version}"
            raise ParcelOrderError(
                f"version {version} cannot be sent whole: {newest} was published last. Send the newest version"
            )
        places = self._places.get(version)
        if last.base is None and places:
            return last
        if not self._deltas:
            raise ParcelGoneError(f"version {version} was retired, and nothing was kept. Publish again")
        # The kept tensors have the same checksums, so a delta that follows fits receivers of either form.
        whole = replace(last, base=None, base_digest="", place="", entries=())
        self._last = self._write(whole, list(self._kept.items()))
        if places:
            places[-1].append(self._last.place)
        else:
            self._places[version] = [[self._last.place]]
        return self._last

    def retire(self, version: int) -> None:
        """Remove the first publication of `version`. Receivers that still have it open can finish."""
        if publications := self._places.get(version):
            places = publications.pop(0)
            if not publications:
                del self._places[version]
            for place in places:
                self._carrier.remove(place)

    def clock(self) -> Mapping[str, float]:
        """Seconds since the last call: `sync/gather` (until a whole tensor was there), `sync/cast` (to what is served),
        `sync/reshard` (into the form in which it travels, with its checksum), `sync/transfer` (bytes written),
        `sync/install` (announced; what an engine then needs to load it, the engine measures)."""
        taken, self._seconds = self._seconds, {}
        return taken

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        """Inside, time is counted for this operation."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[operation] = self._seconds.get(operation, 0.0) + time.perf_counter() - begun

    def close(self) -> None:
        """Remove everything that was published."""
        self._places.clear()
        self._carrier.close()

    def _write(self, parcel: Parcel, tensors: Iterable[tuple[str, Tensor]]) -> Parcel:
        """Write a block; returns its parcel, with entries and place. Nothing is left of it where that fails."""
        tensors_to_keep = dict[str, Tensor]()
        sink = self._carrier.begin(parcel.version)
        try:
            parcel = replace(parcel, entries=tuple(self._write_tensors(sink, parcel, tensors, tensors_to_keep)))
            with self._timed("sync/transfer"):
                end = max((e.offset + e.size for e in parcel.entries), default=HEAD.size)
                table = table_bytes(parcel)
                sink.write(table, aligned(end))
            with self._timed("sync/install"):
                # The head last: until it is there, the block has no magic and is refused.
                sink.write(head_bytes(parcel.version, aligned(end), table), 0)
                place = sink.announce()
        except BaseException:
            sink.drop()
            raise
        # Only after the announcement: a push that failed must not become the base of the next delta.
        self._kept = tensors_to_keep
        return replace(parcel, place=place)

    def _write_tensors(
        self, sink: Sink, parcel: Parcel, tensors: Iterable[tuple[str, Tensor]], kept: dict[str, Tensor]
    ) -> Iterator[ParcelEntry]:
        """Write the tensors; where deltas may follow, `kept` then holds them."""
        at, names, coming = HEAD.size, set[str](), iter(tensors)
        while True:
            with self._timed("sync/gather"):
                # Over ranks the iterator itself brings the parts together, so its time is measured apart.
                name, incoming = next(coming, (None, None))
            if name is None or incoming is None:
                return
            if name in names:
                raise ParcelError(f"tensor {name!r} was given twice. Give every weight once")
            names.add(name)
            with self._timed("sync/cast"):
                tensor = served(name, incoming, self._dtype)
            with self._timed("sync/reshard"):
                tensor = tensor.cpu().contiguous()
                checksum = fingerprints([(name, tensor)], parcel.spot)[name]
                coding, data = encode(tensor, None if parcel.base is None else self._kept.get(name))
                if self._deltas:
                    # Where nothing changed the old copy is kept on, and no second one is made.
                    kept[name] = self._kept[name] if coding == SAME else _apart_from(tensor, incoming)
            with self._timed("sync/transfer"):
                sink.write(data, at, name)
            yield ParcelEntry(name, dtype_name(tensor), tuple(tensor.shape), at, checksum, coding, len(data))
            at = aligned(at + len(data))


def served(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in the dtype that is served. ParcelError where that cannot be sent, or cannot hold a finite weight."""
    converted = tensor.detach()
    if dtype is not None and converted.is_floating_point() and converted.element_size() >= 2:
        converted = converted.to(dtype)
        # bfloat16 has the range of float32. In float16 a large weight would become infinite; one that was infinite
        # before is no fault of the cast.
        if dtype is torch.float16 and bool((converted.isinf() & tensor.detach().isfinite()).any()):
            raise ParcelError(
                f"tensor {name!r} has weights beyond {torch.finfo(dtype).max:g}, which float16 cannot hold. Serve"
                " bfloat16"
            )
    if converted.dtype not in DTYPES.values():
        raise ParcelError(f"tensor {name!r} is {converted.dtype}, which cannot be sent: use {', '.join(DTYPES)}")
    return converted


def _apart_from(tensor: Tensor, incoming: Tensor) -> Tensor:
    """The tensor, copied where it lies in the memory of `incoming`, which an optimizer will change."""
    return tensor.clone() if tensor.device == incoming.device and tensor.data_ptr() == incoming.data_ptr() else tensor
