"""Adapters over frozen weights (PEFT), on disk and in a model, and frozen weights in 8 or 4 bits."""
