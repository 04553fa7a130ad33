"""Pages 15 to 19 and 23: reward models, preferences, search, verifiers, prompts, topologies, published algorithms."""
