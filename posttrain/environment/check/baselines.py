"""Probes by baselines, which need no right answer: answers that do not depend on the question (`unread`), the order by
what is paid and by what is measured (`paid_and_measured`), and one feature of the text that tells which side of a pair
was preferred (`surface`)."""

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
"""The number of tasks on which each kind of answer is tried."""
TEMPLATE = "Thank you for your question. Let me think step by step. In conclusion, the answer is clear."
CLOSE = 0.9
"""An answer that reads nothing counts as good as a real one if it earns this much or more, on a scale from the least
that any answer earns (0) to the mean of real answers (1)."""


def _unread_answers(task: Task, rng: random.Random) -> Mapping[str, str]:
    """Answers to a task that do not depend on what it asks, by their kind."""
    prompt = task.prompt if isinstance(task.prompt, str) else shown(task.prompt[-1]["content"])
    text = "".join(rng.choices(string.ascii_lowercase + " ", k=120))
    fixed = {"silence": "", "a constant": "42", "random text": text}
    return {**fixed, "an echo of the prompt": prompt, "a template": TEMPLATE}


async def unread(s: Subject) -> Answer:
    """Compares the rewards of answers that read nothing with those of real answers."""
    if s.known:
        return Mark.SKIP, "right answers are known and paid, so the probes of silence, constants and templates say it"
    rng, tasks = s.random("baselines"), s.tasks[:TASKS_EACH]
    attempts = [(t, kind, text) for t in tasks for kind, text in _unread_answers(t, rng).items()]
    judged = await s.judge_all([(t, (text,)) for t, _, text in attempts], repeat=True)
    paid: dict[str, list[float]] = {}
    for (_, kind, _), answer in zip(attempts, judged, strict=True):
        if answer.outcome is not None:
            paid.setdefault(kind, []).append(answer.outcome)
    if not paid:
        why = next((a.failed.verdict for a in judged if a.failed is not None), None)
        return Mark.FAIL, f"none of {len(judged)} answers could be judged" + (f": {why.kind}: {why.why}" if why else "")
    means = {kind: sum(x) / len(x) for kind, x in paid.items()}
    best, unjudged = max(means, key=lambda k: means[k]), len(judged) - sum(map(len, paid.values()))
    words = ", ".join(f"{kind} earns {x:.3g}" for kind, x in means.items())
    words += f" ({unjudged} of {len(judged)} could not be judged)" if unjudged else ""
    written = [(t, (s.completions[t.id],)) for t in tasks if t.id in s.completions]
    real_rewards = [x for x in (a.outcome for a in await s.judge_all(written, repeat=True)) if x is not None] or list(
        s.earned
    )
    real_name, best_of = "your real answers", "your best"
    # Without real answers, the answers of the data are compared. Their form was chosen so that they earn most.
    if not real_rewards:
        real_rewards = [a.outcome for a in s.gold.values() if a.outcome is not None]
        real_name, best_of = "the data's answers, in the form that earns most,", "the best"
    if not real_rewards:
        return Mark.WARN, f"{words}; no real answer is known to hold this against"
    # Rewards may be on any scale, so `least`, the lowest reward of all these answers, counts as 0.
    mean, least = sum(real_rewards) / len(real_rewards), min(*means.values(), *real_rewards)
    words = f"{words}; {real_name} {mean:.3g} on average, {best_of} {max(real_rewards):.3g}"
    # A form that was chosen to earn most makes the comparison too kind to warn by.
    close = (written or not s.gold) and means[best] >= least + CLOSE * (mean - least)
    return (Mark.WARN if close else Mark.OK), words


async def paid_and_measured(s: Subject) -> Answer:
    """Compares the order of answers to one task by what is paid with their order by what is measured."""
    if not (s.env.measured or s.env.measured_rewards):
        return Mark.SKIP, "nothing is measured beside what is paid (env.rewards.N.measured)"
    tasks, rng = s.tasks[:TASKS_EACH], s.random("measured")
    real_answers = [(t, {"a real answer": text}) for t in tasks if (text := s.completions.get(t.id)) is not None]
    artificial = [(t, _unread_answers(t, rng)) for t in tasks]
    attempts = [(t, kind, text) for t, texts in (*artificial, *real_answers) for kind, text in texts.items()]
    judged = await s.judge_all([(t, (text,)) for t, _, text in attempts], repeat=True)
    figures: dict[str, list[tuple[float, float, str]]] = {}
    for (task, kind, _), answer in zip(attempts, judged, strict=True):
        paid, measured = answer.outcome, truth(answer.judged)
        if paid is not None and measured is not None:
            figures.setdefault(task.id, []).append((paid, measured, kind))
    # Each figure is (paid, measured, kind of answer). They are sorted by what was paid, so `a` was paid more than `b`.
    # Ties are left out.
    pairs = [(a, b) for each in figures.values() for a, b in combinations(sorted(each, reverse=True), 2) if a[0] > b[0]]
    if not pairs:
        return Mark.SKIP, "no two answers to one task were judged by both and paid differently"
    reversed_pairs = [(b[1] - a[1], a, b) for a, b in pairs if b[1] > a[1]]
    detail = f"of {len(pairs)} pairs of answers to one task, {len(reversed_pairs)} are measured the other way round"
    if reversed_pairs:
        _, a, b = max(reversed_pairs)
        detail += f"; most: {a[2]} is paid {a[0]:.3g} and measured {a[1]:.3g}, {b[2]} {b[0]:.3g} and {b[1]:.3g}"
    return (Mark.WARN if 2 * len(reversed_pairs) > len(pairs) else Mark.OK), detail


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
"""With fewer pairs on either side of the split, the probe is skipped."""
TOO_MUCH = 0.9
"""If a single feature tells more than this share of the pairs, there is little else to learn."""


async def surface(s: Subject) -> Answer:
    """Looks for a single feature of the text that tells which side of a held-out pair was preferred."""
    offered = s.env.abilities.judgements
    if offered is None or "pair" not in offered.kinds:
        return Mark.SKIP, "the environment has no judged pairs"

    def pairs(tasks: Sequence[Task], name: str) -> list[Pair]:
        drawn = [offered.draw(t, "pair", generator(s.env.seed, f"check/{name}", i)) for i, t in enumerate(tasks)]
        return [p for p in drawn if isinstance(p, Pair)]

    count = s.env.train.count
    training_pairs = pairs([s.env.train.task(i) for i in range(PAIRS if count is None else min(PAIRS, count))], "known")
    heldout_pairs = pairs(s.env.heldout[:PAIRS], "held")
    if min(len(training_pairs), len(heldout_pairs)) < FEWEST:
        return (
            Mark.SKIP,
            f"{len(training_pairs)} training and {len(heldout_pairs)} held-out pairs: fewer than {FEWEST} tell nothing",
        )
    best = surface_baselines(training_pairs, heldout_pairs)[0]
    detail = (
        f"of {len(heldout_pairs)} held-out pairs the best single feature, the {best.feature}, tells {best.accuracy}"
    )
    limit = TOO_MUCH
    if (utility := offered.utility) is not None:
        utility_score = Score.of(
            [float(utility(p.task, p.chosen) > utility(p.task, p.rejected)) for p in heldout_pairs]
        )
        detail += f"; the true utility tells {utility_score}"
        # Where judgements have noise, even the true utility does not tell all pairs. A feature that tells as much as it
        # is suspicious, so the limit is lowered to it.
        limit = min(limit, utility_score.low)
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
