"""Small test problems that laws, miniatures and lessons share: tabular policies, and answers that can all be listed.

`enumerated_policy` lists every answer of a policy, so that an expectation is a finite sum. `policies` and `answers`
draw answers to many prompts at once. Both return the library's own types: groups of episodes, and a batch. `episodes`
makes such groups from plain numbers. `training` takes a step with them: it asks `posttrain.algorithm` for credit,
weights and loss. Nothing here computes these itself, and no run imports this room.
"""
