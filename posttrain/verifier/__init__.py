"""Verifiers: they turn a response into a verdict. Programs that a policy wrote run in the sandbox only.

Read `reward_source` (the protocols, and how a value becomes a verdict) and `configured` (from settings to sources),
then a kind of source: `builtin`, `format_rewards`, `math`, `code`, `user_functions` and `batch_functions` (the user's
own, in our form and in TRL's), `judge_endpoint` with its `rubric`. `calling` reads tool calls, `thoughts` finds where
a model's thoughts end, and `workers` has processes that can be killed. A new verifier is a function in `builtin`, or a
source in a file here that `configured` makes by its name.
"""
