"""Mutants between the reward and the updated weights."""
