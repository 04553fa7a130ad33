"""The steps at which credit and loss are computed a second time."""


def due(index: int) -> bool:
    """Returns whether step `index` (from 1) is computed a second time: the first four, powers of two, then every
    32nd."""
    return index <= 4 or index & (index - 1) == 0 or index % 32 == 0
