"""Floor 1: every metric's definition, and (later) the rules that read them. No torch."""
