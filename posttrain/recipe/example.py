"""Defaults of the recipes: a tiny model that is built on the spot, and 1000 small prompts."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.run import Model

TINY = Model(arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=4, ffn=192, context=128)
"""About 0.1 M parameters with random weights. It trains on one thread; a second one would make it slower."""

_DATA = Path(__file__).parent / "data"
PROMPTS = str(_DATA / "verifiable.jsonl")
"""A file of prompts (the largest of three numbers from 0 to 12), answers, and completions, half of which are wrong."""
PAIRS = str(_DATA / "pairs.jsonl")
"""A file of the same prompts, each with the answer as `chosen` and another of its numbers as `rejected`."""
REWARDS = _DATA / "rewards.py"
"""A file with two reward functions for these prompts, one in each form."""
