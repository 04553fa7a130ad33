"""Floor 5: from a `Run` to its parts, and the verbs that users call."""
