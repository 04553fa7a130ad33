"""A policy: which models can be used, and how one is found, loaded, patched or built small.

Begin with `policy_model`. A model that needs something special gets it in `supported_models`.
"""
