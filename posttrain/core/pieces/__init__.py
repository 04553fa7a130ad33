"""The pieces of algorithms, one type each. A piece owns its numbers and refuses meaningless ones. Torch-free data."""
