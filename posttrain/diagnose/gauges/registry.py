"""Every metric, defined once: formula, unit, healthy band. Docs are generated from `REGISTRY`."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

TABLE = """
rollout/reward | mean raw outcome of all judged episodes the policy played, filtered ones included | reward | rises
rollout/truth | mean of what is measured and not paid (env.measured), over the same episodes as rollout/reward | reward
    | rises with rollout/reward; a fall while that rises: the reward is exploited
rollout/reward_std | standard deviation of the raw outcomes of a step | reward | > 0
rollout/solved | share of episodes that are right (env.right), where outcomes are 0 or 1 or env.right is named | share |
    0.1 to 0.9: else there is little to learn
rollout/mixed | share of played groups whose raw outcomes differ | share | > 0.3
rollout/unjudged | share of episodes without a reward: failed and abstained | share | 0
rollout/failed | share of episodes without a reward since a source of ours failed | share | 0
rollout/abstained | share of episodes about which every source abstained (a reward returned None) | share | as meant
rollout/tokens | spoken tokens an episode | tokens | steady
rollout/truncated | share of episodes cut off by a limit on tokens or time, or by the context | share | < 0.1
rollout/entropy | -log-prob of a sampled token under the sampler, mean over tokens: an estimate of the entropy | nats |
    falls slowly; near 0 with wrong answers left: nothing new is tried
rollout/special | share of episodes that say a special token of the tokenizer which is not a stop token | share | 0;
    near 1 with most answers cut off: the stop id is wrong
rollout/aborted | siblings given up because enough others had ended, per sibling started | share | oversample /
    (siblings + oversample)
rollout/groups | groups that entered the step | groups | = prompts
rollout/refused | share of played groups a filter turned away | share | < 0.8
rollout/spare | share of played groups that passed the filter when the step had enough groups | share | < 0.1
rollout/walked | prompts asked since the stage began (read the sum) | prompts | goes on after a resume
rollout/trained_length | mean length of the answers that got a gradient, over that of all that were asked for the step;
    without those that were learned from again | ratio | 1 where none was left out
reward/SOURCE | mean raw score a source gave, before its weight and any shaping; what it paid for turns summed | score |
    its own
verdict/KIND | share of verdicts that are scores with that kind of finding, such as wrong or timeout | share | its own
failed/KIND | share of verdicts that failed on our side, by kind, such as raised, timeout or worker: outages, no wrong
    answers | share | 0
abstained/SOURCE | share of episodes about which that source said nothing | share | as meant
metric/NAME | mean of the numbers that reward functions logged with log_metric(NAME, value) | its own | its own
credit/silent | share of groups in the step without spread, so with credit exactly 0 | share | < 0.5
credit/shaped | mean reward after shaping | reward | follows rollout/reward
credit/dropped | share of judged episodes that may carry no gradient | share | < 0.1
credit/advantage_abs | mean |credit| a token | credit | > 0
optim/grad_norm | global gradient norm before the clip, mean over optimizer steps | norm | steady; spikes precede
    collapse
optim/update | change of the weights in the step / the weights, root mean squares over the first 4096 of each tensor | 1
    | 1e-5 to 1e-2
optim/lr | learning rate | 1 | as configured
optim/share | share of the learning rate that an optimizer step used, where step_scale sets it | share | above 0.5
optim/skipped | optimizer steps left out because their gradient was not finite | steps | 0
optim/loss_scale | factor of the loss in the backward pass of a float16 run | 1 | steady; it is halved at each overflow
optim/overflowed | optimizer steps left out because the scaled gradient overflowed in float16 | steps | 0 but for a few
    at first
optim/steps | optimizer steps that moved weights | steps | = minibatches x epochs
learner/micro_batches | forward and backward passes of an optimizer step, mean over optimizer steps | passes | few;
    raise micro_tokens where memory allows
learner/bin_waste | share of the room of a step's micro-batches (micro_tokens each) that no token fills; 0 for a single
    one, and of a pass of more tokens, some computed once | share | < 0.3; above: micro_tokens is little more than one
    family of sequences
learner/shared | share of the packed tokens that the layers did not compute, because sequences of a micro-batch begin
    alike | share | towards prompt / sequence x (1 - 1 / siblings)
