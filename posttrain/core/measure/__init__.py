"""Measures outcomes: means with intervals, equality of numbers, right answers, steps of an answer, held-out loss.

`right` decides whether rewards are pass or fail or grades; every report asks it.
"""
