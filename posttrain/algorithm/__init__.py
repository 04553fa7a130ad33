"""The mathematics: credit, weights, trust regions, corrections, losses. Pure functions of data, without side effects
and without torch modules."""