sft/loss | mean negative log-prob of a demonstrated token | nats | falls
sft/tokens | demonstrated tokens an optimizer step | tokens | steady
ranking/loss | a reward model's loss, mean over judgements | nats | falls, below log 2 for pairs
ranking/regulariser | what a reward model's language head loses meanwhile, mean over pairs (before alpha) | nats |
    steady or falls
ranking/tokens | judged tokens an optimizer step | tokens | steady
ranking/accuracy | share of judged pairs (of labels) in the minibatch whose scores are in their order, a tie counts half
    | share | rises above 0.5; at 1 it has learned its pairs by heart
ranking/margin | score of the better completion - of the worse one, mean over pairs | score | rises slowly from 0
ranking/score | a reward model's score, mean over completions | score | near 0 with centring
ranking/score_square | its square; with ranking/score gives the standard deviation | score^2 | steady
ranking/error | |output - rating|, mean over rated attributes | rating | falls
preference/loss | the loss of a preference algorithm, with what it adds | 1 | falls; log 2 at the first step of dpo
preference/tokens | judged tokens an optimizer step | tokens | steady
preference/pairs | pairs that a step found among its own samples | 1 | near what a step can give; 0: nothing is learned
preference/tied | share of prompts (rso: of pairs) whose samples were judged alike, up to rounding; they make no pair |
    share | < 0.7
preference/gap | reward of the chosen sample minus that of the rejected one, over the pairs of a step | reward | > 0
preference/won | share of pairs in which the policy's completion was preferred to its opponent's; ties are left out |
    share | 0.5 at the start; above it where the policy becomes better than its opponent
label/answers | answers whose steps were labelled, per answer that was judged | share | 1; less: answers without a step
label/steps | labelled steps of an answer | steps | above 1, or steps are whole answers
label/hard | share of steps from whose end at least one completion was right | share | 0.1 to 0.95; else little to learn
label/soft | share of right completions, mean over steps | share | 0.1 to 0.9
label/completions | judged completions from the end of a step | completions | as configured
reject/round | round of a rejection sampling stage | 1 | counts up
reject/kept | kept completions, hinted and regenerated ones aside, per judged completion of the round | share | rises
reject/covered | share of asked prompts of which something is kept without a hint and without going on from a step |
    share | rises; the diversity alarm reads it
reject/duplicates | share of the completions that pass which equal another one of their prompt, and are left out for it
    | share | as the answers are: near 1 where there is one right answer
reject/distinct | different completions that pass, per prompt that has any, before the limit of a prompt | 1 | steady;
    near 1 after a start above it: variety is lost
reject/hinted | share of kept completions that were sampled with the answer as a hint | share | falls
reject/regenerated | share of kept completions that go on from the end of a step of a wrong answer | share | falls
reject/mended | share of wrong answers of which some completion from the last right step is right | share | above 0
reject/right_steps | share of the steps of wrong answers that stand before the first wrong one | share | above 0; at 0
    nothing is regenerated
reject/completions | completions that were asked per wrong answer, to find its first wrong step and to say it anew |
    completions | at most the configured number times log2 of the steps; less: equal beginnings are shared
reject/hint_reward | mean reward of completions sampled with a hint | reward | above 0
reject/cut | share of the judged completions that were cut off; they are never kept | share | < 0.1
reject/reward | mean reward of what is kept | reward | at least the threshold
heldout/agreement | share of held-out pairs that the stage's scores order as they were judged; a tie counts half | share
    | rises; 0.5 before a stage whose reference is its own start
heldout/margin | mean score of the chosen held-out completion minus that of the rejected one | 1 | rises
preference/accuracy | share of pairs whose chosen completion has the larger reward u = beta h, ties half; of labels, the
    share whose reward less the shift has the label's sign | share | 0.5 at first, then rises
preference/margin | u of the chosen minus u of the rejected completion, mean over pairs | 1 | rises
preference/chosen_reward | u of chosen or good completions, less the shift where there is one | 1 | above that of the
    rejected
preference/rejected_reward | u of rejected or bad completions, less the shift where there is one | 1 | falls
preference/chosen_logp | log-prob of a chosen or good completion, summed over its tokens | nats | may fall while the
    margin rises; far below its start the policy forgets what it should say
