"""`posttrain plan` in the terminal: memory by term and instant, the five times of a step, and what to change; also its
forms --fit, --machines, --sweep, --forces and --probe, as text or JSON."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from posttrain.api.plan_against import factors_of
from posttrain.api.planned import Planned, PlanOptions, machine_word, planned
from posttrain.cli.screen_text import hanging, screen_width
from posttrain.config.run import Reinforce
from posttrain.plan.changes import fixes, largest
from posttrain.plan.counted import counted
from posttrain.plan.forces import CELLS, MIDDLE
from posttrain.plan.layouts import DAY, MachineLayout, largest_batch, of_each_topology, other_assumptions
from posttrain.plan.memory import INSTANTS, Place, places
from posttrain.plan.throughput import ROLES, Assumed
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

SMALLEST = 0.002
"""Terms below this share of the peak get no line of their own: their sum is the line `others`."""
MIXTURE = (
    "a mixture of experts: a lower bound; published steps took 1.1 to 7 times as long (docs/research/plans-measured.md)"
)


def show(o: Namespace) -> None:
    """Print the plan that these options ask for."""
    if o.machines is not None:
        _machines(o)
        return
    if o.sweep is not None or o.out is not None:
        _sweep(o, options_of(o))
        return
    plan = planned(o.recipe, o.overrides, options_of(o))
    if o.fit is not None:
        _fit(o.fit, plan)
    elif o.json:
        tell(json.dumps(as_data(plan), indent=1))
    else:
        for line in lines(plan):
            tell(line)


def options_of(o: Namespace) -> PlanOptions:
    """The options of a plan that are no settings of a run, from the words of the command."""
    accepted = getattr(o, "accepted", 0.0)
    factors = factors_of(o.calibrate, o.stage) if o.calibrate is not None else {}
    return PlanOptions(
        stage=o.stage,
        prompt=o.prompt,
        answer=o.answer,
        spread=o.spread,
        nproc=o.nproc,
        replicas=o.replicas,
        parallel=o.parallel,
        assumed=Assumed(reward=o.reward, judges=o.judges, kept=o.kept, accepted=accepted, factors=factors),
    )


def _sweep(o: Namespace, options: PlanOptions) -> None:
    from posttrain.api.swept import swept
    from posttrain.cli import sweep

    if o.sweep is None:
        raise ConfigError(f"--out {o.out}: only --sweep draws a picture; add --sweep staleness=0,1,2,4")
    if o.out is not None:
        from posttrain.report import plots

        plots.check_out(o.out)  # before the simulation, which takes a while
    name, rows = swept(o.recipe, o.overrides, options, o.sweep)
    for line in [json.dumps(sweep.as_data(name, rows), indent=1)] if o.json else sweep.lines(name, rows):
        tell(line)
    if o.out is not None:
        from posttrain.report import plots

        plots.sweep_plot(name, [(r.value, r.loop) for r in rows], o.out)
        tell(f"written: {o.out}")


def size(count: float) -> str:
    """Bytes in words, in the largest unit of which there is at least one.

    >>> size(80e9), size(1.26e12), size(57_344)
    ('80.0 GB', '1.26 TB', '57 kB')
    """
    for unit, name, digits in ((1e12, "TB", 2), (1e9, "GB", 1), (1e6, "MB", 0)):
        if count >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count / 1e3:,.0f} kB"


def lines(plan: Planned) -> Iterable[str]:
    """The plan in lines."""
    w, s = plan.work, plan.work.shape
    # Parts of half a percent or less are left out.
    parts = ", ".join(
        f"{name} {count / s.parameters:.0%}" for name, count in s.parts.items() if count > 0.005 * s.parameters
    )
    name = plan.run.model.path or f"a built {plan.run.model.arch}"
    yield f"{plan.run.recipe}, stage {plan.stage.name}, on {plan.machine.name}"
    yield f"  {name}: {s.parameters:,} parameters ({parts})"
    for note in plan.notes:
        yield f"  {note}"
    for place in places(w):
        yield ""
        yield from _memory(place, plan)
    yield ""
    yield from counted(w)
    yield from _changes(plan)
    yield ""
    yield from _time(plan)


def _memory(place: Place, plan: Planned) -> Iterable[str]:
    fits = "fits" if place.most <= plan.memory else "DOES NOT FIT"
    yield f"memory of {place.name}: {size(place.most)} of {size(plan.memory)}, {fits}; highest at: {place.peak}"
    largest_terms = [t for t in place.held(place.peak) if t.bytes > SMALLEST * place.most]
    # The rest of the peak: terms that are too small for a line. The slack has a line of its own.
    others = place.most - sum(t.bytes for t in largest_terms) - max(0.0, place.slack(place.peak))
    width = max(len(t.name) for t in largest_terms)
    for t in largest_terms:
        yield f"  {t.name:<{width}}  {size(t.bytes):>9}  {t.formula}"
    yield f"  {'allocator slack':<{width}}  {size(max(0.0, place.slack(place.peak))):>9}  kept and not in use"
    if others > SMALLEST * place.most:
        yield f"  {'others':<{width}}  {size(others):>9}"
    yield "  at each instant: " + ", ".join(f"{i} {size(place.total(i))}" for i in INSTANTS)


def _changes(plan: Planned) -> Iterable[str]:
    if all(p.most <= plan.memory for p in places(plan.work)):
        return
    yield ""
    changes = fixes(plan.work, plan.stage.name, plan.memory)
    if not changes:
        yield "no setting makes it fit: take a smaller model, more devices (--nproc), or devices with more memory"
        return
    yield "what makes it fit, the cheapest first:"
    for change in changes:
        peak = max(p.most for p in places(change.work))
        yield f"  {' '.join(change.words)}   {size(peak)}; {change.price}"


def _time(plan: Planned) -> Iterable[str]:
    t = plan.timed
    if t is None:
        yield "time: this machine's speed is not known. posttrain plan --probe measures it once; or give machine=H100"
        return
    times = t.times
    role_times = ", ".join(f"{role} {getattr(times, role):.3g} s" for role in ROLES)
    yield f"time of a step: {t.step:.3g} s, {t.topology} ({role_times}); longest: {times.slowest}"
    if plan.work.samples_answers:
        # 1e-12: no division by 0 where no answer is decoded.
        tail = (t.decode - t.flat) / max(t.decode, 1e-12)
        yield (
            f"  rollout: prompts {t.prefill:.3g} s, answers {t.decode:.3g} s, of which {tail:.0%} is the tail of long"
            f" ones; {t.engines} device{'s' * (t.engines > 1)} sample{'s' * (t.engines == 1)}, {t.learners} learn"
        )
    yield (
        f"  {t.tokens_per_second:,.0f} tokens/s learned from; {t.utilisation:.1%} of the peak arithmetic; devices idle"
        f" {t.idle:.0%} of the time"
    )
    if plan.work.shape.experts is not None:
        yield f"  {MIXTURE}"
    steps = plan.stage.steps
    money = f", {t.cost(steps):,.0f} at {plan.machine.price:g} an hour" if plan.machine.price else ""
    yield f"  {steps:,} steps: {steps * t.step / 3600:,.2f} hours, {t.hours(steps):,.1f} device hours{money}"
    gpu = f"; {plan.machine.why}; not measured on a GPU" if plan.machine.device.accelerator else ""
    yield f"  {plan.machine.device.source}{gpu}"


def _fit(what: str, plan: Planned) -> None:
    if what == "siblings" and not hasattr(plan.stage, what):
        raise ConfigError(f"--fit siblings: stage {plan.stage.name} has no such setting; name another with --stage")
    best = largest(what, plan.work, plan.memory, plan.stage.name)
    if best is None:
        raise ConfigError(
            f"--fit {what}: not even the smallest fits into {size(plan.memory)}; leave --fit out to see what fills it"
        )
    peak = size(max(p.most for p in places(best.work)))
    bound = f"; {best.price}" if best.price else ""
    tell(f"largest {what} that fits into {size(plan.memory)}: {' '.join(best.words)}   ({peak}{bound})")


def _machines(o: Namespace) -> None:
    """Print the layout for these devices and days, those beside it, and what other assumptions make of it."""
    if not 0 < o.days * DAY < math.inf:
        raise ConfigError(f"--days {o.days:g}: must be > 0")
    plan = planned(o.recipe, [*o.overrides, f"machine={o.machines}"], options_of(o))
    if not (isinstance(plan.stage, Reinforce) and plan.machine.device.accelerator):
        raise ConfigError("--machines plans stages that learn from reward, on accelerators; leave it out for this one")
    assumed = plan.timed.assumed if plan.timed is not None else Assumed()
    steps, where = plan.stage.steps, plan.machine
    # The best layout may have a larger batch than the stage. The others are compared with it at that batch.
    best = largest_batch(plan.work, where, assumed, steps, o.days)
    work = replace(plan.work, prompts=best.work.prompts)
    rows, under_assumptions = of_each_topology(work, where, assumed), other_assumptions(work, where, assumed)
    if o.json:
        name = plan.stage.name
        data = {"best": _layout(best, name), "layouts": [_layout(x, name) for x in rows]}
        tell(json.dumps({**data, "assumptions": {n: x and _layout(x, name) for n, x in under_assumptions}}, indent=1))
        return
    days, most_steps = steps * best.step / DAY, int(o.days * DAY / best.step)
    command, stage_prefix = best.command_line(plan.stage.name), f"{plan.stage.name}."
    # The layout chooses these settings itself. Given twice, also without the stage, the printed command would not run.
    chosen = {word.partition("=")[0].removeprefix(stage_prefix) for word in command.split()}
    other_words = [
        w for w in machine_word(o.overrides)[1] if w.partition("=")[0].removeprefix(stage_prefix) not in chosen
    ]
    text = (
        *plan.notes,
        f"{best.summary}; copies of the weights cut over {best.work.copy_ranks} devices,"
        f" checkpointing {best.work.checkpointing}",
        f"{work.prompts} prompts x {work.siblings}: {best.step:.3g} s a step, the bottleneck is {best.bottleneck};"
        f" {steps:,} steps take {days:.2g} days, {most_steps:,} end in {o.days:g} day{'s' * (o.days != 1)}",
        f"  posttrain run {' '.join([o.recipe, *other_words])} {command}",
        "of each topology the best:",
        *(f"  {x.summary:<62} {x.step:>6.3g} s  idle {x.idle:>3.0%}  {x.bottleneck}" for x in rows),
        "where an assumption is another:",
        *(
            f"  {name:<33} " + (f"{x.step:>6.3g} s  {x.bottleneck:<9} {x.summary}" if x else "nothing fits")
            for name, x in under_assumptions
        ),
        *([] if work.shape.experts is None else [MIXTURE]),
        f"{where.device.source}; {where.why}; not measured on a GPU",
    )
    for line in text:
        tell(line)


def _layout(x: MachineLayout, stage: str) -> dict[str, Any]:
    w = x.work
    return {"topology": x.topology, "engines": x.engines, "learners": x.learners, "workers": x.workers,
            "cut": w.copy_ranks, "staleness": w.staleness, "checkpointing": w.checkpointing, "prompts": w.prompts,
            "seconds": x.step, "idle": x.idle, "bottleneck": x.bottleneck, "words": x.command_line(stage)}  # fmt: skip


def as_data(plan: Planned) -> dict[str, Any]:
    """The plan as plain data."""
    t = plan.timed
    return {
        "stage": plan.stage.name,
        "machine": plan.machine.name,
        "memory_of_device": plan.memory,
        "notes": list(plan.notes),
        "places": [
            {
                "name": p.name,
                "peak": p.peak,
                "bytes": p.most,
                "fits": p.most <= plan.memory,
                "instants": {i: p.total(i) for i in INSTANTS},
                "terms": [
                    {"name": x.name, "bytes": x.bytes, "formula": x.formula, "instants": list(x.instants)}
                    for x in p.terms
                ],
            }
            for p in places(plan.work)
        ],
        "changes": [
            {"overrides": list(c.words), "costs": c.price} for c in fixes(plan.work, plan.stage.name, plan.memory)
        ],
        "seconds": None
        if t is None
        else {"step": t.step, "topology": t.topology, **{r: getattr(t.times, r) for r in ROLES}},
    }


def forces() -> None:
    """Print the decision table, a paragraph a cell."""
    for c in CELLS:
        tell(f"{c.signal}; {c.estimator}; {c.cost}")
        _tell_hanging("  -> ", f"{c.reward}, {c.algorithm}, {c.topology}: as {c.recipe}")
        _tell_hanging("     ", f"because {c.why}")
        tell(f"     {c.command}")
    _tell_hanging("", f"in the middle of all three: {MIDDLE}")


def _tell_hanging(lead: str, text: str) -> None:
    """Prints a text behind its lead, as wide as the terminal."""
    for line in hanging(lead, text, screen_width()):
        tell(line)


def probed(figures: dict[str, Any]) -> None:
    """Print what was measured of this machine."""
    tell(
        f"this machine: {figures['flops'] / 1e9:,.0f} GFLOP/s, {figures['bandwidth'] / 1e9:,.1f} GB/s,"
        f" {figures['latency'] * 1e3:.2g} ms a pass, {size(figures['memory'])}; kept in {figures['file']}"
    )
