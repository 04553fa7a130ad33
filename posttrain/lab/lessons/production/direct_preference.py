"""Page 16: DPO on one comparison, and the loss of four algorithms against the implicit gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.preference.preference_link import Margins, link
from posttrain.lab import lesson as lab
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import DPO, IPO, SLIC
from posttrain.toy.enumerated_policy import PrefixPolicy
from posttrain.toy.pairs import AnswerPair, TablePolicy, TiedPolicy, pair_logp
from posttrain.toy.preference_steps import descend, gap
from posttrain.web.picture import Bars, Curve

ALGORITHMS = {"DPO": DPO, "IPO": IPO, "SLiC": SLIC}
SHARED: AnswerPair = ((1, 1, 0), (1, 0))  # `a a #` and `a #`: token 0 is the end, 1 is `a`
APART: AnswerPair = ((0,), (1,))  # two of four answers that are one token each


def policies(shared: bool) -> tuple[TablePolicy, TablePolicy, AnswerPair]:
    """(policy, reference, the pair): answers that share their tokens, or four answers of one token."""
    if shared:
        return TiedPolicy([0.15, 0.7, 0.15]), TiedPolicy([0.15, 0.7, 0.15]), SHARED
    return PrefixPolicy(0, vocabulary=4, longest=1), PrefixPolicy(0, vocabulary=4, longest=1), APART


def pair_loss(a: PreferenceAlgorithm, h: float) -> float:
    """The loss of a pair whose implicit gap is h nats."""
    x = torch.tensor([h], dtype=torch.float64)
    # The links of these three read the margin alone, and not the rewards of the sides: the gap may lie in either.
    return float(link(a.link, Margins(a.beta * x, a.beta * x, 0 * x, a.beta))[0])


def probabilities(policy: TablePolicy, pair: AnswerPair) -> tuple[float, float]:
    """Probability of the chosen answer, and of the rejected one."""
    with torch.no_grad():
        chances = pair_logp(policy, [pair]).exp()
    first = len(pair[0])
    return float(chances[:first].prod()), float(chances[first:].prod())


def compute(k: lab.Values) -> lab.Readout:
    a = replace(ALGORITHMS[str(k["algorithm"])], beta=float(k["beta"]))
    policy, reference, pair = policies(bool(k["shared"]))
    before = probabilities(policy, pair)
    steps = 80
    path = descend(a, policy, reference, [pair], steps=steps, lr=float(k["eta"]))
    after = probabilities(policy, pair)
    gaps = np.linspace(-1, 2, 61) / a.beta
    curves = {n: [pair_loss(replace(row, beta=a.beta), float(h)) for h in gaps] for n, row in ALGORITHMS.items()}
    # Each loss is drawn in units of its value at no gap, so that all fit one axis. ys[20] is that value: gaps[20] is 0.
    curves = {n: [y / ys[20] for y in ys] for n, ys in curves.items()}
    both_fell = after[0] < before[0] and after[1] < before[1]
    final = gap(policy, reference, pair)
    return lab.Readout(
        pictures=(
            Bars("Probability of each answer",
                 ("chosen: a a #", "rejected: a #") if k["shared"] else ("chosen", "rejected"),
                 {"before": list(before), "after": list(after)}, low=0),
            Curve("Gap while it trains", list(range(steps + 1)), {"gap": path}, y_label="nats"),
            Curve("Loss of a pair by its gap, in units of the loss at no gap", gaps.tolist(), curves,
                  x_label="gap, nats (the line: after training)", low=0, high=3, at=final),
        ),
        sentence=f"After {steps} steps the gap is **{final:.2f}** nats. The chosen answer went from "
        f"**{before[0]:.3f}** to **{after[0]:.3f}**, the rejected one from **{before[1]:.3f}** to **{after[1]:.3f}**"
        + (": **both fell**." if both_fell else "."),
        values={"gap": final, "chosen": after[0], "rejected": after[1]},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="16", name="dpo", title="DPO: a comparison as a supervised loss", part="production", force="signal",
    minutes=8,
    question="Can a preference be learned without a reward model, and why do both probabilities fall?",
    idea="""
        People compared two answers. DPO needs no reward model (page 15): it reads the policy itself as one. The reward
        of an answer is how much its log-prob has risen over the reference's. The loss asks for a large gap between the
        chosen and the rejected answer, and for nothing else. A larger beta is content with a smaller gap.

        Where the answers share tokens, `a a #` is chosen over `a #`, and one softmax gives the token at every place.
        The gap grows only if `a` becomes likelier. That takes probability from `#`, which ends both: both fall.

        DPO's loss has no minimum where the gap can grow: ten times the steps add a constant to it. IPO's has one, at 1
        / (2 beta), and SLiC's is 0 from 1 / beta on.
    """,
    formula="""-log sigmoid( beta * gap )     gap = log pi/ref (chosen) - log pi/ref (rejected)
IPO: (gap - 1 / (2 beta))^2          SLiC: max(0, 1 - beta * gap)""",
    knobs=(
        lab.Options("algorithm", "algorithm", "DPO", tuple(ALGORITHMS)),
        lab.Slider("beta", "beta", 0.5, 0.05, 2.0, log=True),
        lab.Slider("eta", "step size", 0.5, 0.05, 20.0, log=True),
        lab.Toggle("shared", "the answers share tokens", True),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"algorithm": "DPO", "eta": 20.0, "beta": 0.05, "shared": True},
                  "The gap stops at 0.36, where nothing but `a` is said: both answers have lost nearly all of their "
                  "probability, because neither can end.", None),
    ),
    claims=(
        lab.Claim("IPO's minimum at beta .1, nats", "2310.12036", 5.0,
                  lambda: descend(IPO, *policies(False)[:2], [APART], steps=400, lr=0.1)[-1]),
        lab.Claim("DPO's gap after 10 times the steps: more by", "ln 10 / beta", np.log(10) / 0.1,
                  lambda: (lambda x: x[-1] - x[40])(descend(DPO, *policies(False)[:2], [APART], steps=400,
                  lr=100.0)), within=0.05),
    ),
    exercises=(
        lab.AskNumber("Where is IPO's minimum for beta = 0.25, in nats?", 2.0, why="1 / (2 * 0.25)."),
        lab.AskKnobs("Bring the chosen answer to 0.12; it starts at 0.0735.", "chosen", 0.12, None, {"shared": False}),
        lab.AskChoice("Why can the chosen answer become less likely?",
                      ("The loss reads only the gap", "The reference moves", "beta is too large"), 0,
                      why="Nothing in the loss asks that it rises."),
    ),
    code=("posttrain.algorithm.preference.preference_link.link",
          "posttrain.algorithm.preference.preference_loss.PreferenceLoss"),
    docs="reference/preferences.md", command="posttrain run dpo", grid=("beta", "algorithm"),
)  # fmt: skip
