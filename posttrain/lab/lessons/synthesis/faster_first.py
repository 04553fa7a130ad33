"""Page 28: where the time of a step goes, and which optimisation to make first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from posttrain.lab import lesson as lab
from posttrain.plan.budget import OPTIMISATIONS
from posttrain.plan.throughput import ROLES, Times
from posttrain.web.picture import Bars

OVERLAP = "overlap"


def times(k: lab.Values) -> Times:
    return Times(*(float(k[role]) for role in ROLES))


def word(name: str) -> str:
    """The knob of an optimisation."""
    return name.replace(" ", "_")


def faster(now: Times, chosen: Collection[str], overlap: bool = False) -> float:
    """Seconds of a step with these optimisations. Factors of one role multiply: each is of what the others leave."""
    shares: dict[str, float] = dict.fromkeys(ROLES, 1.0)
    for name in chosen:
        shares[OPTIMISATIONS[name].role] *= OPTIMISATIONS[name].factor
    changed = replace(now, **{role: getattr(now, role) * share for role, share in shares.items()})
    return changed.step("asynchronous" if overlap else "colocated")


def order(now: Times) -> list[tuple[str, float]]:
    """The optimisations with the seconds of a step after each, each time the one that saves most after those before."""
    taken: dict[str, float] = {}
    while left := [n for n in OPTIMISATIONS if n not in taken]:
        # What is worth doing next depends on what was done: in a role that became short little is left to save.
        best = min(left, key=lambda n: faster(now, [*taken, n]))
        taken[best] = faster(now, [*taken, best])
    return list(taken.items())


def compute(k: lab.Values) -> lab.Readout:
    now = times(k)
    chosen = [n for n in OPTIMISATIONS if k[word(n)]]
    step = faster(now, chosen, bool(k[OVERLAP]))
    best = order(now)
    alone = {n: now.total - faster(now, [n]) for n in OPTIMISATIONS}
    return lab.Readout(
        pictures=(
            Bars("One step, seconds by role", ROLES, {"seconds": [getattr(now, r) for r in ROLES]}, low=0),
            Bars("What each saves alone, s", list(alone), {"seconds": list(alone.values())}, low=0),
            Bars("In the best order: seconds that are left", [n for n, _ in best], {"seconds": [s for _, s in best]},
                 low=0),
        ),
        sentence=f"The step takes **{now.total:.0f} s**, the longest part is **{now.slowest}**. With your choice "
        f"it takes **{step:.1f} s**, {now.total / step:.2f} times as fast. Make first: **{best[0][0]}** "
        f"({OPTIMISATIONS[best[0][0]].says}), then **{best[1][0]}**.",
        values={"seconds": step, "times as fast": now.total / step, "chosen": float(len(chosen) + k[OVERLAP])},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="28", name="bottlenecks", title="Bottlenecks: what to make faster first", part="synthesis", force="cost",
    minutes=6,
    question="A step has five parts and there are ten ways to make one faster: which comes first?",
    idea="""
        Measure before you change anything: a run prints the seconds of each role. An optimisation makes *one* role
        faster. If the role is a tenth of the step, even making it free saves a tenth.

        So the order depends on the run. Sampling is most of a usual step, so what serves siblings together comes
        first. After some changes another role is the longest, and the order changes: choose again after each.

        To *overlap* is different. It makes nothing faster; roles work at once, and the longer one counts. Where one
        role is most of the step, that hides little.

        The factors here are usually quoted ones. None was measured by us.
    """,
    formula="step = sum over roles( seconds x product of factors )        overlapped: the longer side, and sync",
    knobs=(
        lab.Slider("rollout", "rollout, s", 60, 0, 200, 1),
        lab.Slider("reward", "reward, s", 10, 0, 200, 1),
        lab.Slider("reference", "reference, s", 5, 0, 200, 1),
        lab.Slider("learn", "learn, s", 20, 1, 200, 1),
        lab.Slider("sync", "sync, s", 5, 0, 200, 1),
        lab.Toggle("prefix", "share prompts", False),
        lab.Toggle("batching", "continuous batching", False),
        lab.Toggle("speculation", "speculation", False),
        lab.Toggle("fp8", "engine in FP8", False),
        lab.Toggle("head", "head in tiles", False),
        lab.Toggle("packing", "packing", False),
        lab.Toggle("sharding", "sharding and checkpointing", False),
        lab.Toggle("every_5", "sync every 5 steps", False),
        lab.Toggle("reference_pool", "reference on its own devices", False),
        lab.Toggle("overlap", "overlap sampling and learning", False),
    ),
    compute=compute,
    breaks=(
        lab.Break({"sharding": True, "head": True, "packing": True},
                  "Three optimisations of the learner, and the step is 10 s shorter: sampling was the bottleneck.",
                  None, "the wrong role"),
        lab.Break({"rollout": 100, "reward": 0, "reference": 0, "learn": 5, "sync": 0, "overlap": True},
                  "Overlap alone where sampling is nearly everything: it hides 5 of 105 seconds.", None,
                  "overlap hides little"),
    ),
    claims=(
        lab.Claim("prefix sharing alone, of 100 s: seconds", "curriculum 28", 64,
                  lambda: faster(Times(60, 10, 5, 20, 5), ["prefix"])),
    ),
    exercises=(
        lab.AskNumber("Sampling takes 60 of 100 s. It becomes infinitely fast. How many seconds are left?", 40,
                      why="The other roles take 40 s; no optimisation of sampling can save more than 60."),
        lab.AskKnobs("Bring the step of 100 s to at most 46 s.", "seconds", None, 46,
                     {"prefix": True, "batching": True, "packing": True, "head": True}),
        lab.AskChoice("Rollout 90 s, learn 10 s. What does overlap save at most?", ("10 s", "45 s", "90 s"), 0,
                      why="The longer side counts: 90 s instead of 100."),
    ),
    code=("posttrain.lab.lessons.synthesis.faster_first.order", "posttrain.lab.lessons.synthesis.faster_first.faster",
          "posttrain.plan.throughput.Times"),
    docs="help/slow.md", command="posttrain plan grpo model=Qwen2.5-7B machine=8xH100", grid=("rollout", "learn"),
)  # fmt: skip
