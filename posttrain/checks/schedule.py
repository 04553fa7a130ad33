"""When second opinions are due."""


def due(index: int) -> bool:
    """Whether step `index` (from 1) gets its second opinions: the first four, powers of two, then every 32nd."""
    return index <= 4 or index & (index - 1) == 0 or index % 32 == 0
