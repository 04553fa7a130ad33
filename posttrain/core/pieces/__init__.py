"""The pieces algorithms are made of, one type each: it owns its numbers and refuses meaningless ones. Torch-free
data."""
