"""Checks of verdicts, judges, reward models, step labels and held-out evaluations."""
