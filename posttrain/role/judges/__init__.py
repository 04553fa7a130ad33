"""Roles that judge finished episodes: reward models, trained judges, and labels of steps by completion."""
