"""What roles, learners and samplers hand to each other beside batches: scores, expert choices, parts of weights, ranks.

Begin with `experience` (all that one step played) and `scores` (what a forward pass gives).
"""
