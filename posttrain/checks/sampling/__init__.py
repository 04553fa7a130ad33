"""Checks of the sampler: its log-probs are the learner's, its draws follow them, and nothing is older than it says."""
