"""Hidden states to log-prob and entropy, without logits of the whole vocabulary; and heads for values and scores.

Begin with `logprob`. `reference_ops` has operations by definition; `kernel_table` says which faster form is used.
"""
