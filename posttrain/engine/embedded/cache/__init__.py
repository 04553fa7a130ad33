"""Cached keys and values: blocks, the pool, the prefix tree, and forward passes over them."""
