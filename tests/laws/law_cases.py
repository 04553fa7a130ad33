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

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, steered
from posttrain.ladder import policy_rows
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import GroupMean, Value
from posttrain.ladder.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.pieces.token_choice import ClipCov, Distill, EntropyBonus, KlCov, SecondMoment
from posttrain.ladder.pieces.trust_region import Cap, Clip, Divergence, FutureKL, Geometric

Case = tuple[Algorithm, Book]


THE_LADDER: list[Case] = [
    (policy_rows.REINFORCE, t.reinforce),
    (policy_rows.EMA, t.reinforce_ema),
    (policy_rows.RAE, t.reinforce_ema),
    (policy_rows.RLOO, t.rloo),
    (policy_rows.REMAX, t.remax),
    (policy_rows.OPO, t.opo),
    (policy_rows.OTB, t.otb),
    (policy_rows.GPG, t.gpg),
    (policy_rows.OPMD, lambda eps: 2 * t.opmd(eps)),
    (policy_rows.PKPO, t.pkpo),
    (policy_rows.MAXRL_SUCCESS, t.maxrl_success),
    (policy_rows.KIMI, t.kimi),
    (policy_rows.DRO, s.dro),
    (policy_rows.TOPR, t.topr),
    (policy_rows.PPO, t.ppo),
    (policy_rows.DUAL_CLIP, t.dual_clip),
    (policy_rows.PRIME, f.prime(0.05)),
    (policy_rows.V_TRACE, t.v_trace(1.0)),
    (policy_rows.VAPO, t.vapo()),
    (policy_rows.REINFORCE_PP, t.reinforce_pp),
    (policy_rows.REINFORCE_PP_BASELINE, t.reinforce_pp_baseline),
    (policy_rows.GRPO, t.grpo),
    (policy_rows.GRPO_PROCESS, f.grpo_process),
    (policy_rows.MT_GRPO, f.mt_grpo),
    (policy_rows.GIGPO, f.gigpo),
    (policy_rows.TWO_SIDED, f.two_sided),
    (policy_rows.DEEPSEEK_V32, f.deepseek_v32(0.5)),
    (policy_rows.GDPO, f.gdpo),
    (policy_rows.PASS_AT_K, f.pass_at_k(4)),
    (policy_rows.GRPO_PASS_AT_K, f.grpo_passk),
    (policy_rows.LUFFY, f.luffy),
    (policy_rows.CHORD, lambda eps: 1.1 * f.chord(1 / 11)(eps)),
    (policy_rows.DECOUPLED, m.decoupled),
    (policy_rows.TIS, s.tis),
    (policy_rows.ICEPOP, s.icepop),
    (policy_rows.VCPO, s.vcpo()),
    (policy_rows.A3PO, m.a3po(NOW)),
    (policy_rows.M2PO, f.m2po(0.04)),
    (policy_rows.LITE_PPO, f.lite_ppo),
    (policy_rows.GMPO, f.gmpo(0.4, 0.4)),
    (policy_rows.SAPO, f.sapo),
    (policy_rows.GSPO, f.gspo(3e-4, 4e-4)),
    (policy_rows.GSPO_TOKEN, f.gspo_token(3e-4, 4e-4)),
    (policy_rows.LUSPO, s.luspo(2e-3, 2.5e-3)),
    (policy_rows.VESPO, f.vespo),
    (policy_rows.CISPO, f.cispo(5.0)),
    (policy_rows.AIPO, f.aipo(4.0)),
    (policy_rows.CLIP_COV, lambda eps: -t.tokens(t.clipped(eps, t.by_group(eps, t.standard)))),
    (policy_rows.KL_COV, f.kl_cov(0.002)),
    (policy_rows.TOP_ENTROPY, f.top_entropy),
    (policy_rows.SKYWORK, f.skywork(0.0)),
    (policy_rows.DAPO, f.dapo),
    (policy_rows.FIPO, f.fipo),
    (policy_rows.MAGISTRAL, f.magistral),
    (policy_rows.SCALERL, f.scalerl),
    (policy_rows.DR_GRPO, t.dr_grpo),
    (policy_rows.MAXRL, f.maxrl),
    (policy_rows.DPPO, f.dppo(f.far_tv)),
    (policy_rows.PRIME_RL, f.prime_rl),
    (policy_rows.ECHO, f.prime_rl),
    (policy_rows.DPPO_KL, f.dppo(f.far_kl)),
    (policy_rows.DPPO_TOP, f.dppo(f.far_top(8, "tv", 0.15))),
    (policy_rows.OPD, f.opd),
    (policy_rows.IW_OPD, s.iw_opd),
    (policy_rows.MOPD, s.mopd),
    (policy_rows.GKD, f.gkd(0.5)),
    (policy_rows.SDPO, f.gkd(0.5)),
    (policy_rows.SDFT, s.sdft),
]
"""With the defaults of each line. Clip-Cov's share of 2e-4 silences nothing in a step this small."""

