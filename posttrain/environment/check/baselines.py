"""Probes by baselines: what answers that read nothing are paid beside real ones, and how much of what was preferred one
surface feature of the text tells. They need no right answer."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from itertools import combinations

from posttrain.core.content import shown
from posttrain.core.judgements import Pair
from posttrain.core.measure.interval import Score
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.core.verdict import truth
from posttrain.environment.check.probe import Answer, Mark, Probe
from posttrain.environment.check.subject import Subject
from posttrain.environment.judged.judge_bias import surface_baselines

TASKS_EACH = 12
"""The number of tasks on which each is tried."""
TEMPLATE = "Thank you for your question. Let me think step by step. In conclusion, the answer is clear."
CLOSE = 0.9
"""From this share of the way between the least that is paid and what real answers get, an empty answer is as good."""


def _said(task: Task, rng: random.Random) -> Mapping[str, str]:
    prompt = task.prompt if isinstance(task.prompt, str) else shown(task.prompt[-1]["content"])
    text = "".join(rng.choices(string.ascii_lowercase + " ", k=120))
    own = {"silence": "", "a constant": "42", "random text": text}
    return {**own, "an echo of the prompt": prompt, "a template": TEMPLATE}


async def unread(s: Subject) -> Answer:
    if s.known:
        return Mark.SKIP, "right answers are known and paid, so the probes of silence, constants and templates say it"
    rng, tasks = s.random("baselines"), s.tasks[:TASKS_EACH]
    asked = [(t, kind, text) for t in tasks for kind, text in _said(t, rng).items()]
    told = await s.judge_all([(t, (text,)) for t, _, text in asked], repeat=True)
    paid: dict[str, list[float]] = {}
    for (_, kind, _), answer in zip(asked, told, strict=True):
        if answer.outcome is not None:
            paid.setdefault(kind, []).append(answer.outcome)
    if not paid:
        why = next((a.failed.verdict for a in told if a.failed is not None), None)
        return Mark.FAIL, f"none of {len(told)} answers could be judged" + (f": {why.kind}: {why.why}" if why else "")
    means = {kind: sum(x) / len(x) for kind, x in paid.items()}
    best, missing = max(means, key=lambda k: means[k]), len(told) - sum(map(len, paid.values()))
    words = ", ".join(f"{kind} earns {x:.3g}" for kind, x in means.items())
    words += f" ({missing} of {len(told)} could not be judged)" if missing else ""
    written = [(t, (s.completions[t.id],)) for t in tasks if t.id in s.completions]
    real = [x for x in (t.outcome for t in await s.judge_all(written, repeat=True)) if x is not None] or list(s.earned)
    whose, best_of = "your real answers", "your best"
    if not real:  # a form was chosen for the answers of the data, so that they earn most
        real = [x for x in (t.outcome for t in s.gold.values()) if x is not None]
        whose, best_of = "the data's answers, in the form that earns most,", "the best"
    if not real:
        return Mark.WARN, f"{words}; no real answer is known to hold this against"
    # Measured from the least that anything was paid, since rewards may begin anywhere.
    mean, least = sum(real) / len(real), min(*means.values(), *real)
    words = f"{words}; {whose} {mean:.3g} on average, {best_of} {max(real):.3g}"
    # Where real answers are only known in a form that was chosen to earn most, the comparison is too kind to warn by.
    close = (written or not s.gold) and means[best] >= least + CLOSE * (mean - least)
    return (Mark.WARN if close else Mark.OK), words


async def paid_and_measured(s: Subject) -> Answer:
    if not (s.env.measured or s.env.measured_rewards):
        return Mark.SKIP, "nothing is measured beside what is paid (env.rewards.N.measured)"
    tasks, rng = s.tasks[:TASKS_EACH], s.random("measured")
    real = [(t, {"a real answer": text}) for t in tasks if (text := s.completions.get(t.id)) is not None]
    made = [(t, _said(t, rng)) for t in tasks]
    asked = [(t, kind, text) for t, texts in (*made, *real) for kind, text in texts.items()]
    told = await s.judge_all([(t, (text,)) for t, _, text in asked], repeat=True)
    figures: dict[str, list[tuple[float, float, str]]] = {}
    for (task, kind, _), answer in zip(asked, told, strict=True):
        paid, measured = answer.outcome, truth(answer.judged)
        if paid is not None and measured is not None:
            figures.setdefault(task.id, []).append((paid, measured, kind))
    # Sorted by what was paid, so `a` is the one that was paid more; ties say nothing.
    pairs = [(a, b) for each in figures.values() for a, b in combinations(sorted(each, reverse=True), 2) if a[0] > b[0]]
    if not pairs:
        return Mark.SKIP, "no two answers to one task were judged by both and paid differently"
    against = [(b[1] - a[1], a, b) for a, b in pairs if b[1] > a[1]]
    words = f"of {len(pairs)} pairs of answers to one task, {len(against)} are measured the other way round"
    if against:
        _, a, b = max(against)
        words += f"; most: {a[2]} is paid {a[0]:.3g} and measured {a[1]:.3g}, {b[2]} {b[0]:.3g} and {b[1]:.3g}"
    return (Mark.WARN if 2 * len(against) > len(pairs) else Mark.OK), words


BASELINES = (
    Probe(
        "answers that read nothing",
        "silence, a constant, noise, an echo and a template earn less than real answers",
        "read these figures beside what your best answers should earn. Where nothing real is paid more, the policy"
        " learns the empty answer: make the reward read the answer. Rows with an answer or a completion show what real"
        " answers get, and so does a run folder",
        unread,
    ),
    Probe(
        "paid and measured",
        "what is paid and what is measured order answers alike",
        "what is paid is not what is measured, so a policy that learns it gets worse: mend the rubric that pays, or the"
        " one that measures",
        paid_and_measured,
    ),
)


PAIRS = 1000
"""The most training pairs from which the baselines learn, and the most held-out pairs on which they are tried."""
FEWEST = 20
"""Fewer pairs on either side tell nothing."""
TOO_MUCH = 0.9
"""A single feature that tells so large a share of the pairs leaves little else to learn."""


async def surface(s: Subject) -> Answer:
    offered = s.env.abilities.judgements
    if offered is None or "pair" not in offered.kinds:
        return Mark.SKIP, "the environment has no judged pairs"

    def pairs(tasks: Sequence[Task], name: str) -> list[Pair]:
        drawn = [offered.draw(t, "pair", generator(s.env.seed, f"check/{name}", i)) for i, t in enumerate(tasks)]
        return [p for p in drawn if isinstance(p, Pair)]

    count = s.env.train.count
    known = pairs([s.env.train.task(i) for i in range(PAIRS if count is None else min(PAIRS, count))], "known")
    held = pairs(s.env.heldout[:PAIRS], "held")
    if min(len(known), len(held)) < FEWEST:
        return Mark.SKIP, f"{len(known)} training and {len(held)} held-out pairs: fewer than {FEWEST} tell nothing"
    best = surface_baselines(known, held)[0]
    detail = f"of {len(held)} held-out pairs the best single feature, the {best.feature}, tells {best.accuracy}"
    limit = TOO_MUCH
    if (utility := offered.utility) is not None:
        truth = Score.of([float(utility(p.task, p.chosen) > utility(p.task, p.rejected)) for p in held])
        detail += f"; the true utility tells {truth}"
        # No feature can be blamed for telling as much as the truth does where judgements have noise.
        limit = min(limit, truth.low)
    return Mark.WARN if best.accuracy.high > limit else Mark.OK, detail


PREFERENCES = (
    Probe(
        "surface of pairs",
        "no single feature of the text, such as its length, tells which side was preferred",
        "a reward model would learn the feature and look good: balance the pairs over it, or debias; compare every"
        " accuracy with this one",
        surface,
    ),
)
