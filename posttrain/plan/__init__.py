"""Facts of a run that are known before it starts, without torch: the shape of a model, the cost of a decoding step, and
how much may be asked ahead."""
