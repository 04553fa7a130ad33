"""Facts of a run that are known before it starts, without torch: the shape of a model, the memory and the time of a
step, how much may be asked ahead, and a loop that is played event by event."""
