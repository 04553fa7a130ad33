"""Search at inference: several answers or steps are sampled, and scores decide which one is given.

Read `search_kinds` (the searches as data), then `play_search` (best of several, votes, beams) with `step_sampling`, and
`puct` (trees). `search_checks` watches every search, and `curves` measures them by the tokens that they spend.
"""
