"""Algorithms as data: each is a patch on another one. No torch; the mathematics is in `posttrain.algorithm`.

Read `algorithm`, then `policy_rows` (REINFORCE to DPPO) and `preference_rows` (DPO and its family). A new algorithm is
a row there and a note in `algorithm_notes`; a new kind of piece is a type in `pieces` and a function in `algorithm`.
"""
