"""Page 22b: a step waits for its longest answer. What that costs, three ways to wait less, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from posttrain.api.swept import loop_of
from posttrain.config.stages.reinforce import Reinforce
from posttrain.core.sampling import Sampling
from posttrain.lab import lesson as lab
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import machine
from posttrain.plan.models import shape_by_name
from posttrain.plan.simulation.simulated_loop import LoopOutcome
from posttrain.plan.simulation.simulator import simulate
from posttrain.plan.throughput import throughput
from posttrain.plan.work import Work
from posttrain.web.picture import Bars, Curve, Gantt, Tone

PROMPTS, STEPS, RIGHT, ENDLESS = 4, 8, 0.5, 10**9
"""RIGHT: chance that an answer that is not cut off is right. ENDLESS: tokens of a limit that nothing reaches."""
SIZES = (4, 16, 64, 256)
CLAIMED = {1.0: (2.8, 5.0, 7.8, 11.3), 2.0: (3.7, 8.9, 17.4, 30.6)}
"""Values that the curriculum gives for the longest of 4, 16, 64 and 256, in means."""
PLAIN: lab.Values = {"extra": False, "cap": False, "ahead": 0}


def lengths_of(k: lab.Values) -> Lengths:
    """The lengths of answers, cut at the limit where the knob `cap` is on."""
    limit = round(float(k["limit"]) * float(k["mean"])) if k["cap"] else ENDLESS
    return Lengths(prompt=128, mean=float(k["mean"]), most=max(1, limit), cv=float(k["cv"]))


def extra_of(k: lab.Values) -> int:
    return max(1, int(k["siblings"]) // 4) if k["extra"] else 0


def play(k: lab.Values, steps: int = STEPS) -> LoopOutcome:
    """Steps of four prompts with 7 B parameters: one H100 samples and one learns, with a slot for each answer."""
    siblings, extra = int(k["siblings"]), extra_of(k)
    work = Work(shape=shape_by_name("Qwen2.5-7B"), lengths=lengths_of(k), prompts=PROMPTS, siblings=siblings, width=2,
                accelerator=True, samples_answers=True, vllm=True, engines=1, staleness=int(k["ahead"]),
                slots=PROMPTS * (siblings + extra))  # fmt: skip
    return simulate(replace(loop_of(throughput(work, machine("2xH100"))), extra=extra), steps, int(k["seed"]))


def lost(o: LoopOutcome) -> float:
    """Share of the time of all slots in which nothing is said that is learned from."""
    return 1 - o.slots_used * (1 - o.lost)


def lanes(said: np.ndarray, kept: np.ndarray, cut: np.ndarray) -> dict[str, list[tuple[float, float, str, Tone]]]:
    """At most 8 answers to a step's first prompt: what each says, and how long its slot waits until the step ends.
    Arguments are [prompt, sibling]: tokens said, which answers are kept, which are cut off."""
    out, end_of_step = dict[str, list[tuple[float, float, str, Tone]]](), float(said.max())
    for i, end in enumerate(said[0, :8].tolist()):
        tone: Tone = "bad" if not kept[0, i] else "two" if cut[0, i] else "good"
        out[f"answer {i + 1}"] = [(0.0, end, f"{end:.0f}", tone), (end, end_of_step, "", "mute")]
    return out


def compute(k: lab.Values) -> lab.Readout:
    now, plain, wanted = play(k), play({**k, **PLAIN}), int(k["siblings"])
    rng, limited, free = np.random.default_rng(int(k["seed"])), lengths_of(k), lengths_of({**k, **PLAIN})
    # Arrays are [step, prompt, sibling]. The lengths that answers would have if nothing ended them.
    natural = np.vectorize(free.quantile)(rng.random((STEPS, PROMPTS, wanted + extra_of(k))))
    said = np.minimum(natural, limited.most)
    kept = np.argsort(np.argsort(said, 2, kind="stable"), 2) < wanted  # the first of each prompt to end
    # The others are given up when the last of these ends.
    said = np.minimum(said, np.sort(said, 2)[..., wanted - 1 : wanted])
    cut = natural > limited.most
    right = (rng.random(natural.shape) < RIGHT) & ~cut
    # The share of True among the answers that are kept, by step.
    kept_by_step = lambda values: [float(x[y].mean()) for x, y in zip(values, kept, strict=True)]  # noqa: E731
    cut_share, shorter = float(np.mean(kept_by_step(cut))), float(natural[kept].mean() / natural.mean())
    tokens_share = float(said.sum() / natural[..., :wanted].sum())
    series: dict[str, list[float | None]] = {f"lognormal, CV {free.cv:g}": [longest(n, free.cv) for n in SIZES]}
    series |= {f"claimed, CV {c:g}": list(values) for c, values in CLAIMED.items()}
    stage = Reinforce(name="rl", sampling=Sampling(max_tokens=min(limited.most, 10**6)))
    history = lab.recorded({"rollout/truncated": kept_by_step(cut), "rollout/solved": kept_by_step(right)})
    shares = [(o.slots_used * (1 - o.lost), o.slots_used * o.lost, 1 - o.slots_used) for o in (plain, now)]
    return lab.Readout(
        pictures=(
            Gantt("The answers to one prompt, until the step ends", lanes(said[0], kept[0], cut[0]), unit="tokens",
                  key={"good": "ends by itself", "two": "cut off", "bad": "given up", "mute": "slot waits"}),
            Bars("Time of the slots, share", ["learned from", "said for nothing", "waits"],
                 {"without tricks": list(shares[0]), "now": list(shares[1])}, low=0, high=1),
            Curve("Longest of K answers, in mean lengths", list(SIZES), series, x_label="K", low=0, log=True,
                  at=float(wanted)),
        ),
        sentence=f"A step takes **{now.step:.3g} s** ({plain.step:.3g} s without tricks), and **{lost(now):.0%}** of "
        f"the slots' time gives nothing that is learned from. It says **{tokens_share:.0%}** as many tokens. The "
        f"answers that are kept have **{shorter:.0%}** of the mean length before any limit, **{cut_share:.0%}** of "
        f"them are cut off, and tokens are **{now.behind:.1f}** steps old.",
        values={"time of a step, s": now.step, "time without tricks, s": plain.step, "share lost": lost(now),
                "length of kept answers": shorter, "cut off": cut_share, "steps behind": now.behind},
        says=lab.by_rules(history, stage, "cut_off_before_the_answer"),
    )  # fmt: skip


def longest(count: int, cv: float) -> float:
    """Expected length of the longest of so many answers, in means."""
    return Lengths(prompt=1, mean=1, most=ENDLESS, cv=cv).longest(count)


HEALTHY = {"siblings": 16, "mean": 200, "cv": 1.0, "extra": False, "cap": False, "limit": 3.0, "ahead": 0,
           "seed": 0}  # fmt: skip


def lost_with(**on: int) -> Callable[[], float]:
    return lambda: lost(play({**HEALTHY, **on}, 24))


LESSON = lab.Lesson(
    number="22b", name="tail", title="The long tail: waiting for the last answer", part="the engineer", force="cost",
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
        lab.Slider("siblings", "siblings (K)", 16, 4, 64, log=True),
        lab.Slider("mean", "mean length", 200, 50, 2000, log=True),
        lab.Slider("cv", "CV of the lengths", 1.0, 0.2, 2.0, 0.1),
        lab.Toggle("extra", "a quarter more siblings, first K kept", False),
        lab.Toggle("cap", "limit the length", False),
        lab.Slider("limit", "limit, in mean lengths", 3.0, 0.2, 8.0, 0.1),
        lab.Slider("ahead", "steps asked ahead", 0, 0, 4),
        lab.Slider("seed", "draw again", 0, 0, 20),
    ),
    compute=compute,
    breaks=(
        lab.Break({"cap": True, "limit": 0.2}, "The step is short, because nearly every answer is cut off before its "
              "result.", "cut_off_before_the_answer", "a low limit"),
        lab.Break({"extra": True, "cv": 2.0}, "The answers that are kept are much shorter than the policy's: long "
                  "reasoning is seldom learned from.", None, "extra siblings"),
    ),
    claims=(
        *(
            lab.Claim(f"Longest of {n} answers at CV {cv:g}, in means", "curriculum 22b", claimed,
                      partial(longest, n, cv), within=0.05,
                      why="Ours is of lognormal lengths; another distribution gives other numbers.")
            for cv, row in CLAIMED.items() for n, claimed in zip(SIZES, row, strict=True)
        ),
        lab.Claim("Share lost without tricks", "curriculum 22b", 0.30, lost_with(), within=0.1,
                  why="Ours is of 4 prompts with 16 siblings at CV 1; which setting the claim is of is not said."),
        lab.Claim("With all three", "curriculum 22b", 0.08, lost_with(extra=True, cap=True, ahead=1), within=0.1,
                  why="The same setting, one step ahead; the claim may count its tricks otherwise."),
    ),
    exercises=(
        lab.AskNumber("The mean length is 200 and the longest of a step 800. Which share of the slots' time is lost?",
                      0.75, why="1 - 200 / 800."),
        lab.AskKnobs("Lose less than 45 % of the time with neither a limit nor extra siblings.", "share lost", None,
                     0.45, {"ahead": 4}),
        lab.AskChoice("Which trick changes what kind of answers the policy learns from?",
                      ("Asking ahead", "Extra siblings of which the first are kept", "A larger batch"), 1,
                      why="The first to end are the short ones."),
    ),
    code=("posttrain.plan.simulation.simulator.simulate", "posttrain.plan.lengths.Lengths",
          "posttrain.plan.staleness.capacity"),
    docs="guides/planning.md",
    command="posttrain plan grpo model=Qwen2.5-7B machine=2xH100 placement=processes --sweep staleness=0,1,2,4",
    grid=("cv", "siblings"),
)  # fmt: skip
