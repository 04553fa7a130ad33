"""The Python surface: `main` has run, evaluate and export; `session` is one run from its start to its end."""
