"""Mutants of engines, ranks, placement, transfers and checkpoints."""
