"""The definitions of the gauges of learned values, implicit reward models, older samples, replay and experts."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

VALUES: dict[str, Definition] = {
    "value/loss": Definition("clipped squared error of the value, mean over tokens", "reward^2", "falls"),
    "value/return": Definition(
        "target of the value (GAE credit + old value), mean over tokens", "reward", "follows credit/shaped"
    ),
    "value/return_square": Definition("its square; with value/return gives Var(return)", "reward^2", "no band"),
    "value/residual": Definition("return - value, mean over tokens", "reward", "near 0"),
    "value/residual_square": Definition(
        "its square; explained variance = 1 - Var(residual) / Var(return)",
        "reward^2",
        "below Var(return): the value explains something",
    ),
}


IMPLICIT: dict[str, Definition] = {
    "implicit/loss": Definition(
        "cross entropy of sigmoid(beta * sum_t log phi/ref) and the outcome, mean over the step's answers, before the "
        "model learns from them",
        "nats",
        "below log 2 = .693 after some steps: it knows something of outcomes",
    ),
    "implicit/agrees": Definition(
        "share of answers whose sum of log phi/ref is above 0 exactly where the outcome is above one half",
        "share",
        "rises above the share of the commoner outcome",
    ),
    "implicit/grad_norm": Definition(
        "global gradient norm of the implicit process reward model, before the clip", "1", "steady"
    ),
    "implicit/answers": Definition("answers it learned from", "answers", "prompts x siblings, where all are judged"),
}


AHEAD: dict[str, Definition] = {
    "rollout/versions_behind": Definition(
        "steps between the weights that said a token and those that learn from it, mean over tokens",
        "steps",
        "0 without staleness",
    ),
    "rollout/most_behind": Definition(
        "the same of the oldest token", "steps", "at most staleness + sync_every / optimizer steps - 1"
    ),
    "rollout/behind_K": Definition("share of tokens that are K steps behind", "share", "any"),
    "rollout/asked_again": Definition(
        "groups that were given up when new weights came, and asked again", "groups", "few: each cost what it had said"
    ),
    "replay/groups": Definition("groups of the replay buffer that the step learned from again", "groups", "any"),
    "replay/held": Definition("groups in the replay buffer", "groups", "at most replay.size"),
    "replay/age": Definition("steps since they were played, mean over those groups", "steps", "at most replay.age"),
    "replay/left_by_age": Definition("groups that left the buffer because they were too old", "groups", "any"),
    "replay/left_by_ratio": Definition(
        "groups that left it because the policy had moved too far from what sampled them", "groups", "few"
    ),
    "replay/left_by_size": Definition("groups that left it for newer ones", "groups", "any"),
}


EXPERTS: dict[str, Definition] = {
    "experts/load_most": Definition(
        "tokens of the busiest expert, per mean of its layer's experts; mean over layers",
        "1",
        "1 to 3; the number of experts / experts of a token: all tokens go the same way",
    ),
    "experts/load_entropy": Definition(
        "entropy of the experts' shares of tokens / log(experts), mean over layers", "1", "0.8 to 1; falls: collapse"
    ),
    "experts/dead": Definition(
        "share of experts that computed no token of the step", "share", "steady; grows: experts are given up"
    ),
    "experts/differ": Definition(
        "share of choices (token and layer) that the learner alone makes otherwise than the sampler did",
        "share",
        "near 0 in float32 without staleness; about 0.1 where types or kernels differ",
    ),
    "experts/tokens_differ": Definition(
        "share of tokens of which at least one layer's choice differs so", "share", "above experts/differ"
    ),
    "experts/regret": Definition(
        "how much higher an expert that the sampler did not choose scores than one that it chose, by the learner's"
        " router over the same hidden states; the largest of the step",
        "logits",
        "at most rounding",
    ),
    "experts/gap_replayed": Definition(
        "|log-prob of learner - of sampler| where the learner follows the sampler's experts, mean over tokens",
        "nats",
        "the dtype's noise, and what staleness adds",
    ),
    "experts/gap_alone": Definition(
        "the same where the learner chooses by itself", "nats", "above experts/gap_replayed by what routing costs"
    ),
    "experts/drift": Definition(
        "share of choices, on the step's own tokens, that the step's updates changed", "share", "small and steady"
    ),
    "experts/rerouted": Definition(
        "share of tokens of which at least one layer's choice was changed so", "share", "above experts/drift"
    ),
    "experts/balance_loss": Definition(
        "load-balance loss: experts x sum of each one's share of choices times its mean probability",
        "1",
        "the number of experts of a token where all are used alike; above: uneven",
    ),
    "canary/router_replay": Definition(
        "largest |log-prob| difference of the learner's pass from one that follows given experts",
        "nats",
        "at most rounding; above, the run stops",
    ),
    "canary/reward_noise": Definition(
        "|recorded score - that of the same tokens, read alone| of a reward model / the largest score of the group",
        "1",
        "at most the dtype's noise; above, the run stops",
    ),
    "canary/balance_gap": Definition(
        "|load-balance loss - its definition over the minibatch| / the definition", "1", "at most rounding"
    ),
    "canary/experts_moved": Definition(
        "experts whose update was followed through an optimizer step", "experts", "any; one that stays stops the run"
    ),
}
