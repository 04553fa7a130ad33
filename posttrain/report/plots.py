"""Pictures made with matplotlib: gauges of runs by step, searches by their cost, and simulated loops by a setting.
matplotlib is imported when a picture is made, and none of its global state is used: a notebook's own settings stay."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from posttrain.diagnose.run_outcome import LOSSES, Curve, RunOutcome, StageOutcome, read_outcome
from posttrain.record import run_reader
from posttrain.system import files
from posttrain.system.errors import ConfigError, nearest
from posttrain.system.terminal_output import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from posttrain.plan.simulation.simulated_loop import LoopOutcome
    from posttrain.search.curves import SearchPoint

NO_MATPLOTLIB = "matplotlib is not installed. Run: pip install matplotlib"
FORMATS = (".svg", ".png", ".pdf")
HELD_OUT = ("eval/accuracy", "eval/reward", "heldout/loss")
"""Gauges of held-out tasks, which are read from the outcome of a stage, in the order of `_curves`."""
DEFAULT = ("rollout/reward", "eval/accuracy")
"""The gauges that are drawn if none is named. Where some outcome is a grade, the mean held-out reward takes the place
of the accuracy."""
JUDGED = (*LOSSES, "heldout/loss", "heldout/agreement")
"""Gauges that are drawn if none is named and the runs have neither gauge of `DEFAULT`."""
MOST_RUNS = 12
MOST_STAGES = 6
"""The most columns of a plot. Of more stages only the last ones are drawn."""
COLOURS = ("#1f6fb4", "#d1622b", "#2d8a4e", "#a03c78", "#6b5b95", "#8c6d1f")
# A fixed salt: else the ids in an SVG change from one drawing to the next.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "posttrain", "font.size": 9, "text.usetex": False}


def plot(
    folders: str | Path | Sequence[str | Path],
    gauges: Sequence[str] = DEFAULT,
    out: str | Path | None = None,
) -> Figure:
    """Draw gauges of one run or of several by step, a panel for each gauge and a line for each run.

    Each stage that has a curve gets a column, with its own steps and its name below; stages of several runs stand
    together by their names. Held-out gauges also have the evaluations before a stage's first step and after its last
    one.

    Args:
        folders: run folders, finished or not.
        gauges: names of `docs/reference/metrics.md` that the runs recorded.
        out: a file to which the figure is also written. Its ending is the format (.svg, .png, .pdf).

    Raises:
        ConfigError: a gauge that no run has, a file of another kind, too many runs, or no matplotlib.
    """
    paths = [folders] if isinstance(folders, str | Path) else list(folders)
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ConfigError(f"plot draws 1 to {MOST_RUNS} runs: {len(paths)} were given")
    if out is not None:
        check_out(out)
    runs, is_default = [read_outcome(f) for f in paths], tuple(gauges) == DEFAULT
    if is_default and any(s.graded for of in runs for s in of.stages):
        gauges = (DEFAULT[0], "eval/reward")
    drawn = _drawn(runs, gauges)
    if is_default:  # a run that only imitates has no reward, and a reward model no accuracy
        drawn = drawn or _drawn(runs, JUDGED)
    missing = [g for g in gauges if g not in drawn and not (is_default and drawn)]
    if missing:
        # The known gauges are collected only for this error: reading all steps again is slow.
        known = sorted(
            {n for of in runs for s in run_reader.steps(of.folder) for n in s.gauges} | {*_drawn(runs, HELD_OUT)}
        )
        raise ConfigError(
            f"no step of {'these runs' if len(runs) > 1 else runs[0].folder} has the gauge {missing[0]!r};"
            f" {nearest(missing[0], known)}"
        )
    with _matplotlib():
        return _finished(_figure(drawn, runs), out)


def _drawn(runs: Sequence[RunOutcome], gauges: Sequence[str]) -> dict[str, list[dict[str, Curve]]]:
    """Gauge -> for each run its curves by stage. Gauges that no run has are left out."""
    curves_of = {gauge: [_curves(of, gauge) for of in runs] for gauge in dict.fromkeys(gauges)}
    return {gauge: curves for gauge, curves in curves_of.items() if any(curves)}


def _figure(drawn: Mapping[str, Sequence[Mapping[str, Curve]]], runs: Sequence[RunOutcome]) -> Figure:
    """A row for each gauge, a column for each stage."""
    from matplotlib.figure import Figure

    stages = _drawn_stages(drawn, runs)
    wide = max(7.2, 0.6 + 3.3 * len(stages))
    figure = Figure(figsize=(wide, 0.6 + 2.4 * len(drawn)), layout="constrained")
    # One axis of steps for each stage and one of values for each gauge, so that panels can be compared.
    axes = figure.subplots(len(drawn), len(stages), squeeze=False, sharex="col", sharey="row")
    for row, (gauge, curves) in zip(axes, drawn.items(), strict=True):
        row[0].set_ylabel(_text(gauge))
        for axis, stage in zip(row, stages, strict=True):
            _panel(axis, gauge, _labels(runs), [of.get(stage, ()) for of in curves])
    for axis, stage in zip(axes[-1], stages, strict=True):
        axis.set_xlabel(_text(f"step of {stage}"))
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(runs) > 1:
        # A run has a line in many panels, and one entry in the legend.
        shown = [axis.get_legend_handles_labels() for axis in axes.flat]
        named = {label: line for lines, labels in shown for line, label in zip(lines, labels, strict=True)}
        # As many columns as fit: about 14 letters to an inch, and the space of 6 for the line beside a name.
        columns = max(1, min(len(named), 4, int(14 * wide) // (6 + max(map(len, named)))))
        figure.legend(named.values(), named.keys(), frameon=False, fontsize=8, loc="outside upper left", ncols=columns)
    return figure


def summary_picture(of: RunOutcome) -> bytes | None:
    """The picture of summary.md as SVG: reward (or loss) and held-out score of the stage `RunOutcome.drawn`. None where
    that stage took fewer than two steps. ImportError without matplotlib; ConfigError for values too large to be
    drawn."""
    s = of.drawn
    if s is None or s.steps < 2:
        return None
    with _matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.0))
        axis = figure.add_axes((0.07, 0.14, 0.91, 0.77))
        curve, what = (s.rewards, "reward in training") if s.rewards else (s.losses, "loss")
        axis.plot(*_xy(curve), color=COLOURS[0], alpha=0.35, linewidth=0.8)
        axis.plot(*_xy(smooth(curve)), color=COLOURS[0], label=what)
        if s.rewards:
            _held_out(axis, s)
        elif s.heldout_losses:
            axis.plot(*_xy(s.heldout_losses), color=COLOURS[1], marker="o", markersize=3.5, label="held-out loss")
        name = f", {s.stage.algorithm_name}" if s.stage.algorithm_name else ""
        axis.set_title(_text(f"{of.run.recipe}: {s.name}{name}"), fontsize=9)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
        return _written(figure, "svg")


def _held_out(axis: Axes, s: StageOutcome) -> None:
    """Held-out points, with the intervals of the first and the last one."""
    what, points = ("reward", s.heldout_reward) if s.graded else ("accuracy", s.heldout)
    if not points:
        return
    axis.plot(*_xy(points), color=COLOURS[1], marker="o", markersize=3.5, linewidth=1, label=f"held-out {what}")
    # Only the first and the last measurement have an interval: between them the curve holds means.
    for m, x in ((s.start, 0), (s.end, s.end.step if s.end is not None else 0)):
        score = getattr(m, what) if m is not None else None
        if score is not None and score.prompts > 1:
            ends = ([score.mean - score.low], [score.high - score.mean])
            axis.errorbar([x], [score.mean], yerr=ends, color=COLOURS[1], capsize=3, linewidth=1)


def smooth(curve: Curve, share: float = 0.1) -> Curve:
    """The curve with each value replaced by the mean of it and of those before it, together `share` of the points."""
    n = max(1, round(len(curve) * share))
    values = [y for _, y in curve]
    parts = [values[max(0, i + 1 - n) : i + 1] for i in range(len(values))]
    return tuple((x, math.fsum(part) / len(part)) for (x, _), part in zip(curve, parts, strict=True))


def search_plot(points: Sequence[SearchPoint], title: str, out: str | Path) -> Figure:
    """Draw accuracy (or the mean reward of grades) against tokens said for a task, a line for each kind of search.

    Points have 95 % intervals over tasks. A grey line goes through the searches to which no other is superior at as few
    tokens.

    Args:
        out: the file that is written. Its ending is the format (.svg, .png, .pdf).

    Raises:
        ConfigError: a file of another kind.
    """
    from posttrain.search.curves import frontier

    check_out(out)
    families: dict[str, list[SearchPoint]] = {}
    for p in sorted((p for p in points if p.score.prompts), key=lambda p: p.tokens):
        families.setdefault("one answer" if p.name == "one answer" else p.kind.family, []).append(p)
    with _matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axis = figure.subplots()
        front = frontier(points)
        xs, ys = [p.tokens for p in front], [p.score.mean for p in front]
        axis.plot(xs, ys, color="#999999", linewidth=4, alpha=0.35, zorder=0)
        for i, (family, of_kind) in enumerate(families.items()):
            xs, ys = [p.tokens for p in of_kind], [p.score.mean for p in of_kind]
            colour, line = _line_style(i)
            # Intervals are cut to the scale of the scores: beyond it they would look like possible scores.
            low = [p.score.mean - max(p.score.low, p.grades.scale[0]) for p in of_kind]
            high = [min(p.score.high, p.grades.scale[1]) - p.score.mean for p in of_kind]
            axis.errorbar(
                xs, ys, (low, high), color=colour, linestyle=line, marker="o", markersize=4, capsize=3, label=family
            )
            for x, y, p in zip(xs, ys, of_kind, strict=True):
                axis.annotate(p.kind.size, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens said for a task")
        axis.set_ylabel(f"{'mean reward' if points[0].grades.graded else 'accuracy'} on held-out tasks")
        axis.set_title(_text(title), fontsize=9)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
        return _finished(figure, out)


def sweep_plot(name: str, rows: Sequence[tuple[str, LoopOutcome]], out: str | Path) -> Figure:
    """Draw simulated loops by the values of one setting: seconds of a step, who waits, and how old the tokens are.

    Args:
        name: of the setting.
        rows: (value of the setting, the loop with it).
        out: the file that is written. Its ending is the format (.svg, .png, .pdf).

    Raises:
        ConfigError: a file of another kind.
    """
    check_out(out)
    values, at = [_text(value) for value, _ in rows], range(len(rows))
    with _matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        step, idle, ages = cast("Sequence[Axes]", figure.subplots(1, 3))
        step.bar(at, [o.step for _, o in rows], color=COLOURS[0])
        step.set_title("seconds of a step")
        for i, role in enumerate(("learner", "engines")):
            idle.plot(at, [o.idle[role] for _, o in rows], marker="o", color=COLOURS[i], label=role)
        idle.set_ylim(0, 1)
        idle.set_title("share of the time that they wait")
        idle.legend(frameon=False, fontsize=8)
        below = np.zeros(len(rows))
        for i, age in enumerate(sorted({a for _, o in rows for a in o.ages})):
            share = np.array([o.ages.get(age, 0.0) for _, o in rows])
            ages.bar(at, share, bottom=below, color=COLOURS[i % len(COLOURS)], label=f"{age}")
            below += share
        ages.set_title("tokens by steps behind")
        ages.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        for axis in (step, idle, ages):
            axis.set_xticks(list(at), values)
            axis.set_xlabel(_text(name))
            axis.grid(alpha=0.25, axis="y")
        return _finished(figure, out)


def check_out(out: str | Path) -> None:
    """ConfigError for a file whose ending is none of `FORMATS`, or whose folder is not there."""
    if Path(out).suffix not in FORMATS:
        raise ConfigError(f"--out {out}: its ending says what is written; use one of {', '.join(FORMATS)}")
    if not Path(out).parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {Path(out).parent}; make it first")


def _curves(of: RunOutcome, gauge: str) -> dict[str, Curve]:
    """A gauge of each stage by the stage's own steps. Stages without it are left out."""
    steps = run_reader.steps(of.folder)
    by_stage: dict[str, Curve] = {}
    for s in of.stages:
        if gauge in HELD_OUT:
            curve = dict(zip(HELD_OUT, (s.heldout, s.heldout_reward, s.heldout_losses), strict=True))[gauge]
        else:
            of_stage = (x for x in steps if x.stage == s.name and gauge in x.gauges and x.gauges[gauge].count)
            curve = tuple((x.index, x.gauges[gauge].mean) for x in of_stage)
        if curve := tuple((i, y) for i, y in curve if math.isfinite(y)):
            by_stage[s.name] = curve
    return by_stage


