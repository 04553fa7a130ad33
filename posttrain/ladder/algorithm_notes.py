"""Notes on algorithms of both ladders, by name: where this library differs from the paper or from other libraries."""

from __future__ import annotations


def _notes(text: str) -> dict[str, str]:
    """The notes of a text by name. `NAME: ...` at the beginning of a line begins a note, and indented lines go on."""
    entries = text.strip().replace("\n    ", " ").splitlines()
    return dict(entry.split(": ", 1) for entry in entries)


NOTES = _notes("""
reinforce_ema: a sample is compared with the baseline as it was before that sample; updating first, as some code does,
    biases it. With one for each kind of task: `rae`
rae: SPIRAL's baseline a game and role is one for each `source` of tasks here: write both into that column. An episode
    trains one role, the other seats are played and not learned from; the paper trains both
rloo: sequence sum as in the paper; most peers take a token mean, newer TRL adds a ratio clip. A group of one has credit
    0, where verl's loop form gives it its raw reward
remax: costs one greedy answer a prompt, which is judged and never learned from; no std. A KL in the reward is charged
    to the sample alone
otb: a token that only one sibling is left to say has no credit, like a group of one; verl gives it its raw reward.
    Under a correction verl weighs each energy by its square; here it is the learner's own
gpg: alpha counts samples of groups with spread, as in the paper; verl counts non-zero rewards, so that rewards of +-1
    switch it off
opmd: the paper's factor 1 / (1 + tau) on the loss is left to the learning rate; b may also be the group's mean. An
    early version left a group of one without credit; here it is 0
pkpo: the paper's loo-1 form; a leave-one-out mean of the transformed rewards would shrink the gradient by (G - k) / (G
    - 1)
maxrl_success: mean score over the successes alone: unbiased for the log-likelihood truncated at order G; only for
    rewards >= 0. The authors' code uses the centred form (maxrl)
kimi_k15: tau is not in the paper; ROLL, verl and prime-rl square token log-ratios instead; the paper also resets the
    optimizer every iteration
dro: as in verl and Tinker: the quadratic penalty of every token, on the group's credit; the paper learns a value beside
    it. coef is beta / 2; .05 is the beta of Tinker's example, verl has no default
topr: sequence ratio as in the paper; ROLL's is per token. Without a baseline, so successes are always learned in full
ppo: whitened with ddof 1 (peers differ); GAE over spoken tokens alone, where SkyRL's recursion runs through tool
    tokens. The paper's value loss has no clip and no 1/2
dual_clip: 3 as in verl and AReaL; ROLL 1.4
prime: the paper's Eq. 5 as written; the authors' code whitens credit over tokens, weighs outcome and process by 5 each,
    and can let phi learn from a step before it scores it (double forward). The paper filters prompts by accuracy, .2 to
    .8; here by spread. It is not prime_rl
v_trace: rho and c are capped at 1, as in the paper's runs, and stand on PPO's term: with one optimizer step a batch
    that is the paper's actor
vapo: the paper warms its values up for 50 steps of 8,192 samples; lambda of answers up to 20 tokens is clamped to 0
reinforce_pp: whitened over tokens as in the peers, so long answers weigh more; the text says samples (whiten=sample).
    NeMo charges the KL to each token alone; OpenRLHF's batch variance has ddof 0, verl's and this 1
reinforce_pp_baseline: peers differ in where this variant's KL stands: slime charges it to each token, here it is a loss
grpo: std is ddof 1 with no epsilon (TRL adds 1e-4, verl 1e-6, OpenRLHF 1e-9; NeMo leaves the sample out of mean and
    std). The paper leaves the clip range unstated (0.2 is convention). TRL's default has no KL; verl gives a group of
    one its raw reward, here it is 0
grpo_process: steps are judged by the environment; without step verdicts it is grpo
mt_grpo: Eq. 7 as in Atropos: every turn has its own credit and the outcome's; the paper's first two-turn form gives the
    last turn the outcome's alone, which is the same where that turn is paid nothing. Without paid turns it is grpo
    without KL
gigpo: a state is what the world showed last, as in the paper; baseline.by=history where that does not tell the state.
    Of one turn it is grpo twice over
deepseek_v32: delta is not in the paper; 0.5 is TRL's. Routing and sampling masks: the kept token sets of the sampler
    are always used here
gdpo: whitened over samples like TRL; verl over tokens. A source that abstained leaves its comparison. With one reward
    source it is grpo, whitened
pass_at_k: the spread of the best of k is over all k-subsets, ddof 0 as in the authors' code: k = 1 is grpo with that
    ddof
luffy: the demonstrator's probability is taken as 1, as in the authors' code; a shown token is never clipped
chord: mu stays at the valley of the paper's schedule; expert data come as shown siblings
decoupled_ppo: the proximal policy is the learner at the start of the step; without values, as in AReaL's default
a3po: interpolated by the versions of the weights: a token of the current weights has the sampler as its anchor
tis: the cap is the peers' usual 2; verl's example has 10. The blog's form multiplies any loss; here grpo's
icepop: bounds as in NeMo's reference configuration; a token outside them stays in the denominators
vcpo: weights and deviation as in the authors' runs on mathematics; energy stands for the squared gradient norm of a
    response. The baseline's w is that at the start of the step, the cap and the step size see pi/mu at every update:
    with one update a batch all are the same, as in the paper
m2po: the mask takes the clip's place. It is made for each update over the whole minibatch, largest first, from pi/mu,
    of the tokens that are pushed further from mu, as in the authors' code (which makes it in each micro-batch, counts
    what is masked as capped, and masks no ratio within its floor of .7 to 1.5); AReaL masks of all tokens:
    tokens.of=all
sapo: on policy its gradient is grpo's without KL; peers allow no other aggregate
gspo: bounds this narrow need sampler and learner to agree in float32; verl's gspo is gspo_token, and with
    aggregate=token_mean neither is GSPO
luspo: gspo without the division by length, which is the sum over tokens; bounds as in its section 5.1
gspo_token: the gradient of gspo where credit is one number an answer; for credit that varies inside it
cispo: the cap is absolute (TRL's 5); the paper does not disclose it and has no lower bound, where verl keeps one
aipo: the paper's rho lies in [2, 10]; the weight is detached, unlike min(ratio, rho) * A of older prime-rl docs
clip_cov: drawn over the whole minibatch before it is split; published code draws inside each micro-batch
kl_cov: no clip on any token, as in the authors' code; the penalty is |k1|
top_entropy: chosen over the whole minibatch; the silent 80 % stay in the denominators
skywork_or1: the coefficient starts at 0 and follows the measured entropy; at or above the target no bonus is applied
dapo: the paper normalises by each group's tokens (prompt_mean); peers by the whole batch's. Its rule reward is +-1
    (signed), and the overlong punishment ends at -1, where verl's goes on. Its mini-batch of 512 counts responses,
    verl's prompts
fipo: constants as in ms-swift's implementation
magistral: the paper whitens each minibatch; here the step, which is the same with one minibatch. Its format and
    language rewards are the environment's
scalerl: credit over the standard deviation of all credit of the step, not of its rewards. The paper's cap lies in 4 to
    8, insensitive; its FP32 head is the default here, its interruptions are the environment's
dr_grpo: the objective has no length divisor; the constant (max_tokens; the paper's code 3,000) only sets the scale.
    verl's form once forgot to divide by the batch
maxrl: centred, with credit 0 for groups without success: unbiased for order G - 1, not G; only for rewards >= 0. The
    authors divide by mean + 1e-6, which gives a group of one r / 1e-6; here it is 0
dppo: the cap on the ratio is verl's 20 (the authors' code 10, prime-rl none); delta .15 for TV, .05 for KL, where SkyRL
    and prime-rl use .2
echo: all that is heard after the first turn is foreseen, the frame of the chat template with it, as prime-rl does where
    its renderer does not tell the two apart; elsewhere prime-rl takes the text of tools alone
prime_rl: the default loss of prime-rl at revision 559b447: its docs name a cap on the ratio, its code has none
dppo_kl: delta is verl's; SkyRL prefers it
dppo_top: the paper finds no significant gain over the binary form
opd: the reference is the teacher; discount 0, so that no token answers for the KL of later ones. prime-rl also drops
    tokens with pi - mu < -.2 and adds a squared log-ratio
iw_opd: the weight as in TRL's trainer (Algorithm 1 of the paper, gamma .5); the paper also clips like ppo with a dual
    clip of 3
mopd: one teacher, where MiMo routes each prompt to one of several; bounds of start/mu as in NeMo's recipe. No ratio:
    drift between updates of one batch is not corrected
gkd: student samples only (lambda 1); the paper mixes in supervised data. The reference is the teacher. TRL defaults:
    lambda .5, temperature .9
sdpo: the authors' defaults; the teacher is what optimizer.ema=0.95 keeps. With the weights of now instead it lost all
    in two runs of ours. The 100 tokens are the teacher's, theirs the policy's; their ratio pi/mu, capped at 2, is 1
    with one update a batch and left out here. Feedback of the environment is no hint here
sdft: TRL's defaults: the teacher is the policy as the stage began, 100 tokens, here with all others as one. prime-rl
    (opsd) has opd's loss with the weights of now, and the demonstration in front of the prompt
""")
"""Of algorithms that learn from reward."""

