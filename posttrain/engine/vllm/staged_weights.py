"""Weights on their way to a vLLM server, in files: the sender never has more of them in memory than one bucket.

Weights that several ranks hold come together a bucket at a time (`engine.parallel.gather`), and here each is written
before the next one comes. What the workers then say that they serve is compared with the files, a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.vllm.worker_parts import buckets, fingerprint_served
from posttrain.system.errors import EngineError


class StagedTensors:
    """The tensors of one version in safetensors files, until `remove`.

    Args:
        name: with which the names of its files begin; nobody else's files in the folder do.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.files: list[Path] = []
        """In the order of the tensors."""
        self.bytes = 0
        """Bytes of all tensors."""
        self._of: dict[str, Path] = {}
        self._digests: dict[str, str] = {}

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write them, a bucket at a time. Nothing else runs meanwhile: the ranks that give their parts wait for each
        other, and would take another order for the next part."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for bucket in buckets(tensors):
            path = self._folder / f"{self._name}-{len(self.files)}.safetensors"
            self.files.append(path)
            try:
                save_file(bucket, path)
            except (SafetensorError, OSError) as error:
                raise EngineError(
                    f"weights for vLLM cannot be written to {self._folder} ({error}): it needs room for a copy of them."
                    " Make room there, or name another folder in engine.share"
                ) from error
            self._of |= dict.fromkeys(bucket, path)
            self._digests |= fingerprints(bucket.items())
            self.bytes += sum(t.nbytes for t in bucket.values())

    def sent(self, name: str) -> Tensor | None:
        """One tensor as it was written; None where none has this name."""
        path = self._of.get(name)
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    def fingerprint_served(self, told: Sequence[Mapping[str, Any]]) -> str:
        """`worker_parts.fingerprint_served` of what was written."""
        return fingerprint_served(told, self.sent, lambda: self._digests)

    def remove(self) -> None:
        """Remove what is left of its files."""
        for path in self.files:
            path.unlink(missing_ok=True)
