"""The mathematics: credit, weights, trust regions, corrections, losses. Pure functions of data; no effects, no
modules."""
