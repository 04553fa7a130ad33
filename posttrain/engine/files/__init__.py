"""Model files: checked before they are parsed, and compared after they were written."""
