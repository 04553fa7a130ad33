"""What a choice means, as a formula of one line. r: raw reward, y: a response, |y|: its spoken tokens, G: siblings."""

from __future__ import annotations

from typing import Any

_WORDS: dict[str, dict[str, str]] = {
    "baseline": {
        "Zero": "A = r",
        "Ema": "A = r - b;  b <- {decay} b + {1-decay} r, sample after sample",
        "GroupMean": "A = r - mean of the siblings' r",
        "Others": "A = r - mean of the other siblings' r",
        "Value": "A_t = sum_l ({gamma} * {gae_lambda})^l delta_(t+l);  delta_t = r_t + {gamma} V_(t+1) - V_t",
    },
    "scale": {
        "one": "A / 1",
        "group_std": "A / std of the siblings' r (ddof 1, no epsilon)",
        "batch_std": "A / std of the step's credit (ddof 1, no epsilon)",
        "group_mean": "A / mean of the siblings' r",
    },
    "whiten": {
        "None": "A stays as it is",
        "token": "(A - mean) / std over the step, each token counting once",
        "sample": "(A - mean) / std over the step, each response counting once",
    },
    "ratio": {
        "one": "rho = 1",
        "token": "rho_t = pi(y_t) / anchor(y_t)",
        "sequence_mean": "rho = (pi(y) / anchor(y))^(1/|y|)",
        "sequence_product": "rho = pi(y) / anchor(y)",
    },
    "anchor": {
        "behaviour": "anchor = the sampler's stored probability",
        "start": "anchor = the learner's probability at the start of the step",
    },
    "clip": {"None": "push = rho", "Clip": "push = rho, and 0 where rho > 1 + {high} with A > 0 or rho < 1 - {low} with A < 0"},
    "aggregate": {
        "token_mean": "weight = 1 / all spoken tokens of the minibatch",
        "prompt_mean": "weight = 1 / (prompts * spoken tokens of the prompt's siblings)",
        "sequence_mean": "weight = 1 / (responses * |y|)",
        "sequence_sum": "weight = 1 / responses",
        "constant": "weight = 1 / (responses * max_tokens)",
    },
    "pull": {
        "None": "pull = 0",
        "KL": "{coef} * {estimator} of d = log pi(y_t) - log reference(y_t), in the {placement}",
        "SequenceL2": "{coef} / 2 * (log pi(y) / anchor(y))^2",
    },
    "correction": {
        "None": "c = 1",
        "Truncate": "c = min(start / sampler, {cap}), per {level}",
        "Mask": "c = start / sampler inside [{low}, {high}], else 0, per {level}",
    },
    "filter": {"None": "every group is learned from", "mixed": "only groups whose siblings' r differ; ask again until the step is full"},
    "shape": {
        "()": "reward = r",
        "Signed": "reward = 2 r - 1",
        "Overlong": "reward - (0 ... 1) linearly over the last {cache} of max_tokens",
        "DropTruncated": "cut-off responses carry no gradient",
    },
    "entropy": {"None": "no entropy term", "EntropyBonus": "-{coef} * H beside the policy term"},
}


def formula(choice: str, value: Any) -> str:
    """One line for `value` of `choice`; a piece without one here speaks through its docstring."""
    if isinstance(value, tuple) and value:
        return ";  ".join(formula(choice, v) for v in value)
    key = value if isinstance(value, str) else str(value) if value in (None, ()) else type(value).__name__
    text = _WORDS.get(choice, {}).get(key)
    if text is None:
        return (type(value).__doc__ or key).strip().splitlines()[0]
    numbers = {} if value is None or isinstance(value, str | tuple) else dict(vars(value))
    if "decay" in numbers:
        numbers["1-decay"] = f"{1 - numbers['decay']:g}"
    return text.format(**numbers)