TIGHT: list[Case] = [
    (
        patch(policy_rows.PPO, "ppo_plain", "-", whiten=None, baseline=Value(clip=None)),
        lambda eps: t.ppo(eps, False, None),
    ),
    (patch(policy_rows.PRIME, "prime_loud", "-", baseline=ImplicitOthers(beta=2.0)), f.prime(2.0)),
    (patch(policy_rows.REMAX, "remax_kl", "-", pull=KL(coef=0.1, estimator="k1", placement="reward")), t.remax_kl),
    (patch(policy_rows.VAPO, "vapo_adaptive", "-", baseline=Value(gae_lambda=1.0, length_alpha=0.5)), t.vapo(0.5)),
    (patch(policy_rows.PKPO, "pkpo_2", "-", shape=(BestOf(k=2, gain=True),)), lambda eps: t.pkpo(eps, 2)),
    (patch(policy_rows.PASS_AT_K, "pass_at_2", "-", shape=(BestOf(k=2),)), f.pass_at_k(2)),
    (patch(policy_rows.DUAL_CLIP, "dual_clip_tight", "-", clip=Clip(cap=1.3)), lambda eps: t.dual_clip(eps, 1.3)),
    (patch(policy_rows.TWO_SIDED, "two_sided_tight", "-", clip=Clip(cap=1.3)), f.two_sided_at(1.3)),
    (
        patch(policy_rows.DEEPSEEK_V32, "deepseek_tight", "-", correction=(NegativeMask(delta=0.05),)),
        f.deepseek_v32(0.05),
    ),
    (patch(policy_rows.GMPO, "gmpo_tight", "-", clip=Geometric(low=0.1, high=0.2)), f.gmpo(0.1, 0.2)),
    (patch(policy_rows.GSPO, "gspo_wide", "-", clip=Clip(low=0.03, high=0.04)), f.gspo(0.03, 0.04)),
    (patch(policy_rows.LUSPO, "luspo_wide", "-", clip=Clip(low=0.03, high=0.04)), s.luspo(0.03, 0.04)),
    (patch(policy_rows.VCPO, "vcpo_tight", "-", clip=Cap(high=1.1)), s.vcpo(1.1)),
    (patch(policy_rows.GSPO_TOKEN, "gspo_token_wide", "-", clip=Clip(low=0.03, high=0.04)), f.gspo_token(0.03, 0.04)),
    (patch(policy_rows.PPO, "gspo_token_values", "-", ratio="sequence_token"), f.gspo_token_process),
    (patch(policy_rows.CISPO, "cispo_tight", "-", clip=Cap(high=1.1)), f.cispo(1.1)),
    (patch(policy_rows.AIPO, "aipo_tight", "-", clip=Cap(high=1.1)), f.aipo(1.1)),
    (
        patch(policy_rows.CLIP_COV, "clip_cov_band", "-", tokens=ClipCov(share=1.0, low=0.2, high=0.8)),
        f.clip_cov(0.2, 0.8),
    ),
    (patch(policy_rows.KL_COV, "kl_cov_share", "-", tokens=KlCov(share=0.2)), f.kl_cov(0.2)),
    (patch(policy_rows.M2PO, "m2po_tight", "-", tokens=SecondMoment(limit=0.01)), f.m2po(0.01)),
    (patch(policy_rows.M2PO, "m2po_all", "-", tokens=SecondMoment(of="all")), f.m2po(0.04, outward=False)),
    (replace(steered(policy_rows.SKYWORK, AdaptiveState(entropy=0.015)), name="skywork_steered"), f.skywork(0.015)),
    (
        patch(policy_rows.FIPO, "fipo_tight", "-", clip=FutureKL(band_low=0.0, loud=1.1, ignore=1.3)),
        lambda eps: f.fipo(eps, (0.0, 0.2), 1.1, 1.3),
    ),
    (
        patch(policy_rows.DPPO, "dppo_uncapped", "-", clip=Divergence(delta=0.05, cap=1e9)),
        f.dppo(f.far_top(0, "tv", 0.05), None),
    ),
    (
        patch(policy_rows.DPPO, "dppo_capped", "-", clip=Divergence(delta=0.05, cap=1.05)),
        f.dppo(f.far_top(0, "tv", 0.05), 1.05),
    ),
    (
        patch(policy_rows.DPPO_TOP, "dppo_top2_kl", "-", clip=Divergence(measure="kl", delta=0.05, top=2)),
        f.dppo(f.far_top(2, "kl", 0.05)),
    ),
    (patch(policy_rows.GKD, "gkd_forward", "-", distill=Distill(beta=0.0)), f.gkd(0.0)),
    (patch(policy_rows.GKD, "gkd_reverse", "-", distill=Distill(beta=1.0)), f.gkd(1.0)),
    (patch(policy_rows.GKD, "gkd_leaning", "-", distill=Distill(beta=0.1)), f.gkd(0.1)),
    (patch(policy_rows.GKD, "gkd_top", "-", distill=Distill(beta=0.5, top=4)), f.gkd(0.5, 4)),
    (
        patch(policy_rows.REINFORCE, "whole", "-", ratio="sequence_product", clip=Clip(low=0.5, high=0.5)),
        f.whole_answer,
    ),
    (patch(policy_rows.GRPO, "rk3", "-", pull=KL(coef=0.04, estimator="rk3")), f.grpo_rk3),
    (patch(policy_rows.GRPO, "k2", "-", pull=KL(coef=0.04, estimator="k2")), f.grpo_k2),
    (patch(policy_rows.RLOO, "k3_both", "-", pull=KL(coef=0.03, estimator="k3", placement="both")), t.rloo_k3_both),
    (patch(policy_rows.DR_GRPO, "entropy", "-", entropy=EntropyBonus(coef=0.01)), f.entropy_bonus),
    (
        patch(policy_rows.REINFORCE, "batch_std", "-", baseline=GroupMean(), scale="batch_std", aggregate="token_mean"),
        m.batch_scaled_mean,
    ),
]
"""Numbers that bite in a small step, and choices the ladder leaves out."""


