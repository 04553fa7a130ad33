"""Gradients of recorded minibatches, from a learner that takes no optimizer step.

They are computed as the trainer would have computed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.build.build_run import make_teacher
from posttrain.build.open_model import built_policy
from posttrain.config.run import Run
from posttrain.config.stages.stage import starts
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.row_gradient import whole
from posttrain.core.exchange.scores import ExpectedUpdate, Reads, TokenScores
from posttrain.core.gauge import Gauges
from posttrain.core.ports import Examiner, Learner
from posttrain.core.types import Top
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.engine.optimizer.loss_scale import FIRST as FIRST_SCALE
from posttrain.evaluation.ablation.recorded_step import KEPT_REFERENCE, RecordedStep
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.trainer import Trainer
from posttrain.role.weights.saved_weights import load_weights
from posttrain.system.errors import RunFolderError

HEAD = "value_head."
"""The beginning of the names of the value head's parameters."""


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of one minibatch by parameter, float32: those of the policy, and those of the value head."""

    policy: Mapping[str, torch.Tensor]
    head: Mapping[str, torch.Tensor]
    norm: float
    """Norm over all parameters, as the optimizer would have measured it before clipping."""
    tokens: int
    """Tokens for whose log-prob the loss has a nonzero gradient."""


def cosine(a: Gradient, b: Gradient) -> float:
    """Cosine of two gradients over the policy's parameters, in float64; NaN where one of them is zero."""
    squares = [sum(float(x.double().square().sum()) for x in g.policy.values()) for g in (a, b)]
    # A parameter that has no gradient in one of the two adds nothing.
    product = sum(float((a.policy[n].double() * b.policy[n].double()).sum()) for n in a.policy.keys() & b.policy.keys())
    return product / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan


