"""Untrusted Python, run where it can reach nothing: `choose.open_sandbox`, `Sandbox.run`, and what came of it,
`Ran`."""
