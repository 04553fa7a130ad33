"""The definitions of the gauges of engines, of the queue of groups, and of the processes that play episodes."""

from __future__ import annotations

from posttrain.diagnose.gauges.gauge_definition import Definition

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
    "engine/idle": Definition(
        "in the clock, with engines elsewhere: share of the time since the last line in which an engine had no turn,"
        " mean over engines",
        "share",
        "low where groups are asked ahead; without, what the learner takes of a step",
    ),
    "engine/in_flight": Definition(
        "in the clock, with engines elsewhere: tokens asked for and not answered yet, those of prompts included, mean"
        " over the time since the last line",
        "tokens",
        "steady",
    ),
    "engine/sleep": Definition(
        "in the clock, with engine.sleep=true: time in which the cache was freed", "seconds", "near 0"
    ),
    "engine/wake": Definition(
        "in the clock, with engine.sleep=true: time in which the cache was made anew", "seconds", "near 0"
    ),
    "engine/freed": Definition(
        "in the clock, with engine.sleep=true: bytes of the cache that was freed", "bytes", "any"
    ),
    "engine/deaths": Definition(
        "in the clock, with engines elsewhere: engines that died and were replaced since the last line", "engines", "0"
    ),
    "environment/deaths": Definition(
        "in the clock, with placement.environments: processes that played episodes, died and were replaced since the"
        " last line",
        "processes",
        "0",
    ),
    "queue/groups": Definition(
        "in the clock, with staleness: groups asked ahead when the step came for its own",
        "groups",
        "at most (1 + staleness) x prompts",
    ),
    "queue/ended": Definition(
        "in the clock, with staleness: those of them that had ended",
        "groups",
        "near prompts or above: the learner is the slower one; near 0: the engines are",
    ),
}
