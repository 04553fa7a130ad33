"""Floor 1: tasks, turns, verifiers and rewards. Imports core only, and no torch."""