preference/rejected_logp | log-prob of a rejected or bad completion, summed over its tokens | nats | falls
canary/logp_gap | |log-prob of learner - of sampler| with equal weights, mean over tokens | nats | the dtype's noise
canary/logp_gap_worst | the same, worst token of an optimizer step | nats | under the bound of the dtype
canary/moved | share of the tensors with a gradient that had to move, and did, in the first step with credit | share |
    1; less where the learning rate is below rounding
canary/frozen | frozen tensors that are, bit for bit, what they were when the stage began | tensors | all that are
    frozen
canary/scale_gap | float16: difference between the norms of the gradient in the optimizer and of the loss's own,
    relative | share | < 0.1
canary/loss_gap | largest difference between what the loss asked of a log-prob and what its definition asks, of the size
    of its terms | 1 | rounding
canary/reference_gap | largest log-ratio of policy to reference before the first step of a stage whose reference is its
    own start | nats | the dtype's noise
canary/teacher_gap | largest difference between the log-probs that a teacher with a hint gave in the step and those that
    it gives an answer alone | nats | the dtype's noise
canary/opponent_gap | largest departure of the log-prob of what an opponent said from pi^(1 - share) ref^share | nats |
    twice the dtype's noise
canary/update_gap | largest departure of the first optimizer step from the configured one | full steps (AdamW: learning
    rates) | rounding
canary/mute_sources | share of reward sources that gave 0 to every answer, right ones included | share | 0
canary/probed | whether turns that were sampled after the last push had ended in time to be compared, where samples may
    be older than the learner | share | > 0
canary/fresh | tokens that were said since the last push, in this step or ahead of it, and agree with the learner before
    its weights change, where samples may be older than the learner | tokens | no band
canary/drawn_again | tokens of a step that were drawn again and came out the same | tokens | no band
canary/bet_on_draws | logarithm of how much likelier the tokens so far are under another temperature than the reported
    one | nats | < 17; there it stops
canary/bet_on_siblings | logarithm of how much likelier it is so far that siblings repeat each other than that they
    agree by chance | nats | < 17; there it stops
eval/accuracy | share of answers to held-out tasks that are right (env.right), sampled: pass@1; not of grades that tell
    none | share | rises
eval/reward | mean raw outcome on held-out tasks, sampled; it leads where outcomes are not 0 and 1 | reward | rises
eval/proxy | mean of what is paid on held-out tasks, where something else is measured (env.measured) | reward | rises
    with eval/reward; alone: the reward is exploited
eval/greedy | share of held-out tasks whose argmax answer is right | share | rises
eval/greedy_reward | mean raw outcome on held-out tasks, argmax | reward | rises
eval/unjudged | held-out episodes without a reward: failed and abstained | episodes | 0
eval/failed | held-out episodes that a source failed to judge | episodes | 0
eval/abstained | held-out episodes about which every source abstained | episodes | as meant
eval/tokens | spoken tokens a held-out episode | tokens | steady
eval/truncated | share of held-out episodes cut off by a limit on tokens or time, or by the context | share | < 0.1
eval/pass_at_K | unbiased estimate of P(at least one of K samples of a held-out task solves it) | share | rises; far
    above accuracy: RL has room
eval/first_chosen | share of a judge's verdicts on held-out pairs, each in both orders, that name the first side | share
    | 0.5; away from it: position bias
eval/length_bias | share of a judge's verdicts that name the longer side, minus the share of pairs in which it is the
    better one | share | 0; above it: length pays
eval/both_orders | share of held-out pairs that a judge judges right in both orders | share | rises; at most the
    accuracy
eval/unread | share of a judge's held-out answers without a verdict that can be read | share | 0
heldout/loss | mean negative log-prob of a learned token in the demonstrations of held-out tasks | nats | falls; rising
    while sft/loss falls: the rows are learned by heart
heldout/perplexity | exp of heldout/loss | tokens | falls
eval/metric/NAME | the same on held-out tasks | its own | its own
policy/ratio | pi / anchor, mean over tokens (of the episode, for sequence ratios) | 1 | near 1
policy/ratio_square | (pi / anchor)^2, mean over tokens | 1 | near 1; a few huge ratios show up here first
policy/clip_low | share of tokens silenced below the trust region | share | < 0.2; 0 with one optimizer step a step
policy/clip_high | share of tokens silenced above the trust region | share | < 0.2; 0 with one optimizer step a step
policy/heard | mean log-prob of what the policy was told between its turns (imitate.of=heard) | nats | rises
policy/masked | share of tokens masked by the choice of tokens (tokens=...); where it masks any | share | no band
policy/answer_ratio | pi(y) / mu(y) of a response, not bounded, mean over responses; where step_scale reads it | 1 |
    near 1
