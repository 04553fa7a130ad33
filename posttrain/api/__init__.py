"""Floor 4: builds the parts of a `Run`, and holds the functions that users call."""
