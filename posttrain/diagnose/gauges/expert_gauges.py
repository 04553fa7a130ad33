"""The definitions of what is measured of a mixture of experts (docs/guides/experts.md)."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

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
    "canary/balance_gap": Definition(
        "|load-balance loss - its definition over the minibatch| / the definition", "1", "at most rounding"
    ),
    "canary/experts_moved": Definition(
        "experts whose update was followed through an optimizer step", "experts", "any; one that stays stops the run"
    ),
}
