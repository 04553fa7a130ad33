"""Runs untrusted Python isolated from files, network and other processes: `choose_backend.open_sandbox`, `Sandbox.run`,
and its outcome `Ran`."""
