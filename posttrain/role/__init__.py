"""Floor 2: the roles around the loss. They meet engines only through `core.ports`."""
