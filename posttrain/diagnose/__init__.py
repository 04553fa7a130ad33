"""The definition of every metric, the rules that read them, and what is said of a run. No torch.

`gauges` defines, `rules` warn during a run, `run_outcome` reads a folder, `learning_verdict` and `advice` say what came
of it.
"""
