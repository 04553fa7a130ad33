"""Small test problems that laws, miniatures and lessons share: tabular policies, and answers that can all be listed.
`enumerated_policy` lists every answer of a policy, so that an expectation is a finite sum. `policies` and `answers`
draw answers to many prompts at once; `episodes` makes groups from plain numbers; `training` takes a step, with credit,
weights and loss of `posttrain.algorithm`. No run imports this room."""
