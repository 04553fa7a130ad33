"""From a recipe and overrides to a run."""
