"""Published effects in miniature: small policies, the library's own credit, weights, choices and objective.

    python -m benchmarks.miniatures all
    python -m benchmarks.miniatures rare_token,entropy --seeds 0,1,2

One file an effect. Each names its claim, its source and what was predicted before it was measured; `make prove` repeats
them on three seeds and asserts what was found (docs/research/miniatures.md).
"""
