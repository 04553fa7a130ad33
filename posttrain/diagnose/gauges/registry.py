"""Every metric, defined once: formula, unit, healthy band. Docs are generated from `REGISTRY`."""

from __future__ import annotations

from posttrain.diagnose.gauges.engine_gauges import ENGINE
from posttrain.diagnose.gauges.gauge_definition import Definition as Definition
from posttrain.diagnose.gauges.learning_gauges import AHEAD, EXPERTS, IMPLICIT, VALUES
from posttrain.diagnose.gauges.rollout_gauges import EVALUATION

REGISTRY: dict[str, Definition] = {
    "rollout/reward": Definition(
        "mean raw outcome of all judged episodes the policy played, filtered ones included", "reward", "rises"
    ),
    "rollout/truth": Definition(
        "mean of what is measured and not paid (env.measured), over the same episodes as rollout/reward",
        "reward",
        "rises with rollout/reward; a fall while that rises: the reward is exploited",
    ),
    "rollout/reward_std": Definition("standard deviation of the raw outcomes of a step", "reward", "> 0"),
    "rollout/solved": Definition(
        "share of episodes that are right (env.right), where outcomes are 0 or 1 or env.right is named",
        "share",
        "0.1 to 0.9: else there is little to learn",
    ),
    "rollout/mixed": Definition("share of played groups whose raw outcomes differ", "share", "> 0.3"),
    "rollout/unjudged": Definition("share of episodes without a reward: failed and abstained", "share", "0"),
    "rollout/failed": Definition("share of episodes without a reward since a source of ours failed", "share", "0"),
    "rollout/abstained": Definition(
        "share of episodes about which every source abstained (a reward returned None)", "share", "as meant"
    ),
    "rollout/tokens": Definition("spoken tokens an episode", "tokens", "steady"),
    "rollout/truncated": Definition(
        "share of episodes cut off by a limit on tokens or time, or by the context", "share", "< 0.1"
    ),
    "rollout/entropy": Definition(
        "-log-prob of a sampled token under the sampler, mean over tokens: an estimate of the entropy",
        "nats",
        "falls slowly; near 0 with wrong answers left: nothing new is tried",
    ),
    "rollout/special": Definition(
        "share of episodes that say a special token of the tokenizer which is not a stop token",
        "share",
        "0; near 1 with most answers cut off: the stop id is wrong",
    ),
    "rollout/aborted": Definition(
        "siblings given up because enough others had ended, per sibling started",
        "share",
        "oversample / (siblings + oversample)",
    ),
    "rollout/groups": Definition("groups that entered the step", "groups", "= prompts"),
    "rollout/refused": Definition("share of played groups a filter turned away", "share", "< 0.8"),
    "rollout/spare": Definition(
        "share of played groups that passed the filter when the step had enough groups", "share", "< 0.1"
    ),
    "rollout/walked": Definition(
        "prompts asked since the stage began (read the sum)", "prompts", "goes on after a resume"
    ),
    "rollout/trained_length": Definition(
        "mean length of the answers that got a gradient, over that of all that were asked for the step; without those "
        "that were learned from again",
        "ratio",
        "1 where none was left out",
    ),
    "reward/SOURCE": Definition(
        "mean raw score a source gave, before its weight and any shaping; what it paid for turns summed",
        "score",
        "its own",
    ),
    "verdict/KIND": Definition(
        "share of verdicts that are scores with that kind of finding, such as wrong or timeout", "share", "its own"
    ),
    "failed/KIND": Definition(
        "share of verdicts that failed on our side, by kind, such as raised, timeout or worker: outages, "
        "no wrong answers",
        "share",
        "0",
    ),
    "abstained/SOURCE": Definition("share of episodes about which that source said nothing", "share", "as meant"),
    "metric/NAME": Definition(
        "mean of the numbers that reward functions logged with log_metric(NAME, value)", "its own", "its own"
    ),
    "credit/silent": Definition(
        "share of groups in the step without spread, so with credit exactly 0", "share", "< 0.5"
    ),
    "credit/shaped": Definition("mean reward after shaping", "reward", "follows rollout/reward"),
    "credit/dropped": Definition("share of judged episodes that may carry no gradient", "share", "< 0.1"),
    "credit/advantage_abs": Definition("mean |credit| a token", "credit", "> 0"),
    "optim/grad_norm": Definition(
        "global gradient norm before the clip, mean over optimizer steps", "norm", "steady; spikes precede collapse"
    ),
    "optim/update": Definition(
        "change of the weights in the step / the weights, root mean squares over the first 4096 of each tensor",
        "1",
        "1e-5 to 1e-2",
    ),
    "optim/lr": Definition("learning rate", "1", "as configured"),
    "optim/share": Definition(
        "share of the learning rate that an optimizer step used, where step_scale sets it", "share", "above 0.5"
    ),
    "optim/skipped": Definition("optimizer steps left out because their gradient was not finite", "steps", "0"),
    "optim/loss_scale": Definition(
        "factor of the loss in the backward pass of a float16 run", "1", "steady; it is halved at each overflow"
    ),
    "optim/overflowed": Definition(
        "optimizer steps left out because the scaled gradient overflowed in float16",
        "steps",
        "0 but for a few at first",
    ),
    "optim/steps": Definition("optimizer steps that moved weights", "steps", "= minibatches x epochs"),
    "learner/micro_batches": Definition(
        "forward and backward passes of an optimizer step, mean over optimizer steps",
        "passes",
        "few; raise micro_tokens where memory allows",
    ),
    "learner/bin_waste": Definition(
        "share of the room of a step's micro-batches (micro_tokens each) that no token fills; 0 for a single one, and"
        " of a pass of more tokens, some computed once",
        "share",
        "< 0.3; above: micro_tokens is little more than one family of sequences",
    ),
    "learner/shared": Definition(
        "share of the packed tokens that the layers did not compute, because sequences of a micro-batch begin alike",
        "share",
        "towards prompt / sequence x (1 - 1 / siblings)",
    ),
    "sft/loss": Definition("mean negative log-prob of a demonstrated token", "nats", "falls"),
    "sft/tokens": Definition("demonstrated tokens an optimizer step", "tokens", "steady"),
    "ranking/loss": Definition("a reward model's loss, mean over judgements", "nats", "falls, below log 2 for pairs"),
    "ranking/regulariser": Definition(
        "what a reward model's language head loses meanwhile, mean over pairs (before alpha)", "nats", "steady or falls"
    ),
    "ranking/tokens": Definition("judged tokens an optimizer step", "tokens", "steady"),
    "ranking/accuracy": Definition(
        "share of judged pairs (of labels) in the minibatch whose scores are in their order, a tie counts half",
        "share",
        "rises above 0.5; at 1 it has learned its pairs by heart",
    ),
    "ranking/margin": Definition(
        "score of the better completion - of the worse one, mean over pairs", "score", "rises slowly from 0"
    ),
    "ranking/score": Definition("a reward model's score, mean over completions", "score", "near 0 with centring"),
    "ranking/score_square": Definition(
        "its square; with ranking/score gives the standard deviation", "score^2", "steady"
    ),
    "ranking/error": Definition("|output - rating|, mean over rated attributes", "rating", "falls"),
    "preference/loss": Definition(
        "the loss of a preference algorithm, with what it adds", "1", "falls; log 2 at the first step of dpo"
    ),
    "preference/tokens": Definition("judged tokens an optimizer step", "tokens", "steady"),
    "preference/pairs": Definition(
        "pairs that a step found among its own samples", "1", "near what a step can give; 0: nothing is learned"
    ),
    "preference/tied": Definition(
        "share of prompts (rso: of pairs) whose samples were judged alike, up to rounding; they make no pair",
        "share",
        "< 0.7",
    ),
    "preference/gap": Definition(
        "reward of the chosen sample minus that of the rejected one, over the pairs of a step", "reward", "> 0"
    ),
    "preference/won": Definition(
        "share of pairs in which the policy's completion was preferred to its opponent's; ties are left out",
        "share",
        "0.5 at the start; above it where the policy becomes better than its opponent",
    ),
    "label/answers": Definition(
        "answers whose steps were labelled, per answer that was judged", "share", "1; less: answers without a step"
    ),
    "label/steps": Definition("labelled steps of an answer", "steps", "above 1, or steps are whole answers"),
    "label/hard": Definition(
        "share of steps from whose end at least one completion was right", "share", "0.1 to 0.95; else little to learn"
    ),
    "label/soft": Definition("share of right completions, mean over steps", "share", "0.1 to 0.9"),
    "label/completions": Definition("judged completions from the end of a step", "completions", "as configured"),
    "reject/round": Definition("round of a rejection sampling stage", "1", "counts up"),
    "reject/kept": Definition(
        "kept completions, hinted and regenerated ones aside, per judged completion of the round", "share", "rises"
    ),
    "reject/covered": Definition(
        "share of asked prompts of which something is kept without a hint and without going on from a step",
        "share",
        "rises; the diversity alarm reads it",
    ),
    "reject/duplicates": Definition(
        "share of the completions that pass which equal another one of their prompt, and are left out for it",
        "share",
        "as the answers are: near 1 where there is one right answer",
    ),
    "reject/distinct": Definition(
        "different completions that pass, per prompt that has any, before the limit of a prompt",
        "1",
        "steady; near 1 after a start above it: variety is lost",
    ),
    "reject/hinted": Definition(
        "share of kept completions that were sampled with the answer as a hint", "share", "falls"
    ),
    "reject/regenerated": Definition(
        "share of kept completions that go on from the end of a step of a wrong answer", "share", "falls"
    ),
    "reject/mended": Definition(
        "share of wrong answers of which some completion from the last right step is right", "share", "above 0"
    ),
    "reject/right_steps": Definition(
        "share of the steps of wrong answers that stand before the first wrong one",
        "share",
        "above 0; at 0 nothing is regenerated",
    ),
    "reject/completions": Definition(
        "completions that were asked per wrong answer, to find its first wrong step and to say it anew",
        "completions",
        "at most the configured number times log2 of the steps; less: equal beginnings are shared",
    ),
    "reject/hint_reward": Definition("mean reward of completions sampled with a hint", "reward", "above 0"),
    "reject/cut": Definition(
        "share of the judged completions that were cut off; they are never kept", "share", "< 0.1"
    ),
    "reject/reward": Definition("mean reward of what is kept", "reward", "at least the threshold"),
    "heldout/agreement": Definition(
        "share of held-out pairs that the stage's scores order as they were judged; a tie counts half",
        "share",
        "rises; 0.5 before a stage whose reference is its own start",
    ),
    "heldout/margin": Definition(
        "mean score of the chosen held-out completion minus that of the rejected one", "1", "rises"
    ),
    "preference/accuracy": Definition(
        "share of pairs whose chosen completion has the larger reward u = beta h, ties half; of labels, the share "
        "whose reward less the shift has the label's sign",
        "share",
        "0.5 at first, then rises",
    ),
    "preference/margin": Definition(
        "u of the chosen minus u of the rejected completion, mean over pairs", "1", "rises"
    ),
    "preference/chosen_reward": Definition(
        "u of chosen or good completions, less the shift where there is one", "1", "above that of the rejected"
    ),
    "preference/rejected_reward": Definition(
        "u of rejected or bad completions, less the shift where there is one", "1", "falls"
    ),
    "preference/chosen_logp": Definition(
        "log-prob of a chosen or good completion, summed over its tokens",
        "nats",
        "may fall while the margin rises; far below its start the policy forgets what it should say",
    ),
    "preference/rejected_logp": Definition(
        "log-prob of a rejected or bad completion, summed over its tokens", "nats", "falls"
    ),
    "canary/logp_gap": Definition(
        "|log-prob of learner - of sampler| with equal weights, mean over tokens", "nats", "the dtype's noise"
    ),
    "canary/logp_gap_worst": Definition(
        "the same, worst token of an optimizer step", "nats", "under the bound of the dtype"
    ),
    "canary/moved": Definition(
        "share of the tensors with a gradient that had to move, and did, in the first step with credit",
        "share",
        "1; less where the learning rate is below rounding",
    ),
    "canary/frozen": Definition(
        "frozen tensors that are, bit for bit, what they were when the stage began", "tensors", "all that are frozen"
    ),
    "canary/scale_gap": Definition(
        "float16: difference between the norms of the gradient in the optimizer and of the loss's own, relative",
        "share",
        "< 0.1",
    ),
    "canary/loss_gap": Definition(
        "largest difference between what the loss asked of a log-prob and what its definition asks, "
        "of the size of its terms",
        "1",
        "rounding",
    ),
    "canary/reference_gap": Definition(
        "largest log-ratio of policy to reference before the first step of a stage whose reference is its own start",
        "nats",
        "the dtype's noise",
    ),
    "canary/teacher_gap": Definition(
        "largest difference between the log-probs that a teacher with a hint gave in the step and those that it gives "
        "an answer alone",
        "nats",
        "the dtype's noise",
    ),
    "canary/opponent_gap": Definition(
        "largest departure of the log-prob of what an opponent said from pi^(1 - share) ref^share",
        "nats",
        "twice the dtype's noise",
    ),
    "canary/update_gap": Definition(
        "largest departure of the first optimizer step from the configured one",
        "full steps (AdamW: learning rates)",
        "rounding",
    ),
    "canary/mute_sources": Definition(
        "share of reward sources that gave 0 to every answer, right ones included", "share", "0"
    ),
    "canary/probed": Definition(
        "whether turns that were sampled after the last push had ended in time to be compared, where samples may be"
        " older than the learner",
        "share",
        "> 0",
    ),
    "canary/fresh": Definition(
        "tokens that were said since the last push, in this step or ahead of it, and agree with the learner before its"
        " weights change, where samples may be older than the learner",
        "tokens",
        "no band",
    ),
    "canary/drawn_again": Definition(
        "tokens of a step that were drawn again and came out the same", "tokens", "no band"
    ),
    "canary/bet_on_draws": Definition(
        "logarithm of how much likelier the tokens so far are under another temperature than the reported one",
        "nats",
        "< 17; there it stops",
    ),
    "canary/bet_on_siblings": Definition(
        "logarithm of how much likelier it is so far that siblings repeat each other than that they agree by chance",
        "nats",
        "< 17; there it stops",
    ),
    **EVALUATION,
    "policy/ratio": Definition("pi / anchor, mean over tokens (of the episode, for sequence ratios)", "1", "near 1"),
    "policy/ratio_square": Definition(
        "(pi / anchor)^2, mean over tokens", "1", "near 1; a few huge ratios show up here first"
    ),
    "policy/clip_low": Definition(
        "share of tokens silenced below the trust region", "share", "< 0.2; 0 with one optimizer step a step"
    ),
    "policy/clip_high": Definition(
        "share of tokens silenced above the trust region", "share", "< 0.2; 0 with one optimizer step a step"
    ),
    "policy/heard": Definition(
        "mean log-prob of what the policy was told between its turns (imitate.of=heard)", "nats", "rises"
    ),
    "policy/masked": Definition(
        "share of tokens masked by the choice of tokens (tokens=...); where it masks any", "share", "no band"
    ),
    "policy/answer_ratio": Definition(
        "pi(y) / mu(y) of a response, not bounded, mean over responses; where step_scale reads it", "1", "near 1"
    ),
    "policy/answer_ratio_square": Definition(
        "its square; (mean ratio)^2 / mean square is the effective sample size over the sample size", "1", "near 1"
    ),
    "policy/surrogate": Definition(
        "push x correction x credit, mean over tokens; only its gradient means something", "reward", "no band"
    ),
    "policy/kl_start": Definition(
        "k3 distance of the policy from the start of the step, mean over tokens",
        "nats",
        "< 0.02; 0 in the first optimizer step",
    ),
    "policy/kl_step": Definition(
        "k3 distance of the policy after the step from the policy before it, mean over the spoken tokens of up to 16"
        " of its episodes",
        "nats",
        "1e-5 to 0.05",
    ),
    "policy/kl_anchor": Definition(
        "k3 distance of the policy from the anchor of the ratio, mean over tokens", "nats", "< 0.02"
    ),
    "policy/kl_reference": Definition(
        "k3 distance of the policy from the reference, mean over tokens", "nats", "0 at first, rises slowly"
    ),
    "teacher/hinted": Definition(
        "share of the judged answers behind whose prompt the teacher was shown a hint; the others have no gradient",
        "share",
        "of siblings: rises with the pass rate, and at 0 nothing is learned; of answers: 1",
    ),
    "policy/entropy": Definition(
        "entropy of the next-token distribution, mean over spoken tokens",
        "nats",
        "falls slowly; near 0: nothing left to explore",
    ),
    "mismatch/band": Definition(
        "99 % of tokens: |log-prob of learner - of sampler| with equal weights, at the first step",
        "nats",
        "far below every clip against the sampler",
    ),
    "mismatch/logp_gap": Definition(
        "|log-prob at the start of the step - of the sampler|, mean over tokens", "nats", "the dtype's noise"
    ),
    "mismatch/kl": Definition(
        "k3 distance of the sampler from the start of the step, mean over tokens", "nats", "the dtype's noise squared"
    ),
    **VALUES,
    "correction/raw": Definition("start / mu before truncation, mean over tokens", "1", "near 1"),
    "correction/used": Definition("what multiplies the push, mean over tokens", "1", "near 1"),
    "correction/used_square": Definition("its square; effective share = used^2 / used_square", "1", "near used^2"),
    "correction/silenced": Definition("share of tokens whose correction is 0", "share", "< 0.05"),
    **ENGINE,
    **AHEAD,
    **IMPLICIT,
    **EXPERTS,
}
