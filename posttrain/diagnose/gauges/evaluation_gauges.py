"""The definitions of what held-out evaluations measure."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

EVALUATION: dict[str, Definition] = {
    "eval/accuracy": Definition(
        "share of answers to held-out tasks that are right (env.right), sampled: pass@1; not of grades that tell none",
        "share",
        "rises",
    ),
    "eval/reward": Definition(
        "mean raw outcome on held-out tasks, sampled; it leads where outcomes are not 0 and 1", "reward", "rises"
    ),
    "eval/greedy": Definition("share of held-out tasks whose argmax answer is right", "share", "rises"),
    "eval/greedy_reward": Definition("mean raw outcome on held-out tasks, argmax", "reward", "rises"),
    "eval/unjudged": Definition("held-out episodes without a reward: failed and abstained", "episodes", "0"),
    "eval/failed": Definition("held-out episodes that a source failed to judge", "episodes", "0"),
    "eval/abstained": Definition("held-out episodes about which every source abstained", "episodes", "as meant"),
    "eval/tokens": Definition("spoken tokens a held-out episode", "tokens", "steady"),
    "eval/truncated": Definition("share of held-out episodes cut off at max_tokens", "share", "< 0.1"),
    "eval/pass_at_K": Definition(
        "unbiased estimate of P(at least one of K samples of a held-out task solves it)",
        "share",
        "rises; far above accuracy: RL has room",
    ),
    "eval/first_chosen": Definition(
        "share of a judge's verdicts on held-out pairs, each in both orders, that name the first side",
        "share",
        "0.5; away from it: position bias",
    ),
    "eval/length_bias": Definition(
        "share of a judge's verdicts that name the longer side, minus the share of pairs in which it is the better one",
        "share",
        "0; above it: length pays",
    ),
    "eval/both_orders": Definition(
        "share of held-out pairs that a judge judges right in both orders", "share", "rises; at most the accuracy"
    ),
    "eval/unread": Definition("share of a judge's held-out answers without a verdict that can be read", "share", "0"),
    "heldout/loss": Definition(
        "mean negative log-prob of a learned token in the demonstrations of held-out tasks",
        "nats",
        "falls; rising while sft/loss falls: the rows are learned by heart",
    ),
    "heldout/perplexity": Definition("exp of heldout/loss", "tokens", "falls"),
    "eval/metric/NAME": Definition("the same on held-out tasks", "its own", "its own"),
}
