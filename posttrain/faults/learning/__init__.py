"""Faults between the reward and the updated weights."""
