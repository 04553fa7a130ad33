"""Page 19: three ways to place engines and learner, and who waits for whom."""

from __future__ import annotations

from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.plan.throughput import Times, Topology
from posttrain.web.picture import Bars, Gantt

WAYS: tuple[Topology, ...] = ("colocated", "disaggregated", "asynchronous")
STEPS = 3


def times(k: lab.Values) -> Times:
    return Times(float(k["rollout"]), 0.0, 0.0, float(k["learn"]), float(k["sync"]))  # 0: no verdicts, no reference


def lanes(t: Times, way: str) -> dict[str, list[tuple[float, float, str, str]]]:
    """When engines sample, the learner learns and weights are sent, over the first steps: the spans of a `Gantt`."""
    spans: dict[str, list[tuple[float, float, str, str]]] = {"engines": [], "learner": [], "weights": []}
    next_begin, pace = 0.0, t.step("asynchronous")
    # In turn a step begins when the one before has sent its weights. At once both sides begin every `pace` seconds: the
    # learner works on what was sampled in the pace before.
    for s in range(1, STEPS + 1):
        begun = next_begin if way != "asynchronous" else (s - 1) * pace
        sampled = begun + t.rollout
        learns = sampled if way != "asynchronous" else s * pace
        spans["engines"].append((begun, sampled, f"{s}", "one"))
        spans["learner"].append((learns, learns + t.learn, f"{s}", "two"))
        # Weights are sent when the slower side has ended.
        sent = learns + (t.learn if way != "asynchronous" else max(t.rollout, t.learn))
        spans["weights"].append((sent, sent + t.sync, f"{s}", "three"))
        next_begin = sent + t.sync
    return spans


def compute(k: lab.Values) -> lab.Readout:
    t = times(k)
    seconds = {w: t.step(w) for w in WAYS}
    way = str(k["way"])
    step = seconds[way]
    idle = {"engines": 1 - t.rollout / step, "learner": 1 - t.learn / step}
    # Colocated, the same devices do both, so they wait only while weights are sent.
    idle = dict.fromkeys(idle, t.sync / step) if way == "colocated" else idle
    words = {"colocated": "All devices sample, then all learn. They wait only for the weights, and need room for both.",
            "disaggregated": "Engines and learner have devices of their own and take turns: each waits for the other.",
            "asynchronous": "Both work at once, and samples are one step older."}[way]  # fmt: skip
    return lab.Readout(
        pictures=(
            Gantt(f"The first {STEPS} steps, {way}", lanes(t, way)),  # pyright: ignore[reportArgumentType]
            Bars("Steps an hour", WAYS, {"steps": [3600 / s for s in seconds.values()]}, low=0),
            Bars("Share of a step in which the devices of a role wait", list(idle), {"waits": list(idle.values())},
                 low=0, high=1),
        ),
        sentence=f"{words} A step takes **{step:.0f} s**, that is **{3600 / step:.0f}** an hour; asynchronous it "
        f"takes {seconds['asynchronous']:.0f} s, the longer of {t.rollout:.0f} and {t.learn:.0f}, and the sync.",
        values={"steps an hour": 3600 / step, "seconds of a step": step, "engines wait": idle["engines"],
                "learner waits": idle["learner"]},
        says=lab.refusal(lambda: Reinforce(name="rl", algorithm=GRPO, staleness=0, unfinished="pause"), "staleness=0")
        if way != "asynchronous" and k["unfinished"] == "pause" else (),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="19", name="topology", title="Topologies: who waits for whom", part="production", force="cost", minutes=6,
    question="Should sampling and learning share their devices, or have their own?",
    idea="""
        A step samples answers, learns from them, and sends the new weights to the engines. There are three ways to
        place this.

        *Colocated*: the same devices do one after the other. They wait only while weights are sent, but memory must
        hold what both need, and everything adds up. *Disaggregated*: engines and learner have devices of their own.
        Each fits its work, and each waits while the other one works. *Asynchronous*: the engines go on while the
        learner learns. A step then takes as long as the slower of the two and the sending, and samples come from
        weights that are one step older.

        Overlap hides only the shorter side. Where sampling is nearly everything, it brings nearly nothing.
    """,
    formula="in turn: R + T + S        at once: max(R, T) + S",
    knobs=(
        lab.Options("way", "placement", "colocated", WAYS),
        lab.Slider("rollout", "R: sampling, s", 20, 1, 120, 1),
        lab.Slider("learn", "T: learning, s", 15, 1, 120, 1),
        lab.Slider("sync", "S: sending weights, s", 2, 0, 30, 1),
        lab.Options("unfinished", "answers that have not ended", "go_on", ("go_on", "pause")),
    ),
    compute=compute,
    breaks=(
        lab.Break({"way": "asynchronous", "rollout": 100, "learn": 5},
                  "Sampling is nearly everything: at once is nearly as slow as in turn, and the learner waits.", None,
                  "overlap brings nothing"),
        lab.Break({"way": "disaggregated", "unfinished": "pause"},
                  "Answers can only be paused while somebody else works: in turn every answer has ended.",
                  "staleness=0", "pause without overlap"),
    ),
    claims=(
        lab.Claim("R 20, T 8, S 3 in turn, s", "curriculum 22c", 31, lambda: Times(20, 0, 0, 8, 3).step("colocated")),
        lab.Claim("at once, s", "curriculum 22c", 23, lambda: Times(20, 0, 0, 8, 3).step("asynchronous")),
        lab.Claim("at once, weights sent meanwhile, s", "curriculum 22c", 20,
                  lambda: Times(20, 0, 0, 8, 3).step("asynchronous", hidden_sync=True)),
    ),
    exercises=(
        lab.AskNumber("R = 30 s, T = 20 s, S = 2 s, asynchronous: how many seconds takes a step?", 32,
                      why="The longer of 30 and 20, and 2 to send the weights."),
        lab.AskKnobs("With R = 20 and T = 15, reach 160 steps an hour.", "steps an hour", 160, None,
                     {"way": "asynchronous"}),
        lab.AskChoice("When does asynchronous sampling nearly double the speed?",
                      ("When R and T are about equal", "When R is much longer", "When S is long"), 0,
                      why="Then R + T becomes max(R, T), about half."),
    ),
    code=("posttrain.plan.throughput.Times", "posttrain.plan.staleness.capacity"),
    docs="guides/placement.md", command="posttrain run arithmetic rl.staleness=1", grid=("rollout", "learn"),
)  # fmt: skip
