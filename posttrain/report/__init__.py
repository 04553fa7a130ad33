"""Reports of a run for people: summary, comparison, pictures, results in Python.

Begin with `run_summary`; `live` is the progress of a run, `export` what leaves the house.
"""
