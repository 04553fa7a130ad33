"""The ladder: every algorithm is a patch of another one. A row has parent, name, paper, and the changed choices.

docs/reference/algorithms.md has formulas, defaults and numeric cases. `ladder.algorithm_notes` says where papers and
other libraries differ. To add an algorithm, write a row here. If it needs a new piece, also write one type in
`ladder.pieces` and one function of its mathematics in `posttrain.algorithm`.
"""

from __future__ import annotations

from typing import Any

from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.algorithm_notes import NOTES
from posttrain.ladder.pieces.baseline import (
    AnchorMean,
    Ema,
    EnergyMean,
    Greedy,
    GroupMean,
    LengthMean,
    OffPolicyMean,
    Others,
    SecondBest,
    SoftMean,
    StepMean,
    ToGo,
    TurnMean,
    Value,
)
from posttrain.ladder.pieces.correction import Mask, NegativeMask, Truncate
from posttrain.ladder.pieces.hint import Hint
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.pull import KL, SequenceL2, TokenL2
from posttrain.ladder.pieces.shape import BestOf, Overlong, Signed
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
from posttrain.system.errors import ConfigError, nearest


def _patch(parent: Algorithm, name: str, paper: str, **changes: Any) -> Algorithm:
    """The parent with some choices changed, and its note from `ladder.algorithm_notes`."""
    return patch(parent, name, paper, note=NOTES.get(name, ""), **changes)


# fmt: off
# --- REINFORCE and its baselines -------------------------------------------------------------------------------------

REINFORCE    = Algorithm(name="reinforce", paper="Williams 1992")
EMA          = _patch(REINFORCE, "reinforce_ema", "Williams 1992", baseline=Ema(decay=0.95))
RAE          = _patch(EMA,       "rae",          "2506.24119", baseline=SourceEma())
RLOO         = _patch(REINFORCE, "rloo",         "2402.14740", baseline=Others(),
                                                               pull=KL(coef=0.03, estimator="k1", placement="reward"))
REMAX        = _patch(REINFORCE, "remax",        "2310.10505", baseline=Greedy())
OPO          = _patch(REINFORCE, "opo",          "2505.23585", baseline=LengthMean())
OTB          = _patch(REINFORCE, "otb",          "Li et al. 2026", baseline=EnergyMean())
GPG          = _patch(REINFORCE, "gpg",          "2504.02546", baseline=GroupMean(), scale="mixed_share",
                                                               aggregate="token_mean")
OPMD         = _patch(REINFORCE, "opmd",         "2505.17826", baseline=SoftMean(tau=1.0))
PKPO         = _patch(REINFORCE, "pkpo",         "2505.15201", shape=(BestOf(k=4, gain=True),))
MAXRL_SUCCESS = _patch(REINFORCE, "maxrl_success", "2602.02710", scale="group_mean")
KIMI         = _patch(REINFORCE, "kimi_k15",     "2501.12599", baseline=GroupMean(), pull=SequenceL2(coef=0.1),
                                                               anchor="start", curriculum=Priority(floor=0.05))
DRO          = _patch(KIMI,      "dro",          "2405.19107", pull=TokenL2(coef=0.025), aggregate="token_mean",
                                                               curriculum=None)
TOPR         = _patch(REINFORCE, "topr",         "2503.14286", ratio="sequence_product", clip=Taper(cap=1.0),
                                                               shape=(Signed(),))

# --- PPO and learned values ------------------------------------------------------------------------------------------

PPO          = _patch(REINFORCE, "ppo",          "1707.06347", baseline=Value(gae_lambda=0.95), whiten="token",
                                                               ratio="token", anchor="start",
                                                               clip=Clip(low=0.2, high=0.2), aggregate="token_mean")
DUAL_CLIP    = _patch(PPO,       "dual_clip",    "1912.09729", clip=Clip(low=0.2, high=0.2, cap=3.0))
PRIME        = _patch(PPO,       "prime",        "2502.01456", baseline=ImplicitOthers(), whiten=None, filter="mixed")
V_TRACE      = _patch(PPO,       "v_trace",      "1802.01561", baseline=Value(gae_lambda=1.0, clip=None, trace=1.0),
                                                               correction=(Truncate(cap=1.0),), whiten=None)
VAPO         = _patch(PPO,       "vapo",         "2504.05118", baseline=Value(gae_lambda=1.0, length_alpha=0.05,
                                                                              warmup=5),
                                                               clip=Clip(low=0.2, high=0.28), imitate=Imitate(coef=0.1))
