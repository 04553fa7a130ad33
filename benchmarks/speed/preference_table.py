"""The tables of what `preference.py` found, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = {"dpo": "DPO, reference in each update", "dpo_ahead": "DPO, reference before", "reward": "reward model"}
GOALS = {("1m", "heavy"): 2.0, ("26m", "heavy"): 1.3, ("1m", "equal"): 1.1, ("26m", "equal"): 1.1}
SHARE = 0.25
"""The goal for memory: at most this share of TRL's."""


def table(found: dict[str, Any]) -> str:
    """Contests and memory, and the setting they were measured in."""
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    m = found["machine"]
    return "\n".join(
        [
            f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads; {versions}",
            "",
            *_contests(found),
            "",
            *_memory(found),
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _contests(found: dict[str, Any]) -> list[str]:
    head = (
        "size",
        "what",
        "lengths",
        "threads",
        "pairs a pass (TRL)",
        "tokens/s",
        "TRL's",
        "times TRL",
        "pairs",
        "by CPU",
        "others",
        "goal",
    )
    lines = [_row(head), "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for c in found["contests"]:
        a, b = c["sides"]["ours"], c["sides"]["trl"]
        goal = GOALS[c["size"], c["regime"]]
        lines.append(
            _row(
                (
                    c["size"],
                    NAMES[c["what"]],
                    c["regime"],
                    str(c["threads"]),
                    str(c["micro"]),
                    f"{a['tokens_per_s']:,.0f}",
                    f"{b['tokens_per_s']:,.0f}",
                    f"{c['ratio']['wall']:.2f}",
                    f"{c['spread'][0]:.2f}-{c['spread'][1]:.2f}",
                    f"{c['ratio']['cpu']:.2f}",
                    f"{max(a['others'], b['others']):.0%}",
                    f"{goal:g} {'met' if c['ratio']['wall'] >= goal else 'missed'}",
                )
            )
        )
    return lines


def _memory(found: dict[str, Any]) -> list[str]:
    if not found["memory"]:
        return []
    head = ("what", "side", "before an update", "highest", "the update", "ours / TRL, update", "ours / TRL, highest")
    lines = [f"Resident MiB at {found['memory'][0]['vocabulary']:,} ids:", ""]
    lines += [_row(head), "|---|---|---:|---:|---:|---:|---:|"]
    for c in found["memory"]:
        for name, s in c["sides"].items():
            share = c["share"].get(name)
            shares = (f"{share['step_mb']:.2f}", f"{share['peak_mb']:.2f}") if share else ("", "")
            lines.append(
                _row((NAMES[c["what"]], name, *(f"{s[k]:,.0f}" for k in ("before_mb", "peak_mb", "step_mb")), *shares))
            )
    return lines
