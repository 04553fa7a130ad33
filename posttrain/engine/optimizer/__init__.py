"""Optimizers: clip, schedule, master copies, update rules, state in 8 bits or in the memory of the CPU."""
