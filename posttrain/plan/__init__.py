"""What can be said of a run before it starts, without torch: the shape of a model, what a decoding step takes, and how
much may be asked ahead."""
