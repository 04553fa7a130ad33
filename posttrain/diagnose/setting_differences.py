"""The settings in which runs differ, as a reader wants them: what matters most first, and what only one side has as one
line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.config.run import Run

NONE = "-"
"""The value of a run that has no such setting."""
FIRST = (
    *("", "algorithm.name", "model", "env", "steps", "epochs", "optimizer.lr", "prompts", "siblings", "batch", "beta"),
    *("sampling", "algorithm", "optimizer"),
)
"""Settings by their weight, without the name of their stage; '' is a stage itself. The others come behind."""


def differing(runs: Sequence[Run], each: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns for each run the settings in which some of the runs differ, ordered by their weight. A stage that one of
    them lacks is one line. What lies below a setting that differs, such as the numbers of a piece that one of them has
    not, is told with it. `each`: all settings of each run, by their paths."""
    stages = [{s.name: f"{type(s).__name__.lower()}, {s.steps} steps" for s in run.stages} for run in runs]
    some = {n for of in stages for n in of if any(n not in other for other in stages)}
    each = [{**of, **{n: own.get(n, NONE) for n in some}} for of, own in zip(each, stages, strict=True)]
    names = [n for n in dict.fromkeys(n for of in each for n in of) if len({of.get(n, NONE) for of in each}) > 1]
    lacking = {n for n in names if any(n not in of for of in each)}
    told = [n for n in names if n not in lacking or not any(p in names for p in _above(n))]
    told.sort(key=lambda n: _weight(n, {s for of in stages for s in of}))
    return [{n: _value(n, of) for n in told} for of in each]


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _value(path: str, of: Mapping[str, str]) -> str:
    """The value at a path; of a group that has none of its own, the values right below it."""
    if path in of:
        return of[path]
    below = {n.removeprefix(f"{path}."): x for n, x in of.items() if n.startswith(f"{path}.")}
    return ", ".join(x if n.isdigit() else f"{n}={x}" for n, x in below.items() if "." not in n) or NONE


def _weight(path: str, stages: set[str]) -> int:
    head, _, rest = path.partition(".")
    rest = rest if head in stages else path
    return next((i for i, known in enumerate(FIRST) if rest == known or rest.startswith(f"{known}.")), len(FIRST))
