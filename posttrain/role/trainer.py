"""TRAINER: the only role that calls backward() and steps an optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.loss.losses import STEP_SHARE, Loss
from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.config.run import Optimizer as OptimizerConfig
from posttrain.core.batch import Batch
from posttrain.core.exchange.ranks import ALONE, Ranks
from posttrain.core.exchange.row_gradient import held
from posttrain.core.exchange.scores import ExpectedUpdate, TokenScores
from posttrain.core.exchange.shards import DividedGradients
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.ports import Learner
from posttrain.core.scored import Credit
from posttrain.core.streams import MU
from posttrain.core.types import Episode
from posttrain.role.events import UNOBSERVED, DifferentiatedEvent, LearnedEvent, Observers, PackedEvent
from posttrain.role.learner_passes import Passes
from posttrain.role.learning.rank_share import check_shares, of_all_ranks, smallest_unit
from posttrain.role.memory_peaks import memory_suffices
from posttrain.system.errors import ConfigError, InvariantError


class NonFiniteGradient(InvariantError):
    """A gradient is infinite or NaN; nothing was updated. `culprits` are the episodes of the batch that cause it."""

    def __init__(self, norm: float, step: int, culprits: Sequence[int], episodes: int) -> None:
        self.norm, self.step, self.culprits, self.episodes = norm, step, tuple(culprits), episodes
        super().__init__(self.told([f"episode {e} of its batch" for e in culprits]))

    def told(self, names: Sequence[str], where: str = "", unnamed: int = 0) -> str:
        """The error message with the first `NAMED` names of culprits, and the number of the others and the `unnamed`.
        `where` stands behind the number of the optimizer step."""
        if not self.culprits:
            cause = (
                f"The loss and gradient of each of its {self.episodes} episodes alone are finite: their sum overflows"
            )
            advice = "Lower the learning rate, the weights of the loss's terms, or the size of the rewards"
        elif len(self.culprits) == self.episodes:
            cause = (
                f"Every one of the batch's {self.episodes} episodes makes it, such as {'; '.join(names[:2])}, so it"
                " lies in the weights or the loss"
            )
            advice = (
                "Lower the learning rate and go on from an earlier checkpoint; look for coefficients of the loss that"
                " are too large"
            )
        else:
            some = "; ".join(names[:NAMED])
            more = len(names[NAMED:]) + unnamed
            others = f" and {more} more" if more else ""
            cause = f"{len(self.culprits)} of the {self.episodes} episodes of the batch make it: {some}{others}"
            advice = "Look at their rewards, and for log-probs that are infinite"
        return (
            f"the gradient norm is {self.norm} at optimizer step {self.step}{where}: the weights were left as they"
            f" were. {cause}. {advice}"
        )


NAMED = 4
"""The largest number of episodes that a message names."""


@dataclass
class Packing:
    """Counts of the tokens in the micro-batches of an optimizer step: how full they are, and how much they share."""

    room: int
    """Positions that a micro-batch may compute, or packed tokens that it may have where nothing is shared."""
    sizes: list[int] = field(default_factory=list[int])
    """Packed tokens of each micro-batch."""
    computed: int = 0
    """Positions that were computed: fewer than the tokens where beginnings are shared."""

    def add(self, micro: Batch, scores: TokenScores) -> None:
        self.sizes.append(len(micro.ids_N))
        self.computed += len(micro.ids_N) if scores.computed is None else scores.computed

    def gauges(self) -> Gauges:
        """Gauges of one optimizer step. A minibatch in one pass, or a pass with more tokens than `room`, wastes
        none."""
        total, passes = sum(self.sizes), len(self.sizes)
        room = sum(max(self.room, n) for n in self.sizes) if passes > 1 else total
        return {
            "learner/micro_batches": Gauge(passes, 1),
            "learner/bin_waste": Gauge(room - total, room),
            "learner/shared": Gauge(total - self.computed, total),
        }


class WeightOptimizer(Protocol):
    """The interface that the trainer needs of an optimizer: one step on the gradients that the parameters hold."""

    def gather(self) -> None:
        """Take the gradients of one backward pass. Called after each micro-batch."""
        ...

    def step(self, share: float = 1.0) -> float:
        """Clip by the global norm, update, clear the gradients; returns the gradient norm before the clip.

        Args:
            share: of the learning rate, which the step uses. It is given where it is not 1 (`Algorithm.step_scale`).
        """
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    def pending_bytes(self) -> int:
        """Bytes of state that the next step will add."""
        ...

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next backward pass; 1 where losses are not scaled. `gather` divides by it. A
        step whose gradient is not finite makes it smaller, unless it is 1."""
        ...

    def trained(self) -> Mapping[str, torch.Tensor]:
        """The tensors that a step updates, by parameter: the master copy of a parameter that has one."""
        ...

    def expected_update(
        self,
        config: OptimizerConfig,
        name: str,
        gradient: Tensor,
        norm: float,
        at: int | None = None,
        share: float = 1.0,
    ) -> ExpectedUpdate:
        """Returns the update that the next step must make to parameter `name`. It is called before the step, and
        changes nothing.

        It follows the optimizer's definition, from the stage's config, the number of steps taken and the state so far.
        It uses nothing that the step itself computes and nothing the optimizer was built with, since these are checked.

        Args:
            gradient: of the parameter, before any clip.
            norm: of all gradients together.
            at: an index of the flattened parameter; then only this element's update is returned.
            share: as in `step`.
        """
        ...

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """Everything a resumed run needs, by name. `steps` counts the steps taken; `WORD.PARAMETER` is the state WORD
        of a parameter."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None: ...


@dataclass
class Trainer:
    """Turns minibatches into new weights. `version` counts the optimizer steps so far."""

    learner: Learner
    optimizer: WeightOptimizer
    micro_tokens: int
    version: int = 0
    skipped: int = 0
    """Optimizer steps in a row that were left out, up to now (`Optimizer.skips`)."""
    ranks: Ranks = ALONE
    """The processes that train together. Each is given the whole minibatch and computes its own shard of it."""

    def __post_init__(self) -> None:
        for word, part in (("learner", self.learner), ("optimizer", self.optimizer)):
            if (world := getattr(part, "ranks", ALONE).world) != self.ranks.world:
                raise ConfigError(
                    f"the {word} is one of {world} ranks, and the trainer one of {self.ranks.world}: gradients would be"
                    " counted several times, or clipped by a part of their norm. Give all three the same ranks="
                )

    def step(
        self, batch: Batch, loss: Loss, watch: Observers = UNOBSERVED, *, index: int = 0, first: bool = False
    ) -> Gauges:
        """One optimizer step on one minibatch. Splitting it into micro-batches and ranks does not change the gradient.

        Args:
            watch: the observers. They get PackedEvent before the first forward pass, DifferentiatedEvent before the
                optimizer steps, and LearnedEvent after it.
            index: the stage's step that the minibatch belongs to.
            first: whether it is the first minibatch of that step.

        Raises:
            NonFiniteGradient: the gradient is not finite. The weights were left as they were.
        """
        packed = PackedEvent(index, batch, first, self.version)
        watch.emit(packed)
        # The step changes both numbers. Observers are told the values that it used.
        lr, scale = self.optimizer.lr, self.optimizer.loss_scale
        passes = Passes.of(watch.needs(packed), self.learner, scale)
        self.learner.train_mode(True)
        parts, packing = list[Terms](), Packing(self.micro_tokens)
        micros = self._micros(batch)
        # Ranks may have different numbers of micro-batches, and all ranks take part in every pass. A rank with fewer
        # micro-batches joins the others' last passes with a loss of 0, or they would wait for it.
        passes_to_join = max(self.ranks.every(len(micros))) - len(micros)
        with self.frozen():
            for episodes, micro in micros:
                with memory_suffices(micro, self.micro_tokens):
                    scores = self._forward(micro, loss)
                    passes.record(micro, scores, episodes)
                    packing.add(micro, scores)
                    terms = loss.terms(micro, scores)
                    (terms.loss if scale == 1 else terms.loss * scale).backward()
                    self.optimizer.gather()
                # Detached: a loss with its graph would hold what it was computed from until the step ends.
                parts.append(Terms(terms.loss.detach(), terms.gauges))
            self._keep_step(batch, loss, passes_to_join)
        if isinstance(self.optimizer, DividedGradients):
            # Every rank computed the gradients of weights that it has whole;
            # rounding may differ between them, and the weights would drift apart.
            self.optimizer.agree()
        # From here on every rank has the terms of the whole minibatch, and so the same gauges and the same share.
        parts = of_all_ranks(self.ranks, parts, passes, packing)
        loss_gauges = loss.gauges(batch, parts)
        share = loss_gauges[STEP_SHARE].mean if STEP_SHARE in loss_gauges else 1.0
        watch.emit(DifferentiatedEvent(packed, passes, share))
        # With a loss scale (float16) the gradient can overflow though every loss is finite. Then the step is left out,
        # and the next scale is smaller. Without a scale such a gradient is a fault of the run.
        overflow = scale > 1 and all(bool(torch.isfinite(part.loss)) for part in parts)
        updated = self._update(batch, loss, overflow, share)
        # A step that was left out changed no weight: nothing was learned.
        if "optim/overflowed" not in updated:
            watch.emit(LearnedEvent(packed, passes, lr * share))
        return merge(loss_gauges, updated, packing.gauges())

    def _micros(self, batch: Batch) -> list[tuple[np.ndarray, Batch]]:
        """The micro-batches of this rank, each with its episodes in the minibatch.

        Raises:
            InvariantError: they are not the whole minibatch, each episode once.
        """
        # First by ranks, then into micro-batches: whole units in both.
        # Weights stay those of the whole minibatch, so all gradients add up.
        shard = batch.shard(self.ranks.rank, self.ranks.world)
        whole = np.arange(batch.episodes)
        # Micro-batches number the episodes of this rank's shard from
        # 0; `numbers_E` leads from there to the minibatch's own numbers.
        numbers_E = whole if shard is batch else batch.shares(self.ranks.world)[self.ranks.rank]
        bins = shard.bins(self.micro_tokens, self.learner.computes_once) if shard.episodes else []
        micros = shard.cut(bins)
        episodes_in_bins = np.sort(np.concatenate([whole[:0], *bins]))
        if (
            not np.array_equal(episodes_in_bins, whole[: shard.episodes])
            or sum(m.spoken for m in micros) != shard.spoken
        ):
            count = np.bincount(episodes_in_bins, minlength=shard.episodes)
            raise InvariantError(
                f"the micro-batches hold {sum(m.spoken for m in micros)} spoken tokens of the minibatch's"
                f" {shard.spoken}; {int((count == 0).sum())} of its {shard.episodes} episodes are in none of them and"
                f" {int((count > 1).sum())} in several: packing dropped or doubled a trajectory"
            )
        check_shares(self.ranks, batch, numbers_E, micros)
        return [(numbers_E[chosen], micro) for chosen, micro in zip(bins, micros, strict=True)]

    def _keep_step(self, batch: Batch, loss: Loss, passes: int) -> None:
        """Take part in `passes` more passes, because other ranks have more micro-batches and exchange weights and
        gradients in every pass. Each of these passes is of the smallest unit, with its loss multiplied by 0."""
        for _ in range(passes):
            unit_batch = smallest_unit(batch)
            # 0 times the loss adds 0 to every gradient, and the exchanges of forward and backward take place.
            (loss.terms(unit_batch, self._forward(unit_batch, loss)).loss * 0).backward()
            self.optimizer.gather()

    def _forward(self, micro: Batch, loss: Loss) -> TokenScores:
        return self.learner.forward(micro, loss.reads(micro))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, gradients are computed only for parameters that the optimizer updates."""
        # Other gradients would cost time and memory in every micro-batch.
        updated = self.trained()
        not_updated = [p for n, p in self.learner.parameters().items() if n not in updated]
        for p in not_updated:
            p.requires_grad_(False)
        try:
            yield
        finally:
            # Also after an error: a later stage may train these parameters.
            for p in not_updated:
                p.requires_grad_(True)

    def _update(self, batch: Batch, loss: Loss, overflow: bool, share: float) -> Gauges:
        """The optimizer's step, with this share of the learning rate. If the gradient is not finite, each unit's loss
        alone shows the cause, unless the loss scale alone can be it (`overflow`): then the step is left out."""
        lr, scale = self.optimizer.lr * share, self.optimizer.loss_scale
        norm = self.optimizer.step() if share == 1 else self.optimizer.step(share)
        self.learner.train_mode(False)
        scaled = {"optim/loss_scale": Gauge(scale, 1)} if scale != 1 else {}
        # The optimizer itself has left the weights alone and has made its scale smaller.
        if not math.isfinite(norm) and overflow:
            return scaled | {"optim/overflowed": Gauge(1, 1), "optim/steps": Gauge(0, 1)}
        if not math.isfinite(norm):
            raise NonFiniteGradient(norm, self.version + 1, self._culprits(batch, loss), batch.episodes)
        self.version, self.skipped = self.version + 1, 0
        return scaled | {"optim/grad_norm": Gauge(norm, 1), "optim/lr": Gauge(lr, 1), "optim/steps": Gauge(1, 1)}

    def _culprits(self, batch: Batch, loss: Loss) -> list[int]:
        """Episodes of the units whose own loss or gradient is not finite. The weights have not changed since. All ranks
        compute each unit together."""
        out: list[int] = []
        parameters = list(self.learner.parameters().values())
        # One unit at a time is slow. It happens once, when the run is about to stop and the user needs names.
        for unit in range(batch.units):
            episodes = batch.members(unit)
            unit_batch = batch.select(episodes)
            total = loss.terms(unit_batch, self._forward(unit_batch, loss)).loss
            total.backward()
            # The loss too: it may be infinite where no gradient is.
            numbers = [total, *(held(p.grad) for p in parameters if p.grad is not None)]
            if not all(self.ranks.every(all(bool(torch.isfinite(x).all()) for x in numbers))):
                out.extend(episodes.tolist())
            for p in parameters:
                # Each unit is looked at alone, and nothing of this may reach the next optimizer step.
                p.grad = None
        return out

    def trained(self) -> Mapping[str, Any]:
        """The tensors that an optimizer step updates, by parameter."""
        return self.optimizer.trained()


