"""Every algorithm of the ladder and further patches, each with the objective it claims to be. Laws run over this
table."""

from __future__ import annotations

from dataclasses import replace

import textbooks as t
import textbooks_family as f
import textbooks_mismatch as m
import textbooks_stale as s
from law_toys import NOW
from law_world import Book

from posttrain.algorithm.steer import AdaptiveState, steered
from posttrain.core import ladder
from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.pieces.baseline import GroupMean, Value
from posttrain.core.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.core.pieces.implicit import ImplicitOthers
from posttrain.core.pieces.pull import KL
from posttrain.core.pieces.shape import BestOf
from posttrain.core.pieces.token import ClipCov, Distill, EntropyBonus, KlCov, SecondMoment
from posttrain.core.pieces.trust import Cap, Clip, Divergence, FutureKL, Geometric

Case = tuple[Algorithm, Book]


THE_LADDER: list[Case] = [
    (ladder.REINFORCE, t.reinforce),
    (ladder.EMA, t.reinforce_ema),
    (ladder.RAE, t.reinforce_ema),
    (ladder.RLOO, t.rloo),
    (ladder.REMAX, t.remax),
    (ladder.OPO, t.opo),
    (ladder.OTB, t.otb),
    (ladder.GPG, t.gpg),
    (ladder.OPMD, lambda eps: 2 * t.opmd(eps)),
    (ladder.PKPO, t.pkpo),
    (ladder.MAXRL_SUCCESS, t.maxrl_success),
    (ladder.KIMI, t.kimi),
    (ladder.DRO, s.dro),
    (ladder.TOPR, t.topr),
    (ladder.PPO, t.ppo),
    (ladder.DUAL_CLIP, t.dual_clip),
    (ladder.PRIME, f.prime(0.05)),
    (ladder.V_TRACE, t.v_trace(1.0)),
    (ladder.VAPO, t.vapo()),
    (ladder.REINFORCE_PP, t.reinforce_pp),
    (ladder.REINFORCE_PP_BASELINE, t.reinforce_pp_baseline),
    (ladder.GRPO, t.grpo),
    (ladder.GRPO_PROCESS, f.grpo_process),
    (ladder.MT_GRPO, f.mt_grpo),
    (ladder.GIGPO, f.gigpo),
    (ladder.TWO_SIDED, f.two_sided),
    (ladder.DEEPSEEK_V32, f.deepseek_v32(0.5)),
    (ladder.GDPO, f.gdpo),
    (ladder.PASS_AT_K, f.pass_at_k(4)),
    (ladder.GRPO_PASS_AT_K, f.grpo_passk),
    (ladder.LUFFY, f.luffy),
    (ladder.CHORD, lambda eps: 1.1 * f.chord(1 / 11)(eps)),
    (ladder.DECOUPLED, m.decoupled),
    (ladder.TIS, s.tis),
    (ladder.ICEPOP, s.icepop),
    (ladder.VCPO, s.vcpo()),
    (ladder.A3PO, m.a3po(NOW)),
    (ladder.M2PO, f.m2po(0.04)),
    (ladder.LITE_PPO, f.lite_ppo),
    (ladder.GMPO, f.gmpo(0.4, 0.4)),
    (ladder.SAPO, f.sapo),
    (ladder.GSPO, f.gspo(3e-4, 4e-4)),
    (ladder.GSPO_TOKEN, f.gspo_token(3e-4, 4e-4)),
    (ladder.LUSPO, s.luspo(2e-3, 2.5e-3)),
    (ladder.VESPO, f.vespo),
    (ladder.CISPO, f.cispo(5.0)),
    (ladder.AIPO, f.aipo(4.0)),
    (ladder.CLIP_COV, lambda eps: -t.tokens(t.clipped(eps, t.by_group(eps, t.standard)))),
    (ladder.KL_COV, f.kl_cov(0.002)),
    (ladder.TOP_ENTROPY, f.top_entropy),
    (ladder.SKYWORK, f.skywork(0.0)),
    (ladder.DAPO, f.dapo),
    (ladder.FIPO, f.fipo),
    (ladder.MAGISTRAL, f.magistral),
    (ladder.SCALERL, f.scalerl),
    (ladder.DR_GRPO, t.dr_grpo),
    (ladder.MAXRL, f.maxrl),
    (ladder.DPPO, f.dppo(f.far_tv)),
    (ladder.PRIME_RL, f.prime_rl),
    (ladder.ECHO, f.prime_rl),
    (ladder.DPPO_KL, f.dppo(f.far_kl)),
    (ladder.DPPO_TOP, f.dppo(f.far_top(8, "tv", 0.15))),
    (ladder.OPD, f.opd),
    (ladder.IW_OPD, s.iw_opd),
    (ladder.MOPD, s.mopd),
    (ladder.GKD, f.gkd(0.5)),
    (ladder.SDPO, f.gkd(0.5)),
    (ladder.SDFT, s.sdft),
]
"""With the defaults of each line. Clip-Cov's share of 2e-4 silences nothing in a step this small."""

