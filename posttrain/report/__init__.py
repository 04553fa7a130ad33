"""Reports of a run for people: summary, comparison, pictures, results in Python.

Begin with `run_summary`. `live` shows the progress of a run; `export` writes its weights for other programs.
"""
