"""Compares numbers with another way of computing them: losses with TRL's, ranks with one process, number types, the two
sides of a mixture of experts.

`python -m benchmarks` lists the programs; what they measured last lies in `results`.
"""