def on_dr_grpo(name: str, *pieces: Correction) -> Algorithm:
    return patch(policy_rows.DR_GRPO, name, "-", correction=pieces)


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
    (patch(policy_rows.REINFORCE, "uncapped", "-", correction=(Truncate(cap=None),)), m.uncapped_reinforce),
    (
        patch(policy_rows.V_TRACE, "v_trace_lambda", "-", baseline=Value(gae_lambda=0.9, clip=None, trace=1.0)),
        t.v_trace(0.9),
    ),
    (
        patch(
            policy_rows.GSPO,
            "gspo_seq_tis",
            "-",
            clip=Clip(low=0.03, high=0.04),
            correction=(Truncate(cap=1.1, level="sequence"),),
        ),
        m.gspo_sequence_tis,
    ),
    (
        patch(policy_rows.SAPO, "sapo_icepop_veto", "-", correction=(Mask(low=0.8, high=1.2), Veto(below=0.7))),
        m.sapo_icepop_veto,
    ),
    (
        patch(
            policy_rows.DAPO, "dapo_geo_negative", "-", correction=(Reject(low=0.9, high=1.1), NegativeMask(delta=0.1))
        ),
        m.dapo_geo_rs_negative,
    ),
    (
        patch(
            policy_rows.CISPO,
            "cispo_tis_entropy",
            "-",
            clip=Cap(high=1.2),
            correction=(Truncate(cap=1.1),),
            entropy=EntropyBonus(coef=0.01),
        ),
        m.cispo_tis_entropy,
    ),
    (
        patch(policy_rows.KIMI, "kimi_in_band", "-", correction=(Mask(low=0.7, high=1.4, level="sequence"),)),
        m.kimi_in_band,
    ),
]
"""Corrections alone and with other pieces."""

CASES: list[Case] = THE_LADDER + TIGHT + MISMATCH
ALL = [a for a, _ in CASES]
NAMES = [a.name for a in ALL]
