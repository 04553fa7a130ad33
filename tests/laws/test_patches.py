"""The ladder as data: a patch changes something that means something, and says so."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from posttrain.ladder.algorithm import Algorithm, differences, patch
from posttrain.ladder.algorithm_notes import NOTES
from posttrain.ladder.pieces.baseline import (
    AnchorMean,
    Ema,
    EnergyMean,
    Greedy,
    LengthMean,
    Others,
    SoftMean,
    StepMean,
    ToGo,
    TurnMean,
    Value,
)
from posttrain.ladder.pieces.correction import BinaryKL, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.pull import KL, SequenceL2, TokenL2
from posttrain.ladder.pieces.shape import (
    BestOf,
    DropTruncated,
    Gate,
    Overlong,
    RankLength,
    RateLength,
    RelativeLength,
    Repetition,
    Signed,
    TargetLength,
)
from posttrain.ladder.pieces.source_ema import SourceEma
from posttrain.ladder.pieces.step_size import EffectiveSize
from posttrain.ladder.pieces.token_choice import (
    ClipCov,
    Distill,
    EntropyBonus,
    Imitate,
    KlCov,
    NoEasy,
    Priority,
    SecondMoment,
    Shown,
    TopEntropy,
)
from posttrain.ladder.pieces.trust_region import Cap, Clip, Divergence, FutureKL, Geometric, Hump, Soft, Taper
from posttrain.ladder.policy_rows import (
    A3PO,
    CHORD,
    CLIP_COV,
    DAPO,
    DPPO,
    DPPO_TOP,
    DR_GRPO,
    EMA,
    GDPO,
    GIGPO,
    GKD,
    GRPO,
    GRPO_PROCESS,
    GSPO,
    KIMI,
    KL_COV,
    LADDER,
    LUFFY,
    M2PO,
    MAXRL,
    MT_GRPO,
    OPD,
    PASS_AT_K,
    PKPO,
    PPO,
    REINFORCE,
    REMAX,
    RLOO,
    SKYWORK,
    TOP_ENTROPY,
    VAPO,
    VCPO,
    VESPO,
    algorithm,
)
from posttrain.system.errors import ConfigError
from posttrain.system.subclass_registry import alternatives

PAID = KL(coef=0.1, estimator="k1", placement="reward")
PER_TOKEN = KL(coef=0.1, estimator="k1", placement="token")
OF_RATIO = (TokenL2(), SequenceL2(), KL(estimator="rk3"))
REFUSED = [
    (REINFORCE, {"clip": Clip()}, "ratio='one' has none"),
    (PPO, {"ratio": "one"}, "ratio='one' has none"),
    (PPO, {"anchor": "behaviour", "correction": (Truncate(),)}, "twice"),
    (PPO, {"correction": (Truncate(), Mask())}, "truncate and mask would multiply start/mu twice"),
    (PPO, {"correction": (BinaryKL(), Mask(), Veto())}, "binarykl and mask"),
    (A3PO, {"correction": (BinaryKL(),)}, "skips the learner's forward"),
    (REINFORCE, {"scale": "group_std"}, "compares siblings"),
    (REMAX, {"scale": "group_std"}, "compares siblings"),
    (REINFORCE, {"scale": "best_std"}, "compares siblings"),
    (EMA, {"scale": "group_mean"}, "compares siblings"),
    (GRPO, {"scale": "best_std"}, "no k is named"),
    (PASS_AT_K, {"shape": ()}, "no k is named"),
    (PASS_AT_K, {"shape": (Signed(), BestOf())}, "best raw outcome"),
    (PKPO, {"baseline": Others()}, "gain already compares"),
    (PASS_AT_K, {"shape": (BestOf(k=4, gain=True),)}, "gain already compares"),
    (GDPO, {"shape": (Signed(),)}, "rewards=each compares"),
    (GDPO, {"baseline": LengthMean()}, "rewards=each compares"),
    (GDPO, {"baseline": StepMean()}, "rewards=each compares"),
    (GRPO, {"baseline": ImplicitOthers()}, "one number for an answer cannot scale"),
    (GRPO, {"baseline": EnergyMean()}, "compares token by token"),
    (PPO, {"whiten": None, "scale": "batch_std"}, "baseline=value compares token by token"),
    (PPO, {"scale": "mixed_share"}, "baseline=value compares token by token"),
    (GSPO, {"baseline": EnergyMean(), "scale": "one"}, "varies inside the sequence"),
    (REINFORCE, {"rewards": "each"}, "rewards=each compares"),
    (GDPO, {"scale": "group_mean"}, "rewards=each compares"),
    (GDPO, {"scale": "mixed_share"}, "rewards=each compares"),
    (GDPO, {"pull": PAID}, "rewards=each compares"),
    (GRPO_PROCESS, {"scale": "batch_std"}, "compares steps"),
    (GRPO_PROCESS, {"shape": (DropTruncated(),)}, "compares steps"),
    (GRPO_PROCESS, {"pull": PAID}, "compares steps"),
    (REINFORCE, {"rewards": "none"}, "learns from the teacher alone"),
    (OPD, {"pull": None}, "learns from the teacher alone"),
    (OPD, {"pull": KL(coef=1.0, estimator="k2", placement="loss")}, "learns from the teacher alone"),
    (OPD, {"shape": (Signed(),)}, "nothing to shape"),
    (OPD, {"baseline": TurnMean()}, "no step or turn to compare"),
    (OPD, {"baseline": AnchorMean()}, "no step or turn to compare"),
    (OPD, {"baseline": StepMean()}, "no step or turn to compare"),
    (PPO, {"pull": PER_TOKEN}, "GAE hands its charge"),
    (PPO, {"ratio": "sequence_mean"}, "GSPO-token"),
    (PPO, {"ratio": "sequence_product", "clip": None}, "GSPO-token"),
    (GIGPO, {"scale": "batch_std"}, "compares turns"),
    (MT_GRPO, {"pull": PAID}, "compares turns"),
    (GIGPO, {"ratio": "sequence_mean"}, "GSPO-token"),
    (GRPO_PROCESS, {"ratio": "sequence_mean"}, "GSPO-token"),
    (GSPO, {"pull": PER_TOKEN}, "GSPO-token"),
    (GSPO, {"baseline": ToGo(), "scale": "one", "pull": PAID}, "GSPO-token"),
    (GRPO, {"ratio": "sequence_mean", "aggregate": "token_mean"}, "mean over sequences"),
    (GSPO, {"clip": Geometric()}, "compares single tokens"),
    (GSPO, {"clip": Divergence()}, "compares single tokens"),
    (GSPO, {"clip": FutureKL()}, "compares single tokens"),
    (VESPO, {"ratio": "token"}, "whole episodes"),
    (DPPO_TOP, {"anchor": "start"}, "compares with the sampler"),
    (DPPO_TOP, {"shown": Shown()}, "has no sampler"),
    (VCPO, {"shown": Shown(), "step_scale": None}, "shown siblings have no sampler"),
    (GRPO, {"shown": Shown(), "step_scale": EffectiveSize()}, "compares responses with their sampler"),
    (DPPO_TOP, {"distill": Distill()}, "candidate tokens"),
    (LUFFY, {"pull": PAID, "anchor": "behaviour"}, "a demonstration does not have"),
    *[(LUFFY, {"pull": p, "anchor": "behaviour"}, "a demonstration does not have") for p in OF_RATIO],
    (LUFFY, {"tokens": KlCov(), "anchor": "behaviour"}, "a demonstration does not have"),
    (REINFORCE, {"pull": KL(estimator="rk3")}, "rk3 weights k3"),
    (GKD, {"pull": KL(refresh=10)}, "would replace it"),
    (OPD, {"pull": KL(estimator="k1", placement="token", refresh=10)}, "would replace it"),
    (GRPO, {"imitate": Imitate(of="shown")}, "there are none"),
    (CHORD, {"shown": None}, "there are none"),
    (PPO, {"scale": "batch_std"}, "already divides"),
    (GRPO, {"scale": "group_std"}, "already has"),
    (DAPO, {"clip": Clip(low=0.2, high=0.28)}, "already has"),
    (GRPO, {"klip": Clip()}, "did you mean 'clip'"),
    (GRPO, {"note_": "x"}, "no choice"),
    (GRPO, {}, "changes nothing"),
]
ALLOWED = [
    (GSPO, {"baseline": Greedy(), "scale": "one"}),
    (GSPO, {"pull": PAID}),
    (GDPO, {"baseline": Others()}),
    (PASS_AT_K, {"shape": (BestOf(), DropTruncated())}),
    (OPD, {"shape": (DropTruncated(),)}),
    (LUFFY, {"pull": PAID}),
    *[(LUFFY, {"pull": p}) for p in OF_RATIO],
    (PPO, {"correction": (Mask(), Reject(), Veto(), NegativeMask())}),
    (DPPO, {"correction": (Reject(), Veto(), NegativeMask())}),
    (REINFORCE, {"correction": (Truncate(),)}),
    (REINFORCE, {"scale": "group_mean"}),
]


@pytest.mark.parametrize(("parent", "changes", "why"), REFUSED)
def test_meaningless_patches_are_refused(parent: Algorithm, changes: dict[str, Any], why: str) -> None:
    """An unknown field, a change that changes nothing and a combination that means nothing are refused with a
    reason."""
    with pytest.raises(ConfigError, match=why):
        patch(parent, "x", "-", **changes)


@pytest.mark.parametrize(("parent", "changes"), ALLOWED)
def test_their_neighbours_are_not(parent: Algorithm, changes: dict[str, Any]) -> None:
    """What lies just beside a refusal and means something."""
    assert differences(parent, patch(parent, "x", "-", **changes)).keys() == changes.keys()


NUMBERS: list[tuple[type, dict[str, Any]]] = [
    (ImplicitOthers, {"beta": -0.1}),
    (ImplicitOthers, {"lr_factor": 0.0}),
    *[(Clip, n) for n in ({"low": 1.5}, {"high": -0.1}, {"cap": 1.2}, {"low": -0.1})],
    *[(Cap, n) for n in ({"low": 2.0, "high": 1.0}, {"low": -1.0}, {"high": 0.0})],
    (Taper, {"cap": 0.0}),
    *[(Soft, n) for n in ({"tau": 0.0}, {"tau_negative": -1.0})],
    *[(Geometric, n) for n in ({"low": 0.0}, {"high": 0.0})],
    *[(Divergence, n) for n in ({"delta": 0.0}, {"cap": 0.0}, {"top": -1})],
    *[(FutureKL, n) for n in ({"low": 2.0}, {"band_low": -0.1}, {"half_life": 0.0}, {"loud": 0.0}, {"ignore": 0.0})],
    *[(Hump, n) for n in ({"k": 0.0}, {"fade": 0.0}, {"k_negative": 0.0}, {"fade_negative": -1.0})],
    (Ema, {"decay": 1.0}),
    (SourceEma, {"decay": 1.0}),
    (SoftMean, {"tau": 0.0}),
    *[(AnchorMean, n) for n in ({"gamma": 1.5}, {"omega": 0.0}, {"by": "text"})],
    (TurnMean, {"outcome": -1.0}),
    *[
        (Value, n)
        for n in ({"gae_lambda": 1.1}, {"gamma": -0.1}, {"clip": 0.0}, {"coef": -1.0}, {"warmup": -1}, {"trace": 0.0})
    ],
    *[
        (Value, n)
        for n in (
            *({"length_alpha": 0.0}, {"credit_lambda": 1.5}, {"credit_lambda": 0.9, "length_alpha": 0.05}),
            *({"trace": 1.0, "credit_lambda": 0.9}, {"trace": 1.0, "length_alpha": 0.05}),
        )
    ],
    *[(KL, n) for n in ({"coef": 0.0}, {"estimator": "k9"}, {"horizon": 0.0}, {"refresh": -1}, {"target": 0.0})],
    *[(KL, n) for n in ({"early": -1.0}, {"early": 0.5}, {"early": 0.5, "estimator": "k1", "placement": "reward"})],
    (EffectiveSize, {"base": 0.0}),
    (SequenceL2, {"coef": 0.0}),
    (TokenL2, {"coef": 0.0}),
    *[(Truncate, n) for n in ({"cap": 0.0}, {"cap": -1.0})],
    *[(Mask, n) for n in ({"low": 2.0, "high": 1.0}, {"low": -0.5})],
    (BinaryKL, {"phi": 0.0}),
    (Reject, {"low": 1.1}),
    (Veto, {"below": 0.0}),
    (NegativeMask, {"delta": -0.5}),
    *[(Overlong, n) for n in ({"cache": 0.0}, {"cache": 1.5})],
    *[(BestOf, n) for n in ({"k": 0}, {"k": 1, "gain": True})],
    (RankLength, {"coef": 0.0}),
    *[(TargetLength, n) for n in ({"target": 0}, {"alpha": 0.0})],
    (RateLength, {"beta": 0.0}),
    *[(Repetition, n) for n in ({"n": 0}, {"penalty": -1.0})],
    (Gate, {"source": ""}),
    (RelativeLength, {"coef": 0.0}),
    *[(ClipCov, n) for n in ({"share": 1.5}, {"low": 5.0}, {"share": -0.1})],
    *[(KlCov, n) for n in ({"share": 2.0}, {"coef": 0.0})],
    (TopEntropy, {"share": -0.2}),
    (SecondMoment, {"limit": 0.0}),
    *[(EntropyBonus, n) for n in ({"coef": -0.1}, {"target": 0.0}, {"delta": 0.0})],
    (Imitate, {"coef": 0.0}),
    *[(Shown, n) for n in ({"siblings": 0}, {"gamma": 0.0})],
    *[(Distill, n) for n in ({"beta": 1.5}, {"top": -1}, {"coef": 0.0})],
    (NoEasy, {"rate": 1.5}),
    *[(Priority, n) for n in ({"floor": 0.0}, {"floor": 2.0})],
]
REWARDS = {"Cosine", "Gate"}
"""Pieces whose numbers are rewards: any number means something."""


@pytest.mark.parametrize(("piece", "numbers"), NUMBERS, ids=[f"{p.__name__} {n}" for p, n in NUMBERS])
def test_pieces_own_their_numbers(piece: type, numbers: dict[str, Any]) -> None:
    """A number that means nothing is refused where it is written, and so is one that is no number."""
    with pytest.raises(ConfigError):
        piece(**numbers)
    for name, value in numbers.items():
        if isinstance(value, float) and len(numbers) == 1:
            with pytest.raises(ConfigError):
                piece(**{name: math.nan})


def test_every_piece_refuses_what_is_no_number() -> None:
    """NaN compares false with every bound, and no count is below 0: a piece that lets them pass checks nothing."""
    from posttrain.ladder.pieces import baseline, correction, pull, shape, step_size, token_choice, trust_region

    everything: set[type] = set()
    for choice in (
        baseline.Baseline,
        correction.Correction,
        pull.Pull,
        shape.Shaping,
        step_size.StepScale,
        token_choice.Tokens,
        token_choice.Curriculum,
        trust_region.TrustRegion,
    ):
        everything |= set(alternatives(choice))
    shipped = [p for p in everything if p.__module__.startswith("posttrain.") and p.__name__ not in REWARDS]
    assert len(shipped) > 40
    for piece in (*shipped, EntropyBonus, Imitate, Shown, Distill):
        for field in fields(piece):
            wrong = {"float": math.nan, "int": -1}.get(str(field.type).removesuffix(" | None"))
            if wrong is not None:
                with pytest.raises(ConfigError):
                    piece(**{field.name: wrong})
                    pytest.fail(f"{piece.__name__}({field.name}={wrong}) means nothing: refuse it in __post_init__")


def test_lineage_ends_with_the_last_patch() -> None:
    """Every line of the ladder descends from REINFORCE, and differs from its parent in what its patch says."""
    for a in LADDER.values():
        assert a.lineage()[0] is REINFORCE and a.lineage()[-1] is a
        assert a.parent is None or differences(a.parent, a)
    assert [a.name for a in DAPO.lineage()] == ["reinforce", "ppo", "grpo", "dapo"]
    assert set(differences(GRPO, DR_GRPO)) == {"scale", "aggregate", "pull"}


READS = {
    "": (
        "reinforce reinforce_ema rae remax opo gpg opmd pkpo maxrl_success topr aipo scalerl dppo prime_rl echo dppo_kl"
        " dppo_top a3po"
    ),
    "energy": "otb",
    "energy start": "vcpo",
    "reference": "rloo opd iw_opd",
    "teacher": "gkd sdpo sdft",
    "start values": "ppo dual_clip v_trace vapo",
    "implicit reference start": "prime",
    "reference start": (
        "mopd reinforce_pp reinforce_pp_baseline grpo grpo_process two_sided deepseek_v32 gdpo pass_at_k"
    ),
    "entropy start": "top_entropy",
    "start": (
        "kimi_k15 dro grpo_passk mt_grpo gigpo luffy chord decoupled_ppo tis icepop"
        " m2po lite_ppo gmpo sapo gspo gspo_token luspo vespo"
        " cispo clip_cov kl_cov skywork_or1 dapo fipo magistral dr_grpo maxrl"
    ),
}


def test_what_is_read_is_what_is_scored() -> None:
    """`reads` names the streams that credit and objective use; that each is used, and no other, is `test_gradients`,
    which holds it for lines that are not in this table."""
    expected = {name: streams for streams, names in READS.items() for name in names.split()}
    assert {n: " ".join(sorted(LADDER[n].reads)) for n in expected} == expected and len(expected) >= 68
    assert patch(RLOO, "r", "-", anchor="start").reads == {
        "reference",
        "start",
    }, "the KL in the reward is taken under the anchor"
    assert patch(REINFORCE, "c", "-", correction=(Mask(),)).reads == {"start"}
    assert patch(REINFORCE, "k", "-", tokens=KlCov(), anchor="start").reads == {"start"}, "else |log pi/start| is 0"
    assert patch(REINFORCE, "n", "-", correction=(NegativeMask(),)).reads == frozenset(), (
        "it compares the policy with the sampler"
    )
    assert patch(PPO, "v", "-", anchor="behaviour", baseline=Value(trace=1.0)).reads == {"start", "values"}


def test_which_silent_tokens_may_leave() -> None:
    """Tokens without credit may stay away from the forward pass only where nothing else reads them."""
    assert not any(a.reads_silent_tokens for a in (REINFORCE, DAPO, DR_GRPO, MAXRL, GSPO, DPPO))
    assert all(
        a.reads_silent_tokens
        for a in (GRPO, PPO, KIMI, CHORD, GKD, OPD, SKYWORK, TOP_ENTROPY, KL_COV, CLIP_COV, M2PO, VAPO)
    )


def test_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        algorithm("grop")


def test_every_note_is_of_an_algorithm_of_the_ladder() -> None:
    assert {name for name, a in LADDER.items() if a.note} == set(NOTES) <= set(LADDER)
