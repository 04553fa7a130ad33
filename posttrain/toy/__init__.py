"""Small worlds that laws, miniatures and lessons share: policies that are tables, answers that can all be listed.

`prefixes` lists every answer of a policy, so that an expectation is a finite sum. `policies` and `answers` draw answers
to many prompts at once. Both give the library's own types: groups of episodes, and a batch. `episodes` writes such
groups from plain numbers. No run imports this room. Credit, weights and losses are those of `posttrain.algorithm`: who
plays in these worlds brings them.
"""
