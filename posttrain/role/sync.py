"""Weight sync: sends the learner's weights to a sampler (`Sync`), and proves by two checks that they arrived and are
used. `InProcess` is the transport inside one process; `whole_tensors` joins shards for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from posttrain.core.exchange.shards import Shard
from posttrain.core.ports import Learner, Sampler, Transport
from posttrain.role.learning.logprob_tolerance import Gap, allowed, packed_text
from posttrain.system.errors import InvariantError


class InProcess:
    """A `core.ports.Transport` for a learner and a sampler in one process. Tensors are passed on without a copy."""

    async def send(self, version: int, shards: Iterable[Shard], sampler: Sampler) -> str:
        """Load the whole tensors as `version`; returns the fingerprint of the weights that are then served."""
        return await sampler.load(version, whole_tensors(shards))


def whole_tensors(shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, by name, as soon as all of its shards have come. A weight in one shard is not copied.

    Raises:
        InvariantError: a part came twice, parts overlap or leave a gap, or parts of one weight differ in dtype or full
            shape.
    """
    # A weight is passed on as soon as it is whole, so memory never holds all weights twice.
    # `parts` holds the weights that have come in part.
    done: set[str] = set()
    parts: dict[str, _Parts] = {}
    empty: dict[str, Shard] = {}
    for shard in shards:
        # An empty shard says that a process has no part of this weight. The name is
        # remembered, so that the check at the end finds a weight of which nobody sent a part.
        if not shard.tensor.numel() and not shard.whole:
            empty.setdefault(shard.name, shard)
            continue
        if shard.name in done:
            raise InvariantError(
                f"weight {shard.name!r} was sent twice: a part came after all of it was there. Send every part once"
            )
        if shard.whole and shard.name not in parts:
            done.add(shard.name)
            yield shard.name, shard.tensor
            continue
        if parts.setdefault(shard.name, _Parts(shard)).add(shard):
            done.add(shard.name)
            yield shard.name, parts.pop(shard.name).full
    for name, shard in empty.items():
        if name not in done:
            parts.setdefault(name, _Parts(shard))
    for name, gathered in parts.items():
        raise InvariantError(
            f"weight {name!r} of shape {gathered.first.shape} is not whole: {gathered.count} of {gathered.full.numel()}"
            " numbers came. Send the parts of every process"
        )


class _Parts:
    """A tensor that is being joined from its shards."""

    def __init__(self, first: Shard) -> None:
        self.first = first
        self.full: Tensor = torch.empty(first.shape, dtype=first.tensor.dtype, device=first.tensor.device)
        self.count = 0
        self._seen: list[Shard] = []

    def add(self, shard: Shard) -> bool:
        """Add a shard; returns whether the tensor is whole now."""
        if (shard.shape, shard.tensor.dtype) != (self.first.shape, self.full.dtype):
            raise InvariantError(
                f"weight {shard.name!r}: one part is of a {self.full.dtype} {self.first.shape}, another of a"
                f" {shard.tensor.dtype} {shard.shape}. Cut all parts from the same tensor"
            )
        # Without overlaps, a full count of numbers means that every number has come once.
        if overlapping := next((s for s in self._seen if s.overlaps(shard)), None):
            raise InvariantError(
                f"weight {shard.name!r}: the part of shape {tuple(shard.tensor.shape)} at {shard.offsets} and the one"
                f" of shape {tuple(overlapping.tensor.shape)} at {overlapping.offsets} hold the same numbers. Send"
                " every number once"
            )
        with torch.no_grad():
            self.full[shard.box].copy_(shard.tensor)
        self._seen.append(shard)
        self.count += shard.tensor.numel()
        return self.count == self.full.numel()


def nothing_is_kept() -> None:
    """Does nothing: the caches of an engine elsewhere are in no record."""