def _drawn_stages(drawn: Mapping[str, Sequence[Mapping[str, Curve]]], runs: Sequence[RunOutcome]) -> list[str]:
    """The stages that get a column, in their order.

    They are those with a curve of two points or more; where no stage has one, those with a single point.
    """
    most_points = {n: 0 for of in runs for n in (s.name for s in of.stages)}
    for by_stage in (of_run for curves in drawn.values() for of_run in curves):
        for name, curve in by_stage.items():
            most_points[name] = max(most_points[name], len(curve))
    # A single point is no curve, so its stage gets a column only where no stage has more.
    lines = [name for name, points in most_points.items() if points > 1]
    return (lines or [name for name, points in most_points.items() if points])[-MOST_STAGES:]


def _labels(runs: Sequence[RunOutcome]) -> list[str]:
    """A name for each run: its folder's, or its path where two folders have one name."""
    names = [of.folder.name for of in runs]
    return [_text(str(of.folder) if names.count(of.folder.name) > 1 else of.folder.name) for of in runs]


def _panel(axis: Axes, gauge: str, labels: Sequence[str], curves: Sequence[Curve]) -> None:
    """One gauge in one stage, a line for each run that has it."""
    for i, (label, points) in enumerate(zip(labels, curves, strict=True)):
        if not points:
            continue
        colour, line = _line_style(i)
        if gauge in HELD_OUT:
            axis.plot(*_xy(points), line, color=colour, marker="o", markersize=3, label=label)
        else:
            axis.plot(*_xy(points), color=colour, alpha=0.25, linewidth=0.7)
            axis.plot(*_xy(smooth(points)), line, color=colour, label=label)
    axis.grid(alpha=0.25)


