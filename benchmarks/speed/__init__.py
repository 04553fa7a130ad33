"""Measures how fast the parts are, beside other libraries or beside what a plan says: the step, engine, learner,
verifiers, weight transfer.

`python -m benchmarks` lists the programs; what they measured last lies in `results`.
"""
