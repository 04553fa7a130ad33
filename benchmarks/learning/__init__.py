"""Measures what training brings: algorithms, preference losses, judges, tools, old samples, several updates a batch.

`python -m benchmarks` lists the programs; what they measured last lies in `results`.
"""
