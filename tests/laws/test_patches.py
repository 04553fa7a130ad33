"""The ladder as data: a patch changes something that means something, and says so."""

from __future__ import annotations

import pytest

from posttrain.core.algorithm import Algorithm, differences, patch
from posttrain.core.errors import ConfigError
from posttrain.core.ladder import DAPO, DR_GRPO, EMA, GRPO, LADDER, PPO, REINFORCE, RLOO, algorithm
from posttrain.core.pieces.baseline import Ema, GroupMean, Value
from posttrain.core.pieces.correction import Mask, Truncate
from posttrain.core.pieces.pull import KL, SequenceL2
from posttrain.core.pieces.shape import Overlong
from posttrain.core.pieces.trust import Clip

REFUSED = [
    (REINFORCE, {"clip": Clip()}, "ratio='one' has none"),
    (PPO, {"ratio": "one"}, "ratio='one' has none"),
    (PPO, {"anchor": "behaviour", "correction": Truncate()}, "twice"),
    (REINFORCE, {"scale": "group_std"}, "compares siblings"),
    (EMA, {"scale": "group_mean"}, "compares siblings"),
    (PPO, {"ratio": "sequence_mean"}, "GSPO-token"),
    (GRPO, {"ratio": "sequence_mean", "aggregate": "token_mean"}, "mean over sequences"),
    (REINFORCE, {"pull": KL(estimator="rk3")}, "rk3 weights k3"),
    (PPO, {"scale": "batch_std"}, "already divides"),
    (GRPO, {"scale": "group_std"}, "already has"),
    (DAPO, {"clip": Clip(low=0.2, high=0.28)}, "already has"),
    (GRPO, {"klip": Clip()}, "did you mean 'clip'"),
    (GRPO, {"note_": "x"}, "no choice"),
    (GRPO, {}, "changes nothing"),
]


@pytest.mark.parametrize(("parent", "changes", "why"), REFUSED)
def test_meaningless_patches_are_refused(parent: Algorithm, changes: dict[str, object], why: str) -> None:
    """An unknown field, a change that changes nothing and a combination that means nothing are refused with a reason."""
    with pytest.raises(ConfigError, match=why):
        patch(parent, "x", "-", **changes)


@pytest.mark.parametrize(
    ("piece", "numbers"),
    [
        (Clip, {"low": 1.5}),
        (Clip, {"high": -0.1}),
        (Ema, {"decay": 1.0}),
        (Value, {"gae_lambda": 1.1}),
        (Value, {"gamma": -0.1}),
        (KL, {"coef": 0.0}),
        (Overlong, {"cache": 0.0}),
        (KL, {"estimator": "k9"}),
        (Truncate, {"cap": 0.0}),
        (Mask, {"low": 2.0, "high": 1.0}),
        (SequenceL2, {"coef": 0.0}),
        (Value, {"clip": 0.0}),
    ],
)
def test_pieces_own_their_numbers(piece: type, numbers: dict[str, float]) -> None:
    """A number that means nothing is refused where it is written."""
    with pytest.raises(ConfigError):
        piece(**numbers)


def test_lineage_ends_with_the_last_patch() -> None:
    """Every line of the ladder descends from REINFORCE, and differs from its parent in what its patch says."""
    for a in LADDER.values():
        assert a.lineage()[0] is REINFORCE and a.lineage()[-1] is a
        assert a.parent is None or differences(a.parent, a)
    assert [a.name for a in DAPO.lineage()] == ["reinforce", "ppo", "grpo", "dapo"]
    assert set(differences(GRPO, DR_GRPO)) == {"scale", "aggregate", "pull"}


def test_what_is_read_is_what_is_scored() -> None:
    """`reads` names the streams that credit and objective use, no more."""
    assert {n: sorted(a.reads) for n, a in LADDER.items()} == {
        "reinforce": [],
        "reinforce_ema": [],
        "rloo": ["reference"],
        "ppo": ["start", "values"],
        "grpo": ["reference", "start"],
        "dapo": ["start"],
        "dr_grpo": ["start"],
    }
    assert patch(RLOO, "r", "-", anchor="start").reads == {"reference", "start"}, "the KL in the reward is taken under the anchor"
    assert patch(REINFORCE, "c", "-", correction=(Mask(),)).reads == {"start"}
    kimi = patch(REINFORCE, "k", "-", baseline=GroupMean(), anchor="start", pull=SequenceL2())
    assert kimi.reads == {"start"} and kimi.needs_episode_whole and kimi.reads_silent_tokens
    assert not GRPO.needs_episode_whole and not DAPO.reads_silent_tokens


def test_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        algorithm("grop")