TIGHT: list[Case] = [
    (patch(ladder.PPO, "ppo_plain", "-", whiten=None, baseline=Value(clip=None)), lambda eps: t.ppo(eps, False, None)),
    (patch(ladder.PRIME, "prime_loud", "-", baseline=ImplicitOthers(beta=2.0)), f.prime(2.0)),
    (patch(ladder.REMAX, "remax_kl", "-", pull=KL(coef=0.1, estimator="k1", placement="reward")), t.remax_kl),
    (patch(ladder.VAPO, "vapo_adaptive", "-", baseline=Value(gae_lambda=1.0, length_alpha=0.5)), t.vapo(0.5)),
    (patch(ladder.PKPO, "pkpo_2", "-", shape=(BestOf(k=2, gain=True),)), lambda eps: t.pkpo(eps, 2)),
    (patch(ladder.PASS_AT_K, "pass_at_2", "-", shape=(BestOf(k=2),)), f.pass_at_k(2)),
    (patch(ladder.DUAL_CLIP, "dual_clip_tight", "-", clip=Clip(cap=1.3)), lambda eps: t.dual_clip(eps, 1.3)),
    (patch(ladder.TWO_SIDED, "two_sided_tight", "-", clip=Clip(cap=1.3)), f.two_sided_at(1.3)),
    (patch(ladder.DEEPSEEK_V32, "deepseek_tight", "-", correction=(NegativeMask(delta=0.05),)), f.deepseek_v32(0.05)),
    (patch(ladder.GMPO, "gmpo_tight", "-", clip=Geometric(low=0.1, high=0.2)), f.gmpo(0.1, 0.2)),
    (patch(ladder.GSPO, "gspo_wide", "-", clip=Clip(low=0.03, high=0.04)), f.gspo(0.03, 0.04)),
    (patch(ladder.LUSPO, "luspo_wide", "-", clip=Clip(low=0.03, high=0.04)), s.luspo(0.03, 0.04)),
    (patch(ladder.VCPO, "vcpo_tight", "-", clip=Cap(high=1.1)), s.vcpo(1.1)),
    (patch(ladder.GSPO_TOKEN, "gspo_token_wide", "-", clip=Clip(low=0.03, high=0.04)), f.gspo_token(0.03, 0.04)),
    (patch(ladder.PPO, "gspo_token_values", "-", ratio="sequence_token"), f.gspo_token_process),
    (patch(ladder.CISPO, "cispo_tight", "-", clip=Cap(high=1.1)), f.cispo(1.1)),
    (patch(ladder.AIPO, "aipo_tight", "-", clip=Cap(high=1.1)), f.aipo(1.1)),
    (patch(ladder.CLIP_COV, "clip_cov_band", "-", tokens=ClipCov(share=1.0, low=0.2, high=0.8)), f.clip_cov(0.2, 0.8)),
    (patch(ladder.KL_COV, "kl_cov_share", "-", tokens=KlCov(share=0.2)), f.kl_cov(0.2)),
    (patch(ladder.M2PO, "m2po_tight", "-", tokens=SecondMoment(limit=0.01)), f.m2po(0.01)),
    (patch(ladder.M2PO, "m2po_all", "-", tokens=SecondMoment(of="all")), f.m2po(0.04, outward=False)),
    (replace(steered(ladder.SKYWORK, AdaptiveState(entropy=0.015)), name="skywork_steered"), f.skywork(0.015)),
    (
        patch(ladder.FIPO, "fipo_tight", "-", clip=FutureKL(band_low=0.0, loud=1.1, ignore=1.3)),
        lambda eps: f.fipo(eps, (0.0, 0.2), 1.1, 1.3),
    ),
    (
        patch(ladder.DPPO, "dppo_uncapped", "-", clip=Divergence(delta=0.05, cap=1e9)),
        f.dppo(f.far_top(0, "tv", 0.05), None),
    ),
    (
        patch(ladder.DPPO, "dppo_capped", "-", clip=Divergence(delta=0.05, cap=1.05)),
        f.dppo(f.far_top(0, "tv", 0.05), 1.05),
    ),
    (
        patch(ladder.DPPO_TOP, "dppo_top2_kl", "-", clip=Divergence(measure="kl", delta=0.05, top=2)),
        f.dppo(f.far_top(2, "kl", 0.05)),
    ),
    (patch(ladder.GKD, "gkd_forward", "-", distill=Distill(beta=0.0)), f.gkd(0.0)),
    (patch(ladder.GKD, "gkd_reverse", "-", distill=Distill(beta=1.0)), f.gkd(1.0)),
    (patch(ladder.GKD, "gkd_leaning", "-", distill=Distill(beta=0.1)), f.gkd(0.1)),
    (patch(ladder.GKD, "gkd_top", "-", distill=Distill(beta=0.5, top=4)), f.gkd(0.5, 4)),
    (patch(ladder.REINFORCE, "whole", "-", ratio="sequence_product", clip=Clip(low=0.5, high=0.5)), f.whole_answer),
    (patch(ladder.GRPO, "rk3", "-", pull=KL(coef=0.04, estimator="rk3")), f.grpo_rk3),
    (patch(ladder.GRPO, "k2", "-", pull=KL(coef=0.04, estimator="k2")), f.grpo_k2),
    (patch(ladder.RLOO, "k3_both", "-", pull=KL(coef=0.03, estimator="k3", placement="both")), t.rloo_k3_both),
    (patch(ladder.DR_GRPO, "entropy", "-", entropy=EntropyBonus(coef=0.01)), f.entropy_bonus),
    (
        patch(ladder.REINFORCE, "batch_std", "-", baseline=GroupMean(), scale="batch_std", aggregate="token_mean"),
        m.batch_scaled_mean,
    ),
]
"""Numbers that bite in a small step, and choices the ladder leaves out."""


