"""Verifiers: they turn a response into a verdict. Programs that a policy wrote run in the sandbox only."""
