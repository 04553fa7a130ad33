"""How outcomes are measured: means with intervals, when two numbers are equal, what is right, steps of an answer.

`right` decides whether rewards are pass or fail or grades; every report asks it.
"""
