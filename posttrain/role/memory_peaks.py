"""The highest memory use of a phase of a step, and the settings to lower where memory does not suffice. Numbers are
bytes: what torch's allocator gave out on an accelerator, else the process's resident memory."""

from __future__ import annotations

import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from posttrain.core.batch import Packed
from posttrain.system.errors import ConfigError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESIDENT_PEAK = "5"
"""Written to `clear_refs`, this makes Linux set the peak of a process's resident memory to its present size."""


class PeakMemory:
    """The most bytes that were in use since the last `reset`.

    Args:
        device: of the model, as torch names it.
    """

    def __init__(self, device: str = "cpu") -> None:
        kind = device.partition(":")[0]
        self._torch: Any = None if kind in ("cpu", "meta") else torch.get_device_module(kind)
        self._device = device
        # Only Linux can reset the peak of resident memory. Elsewhere the
        # peak counts from the start of the process, and `what` says so.
        self._resets = self._torch is not None or _reset_resident()

    @property
    def what(self) -> str:
        """Kind of memory that is counted, in words."""
        if self._torch is not None:
            return f"allocated on {self._device}"
        return "resident" if self._resets else "resident, since the process began"

    def reset(self) -> None:
        """Begin a new measurement: the peak becomes the memory in use now, where the system can do that."""
        if self._torch is not None:
            self._torch.reset_peak_memory_stats(self._device)
        elif self._resets:
            _reset_resident()

    def read(self) -> int:
        """Peak bytes since the last `reset`."""
        if self._torch is not None:
            return int(self._torch.max_memory_allocated(self._device))
        if self._resets:
            # The number is in kB, and a kB of Linux has 1024 bytes.
            line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # ru_maxrss is in bytes on macOS, and in units of 1024 bytes on Linux.
        return most if sys.platform == "darwin" else most * 1024


def resident() -> int | None:
    """Bytes of this process that are resident now; None where the system does not tell."""
    with suppress(OSError, StopIteration):
        line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    return None


def _reset_resident() -> bool:
    """Resets the highest resident memory to that of now; returns whether this was possible."""
    try:
        CLEAR.write_text(RESIDENT_PEAK)
        return "VmHWM:" in STATUS.read_text()
    except OSError:
        return False


def mebibytes(count: float) -> str:
    """A number of bytes in MiB, for people.

    >>> mebibytes(3 * 2**20), mebibytes(5_000 * 2**20)
    ('3 MiB', '5,000 MiB')
    """
    return f"{count / 2**20:,.0f} MiB"


@contextmanager
def memory_suffices(packed: Packed, micro_tokens: int) -> Iterator[None]:
    """Around a forward and backward pass: out of memory becomes a ConfigError that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        # The frames of the failed pass still hold its activations: clearing them frees the memory.
        traceback.clear_frames(error.__traceback__)
        tokens, longest = len(packed.ids_N), int(packed.lengths_S.max())
        lower = (
            f"a sequence is never cut, and this one is longer than micro_tokens={micro_tokens}: lower model.context or"
            " sampling.max_tokens"
            if longest > micro_tokens
            else f"lower micro_tokens={micro_tokens} of the stage"
        )
        raise ConfigError(
            f"out of memory in a forward and backward pass of {tokens:,} tokens ({len(packed.lengths_S)} sequences, the"
            f" longest of {longest:,}): {lower}, or compute activations again instead of keeping them"
            f" (model.gradient_checkpointing=full). docs/help/out-of-memory.md says more."
            f" ({(str(error).splitlines() or [type(error).__name__])[0]})"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU torch raises a plain RuntimeError with these words.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
