"""The lab as files: every page with readouts computed on a grid of its one or two main knobs, so that it works without
a server."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from posttrain.lab.catalog import entries, load
from posttrain.lab.lesson import Lesson, Slider
from posttrain.lab.overview import map_page
from posttrain.lab.page import lesson_page
from posttrain.lab.server import claim_rows
from posttrain.system.errors import ConfigError
from posttrain.system.machine import cores
from posttrain.system.terminal_output import tell
from posttrain.web.local import static_files

MOST = 200_000
"""Bytes of the readouts of a page at most; the grid becomes coarser until they fit."""
POSITIONS = (9, 7, 5, 4, 3)
"""Positions of a slider on the grid, from fine to coarse."""
TRAINED = 3
"""Positions of a slider on a page that trains."""


def positions(knob: Any, count: int) -> list[Any]:
    """Values of a knob on a grid: of a slider at most `count`, equal ways apart, one of them moved to the default."""
    if not isinstance(knob, Slider):
        return list(knob.tried())
    shares = [i / (count - 1) for i in range(count)]
    if knob.log:
        values = [float(f"{knob.low * (knob.high / knob.low) ** s:.3g}") for s in shares]
    else:
        values = [knob.low + round(s * (knob.high - knob.low) / knob.step) * knob.step for s in shares]
    nearest = min(range(count), key=lambda i: abs(values[i] - knob.default))
    values[nearest] = knob.default
    return list(dict.fromkeys(knob.read(min(max(v, knob.low), knob.high)) for v in values))


def main_knobs(lesson: Lesson) -> list[Any]:
    """The knobs that a page without a server can move."""
    names = lesson.grid or tuple(k.name for k in lesson.knobs[:1])
    return [k for n in names for k in lesson.knobs if k.name == n]


def grid(lesson: Lesson, count: int) -> dict[str, Any]:
    """Readouts on a grid of the lesson's main knobs, the last of them fastest, those of its breaks, and its claims."""
    names = [k.name for k in main_knobs(lesson)]
    values = [positions(k, count) for k in main_knobs(lesson)]
    readouts = [
        lesson.last(lesson.read(dict(zip(names, at, strict=True)))).as_json() for at in itertools.product(*values)
    ]
    broken = [lesson.last(lesson.read(b.values)).as_json() for b in lesson.breaks]
    return {
        "knobs": names, "positions": values, "readouts": readouts, "breaks": broken,
        "claims": claim_rows(lesson),
    }  # fmt: skip


def default_index(lesson: Lesson, found: dict[str, Any]) -> int:
    """Returns the index of the default position of the knobs on a grid."""
    known, index = {k.name: k for k in lesson.knobs}, 0
    for name, values in zip(found["knobs"], found["positions"], strict=True):
        index = index * len(values) + values.index(known[name].read(known[name].default))
    return index


def fitted(lesson: Lesson) -> tuple[str, dict[str, Any]]:
    """(the data of a page as JSON of at most `MOST` bytes, the same as data).

    Raises:
        ConfigError: even the coarsest grid is too large; the lesson's readouts must become smaller.
    """
    counts = (TRAINED,) if lesson.pace == "train" else POSITIONS
    sizes: list[int] = []
    default_size = len(_json(lesson.last(lesson.read({})).as_json()))
    for count in counts:
        readouts = math.prod(len(positions(k, count)) for k in main_knobs(lesson)) + len(lesson.breaks)
        # So a grid that would be thrown away is not computed. The coarsest one is computed in any case.
        if count != counts[-1] and default_size * readouts > MOST:
            continue
        on_grid = grid(lesson, count)
        text = _json(on_grid)
        if len(text.encode()) <= MOST:
            return text, on_grid
        sizes.append(len(text.encode()))
    raise ConfigError(f"page {lesson.number}: {sizes[-1]:,} bytes of readouts, {MOST:,} are allowed; thin its curves")


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def write_site(into: Path, say: Callable[[str], None] = tell) -> int:
    """Write all pages into a folder, on all cores; returns the exit code 0."""
    (into / "data").mkdir(parents=True, exist_ok=True)
    for name, path in static_files("posttrain.web", "posttrain.lab").items():
        shutil.copyfile(path, into / name)
    (into / "index.html").write_text(map_page("site"), encoding="utf-8")
    # Pages that train take longest, so they come first.
    names = [entry.name for entry in sorted(entries(), key=lambda entry: entry.pace != "train")]
    # Processes that are begun anew: one that is forked from threads of torch may wait for ever.
    with ProcessPoolExecutor(cores(), get_context("spawn")) as processes:
        for page in as_completed([processes.submit(write_page, into, name) for name in names]):
            say(page.result())
    return 0


def write_page(into: Path, name: str) -> str:
    """Write one page and its data; returns a line that says what it has."""
    import torch

    torch.set_num_threads(1)
    lesson = load(name)
    text, on_grid = fitted(lesson)
    (into / "data" / f"{lesson.name}.json").write_text(text, encoding="utf-8")
    first = on_grid["readouts"][default_index(lesson, on_grid)]
    (into / f"{lesson.name}.html").write_text(lesson_page(lesson, "site", first), encoding="utf-8")
    return f"{lesson.number} {lesson.title}: {len(on_grid['readouts'])} positions, {len(text) // 1000} KB"
