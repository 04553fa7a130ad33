"""Further tasks of the processes of `test_ranks_wider`: checkpoints, weights and scores of adapters, of weights below
float32 and of copies, and the faults of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import law_ranks
import numpy as np
import torch
from law_ranks import (
    Case,
    Groups,
    distance,
    minibatch,
    one_process,
    plainly,
    results,
    trained,
    trainer,
)
from rank_tasks import sent_bytes

from posttrain.config.model_settings import Lora
from posttrain.core.streams import WEIGHT
from posttrain.engine.adapters.adapter_modules import adapter_tensors
from posttrain.engine.layers.shared_prefixes import Sharing
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import named_tensors
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel import sharded_learner, sharded_scoring
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import PosttrainError

LORA, DORA = Lora(rank=4), Lora(rank=4, dora=True)
ADAPTED = Case("likelihood", 24, lora=LORA)
NARROW = Case("likelihood", 1, arch="llama", dtype=torch.bfloat16)
HALF = Case("likelihood", 1, arch="llama", dtype=torch.float16)
COPIES = Case("likelihood", 24, replicas=2)
COLUMNS = Case("likelihood", 24, arch="starcoder2", tensor=True)
SHARED = Case("policy", 4096, shared=10)


# --- weights and scores -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TogetherWider:
    """Weights gathered on rank 0 as an engine is sent them, the bytes sent, and scores of all kinds."""

    def __call__(self, groups: Groups, folder: Path) -> dict[str, dict[str, Any]]:
        everyone = groups[4]
        assert everyone is not None
        return {
            "adapter": _sent(ADAPTED, everyone),
            "bfloat16": _sent(NARROW, everyone),
            "copies": _sent(COPIES, everyone.part(range(4), 2)),
            "columns": _sent(COLUMNS, everyone),
            "scores": _scores(replace(SHARED, loss="ranking"), everyone),
        }


def _sent(case: Case, ranks: ProcessRanks | None) -> dict[str, Any]:
    assert ranks is not None
    t, _ = trained(case, ranks, 2)
    learner = t.learner
    assert isinstance(learner, HFLearner)
    mine = learner.fingerprint()
    with sent_bytes() as sent:
        got = dict(whole_tensors(gathered(learner.shards(), ranks, t.version)))
    out = {"sent": sum(sent), "tensors": len(got), "dtypes": sorted({str(x.dtype) for x in got.values()})}
    if ranks.rank == 0:
        fresh = trainer(replace(case, replicas=1), None).learner
        assert isinstance(fresh, HFLearner)
        module = fresh.policy.module
        module.load_state_dict(got, strict=False)
        served = adapter_tensors(module) if case.lora is not None else dict(named_tensors(module))
        out["whole"] = sum(x.numel() * x.element_size() for x in served.values())
        out["all"] = sum(x.numel() * x.element_size() for _, x in named_tensors(module))
        out["arrived"] = fresh.fingerprint() == mine and got.keys() == served.keys()
    return out


def _scores(case: Case, ranks: ProcessRanks) -> dict[str, Any]:
    """Largest differences of what each rank is told from one process, and how many tokens a rank computes of all."""
    learner, plain = trainer(case, ranks).learner, trainer(case, None).learner
    assert isinstance(learner, ShardedLearner) and isinstance(plain, HFLearner)
    batch, out = minibatch(case), dict[str, Any]()
    for word in ("score", "value", "entropy", "energy", "collision", "rewards"):
        out[word] = _gap(getattr(learner, word)(batch), getattr(plain, word)(batch))
    ours, theirs = learner.top(batch, 3), plain.top(batch, 3)
    out["top"] = _gap(ours.logp, theirs.logp) if np.array_equal(ours.ids, theirs.ids) else np.inf
    ours, theirs = learner.odds(batch, (0.5,)), plain.odds(batch, (0.5,))
    names = ("below_M", "upto_M", "log_ratio_MK", "distance_MK")
    out["odds"] = max(_gap(getattr(ours, n), getattr(theirs, n)) for n in names)
    seen = list[int]()
    real = HFLearner.score
    with patch.object(HFLearner, "score", lambda self, part: (seen.append(len(part.ids_N)), real(self, part))[1]):
        learner.score(batch)
    out["computed"], out["asked"] = sum(seen), len(batch.ids_N)
    try:
        learner.score(batch if ranks.rank != 1 else batch.select(np.arange(2)))
        out["other tokens"] = ""
    except PosttrainError as error:
        out["other tokens"] = str(error)
    return out


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max()) if a.shape == b.shape else np.inf


# --- faults -----------------------------------------------------------------------------------------------------------


def _gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What each pass gives to this rank's part of a gradient is changed."""
    real = sharded_learner.giving

    def giving(own: Any, local: Any) -> Any:
        give = real(own, local)

        def changed(p: Any) -> None:
            with torch.no_grad():
                p.grad.to_local().copy_(change(p.grad.to_local()))
            give(p)

        return changed

    return patch.object(sharded_learner, "giving", giving)


