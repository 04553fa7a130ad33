"""Plans beside runs that were measured: each term of a plan and what it was (`against`)."""
