"""Floor 0: the truths every other room holds in its hands. numpy and the standard library only."""
