"""Progress of a run in a terminal or a notebook."""
