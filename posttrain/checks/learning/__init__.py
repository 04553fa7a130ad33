"""Checks of credit, loss and update: each is computed a second time or compared with its definition.

`credit_by_definition` and `gradient_by_definition` are that second computation.
"""
