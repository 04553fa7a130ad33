"""What observes a stage that learns from preferences: the second computation of its loss, and of what was judged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algorithm.preference import preference_loss
from posttrain.config.stages.preference_settings import Preference
from posttrain.core.batch import Batch
from posttrain.core.sampling import Sampling
from posttrain.core.streams import SIDE, WEIGHT
from posttrain.core.types import Segment
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.link import Link
from posttrain.ladder.pieces.preference_pieces import (
    AlphaDivergence,
    ChosenNLL,
    ForwardKL,
    JensenShannon,
    RatioMargin,
)
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import DPO, PREFERENCES, SIMPO
from posttrain.role.events import PackedEvent
from posttrain.stages.checks_by_kind import observers
from posttrain.stages.preference.preference_data import (
    completion_ends_once,
    sides_are_as_judged,
    sides_share_a_prompt,
)
from posttrain.stages.preference.preference_gradient import JudgedRows, unknown
from posttrain.stages.preference.preference_loss_checks import PreferenceLossCheck, agrees_on_synthetic_judgements
from posttrain.stages.preference.preference_reference import starts_at_reference
from posttrain.system.errors import InvariantError

MORE = [
    *(patch(DPO, "more", "", divergence=d) for d in (ForwardKL(), JensenShannon(), AlphaDivergence(alpha=0.3))),
    patch(DPO, "more", "", add=(ChosenNLL(coef=0.2, over="sequences"),)),
    patch(SIMPO, "more", "", margin=RatioMargin(ratio=0.3)),
]
"""Pieces that no row of the ladder has."""


@pytest.mark.parametrize("a", [*PREFERENCES.values(), *MORE], ids=lambda a: a.name)
def test_every_shipped_loss_has_the_gradient_of_its_definition(a: PreferenceAlgorithm) -> None:
    assert not unknown(a)
    agrees_on_synthetic_judgements(a)


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_gradient_that_is_off_by_one_percent_of_a_side_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "statistic" if name == "aot" else "score"
    real = getattr(preference_loss, where)

    def bent(a: Any, of: Any) -> Tensor:
        h_E = real(a, of)
        return torch.cat([h_E[:-1], 1.01 * h_E[-1:] - 0.01 * h_E[-1:].detach()])

    if name == "nash_md":  # it reads no score of completions
        return
    monkeypatch.setattr(preference_loss, where, bent)
    with pytest.raises(InvariantError, match=r"before the first step: the gradient is not that of"):
        agrees_on_synthetic_judgements(PREFERENCES[name])


def test_a_piece_from_outside_is_said_to_be_unchecked() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Cubic(Link):
        def words(self) -> str:
            return "-x^3"

    try:
        a = patch(DPO, "mine", "", link=Cubic())
        assert unknown(a) == ("Cubic",)
        agrees_on_synthetic_judgements(a)
        roles: Any = SimpleNamespace(stage=Preference(name="p", algorithm=a))
        check = PreferenceLossCheck(None)
        asyncio.run(check.begin(roles))
        said = [check.on_event(roles, PackedEvent(i, batch(), True, 0)) for i in (1, 2)]
        assert said[0] is not None and "no second computation covers Cubic" in said[0].notes[0] and said[1] is None
    finally:
        Cubic.withdraw()


STOP = 9


def segment(ids: list[int], prompt: int = 2) -> Segment:
    mask = np.arange(len(ids)) >= prompt
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(np.array(ids, np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32), Sampling(stop_ids=()))


def batch(*segments: Segment) -> Batch:
    said = segments or (segment([1, 2, 3, STOP]), segment([1, 2, 4, 5, STOP]))
    sides = np.repeat(np.arange(len(said)) % 2 == 0, [s.spoken for s in said]).astype(np.int32)
    unit_E = np.arange(len(said), dtype=np.int32) // 2
    weight = np.full(len(sides), 2 / len(said))
    return Batch.of(said, unit_E=unit_E, streams={SIDE: sides, WEIGHT: weight})


def text(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def rows(**changes: Any) -> JudgedRows:
    return replace(JudgedRows(side_E=np.array([1, 0]), unit_E=np.array([0, 0]), weight_U=np.array([3.0])), **changes)


def test_what_was_judged_passes() -> None:
    sides_are_as_judged(batch(), rows())
    completion_ends_once(batch(), (STOP,), text)
    sides_share_a_prompt(batch(), text)


@pytest.mark.parametrize(
    "spoilt",
    [[1, 2, 4, 5], [1, 2, 4, STOP, STOP], [1, 2, STOP, 4, 5], [1, 2, 4, STOP, 0]],
    ids=["cut", "stops twice", "goes on", "padded"],
)
def test_a_completion_that_does_not_end_once_is_told(spoilt: list[int]) -> None:
    with pytest.raises(InvariantError, match="stop tokens that count"):
        completion_ends_once(batch(segment([1, 2, 3, STOP]), segment(spoilt)), (STOP,), text)


def test_a_prompt_that_begins_twice_on_one_side_is_told() -> None:
    with pytest.raises(InvariantError, match="different prompts"):
        sides_share_a_prompt(batch(segment([1, 2, 3, STOP]), segment([1, 1, 2, 3, STOP], 3)), text)


@pytest.mark.parametrize(
    "changes",
    [{"side_E": np.array([0, 1])}, {"unit_E": np.array([0, 1]), "weight_U": np.array([1.0, 1.0])}],
    ids=["swapped", "other units"],
)
def test_what_was_judged_otherwise_is_told(changes: dict[str, Any]) -> None:
    with pytest.raises(InvariantError, match="judged|judgements"):
        sides_are_as_judged(batch(), rows(**changes))


def test_a_log_ratio_before_the_first_step_is_told() -> None:
    logp, exact = np.array([-1.0, -2.0], np.float32), lambda: np.array([-1.0, -2.0])
    assert starts_at_reference(logp, logp + np.float32(1e-6), "float32", exact) < 1e-5
    with pytest.raises(InvariantError, match=r"every log-ratio is 0, and one is 0\.01"):
        starts_at_reference(logp, logp + np.float32(0.01), "float32", exact)


def test_what_observes_the_stage() -> None:
    found = observers(Preference(name="p"), [], {})
    assert found.names[1:5] == ("OptimizerResumeCheck", "JudgementCheck", "ReferenceCheck", "PreferenceLossCheck")


def test_the_running_mean_is_kept_with_a_checkpoint() -> None:
    check = PreferenceLossCheck({"sum": 2.0, "count": 4.0})
    assert check.state() == {"preference": {"sum": 2.0, "count": 4.0}}
    assert PreferenceLossCheck({}).state() == {}
