"""Mutants of data, rewards, judges, labels and selection."""
