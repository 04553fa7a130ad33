"""Two renderings of one conversation compared: where they begin to differ, said for people."""

from __future__ import annotations

REWRITES = (
    "this chat template rewrites history: with a further message it no longer writes the earlier turns as the policy"
    " saw them, so several turns cannot be one token sequence. Set model.history=rewrite (each turn is then a sequence"
    " of its own), or use a template that only appends"
)


def differs(before: str, whole: str) -> str:
    """`REWRITES` with the place where two renderings part."""
    at = len(common(before, whole))
    return (
        f"{REWRITES} (it wrote ...{before[max(0, at - 20) : at + 40]!r}, and then"
        f" ...{whole[max(0, at - 20) : at + 40]!r})"
    )


def common(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def squeezed(text: str) -> str:
    return "".join(text.split())
