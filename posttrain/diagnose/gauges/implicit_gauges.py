"""The definitions of what an implicit process reward model learns."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

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
