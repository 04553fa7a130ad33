"""Page 14: Dr.GRPO, and what an aggregation does to long answers."""

from __future__ import annotations

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import DAPO, DR_GRPO, GRPO
from posttrain.toy.episodes import rewarded
from posttrain.web.picture import Bars, Curve

RULES = {"sequence_mean (GRPO)": GRPO, "prompt_mean (DAPO)": DAPO, "constant (Dr.GRPO)": DR_GRPO}
MOST = 256
"""L_max: the largest length that is allowed."""


def token_push(rule: str, lengths: tuple[int, int], rewards: tuple[float, float]) -> tuple[float, float]:
    """Returns the push on one token of the short and of the long answer: weight times credit. It is multiplied by the
    tokens of the step, so that a plain mean over all tokens would give the credit itself."""
    a = RULES[rule]
    group = credit_step(a, rewarded(rewards, lengths=[list(lengths)]), max_tokens=MOST, ema=0.0).groups[0]
    weights = weigh(a.aggregate, lengths, (0, 0), MOST)
    credits = [float(e.advantage[0][0]) for e in group.episodes]
    step_tokens = sum(lengths)
    return float(weights[0] * credits[0] * step_tokens), float(weights[1] * credits[1] * step_tokens)


def against(pushes: tuple[float, float]) -> list[float]:
    """Both pushes over the size of the short answer's."""
    return [x / abs(pushes[0]) for x in pushes]


def compute(k: lab.Values) -> lab.Readout:
    short, long = int(k["short"]), int(k["long"])
    rewards = (1.0, 0.0) if k["wrong"] == "the long one" else (0.0, 1.0)
    pushes = {rule: token_push(rule, (short, long), rewards) for rule in RULES}
    lengths = [n for n in (10, 20, 40, 80, 120, 160, 200) if n >= short]
    by_length = {rule: [abs(against(token_push(rule, (short, n), rewards))[1]) for n in lengths] for rule in RULES}
    short_over_long = 1 / abs(against(pushes[str(k["rule"])])[1])
    return lab.Readout(
        pictures=(
            Bars("Push of one token, in units of the short answer's", ("short answer", "long answer"),
                 {rule: against(x) for rule, x in pushes.items()}, low=-1.2, high=1.2),
            Curve("Size of the push on a token of the long answer", lengths, by_length,
                  x_label="tokens of the long answer", low=0, high=1.2),
        ),
        sentence=f"Under **{k['rule']}** a token of the short answer weighs **{short_over_long:.3g}** times as much as "
        "a token of the long one. The credit of both is equal but for its sign.",
        values={"short over long": short_over_long},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="14", name="length", title="Dr.GRPO: who pays for long answers?", part="the algorithms", force="estimator",
    minutes=6,
    question="Is a wrong answer punished less if it is longer?",
    idea="""
        The loss averages over tokens, and there is more than one way to do it (the aggregation). GRPO takes the mean
        within each answer first. Then a token in an answer of 200 weighs a twentieth of a token in an answer of 10: a
        long wrong answer is punished mildly at each token, so wrong answers become longer. DAPO takes one mean over all
        tokens of a prompt. Dr.GRPO divides by a constant, the largest length that is allowed. It also leaves out the
        standard deviation, by which prompts that are nearly always or nearly never solved count more.
    """,
    formula="""weight of a token:  sequence_mean 1 / (E |y|)     prompt_mean 1 / (P sum |y|)     constant 1 / (E L_max)
E answers, P prompts, |y| tokens of an answer, L_max the largest length""",
    knobs=(
        lab.Slider("short", "tokens of the short answer", 10, 5, 100),
        lab.Slider("long", "tokens of the long answer", 200, 100, 200),
        lab.Options("wrong", "which one is wrong", "the long one", ("the long one", "the short one")),
        lab.Options("rule", "aggregation", "constant (Dr.GRPO)", tuple(RULES)),
    ),
    compute=compute,
    breaks=(
        lab.Break({"rule": "sequence_mean (GRPO)", "short": 10, "long": 200, "wrong": "the long one"},
                  "Each token of the long wrong answer is punished twenty times less than the short one's is paid.",
                  None),
    ),
    claims=(
        lab.Claim("A token of 10 over a token of 100, sequence_mean", "curriculum 14", 10.0,
                  lambda: abs(token_push("sequence_mean (GRPO)", (10, 100), (1,
                  0))[0] / token_push("sequence_mean (GRPO)", (10, 100), (1, 0))[1])),
        lab.Claim("The same under constant", "2503.20783", 1.0,
                  lambda: abs(token_push("constant (Dr.GRPO)", (10, 100), (1,
                  0))[0] / token_push("constant (Dr.GRPO)", (10, 100), (1, 0))[1])),
    ),
    exercises=(
        lab.AskNumber("Answers of 4 and 7 tokens to one prompt, prompt_mean: what is a token's weight?", 1 / 11,
                      why="1 / (4 + 7)."),
        lab.AskKnobs("Make a short token weigh at least 10 times a long one.", "short over long", 10, None,
                     {"rule": "sequence_mean (GRPO)"}),
        lab.AskChoice("Which aggregation rewards a short right answer most, compared with a long right one?",
                      ("sequence_mean", "prompt_mean", "constant"), 0, why="Its tokens share the answer's weight."),
    ),
    code=("posttrain.algorithm.loss.token_weights.weigh",),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=dr_grpo", grid=("rule", "long"),
)  # fmt: skip
