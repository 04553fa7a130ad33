"""The stages that learn from judged completions (DPO and its family), given ones or the policy's own, and their checks.

Read `preference_stage`, then `judged_batches`. `preference_gradient` is the second computation of the loss's gradient.
"""
