"""The definitions of what asking ahead of the updates and learning again count."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

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
