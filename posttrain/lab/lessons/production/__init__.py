"""Pages 15 to 23: reward models, preferences, search, data, topologies, engines, memory, published recipes."""