def on_dr_grpo(name: str, *pieces: Correction) -> Algorithm:
    return patch(ladder.DR_GRPO, name, "-", correction=pieces)


MISMATCH: list[Case] = [
    (on_dr_grpo("tis_tight", Truncate(cap=1.1)), m.corrected(m.tis(1.1))),
    (on_dr_grpo("seq_tis", Truncate(cap=1.1, level="sequence")), m.corrected(m.sequence_tis(1.1))),
    (on_dr_grpo("icepop_tight", Mask(low=0.8, high=1.2)), m.corrected(m.icepop(0.8, 1.2))),
    (on_dr_grpo("mis", Mask(low=0.7, high=1.4, level="sequence")), m.corrected(m.sequence_mis(0.7, 1.4))),
    (on_dr_grpo("kpop", BinaryKL(phi=0.01)), m.corrected(m.kpop(0.01))),
    (on_dr_grpo("geo_rs", Reject(low=0.9, high=1.1)), m.corrected(m.geo_rs(0.9, 1.1))),
    (on_dr_grpo("veto", Veto(below=0.7)), m.corrected(m.veto(0.7))),
    (on_dr_grpo("negative_mask", NegativeMask(delta=0.05)), m.negative_mask(0.05)),
    (
        on_dr_grpo("tis_geo_rs_veto", Truncate(cap=1.1), Reject(low=0.9, high=1.1), Veto(below=0.7)),
        m.corrected(m.tis(1.1), m.geo_rs(0.9, 1.1), m.veto(0.7)),
    ),
    (patch(ladder.REINFORCE, "uncapped", "-", correction=(Truncate(cap=None),)), m.uncapped_reinforce),
    (
        patch(ladder.V_TRACE, "v_trace_lambda", "-", baseline=Value(gae_lambda=0.9, clip=None, trace=1.0)),
        t.v_trace(0.9),
    ),
    (
        patch(
            ladder.GSPO,
            "gspo_seq_tis",
            "-",
            clip=Clip(low=0.03, high=0.04),
            correction=(Truncate(cap=1.1, level="sequence"),),
        ),
        m.gspo_sequence_tis,
    ),
    (
        patch(ladder.SAPO, "sapo_icepop_veto", "-", correction=(Mask(low=0.8, high=1.2), Veto(below=0.7))),
        m.sapo_icepop_veto,
    ),
    (
        patch(ladder.DAPO, "dapo_geo_negative", "-", correction=(Reject(low=0.9, high=1.1), NegativeMask(delta=0.1))),
        m.dapo_geo_rs_negative,
    ),
    (
        patch(
            ladder.CISPO,
            "cispo_tis_entropy",
            "-",
            clip=Cap(high=1.2),
            correction=(Truncate(cap=1.1),),
            entropy=EntropyBonus(coef=0.01),
        ),
        m.cispo_tis_entropy,
    ),
    (patch(ladder.KIMI, "kimi_in_band", "-", correction=(Mask(low=0.7, high=1.4, level="sequence"),)), m.kimi_in_band),
]
"""Corrections alone and with other pieces."""

CASES: list[Case] = THE_LADDER + TIGHT + MISMATCH
ALL = [a for a, _ in CASES]
NAMES = [a.name for a in ALL]
