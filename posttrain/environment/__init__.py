"""Floor 1: tasks, turns and tools. It may import `verifier`, `sandbox` and `core`, and no torch."""
