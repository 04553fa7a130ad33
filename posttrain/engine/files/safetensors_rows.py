"""Safetensors files: read whole, or only some rows of a weight, so that a rank reads only the part that it holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.engine.files.check_folder import weight_files
from posttrain.system import read_untrusted
from posttrain.system.errors import DataError

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
"""The file that lists the files of a model in several ones, and the file of a model in one."""


def load_tensors(path: Path, advice: str = "Copy the whole folder again") -> dict[str, Tensor]:
    """All tensors of a file that may be somebody else's. DataError where it is missing, damaged or no regular file."""
    # Opened once only to refuse what is no regular file: load_file would wait for ever at a pipe.
    with read_untrusted.opened(path, DataError):
        pass
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is damaged ({error}). {advice}") from error


class RowFiles:
    """The safetensors files of a model. Any rows of a weight can be read from them. `digest` covers names, types and
    shapes of the tensors and sizes of the files, not values: ranks see by it that all read the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        hasher = hashlib.blake2b(digest_size=16)
        for path in self._paths():
            try:
                with safe_open(path, "pt") as file:
                    for name in sorted(file.keys()):
                        rows = file.get_slice(name)
                        self._file_of[name] = path
                        hasher.update(f"{name} {rows.get_dtype()} {rows.get_shape()};".encode())
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path}: its weights cannot be read ({error}). Copy or download them again") from error
            hasher.update(f"{path.name} {path.stat().st_size};".encode())
        self.digest = hasher.hexdigest()

    def _paths(self) -> list[Path]:
        """The model's safetensors files; DataError where one of them is missing."""
        if (self.folder / INDEX).is_file():
            paths = [self.folder / name for name in sorted(set(weight_files(self.folder / INDEX).values()))]
        else:
            paths = [self.folder / ALONE]
        if missing := [p for p in paths if not p.is_file()]:
            raise DataError(
                f"{missing[0]} is not there: rows are read from safetensors files. Save the model again with"
                " save_pretrained, or load it whole on each rank"
            )
        return paths

    def fill(self, module: PreTrainedModel, name: str, into: Tensor, begin: int, dtype: torch.dtype) -> None:
        """Read rows from `begin` of one weight into `into`, rounded to `dtype`; DataError where no file has them."""
        key = self._key(module, name)
        if key is None:
            raise DataError(
                f"{self.folder}: {name} is in none of its files under this name, so rows of it cannot be read. Load the"
                " model whole on each rank (`load_policy`), which converts names"
            )
        with safe_open(self._file_of[key], "pt") as file:
            rows = file.get_slice(key)
            shape = list(rows.get_shape())
            parent, _, last = name.rpartition(".")
            # The whole shape, and not that of `into`: rows of a file that has more of them are another model's.
            if shape != list(getattr(module.get_submodule(parent), last).shape):
                raise DataError(f"{self.folder}: {name} has the shape {shape} in its file, and another in the model")
            # A rank may hold no row of a small weight.
            if len(into):
                # Only these rows are read from the disk. They are rounded to the model's type first, as a model that is
                # loaded whole is, even where `into` is wider.
                into.copy_(rows[begin : begin + len(into)].to(dtype))

    def whole(self, module: PreTrainedModel, name: str, like: Tensor) -> Tensor:
        """All of one weight, of the shape and type of `like`."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        self.fill(module, name, tensor, 0, like.dtype)
        return tensor

    def strange(self, module: PreTrainedModel) -> tuple[str, ...]:
        """Names of weights on `meta` that no file has, and names in files that belong to no weight of the module."""
        tensors = module.state_dict(keep_vars=True)
        # Weights on meta are those that a file must give; others (buffers that the code computes) have their numbers.
        missing = [n for n, t in tensors.items() if t.is_meta and self._key(module, n) is None]
        known = {n.replace(".base_layer.", ".") for n in tensors}
        return (*missing, *sorted(self._file_of.keys() - known))

    def _key(self, module: PreTrainedModel, name: str) -> str | None:
        """The name under which a file holds this weight: its own without PEFT's `base_layer`, or that of a tied weight,
        which save_pretrained writes once, under any one of its names. None where no file has it."""
        plain = name.replace(".base_layer.", ".")
        tied: Any = getattr(module, "all_tied_weights_keys", None) or {}  # name -> another name of that weight
        names = [plain, *(a for pair in tied.items() for a in pair if plain in pair)]
        return next((n for n in names if n in self._file_of), None)
