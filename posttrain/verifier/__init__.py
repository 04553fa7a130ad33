"""Floor 1: what judges an answer: rules, programs, users' functions, worker processes. Imports `sandbox` and `core`; no
torch."""
