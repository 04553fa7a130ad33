"""The types that all rooms share: tasks, transcripts, segments, episodes, groups, batches, verdicts. numpy only.

Read `types`, then `transcript`, `sampling`, `verdict`, `batch` and `streams` (per-token numbers). `ports` has the
protocols through which rooms of one floor use each other, `abilities` what an environment may offer beyond playing.
"""
