"""The engine in this process: a paged key-value cache, continuous batching, and a sampler under the log-prob contract.

Read `embedded_engine` (the sampler that a rollout asks), `engine_step` (one forward pass and its draws), `schedule`
(which request computes what), `cache` (where keys and values lie), and `token_sampler` (logits to tokens).
"""

from posttrain.engine.embedded.embedded_engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
