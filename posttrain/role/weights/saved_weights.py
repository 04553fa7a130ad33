"""Weights and optimizer state on disk, which any number of processes write and read, and copies of weights in memory. A
single process writes `weights.safetensors`, each of n its parts in a file such as `weights-00001-of-00004.safetensors`,
whose metadata says where each part lies. A reader reads only the box of a tensor that it needs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.core.exchange.shards import DividedState, DividedWeights, Shard
from posttrain.core.ports import Learner
from posttrain.role.trainer import WeightOptimizer
from posttrain.system import read_untrusted
from posttrain.system.errors import RunFolderError

PLACES = "shards"
"""Key in the metadata of a file of parts: for each tensor its full shape, and where the part begins."""
# Of `weights-00002-of-00004`: the groups 00002 and 00004.
PART = re.compile(r"-(\d{5})-of-(\d{5})$")
BROKEN = (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError, IndexError)
"""Errors that a damaged file raises."""


def part_name(path: Path, rank: int, world: int) -> Path:
    """The file of one process beside `path`; `path` itself where there is only one."""
    return path if world == 1 else path.with_stem(f"{path.stem}-{rank + 1:05d}-of-{world:05d}")


def part_files(path: Path) -> list[Path]:
    """The files that hold what `path` stands for, in order; empty where there is none. `path` itself, where it exists,
    goes before parts.

    Raises:
        RunFolderError: some parts are missing, or parts of two writers lie beside each other.
    """
    # Five digits with leading zeros: sorted names are in the order of ranks.
    parts = sorted(p for p in path.parent.glob(f"{path.stem}-*{path.suffix}") if PART.search(p.stem))
    if path.exists() or not parts:
        return [path] if path.exists() else []
    world = int(PART.search(parts[0].stem)[2])  # type: ignore[index]
    if parts != [part_name(path, rank, world) for rank in range(world)]:
        raise RunFolderError(
            f"{path.parent} holds {len(parts)} of the {world} parts of {path.name}: {parts[0].name}, ... Copy the whole"
            " folder, or go on from another checkpoint"
        )
    return parts


def write_part(path: Path, shards: Iterable[Shard], rank: int, world: int) -> None:
    """Write this process's parts. A tensor that every process has whole is written by the first one."""
    # Empty parts are not written: safetensors would hold a name with nothing in it.
    shards_by_name = {s.name: s for s in shards if (s.whole and rank == 0) or (s.tensor.numel() and not s.whole)}
    tensors = {name: s.tensor.detach().contiguous() for name, s in shards_by_name.items()}
    places = {name: [list(s.shape), list(s.offsets)] for name, s in shards_by_name.items()}
    save_file(tensors, part_name(path, rank, world), None if world == 1 else {PLACES: json.dumps(places)})


