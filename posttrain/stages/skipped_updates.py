"""Optimizer steps that are left out because their gradient is not finite (`Optimizer.skips`). Such a step changes
neither weights nor optimizer. It is counted and noted, and its batch is kept in the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from posttrain.core import streams
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.streams import Stream
from posttrain.core.types import TruncationSets
from posttrain.role.roles import StageRoles
from posttrain.system import dataclass_json, read_untrusted
from posttrain.system.errors import InvariantError, PosttrainError, RunFolderError

BATCH = "batch.safetensors"
ARRAYS = tuple(f.name for f in fields(Batch) if f.name[-2:] in ("_N", "_S", "_M", "_E"))
"""The fields of a batch that are arrays, known by the ends of their names."""
STREAM = "stream."
"""Begins the name of a stream in the file: `stream.weight`."""


def left_out(roles: StageRoles[Any], batch: Batch, index: int, error: InvariantError) -> tuple[Gauges, str]:
    """Gauges and note of a step that is left out.

    Args:
        index: the stage's step that the batch belongs to.
        error: names the episodes whose gradient is not finite.

    Raises:
        InvariantError: no further step in a row may be left out. Where the setting is 0, it is `error` itself.
    """
    stage, trainer = roles.stage, roles.trainer
    if not stage.optimizer.skips:
        raise error
    # Before the limit is checked: the batch of the step that ends the run is the one to look at.
    trainer.skipped += 1
    folder = f"skipped-{stage.name}-{index:06d}-{trainer.skipped}"
    roles.book.beside(folder, lambda path: save_batch(batch, path))
    # `Trainer.step` sets the count to 0 at each update, so only steps in a row add up.
    if trainer.skipped > stage.optimizer.skips:
        raise InvariantError(
            f"{error}. It is the {_nth(trainer.skipped)} optimizer step in a row that is not finite, and"
            f" {stage.name}.optimizer.skips={stage.optimizer.skips}; the batch is in {folder}"
        ) from error
    note = f"left out ({trainer.skipped} of at most {stage.optimizer.skips} in a row; batch in {folder}): {error}"
    return {"optim/skipped": Gauge(1, 1), "optim/steps": Gauge(0, 1)}, note


def _nth(count: int) -> str:
    """An ordinal: 1st, 2nd, 3rd, 4th, 11th, 21st."""
    return f"{count}{'th' if 10 < count % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(count % 10, 'th')}"


def save_batch(batch: Batch, folder: Path) -> None:
    """A minibatch with all its streams, as arrays by name."""
    arrays = {n: x for n in ARRAYS if (x := getattr(batch, n)) is not None}
    arrays |= {f"{STREAM}{s.name}": x for s, x in batch.streams.items()}
    if batch.kept is not None:
        arrays |= {"kept.offsets": batch.kept.offsets, "kept.ids": batch.kept.ids}
    metadata = {"sampling": json.dumps(dataclass_json.to_plain(batch.sampling))}
    save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, folder / BATCH, metadata)


def load_batch(folder: Path, further: Iterable[Stream] = ()) -> Batch:
    """The minibatch of `save_batch`; RunFolderError where the file is missing or damaged. `further`: declarations of
    streams that are not posttrain's own."""
    path = folder / BATCH
    declared = {s.name: s for s in (*vars(streams).values(), *further) if isinstance(s, Stream)}
    # Opened and closed again: `opened` refuses what is no plain file, before safetensors maps it into memory.
    with read_untrusted.opened(path, RunFolderError):
        pass
    try:
        with safe_open(path, "numpy") as file:
            arrays = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
            written = read_untrusted.parse(file.metadata()["sampling"], "its sampling", RunFolderError)
        sampling = dataclass_json.from_plain(Sampling, written)
        kept = TruncationSets(arrays["kept.offsets"], arrays["kept.ids"]) if "kept.ids" in arrays else None
        streams_of_batch = {declared[n.removeprefix(STREAM)]: x for n, x in arrays.items() if n.startswith(STREAM)}
        arrays_of_batch: dict[str, Any] = {n: arrays.get(n) for n in ARRAYS}
        without_streams = Batch(sampling=sampling, kept=kept, **arrays_of_batch)
        return replace(without_streams, streams=streams_of_batch)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, PosttrainError) as error:
        raise RunFolderError(f"{path} is damaged ({error})") from error