PREFERENCE_NOTES = _notes("""
dpo: log-probs are summed over the completion, its stop token included and nothing of the prompt. The reference is the
    policy at the start of the stage. TRL's f-divergences are `divergence`, its `use_weighting` is wpo
cdpo: TRL has no loss of this name in DPOTrainer; its label smoothing is this form in CPO and AOT
robust_dpo: TRL's `robust` with `label_smoothing` as the rate. A pair can have a negative loss
odpo: the margin is the row's own; the paper takes a log of the difference of scores
dpo_norm: length-normalised DPO of Tulu 3, TRL's `sigmoid_norm`; beta is per token here, so 5 and not 0.1
ld_dpo: lengths are those of the spoken tokens; alpha 1 would be DPO
wpo: a pair's weight is the product over its sides of exp(mean of log pi - log sum pi^2), not differentiated, and read
    at the start of the optimizer step
ipo: sums of log-probs, as in the paper's formula, OpenRLHF and rlhf-book. TRL's `ipo` takes averages: that is ipo_mean
ipo_mean: TRL's `ipo`; its authors' experiments used averages. beta is then a scale per token
slic: TRL's `hinge`: SLiC's link on DPO's margin, with the reference
slic_hf: the paper's form without a reference: delta in units of log-probs, and the likelihood of the chosen
rso: the pairs are its own, drawn from the reference in every step; the loss is the paper's hinge, and link=logsigmoid
    is its other form. The kept completions are paired at random, each once, as in the paper's best setting
    (first-round-rank). Its program joins equal texts before it draws; here each sample counts
exo: TRL's `exo_pair` with `label_smoothing` as link.rate
discopop: the mixture m is differentiated, as in the paper and TRL. At x = 0, where a stage begins, its gradient lowers
    the chosen completion: it has a minimum at x = -2.3714 tau and a maximum at 1.4401 tau, which steps must be large or
    noisy enough to leap
aot: the order is that of the log-probs at the start of the optimizer step, over the whole minibatch, so that a split
    changes nothing. TRL sorts within each device's micro-batch
aot_unpaired: see aot; chosen and rejected may come from different prompts
nca: TRL's `nca_pair`
sppo: hard labels: the winner's probability is 1. The paper's eta is 1/beta; soft probabilities of a judge would replace
    the two targets
apo_zero: for chosen completions better than what the policy says
apo_zero_unpaired: TRL's KTOTrainer with `apo_zero_unpaired`
apo_down: for chosen completions worse than what the policy says
bco_pair: TRL's `bco_pair`, without the running delta
bco: delta is the mean of the rewards of all completions seen in the stage, this minibatch included; it is state that a
    checkpoint keeps
kto: z is the mean log-ratio of completions under the prompts of others, over the whole minibatch, at least 0 and not
    differentiated. The paper's v is subtracted from lambda, which has the same gradient. Keep good n_good / (bad n_bad)
    in [1, 4/3]
cpo: TRL's beta and `cpo_alpha` (the weight of the likelihood)
simpo: margin.gamma is absolute, as in the paper's formula and TRL's `simpo_gamma`. rlhf-book's gamma is the ratio
    gamma/beta: that is margin=ratiomargin
cpo_simpo: TRL's CPOTrainer with `loss_type=simpo` and `cpo_alpha` 1
orpo: p is exp of the average log-prob. TRL's beta, the paper's lambda, is `coef` here. TRL's likelihood also counts the
    tokens of the prompt; here it reads the chosen completion alone, as in the paper
tpo: rankings of three: the gold completion is imitated and enters no difference, as in TRL
oaif: no penalty for a missing stop token: let a reward say that (TRL's `missing_eos_penalty`)
iterative_dpo: the paper also trains its reward model anew each round
xpo: the sum over the reference's completion of its log-prob under the policy, as in TRL. Pairs that are judged alike
    are left out, their term of optimism too
nash_md: the KL of a token is charged to that token alone, as in TRL: no token is charged for those after it. P is the
    sigmoid of the difference of the two rewards, one half where they are equal, so a reward is in units of log-odds.
    The opponent is mixed token by token, and samples under the stage's sampling contract
""")
"""Of algorithms that learn from preferences."""
