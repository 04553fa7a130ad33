"""Decides which request computes what next: admission, slots, stop strings, counters."""
