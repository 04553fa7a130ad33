"""The definitions of what learned values say, and how far off they are."""

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
