"""Tasks of `test_tensor_ranks`: the check of every run that gradients reach all weights, over columns and rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from law_ranks import Groups

from posttrain.checks.learning.gradient_and_update_checks import gradient_reaches
from posttrain.engine.parallel import tensor_parallel
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.system.errors import InvariantError
from tests.engine.engine_parts import policy


def _given(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Gradients of cut weights arrive changed."""
    real = tensor_parallel.giving

    def giving(own: Any, local: Any) -> Any:
        give = real(own, local)

        def changed(p: Any) -> None:
            with torch.no_grad():
                p.grad.to_local().copy_(change(p.grad.to_local()))
            give(p)

        return changed

    return patch.object(tensor_parallel, "giving", giving)


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "nothing": (lambda rank: nullcontext(), ""),
    "summed twice": (lambda rank: _given(lambda g: 2 * g), "was averaged over ranks, summed twice"),
    "the part of a rank is lost": (
        lambda rank: _given(lambda g: g * (rank != 1)),
        "get no gradient from the log-probs that they change",
    ),
    "norms of heads are not summed": (
        lambda rank: patch.object(TensorLearner, "_summed", lambda self, gradient: gradient),
        "ranks have gone different ways",
    ),
}
"""What is planted on each rank, and what each says."""


@dataclass(frozen=True)
class Reaches:
    def __call__(self, groups: Groups, folder: Path) -> dict[str, str]:
        ranks, out = groups[2], dict[str, str]()
        assert ranks is not None
        for word, (fault, _) in FAULTS.items():
            with fault(ranks.rank):
                learner = TensorLearner(policy("qwen3"), ranks)
                try:
                    gradient_reaches(learner, np.arange(3, 19, dtype=np.int32))
                    out[word] = ""
                except InvariantError as error:
                    out[word] = str(error)
        return out