class FrozenLearner:
    """A policy of the run's architecture and its reference. `load` loads the weights of a recorded step."""

    def __init__(self, folder: Path, run: Run, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
        use_threads(run.threads)
        self.folder, self.run = folder, run
        say("building the model")
        self.policy = built_policy(folder, run)
        # With another tokenizer the record's token ids would stand for other words.
        if (recorded_digest := facts.get("tokenizer_digest")) not in (None, self.policy.tokenizer_digest):
            raise RunFolderError(
                f"{folder} was written with another tokenizer ({recorded_digest}; now {self.policy.tokenizer_digest}):"
                " its token ids mean other text. Put the model the run started from back at model.path"
            )
        self._learner = _CountingLearner(
            HFLearner(
                self.policy,
                gradient_checkpointing=run.model.checkpointing,
                offload_activations=run.model.offload_activations,
            )
        )
        self.learner: Learner = cast("Learner", _CachedScorer(cast("Examiner", self._learner)))
        self._references: dict[str, Examiner] = {}
        self._loaded: Path | None = None

    def load(self, recorded: RecordedStep) -> None:
        """Load the weights of this step into the learner."""
        self._load_folder(recorded.weights.folder)

    def _load_folder(self, folder: Path) -> None:
        """Load the weights of a folder, unless they are those that the learner has."""
        if self._loaded != folder:
            load_weights(folder, self._learner.inner)
            self._loaded = folder
            # New weights give other scores, so the cache is dropped with them.
            self.learner = cast("Learner", _CachedScorer(cast("Examiner", self._learner)))

    def reference(self, recorded: RecordedStep, a: Algorithm) -> Examiner | None:
        """The reference model of this step: a named model, or the policy as it was at the stage's start or last
        refresh."""
        if not a.reads & {"reference", "teacher"}:
            return None
        name = self._reference_name(recorded)
        if name not in self._references:
            # Only one is held at a time, since each is a copy of weights.
            self._references = {name: self._freeze(recorded, name)}
        return self._references[name]

    def _reference_name(self, recorded: RecordedStep) -> str:
        """The model path of the stage's reference, or a name below `kept/`."""
        refresh = recorded.stage.algorithm.refresh
        # Refreshed references are kept by their step. The last one before this step is the one that it used.
        if refresh and recorded.index > refresh:
            return f"{recorded.stage.name}{KEPT_REFERENCE}{(recorded.index - 1) // refresh * refresh:06d}"
        return recorded.stage.reference or starts(recorded.run.stages, recorded.stage)

    def _freeze(self, recorded: RecordedStep, name: str) -> Examiner:
        """A scorer of the reference with this name (`_reference_name`). `load(recorded)` must have been called."""
        if name == recorded.stage.reference:
            return cast("Examiner", _CachedScorer(make_teacher(self.run, name, self.policy)))
        folder = self.folder / "kept" / name
        if not folder.is_dir():
            raise RunFolderError(
                f"{self.folder} keeps nothing called {name!r}, which stage {recorded.stage.name} took as its reference"
            )
        # The copy is made of the learner's own model, which gets back the weights that `load` gave it.
        load_weights(folder, self._learner.inner)
        frozen = FrozenScorer(self.policy)
        load_weights(recorded.weights.folder, self._learner.inner)
        return cast("Examiner", _CachedScorer(frozen))

    def gradient(self, batch: Batch, a: Algorithm, micro_tokens: int, warming: bool) -> tuple[Gradient, Gauges]:
        """The gradient that the optimizer would have received for this minibatch, and the step's gauges."""
        # A float16 model needs a scale of the loss, or small gradients vanish. It is taken out again in `gather`.
        probe = _GradientTaker(self._learner.parameters(), FIRST_SCALE if self.policy.dtype == torch.float16 else 1.0)
        self._learner.touched = 0
        gauges = Trainer(cast("Learner", self._learner), probe, micro_tokens).step(batch, PolicyLoss(a, warming))
        policy = {n: g for n, g in probe.taken.items() if not n.startswith(HEAD)}
        head = {n: g for n, g in probe.taken.items() if n.startswith(HEAD)}
        return Gradient(policy, head, gauges["optim/grad_norm"].mean, self._learner.touched), gauges


class _GradientTaker:
    """An optimizer that keeps the gradients and changes no parameter (`role.trainer.WeightOptimizer`)."""

    lr = 0.0

    def __init__(self, parameters: Mapping[str, torch.Tensor], loss_scale: float) -> None:
        self._parameters, self.loss_scale = parameters, loss_scale
        self.taken: dict[str, torch.Tensor] = {}

    def gather(self) -> None:
        """Add the parameters' gradients to those that were taken, and clear them."""
        for name, p in self._parameters.items():
            if p.grad is not None:
                gradient = whole(p.grad).float() / self.loss_scale
                self.taken[name] = self.taken[name] + gradient if name in self.taken else gradient
                # Cleared as an optimizer would, or the next micro-batch would add to it.
                p.grad = None

    def step(self, share: float = 1.0) -> float:
        self.gather()
        return float(torch.nn.utils.get_total_norm(list(self.taken.values()))) if self.taken else 0.0

    def pending_bytes(self) -> int:
        return 0

    def trained(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def expected_update(
        self,
        config: Any,
        name: str,
        gradient: torch.Tensor,
        norm: float,
        at: int | None = None,
        share: float = 1.0,
    ) -> ExpectedUpdate:
        return ExpectedUpdate(torch.zeros(gradient.shape if at is None else (1,), dtype=torch.float64), {}, 0.0)

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError("a probe has no state")


class _CountingLearner:
    """A learner that counts, in `touched`, the tokens for whose log-prob the loss has a nonzero gradient."""

    def __init__(self, inner: HFLearner) -> None:
        self.inner, self.touched = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.inner.parameters()

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        scores = self.inner.forward(packed, reads)
        # Counted at the log-prob, before it is mixed with others: silenced tokens have exactly 0 there.
        scores.logp.register_hook(self._count)
        return scores

    def _count(self, gradient: torch.Tensor) -> None:
        self.touched += int((gradient != 0).sum())


class _CachedScorer:
    """A scorer that caches its results by tokens, because many algorithms need the same scores of one batch."""

    def __init__(self, inner: Examiner) -> None:
        self.inner = inner
        self._known: dict[tuple[str, bytes], np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _cached(self, verb: str, packed: Packed) -> np.ndarray:
        """The scorer's result of the method `verb`, such as "score"."""
        # The tokens and the places of their labels: two batches with the same ones have the same scores.
        key = (verb, packed.ids_N.tobytes() + packed.source_M.tobytes())
        if key not in self._known:
            self._known[key] = getattr(self.inner, verb)(packed)
        return self._known[key]

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: self._cached(name, packed) for name in names}

    def score(self, packed: Packed) -> np.ndarray:
        return self._cached("score", packed)

    def value(self, packed: Packed) -> np.ndarray:
        return self._cached("value", packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        return self._cached("entropy", packed)

    def energy(self, packed: Packed) -> np.ndarray:
        return self._cached("energy", packed)

    def top(self, packed: Packed, k: int) -> Top:
        """Not cached: its result is no array."""
        return self.inner.top(packed, k)
