"""Verifiers in separate processes that can be killed. `worker_pool` shares processes between callers,
`worker_process` is the trainer's side of one, and `guardian` runs in it. `worker_functions` calls users' reward
functions in such a pool."""
