"""The types that all rooms share: tasks, transcripts, segments, episodes, groups, batches, verdicts. numpy only.

Read `types`, then `transcript`, `sampling`, `verdict`, `batch` and `streams`. `ports` has the protocols through which
rooms of one floor use each other. A new per-token stream is declared in `streams`; what an environment may offer beyond
playing stands in `abilities`.
"""
