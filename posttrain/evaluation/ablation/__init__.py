"""Compare algorithms on the recorded batches of a run: the gradient that each gives on the same samples."""
