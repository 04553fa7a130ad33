"""`posttrain plan --sweep KNOB=A,B,C`: for each value of a setting a plan, and a simulation of its loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from posttrain.api.planned import Planned, PlanOptions, planned
from posttrain.plan.lengths import POINTS
from posttrain.plan.simulation.simulated_loop import LoopOutcome, SimulatedLoop, Update
from posttrain.plan.simulation.simulator import simulate
from posttrain.plan.throughput import Assumed, Throughput
from posttrain.system.errors import ConfigError

MOST_VALUES = 12
"""Most values of the knob."""
MOST_ANSWERS = 256
"""Most answers of a simulated step. A larger step is scaled down (`loop_of`)."""
STEPS, ANSWERS = 24, 4096
"""How many steps are simulated: `STEPS`, or fewer, so that there are at most `ANSWERS` answers, but at least 6."""
# Knobs that are options of the plan, and knobs that are assumptions, with their types.
OPTIONS = {"prompt": int, "answer": int, "spread": float, "nproc": int}
ASSUMED = {"reward": float, "judges": int, "kept": float}


@dataclass(frozen=True)
class SweptValue:
    """One value of the knob."""

    value: str
    plan: Planned
    loop: LoopOutcome


def swept(recipe: str, words: Sequence[str], options: PlanOptions, sweep: str) -> tuple[str, list[SweptValue]]:
    """The knob as it was understood, and the plan and the simulated loop of each value.

    Args:
        sweep: KNOB=A,B,C. A knob is a setting of the stage (`staleness`), an option of the plan (`answer`), or any
            override (`engine.update`, `machine`).

    Raises:
        ConfigError: a word means nothing, the stage samples nothing, or nothing is known of the machine's speed.
    """
    name, _, given = sweep.partition("=")
    values = [v.strip() for v in given.split(",") if v.strip()]
    if not name or not values or len(values) > MOST_VALUES:
        raise ConfigError(f"--sweep {sweep}: write a knob and 1 to {MOST_VALUES} values, as --sweep staleness=0,1,2,4")
    # A plan without the knob comes first: it raises for wrong words, and has the stage to which the knob may belong.
    first = planned(recipe, words, options)
    if not first.work.samples_answers:
        raise ConfigError(
            f"--sweep: stage {first.stage.name} samples nothing, so nobody waits for answers; see --stage"
        )
    if any(f.name == name for f in fields(first.stage)):
        name = f"{first.stage.name}.{name}"
    out = list[SweptValue]()
    for value in values:
        more_words, changed_options = _with(name, value, options)
        plan = planned(recipe, [*words, *more_words], changed_options)
        if plan.timed is None:
            raise ConfigError(
                "--sweep needs the speed of a machine: posttrain plan --probe measures this one; or give machine=H100"
            )
        # `stale` takes new weights between two passes too.
        update: Update = "inflight" if plan.run.engine.update != "drain" else "drain"
        # A deterministic run takes new weights when all that it asked has ended, whatever `engine.update` says.
        loop = loop_of(plan.timed, "rest" if plan.run.deterministic else update)
        steps = max(6, min(STEPS, ANSWERS // (loop.prompts * loop.siblings)))
        out.append(SweptValue(value, plan, simulate(loop, steps, plan.run.seed)))
    return name, out


def loop_of(t: Throughput, update: Update = "inflight") -> SimulatedLoop:
    """A planned stage as a loop for the simulator. Of a step of more than `MOST_ANSWERS` answers one of `parts` is
    simulated, with its share of the slots and the judges: the longest answer is the longest one of that part."""
    w, a = t.work, t.assumed
    # A pass over n sequences takes as long as one over n * `parts`: the other parts are not simulated, but are there.
    parts = max(1, min(w.prompts, w.sequences // MOST_ANSWERS))
    judges = max(1, a.judges // parts)
    all_slots = w.slots * max(1, w.engines)
    # Tokens in the cache of a sequence in the mean over its passes: the prompt, and half of the answer.
    length = w.lengths.prompt + w.lengths.answer / 2
    return SimulatedLoop(
        prompts=w.prompts // parts,
        siblings=w.siblings,
        staleness=w.staleness,
        slots=max(1, all_slots // parts),
        lengths=[w.lengths.quantile((i + 0.5) / POINTS) / a.tokens_a_pass for i in range(POINTS)],
        passes=cache(lambda n: t.decoding(n * parts, length)),
        # So the prompts of the part take as long as all prompts of the step.
        prefill=t.prefill / w.prompts * parts,
        learn=(t.reference + t.learn,),
        sync=t.sync,
        # The number of judges is rounded to at least 1. Their seconds are corrected, so that their throughput is right.
        reward=a.reward * parts * judges / a.judges,
        judges=judges,
        kept=a.kept,
        update=update,
        apart=t.topology != "colocated",
    )


def _with(name: str, value: str, options: PlanOptions) -> tuple[list[str], PlanOptions]:
    """Further overrides, or other options, that set the knob."""
    kind = OPTIONS.get(name) or ASSUMED.get(name)
    if kind is None:
        return [f"{name}={value}"], options
    try:
        number: Any = kind(value)
    except ValueError as error:
        raise ConfigError(f"--sweep {name}={value}: must be a number") from error
    if name in OPTIONS:
        return [], replace(options, **{name: number})
    assumed: Assumed = replace(options.assumed, **{name: number})
    return [], replace(options, assumed=assumed)
