"""The data that roles, learners and samplers give each other beside batches: scores, expert choices, shards, ranks.

Begin with `experience` (all that one step played) and `scores` (what a forward pass gives).
"""
