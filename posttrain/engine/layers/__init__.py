"""The computation inside the layers: attention, shared beginnings, experts, fewer passes over memory.

Begin with `attention`, which learner, reference and embedded engine share.
"""
