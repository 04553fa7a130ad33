"""Builds the parts of a `Run`, and holds the functions that users call."""
