"""Reads the index of a sharded checkpoint without trusting it.

torch keeps the index as a pickle, and a pickle may name any function to be called. Here it may name only what torch
itself writes into an index, so a checkpoint of somebody else runs no program. torch reads tensors that way by itself
(`torch.load(weights_only=True)`).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from posttrain.system.errors import RunFolderError

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
KNOWN = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath")),
        *(("pathlib._local", name) for name in ("Path", "PosixPath", "WindowsPath")),
    }
)
"""The names that an index may contain, as (module, name); dtypes of torch are allowed beside them. Python 3.13 has
paths in `pathlib._local`."""


class IndexReader(FileSystemReader):
    """torch's reader of a folder, with an index that may not name what it likes.

    Raises:
        RunFolderError: the index cannot be read, or names something else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._named = folder.name

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except RunFolderError as error:
            raise RunFolderError(f"sharded checkpoint {self._named}: {error}") from None
        except Exception as error:
            raise RunFolderError(
                f"sharded checkpoint {self._named}: its index {path.name} cannot be read ({error}). Go on from another"
                " one"
            ) from error
        if not isinstance(found, Metadata):
            raise RunFolderError(f"sharded checkpoint {self._named}: {path.name} is no index. Go on from another one")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise RunFolderError(
            f"its index names {module}.{name}, which torch does not write there and which could run a program, so it"
            " was not read. Go on from a checkpoint that you wrote"
        )
