"""Runs untrusted Python isolated from files, network and other processes: `choose_backend.open_sandbox`, `Sandbox.run`,
and its outcome `Ran`.

Read `sandbox_types` (limits, outcome, errors), then `choose_backend` with `backends` and `selftest`, which tries the
attacks of `probes`. `sandbox_worker` is one sandbox, `sandbox_pool` many of them, `program_session` programs in pieces.
`remote` sends programs to an executor, of which `reference_server` is one. The folder `cell` runs inside the sandbox. A
new backend is a class in `backends`.
"""
