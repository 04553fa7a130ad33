"""Trains with one of the two algorithms of `algorithm.py`: `python train.py CAUTIOUS`."""

from __future__ import annotations

import sys

import algorithm

import posttrain

name = sys.argv[1]
result = posttrain.run("arithmetic", "rl.steps=20", algorithm=getattr(algorithm, name), out=f"runs/{name}")
print(f"{name}: held-out accuracy {result.accuracy}")
