"""The definition of every metric, the rules that read them, and what is said of a run. No torch.

`gauges` has the definitions, `rules` warn during a run, and `run_outcome` reads a run folder. From what it read,
`learning_verdict` says whether the run learned, `advice` and `next_steps` say what to try, and `run_comparison`
compares runs.
"""
