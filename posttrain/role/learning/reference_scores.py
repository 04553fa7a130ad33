"""Log-probs of a frozen reference, computed once for the completions of a stage; and the opponent of a policy.

A stage that learns from data meets the same completions again. Their reference log-probs never change, so they are
computed before the first step and kept in the run folder, and no reference model is held in memory. An `Opponent` is
another model that says completions in a stage of online preferences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from posttrain.core.batch import Packed
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.types import OPPOSED, SampledTurn, Segment
from posttrain.role.sync import Sync
from posttrain.system import files, read_untrusted
from posttrain.system.errors import InvariantError, RunFolderError

FILE = "scores.safetensors"
"""The file in the folder of the scores."""
KEY = 16
"""Number of bytes of a segment's digest."""


class LogProbs(Protocol):
    """Computes float32 [M] log-probs of the spoken tokens."""

    def score(self, packed: Packed) -> np.ndarray: ...


def digest_of_segment(segment: Segment) -> bytes:
    """A digest of the tokens, of which are spoken, and of the sampling they are scored under."""
    # The same tokens under another contract, or with another mask, have other log-probs.
    hashed = hashlib.blake2b(repr(segment.sampling).encode(), digest_size=KEY)
    hashed.update(segment.ids.tobytes())
    hashed.update(segment.mask.tobytes())
    return hashed.digest()


class ReferenceScores:
    """Reference log-probs by segment: those that were loaded, and those that `add` computes. `reference`: the model's
    fingerprint."""

    def __init__(self, reference: str, by_digest: dict[bytes, np.ndarray] | None = None) -> None:
        self.reference, self._by_digest = reference, by_digest if by_digest is not None else {}

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self._by_digest.values())

    def missing(self, segments: Iterable[Segment]) -> list[Segment]:
        """The segments without scores, each distinct segment once."""
        # A data set often has the same completion in several rows.
        distinct = {digest_of_segment(s): s for s in segments}
        return [s for key, s in distinct.items() if key not in self._by_digest]

    def add(self, scorer: LogProbs, segments: Sequence[Segment]) -> None:
        """Compute the scores of these segments in one pass."""
        if not segments:
            return
        cuts = np.cumsum([s.spoken for s in segments])[:-1]
        for s, x in zip(segments, np.split(scorer.score(Packed.of(segments)), cuts), strict=True):
            self._by_digest[digest_of_segment(s)] = x.astype(np.float32)

    def of(self, segments: Sequence[Segment]) -> np.ndarray:
        """float32 [M]: the scores of the spoken tokens of these segments; InvariantError where one was not computed."""
        scores = [self._by_digest.get(digest_of_segment(s)) for s in segments]
        if missing := sum(x is None for x in scores):
            raise InvariantError(
                f"{missing} of {len(scores)} completions have no reference log-probs: the data, the tokenizer or the"
                " chat template is not what it was when they were computed. Begin a new run"
            )
        return np.concatenate([np.zeros(0, np.float32), *(x for x in scores if x is not None)])

    def save(self, folder: Path) -> None:
        keys = list(self._by_digest)
        arrays = {
            "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY).copy(),
            "lengths": np.array([len(self._by_digest[k]) for k in keys], np.int64),
            "logp": np.concatenate([np.zeros(0, np.float32), *self._by_digest.values()]),
        }
        save_file(arrays, folder / FILE, {"reference": self.reference})

    @staticmethod
    def load(folder: Path, reference: str) -> ReferenceScores:
        """The scores of `save`; none where the folder is missing. RunFolderError where the files are damaged, or of
        another reference."""
        if not folder.is_dir():
            return ReferenceScores(reference)
        # The file may come from elsewhere. The checks go from the outside in: the digests of the
        # folder, the kind of file, its format, and last whether the numbers fit together.
        if wrong := files.damage(folder):
            raise RunFolderError(f"{folder}: {wrong}. Remove it, and --resume computes it again")
        path = folder / FILE
        with read_untrusted.opened(path, RunFolderError):
            pass
        try:
            with safe_open(path, "numpy") as file:
                keys, lengths, logp = (file.get_tensor(n) for n in ("keys", "lengths", "logp"))
                computed_by = file.metadata().get("reference", "")
            # The conditions on which `of` and the split below rely. Log-probs
            # that are not finite would give a NaN gradient many steps later.
            fits = (
                keys.shape == (*lengths.shape, KEY)
                and keys.dtype == np.uint8
                and logp.dtype == np.float32
                and lengths.dtype == np.int64
                and bool(np.all(lengths >= 0))
                and int(lengths.sum()) == len(logp)
                and bool(np.all(np.isfinite(logp)))
            )
        # AttributeError: the file has no metadata.
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{path} is damaged ({error}). Remove {folder}, and --resume computes it again"
            ) from error
        if computed_by != reference:
            raise RunFolderError(
                f"{path} was computed by another reference than this stage's. Remove {folder}, and --resume computes it"
                " again"
            )
        if not fits:
            raise RunFolderError(f"{path} does not hold log-probs by digest. Remove {folder}, and --resume computes it")
        parts = np.split(logp, np.cumsum(lengths)[:-1]) if len(lengths) else []
        return ReferenceScores(reference, {k.tobytes(): x for k, x in zip(keys, parts, strict=True)})


@dataclass(frozen=True)
class OpponentSampler:
    """A sampler whose tokens are marked as an opponent's. The rest of `core.ports.Sampler` is that of `engine`."""

    engine: Sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        turn = await self.engine.generate(ids, sampling, place)
        # The version OPPOSED marks the tokens: without it checks and credit
        # would take the opponent's tokens for the policy's.
        return replace(turn, version=np.full_like(turn.version, OPPOSED))


@dataclass(frozen=True)
class Opponent:
    """An opponent, and how it follows the policy."""

    engine: Sampler
    sync: Sync | None
    """Pushes the policy's weights to it; None where it holds none of them (the reference alone)."""

    @property
    def sampler(self) -> Sampler:
        return cast("Sampler", OpponentSampler(self.engine))

    async def follow(self, version: int) -> None:
        """Bring the policy's weights that it holds up to `version`, with the checks of every push."""
        if self.sync is not None:
            await self.sync.follow(version)
