"""TRAINER: the only backward(), the only optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.objective import objective, supervised
from posttrain.algorithm.streams import streams
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch, Demonstrations, Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Expected, Learner
from posttrain.core.run import Optimizer as OptimizerConfig
from posttrain.core.types import Gauge, Gauges, merge

P = TypeVar("P", bound=Packed)
Observer = Callable[[Batch, np.ndarray], None]


class NotFinite(InvariantError):
    """A gradient that is infinite or no number: nothing was updated. `culprits` are the batch's episodes whose own loss or gradient is."""

    def __init__(self, norm: float, step: int, culprits: Sequence[int], episodes: int) -> None:
        self.norm, self.step, self.culprits, self.episodes = norm, step, tuple(culprits), episodes
        super().__init__(self.told([f"episode {e} of its batch" for e in culprits]))

    def told(self, names: Sequence[str], where: str = "") -> str:
        """The message, with the culprits by these names."""
        if not self.culprits:
            who = f"The loss and the gradient of each of its {self.episodes} episodes alone are finite: their sum overflows"
            advice = "Lower the learning rate, the weights of the loss's terms, or the size of the rewards"
        elif len(self.culprits) == self.episodes:
            who = f"Every one of the batch's {self.episodes} episodes makes it, such as {'; '.join(names[:2])}, so it lies in the weights or the loss"
            advice = "Lower the learning rate and go on from an earlier checkpoint; look for coefficients of the loss that are too large"
        else:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            who = f"{len(self.culprits)} of the {self.episodes} episodes of the batch make it: {'; '.join(names[:NAMED])}{more}"
            advice = "Look at their rewards, and for log-probs that are infinite"
        return f"the gradient norm is {self.norm} at optimizer step {self.step}{where}: the weights were left as they were. {who}. {advice}"


NAMED = 4
"""Episodes that a message names."""


class Optimizer(Protocol):
    """What the trainer needs of an optimizer: one step on the gradients the parameters hold."""

    def gather(self) -> None:
        """Take the gradients one backward left; called after each micro-batch."""
        ...

    def step(self) -> float:
        """Clip globally, update, clear; returns the gradient norm before the clip."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate the next step will use."""
        ...

    def trained(self) -> Mapping[str, torch.Tensor]:
        """What a step moves, by parameter: its master where it has one."""
        ...

    def expected_update(self, config: OptimizerConfig, name: str, gradient: Tensor, norm: float, at: int | None = None) -> Expected:
        """What the next step must do to parameter `name`; asked before it, and changes nothing.

        It is the definition, from what the stage configured, the steps taken and the state so far: nothing that the step itself
        computes, and nothing the optimizer was built with, since these are what is checked.

        Args:
            gradient: of the parameter, before any clip. norm: of all gradients together.
            at: only of this number of the flattened parameter.
        """
        ...

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """Everything a resumed run needs, by name; `steps` counts the steps taken, `WORD.PARAMETER` is state of a parameter."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None: ...


@dataclass
class Trainer:
    """Turns minibatches into new weights. `version` counts optimizer steps that moved them."""

    learner: Learner
    optimizer: Optimizer
    micro_tokens: int
    version: int = 0

    def policy_step(self, batch: Batch, a: Algorithm, observe: Observer | None = None, *, warming: bool = False) -> Gauges:
        """One optimizer step on one minibatch; micro-batches only split it.

        `warming` trains the value head alone. `observe` sees each micro-batch with the learner's log-probs before anything is differentiated; it may raise.
        """
        self.learner.train_mode(True)
        parts: list[Gauges] = []
        for micro in batch.split(self.micro_tokens):
            value, alone = a.learns_values is not None, warming
            scores = self.learner.forward(
                micro, entropy=a.entropy is not None, value=value, candidates_MK=micro.top_ids_MK, head_only=alone
            )
            if observe is not None:
                observe(micro, scores.logp.detach().float().cpu().numpy())
            terms = objective(a, streams(micro, scores.logp.device), scores)
            terms.loss.backward()
            self.optimizer.gather()
            parts.append(terms.gauges)

        def own(one: Batch) -> Tensor:
            value = a.learns_values is not None
            scores = self.learner.forward(one, entropy=a.entropy is not None, value=value, candidates_MK=one.top_ids_MK, head_only=warming)
            return objective(a, streams(one, scores.logp.device), scores).loss

        return merge(*parts, self._update(batch, own))

    def imitate(self, batch: Demonstrations) -> Gauges:
        """One optimizer step of maximum likelihood on demonstrated tokens."""
        self.learner.train_mode(True)
        total = 0.0

        def alone(micro: Demonstrations) -> Tensor:
            scores = self.learner.forward(micro, entropy=False, value=False)
            return supervised(torch.as_tensor(micro.weight_M, dtype=scores.logp.dtype, device=scores.logp.device), scores.logp)

        for micro in batch.split(self.micro_tokens):
            loss = alone(micro)
            loss.backward()
            self.optimizer.gather()
            total += float(loss.detach())
        return merge({"sft/loss": Gauge(total, 1), "sft/tokens": Gauge(batch.spoken, 1)}, self._update(batch, alone))

    def _update(self, batch: P, alone: Callable[[P], Tensor]) -> Gauges:
        """The optimizer's step. `alone` is the loss of a part of the batch, asked again of each episode where the gradient is not finite."""
        lr = self.optimizer.lr
        norm = self.optimizer.step()
        self.learner.train_mode(False)
        if not math.isfinite(norm):
            raise NotFinite(norm, self.version + 1, self._culprits(batch, alone), batch.episodes)
        self.version += 1
        return {"optim/grad_norm": Gauge(norm, 1), "optim/lr": Gauge(lr, 1), "optim/steps": Gauge(1, 1)}

    def _culprits(self, batch: P, alone: Callable[[P], Tensor]) -> list[int]:
        """Episodes whose own loss or gradient is not finite, with the weights of the step, which stood still."""
        out: list[int] = []
        parameters = list(self.learner.parameters().values())
        for e in range(batch.episodes):
            loss = alone(batch.select([e]))
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not all(bool(torch.isfinite(x).all()) for x in (loss, *found) if x is not None):
                out.append(e)
        return out

    def trained(self) -> Mapping[str, Any]:
        """What an optimizer step moves, by parameter."""
        return self.optimizer.trained()
