"""What a preference loss needs of a whole minibatch: completions under other prompts, what BCO remembers, and units
whose sides are where they belong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from law_preferences import judged

from posttrain.algorithm.preference.preference_minibatch import SHIFT, mismatched, prepared
from posttrain.core.sampling import Sampling
from posttrain.core.streams import SIDE, WEIGHT
from posttrain.core.types import SHOWN, Segment
from posttrain.ladder.preference_rows import AOT, BCO, DPO, KTO
from posttrain.system.errors import DataError, InvariantError


def segment(prompt: list[int], said: list[int]) -> Segment:
    ids = np.array(prompt + said, np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(ids, mask, logp, np.where(mask, SHOWN, -1).astype(np.int32), Sampling())


def test_each_prompt_is_read_with_the_completion_of_the_row_before_that_has_another_prompt() -> None:
    rows = [segment([1], [10]), segment([1], [11, 12]), segment([2, 3], [13]), segment([4], [14])]
    found = mismatched(rows, 10)
    assert [s.ids.tolist() for s in found] == [[1, 14], [1, 14], [2, 3, 11, 12], [4, 13]]
    assert [s.spoken for s in found] == [1, 1, 2, 1]
    assert [s.ids.tolist() for s in mismatched(rows, 3)] == [[1, 14], [1, 14], [4, 13]], "the longest is left out"
    with pytest.raises(DataError, match="raise batch"):
        mismatched([segment([1], [10]), segment([1], [11])], 10)


def test_z_is_the_mean_over_mismatched_completions_and_never_negative() -> None:
    batch = judged(KTO, [3, 1, 4], 0).batch()
    assert prepared(KTO, batch, None, np.array([3.0, -1.0]))[0][SHIFT] == pytest.approx(0.1)
    assert not prepared(KTO, batch, None, np.array([-3.0, 1.0]))[0][SHIFT].any()
    with pytest.raises(InvariantError, match="none were scored"):
        prepared(KTO, batch)


def test_bco_compares_with_the_mean_of_all_rewards_seen_so_far() -> None:
    first, second = judged(BCO, [3, 1, 4], 0), judged(BCO, [2, 6], 1)
    rewards = [[0.1 * float((x - r).sum()) for x, r in zip(j.logp, j.reference, strict=True)] for j in (first, second)]
    batch, running = prepared(BCO, first.batch())
    assert batch[SHIFT] == pytest.approx(np.mean(rewards[0])) and running["count"] == 3
    batch, running = prepared(BCO, second.batch(), running)
    assert batch[SHIFT] == pytest.approx(np.mean(rewards[0] + rewards[1])) and running["count"] == 5
    assert prepared(DPO, judged(DPO, [1, 2], 0).batch())[1] == {}


def test_weights_of_rows_sum_to_one_over_units() -> None:
    j = replace(judged(DPO, [3, 1, 4, 1], 0), weight=(1.0, 3.0))
    batch, _ = prepared(DPO, j.batch())
    assert batch[WEIGHT].tolist() == [0.25] * 4 + [0.75] * 5
    with pytest.raises(DataError, match="at least 0"):
        prepared(DPO, replace(j, weight=(0.0, 0.0)).batch())
    with pytest.raises(DataError, match="weigh the same"):
        prepared(AOT, j.of(AOT).batch())


@pytest.mark.parametrize("side", [(0, 1, 1, 0), (1, 1, 0, 0), (1, 0, 1, 2)])
def test_sides_that_are_not_where_they_belong_are_refused(side: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="in this order"):
        prepared(DPO, replace(judged(DPO, [3, 1, 4, 1], 0), side=side).batch())


def test_a_completion_is_on_one_side_and_pairs_are_units() -> None:
    batch = judged(DPO, [3, 1, 4, 1], 0).batch()
    torn = batch[SIDE].copy()
    torn[0] = 0
    with pytest.raises(InvariantError, match="different sides"):
        prepared(DPO, batch.having({SIDE: torn}))
    with pytest.raises(InvariantError, match="in this order"):
        prepared(DPO, replace(batch, unit_E=None))
