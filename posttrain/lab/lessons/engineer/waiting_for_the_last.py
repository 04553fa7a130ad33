"""Page 22b: a step waits for its longest answer. What that costs, three ways to wait less, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from posttrain.config.stages.reinforce import Reinforce
from posttrain.core.sampling import Sampling
from posttrain.lab.lesson import (
    AskChoice,
    AskKnobs,
    AskNumber,
    Break,
    Claim,
    Lesson,
    Readout,
    Slider,
    Toggle,
    Values,
    by_rules,
    recorded,
)
from posttrain.toy.long_tail import first_of, lengths, longest_of, refilled
from posttrain.web.picture import Curve, Gantt, Tone

PROMPTS, STEPS, RIGHT = 4, 12, 0.5
SIZES = (4, 16, 64, 256)
CLAIMED = {1.0: (2.8, 5.0, 7.8, 11.3), 2.0: (3.7, 8.9, 17.4, 30.6)}
"""Values that the curriculum gives for the longest of 4, 16, 64 and 256, in means."""


@dataclass
class Played:
    """Twelve steps of four groups. Arrays are [steps, prompts, answers]."""

    natural: np.ndarray
    said: np.ndarray
    kept: np.ndarray
    cut: np.ndarray
    right: np.ndarray
    seconds: float
    """Time of one step, in tokens of one slot."""

    @property
    def tax(self) -> float:
        """Share of the time of all slots in which nothing is said that is used."""
        slots = self.said.shape[1] * self.said.shape[2]
        return 1 - float(self.said[self.kept].sum()) / (slots * self.seconds * STEPS)


def play(k: Values) -> Played:
    keep, mean = int(k["siblings"]), float(k["mean"])
    started = keep + (max(1, keep // 4) if k["extra"] else 0)
    made = np.random.default_rng(int(k["seed"]))
    natural = lengths(mean, float(k["cv"]), (STEPS, PROMPTS, started), made)
    limit = float(k["limit"]) * mean if k["cap"] else np.inf
    said = np.minimum(natural, limit)
    ends = np.stack([first_of(x, keep) for x in said])
    kept = np.argsort(np.argsort(said, 2, kind="stable"), 2) < keep
    cut = natural > limit
    seconds = float(refilled(ends.reshape(STEPS, -1), PROMPTS * started, int(k["ahead"])).max()) / STEPS
    right = (made.random(natural.shape) < RIGHT) & ~cut
    return Played(natural, ends, kept, cut, right, seconds)


def lanes(p: Played) -> dict[str, list[tuple[float, float, str, Tone]]]:
    """The first group: what each answer says, and how long its slot then waits for the step to end."""
    out, last = dict[str, list[tuple[float, float, str, Tone]]](), float(p.said[0].max())
    for i, end in enumerate(p.said[0, 0, :8].tolist()):
        tone: Tone = "bad" if not p.kept[0, 0, i] else "two" if p.cut[0, 0, i] else "good"
        out[f"answer {i + 1}"] = [(0.0, end, f"{end:.0f}", tone), (end, last, "", "mute")]
    return out


def compute(k: Values) -> Readout:
    p, plain = play(k), play({**k, "extra": False, "cap": False, "ahead": 0})
    kept_cut = [float(c[keep].mean()) for c, keep in zip(p.cut, p.kept, strict=True)]
    solved = [float(r[keep].mean()) for r, keep in zip(p.right, p.kept, strict=True)]
    shorter, all_of = float(p.natural[p.kept].mean()), float(p.natural.mean())
    used = float(p.said.sum() / plain.said.sum())
    cv = float(k["cv"])
    series: dict[str, list[float | None]] = {f"simulated, CV {cv:g}": [longest_of(n, cv) for n in SIZES]}
    series |= {f"claimed, CV {c:g}": list(values) for c, values in CLAIMED.items()}
    stage = Reinforce(name="rl", sampling=Sampling(max_tokens=max(1, round(float(k["limit"]) * float(k["mean"])))))
    said = by_rules(recorded({"rollout/truncated": kept_cut, "rollout/solved": solved}), stage,
                    "cut_off_before_the_answer")  # fmt: skip
    return Readout(
        pictures=(
            Gantt("The answers to one prompt, until the step ends", lanes(p), unit="tokens",
                  key={"good": "ends by itself", "two": "cut off", "bad": "given up", "mute": "slot waits"}),
            Curve("Longest of K answers, in mean lengths", list(SIZES), series, x_label="K", low=0, log=True,
                  at=float(k["siblings"])),
        ),
        sentence=f"A step takes the time of **{p.seconds:.0f}** tokens ({plain.seconds:.0f} without tricks), and "
        f"**{p.tax:.0%}** of the slots' time gives nothing that is learned from. It says **{used:.0%}** as many "
        f"tokens. The answers that are kept have **{shorter / all_of:.0%}** of the mean length before any limit, and "
        f"**{np.mean(kept_cut):.0%}** of them are cut off.",
        values={"time of a step": p.seconds, "time without tricks": plain.seconds, "share lost": p.tax,
                "length of kept answers": shorter / all_of, "cut off": float(np.mean(kept_cut))},
        says=said,
    )  # fmt: skip


HEALTHY = {"siblings": 16, "mean": 200, "cv": 1.0, "extra": False, "cap": False, "limit": 3.0, "ahead": 0,
           "seed": 0}  # fmt: skip


def lost(**on: int) -> Callable[[], float]:
    return lambda: play({**HEALTHY, **on}).tax


LESSON = Lesson(
    number="22b",
    name="tail",
    title="The long tail: waiting for the last answer",
    part="the engineer",
    force="cost",
    minutes=6,
    question="Most answers are short and one is long: how much of a step is spent waiting for it?",
    idea="""
        A step needs all siblings of its prompts, so it takes as long as its longest answer. Lengths vary much: CV is
        their standard deviation over their mean. The more answers, the longer the longest.

        Three ways to wait less. *Extra siblings*: start more than needed and give up those that are not among the first
        K to end. That prefers short answers. *A limit*: cut answers off; what is cut has no result. *Ask ahead*: a slot
        that is free begins an answer of a later step, with weights that are then old. Only the last changes nothing
        about which answers are learned from.
    """,
    formula="time of a step = longest of P * K answers        lost = 1 - tokens used / (slots * time)",
    knobs=(
        Slider("siblings", "siblings (K)", 16, 4, 64, log=True),
        Slider("mean", "mean length", 200, 50, 2000, log=True),
        Slider("cv", "CV of the lengths", 1.0, 0.2, 2.0, 0.1),
        Toggle("extra", "a quarter more siblings, first K kept", False),
        Toggle("cap", "limit the length", False),
        Slider("limit", "limit, in mean lengths", 3.0, 0.2, 8.0, 0.1),
        Slider("ahead", "steps asked ahead", 0, 0, 4),
        Slider("seed", "draw again", 0, 0, 20),
    ),
    compute=compute,
    breaks=(
        Break({"cap": True, "limit": 0.2}, "The step is short, because nearly every answer is cut off before its "
              "result.", "cut_off_before_the_answer", "a low limit"),
        Break({"extra": True, "cv": 2.0}, "The answers that are kept are much shorter than the policy's: long "
              "reasoning is never learned from.", None, "extra siblings"),
    ),
    claims=(
        *(
            Claim(f"Longest of {n} answers at CV {cv:g}, in means", "curriculum 22b", claimed,
                  partial(longest_of, n, cv), within=0.05,
                  why="Simulated with lognormal lengths; another distribution gives other numbers.")
            for cv, row in CLAIMED.items() for n, claimed in zip(SIZES, row, strict=True)
        ),
        Claim("Share lost without tricks", "curriculum 22b", 0.30, lost(), within=0.1,
              why="Ours is of 4 prompts with 16 siblings at CV 1; which setting the claim is of is not said."),
        Claim("With all three", "curriculum 22b", 0.08, lost(extra=True, cap=True, ahead=1), within=0.1,
              why="The same setting, one step ahead; the claim may count its tricks otherwise."),
    ),
    exercises=(
        AskNumber("The mean length is 200 and the longest of a step 800. Which share of the slots' time is lost?",
                  0.75, why="1 - 200 / 800."),
        AskKnobs("Lose less than 45 % of the time with neither a limit nor extra siblings.", "share lost",
                 None, 0.45, {"ahead": 4}),
        AskChoice("Which trick changes what kind of answers the policy learns from?",
                  ("Asking ahead", "Extra siblings of which the first are kept", "A larger batch"), 1,
                  why="The first to end are the short ones."),
    ),
    code=("posttrain.config.stages.reinforce.Reinforce", "posttrain.plan.staleness.capacity"),
    docs="engine.md",
    command="posttrain run arithmetic rl.oversample=2 rl.staleness=1",
    grid=("cv", "siblings"),
    missing="its costs come with the planner",
)  # fmt: skip