def _line_style(i: int) -> tuple[str, str]:
    """The colour of a line by its number, and its dashes."""
    return COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"


def _xy(curve: Curve) -> tuple[list[int], list[float]]:
    """The steps and the values of a curve."""
    return [x for x, _ in curve], [y for _, y in curve]


def _text(text: str) -> str:
    """Somebody else's text as a label: matplotlib reads no mathematics in it.

    matplotlib leaves labels that begin with _ out of a legend, so these get a blank before it.
    """
    shown = visible(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@contextmanager
def _matplotlib() -> Iterator[None]:
    """matplotlib with our settings for the length of the block. Characters that no font has are drawn as boxes.

    ConfigError where values cannot be drawn.
    """
    import matplotlib

    with matplotlib.rc_context(cast("Any", STYLE)), warnings.catch_warnings(), np.errstate(over="raise"):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        try:
            yield
        except (ValueError, ArithmeticError) as error:  # such as a range of 1e308
            raise ConfigError(f"the values of this record cannot be drawn: {error}") from error


def _finished(figure: Figure, out: str | Path | None) -> Figure:
    """The figure, written to `out`, with the method that a notebook calls to show it: by itself a notebook shows only
    pyplot's figures."""
    vars(figure)["_repr_png_"] = partial(_png, figure)
    if out is not None:
        files.write_file(Path(out), _written(figure, Path(out).suffix[1:]), durable=False)
    return figure


def _png(figure: Figure) -> bytes:
    with _matplotlib():
        return _written(figure, "png")


def _written(figure: Figure, kind: str) -> bytes:
    """The bytes of the picture's file. They are the same for equal pictures in SVG."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()
