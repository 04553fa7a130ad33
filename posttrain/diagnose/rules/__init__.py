"""Rules that read the gauges during a run and say what is wrong.

They warn and never stop a run. `all_rules` has them all.
"""
