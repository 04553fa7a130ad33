"""Cached keys and values. `cache_blocks` says who owns which block, `key_value_cache` holds the rows and attends over
them, `prefix_tree` finds them again, `forward_plan` describes a pass, and `cached_model` computes it."""
