"""Rules that read the gauges during a run and say what is wrong. `all_rules` has them all; they warn and never stop a
run."""
