"""Floor 1: the definition of every metric, and the rules that read them. No torch."""
