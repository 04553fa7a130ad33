"""Environments of other packages, adapted to our interface."""
