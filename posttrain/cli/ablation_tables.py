"""`posttrain ladder --on RUN`: what algorithms would do with a run's recorded batches, as tables or JSON."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.ladder.formula.tree_picture import WIDTH
from posttrain.record.run_reader import run_file
from posttrain.report.console import lines_of
from posttrain.report.console import table as columns
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import overwrite, tell

if TYPE_CHECKING:
    from posttrain.evaluation.ablation.ablation import Ablation, AblationRow

HEAD = ("algorithm", "cosine", "norm", "ratio", "silent", "clipped", "ess", "|A|", "solved", "not", "tokens")
FORMS = {
    "cosine": "+.3f",
    "norm": ".4g",
    "ratio": ".3g",
    "silent": ".2f",
    "clipped": ".3f",
    "effective": ".3f",
    "credit": ".3f",
    "solved": "+.3f",
    "unsolved": "+.3f",
}
"""How the figures of a row are printed, in the order of `HEAD`."""
LEGEND = (
    "cosine: of its gradient with the run's own    norm: gradient norm before clipping",
    "ratio: norm / the run's own norm    silent: share of groups without credit",
    "clipped: share of tokens that its trust region silences",
    "ess: effective sample size / sample size, of its correction's factors, else of its ratios",
    "|A|: mean |credit| a token    solved, not: mean credit a token of solved and of other responses",
    "tokens: number of tokens whose log-prob has a gradient",
)
EQUAL = 1e-6
"""Gradient norms with at most this relative difference count as equal, and share a line."""


class ProgressLine:
    """Progress on standard error: one overwritten line in a terminal, elsewhere a line every 5 seconds."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = 0.0

    def say(self, line: str) -> None:
        if self._live:
            overwrite(line, sys.stderr)
        elif time.monotonic() - self._last > 5:
            tell(line, file=sys.stderr)
            self._last = time.monotonic()

    def close(self) -> None:
        if self._live:
            overwrite("", sys.stderr)


@dataclass(frozen=True)
class AblateOptions:
    """The steps of a run, the weights and the device for an ablation. None and '' mean the default of
    `evaluation.ablation.ablation`."""

    steps: str = ""
    stage: str | None = None
    checkpoint: str | None = None
    device: str | None = None


def show(run: str, against: Sequence[str], options: AblateOptions, as_json: bool, trust: bool) -> None:
    """Evaluate the algorithms `against` and print the result. Tables, or with `as_json` JSON.

    Args:
        trust: allow what models and references of a folder made by somebody else ask for.
    """
    run_file(run)  # raises for a folder that is not there, before torch is imported
    from posttrain.evaluation.ablation.ablation import ablate

    progress = ProgressLine()
    try:
        steps, say = numbers(options.steps), progress.say
        ablations = ablate(
            run,
            against,
            stage=options.stage,
            steps=steps,
            checkpoint=options.checkpoint,
            device=options.device,
            say=say,
            trust=trust,
        )
    finally:
        progress.close()
    if as_json:
        tell(json.dumps([_jsonable(asdict(a)) for a in ablations], indent=1))
        return
    for a in ablations:
        tell("\n".join((*lines(a), "")))
    if len(ablations) > 1:
        tell("\n".join(means(ablations)))
    tell("\n".join(LEGEND))


def numbers(word: str) -> list[int]:
    """Step numbers from `3,8,12`."""
    try:
        return [int(w) for w in word.split(",") if w]
    except ValueError:
        raise ConfigError(f"--step {word}: a step, or several with commas between them (--step 3,8,12)") from None


