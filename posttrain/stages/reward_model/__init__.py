"""The stage that trains a reward model, its batches and its checks."""
