"""Page 23: tick what a paper ticks, and see the nearest line of the ladder."""

from __future__ import annotations

from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm, differences
from posttrain.ladder.pieces.baseline import Value
from posttrain.ladder.policy_rows import LADDER
from posttrain.web.picture import Bars, Branch, Matrix, Tree

BASELINES = {
    "none": "Zero",
    "mean of the group": "GroupMean",
    "mean of the others": "Others",
    "a learned value": "Value",
    "a greedy answer": "Greedy",
}
SCALES = {
    "nothing": "one",
    "std of the group": "group_std",
    "std of the batch": "batch_std",
    "mean of the group": "group_mean",
}
REGIONS = {
    "none": "None",
    "clip of the ratio": "Clip",
    "cap of the ratio": "Cap",
    "soft gate": "Soft",
    "distance of distributions": "Divergence",
}
MEANS = {
    "all tokens": "token_mean",
    "each prompt": "prompt_mean",
    "each answer": "sequence_mean",
    "a constant": "constant",
    "sums of answers": "sequence_sum",
}
RATIOS = {"none": "one", "each token": "token", "each answer": "sequence_mean"}
PULLS = {"none": "None", "KL to a reference": "KL"}
FILTERS = {"all groups": "None", "only groups with spread": "mixed"}
ASKED = (
    ("baseline", "compared with", BASELINES),
    ("scale", "divided by", SCALES),
    ("ratio", "ratio of", RATIOS),
    ("region", "bounded by", REGIONS),
    ("mean", "averaged over", MEANS),
    ("pull", "pulled by", PULLS),
    ("filter", "learns from", FILTERS),
)
FAILURES = (
    ("Reward is flat", "nothing to learn from: too hard, too easy, or an outage", "posttrain check RUN"),
    ("Reward rises, answers do not", "the verifier has a hole", "a held-out judge"),
    ("Entropy falls to 0", "too few rare tokens grow", "algorithm=dapo"),
    ("Answers grow", "long wrong ones are punished less", "algorithm=dr_grpo"),
    ("Ratios explode", "samples are too old", "rl.staleness=0"),
    ("Sampler and learner disagree", "two kernels, or two precisions", "model.dtype=float32"),
    ("KL stays 0", "the reference is the policy", "freeze a copy"),
    ("Most groups are silent", "prompts are of one difficulty", "filter=mixed"),
    ("Collapse after one step", "the learning rate is too high", "a tenth of it"),
    ("Never stops", "the stop id is wrong", "eos_token_id"),
)


def ticks(a: Algorithm) -> tuple[str, ...]:
    """Returns an algorithm's word for each question of `ASKED`. A choice without a box has a word that no box has."""
    type_name = type(a.baseline).__name__
    baseline = "Value" if isinstance(a.baseline, Value) else type_name
    ratio = "sequence_mean" if a.ratio.startswith("sequence") else a.ratio  # ratios of whole answers are one box
    return (
        baseline,
        a.scale,
        ratio,
        type(a.clip).__name__.replace("NoneType", "None"),
        a.aggregate,
        "KL" if type(a.pull).__name__ == "KL" else "None",
        str(a.filter),
    )


def depth(a: Algorithm) -> int:
    """Patches between REINFORCE and an algorithm."""
    return 0 if a.parent is None else 1 + depth(a.parent)


def nearest(wanted: tuple[str, ...]) -> list[tuple[int, Algorithm]]:
    """(ticks that differ, algorithm) of all, the nearest first; of equally near ones that with the shorter lineage."""
    counted = [(sum(x != y for x, y in zip(wanted, ticks(a), strict=True)), a) for a in LADDER.values()]
    return sorted(counted, key=lambda f: (f[0], depth(f[1]), len(f[1].pieces), f[1].name))


def lineage(a: Algorithm) -> list[Algorithm]:
    return [a] if a.parent is None else [*lineage(a.parent), a]


