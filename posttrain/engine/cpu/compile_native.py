"""The C code of `native_code/`, compiled once per machine by its own C compiler and called on tensors.

The library is in the user's cache folder, beside its digest, and is loaded only where nobody else could have written
either. Its name is a hash of source, compiler, flags and processor. Without a working compiler the engine uses torch's
own operations, which are slower but otherwise the same, and `find` returns the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.system import read_untrusted
from posttrain.system.errors import EngineError
from posttrain.system.machine import processor

LANES = 16
"""The number of columns of a feature-major matrix is a multiple of this."""
SOURCES = Path(__file__).with_name("native_code")
MAIN = SOURCES / "decoder.c"
"""Includes the other files, so that all code is one compilation unit."""
# Without -ffast-math: the code relies on infinities, on nan, and on the written order of its sums.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(pointers: str = "", ints: str = "", floats: str = "") -> list[tuple[str, Any]]:
    """The fields of a C structure: pointers, then whole numbers, then floats. Each string has the names as words."""
    kinds = (pointers, POINTER), (ints, INT), (floats, FLOAT)
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Sizes(ctypes.Structure):
    """E hidden width, F feed-forward width, H query heads, K key-value heads, D head width."""

    _fields_ = _fields(ints="E F H K D")


class Layer(ctypes.Structure):
    """Addresses of a layer's weights; None where the layer has no such bias or norm. `before` and `after` are the norms
    before attention and after it, `before_eps` and `after_eps` their epsilons."""

    _fields_ = _fields(
        "before qkv qkv_bias q_norm k_norm out out_bias after gate_up down", floats="before_eps head_eps after_eps"
    )


class Pass(ctypes.Structure):
    """Addresses of the memory of one forward pass (`struct pass` of `decoder.c`), the number N of its positions, and
    the floats `ld` between rows."""

    _fields_ = _fields("x normed qkv seen both inner heads cosine sine ids positions", "N ld")


class Segments(ctypes.Structure):
    """Addresses of the arrays of runs, and the sizes, of `segments.h`."""

    _fields_ = _fields("start length begin deep above first", "R C N H K Dk Dv window", "scale")


# The C types of each function's arguments.
SIGNATURES = {
    "begin": [POINTER] * 3,
    "before": [POINTER] * 3,
    "after": [POINTER] * 4,
    "pick": [POINTER] * 3 + [INT] * 2,
    "end": [POINTER] * 3 + [FLOAT, POINTER],
    "attend": [POINTER] * 2
    + [POINTER, INT, INT] * 2
    + [POINTER, INT]
    + [POINTER, INT, INT]
    + [POINTER] * 4
    + [INT] * 6
    + [FLOAT] * 2,
    "rms_rows": [POINTER] * 2 + [FLOAT] + [POINTER] * 2 + [INT] * 2,
    "rms_rows_back": [POINTER] * 6 + [INT] * 2,
    "heads_rows": [POINTER] * 2 + [FLOAT] + [POINTER] * 4 + [INT] * 3,
    "heads_rows_back": [POINTER] * 8 + [INT] * 3,
    "transposed": [POINTER] * 2 + [INT] * 2,
    "gate_rows": [POINTER] * 3 + [INT],
    "gate_rows_back": [POINTER] * 5 + [INT],
    "segments_forward": [POINTER] * 6,
    "segments_backward": [POINTER] * 10,
    "digest_rows": [POINTER] * 4 + [INT] * 2,
    "fold_rows": [POINTER] * 4 + [INT] * 2,
    "cotangent_rows": [POINTER] * 6 + [INT] * 2,
}
FAILS = ("attend", "pick", "segments_forward", "segments_backward")
"""Functions that return a number: 0 where all went well. The others return nothing."""


Attend = Callable[[Tensor, Tensor, float, int | None], None]
"""(keys of a pool, its values, scaling, window)"""


class Kernels:
    """The compiled functions. All tensors must be float32, or int64 for `digest_rows`, and on the CPU; the caller
    ensures both."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # Without `argtypes` ctypes would pass every number as a C int and cut addresses to 32 bits.
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, INT if name in FAILS else None
        self._attend, self._pick = library.attend, library.pick
        self.begin, self.before, self.after, self.end = library.begin, library.before, library.after, library.end
        self.rms_rows, self.rms_rows_back = library.rms_rows, library.rms_rows_back
        self.heads_rows, self.heads_rows_back = library.heads_rows, library.heads_rows_back
        self.gate_rows, self.gate_rows_back = library.gate_rows, library.gate_rows_back
        self.segments_forward, self.segments_backward = library.segments_forward, library.segments_backward
        self.transposed, self.digest_rows = library.transposed, library.digest_rows
        self.fold_rows, self.cotangent_rows = library.fold_rows, library.cotangent_rows

    def attend(
        self,
        key: Tensor,
        value: Tensor,
        to_N: Tensor,
        query: Tensor,
        visible_T: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        out: Tensor,
        softcap: float | None,
    ) -> Attend:
        """Returns a function for one layer's pools. It stores key and value [K, N, D] at rows `to_N`, and writes the
        attention of query [H, B, D] over its rows to `out` [B, H, D]; see `attention.h`. The tensors are float32 with
        adjacent last elements, and are read at each call."""
        assert all(x.stride(-1) == 1 and x.dtype == torch.float32 for x in (key, value, query))
        heads, count, width = query.shape
        # What is the same in all layers of a pass is bound once: turning a dozen arguments into C numbers in every
        # layer costs as much as the attention.
        fixed = (
            *(key.data_ptr(), key.stride(1), key.stride(0)),
            *(value.data_ptr(), value.stride(1), value.stride(0)),
            *(to_N.data_ptr(), len(to_N)),
            *(query.data_ptr(), query.stride(1), query.stride(0)),
            *(visible_T.data_ptr(), starts_B.data_ptr(), lengths_B.data_ptr(), out.data_ptr()),
            *(count, heads, key.shape[0], width, value.shape[-1]),
        )
        # C gets addresses alone. As a default argument of the function the tensors live as long as it does.
        cap, tensors = softcap or 0.0, (key, value, query)

        def attend(keys: Tensor, values: Tensor, scaling: float, window: int | None, alive: Any = tensors) -> None:
            if self._attend(keys.data_ptr(), values.data_ptr(), *fixed, window or 0, scaling, cap):
                raise MemoryError("attention ran out of memory: use fewer slots or a shorter context")

        return attend

    def pick(self, logp: Tensor, uniform: np.ndarray) -> Tensor | None:
        """int64 [B]: a token for each row of log-probs [B, V], by a float64 uniform; None where a sum is not finite."""
        logp, uniform = logp.contiguous(), np.ascontiguousarray(uniform, np.float64)
        ids = torch.empty(len(logp), dtype=torch.int64)
        failed = self._pick(logp.data_ptr(), uniform.ctypes.data, ids.data_ptr(), *logp.shape)
        return None if failed else ids


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Addresses of the tensors' memory for C, which keep none of them alive; None for none."""
    return [None if t is None else t.data_ptr() for t in tensors]