def _jsonable(x: Any) -> Any:
    """A value for JSON: NaN and infinities become null, paths become text."""
    if isinstance(x, dict):
        return {k: _jsonable(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_jsonable(v) for v in x]
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    return x if isinstance(x, str | int | bool) or x is None else str(x)


def lines(a: Ablation) -> Iterator[str]:
    """The lines of one step: its facts, the table, and the algorithms that could not be evaluated."""
    yield f"{a.folder}: {a.stage} step {a.step}"
    yield f"{a.groups} groups, {a.episodes} responses, {a.tokens:,} tokens; the run's own algorithm is {a.own}"
    yield from _prose(f"weights: {a.weights}, {where(a)}")
    for line in checks(a):
        yield from _prose(line)
    yield ""
    rows = [replace(a.rows[0], name=f"{a.own} (own)"), *sorted(a.rows[1:], key=_order)]
    yield from table(rows)
    yield from _listed([""], [(r.name, r.note) for r in a.rows if r.note])
    yield from _listed(["", "not evaluated:"], a.refused)


def _listed(head: Sequence[str], rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each text, behind the names to which it belongs, below the lines of `head`; nothing without rows.
    `rows`: (name, text)."""
    by_text = dict[str, list[str]]()
    for name, text in rows:
        by_text.setdefault(text, []).append(name)
    yield from head if by_text else ()
    for text, names in by_text.items():
        yield from _prose(f"{', '.join(names)}: {text}", "  ")


def _prose(text: str, lead: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=lead + "  ", break_long_words=False, break_on_hyphens=False
    )


def _order(r: AblationRow) -> tuple[float, float]:
    """Sort key: largest cosine first, those without a gradient last."""
    # Rounded as it is printed, then by norm: `table` merges only neighbours, so equal lines must lie side by side.
    return (math.inf if math.isnan(r.cosine) else -round(r.cosine, 3), r.norm)


def where(a: Ablation) -> str:
    """How many steps lie between the weights in use and those with which the step began, in words."""
    gap = f"mean log-prob gap to the sampler {a.logp_gap:.1e}" if not math.isnan(a.logp_gap) else "no token was scored"
    if a.behind is None:
        return f"of another stage than {a.stage}; {gap}"
    if a.behind == 0:
        return f"exactly those the step began with ({gap})"
    steps = f"{abs(a.behind)} step{'s' if abs(a.behind) > 1 else ''}"
    if a.behind > 0:
        return f"{steps} older than those the step began with ({gap}): the samples come from a policy {steps} ahead"
    return f"{steps} newer than those the step began with ({gap}): the samples are {steps} stale"


def checks(a: Ablation) -> Iterator[str]:
    """Lines that compare the step, computed again, with the record."""
    own = a.rows[0]
    if not own.norm:
        yield "own: no gradient, because no group has credit; nothing has a cosine with it. Look at another --step"
        return
    if a.minibatches > 1:
        recorded = f"; the run took {a.minibatches} optimizer steps of these groups, here they are one minibatch"
    elif a.recorded_norm is None:
        recorded = "; none was recorded"
    elif a.behind == 0:
        recorded = f", recorded {a.recorded_norm:.6g}"
    else:
        recorded = f"; {a.recorded_norm:.6g} was recorded at other weights"
    if math.isnan(a.credit_gap):
        credit = ""
    else:
        credit = "; credit as recorded" + (f", within {a.credit_gap:.1e}" if a.credit_gap else "")
    yield f"own: gradient norm {own.norm:.6g}{recorded}{credit}"
    if not math.isnan(a.halves):
        yield f"chance: the own gradients of the two halves of the groups have cosine {a.halves:.3f}"
    if a.behind == 0 and own.clipped == 0:
        yield "ratios: all 1 at the weights that sampled, so trust regions are silent; try a later --checkpoint"


def table(rows: Sequence[AblationRow]) -> Iterator[str]:
    """The table. Algorithms with equal gradients share one line, with their names below it. A column is as wide as its
    longest cell, so very small norms, such as 1.234e-11, shift no column."""
    cells = [_cells(r) for r in rows]
    # (the first row of a line, its cells, the names of the other rows that share the line)
    merged: list[tuple[AblationRow, tuple[str, ...], list[str]]] = []
    for i, (r, line) in enumerate(zip(rows, cells, strict=True)):
        # The first row is the run's own and shares no line. Norms are compared with more digits than are printed.
        if i > 1 and line == merged[-1][1] and math.isclose(merged[-1][0].norm, r.norm, rel_tol=EQUAL):
            merged[-1][2].append(r.name)
        else:
            merged.append((r, line, []))
    head, *printed = lines_of(columns("", HEAD, [(r.name, *line) for r, line, _ in merged], HEAD[:1], one_line=True))
    yield head
    for text, (_, _, same) in zip(printed, merged, strict=True):
        yield text
        yield from _prose(f"= {', '.join(same)}", "  ") if same else ()


def _cells(r: AblationRow) -> tuple[str, ...]:
    """All that is printed of a row but its name."""
    return (*(_number(getattr(r, name), form) for name, form in FORMS.items()), f"{r.tokens}")


def _number(x: float, form: str) -> str:
    return "-" if math.isnan(x) else format(x, form)


def means(ablations: Sequence[Ablation]) -> Iterator[str]:
    """Cosine and ratio over several steps, for the algorithms that were evaluated on all steps."""
    rows_of_step = [{r.name: r for r in a.rows} for a in ablations]
    # Only algorithms with all steps: means over different steps could not be compared.
    common = [n for n in rows_of_step[0] if all(n in rows for rows in rows_of_step)]
    yield f"over {len(ablations)} steps: mean (least to most)"
    wide = max(map(len, common)) + 2
    for name in common:
        cosines, ratios = ([getattr(rows[name], f) for rows in rows_of_step] for f in ("cosine", "ratio"))
        yield f"{name:<{wide}}cosine {_span(cosines, '+.3f')}   ratio {_span(ratios, '.3g')}"
    yield ""


def _span(values: Sequence[float], form: str) -> str:
    known = [v for v in values if not math.isnan(v)]
    return f"{sum(known) / len(known):{form}} ({min(known):{form}} to {max(known):{form}})" if known else "-"
