"""The roles around the loss: rollout, judge, score, pack, trainer, sync. They meet engines only through `core.ports`.

Read `roles` (all of them in one object) and `events` (what observers are told), then each role.
"""
