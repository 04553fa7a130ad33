"""A table of advice after a run: each piece of advice says where it is right.

`tests/rooms/test_advice.py` has, for each, a situation in which it is said and one in which it must not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.config.run import Reinforce
from posttrain.core.measure.interval import number_text
from posttrain.diagnose.advice_case import (
    Case,
    began_and_ended,
    best,
    by_heart,
    cut_short,
    env_of,
    faster,
    first_score,
    judged,
    kl,
    level,
    longer,
    lowest,
    more_heldout,
    more_rows,
    paid_by_models,
    rates,
    rising,
    room,
    rose,
    slower,
    sources,
    was_better,
)
from posttrain.system.shell import command_line


@dataclass(frozen=True)
class Advice:
    """One piece. Of those with one topic only the first that is right is said."""

    name: str
    topic: str
    when: Callable[[Case], bool]
    say: Callable[[Case], str]


def advice(case: Case, most: int = 3) -> tuple[str, ...]:
    """Returns the pieces of advice, the first thing to try first."""
    return tuple(a.say(case) for a in chosen(case))[:most]


def chosen(case: Case) -> list[Advice]:
    """The pieces that are right, in order."""
    topics, out = set[str](), list[Advice]()
    for a in ADVICE:
        if a.topic not in topics and a.when(case):
            topics.add(a.topic)
            out.append(a)
    return out


# --- the table -------------------------------------------------------------------------------------------------------

TELL, ON_THE_WAY, HELD, RULES, CAUSE, LOOK = "how to tell", "on the way", "held out", "rules", "cause", "look"

ADVICE: tuple[Advice, ...] = (
    Advice(
        "hold prompts out",
        TELL,
        lambda c: c.by == "nothing" and not env_of(c).heldout,
        lambda c: f"hold prompts out: {c.env}.heldout={100 if c.most_heldout is None else min(100, c.most_heldout)}",
    ),
    Advice(
        "give rewards",
        TELL,
        lambda c: c.by == "nothing" and not judged(env_of(c)),
        lambda c: f"give {c.env}.rewards, which judge what the model samples",
    ),
    Advice(
        "measure it",
        TELL,
        lambda c: c.by == "nothing" and not c.s.stage.eval,
        lambda c: f"measure it: {c.s.name}.eval=true",
    ),
    Advice(
        "record the answers",
        TELL,
        lambda c: c.by == "nothing" and not c.run.record_episodes,
        lambda c: "record the answers: record_episodes=true",
    ),
    Advice(
        "go on",
        TELL,
        lambda c: c.by == "nothing" and cut_short(c) and not c.s.done,
        lambda c: (
            f"{command_line('run', '--resume', c.folder)}  # goes on from the last checkpoint, and measures at the end"
        ),
    ),
    Advice(
        "measure on the way",
        ON_THE_WAY,
        lambda c: (
            c.by == "nothing"
            and cut_short(c)
            and c.s.stage.eval
            and not c.s.stage.eval_every
            and bool(env_of(c).heldout)
            and judged(env_of(c))
            and c.run.record_episodes
        ),
        lambda c: f"measure on the way too: {c.s.name}.eval_every={max(1, c.s.stage.steps // 5)}",
    ),
    Advice(
        "the score before",
        TELL,
        lambda c: c.by == "nothing" and c.s.start is None and c.s.began == "start",
        first_score,
    ),
    Advice(
        "what was said there",
        TELL,
        lambda c: c.by == "nothing",
        lambda c: f"{c.show('--eval')}  # what was said, and what the rewards said of it",
    ),
    # what is paid is not what is wanted
    Advice(
        "what is paid now",
        "paid",
        lambda c: c.word == "paid more, not more often right",
        lambda c: f"{c.show('--eval', '--best')}  # what is paid now, and is it what you want?",
    ),
    Advice(
        "a larger KL",
        "kl",
        lambda c: c.exploited and isinstance(c.s.stage, Reinforce),
        kl,
    ),
    Advice(
        "more judgements",
        "judgements",
        lambda c: c.exploited and paid_by_models(c),
        lambda c: "a reward model of more judgements, or several with pessimism (env.rewards=model:A+B)",
    ),
    Advice(
        "lower other weights",
        "weights",
        lambda c: c.word == "paid more, not more often right" and not c.exploited and sources(c) > 1,
        lambda c: f"lower the weights of the rewards that do not ask for a right answer ({c.env}.rewards.N.weight)",
    ),
    # more prompts would tell
    Advice("more held out", HELD, lambda c: c.still and c.word == "cannot be told" and room(c), more_heldout),
    Advice(
        "more data",
        HELD,
        lambda c: c.still and c.word == "cannot be told" and c.prompts is not None and not room(c),
        more_rows,
    ),
    # the last known cause
    Advice(
        "the rate that the rules name",
        RULES,
        lambda c: (c.still or c.word == "got worse") and rates(c),
        lambda c: "take the learning rate that the rules name",
    ),
    Advice(
        "what the rules saw",
        RULES,
        lambda c: (c.still or (c.word == "got worse" and c.by == "reward")) and bool(c.found),
        lambda c: "do first what the rules say of its last steps",
    ),
    Advice(
        "best at a step",
        CAUSE,
        lambda c: c.word == "got worse" and c.by == "reward" and was_better(c),
        lambda c: (
            f"it was best at step {best(c)[0]} ({number_text(best(c)[1])}): take --checkpoint best, or stop there"
        ),
    ),
    Advice(
        "learned by heart",
        CAUSE,
        lambda c: (
            isinstance(c.s.stage, Reinforce)
            and c.by == "reward"
            and c.word in ("did not learn", "got worse")
            and rose(c.s.rewards) > (0.02 if c.word == "got worse" else 0.05) * c.width
        ),
        lambda c: "its training reward rose and held-out did not: use more prompts, or fewer steps",
    ),
    Advice(
        "slower",
        "rate",
        lambda c: c.word == "got worse" and c.moved and not c.found and not by_heart(c),
        slower,
    ),
    Advice(
        "one reward for all, of grades",
        CAUSE,
        lambda c: c.still and c.s.graded and len(c.paid_levels) == 1 and not c.found,
        lambda c: (
            f"every answer earned {level(c)}: if the reward pays wrong answers as much, mend it; else use"
            " prompts of another difficulty"
        ),
    ),
    Advice(
        "one reward for all",
        CAUSE,
        lambda c: c.still and not c.s.graded and len(c.paid_levels) == 1 and max(c.paid_levels) > 0 and not c.found,
        lambda c: (
            f"every answer earned {level(c)}: mend the reward if it pays for wrong answers too, else use harder prompts"
        ),
    ),
    Advice(
        "never right",
        CAUSE,
        lambda c: (
            c.still and c.passed is not None and c.passed.before == c.passed.after == 0 and rose(c.s.rewards) <= 0.05
        ),
        lambda c: (
            "no held-out answer was right, before or after: use easier prompts, imitate right answers first, or"
            " mend the reward"
        ),
    ),
    Advice(
        "right before",
        CAUSE,
        lambda c: c.still and c.passed is not None and c.passed.before > 0.9,
        lambda c: (
            f"it was right {c.s.accuracy.before if c.s.accuracy else 0:.0%} of the time before: use harder prompts"
        ),
    ),
    Advice(
        "it fell",
        CAUSE,
        lambda c: c.fell and c.word in ("did not learn", "cannot be told") and c.moved and not c.found,
        lambda c: f"it rather fell: fewer steps, or a lower learning rate ({c.lr}={c.s.stage.optimizer.lr / 3:.1g})",
    ),
    Advice(
        "faster",
        CAUSE,
        lambda c: (
            c.still
            and isinstance(c.s.stage, Reinforce)
            and not c.found
            and len(c.paid_levels) > 1
            and c.moved
            and abs(rose(c.s.rewards)) <= 0.05 * c.width
        ),
        lambda c: (
            f"training reward hardly changed ({began_and_ended(c)}): a higher learning rate or more steps ({faster(c)})"
        ),
    ),
    Advice(
        "longer or faster",
        CAUSE,
        lambda c: (
            c.still and not isinstance(c.s.stage, Reinforce) and c.moved and not c.found and bool(longer(c.s.stage))
        ),
        lambda c: f"more steps or a higher learning rate: {longer(c.s.stage)} {faster(c)}",
    ),
    Advice(
        "read what it says",
        LOOK,
        lambda c: c.still and isinstance(c.s.stage, Reinforce),
        lambda c: f"{c.show()}  # read what it says, and what it is paid for",
    ),
    Advice(
        "still rising",
        CAUSE,
        lambda c: c.word == "learned" and c.by == "reward" and c.s.done and rising(c) and bool(longer(c.s.stage)),
        lambda c: f"it was still rising at its end: {longer(c.s.stage)}",
    ),
    # pairs, and loss
    Advice(
        "longer, or more pairs",
        CAUSE,
        lambda c: c.by == "pairs" and c.word == "cannot be told" and not c.fell and bool(longer(c.s.stage)),
        lambda c: f"more steps, or more held-out pairs ({c.env}.heldout): {longer(c.s.stage)}",
    ),
    Advice(
        "answers are not measured",
        "answers",
        lambda c: c.by == "pairs" and c.s.stage.leaves_policy and not judged(env_of(c)),
        lambda c: "whether its answers are better is not measured: give env.rewards, which judge what it samples",
    ),
    Advice(
        "stop at the lowest loss",
        CAUSE,
        by_heart,
        lambda c: (
            f"it was lowest after step {lowest(c)[0][0]} ({lowest(c)[0][1]:.3f}) and rose since, as where rows are"
            f" learned by heart: take --checkpoint best, or stop there ({c.s.name}.steps={lowest(c)[0][0]})"
        ),
    ),
    Advice(
        "more rows, or longer",
        "rows",
        lambda c: (
            c.by == "loss" and c.word == "cannot be told" and not c.fell and not by_heart(c) and bool(longer(c.s.stage))
        ),
        lambda c: f"hold more rows out ({c.env}.heldout), or more steps: {longer(c.s.stage)}",
    ),
)
