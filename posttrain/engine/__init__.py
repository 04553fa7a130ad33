"""Models, the head, the learner, and the engines that sample.

Read `model`, `layers`, `head`, `learner` and `optimizer` in this order; then `embedded`, the engine in this process.
`vllm` and `endpoint` are engines elsewhere, `pool` several of them, `transfer` the way of new weights to them,
`parallel` a learner over ranks, `adapters` weights trained over frozen ones, `files` model files, `cpu` compiled code.
"""
