"""Small test problems that laws, miniatures and lessons share: tabular policies, and answers that can all be listed.

`prefixes` lists every answer of a policy, so that an expectation is a finite sum. `policies` and `answers` draw answers
to many prompts at once. Both return the library's own types: groups of episodes, and a batch. `episodes` makes such
groups from plain numbers. No run imports this room. It computes no credit, weights or losses; callers take these from
`posttrain.algorithm`.
"""
