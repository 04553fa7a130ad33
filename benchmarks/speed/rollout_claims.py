"""What `rollout.py` has to show, from what its pieces measured: each claim with its target, the figure, and whether it
holds."""

from __future__ import annotations

import statistics
from typing import Any

TARGETS: dict[str, dict[str, float]] = {
    "heavy-1m": {"generate": 4.0, "vllm": 1.3},
    "heavy-26m": {"generate": 4.0, "vllm": 1.3},
    "equal-1m": {"generate": 0.9, "vllm": 1.2},
    "equal-26m": {"generate": 1.1, "vllm": 1.2},
}
"""Least ratio of tokens/s, ours over theirs."""
ROOFLINE = {"64 slots": 0.45, "256 slots": 0.55}
SHARED = 1 / 12
POSITIONS = 1.02
HELD = 1.05
GROWTH_MB = 4.0
"""What counts as no growth: the resident memory moves by whole arenas of the allocator."""


def claims(piece: dict[str, Any]) -> list[dict[str, Any]]:
    name = piece["piece"]
    if name in TARGETS:
        return [*_speed(piece), *_exactness(piece)]
    return {"roofline": _roofline, "siblings": _siblings, "turns": _turns, "memory": _memory}[name](piece)


def ratios(piece: dict[str, Any], side: str, key: str = "seconds") -> list[float]:
    """Their time over ours, round by round: how many times as fast ours is."""
    return [theirs[key] / ours[key] for ours, theirs in zip(piece["plays"]["ours"], piece["plays"][side], strict=True)]


def rate(piece: dict[str, Any], side: str) -> float:
    """Median tokens/s."""
    return statistics.median(p["spoken"] / p["seconds"] for p in piece["plays"][side])


def _claim(piece: dict[str, Any], what: str, sign: str, target: float, measured: float) -> dict[str, Any]:
    holds = measured >= target if sign == ">=" else measured <= target
    return {"piece": piece["piece"], "what": what, "sign": sign, "target": target, "measured": measured, "holds": holds}


def _speed(piece: dict[str, Any]) -> list[dict[str, Any]]:
    targets = TARGETS[piece["piece"]]
    return [
        _claim(piece, f"tokens/s over {side}", ">=", target, statistics.median(ratios(piece, side)))
        for side, target in targets.items()
        if side in piece["plays"]
    ]


def _exactness(piece: dict[str, Any]) -> list[dict[str, Any]]:
    """Positions and blocks of the last round, against what was counted without the engine."""
    extra = piece["plays"]["ours"][-1]["extra"]
    computed = extra["gauges"]["engine/positions_linear"][0] / extra["positions_needed"]
    held = extra["held_block_steps"] / extra["least_block_steps"]
    return [
        _claim(piece, "token positions computed / needed", "<=", POSITIONS, computed),
        _claim(piece, "cache blocks held / least, over the steps", "<=", HELD, held),
    ]


def _roofline(piece: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a side that says tokens with 2 FLOPs a parameter, against the matrix product timed just before and just after
    it: the clock of a shared machine moves by half within a minute."""
    out: list[dict[str, Any]] = []
    for side, target in ROOFLINE.items():
        plays, threads = piece["plays"][side], piece["machine"]["threads"]
        work = 2 * piece["parameters"] / 1e9
        wall = statistics.median(work * p["spoken"] / p["seconds"] / p["gemm_gflops"]["wall"] for p in plays)
        cpu = statistics.median(
            work * p["spoken"] * threads / p["cpu_seconds"] / p["gemm_gflops"]["cpu"] for p in plays
        )
        out.append(
            _claim(piece, f"share of the matmul roofline, {side} (by CPU seconds {cpu:.2f})", ">=", target, wall)
        )
    return out


def prefilled(play: dict[str, Any]) -> float:
    """Prompt tokens computed."""
    shared, asked = play["extra"]["gauges"]["engine/shared"]
    return asked - shared


def _siblings(piece: dict[str, Any]) -> list[dict[str, Any]]:
    shared, apart = piece["plays"]["shared"], piece["plays"]["apart"]
    faster = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(shared, apart, strict=True))
    return [
        _claim(
            piece,
            "prefill tokens of 16 siblings over no sharing",
            "<=",
            SHARED,
            prefilled(shared[-1]) / prefilled(apart[-1]),
        ),
        _claim(piece, "times as fast as no sharing", ">=", 1.0, faster),
    ]


def _turns(piece: dict[str, Any]) -> list[dict[str, Any]]:
    extra = piece["plays"]["turns"][-1]["extra"]
    computed = extra["gauges"]["engine/positions_linear"][0] / extra["positions_needed"]
    return [_claim(piece, "three turns: token positions computed / needed", "<=", POSITIONS, computed)]


def _memory(piece: dict[str, Any]) -> list[dict[str, Any]]:
    """Growth from the first quarter of the requests, when the cache has its size, to the last."""
    now = [p["now_mb"] for p in piece["plays"]["ours"]]
    return [
        _claim(
            piece,
            f"MiB grown from request {piece['requests'] // 4} to {piece['requests']}",
            "<=",
            GROWTH_MB,
            now[-1] - now[len(now) // 4 - 1],
        )
    ]