policy/answer_ratio_square | its square; (mean ratio)^2 / mean square is the effective sample size over the sample size
    | 1 | near 1
policy/surrogate | push x correction x credit, mean over tokens; only its gradient means something | reward | no band
policy/kl_start | k3 distance of the policy from the start of the step, mean over tokens | nats | < 0.02; 0 in the first
    optimizer step
policy/kl_step | k3 distance of the policy after the step from the policy before it, mean over the spoken tokens of up
    to 16 of its episodes | nats | 1e-5 to 0.05
policy/kl_anchor | k3 distance of the policy from the anchor of the ratio, mean over tokens | nats | < 0.02
policy/kl_reference | k3 distance of the policy from the reference, mean over tokens | nats | 0 at first, rises slowly
teacher/hinted | share of the judged answers behind whose prompt the teacher was shown a hint; the others have no
    gradient | share | of siblings: rises with the pass rate, and at 0 nothing is learned; of answers: 1
policy/entropy | entropy of the next-token distribution, mean over spoken tokens | nats | falls slowly; near 0: nothing
    left to explore
mismatch/band | 99 % of tokens: |log-prob of learner - of sampler| with equal weights, at the first step | nats | far
    below every clip against the sampler
mismatch/logp_gap | |log-prob at the start of the step - of the sampler|, mean over tokens | nats | the dtype's noise
mismatch/kl | k3 distance of the sampler from the start of the step, mean over tokens | nats | the dtype's noise squared
value/loss | clipped squared error of the value, mean over tokens | reward^2 | falls
value/return | target of the value (GAE credit + old value), mean over tokens | reward | follows credit/shaped
value/return_square | its square; with value/return gives Var(return) | reward^2 | no band
value/residual | return - value, mean over tokens | reward | near 0
value/residual_square | its square; explained variance = 1 - Var(residual) / Var(return) | reward^2 | below Var(return):
    the value explains something
correction/raw | start / mu before truncation, mean over tokens | 1 | near 1
correction/used | what multiplies the push, mean over tokens | 1 | near 1
correction/used_square | its square; effective share = used^2 / used_square | 1 | near used^2
correction/silenced | share of tokens whose correction is 0 | share | < 0.05
engine/tokens | tokens of delivered turns, per turn (the sum is all that was said) | tokens | steady
engine/steps | decoding steps of the engine (read the sum) | steps | no band
engine/occupancy | share of slots that said a token, mean over steps | share | high; low at the end of a wave: long
    tails
engine/positions_linear | positions the layers computed, per position needed | 1 | near 1
engine/positions_attention | query-key pairs attended, per pair needed | 1 | near 1
engine/prefix_hits | prompt tokens found in the prefix tree, per prompt token looked for there | share | high in
    episodes of several turns
engine/kv | cache blocks that sequences hold, per block their tokens fill | 1 | near 1
engine/preempted | sequences that gave their cache up for older ones, per delivered turn | share | 0; above: raise
    cache_bytes
engine/straggler | longest turn, per mean turn: how long slots idle at the end of a wave | 1 | low
engine/accepted | drafted tokens that were said, per drafted token | share | high, or speculation does not pay
engine/pushed | bytes of weights that travelled to vLLM, per push | bytes | those of the adapter, where there is one
engine/stale_gap | expected |log-prob| difference of the next token over keys and values of the old weights, per
    sequence | nats | near 0
engine/shared | prompt tokens taken from a sibling's prefill, per prompt token asked for | share | towards 1 - 1 /
    siblings
engine/idle | in the clock, with engines elsewhere: share of the time since the last line in which an engine had no
    turn, mean over engines | share | low where groups are asked ahead; without, what the learner takes of a step
engine/in_flight | in the clock, with engines elsewhere: tokens asked for and not answered yet, those of prompts
    included, mean over the time since the last line | tokens | steady
