"""What the processes of `test_expert_ranks` compute: mixtures whose experts are divided over ranks, and one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from law_mixtures import in_float64, mixture, plain_routers
from law_ranks import (
    LARGE,
    LOSSES,
    OPTIMIZERS,
    SMALL,
    STEPS,
    Case,
    Distance,
    Groups,
    Seen,
    Trained,
    distance,
    minibatch,
    results,
)
from transformers.distributed import expert_parallel as plans

from posttrain.algorithm.loss.load_balance_loss import BalancedLoss, to_balance
from posttrain.algorithm.loss.losses import Loss
from posttrain.config.model_settings import Lora
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauges
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.parallel import tensor_parallel
from posttrain.engine.parallel.expert_parallel import ExpertLearner
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.joined_experts import JoinedExperts
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.role.sync import whole_tensors
from posttrain.role.trainer import Trainer
from posttrain.system.errors import PosttrainError
from tests.engine.engine_parts import policy

EXPERTS = 8
BALANCE = 0.1
BUCKET = 4096
"""Bytes, so that weights which every rank has whole come in many buckets too."""


@dataclass(frozen=True)
class Mixed:
    """One case: a mixture of 8 experts, 2 of a token, in float64 or float32."""

    loss: str
    arch: str = "qwen3_moe"
    micro_tokens: int = SMALL
    given: str = ""
    """Choices that the learner follows: `any` ones, or `two`: the same two experts for every token, so that most ranks
    compute nothing; '': its routers choose."""
    balanced: bool = False
    narrow: bool = False
    """In float32."""
    checkpointing: Any = "none"

    def batch(self) -> tuple[Batch, Loss]:
        batch, loss = minibatch(Case(self.loss, self.micro_tokens)), LOSSES[self.loss]
        if self.given or self.balanced:
            rng, n = np.random.default_rng(3), len(batch.ids_N)
            rows = [np.arange(2) if self.given == "two" else rng.permutation(EXPERTS)[:2] for _ in range(2 * n)]
            batch = replace(batch, routed_N=np.array(rows, np.int16).reshape(n, 2, 2))
        return (to_balance(batch, EXPERTS), BalancedLoss(loss, BALANCE)) if self.balanced else (batch, loss)

    def policy(self) -> Policy:
        made = mixture(self.arch, layers=2, experts=EXPERTS)
        if self.narrow:
            return replace(made, kernels="reference", share_prefixes=False)
        plain_routers(made.module)
        return in_float64(made)

    def trainer(self, ranks: ProcessRanks | None) -> Trainer:
        made = self.policy()
        how: dict[str, Any] = {"replays": bool(self.given)}
        if ranks is None:
            learner, more = HFLearner(made, **how), {}
        else:
            learner = ExpertLearner(made, ranks, gradient_checkpointing=self.checkpointing, **how)
            more: dict[str, Any] = {"parts": learner}
        learner.train_mode(True)
        with torch.no_grad():
            for name, p in learner.parameters().items():
                if name.startswith("value_head."):
                    p.fill_(0.1)
        optimizer = Seen(learner.parameters(), OPTIMIZERS["adamw"], **more)
        return Trainer(learner, optimizer, LARGE if ranks is None else self.micro_tokens)


def trained(case: Mixed, ranks: ProcessRanks | None, steps: int = STEPS) -> tuple[Trainer, list[Gauges]]:
    t, (batch, loss) = case.trainer(ranks), case.batch()
    return t, [t.step(batch, loss) for _ in range(steps)]


@cache
def one_process(case: Mixed) -> Trained:
    return results(trained(case, None))


@dataclass(frozen=True)
class CompareExperts:
    """{(case, ranks): how far from one process that takes the minibatch in one pass} on rank 0."""

    cases: tuple[Mixed, ...]

    def __call__(self, groups: Groups, folder: Path) -> dict[tuple[Mixed, int], Distance]:
        out = dict[tuple[Mixed, int], Distance]()
        for case in self.cases:
            right = one_process(case) if groups[1] is not None else None
            for world, ranks in groups.items():
                if ranks is not None and (found := results(trained(case, ranks))) and right is not None:
                    out[case, world] = distance(found, right)
        return out


@dataclass(frozen=True)
class TogetherExperts:
    """What ranks hold, weights as an engine is sent them, scores, and what is refused."""

    case: Mixed

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Any]:
        everyone = groups[4]
        assert everyone is not None
        t, _ = trained(self.case, everyone)
        learner, optimizer = t.learner, t.optimizer
        assert isinstance(learner, ExpertLearner) and isinstance(optimizer, Seen)
        out: dict[str, Any] = {
            "own": {n: tuple(p.shape) for n, p in learner.parameters().items() if p.ndim == 3},
            "cut": sum(p.numel() for p in learner.parameters().values() if p.ndim == 3),
        }
        batch, _ = self.case.batch()
        mine = learner.fingerprint()
        out["score"] = learner.score(batch)
        got = dict(whole_tensors(gathered(learner.shards(), everyone, t.version, bucket=BUCKET)))
        if everyone.rank == 0:
            alone = self.case.trainer(None).learner
            assert isinstance(alone, HFLearner)
            alone.policy.module.load_state_dict(got, strict=False)
            out["arrived"] = (
                alone.fingerprint() == mine and got.keys() == dict(named_tensors(alone.policy.module)).keys()
            )
            out["gap"] = float(np.abs(alone.score(batch) - out["score"]).max())
        return out | {"refused": refused(everyone)}


def refused(ranks: ProcessRanks) -> dict[str, str]:
    """What is said of models that cannot be divided so."""
    made = mixture(layers=2, experts=6)
    narrow: Any = mixture(layers=2, experts=8).module
    cases: dict[str, Policy] = {
        "uneven": made,
        "dense": policy("qwen3"),
        "bfloat16": replace(made, module=narrow.to(torch.bfloat16)),
        "adapter": replace(mixture(layers=2, experts=8), lora=Lora(rank=2)),
    }
    out = dict[str, str]()
    for word, one in cases.items():
        try:
            ExpertLearner(one, ranks)
        except PosttrainError as error:
            out[word] = str(error)
    return out


@dataclass(frozen=True)
class RoundOtherwise:
    """Ranks whose routers choose otherwise where rounding decides, and whose gradients are rounded otherwise: how far
    from one process, and the digest of what each rank has whole. Then gradients that differ by more: what is said."""

    case: Mixed

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Any]:
        everyone = groups[4]
        assert everyone is not None
        rank, call, agree = everyone.rank, JoinedExperts.__call__, TensorLearner.agree

        def chosen(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
            return call(self, hidden, (index + rank) % EXPERTS, weights)

        def rounded(by: float) -> Any:
            def agreed(self: Any, gradients: Any) -> None:
                for name, g in gradients.items():
                    if not self._is_cut(name):
                        g.mul_(1 + by * rank)
                agree(self, gradients)

            return agreed

        with patch.object(JoinedExperts, "__call__", chosen), patch.object(TensorLearner, "agree", rounded(1e-7)):
            t, gauges = trained(self.case, everyone)
            found = distance(results((t, gauges)), one_process(self.case))
        learner = t.learner
        assert isinstance(learner, ExpertLearner)
        whole = {n: p.detach().clone() for n, p in learner.parameters().items() if not learner._is_cut(n)}
        out: dict[str, Any] = {"distance": found, "whole": fingerprint(whole.items()), "tensors": len(whole)}
        try:
            with patch.object(TensorLearner, "agree", rounded(0.01)):
                trained(self.case, everyone)
        except PosttrainError as error:
            out["said"] = str(error)
        return out


# --- faults -----------------------------------------------------------------------------------------------------------


def _gradients_not_summed(rank: int) -> Any:
    """Each rank keeps the gradients that its own experts give to what went into them."""
    real = plans._AllReduceBackward  # type: ignore[attr-defined]
    return patch.object(real, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def _experts_of_another_rank(rank: int) -> Any:
    """A rank takes its experts for those of the next one."""
    real = JoinedExperts.__call__

    def call(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        n = self.num_local_experts
        return real(self, hidden, (index + n) % (n * self.ep_mesh.size()), weights)

    return patch.object(JoinedExperts, "__call__", call)


def _left_out_of_the_sum(rank: int) -> Any:
    """What the experts of one rank compute is lost."""
    real = JoinedExperts._joined
    return patch.object(JoinedExperts, "_joined", lambda self, *given: real(self, *given) * (rank != 1))


def _never_updated(rank: int) -> Any:
    """The experts of one rank get no gradient."""
    real = tensor_parallel.giving

    def giving(own: Any, local: Any) -> Any:
        give = real(own, local)

        def given(p: Any) -> None:
            give(p)
            if rank == 1:
                own.grad.zero_()

        return given

    return patch.object(tensor_parallel, "giving", giving)


def _whole_counts_on_each(rank: int) -> Any:
    return patch.object(TensorLearner, "_is_cut", lambda self, name: True)


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "gradients into the experts are not summed": (_gradients_not_summed, "gone different ways"),
    "experts of another rank": (_experts_of_another_rank, "law"),
    "a rank's experts are left out": (_left_out_of_the_sum, "law"),
    "a rank's experts never learn": (_never_updated, "law"),
    "what each rank has whole counts on each": (_whole_counts_on_each, "law"),
}


@dataclass(frozen=True)
class PlantExperts:
    case: Mixed

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Any]:
        everyone, out = groups[4], dict[str, Any]()
        assert everyone is not None
        for name, (plant, _) in FAULTS.items():
            try:
                with plant(everyone.rank):
                    out[name] = distance(results(trained(self.case, everyone)), one_process(self.case))
            except PosttrainError as error:
                out[name] = str(error)
        return out