@dataclass
class Sync:
    """Pushes the learner's weights to the sampler, and checks that they arrived."""

    learner: Learner
    sampler: Sampler
    probe_ids: np.ndarray
    """int32 token ids, at least two, always the same: both sides score them after every push."""
    dtype: str = "float32"
    """Dtype of the weights. It sets how far the two sides' log-probs may differ by rounding."""
    transport: Transport = field(default_factory=InProcess)
    """Carries the weights."""
    ready: Callable[[], Awaitable[None]] | None = None
    """Waits until new weights may come. None: they may come at any time."""
    elsewhere: Callable[[], Awaitable[None]] | None = None
    """Waits until sent weights have left for engines in processes of their own, which install them while the learner
    computes its half of the checks. None: the engine works in this process."""
    forget: Callable[[], None] = nothing_is_kept
    """Empties what the sampler keeps of earlier turns, as new weights do."""
    tried: bool = False
    """Whether a push has already proved that the sampler computes with the learner's adapter."""

    def due(self, version: int) -> bool:
        """Returns whether the learner's weights, which are `version` now, are newer than the sampler's."""
        return version > self.sampler.version

    async def follow(self, version: int) -> None:
        """Push the learner's weights, which are `version` now, where they are newer than the sampler's.

        Otherwise the optimizer step was left out, and the sampler only forgets what it keeps of earlier turns. A run
        that is resumed here starts with an empty sampler, so the records of both runs stay equal.
        """
        if self.due(version):
            await self.push(version)
        else:
            self.forget()

    async def push(self, version: int) -> str:
        """Push the learner's weights as `version`; returns their fingerprint.

        Raises:
            InvariantError: the sampler serves other weights or another version, or computes other log-probs with them,
                or without the adapter.
        """
        # First the groups that were asked ahead end, are given up, or pause: else a turn would span two versions.
        if self.ready is not None:
            await self.ready()
        if not self.tried:
            await self._try_adapter(self.sampler.version + 1)
            self.tried = True
        # Two checks, because each misses errors that the other finds. Fingerprint: equal bytes can still be used
        # wrongly (an old cache, another dtype). Scores: a tensor that these few tokens do not touch can be wrong.
        served, ours = await self._send(version)
        await self._scores_alike(version, ours)
        return served

    async def _try_adapter(self, version: int) -> None:
        """Show once that the sampler computes with the adapter, by pushing a loud one (random numbers) as `version`. A
        young adapter changes log-probs by less than rounding, so a sampler without it would pass the other checks."""
        trial = self.learner.adapter()
        if trial is None:
            return
        with trial.loud():
            await self._send(version)
            packed = packed_text(self.probe_ids)
            ours, theirs = self.learner.packed_score(packed), await self.sampler.score(self.probe_ids)
            base = trial.without(packed)
            learner_change, sampler_change = Gap.of(ours, base), Gap.of(theirs, base)
            # Both sides are compared with the model without the adapter. A sampler that ignores it has a change near 0;
            # half of the learner's change leaves room for rounding.
            if not sampler_change.mean > learner_change.mean / 2:
                raise InvariantError(
                    f"the sampler does not compute with the adapter: a loud one changes the learner's log-probs by"
                    f" {learner_change.mean:.3g} nats in the mean, and the sampler's by {sampler_change.mean:.3g}. Its"
                    " answers would be those of the model without what was learned. Check that the engine serves"
                    " adapters on these layers (model.lora.targets), or sample with engine=embedded"
                )
            await self._scores_alike(version)

    async def _send(self, version: int) -> tuple[str, np.ndarray | None]:
        """Send what the learner holds as `version`; returns its fingerprint, which both sides have, and the learner's
        log-probs of the probe where there was time."""
        if self.elsewhere is None:
            served = await self.transport.send(version, self.learner.shards(), self.sampler)
            sent, scores = self.learner.fingerprint(), None
        else:
            served, sent, scores = await self._meanwhile(version, self.elsewhere)
        if served != sent:
            raise InvariantError(
                f"weight sync of version {version} failed: the learner's weights have fingerprint {sent}, the sampler"
                f" serves {served}. A tensor was skipped, stale or changed on the way; nothing sampled after this could"
                " be trusted. Restart from the last checkpoint, and check that learner and sampler hold the same"
                " architecture and dtype"
            )
        if self.sampler.version != version:
            raise InvariantError(
                f"the sampler says it serves version {self.sampler.version} after a push of version {version}"
            )
        return served, scores

    async def _meanwhile(self, version: int, have_left: Callable[[], Awaitable[None]]) -> tuple[str, str, np.ndarray]:
        """Send the weights, and compute the learner's half of both checks while they are installed. Returns the served
        fingerprint, the learner's, and its log-probs of the probe."""
        # The weights leave first, so that the engine installs them meanwhile.
        sending = asyncio.ensure_future(self.transport.send(version, self.learner.shards(), self.sampler))
        try:
            await have_left()
            sent, scores = self.learner.fingerprint(), self.learner.packed_score(packed_text(self.probe_ids))
            return await sending, sent, scores
        finally:
            # Where the learner's half raised, sending is stopped: nobody would compare these weights.
            if not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _scores_alike(self, version: int, ours: np.ndarray | None = None) -> None:
        """Compare log-probs (`ours`: the learner's, where known): correct weights can still be used wrongly."""
        n, packed = len(self.probe_ids), packed_text(self.probe_ids)
        ours = self.learner.packed_score(packed) if ours is None else ours
        theirs = await self.sampler.score(self.probe_ids)
        gap = Gap.of(theirs, ours)
        bound = allowed(self.dtype, gap, ours, lambda: self.learner.exact(packed), packed.sampling.temperature)
        if not gap.worst <= bound.worst:
            gap_M = np.abs(theirs.astype(np.float64) - ours)
            # NaN would lose every comparison; as infinity it is the worst.
            # Token 0 has no log-prob, and people count from 1: so + 2.
            at = int(np.argmax(np.where(np.isfinite(gap_M), gap_M, np.inf)))
            raise InvariantError(
                f"after the push of version {version} the sampler scores a canary otherwise than the learner: token"
                f" {at + 2} of {n} differs by {gap_M[at]:.3g} nats (bound {bound.worst:.2g} in {self.dtype}). It holds"
                " the learner's weights and computes something else: look for a stale prefix cache, an adapter that"
                " was not applied, another dtype or rope setting"
            )
