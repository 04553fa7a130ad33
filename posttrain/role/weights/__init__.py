"""Weights on disk and on their way to a sampler."""
