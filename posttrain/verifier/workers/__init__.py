"""Verifiers in separate processes that can be killed. `pool` shares processes between callers, `process` is the
trainer's side of one, and `guardian` runs in it. `functions` calls users' reward functions in such a pool."""