REINFORCE_PP = _patch(PPO,       "reinforce_pp", "2501.03262", baseline=ToGo(),
                                                               pull=KL(coef=0.001, estimator="k1", placement="reward"))
REINFORCE_PP_BASELINE = _patch(REINFORCE_PP, "reinforce_pp_baseline", "2501.03262", baseline=GroupMean(),
                                                               pull=KL(coef=0.001, estimator="k2", placement="loss"))

# --- GRPO and its children -------------------------------------------------------------------------------------------

GRPO         = _patch(PPO,       "grpo",         "2402.03300", baseline=GroupMean(), scale="group_std", whiten=None,
                                                               aggregate="sequence_mean",
                                                               pull=KL(coef=0.04, estimator="k3", placement="loss"))
GRPO_PROCESS = _patch(GRPO,      "grpo_process", "2402.03300", baseline=StepMean())
MT_GRPO      = _patch(GRPO,      "mt_grpo",      "2505.11821", baseline=TurnMean(), pull=None)
GIGPO        = _patch(GRPO,      "gigpo",        "2505.10978", baseline=AnchorMean(), pull=None)
TWO_SIDED    = _patch(GRPO,      "two_sided",    "2505.07291", clip=Clip(low=0.2, high=0.2, cap=4.0),
                                                               pull=KL(coef=0.001, estimator="k3", placement="loss"))
DEEPSEEK_V32 = _patch(GRPO,      "deepseek_v32", "2512.02556", pull=KL(coef=0.04, estimator="rk3", placement="loss"),
                                                               correction=(NegativeMask(delta=0.5),))
GDPO         = _patch(GRPO,      "gdpo",         "2601.05242", rewards="each", whiten="sample")
PASS_AT_K    = _patch(GRPO,      "pass_at_k",    "2508.10751", shape=(BestOf(k=4),), scale="best_std")
GRPO_PASS_AT_K = _patch(GRPO,    "grpo_passk",   "2503.19595", baseline=SecondBest(), pull=None)
LUFFY        = _patch(GRPO,      "luffy",        "2504.14945", shown=Shown(siblings=1, gamma=0.1), pull=None)
CHORD        = _patch(GRPO,      "chord",        "2508.11408", shown=Shown(siblings=1, gamma=None),
                                                               imitate=Imitate(coef=0.1, of="shown", unsure=True),
                                                               pull=None)
DECOUPLED    = _patch(GRPO,      "decoupled_ppo", "2505.24298", correction=(Truncate(cap=None),), pull=None)
TIS          = _patch(GRPO,      "tis",          "Yao 2025", correction=(Truncate(cap=2.0),), pull=None)
ICEPOP       = _patch(GRPO,      "icepop",       "2510.18855", correction=(Mask(low=0.5, high=5.0),), pull=None)
VCPO         = _patch(GRPO,      "vcpo",         "2602.17616", baseline=OffPolicyMean(), ratio="sequence_product",
                                                               anchor="behaviour", clip=Cap(low=0.0, high=8.0),
                                                               step_scale=EffectiveSize(), pull=None)
A3PO         = _patch(DECOUPLED, "a3po",         "2512.06547", anchor="proximal")
M2PO         = _patch(GRPO,      "m2po",         "2510.01161", tokens=SecondMoment(limit=0.04), clip=None,
                                                               anchor="behaviour", aggregate="prompt_mean", pull=None)
LITE_PPO     = _patch(GRPO,      "lite_ppo",     "2508.08221", scale="batch_std", aggregate="token_mean", pull=None)
GMPO         = _patch(GRPO,      "gmpo",         "2507.20673", clip=Geometric(low=0.4, high=0.4), pull=None)
SAPO         = _patch(GRPO,      "sapo",         "2511.20347", clip=Soft(tau=1.0, tau_negative=1.05), pull=None)
GSPO         = _patch(GRPO,      "gspo",         "2507.18071", ratio="sequence_mean", clip=Clip(low=3e-4, high=4e-4),
                                                               pull=None)
GSPO_TOKEN   = _patch(GSPO,      "gspo_token",   "2507.18071", ratio="sequence_token")
LUSPO        = _patch(GSPO,      "luspo",        "2602.05261", clip=Clip(low=2e-3, high=2.5e-3),
                                                               aggregate="sequence_sum")
