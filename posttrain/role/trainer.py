"""TRAINER: the only backward(), the only optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.algorithm.objective import objective, supervised
from posttrain.algorithm.streams import streams
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch, Demonstrations
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner
from posttrain.core.types import Gauge, Gauges, merge

Observer = Callable[[Batch, np.ndarray], None]


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

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

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
        return merge(*parts, self._update())

    def imitate(self, batch: Demonstrations) -> Gauges:
        """One optimizer step of maximum likelihood on demonstrated tokens."""
        self.learner.train_mode(True)
        total = 0.0
        for micro in batch.split(self.micro_tokens):
            scores = self.learner.forward(micro, entropy=False, value=False)
            loss = supervised(torch.as_tensor(micro.weight_M, dtype=scores.logp.dtype, device=scores.logp.device), scores.logp)
            loss.backward()
            self.optimizer.gather()
            total += float(loss.detach())
        return merge({"sft/loss": Gauge(total, 1), "sft/tokens": Gauge(batch.spoken, 1)}, self._update())

    def _update(self) -> Gauges:
        lr = self.optimizer.lr
        norm = self.optimizer.step()
        self.learner.train_mode(False)
        if not math.isfinite(norm):
            raise InvariantError(
                f"the gradient norm is {norm} at optimizer step {self.version + 1}: the weights were left as they were. "
                "Lower the learning rate, or look for infinite log-probs in the last recorded episodes"
            )
        self.version += 1
        return {"optim/grad_norm": Gauge(norm, 1), "optim/lr": Gauge(lr, 1), "optim/steps": Gauge(1, 1)}

    def trained(self) -> Mapping[str, Any]:
        """What an optimizer step moves, by parameter."""
        return self.optimizer.trained()
