"""A run's weights as a directory that other programs read: certified, with a model card, and on the hub."""
