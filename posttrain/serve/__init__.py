"""An OpenAI-compatible HTTP server over a `core.ports.Sampler`.

Read `command` (from a target to an engine) and `listen` (the running server), then the way of a request: `routes`,
`intake` (its body, bounded), `protocol` (its fields), `served_answers` (its answer, whole or in chunks). Forms of
answers are in `response_format`, tools in `served_tools`. `connections` and `caller_limits` bound what callers can
take, and `refusal` is what they get instead. A new parameter of a request is a field in `protocol`.
"""
