"""The parts of a tensor that several vLLM workers hold, and the proof that together they hold what was sent.

A worker keeps only its part of a cut tensor. It reads the part that it computes with, and says which rows or columns
that is, with their digest. Here the same rows or columns are cut out of the tensor that was sent. Where all digests are
equal and the parts leave no gap, the workers serve that tensor. No module of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.engine.files.fingerprint import digest_of, fingerprints
from posttrain.system.errors import EngineError

BUCKET = 256 << 20
"""Most bytes that are written at once for several workers or a server to read. A larger tensor travels alone."""


@dataclass(frozen=True)
class WorkerPart:
    """Ranges of one axis of a tensor, one after another."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    """(begin, end) of each."""

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor."""
        pieces = [whole.narrow(self.axis, begin, end - begin) for begin, end in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.axis], self.size, *whole[self.axis + 1 :])

    def plain(self) -> list[Any]:
        """The part as plain data, for JSON: [axis, [[begin, end], ...]]."""
        return [self.axis, [list(r) for r in self.ranges]]

    @staticmethod
    def read(plain: Sequence[Any]) -> WorkerPart:
        """The inverse of `plain`."""
        axis, ranges = plain
        return WorkerPart(axis, tuple((begin, end) for begin, end in ranges))


def served(
    answers: Sequence[Mapping[str, Any]], sent: Callable[[str], Tensor | None], sent_digests: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """(the digest of each tensor that the workers serve together, words about what differs from what was sent).

    Where all is well, these are `sent_digests` and ''. The digests of a single worker are returned as they are.

    Args:
        answers: what `vllm_worker.ServedWeights.posttrain_digests` answered, one for each worker.
        sent: returns the tensor that was sent under a name; None where there was none.
        sent_digests: of the tensors that were sent.
    """
    if len(answers) == 1:
        return dict(answers[0]["digests"]), ""
    parts = [{n: WorkerPart.read(p) for n, p in answer["parts"].items()} for answer in answers]
    digest_of_tensor, wrong = dict[str, str](), dict[int, list[str]]()
    # What each worker should have told, by the parts that it names itself. That these leave no gap is checked apart, or
    # a worker that names an empty part would always be right.
    expected = [
        _wanted(answer["digests"], parts_of_worker, sent, sent_digests)
        for answer, parts_of_worker in zip(answers, parts, strict=True)
    ]
    for name in answers[0]["digests"]:
        digests = [answer["digests"][name] for answer in answers]
        differing = [worker for worker, digest in enumerate(digests) if digest != expected[worker].get(name)]
        for worker in differing:
            wrong.setdefault(worker, []).append(name)
        tensor = sent(name)
        if tensor is not None and not _leaves_no_gap([p.get(name) for p in parts], tensor.shape):
            raise EngineError(f"no worker of vLLM serves some rows or columns of {name!r}: set engine.workers=1")
        digest_of_tensor[name] = f"parts {' '.join(digests)}" if differing else sent_digests[name]
    words = [
        f"worker {worker} of {len(answers)} serves {len(names)} tensors otherwise than they were sent, such as"
        f" {names[0]!r}"
        for worker, names in sorted(wrong.items())
    ]
    return digest_of_tensor, "; ".join(words)


def fingerprint_served(
    answers: Sequence[Mapping[str, Any]],
    sent: Callable[[str], Tensor | None],
    sent_digests: Callable[[], Mapping[str, str]],
) -> str:
    """The fingerprint of what the workers serve together. Where some do not serve what was sent, words behind it name
    them, so that the text equals no fingerprint.

    Args:
        answers, sent: as in `served`.
        sent_digests: returns the digests of the tensors that were sent. It is called only for several workers.
    """
    digests, wrong = served(answers, sent, sent_digests() if len(answers) > 1 else {})
    return digest_of(digests) + (f" ({wrong})" if wrong else "")


def _wanted(
    digests: Iterable[str],
    parts: Mapping[str, WorkerPart],
    sent: Callable[[str], Tensor | None],
    sent_digests: Mapping[str, str],
) -> dict[str, str]:
    """The digests that a worker should have told, by name; none of a tensor that was not sent."""

    def cut() -> Iterator[tuple[str, Tensor]]:
        for name, part in parts.items():
            if (tensor := sent(name)) is not None:
                yield name, part.of(tensor)

    return {n: sent_digests[n] for n in digests if n in sent_digests and n not in parts} | fingerprints(cut())


def _leaves_no_gap(parts: Sequence[WorkerPart | None], shape: Sequence[int]) -> bool:
    """Returns whether these parts, one for each worker, leave nothing of a tensor out. None as a part: all of it."""
    if None in parts:
        return True
    cut_parts = [part for part in parts if part is not None]
    if len({part.axis for part in cut_parts}) != 1:
        return False
    # `end`: up to here everything is held. Parts may overlap, where heads are copied to several workers.
    end = 0
    for begin, upto in sorted(r for part in cut_parts for r in part.ranges):
        if begin > end:
            return False
        end = max(end, upto)
    return end == shape[cut_parts[0].axis]


def buckets(tensors: Iterable[tuple[str, Tensor]], most: int = 0) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, on the CPU, in buckets of at most `most` bytes (0: `BUCKET`) or of one larger tensor."""
    most, bucket, size = most or BUCKET, dict[str, Tensor](), 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def written_in(folder: Path) -> Iterator[None]:
    """Inside, weights are written into the folder, which is made if need be. EngineError where they cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (SafetensorError, OSError) as error:
        raise EngineError(
            f"weights for vLLM cannot be written to {folder} ({error}): it needs room for a copy of them. Make room"
            " there, or name another folder in engine.share"
        ) from error


class StagedTensors:
    """The tensors of one version in safetensors files, until `remove`. No other files there begin with `name`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.files: list[Path] = []
        """In the order of the tensors."""
        self.bytes = 0
        self._file_of: dict[str, Path] = {}
        self._digests: dict[str, str] = {}

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the tensors, a bucket at a time.

        Nothing else may run in this process meanwhile. The tensors may come from several ranks that wait for each
        other, and another order to them would be taken for the next part.
        """
        for bucket in buckets(tensors):
            path = self._folder / f"{self._name}-{len(self.files)}.safetensors"
            with written_in(self._folder):
                self.files.append(path)
                save_file(bucket, path)
            self._file_of |= dict.fromkeys(bucket, path)
            # Digests are taken while the tensors are here; the files are read again only where workers hold parts.
            self._digests |= fingerprints(bucket.items())
            self.bytes += sum(t.nbytes for t in bucket.values())

    def sent(self, name: str) -> Tensor | None:
        """One tensor as it was written; None where none has this name."""
        path = self._file_of.get(name)
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    def fingerprint_served(self, answers: Sequence[Mapping[str, Any]]) -> str:
        return fingerprint_served(answers, self.sent, lambda: self._digests)

    def remove(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)
