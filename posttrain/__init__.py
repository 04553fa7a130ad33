"""posttrain: RL post-training for language models, checked, from one laptop command to a cluster.

>>> import posttrain
>>> result = posttrain.run("ladder", "rl.steps=10")  # doctest: +SKIP

Wrong settings or data, and what stops a run, are a `posttrain.PosttrainError`. Its message says what to change.

It works inside a notebook's running event loop too, and takes functions and rows of the notebook:

>>> rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(20)]
>>> def right(completions, answer, **columns):
...     return [float(c.strip() == a) for c, a in zip(completions, answer)]
>>> result = posttrain.run("grpo", model="my-model", env=posttrain.prompts(rows), rewards=[right])  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posttrain.system.version import VERSION as __version__

if TYPE_CHECKING:
    from posttrain.api.main import evaluate, export, run
    from posttrain.build.request.user_objects import prompts
    from posttrain.evaluation.ablation.ablation import ablate
    from posttrain.evaluation.check_environment import check
    from posttrain.report.compare_runs import compare
    from posttrain.report.plots import plot
    from posttrain.report.run_result import load
    from posttrain.report.run_summary import summarize
    from posttrain.system.errors import PosttrainError

_PLACES = {
    "run": "posttrain.api.main",
    "evaluate": "posttrain.api.main",
    "export": "posttrain.api.main",
    "prompts": "posttrain.build.request.user_objects",
    "load": "posttrain.report.run_result",
    "ablate": "posttrain.evaluation.ablation.ablation",
    "check": "posttrain.evaluation.check_environment",
    "compare": "posttrain.report.compare_runs",
    "plot": "posttrain.report.plots",
    "summarize": "posttrain.report.run_summary",
    "PosttrainError": "posttrain.system.errors",
}

__all__ = [
    "PosttrainError",
    "__version__",
    "ablate",
    "check",
    "compare",
    "evaluate",
    "export",
    "load",
    "plot",
    "prompts",
    "run",
    "summarize",
]


def __getattr__(name: str) -> Any:
    """The Python surface, loaded on first use so that `import posttrain` needs no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
