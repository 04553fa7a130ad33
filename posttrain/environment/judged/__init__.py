"""Judged data: pairs, rankings, labels and ratings as rows, and environments in which a policy judges.

Begin with `judged_rows`.
"""