VESPO        = _patch(GRPO,      "vespo",        "2602.10693", ratio="sequence_product", clip=Hump(), pull=None)
CISPO        = _patch(GRPO,      "cispo",        "2506.13585", clip=Cap(low=0.0, high=5.0), aggregate="prompt_mean",
                                                               filter="mixed", pull=None)
AIPO         = _patch(REINFORCE, "aipo",         "2505.24034", baseline=GroupMean(), ratio="token",
                                                               clip=Cap(low=0.0, high=4.0), aggregate="token_mean")
CLIP_COV     = _patch(GRPO,      "clip_cov",     "2505.22617", tokens=ClipCov(), aggregate="token_mean", pull=None)
KL_COV       = _patch(GRPO,      "kl_cov",       "2505.22617", tokens=KlCov(), clip=None, aggregate="token_mean",
                                                               pull=None)
TOP_ENTROPY  = _patch(GRPO,      "top_entropy",  "2506.01939", tokens=TopEntropy(share=0.2), pull=None)
SKYWORK      = _patch(GRPO,      "skywork_or1",  "2505.22312", entropy=EntropyBonus(coef=0.0, target=0.2, delta=0.005),
                                                               aggregate="token_mean", filter="mixed", pull=None)

DAPO         = _patch(GRPO,      "dapo",         "2503.14476", clip=Clip(low=0.2, high=0.28), filter="mixed",
                                                               aggregate="prompt_mean",
                                                               shape=(Signed(), Overlong(cache=0.2)), pull=None)
FIPO         = _patch(DAPO,      "fipo",         "2603.19835", clip=FutureKL())
MAGISTRAL    = _patch(DAPO,      "magistral",    "2506.10910", scale="one", whiten="sample")
SCALERL      = _patch(CISPO,     "scalerl",      "2510.13786", scale="one", whiten="sample", anchor="behaviour",
                                                               curriculum=NoEasy(rate=0.9))

DR_GRPO      = _patch(GRPO,      "dr_grpo",      "2503.20783", scale="one", aggregate="constant", pull=None)
MAXRL        = _patch(DR_GRPO,   "maxrl",        "2602.02710", scale="group_mean")
DPPO         = _patch(DR_GRPO,   "dppo",         "2602.04879", anchor="behaviour",
                                                               clip=Divergence(measure="tv", delta=0.15))
PRIME_RL     = _patch(DPPO,      "prime_rl",     "prime-rl loss.py", clip=Divergence(measure="tv", delta=0.2,
                                                                               cap=float("inf")),
                                                               aggregate="token_mean", pull=TokenL2(coef=1e-3))
ECHO         = _patch(PRIME_RL, "echo",        "prime-rl echo.py", imitate=Imitate(coef=0.1, of="heard"))
DPPO_KL      = _patch(DPPO,      "dppo_kl",      "2602.04879", clip=Divergence(measure="kl", delta=0.05))
DPPO_TOP     = _patch(DPPO,      "dppo_top",     "2602.04879", clip=Divergence(measure="tv", delta=0.15, top=8))

# --- on-policy distillation ------------------------------------------------------------------------------------------

OPD          = _patch(REINFORCE, "opd",          "Thinking Machines 2025", rewards="none", ratio="token",
                                                               aggregate="token_mean",
                                                               pull=KL(coef=1.0, estimator="k1", placement="token"))
IW_OPD       = _patch(OPD,       "iw_opd",       "2606.22600", pull=KL(coef=1.0, estimator="k1", placement="token",
                                                                       early=0.5))
MOPD         = _patch(OPD,       "mopd",         "2601.02780", ratio="one", anchor="start",
                                                               correction=(Mask(low=0.2, high=5.0),))
GKD          = _patch(REINFORCE, "gkd",          "2306.13649", rewards="none", distill=Distill(beta=0.5),
                                                               aggregate="token_mean")
SDPO         = _patch(GKD,       "sdpo",         "2601.20802", distill=Distill(beta=0.5, top=100),
                                                               hint=Hint(weights="average"))
SDFT         = _patch(SDPO,      "sdft",         "2601.19897", hint=Hint(of="answer", weights="start"),
                                                               aggregate="sequence_mean")

# fmt: on
# Collected by type, in the order of definition: no list of names could miss a row.
LADDER: dict[str, Algorithm] = {a.name: a for a in list(globals().values()) if isinstance(a, Algorithm)}
"""All algorithms above, by name."""


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or ConfigError with the nearest one."""
    if name not in LADDER:
        raise ConfigError(f"algorithm={name}: no such algorithm; {nearest(name, LADDER)}")
    return LADDER[name]
