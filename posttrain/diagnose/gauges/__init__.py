"""The definition of every gauge: formula, unit, healthy band. `registry` has them all; docs are generated from it."""
