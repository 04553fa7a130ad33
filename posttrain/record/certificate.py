"""The export certificate: what was compared before an exported model was called good, and the digests of its files.

    certificate.json    beside the weights: comparisons, versions, and a digest of every file that a model is read from

A directory with a certificate is compared with it wherever it is read as a model (`model=`, `eval`, `serve`). Files
that were changed, taken away or added since are refused by name. README.md may change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from posttrain.system import files, read_untrusted
from posttrain.system.errors import DataError

CERTIFICATE = "certificate.json"
FAILED = "certificate.failed.json"
"""Written in place of the export where something differs; it has all that was compared."""
LINEAGE = "lineage.json"
SCHEMA = 1
LARGEST = 4 * read_untrusted.MiB
"""Most bytes of a certificate or a lineage record that is read."""
PLAIN_NAME = re.compile(r"[\w][\w.-]{0,199}")
"""A file name without a folder in it: model-00001-of-00002.safetensors."""
READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".py")
"""Endings of the files from which a model is read."""
FREE = (CERTIFICATE, FAILED)
"""Files with such an ending that the certificate does not list."""


@dataclass(frozen=True)
class ExportComparison:
    """One comparison. `unlike`: the first difference in words; '' where there is none."""

    what: str
    count: int
    """How many were compared."""
    unit: str
    """The unit of the count: files, tensors, tokens, prompts."""
    unlike: str = ""
    worst: float | None = None
    """The largest difference, where numbers are compared."""
    bound: float | None = None
    """The largest difference that rounding allows."""
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further numbers."""


@dataclass(frozen=True, kw_only=True)
class ExportCertificate:
    """All comparisons of an export with its run, and what was exported."""

    made: str
    """Kind of the export: weights, merged adapter, adapter, moving average."""
    run: str
    """Identity of the run."""
    checkpoint: str
    comparisons: tuple[ExportComparison, ...]
    weights: str
    """Fingerprint of the tensors as they were read back."""
    tokenizer: str
    template: str
    dtype: str
    versions: Mapping[str, str]
    seconds: float
    second_copy: int
    """Bytes of the second copy of the weights that the comparison needed."""

    @property
    def passed(self) -> bool:
        return not self.unlike

    @property
    def unlike(self) -> str:
        """The first difference; '' where there is none."""
        return next((f"{c.what}: {c.unlike}" for c in self.comparisons if c.unlike), "")

    @property
    def line(self) -> str:
        """The comparisons and their cost, as a line of text."""
        counted = [c for c in self.comparisons if c.unit == "tokens"]
        counts = ", ".join(f"{c.count:,} {c.unit} ({c.what})" for c in counted if c.count)
        counts += "".join(f"; {c.what}: not compared, {why}" for c in counted if (why := c.notes.get("not_compared")))
        return (
            f"certified: read back with transformers {self.versions.get('transformers', '')} and compared with the run:"
            f" {counts}; {self.seconds:.1f} s, {self.second_copy / (1 << 20):,.1f} MiB for the second copy of the"
            " weights"
        )

    def plain(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """As JSON data. `digests`: blake2b of each file, by name."""
        data = {k: v for k, v in asdict(self).items() if k != "comparisons"}
        rows = [{k: v for k, v in asdict(c).items() if v not in (None, {})} for c in self.comparisons]
        return {"schema": SCHEMA, "passed": self.passed, **data, "compared": rows, "files": dict(digests)}


def file_digests(folder: Path) -> dict[str, str]:
    """blake2b of every file from which a model is read."""
    return {p.name: files.digest(p) for p in sorted(folder.iterdir()) if _counts(p)}


def _counts(path: Path) -> bool:
    """Whether a path is a file that the certificate must list."""
    return path.suffix in READ and path.name not in FREE and path.is_file()


def verify_certificate(folder: Path) -> bool:
    """Compare a directory with its certificate. False where it has none.

    Raises:
        DataError: a file is not as the certificate says, or the certificate is damaged or of a failed export.
    """
    path = folder / CERTIFICATE
    if not path.exists():
        return False
    # Limited in size and parsed as foreign text: the folder may be a stranger's.
    data = read_untrusted.parse_object(read_untrusted.read_bytes(path, LARGEST, DataError), str(path), DataError)
    listed: Any = data.get("files")
    if data.get("schema") != SCHEMA or not isinstance(listed, dict) or not listed:
        raise DataError(f"{path} is damaged, or of another version of posttrain: it lists no files. {_way_out(folder)}")
    # Anything but `true` is a failed export, a missing entry too.
    if data.get("passed") is not True:
        raise DataError(f"{path} says that this export differs from its run: export it again")
    recorded = cast("dict[Any, Any]", listed)
    # A name with a slash or dots would lead out of the folder.
    if strange := [n for n in recorded if not isinstance(n, str) or not PLAIN_NAME.fullmatch(n)]:
        raise DataError(f"{path} is damaged: {str(strange[0])[:80]!r} is no name of a file here. {_way_out(folder)}")
    present = {p.name for p in folder.iterdir() if _counts(p)}
    # Weights come first: if several files differ, the message names the weights.
    for name in sorted({*recorded, *present}, key=_weights_first):
        if name not in present:
            raise DataError(f"{folder / name} is gone, and {CERTIFICATE} lists it. {_way_out(folder)}")
        if name not in recorded:
            raise DataError(
                f"{folder / name} was added after the export: {CERTIFICATE} does not list it. {_way_out(folder)}"
            )
        # Opened once and closed: `opened` refuses pipes and devices, which `digest` would read for ever.
        with read_untrusted.opened(folder / name, DataError):
            pass
        if files.digest(folder / name) != recorded[name]:
            raise DataError(
                f"{folder / name} is not the file that was exported: its digest differs from {CERTIFICATE}."
                f" {_way_out(folder)}"
            )
    return True


def _weights_first(name: str) -> tuple[bool, str]:
    return not name.endswith((".safetensors", ".bin")), name


def _way_out(folder: Path) -> str:
    """A sentence about what to do with a folder that differs from its certificate."""
    return (
        f"Export or copy it again. If you changed it on purpose, remove {CERTIFICATE} and {LINEAGE}: it is then a model"
        " of its own, of which nothing is known"
    )


def first_unlike(names: Sequence[str]) -> str:
    """Names in a sentence, at most three."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
