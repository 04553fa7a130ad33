"""Verifiers in processes of their own that can be killed: `pool` shares them, `process` holds one, `worker` is what
runs in it."""
