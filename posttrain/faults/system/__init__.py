"""Faults of engines, ranks, placement, transfers and checkpoints."""
