"""Decides which request computes what next: admission, slots, stop strings, counters. Begin with `scheduler`; `slots`
holds the state that it moves requests through."""
