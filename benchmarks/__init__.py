"""Measurements, by shelf: `speed`, `parity`, `trust`, `learning` and `miniatures`, each with its results beside it.

`python -m benchmarks` lists every program in one line. They need the source tree, and take from minutes to hours.
"""