class SavedTensors:
    """The tensors of the file, or of the files of several processes; RunFolderError where one is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: dict[str, list[tuple[Path, tuple[int, ...], tuple[int, ...]]]] = {}
        """Parts of each tensor: (file, where its part begins, the part's shape)."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        files = part_files(path) or [path]
        for file in files:
            # Refuses what is no regular file, such as a pipe, on which safetensors could wait for ever.
            with read_untrusted.opened(file, RunFolderError):
                pass
            try:
                self._read(file, len(files) > 1)
            except BROKEN as error:
                raise self.damaged(error) from error

    def _read(self, file: Path, parts: bool) -> None:
        with safe_open(file, "pt") as opened:
            # A file that is alone holds whole tensors and needs no places.
            places: dict[str, Any] = json.loads(opened.metadata()[PLACES]) if parts else {}
            for name in opened.keys():  # noqa: SIM118  # not a dictionary
                size = tuple(opened.get_slice(name).get_shape())
                shape, begin = map(tuple, places[name]) if parts else (size, (0,) * len(size))
                # Every part says the full shape, and all must say the same.
                if self.shapes.setdefault(name, shape) != shape or len(begin) != len(shape):
                    raise ValueError(f"parts of {name!r} say different shapes")
                self._parts.setdefault(name, []).append((file, begin, size))

    def box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """The part of a tensor that begins at `begin` and is as large as `size`."""
        try:
            return self._box(name, begin, size)
        except BROKEN as error:
            raise self.damaged(error) from error

    def _box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        out: Tensor | None = None
        filled = 0
        for file, at, part_size in self._parts[name]:
            # The box that this part and the wanted one have in common, in coordinates
            # of the whole tensor. Each side then subtracts its own begin.
            low = [max(a, b) for a, b in zip(at, begin, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(at, part_size, begin, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside_part = tuple(slice(a - x, b - x) for a, b, x in zip(low, high, at, strict=True))
            with safe_open(file, "pt") as opened:
                numbers: Tensor = opened.get_slice(name)[inside_part] if inside_part else opened.get_tensor(name)
            # Where one part holds the whole box it is returned as it is: no second tensor is filled.
            if tuple(numbers.shape) == size:
                return numbers
            out = torch.empty(size, dtype=numbers.dtype) if out is None else out
            out[tuple(slice(a - x, b - x) for a, b, x in zip(low, high, begin, strict=True))] = numbers
            filled += numbers.numel()
        wanted = int(torch.Size(size).numel())
        # Parts of one save do not overlap, so a count tells whether any is missing.
        if filled != wanted:
            raise ValueError(f"{filled} of {wanted} numbers of {name!r} are there")
        # None only for an empty box: no part holds any of it.
        return torch.empty(size) if out is None else out

    def whole(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self.shapes}

    def tensor(self, name: str) -> Tensor:
        return self.box(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def damaged(self, error: Exception) -> RunFolderError:
        return RunFolderError(f"{self.path} is damaged ({error}). Go on from another checkpoint")


WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
REWARD_HEAD = "reward_head."
"""Begins the names of a reward head's weights."""
AVERAGE = "ema."
"""Begins the names of moving averages in the optimizer's state."""


def save_weights(folder: Path, learner: Learner) -> None:
    """Every trainable parameter, the value head included."""
    if isinstance(learner, DividedWeights):
        learner.write_weights(folder)
        return
    save_file({n: p.detach().contiguous() for n, p in learner.parameters().items()}, folder / WEIGHTS)


def load_weights(folder: Path, learner: Learner) -> None:
    """Load weights into the learner, in place; RunFolderError if their names or shapes are another model's. A learner
    without a reward head takes the other weights alone."""
    if isinstance(learner, DividedWeights):
        learner.read_weights(folder)
        return
    _copy(_load(folder / WEIGHTS), learner.parameters(), folder / WEIGHTS)


def save_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    if isinstance(optimizer, DividedState):
        optimizer.write_state(folder)
        return
    save_file({n: t.contiguous() for n, t in optimizer.state_tensors().items()}, folder / OPTIMIZER)


def load_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    if isinstance(optimizer, DividedState):
        optimizer.read_state(folder)
        return
    optimizer.load_state_tensors(_load(folder / OPTIMIZER))


def load_average(folder: Path, learner: Learner) -> None:
    """Load the weights of a checkpoint, and over them the moving averages that its optimizer kept (`Optimizer.ema`).

    Raises:
        RunFolderError: it has none.
    """
    load_weights(folder, learner)
    state = _load(folder / OPTIMIZER) if part_files(folder / OPTIMIZER) else {}
    averages = {n.removeprefix(AVERAGE): t for n, t in state.items() if n.startswith(AVERAGE)}
    if not averages:
        raise RunFolderError(
            f"{folder} holds no moving average of the weights: a stage keeps one with optimizer.ema=0.99, in the"
            " checkpoints inside it and in the last one of the run"
        )
    parameters = learner.parameters()
    weights = {n: p.detach() for n, p in parameters.items()}
    # A reward head's average in a checkpoint is left out for a learner that has no such head.
    known = {n: t for n, t in averages.items() if n in weights or not n.startswith(REWARD_HEAD)}
    _copy({**weights, **known}, parameters, folder / OPTIMIZER)


def _load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of the files of several processes; RunFolderError if they are missing, not files, cut
    short or damaged."""
    return SavedTensors(path).whole()


def snapshot(learner: Learner) -> Any:
    """A copy of the weights in memory, for `restore`."""
    if isinstance(learner, DividedWeights):
        return learner.copied_weights()
    return {n: p.detach().clone() for n, p in learner.parameters().items()}


def restore(learner: Learner, weights: Any) -> None:
    """Put the weights of a `snapshot` back into the learner."""
    if isinstance(learner, DividedWeights):
        learner.put_weights(weights)
        return
    _copy(weights, learner.parameters(), None)


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], path: Path | None) -> None:
    """Copy tensors into those of the same names; RunFolderError where names or shapes differ."""
    # A policy that goes on from a reward model's checkpoint takes its layers and leaves its head.
    if not any(n.startswith(REWARD_HEAD) for n in target):
        source = {n: t for n, t in source.items() if not n.startswith(REWARD_HEAD)}
    if set(source) != set(target) or any(source[n].shape != target[n].shape for n in target):
        wrong = sorted(set(source) ^ set(target)) or [n for n in target if source[n].shape != target[n].shape]
        raise RunFolderError(
            f"{path or 'these weights'} belong to another model: {', '.join(wrong[:4])} differ. Resume with the model"
            " the run was started with"
        )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