def _adapter_left_out(rank: int) -> Any:
    """The gradients that one rank has of the adapters are lost."""
    return _gradients(lambda g: g * (rank != 1))


def _wrong_copy(rank: int) -> Any:
    """One copy of the weights gets another update."""
    real = StageOptimizer._publish_masters

    def publish(self: Any) -> None:
        real(self)
        if rank == 3:
            with torch.no_grad():
                for p in self._parameters.values():
                    p.mul_(1.001)

    return patch.object(StageOptimizer, "_publish_masters", publish)


def _copies_counted(rank: int) -> Any:
    from posttrain.engine.optimizer import optimizer

    return patch.object(optimizer, "of_one_copy", lambda ranks, norm, what: ranks.every(norm))


def _summed_narrow(rank: int) -> Any:
    """Sums over ranks are rounded to bfloat16, as the weights are."""
    return _gradients(lambda g: g.to(torch.bfloat16).to(g.dtype))


def _another_order(rank: int) -> Any:
    """One rank computes other weights of the loss."""
    real = law_ranks.minibatch
    given = {0: lambda case: real(case), 1: lambda case: real(case).having({WEIGHT: 2 * real(case)[WEIGHT]})}
    return patch.object(law_ranks, "minibatch", given[int(rank == 1)])


def _whole_counts_on_each(rank: int) -> Any:
    return patch.object(TensorLearner, "_is_cut", lambda self, name: True)


def _wrong_sharing(rank: int) -> Any:
    real = Sharing._shared
    return patch.object(Sharing, "_shared", lambda self, *a: real(self, *a) * 1.01)


def _out_of_order(rank: int) -> Any:
    """Scores of the ranks are joined in the order of the ranks."""
    real = sharded_scoring._joined
    return patch.object(sharded_scoring, "_joined", lambda pieces, order: real(pieces, np.arange(len(order))))


def _trains(case: Case, ranks: ProcessRanks) -> Any:
    return distance(results(trained(case, ranks, 2)), one_process(plainly(case)))


def _scored(case: Case, ranks: ProcessRanks) -> Any:
    found = _scores(case, ranks)
    return max(x for word, x in found.items() if word not in ("computed", "asked", "other tokens"))


FAULTS: dict[str, tuple[Callable[[int], Any], Case, Callable[..., Any], str]] = {
    "a rank's gradients of the adapter are lost": (_adapter_left_out, ADAPTED, _trains, "law"),
    "gradients are summed in bfloat16": (_summed_narrow, NARROW, _trains, "law"),
    "copies are counted in the norm": (_copies_counted, COPIES, _trains, "law"),
    "a copy of the weights is updated otherwise": (_wrong_copy, COPIES, _trains, "copies of the weights differ"),
    "shared beginnings are computed wrongly": (_wrong_sharing, SHARED, _trains, "computing shared beginnings once"),
    "a rank of the columns has another minibatch": (_another_order, COLUMNS, _trains, "gone different ways"),
    "what each rank has whole counts on each": (_whole_counts_on_each, COLUMNS, _trains, "law"),
    "scores are joined in another order": (_out_of_order, replace(SHARED, loss="ranking"), _scored, "law"),
}


@dataclass(frozen=True)
class PlantWider:
    """Every fault over four ranks: how far the run ends from the right one, or the error of this rank."""

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        everyone = groups[4]
        assert everyone is not None
        two_by_two = everyone.part(range(4), 2)
        for name, (plant, case, play, _) in FAULTS.items():
            ranks = two_by_two if case.replicas == 2 else everyone
            assert ranks is not None
            try:
                with plant(ranks.rank):
                    out[name] = play(case, ranks)
            except PosttrainError as error:
                out[name] = str(error)
        return out
