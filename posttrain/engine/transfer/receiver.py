"""An engine's side: reads a parcel's block, checks every tensor, and only then hands them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.transfer.block import WHOLE, dtype_name, read_block, tensor_of
from posttrain.engine.transfer.collective import COLLECTIVE, CollectiveFetch
from posttrain.engine.transfer.delta import decode
from posttrain.engine.transfer.parcel import (
    Buffer,
    Fetch,
    Parcel,
    ParcelBaseError,
    ParcelDamageError,
    ParcelEntry,
    ParcelError,
    ParcelOrderError,
)
from posttrain.engine.transfer.shared_folder import FILE, fetch_file
from posttrain.engine.transfer.shared_memory import SHARED, fetch_shared

FETCH: Mapping[str, Fetch] = {SHARED: fetch_shared, FILE: fetch_file, COLLECTIVE: CollectiveFetch()}


class ParcelReceiver:
    """An engine's side. `fetch`: by transport, the function that fetches the block of a parcel."""

    def __init__(self, fetch: Mapping[str, Fetch] = FETCH) -> None:
        self._fetch = fetch
        self._last: Parcel | None = None
        self._kept: dict[str, Tensor] = {}

    def read(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """The tensors. All of them are checked before this returns, so a parcel with one wrong tensor gives none (see
        the kinds of `ParcelError`). They may lie in the block itself: copy them, and do not write into them."""
        last = self._last
        # The same version may come again: published anew, or whole in place of a delta.
        if last is not None and parcel.version < last.version:
            raise ParcelOrderError(
                f"version {parcel.version} came from {parcel.sender} after version {last.version} was read: the engine"
                " would go back to older weights. Send versions in their order"
            )
        if parcel.transport not in self._fetch:
            raise ParcelError(
                f"weights came by {parcel.transport!r}, and this engine reads {', '.join(self._fetch)}. Give both sides"
                " the same transport"
            )
        self._require_base(parcel)
        block = self._fetch[parcel.transport](parcel)
        described = read_block(block, parcel.transport, parcel.place)
        # The parcel came by another way than the block. If they differ, the block is not the one that was announced,
        # although it may be whole in itself.
        if described != parcel:
            raise ParcelDamageError(
                f"the block at {parcel.place} holds version {described.version} of {described.sender}, and version"
                f" {parcel.version} of {parcel.sender} was announced there. Publish the weights again"
            )
        # `_last` and `_kept` change only when all are checked: a parcel that is refused leaves the receiver as it was.
        tensors = {e.name: checked(self._tensor(block, e, parcel), e, parcel) for e in parcel.entries}
        self._last, self._kept = parcel, tensors if parcel.followed else {}
        return iter(tensors.items())

    def _require_base(self, parcel: Parcel) -> None:
        """ParcelBaseError where the parcel is a delta against other weights than those that were read last."""
        last = self._last
        if parcel.base is None:
            return
        # By digest as well as by version: the same version may have been published twice, with other weights.
        if last and last.followed and (last.version, last.digest) == (parcel.base, parcel.base_digest):
            return
        has = "nothing" if last is None else f"version {last.version} ({last.digest[:8]})"
        raise ParcelBaseError(
            f"version {parcel.version} is a delta against version {parcel.base} ({parcel.base_digest[:8]}), and this"
            f" engine holds {has}. Send it whole (`whole({parcel.version})` of the sender)"
        )

    def _tensor(self, block: Buffer, entry: ParcelEntry, parcel: Parcel) -> Tensor:
        """The tensor of an entry, not checked yet: its bytes in the block, or the kept one with a delta applied."""
        if entry.coding == WHOLE:
            return tensor_of(block, entry)
        old = self._kept.get(entry.name)
        try:
            if old is None or (dtype_name(old), tuple(old.shape)) != (entry.dtype, entry.shape):
                raise ValueError("its base has another dtype or shape, or no such tensor")
            return decode(entry.coding, memoryview(block)[entry.offset : entry.offset + entry.size], old)
        except ValueError as problem:
            raise ParcelDamageError(
                f"the delta of tensor {entry.name!r} of version {parcel.version} from {parcel.sender} cannot be"
                f" applied: {problem}. Send the version whole"
            ) from problem


def checked(tensor: Tensor, entry: ParcelEntry, parcel: Parcel) -> Tensor:
    """The tensor; ParcelDamageError where it is not the one that was sent."""
    checksum = fingerprints([(entry.name, tensor)], parcel.spot)[entry.name]
    if checksum != entry.checksum:
        raise ParcelDamageError(
            f"tensor {entry.name!r} of version {parcel.version} arrived with checksum {checksum}, and {parcel.sender}"
            f" sent {entry.checksum}. Nothing of this version is served; publish the weights again"
        )
    return tensor