def compute(k: lab.Values) -> lab.Readout:
    wanted = tuple(choices[str(k[name])] for name, _, choices in ASKED)
    order = nearest(wanted)
    differing, best = order[0]
    # From the algorithm back to the oldest, as each branch holds the one that came of it.
    branch: Branch | None = None
    for a in reversed(lineage(best)):
        changed = ", ".join(sorted(differences(a.parent, a))) if a.parent else "the beginning"
        branch = Branch(
            f"{a.name}: {changed}", "good" if a is best else "plain", None, () if branch is None else (branch,)
        )
    assert branch is not None
    table = [
        [str(k[name]), {v: words for words, v in choices.items()}.get(has, has)]
        for (name, _, choices), has in zip(ASKED, ticks(best), strict=True)
    ]
    return lab.Readout(
        pictures=(
            Matrix("What you ticked, and what it has", ("ticked", best.name), [words for _, words, _ in ASKED],
                   [[0.0, float(w != h)] for w, h in table], table, low=0, high=1),
            Bars("The three nearest, by ticks that differ", [a.name for _, a in order[:3]],
                 {"differences": [float(n) for n, _ in order[:3]]}, low=0),
            Tree(f"How {best.name} came to be, a patch at a time", branch),
            Matrix("Ten ways to fail", ("usual cause", "first remedy"), [row[0] for row in FAILURES],
                   [[0.0, 0.0]] * len(FAILURES), [list(row[1:]) for row in FAILURES], low=0, high=1),
        ),
        sentence=f"The nearest algorithm is **{best.name}** ({best.paper}), **{differing}** ticks away: "
        f"`posttrain run arithmetic algorithm={best.name}`.",
        values={"differences": float(differing), "steps from REINFORCE": float(depth(best))},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="23", name="papers", title="Reading a paper: which patch is it?", part="production", force="estimator",
    minutes=8,
    question="A new paper promises a new algorithm: which of its parts are new?",
    idea="""
        Most algorithms are an older one with one or two parts changed. So a paper is read fastest by seven questions:
        what is an answer compared with, what is that divided by, which ratio is formed, what bounds it, how are tokens
        averaged, what pulls back, and which groups are left out. Tick the answers. The library lists its algorithms as
        a ladder, each a few changes of another (`posttrain ladder`). The nearest one appears, with what it came from
        and the command that runs it; what differs from it is what the paper adds.
    """,
    formula="algorithm = REINFORCE + patch + patch + ...",
    knobs=tuple(
        lab.Options(name, words, default, tuple(choices))
        for (name, words, choices), default in zip(
            ASKED,
            (
                "mean of the group",
                "std of the group",
                "each token",
                "clip of the ratio",
                "each answer",
                "KL to a reference",
                "all groups",
            ),
            strict=True,
        )
    ),
    compute=compute,
    claims=(
        lab.Claim("GRPO's ticks lead to GRPO: differences", "2402.03300", 0,
                  lambda: float(nearest(ticks(LADDER["grpo"]))[0][0]), within=0),
        lab.Claim("Algorithms on the ladder", "counted", 68, lambda: float(len(LADDER)), within=0.1),
    ),
    exercises=(
        lab.AskKnobs("Tick PPO: find a line that is one step from REINFORCE.", "steps from REINFORCE", None, 1,
                     {"baseline": "a learned value", "scale": "nothing", "mean": "all tokens", "pull": "none"}),
        lab.AskNumber("How many ticks does Dr.GRPO change against GRPO?", 3, why="The scale, the mean, and the KL."),
        lab.AskChoice("A paper changes only the denominator of the loss. Which question does it answer anew?",
                      ("compared with", "averaged over", "bounded by"), 1, why="That is the aggregation."),
    ),
    code=("posttrain.ladder.algorithm.patch", "posttrain.ladder.algorithm.differences"),
    docs="guides/which-algorithm.md", command="posttrain ladder --diff grpo dapo", grid=("baseline", "region"),
)  # fmt: skip
