"""Compares two renderings of one conversation, and describes where they begin to differ."""

from __future__ import annotations

REWRITES = (
    "this chat template rewrites history: with a further message it no longer writes the earlier turns as the policy"
    " saw them, so several turns cannot be one token sequence. Set model.history=rewrite (each turn is then a sequence"
    " of its own), or use a template that only appends"
)


def differs(before: str, whole: str) -> str:
    """The message `REWRITES` with the place at which the two renderings begin to differ."""
    at = len(common(before, whole))
    return (
        f"{REWRITES} (it wrote ...{before[max(0, at - 20) : at + 40]!r}, and then"
        f" ...{whole[max(0, at - 20) : at + 40]!r})"
    )


def common(a: str, b: str) -> str:
    """The longest common beginning."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
