"""PACK: from credit to optimizer steps. Weights are decided here, once per minibatch; every later split only selects.

Worked example: 32 prompts x 8 siblings = 256 episodes; minibatches=4, epochs=2 -> 8 batches of 8 whole groups; only
the first is on-policy for certain. Episodes whose every token is silent may stay away from the forward pass, but they
stay in the denominators they were counted in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.weigh import weigh
from posttrain.core import seeds
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.run import Reinforce
from posttrain.core.types import Credit, EpisodeCredit, GroupCredit


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: its tokens (None when all of them are silent), and whether the policy has moved since rollout."""

    batch: Batch | None
    first: bool
    episodes: int
    """Episodes in the denominators."""


def pack(credit: Credit, stage: Reinforce, *, seed: int, step: int) -> Iterator[Minibatch]:
    """The step's groups cut into `minibatches` of whole groups, `epochs` times; later epochs in a new order."""
    a = stage.algorithm
    groups = [g for g in credit.groups if any(not e.dropped for e in g.episodes)]
    if not groups:
        return
    for epoch in range(stage.epochs):
        order = np.arange(len(groups)) if epoch == 0 else seeds.generator(seed, "minibatch-order", step, epoch).permutation(len(groups))
        parts = [p for p in np.array_split(order, min(stage.minibatches, len(groups))) if len(p)]
        for i, part in enumerate(parts):
            chosen = [groups[j] for j in sorted(part)]
            yield _minibatch(a, chosen, max_tokens=stage.sampling.max_tokens, first=epoch == 0 and i == 0)


def _minibatch(a: Algorithm, groups: Sequence[GroupCredit], *, max_tokens: int, first: bool) -> Minibatch:
    members = [(i, e) for i, g in enumerate(groups) for e in g.episodes if not e.dropped]
    per_token = weigh(a.aggregate, [e.episode.spoken for _, e in members], [i for i, _ in members], max_tokens)
    loud = [(e, w) for (_, e), w in zip(members, per_token, strict=True) if a.reads_silent_tokens or any(np.any(x != 0) for x in e.advantage)]
    batch = _batch([e for e, _ in loud], np.array([w for _, w in loud])) if loud else None
    return Minibatch(batch, first, len(members))


def _batch(credits: Sequence[EpisodeCredit], weights: np.ndarray) -> Batch:
    segments = [s for e in credits for s in e.episode.segments]
    sequence = [i for i, e in enumerate(credits) for _ in e.episode.segments]
    scored = [e.scored for e in credits]
    batch = Batch.of(
        segments,
        sequence,
        logp_mu_M=np.concatenate([s.logp[s.mask] for s in segments]),
        version_M=np.concatenate([s.version[s.mask] for s in segments]),
        advantage_M=_stream([e.advantage for e in credits], "advantage"),
        return_M=_stream([e.returns for e in credits], "returns"),
        logp_start_M=_stream([s.start for s in scored], "start"),
        logp_ref_M=_stream([s.reference for s in scored], "reference"),
        value_M=_stream([s.values for s in scored], "values"),
        weight_M=np.repeat(weights, [e.episode.spoken for e in credits]),
    )
    if batch.spoken != sum(e.episode.spoken for e in credits):
        raise InvariantError("packing lost or invented spoken tokens")
    return batch


def _stream(parts: Sequence[tuple[np.ndarray, ...] | None], name: str) -> np.ndarray | None:
    """One array [M] from per-episode, per-segment arrays; None exactly where no episode has the stream."""
    present = [p for p in parts if p is not None]
    if not present:
        return None
    if len(present) != len(parts):
        raise InvariantError(f"stream {name!r} is missing for {len(parts) - len(present)} of {len(parts)} episodes")
    return np.concatenate([x for p in present for x in p])


def batch_algebra(stage: Reinforce) -> str:
    """The derived batch quantities in words, printed at the start of a stage.

    >>> batch_algebra(Reinforce(name="rl", prompts=32, siblings=8, minibatches=4))
    '32 prompts x 8 siblings = 256 episodes -> 4 minibatches of 8 groups x 1 epoch = 4 optimizer steps a step, the first on-policy'
    """
    episodes = stage.prompts * stage.siblings
    epochs = f"{stage.epochs} epoch" + ("s" if stage.epochs > 1 else "")
    cut = f"{stage.minibatches} minibatch" + ("es" if stage.minibatches > 1 else "")
    total = stage.optimizer_steps
    steps = "1 optimizer step a step, on-policy" if total == 1 else f"{total} optimizer steps a step, the first on-policy"
    return (
        f"{stage.prompts} prompts x {stage.siblings} siblings = {episodes} episodes -> "
        f"{cut} of {stage.prompts // stage.minibatches} groups x {epochs} = {steps}"
    )
