"""A decision table: three facts about a project decide its reward source, its algorithm and its topology.

The three facts, or forces, are the signal (what can say that an answer is right), the estimator (how many samples of a
prompt can be paid for) and the cost (how much hardware there is). A better signal allows a cheaper estimator, and a
cheaper estimator a simpler topology. Each cell says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One case of the table."""

    signal: str
    """Source that can say whether an answer is right."""
    estimator: str
    """How many samples of a prompt can be paid for."""
    cost: str
    """How much hardware there is."""
    reward: str
    algorithm: str
    topology: str
    recipe: str
    """The nearest published recipe."""
    why: str
    command: str
    """Nearest command of this package."""
    at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Its place on three axes, each from 0 to 1. Signal: from people's comparisons to a program that decides.
    Estimator: from no sample to many siblings. Cost: from one device to many machines."""


CELLS: Sequence[Cell] = (
    Cell("comparisons by people", "one sample", "some devices", "reward model", "ppo", "colocated",
         "InstructGPT (2203.02155)",
         "a preference cannot be checked, so it is learned; without siblings a critic is the baseline",
         "posttrain run rlhf algorithm=ppo", (0.0, 0.4, 0.5)),
    Cell("comparisons by people", "none", "one device", "the pairs themselves", "dpo", "nothing is sampled",
         "DPO alone (2305.18290)",
         "the same comparisons as a supervised loss: no reward model, no critic, no engine",
         "posttrain run dpo", (0.0, 0.0, 0.0)),
    Cell("a program decides", "8 and more siblings", "one machine", "verifier", "grpo", "colocated",
         "R1-Zero (2501.12948)",
         "a verdict costs milliseconds and has no bias to learn, so siblings replace the critic",
         "posttrain run grpo", (1.0, 1.0, 0.3)),
    Cell("a program decides", "8 and more siblings", "many machines", "verifier", "dapo", "asynchronous",
         "DAPO (2503.14476), asynchronous as AReaL (2505.24298)",
         "long answers leave engines idle in turn; staleness hides the learner and a clip bounds its harm",
         "posttrain run grpo algorithm=dapo rl.staleness=1 placement=processes", (1.0, 1.0, 1.0)),
    Cell("a program decides", "one sample", "one machine", "verifier", "reinforce_pp", "colocated",
         "REINFORCE++ (2501.03262)",
         "without siblings the mean of the whole batch is the baseline",
         "posttrain run grpo algorithm=reinforce_pp", (1.0, 0.4, 0.3)),
    Cell("a program, and people elsewhere", "4 to 8 siblings", "one machine", "verifier and reward model", "grpo",
         "colocated", "Tulu 3 (2411.15124), R1",
         "stages mix them: imitation, preferences where only people can say, a verifier where there is one",
         "posttrain run ladder", (0.6, 0.7, 0.4)),
    Cell("a judge that writes", "4 to 8 siblings", "two kinds of engines", "generative judge with a rubric", "grpo",
         "disaggregated", "DeepSeek-GRM (2504.02495)",
         "the judge's own generation costs as much as the rollout, so it has engines of its own",
         "posttrain run judge", (0.4, 0.8, 0.7)),
    Cell("a right answer's text", "none", "one device", "demonstrations", "sft", "nothing is sampled",
         "SFT, the first stage of all of them", "imitation needs no reward; RL begins where 10 to 80 % are right",
         "posttrain run sft", (0.5, 0.0, 0.0)),
)  # fmt: skip
# The usual choice between these cases, in words.
MIDDLE = (
    "a verifier where there is one and a model elsewhere, GRPO with a clip, a KL anchor and 8 siblings, one machine"
    " that takes turns or engines apart with weights sent to them: R1, Tulu 3, Qwen"
)
