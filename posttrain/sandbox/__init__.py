"""Runs untrusted Python isolated from files, network and other processes: `open_sandbox`, `Sandbox.run`, and `Ran`.

Read `sandbox_types` (limits, outcome, errors), then `choose_backend` with `backends` and `selftest`, which tries the
attacks of `probes`. `sandbox_worker` is one sandbox, `sandbox_pool` many of them, `program_session` programs in pieces.
`remote` sends programs to an executor, such as `reference_server`. The folder `cell` runs inside the sandbox.
"""
