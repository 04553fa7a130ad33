"""The engine in this process: a paged key-value cache, continuous batching, and a sampler under
the log-prob contract."""

from posttrain.engine.embedded.embedded_engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
