"""Measure a model: a run, a directory, an address, a reward model, searches at inference, an environment.

Begin with `evaluation_target` (what is measured) and `role.heldout_evaluation` (how).
"""
