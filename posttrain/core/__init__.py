"""Floor 0: the types, settings and protocols that every other room uses. numpy and the standard library only."""
