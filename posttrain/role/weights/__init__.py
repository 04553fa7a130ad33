"""Weights and optimizer state on disk, and copies of weights in memory."""
