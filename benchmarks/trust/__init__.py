"""Measures what the checks are worth: planted faults that are caught, healthy runs that are not stopped, sentences that
are right.

`python -m benchmarks` lists the programs; what they measured last lies in `results`.
"""
