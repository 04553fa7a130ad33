"""PACK: from credit to optimizer steps. Weights are decided here, once per minibatch; every later split only selects.

Worked example: 32 prompts x 8 siblings = 256 episodes; minibatches=4, epochs=2 -> 8 batches of 8 whole groups; only
the first is on-policy for certain. Episodes whose every token is silent may stay away from the forward pass, but they
stay in the denominators they were counted in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.algorithm.choose import choose, mixing
from posttrain.algorithm.weigh import weigh
from posttrain.core import seeds
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.pieces.token import ClipCov
from posttrain.core.run import Reinforce
from posttrain.core.types import OUTSIDE, SHOWN, Credit, EpisodeCredit, GroupCredit
from posttrain.core.verdict import SOLVED


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: its tokens (None when all of them are silent), and whether the policy has moved since rollout."""

    batch: Batch | None
    first: bool
    episodes: int
    """Episodes in the denominators."""


def pack(credit: Credit, a: Algorithm, stage: Reinforce, *, seed: int, step: int, version: int = 0) -> Iterator[Minibatch]:
    """The step's groups cut into `minibatches` of whole groups, `epochs` times; later epochs in a new order.

    `a` is the stage's algorithm as it is steered now; `version` that of the weights at the start of the step.
    """
    groups = [g for g in credit.groups if any(not e.dropped for e in g.episodes)]
    if not groups:
        return
    for epoch in range(stage.epochs):
        order = np.arange(len(groups)) if epoch == 0 else seeds.generator(seed, "minibatch-order", step, epoch).permutation(len(groups))
        parts = [p for p in np.array_split(order, min(stage.minibatches, len(groups))) if len(p)]
        for i, part in enumerate(parts):
            chosen = [groups[j] for j in sorted(part)]
            made = seeds.generator(seed, "tokens", step, epoch, i) if isinstance(a.tokens, ClipCov) else None
            step_of = epoch * len(parts) + i
            yield _minibatch(
                a, chosen, max_tokens=stage.sampling.max_tokens, first=step_of == 0, versions=(version, version + step_of + 1), rng=made
            )


def _minibatch(
    a: Algorithm, groups: Sequence[GroupCredit], *, max_tokens: int, first: bool, versions: tuple[int, int], rng: np.random.Generator | None
) -> Minibatch:
    members = [(i, e) for i, g in enumerate(groups) for e in g.episodes if not e.dropped]
    per_token = weigh(a.aggregate, [e.episode.spoken for _, e in members], [i for i, _ in members], max_tokens)
    loud = [
        (e, w) for (_, e), w in zip(members, per_token, strict=True) if a.reads_silent_tokens or any(np.any(x != 0) for x in e.advantage)
    ]
    batch = _batch([e for e, _ in loud], np.array([w for _, w in loud])) if loud else None
    if batch is not None:
        batch = replace(batch, **_further(a, batch, [e for e, _ in loud], versions, rng))
    return Minibatch(batch, first, len(members))


def _batch(credits: Sequence[EpisodeCredit], weights: np.ndarray) -> Batch:
    segments = [s for e in credits for s in e.episode.segments]
    sequence = [i for i, e in enumerate(credits) for _ in e.episode.segments]
    scored = [e.scored for e in credits]
    if any(np.any(s.version == OUTSIDE) for s in segments):
        raise InvariantError(
            "a batch holds tokens of a server whose weights and log-probs are not ours (version OUTSIDE): nothing can be learned from them"
        )
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


def _further(
    a: Algorithm, batch: Batch, credits: Sequence[EpisodeCredit], versions: tuple[int, int], rng: np.random.Generator | None
) -> dict[str, np.ndarray | None]:
    """The streams only some algorithms read, each made over the whole minibatch."""
    out: dict[str, np.ndarray | None] = {}
    shown_M = batch.version_M == SHOWN
    if a.shown is not None:
        out["shown_M"] = shown_M
    if a.anchor == "proximal":
        out["mix_M"] = mixing(batch.version_M, *versions)
    if a.tokens is not None:
        out["chosen_M"] = choose(a.tokens, batch, _stream([e.scored.entropy for e in credits], "entropy"), rng)
    if a.imitate is not None:
        solved = np.array([e.episode.reward is not None and e.episode.reward >= SOLVED for e in credits])
        wanted = shown_M if a.imitate.of == "shown" else solved[batch.sequence_M] & ~shown_M
        out["imitate_M"] = wanted / max(1, int(wanted.sum()))
    tops = (
        [t for e in credits for t in e.scored.teacher or ()]
        if a.distill is not None
        else [s.top for e in credits for s in e.episode.segments if s.top]
    )
    if tops:
        out |= {"top_ids_MK": np.concatenate([t.ids for t in tops]), "top_logp_MK": np.concatenate([t.logp for t in tops])}
    return out


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
