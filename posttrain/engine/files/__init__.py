"""Model files: checked before they are parsed, read and written, and compared after they were written."""
