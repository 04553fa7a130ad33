"""Measures outcomes: means with intervals, equality of two numbers, right answers, steps of an answer.

`right` decides whether rewards are pass or fail or grades; every report asks it.
"""