def key(episode: Episode) -> bytes:
    """The spoken tokens and their log-probs as bytes. Finds an episode again in a batch."""
    ids_and_logps = [x for s in episode.segments for x in (s.ids[s.mask], s.logp[s.mask])]
    # Ids of all segments, then their log-probs, as `named` has them: they tell siblings with equal tokens apart.
    return b"".join(x.tobytes() for x in (*ids_and_logps[::2], *ids_and_logps[1::2]))


@contextmanager
def named(batch: Batch, credit: Credit, where: str) -> Iterator[None]:
    """Around an optimizer step: turns its `NonFiniteGradient` into an InvariantError that names the step's episodes."""
    try:
        yield
    except NonFiniteGradient as error:
        by_key = {key(e.episode): e.episode for g in credit.groups for e in g.episodes}
        tokens_of_culprits = [batch.sequence_M == e for e in error.culprits]
        culprits = [
            by_key.get(batch.target_M[at_M].tobytes() + batch[MU][at_M].tobytes()) for at_M in tokens_of_culprits
        ]
        names = [
            f"task {e.task.id!r} visit {e.visit} sibling {e.sibling} (reward {e.reward:g})"
            for e in culprits
            if e is not None
        ]
        raise InvariantError(error.told(names, f" ({where})")) from error
