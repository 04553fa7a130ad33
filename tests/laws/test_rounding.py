"""How far two right computations of a log-prob may lie apart: measured where that can be, and else by dtype and
temperature."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.learner import learner as engine_learner
from posttrain.engine.learner.learner import HFLearner
from posttrain.role.learning.logprob_tolerance import CEILING, LEAST, MARGIN, Gap, allowed, noise, unmeasured
from tests.laws.test_agreement import policy


def text(temperature: float) -> Packed:
    ids = np.arange(1, 13, dtype=np.int32)
    spoken = np.arange(len(ids)) > 0
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of(
        [
            Segment(
                ids,
                spoken,
                blank,
                np.where(spoken, 0, -1).astype(np.int32),
                Sampling(temperature=temperature, stop_ids=()),
            )
        ]
    )


def test_the_noise_of_draws_is_measured_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one check calls rounding is none of the other's faults: both read the same measure."""
    learner, packed = HFLearner(policy()), text(1.0)
    assert noise("float32", learner, packed) == LEAST["float32"].worst
    rough = learner.score(packed)
    monkeypatch.setattr(learner, "exact", lambda packed: rough.astype(np.float64) + 1e-3)
    bound = allowed("float32", Gap(7e-3, 1e-3), rough, lambda: learner.exact(packed), 1.0)
    assert noise("float32", learner, packed) == pytest.approx(bound.worst) == pytest.approx(MARGIN * 1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", LEAST)
def test_a_model_too_large_to_compute_again_has_the_bound_of_its_temperature(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0.5 errors of logits are twice as many nats; above 1 nothing is tightened; the ceiling stands."""
    least, most, learner = LEAST[dtype], CEILING[dtype], HFLearner(policy())
    monkeypatch.setattr(engine_learner, "MAX_EXACT_PARAMETERS", 0)
    healthy = Gap(1.5 * least.worst, 1.5 * least.mean)
    blank = np.zeros(1, np.float32)
    assert healthy.within(allowed(dtype, healthy, blank, lambda: learner.exact(text(0.5)), 0.5))
    assert not healthy.within(allowed(dtype, healthy, blank, lambda: learner.exact(text(1.0)), 1.0))
    assert noise(dtype, learner, text(0.5)) == 2 * least.worst and noise(dtype, learner, text(2.0)) == least.worst
    assert unmeasured(dtype, 1e-6) == most
