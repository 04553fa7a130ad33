"""Runs untrusted Python isolated from files, network and other processes: `open_sandbox.open_sandbox`, `Sandbox.run`,
and its outcome `Ran`."""
