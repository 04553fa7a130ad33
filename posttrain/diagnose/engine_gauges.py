"""The definitions of what engines count."""

from __future__ import annotations

from posttrain.diagnose.gauge_definition import Definition

ENGINE: dict[str, Definition] = {
    "engine/tokens": Definition(
        "tokens of delivered turns, per turn (the sum is all that was said)", "tokens", "steady"
    ),
    "engine/steps": Definition("decoding steps of the engine (read the sum)", "steps", "no band"),
    "engine/occupancy": Definition(
        "share of slots that said a token, mean over steps", "share", "high; low at the end of a wave: long tails"
    ),
    "engine/positions_linear": Definition("positions the layers computed, per position needed", "1", "near 1"),
    "engine/positions_attention": Definition("query-key pairs attended, per pair needed", "1", "near 1"),
    "engine/prefix_hits": Definition(
        "prompt tokens found in the prefix tree, per prompt token looked for there",
        "share",
        "high in episodes of several turns",
    ),
    "engine/kv": Definition("cache blocks that sequences hold, per block their tokens fill", "1", "near 1"),
    "engine/preempted": Definition(
        "sequences that gave their cache up for older ones, per delivered turn", "share", "0; above: raise cache_bytes"
    ),
    "engine/straggler": Definition("longest turn, per mean turn: how long slots idle at the end of a wave", "1", "low"),
    "engine/accepted": Definition(
        "drafted tokens that were said, per drafted token", "share", "high, or speculation does not pay"
    ),
    "engine/pushed": Definition(
        "bytes of weights that travelled to vLLM, per push", "bytes", "those of the adapter, where there is one"
    ),
    "engine/stale_gap": Definition(
        "expected |log-prob| difference of the next token over keys and values of the old weights, per sequence",
        "nats",
        "near 0",
    ),
    "engine/shared": Definition(
        "prompt tokens taken from a sibling's prefill, per prompt token asked for", "share", "towards 1 - 1 / siblings"
    ),
}
