"""The ladder: every algorithm is a patch on its predecessor. Formulas, defaults and numeric cases: docs/algorithms.md.

Adding one is a line here and, when it needs a new piece, one type in `core.pieces` and one function of the mathematics
(`algorithm`).
"""

from __future__ import annotations

from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.pieces.baseline import (
    AnchorMean,
    Ema,
    EnergyMean,
    Greedy,
    GroupMean,
    LengthMean,
    Others,
    SecondBest,
    SoftMean,
    StepMean,
    ToGo,
    TurnMean,
    Value,
)
from posttrain.core.pieces.correction import NegativeMask, Truncate
from posttrain.core.pieces.pull import KL, SequenceL2, TokenL2
from posttrain.core.pieces.shape import BestOf, Overlong, Signed
from posttrain.core.pieces.token import (
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
from posttrain.core.pieces.trust import Cap, Clip, Divergence, FutureKL, Geometric, Hump, Soft, Taper

# fmt: off
# --- REINFORCE and its baselines -------------------------------------------------------------------------------------

REINFORCE = Algorithm(name="reinforce", paper="Williams 1992")
EMA = patch(REINFORCE, "reinforce_ema", "Williams 1992", baseline=Ema(decay=0.95),
    note="a sample is compared with the baseline as it was before that sample; updating first, as some code does, biases it. SPIRAL (2506.24119) keeps one baseline a game and role")
RLOO = patch(REINFORCE, "rloo", "2402.14740", baseline=Others(), pull=KL(coef=0.03, estimator="k1", placement="reward"),
    note="sequence sum as in the paper; most peers take a token mean, newer TRL adds a ratio clip. A group of one has credit 0, where verl's loop form gives it its raw reward")
REMAX = patch(REINFORCE, "remax", "2310.10505", baseline=Greedy(),
    note="costs one greedy answer a prompt, which is judged and never learned from; no std. A KL in the reward is charged to the sample alone")
OPO = patch(REINFORCE, "opo", "2505.23585", baseline=LengthMean())
OTB = patch(REINFORCE, "otb", "Li et al. 2026", baseline=EnergyMean(),
    note="a token that only one sibling is left to say has no credit, like a group of one; verl gives it its raw reward. Under a correction verl weighs each energy by its square; here it is the learner's own")
GPG = patch(REINFORCE, "gpg", "2504.02546", baseline=GroupMean(), scale="mixed_share", aggregate="token_mean",
    note="alpha counts samples of groups with spread, as in the paper; verl counts non-zero rewards, so that rewards of +-1 switch it off")
OPMD = patch(REINFORCE, "opmd", "2505.17826", baseline=SoftMean(tau=1.0),
    note="the paper's factor 1 / (1 + tau) on the loss is left to the learning rate; b may also be the group's mean. An early version left a group of one without credit; here it is 0")
PKPO = patch(REINFORCE, "pkpo", "2505.15201", shape=(BestOf(k=4, gain=True),),
    note="the paper's loo-1 form; a leave-one-out mean of the transformed rewards would shrink the gradient by (G - k) / (G - 1)")
MAXRL_SUCCESS = patch(REINFORCE, "maxrl_success", "2602.02710", scale="group_mean",
    note="mean score over the successes alone: unbiased for the log-likelihood truncated at order G; only for rewards >= 0. The authors' code uses the centred form (maxrl)")
KIMI = patch(REINFORCE, "kimi_k15", "2501.12599", baseline=GroupMean(), pull=SequenceL2(coef=0.1), anchor="start",
    curriculum=Priority(floor=0.05),
    note="tau is not in the paper; ROLL, verl and prime-rl square token log-ratios instead; the paper also resets the optimizer every iteration")
TOPR = patch(REINFORCE, "topr", "2503.14286", ratio="sequence_product", clip=Taper(cap=1.0), shape=(Signed(),),
    note="sequence ratio as in the paper; ROLL's is per token. Without a baseline, so successes are always learned in full")

# --- PPO and learned values ------------------------------------------------------------------------------------------

PPO = patch(REINFORCE, "ppo", "1707.06347", baseline=Value(gae_lambda=0.95), whiten="token", ratio="token", anchor="start",
    clip=Clip(low=0.2, high=0.2), aggregate="token_mean",
    note="whitened with ddof 1 (peers differ); GAE over spoken tokens alone, where SkyRL's recursion runs through tool tokens. The paper's value loss has no clip and no 1/2")
DUAL_CLIP = patch(PPO, "dual_clip", "1912.09729", clip=Clip(low=0.2, high=0.2, cap=3.0), note="3 as in verl and AReaL; ROLL 1.4")
VAPO = patch(PPO, "vapo", "2504.05118", baseline=Value(gae_lambda=1.0, length_alpha=0.05, warmup=5), clip=Clip(low=0.2, high=0.28),
    imitate=Imitate(coef=0.1),
    note="the paper warms its values up for 50 steps of 8,192 samples; lambda of answers up to 20 tokens is clamped to 0")
REINFORCE_PP = patch(PPO, "reinforce_pp", "2501.03262", baseline=ToGo(), pull=KL(coef=0.001, estimator="k1", placement="reward"),
    note="whitened over tokens as in the peers, so long answers weigh more; the text says samples (whiten=sample). NeMo charges the KL to each token alone; OpenRLHF's batch variance has ddof 0, verl's and this 1")
REINFORCE_PP_BASELINE = patch(REINFORCE_PP, "reinforce_pp_baseline", "2501.03262", baseline=GroupMean(),
    pull=KL(coef=0.001, estimator="k2", placement="loss"),
    note="peers differ in where this variant's KL stands: slime charges it to each token, here it is a loss")

# --- GRPO and its children -------------------------------------------------------------------------------------------

GRPO = patch(PPO, "grpo", "2402.03300", baseline=GroupMean(), scale="group_std", whiten=None, aggregate="sequence_mean",
    pull=KL(coef=0.04, estimator="k3", placement="loss"),
    note="std is ddof 1 with no epsilon (TRL adds 1e-4, verl 1e-6, OpenRLHF 1e-9; NeMo leaves the sample out of mean and std). The paper leaves the clip range unstated (0.2 is convention). TRL's default has no KL; verl gives a group of one its raw reward, here it is 0")
GRPO_PROCESS = patch(GRPO, "grpo_process", "2402.03300", baseline=StepMean(),
    note="steps are judged by the environment; without step verdicts it is grpo")
MT_GRPO = patch(GRPO, "mt_grpo", "2505.11821", baseline=TurnMean(), pull=None,
    note="Eq. 7 as in Atropos: every turn has its own credit and the outcome's; the paper's first two-turn form gives the last turn the outcome's alone, which is the same where that turn is paid nothing. Without paid turns it is grpo without KL")
GIGPO = patch(GRPO, "gigpo", "2505.10978", baseline=AnchorMean(), pull=None,
    note="a state is what the world showed last, as in the paper; baseline.by=history where that does not tell the state. Of one turn it is grpo twice over")
TWO_SIDED = patch(GRPO, "two_sided", "2505.07291", clip=Clip(low=0.2, high=0.2, cap=4.0),
    pull=KL(coef=0.001, estimator="k3", placement="loss"))
DEEPSEEK_V32 = patch(GRPO, "deepseek_v32", "2512.02556", pull=KL(coef=0.04, estimator="rk3", placement="loss"),
    correction=(NegativeMask(delta=0.5),),
    note="delta is not in the paper; 0.5 is TRL's. Routing and sampling masks: the kept token sets of the sampler are always used here")
GDPO = patch(GRPO, "gdpo", "2601.05242", rewards="each", whiten="sample",
    note="whitened over samples like TRL; verl over tokens. A source that abstained leaves its comparison. With one reward source it is grpo, whitened")
PASS_AT_K = patch(GRPO, "pass_at_k", "2508.10751", shape=(BestOf(k=4),), scale="best_std",
    note="the spread of the best of k is over all k-subsets, ddof 0 as in the authors' code: k = 1 is grpo with that ddof")
GRPO_PASS_AT_K = patch(GRPO, "grpo_passk", "2503.19595", baseline=SecondBest(), pull=None)
LUFFY = patch(GRPO, "luffy", "2504.14945", shown=Shown(siblings=1, gamma=0.1), pull=None,
    note="the demonstrator's probability is taken as 1, as in the authors' code; a shown token is never clipped")
CHORD = patch(GRPO, "chord", "2508.11408", shown=Shown(siblings=1, gamma=None), imitate=Imitate(coef=0.1, of="shown", unsure=True),
    pull=None, note="mu stays at the valley of the paper's schedule; expert data come as shown siblings")
DECOUPLED = patch(GRPO, "decoupled_ppo", "2505.24298", correction=(Truncate(cap=None),), pull=None,
    note="the proximal policy is the learner at the start of the step; without values, as in AReaL's default")
A3PO = patch(DECOUPLED, "a3po", "2512.06547", anchor="proximal",
    note="interpolated by the versions of the weights: a token of the current weights has the sampler as its anchor")
M2PO = patch(GRPO, "m2po", "2510.01161", tokens=SecondMoment(limit=0.04), clip=None, anchor="behaviour", aggregate="prompt_mean", pull=None,
    note="the mask takes the clip's place. It is made over the whole minibatch, largest first, from start/mu; the paper makes it again from pi/mu at every update")
LITE_PPO = patch(GRPO, "lite_ppo", "2508.08221", scale="batch_std", aggregate="token_mean", pull=None)
GMPO = patch(GRPO, "gmpo", "2507.20673", clip=Geometric(low=0.4, high=0.4), pull=None)
SAPO = patch(GRPO, "sapo", "2511.20347", clip=Soft(tau=1.0, tau_negative=1.05), pull=None,
    note="on policy its gradient is grpo's without KL; peers allow no other aggregate")
GSPO = patch(GRPO, "gspo", "2507.18071", ratio="sequence_mean", clip=Clip(low=3e-4, high=4e-4), pull=None,
    note="bounds this narrow need sampler and learner to agree in float32; verl's gspo is gspo_token, and with aggregate=token_mean neither is GSPO")
GSPO_TOKEN = patch(GSPO, "gspo_token", "2507.18071", ratio="sequence_token",
    note="the gradient of gspo where credit is one number an answer; for credit that varies inside it")
VESPO = patch(GRPO, "vespo", "TRL paper index", ratio="sequence_product", clip=Hump(), pull=None)
CISPO = patch(GRPO, "cispo", "2506.13585", clip=Cap(low=0.0, high=5.0), aggregate="prompt_mean", filter="mixed", pull=None,
    note="the cap is absolute (TRL's 5); the paper does not disclose it and has no lower bound, where verl keeps one")
AIPO = patch(REINFORCE, "aipo", "2505.24034", baseline=GroupMean(), ratio="token", clip=Cap(low=0.0, high=4.0), aggregate="token_mean",
    note="the paper's rho lies in [2, 10]; the weight is detached, unlike min(ratio, rho) * A of older prime-rl docs")
CLIP_COV = patch(GRPO, "clip_cov", "2505.22617", tokens=ClipCov(), aggregate="token_mean", pull=None,
    note="drawn over the whole minibatch before it is split; published code draws inside each micro-batch")
KL_COV = patch(GRPO, "kl_cov", "2505.22617", tokens=KlCov(), clip=None, aggregate="token_mean", pull=None,
    note="no clip on any token, as in the authors' code; the penalty is |k1|")
TOP_ENTROPY = patch(GRPO, "top_entropy", "2506.01939", tokens=TopEntropy(share=0.2), pull=None,
    note="chosen over the whole minibatch; the silent 80 % stay in the denominators")
SKYWORK = patch(GRPO, "skywork_or1", "2505.22312", entropy=EntropyBonus(coef=0.0, target=0.2, delta=0.005), aggregate="token_mean",
    filter="mixed", pull=None,
    note="the coefficient starts at 0 and follows the measured entropy; at or above the target no bonus is applied")

DAPO = patch(GRPO, "dapo", "2503.14476", clip=Clip(low=0.2, high=0.28), filter="mixed", aggregate="prompt_mean",
    shape=(Signed(), Overlong(cache=0.2)), pull=None,
    note="the paper normalises by each group's tokens (prompt_mean); peers by the whole batch's. Its rule reward is +-1 (signed), and the overlong punishment ends at -1, where verl's goes on. Its mini-batch of 512 counts responses, verl's prompts")
FIPO = patch(DAPO, "fipo", "2603.19835", clip=FutureKL(), note="constants as in ms-swift's implementation")
MAGISTRAL = patch(DAPO, "magistral", "2506.10910", scale="one", whiten="sample",
    note="the paper whitens each minibatch; here the step, which is the same with one minibatch. Its format and language rewards are the environment's")
SCALERL = patch(CISPO, "scalerl", "2510.13786", scale="one", whiten="sample", anchor="behaviour", curriculum=NoEasy(rate=0.9),
    note="credit over the standard deviation of all credit of the step, not of its rewards. The paper's cap lies in 4 to 8, insensitive; its FP32 head is the default here, its interruptions are the environment's")

DR_GRPO = patch(GRPO, "dr_grpo", "2503.20783", scale="one", aggregate="constant", pull=None,
    note="the objective has no length divisor; the constant (max_tokens; the paper's code 3,000) only sets the scale. verl's form once forgot to divide by the batch")
MAXRL = patch(DR_GRPO, "maxrl", "2602.02710", scale="group_mean",
    note="centred, with credit 0 for groups without success: unbiased for order G - 1, not G; only for rewards >= 0. The authors divide by mean + 1e-6, which gives a group of one r / 1e-6; here it is 0")
DPPO = patch(DR_GRPO, "dppo", "2602.04879", anchor="behaviour", clip=Divergence(measure="tv", delta=0.15),
    note="the cap on the ratio is verl's 20 (the authors' code 10, prime-rl none); delta .15 for TV, .05 for KL, where SkyRL and prime-rl use .2")
PRIME_RL = patch(DPPO, "prime_rl", "prime-rl loss.py", clip=Divergence(measure="tv", delta=0.2, cap=float("inf")), aggregate="token_mean", pull=TokenL2(coef=1e-3),
    note="the default loss of prime-rl at revision 559b447: its docs name a cap on the ratio, its code has none")
DPPO_KL = patch(DPPO, "dppo_kl", "2602.04879", clip=Divergence(measure="kl", delta=0.05), note="delta is verl's; SkyRL prefers it")
DPPO_TOP = patch(DPPO, "dppo_top", "2602.04879", clip=Divergence(measure="tv", delta=0.15, top=8),
    note="the paper finds no significant gain over the binary form")

# --- on-policy distillation ------------------------------------------------------------------------------------------

OPD = patch(REINFORCE, "opd", "Thinking Machines 2025", rewards="none", ratio="token", aggregate="token_mean",
    pull=KL(coef=1.0, estimator="k1", placement="token"),
    note="the reference is the teacher; discount 0, so that no token answers for the KL of later ones. prime-rl also drops tokens with pi - mu < -.2 and adds a squared log-ratio")
GKD = patch(REINFORCE, "gkd", "2306.13649", rewards="none", distill=Distill(beta=0.5), aggregate="token_mean",
    note="student samples only (lambda 1); the paper mixes in supervised data. The reference is the teacher. TRL defaults: lambda .5, temperature .9")

# fmt: on
LADDER: dict[str, Algorithm] = {a.name: a for a in list(globals().values()) if isinstance(a, Algorithm)}
"""Everything defined above, by name."""


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or ConfigError with the nearest one."""
    if name not in LADDER:
        raise ConfigError(f"algorithm={name}: no such algorithm; {nearest(name, LADDER)}")
    return LADDER[name]