def stride(count: int) -> int:
    """Floats between the rows of a feature-major matrix of `count` columns: an odd number of vectors, so that the
    elements of one column are spread over the sets of the CPU cache."""
    return (-(-count // LANES) | 1) * LANES


def missing() -> str:
    """Returns the reason why this machine has no compiled kernels; '' where it has them."""
    kernels_or_reason = find()
    return kernels_or_reason if isinstance(kernels_or_reason, str) else ""


def library() -> Kernels:
    """The compiled kernels of this machine. EngineError where there are none."""
    kernels_or_reason = find()
    if isinstance(kernels_or_reason, str):
        raise EngineError(f"there are no compiled kernels: {kernels_or_reason}")
    return kernels_or_reason


@functools.cache
def find() -> Kernels | str:
    """The kernels of this machine, compiled first if needed; or the reason why there are none."""
    # A reason is returned and not raised, and the answer is cached: where there is no compiler every operation asks
    # again, and each then takes its next form.
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        return f"CC={os.environ['CC']!r} is no command ({error}): set it to a C compiler"
    if shutil.which(compiler[0]) is None:
        return f"no C compiler {compiler[0]!r}: install gcc or clang, or set CC"
    try:
        version = _output([*compiler, "--version"])
        # The processor is a part of the key because a home folder may be shared: code for another one (-march=native)
        # may be an illegal instruction here.
        text = [path.read_text() for path in sorted(SOURCES.glob("*.[ch]"))]
        key = "\n".join([*text, *compiler, version.stdout, *FLAGS, _processor()])
        name, cache = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so", own_cache()
        if cache is not None and (kernels := _read_cached(cache / name)):
            return kernels
        with tempfile.TemporaryDirectory(prefix="posttrain-") as temporary:
            fresh = Path(temporary) / name
            if failure := _compile(compiler, fresh):
                return failure
            kernels = None if cache is None else _write_cached(fresh, cache / name)
            return kernels or _loaded(fresh)
    except OSError as error:
        return f"the kernels cannot be compiled: {error}"


def own_cache() -> Path | None:
    """The folder of compiled code in the user's cache folder; None where there is none that only this user can have
    written. What lies in it is loaded as code."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores a relative path. Links are resolved first: the folder that is read is judged.
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
        folder = base.resolve() / "posttrain"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if read_untrusted.private(folder, stat.S_ISDIR) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def _read_cached(library: Path) -> Kernels | None:
    """The kernels of a library in the cache; None where its digest differs, or where others could have written it."""
    digest, kernels = library.with_suffix(".sha256"), ""  # a string stands for no kernels
    with suppress(OSError):
        # Who can write the library can run code as this user, so its owner and rights are checked first.
        is_private = all(read_untrusted.private(path, stat.S_ISREG) for path in (library, digest))
        kernels = _loaded(library) if is_private and _digest(library.read_bytes()) == digest.read_bytes() else ""
    return None if isinstance(kernels, str) else kernels


def _write_cached(fresh: Path, library: Path) -> Kernels | None:
    """Put a library into the cache, with its digest, for the processes that come; None where that fails."""
    # Other processes may do the same at this moment. Each writes beside the name and renames, the digest last: a reader
    # sees a whole library without a digest, which it does not load, or with the right one.
    with suppress(OSError), tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        data = fresh.read_bytes()
        for path, content in ((library, data), (library.with_suffix(".sha256"), _digest(data))):
            part = Path(temporary) / path.name
            part.write_bytes(content)
            part.chmod(0o600)
            part.replace(path)
    return _read_cached(library)


def _loaded(library: Path) -> Kernels | str:
    """The kernels of a library; the reason where it lacks a function, or where nothing may be run from its folder."""
    try:
        return Kernels(ctypes.CDLL(str(library)))
    except (OSError, AttributeError) as error:
        return f"{library} cannot be loaded: {error}"


def _compile(compiler: list[str], library: Path) -> str:
    """Compile the library. Returns the reason if that failed, else ''."""
    completed = _output([*compiler, *FLAGS, "-o", str(library), str(MAIN), "-lm"])
    if completed.returncode:
        return f"{' '.join(compiler)} does not compile {MAIN.name}: {completed.stderr.strip()[:400]}"
    return ""


def _digest(data: bytes) -> bytes:
    """The content of a digest file: sha256 in hex."""
    return hashlib.sha256(data).hexdigest().encode()


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, and keeps what it prints."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _processor() -> str:
    """The processor's name and features, which `-march=native` compiles for."""
    features = [line for line in processor().splitlines() if line.startswith(("flags", "Features"))]
    return "\n".join([platform.machine(), platform.processor(), *features])
