"""posttrain: RL post-training for language models, checked, from one laptop command to a cluster.

>>> import posttrain
>>> result = posttrain.run("ladder", "rl.steps=10")  # doctest: +SKIP

It works inside a notebook's running event loop too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.core.version import VERSION as __version__

if TYPE_CHECKING:
    from posttrain.api.ablate import ablate
    from posttrain.api.check import check
    from posttrain.api.compare import compare
    from posttrain.api.main import evaluate, export, run
    from posttrain.api.plots import plot
    from posttrain.api.summary import summarize

__all__ = ["__version__", "ablate", "check", "compare", "evaluate", "export", "plot", "run", "summarize"]


def __getattr__(name: str) -> Any:
    """The Python surface, loaded on first use so that `import posttrain` needs no torch."""
    if name in ("run", "evaluate", "export"):
        from posttrain.api import main

        return getattr(main, name)
    if name == "ablate":
        from posttrain.api.ablate import ablate

        return ablate
    if name == "check":
        from posttrain.api.check import check

        return check
    if name == "compare":
        from posttrain.api.compare import compare

        return compare
    if name == "plot":
        from posttrain.api.plots import plot

        return plot
    if name == "summarize":
        from posttrain.api.summary import summarize

        return summarize
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
