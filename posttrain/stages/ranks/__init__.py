"""A run whose learner is several processes: what rank 0 orders, and what every rank does together.

Read `rank_state` (the work), then `rank_lead` (who orders it) and `rank_worker` (who obeys).
"""