engine/sleep | in the clock, with engine.sleep=true: time in which the cache was freed | seconds | near 0
engine/wake | in the clock, with engine.sleep=true: time in which the cache was made anew | seconds | near 0
engine/freed | in the clock, with engine.sleep=true: bytes of the cache that was freed | bytes | any
engine/deaths | in the clock, with engines elsewhere: engines that died and were replaced since the last line | engines
    | 0
environment/deaths | in the clock, with placement.environments: processes that played episodes, died and were replaced
    since the last line | processes | 0
queue/groups | in the clock, with staleness: groups asked ahead when the step came for its own | groups | at most (1 +
    staleness) x prompts
queue/ended | in the clock, with staleness: those of them that had ended | groups | near prompts or above: the learner
    is the slower one; near 0: the engines are
rollout/versions_behind | steps between the weights that said a token and those that learn from it, mean over tokens |
    steps | 0 without staleness
rollout/most_behind | the same of the oldest token | steps | at most staleness + sync_every / optimizer steps - 1
rollout/behind_K | share of tokens that are K steps behind | share | any
rollout/asked_again | groups that were given up when new weights came, and asked again | groups | few: each cost what it
    had said
replay/groups | groups of the replay buffer that the step learned from again | groups | any
replay/held | groups in the replay buffer | groups | at most replay.size
replay/age | steps since they were played, mean over those groups | steps | at most replay.age
replay/left_by_age | groups that left the buffer because they were too old | groups | any
replay/left_by_ratio | groups that left it because the policy had moved too far from what sampled them | groups | few
replay/left_by_size | groups that left it for newer ones | groups | any
implicit/loss | cross entropy of sigmoid(beta * sum_t log phi/ref) and the outcome, mean over the step's answers, before
    the model learns from them | nats | below log 2 = .693 after some steps: it knows something of outcomes
implicit/agrees | share of answers whose sum of log phi/ref is above 0 exactly where the outcome is above one half |
    share | rises above the share of the commoner outcome
implicit/grad_norm | global gradient norm of the implicit process reward model, before the clip | 1 | steady
implicit/answers | answers it learned from | answers | prompts x siblings, where all are judged
experts/load_most | tokens of the busiest expert, per mean of its layer's experts; mean over layers | 1 | 1 to 3; the
    number of experts / experts of a token: all tokens go the same way
experts/load_entropy | entropy of the experts' shares of tokens / log(experts), mean over layers | 1 | 0.8 to 1; falls:
    collapse
experts/dead | share of experts that computed no token of the step | share | steady; grows: experts are given up
experts/differ | share of choices (token and layer) that the learner alone makes otherwise than the sampler did | share
    | near 0 in float32 without staleness; about 0.1 where types or kernels differ
experts/tokens_differ | share of tokens of which at least one layer's choice differs so | share | above experts/differ
experts/regret | how much higher an expert that the sampler did not choose scores than one that it chose, by the
    learner's router over the same hidden states; the largest of the step | logits | at most rounding
experts/gap_replayed | |log-prob of learner - of sampler| where the learner follows the sampler's experts, mean over
    tokens | nats | the dtype's noise, and what staleness adds
experts/gap_alone | the same where the learner chooses by itself | nats | above experts/gap_replayed by what routing
    costs
experts/drift | share of choices, on the step's own tokens, that the step's updates changed | share | small and steady
experts/rerouted | share of tokens of which at least one layer's choice was changed so | share | above experts/drift
experts/balance_loss | load-balance loss: experts x sum of each one's share of choices times its mean probability | 1 |
    the number of experts of a token where all are used alike; above: uneven
canary/router_replay | largest |log-prob| difference of the learner's pass from one that follows given experts | nats |
    at most rounding; above, the run stops
canary/reward_noise | |recorded score - that of the same tokens, read alone| of a reward model / the largest score of
    the group | 1 | at most the dtype's noise; above, the run stops
canary/balance_gap | |load-balance loss - its definition over the minibatch| / the definition | 1 | at most rounding
canary/experts_moved | experts whose update was followed through an optimizer step | experts | any; one that stays stops
    the run
"""
"""A row for each gauge: name | formula | unit | healthy band. A row goes on in the lines below it that are indented."""

_ROWS = [row.split(" | ") for row in TABLE.strip().replace("\n    ", " ").split("\n")]
REGISTRY: dict[str, Definition] = {name: Definition(formula, unit, band) for name, formula, unit, band in _ROWS}
