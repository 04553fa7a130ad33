"""A growing token sequence of what the environment wrote (`see`), the policy sampled (`say`) and data has (`show`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.exchange.expert_choices import filled
from posttrain.core.sampling import Sampling
from posttrain.core.types import SHOWN, SampledTurn, Segment, Top, TruncationSets
from posttrain.system.errors import InvariantError


class Transcript:
    """One growing token sequence. Its arrays are always aligned, because every append has ids, mask, logp and version.

    >>> from posttrain.core.stop import Stop
    >>> t = Transcript(Sampling(stop_ids=()))
    >>> t.see([5, 6]); t.say(SampledTurn(np.int32([7]), np.float32([-0.5]), np.int32([0]), Stop.SAID))
    >>> t.segment().mask.tolist()
    [False, False, True]
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._ids: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logp: list[np.ndarray] = []
        self._version: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._top: list[Top] = []
        self._in_turn: list[np.ndarray] = []
        self._routed: np.ndarray | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def spoke(self) -> bool:
        """True where the transcript has any spoken token."""
        return any(m.any() for m in self._mask)

    def see(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens that the environment wrote: prompt, observation, tool output. They have no log-prob."""
        n = len(ids)
        # NaN and -1 where nothing was sampled: a log-prob that is read by mistake makes the result NaN.
        self._append(ids, np.zeros(n, bool), np.full(n, np.nan, np.float32), np.full(n, -1, np.int32))

    def say(self, said: SampledTurn) -> None:
        """Add a turn that the policy sampled under this transcript's sampling."""
        n = len(said.ids)
        if self.sampling.truncated != (said.kept is not None):
            raise InvariantError("a truncated sampler returns the kept set of every token it said, and no other does")
        # Before anything is added: a transcript with tokens but without their most probable ones is not aligned.
        if bool(self.sampling.top) != (said.top is not None):
            raise InvariantError(
                f"sampling.top={self.sampling.top}: the sampler must hand over so many most probable tokens a draw"
            )
        # The choices cover the whole context and all new tokens but
        # the last, which the engine has drawn and not computed.
        if said.routed is not None:
            self._route(said.routed, self._length + n - 1)
        # The sampler's own numbers, never computed again: mu is the distribution that really drew the token.
        self._append(said.ids, np.ones(n, bool), said.logp, said.version)
        self._in_turn.append(np.arange(n, dtype=np.int32))
        if said.kept is not None:
            self._kept += said.kept.sets()
        if said.top is not None:
            self._top.append(said.top)

    def show(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens of a demonstration. They are learned from, with log-prob 0 and version SHOWN."""
        n = len(ids)
        self._append(ids, np.ones(n, bool), np.zeros(n, np.float32), np.full(n, SHOWN, np.int32))
        self._in_turn.append(np.arange(n, dtype=np.int32))

    def _route(self, routed: np.ndarray, computed: int) -> None:
        """Add the experts of the tokens that this turn computed for the first time. Those of earlier turns stay: by
        them their tokens were drawn, whatever weights computed the same tokens again later."""
        if len(routed) != computed:
            raise InvariantError(
                f"a turn computed {computed} tokens, with its prompt, and has router choices of {len(routed)}"
            )
        before = routed[:0] if self._routed is None else self._routed
        self._routed = np.concatenate([before, routed[len(before) :]])

    def _append(self, ids: Sequence[int] | np.ndarray, mask: np.ndarray, logp: np.ndarray, version: np.ndarray) -> None:
        if not len(ids) == len(mask) == len(logp) == len(version):
            raise InvariantError("a transcript entry needs one mask, log-prob and version per id")
        self._ids.append(np.asarray(ids, dtype=np.int32))
        self._mask.append(np.asarray(mask, dtype=np.bool_))
        self._logp.append(np.asarray(logp, dtype=np.float32))
        self._version.append(np.asarray(version, dtype=np.int32))
        self._length += len(ids)

    @property
    def ids(self) -> np.ndarray:
        """All tokens so far, int32 [T]: the exact context of the next turn."""
        return np.concatenate([np.zeros(0, np.int32), *self._ids])

    def segment(self) -> Segment:
        """The sequence so far as a checked `Segment`."""
        return Segment(
            ids=self.ids,
            mask=np.concatenate([np.zeros(0, bool), *self._mask]),
            logp=np.concatenate([np.zeros(0, np.float32), *self._logp]),
            version=np.concatenate([np.zeros(0, np.int32), *self._version]),
            sampling=self.sampling,
            kept=TruncationSets.of(self._kept) if self.sampling.truncated else None,
            top=Top.join(self._top, self.sampling.top) if self.sampling.top else None,
            in_turn=np.concatenate([np.zeros(0, np.int32), *self._in_turn]) if self.sampling.in_turn else None,
            routed=None if self._routed is None else filled(self._routed, self._length),
        )


def shown_segment(ids: np.ndarray, mask: np.ndarray, sampling: Sampling) -> Segment:
    """A sequence that nobody sampled, such as a demonstration. Tokens of `mask` count as spoken, with log-prob 0 and
    version SHOWN."""
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(ids, mask, logp, np.where(mask, SHOWN, -1).astype(np.int32), sampling)
