"""Two rewards at once, an easy and a hard one: compared as a sum (GRPO), or each on its own (GDPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement, first_at_least
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import GDPO, GRPO
from posttrain.toy.answers import Answers, ask, imitate, siblings
from posttrain.toy.policies import NetworkPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern

PROMPTS, VOCAB, G, STEPS = 32, 12, 8, 150
WORTH = 4.0
ARMS: dict[str, tuple[Algorithm, float]] = {
    "GRPO, easy worth 1": (replace(GRPO, pull=None), 1.0),
    "GDPO, easy worth 1": (replace(GDPO, pull=None), 1.0),
    "GRPO, easy worth 4": (replace(GRPO, pull=None), WORTH),
    "GDPO, easy worth 4": (replace(GDPO, pull=None), WORTH),
}


def truth(seed: int) -> Tensor:
    return torch.randint(VOCAB, (PROMPTS,), generator=torch.Generator().manual_seed(1000 + seed))


def start(seed: int) -> NetworkPolicy:
    """First token: the format (token 0), right half the time. Second: the prompt's answer, right in about one of
    twelve."""
    made = torch.Generator().manual_seed(seed)
    policy = NetworkPolicy(torch.eye(PROMPTS), 2, VOCAB, 64, seed)
    prompt_E = torch.arange(PROMPTS).repeat(40)
    tokens_ET = torch.randint(VOCAB, (len(prompt_E), 2), generator=made)
    tokens_ET[torch.rand(len(prompt_E), generator=made) < 0.5, 0] = 0
    imitate(policy, prompt_E, tokens_ET, 150, 5e-3, made)
    return policy


def rewards_of(answers: Answers, truth_P: Tensor) -> np.ndarray:
    """[P, G, 2]: format, correct."""
    both = torch.stack([answers.tokens_ET[:, 0] == 0, answers.tokens_ET[:, 1] == truth_P[answers.prompt_E]], 1)
    return both.double().numpy().reshape(-1, G, 2)


def train(a: Algorithm, worth: float, seed: int) -> np.ndarray:
    """Share of every step's samples with the format and with the answer, [STEPS, 2]; the format is worth this much
    reward."""
    policy, truth_P, made = start(seed), truth(seed), torch.Generator().manual_seed(seed)
    trainer = ToyTrainer(a, policy, torch.optim.Adam(policy.parameters(), lr=2e-3), G, seed)
    out: list[np.ndarray] = []
    for _ in range(STEPS):
        answers = ask(policy, siblings(torch.arange(PROMPTS), G), made)
        rewards = rewards_of(answers, truth_P)
        out.append(rewards.mean((0, 1)))
        trainer.step(answers, credit_by_pattern(a, rewards * [worth, 1.0]).ravel())
    return np.array(out)


def play(seed: int) -> Played:
    runs = {arm: train(a, worth, seed) for arm, (a, worth) in ARMS.items()}
    steps = range(STEPS)
    figures = {
        arm: {
            "format at first": float(x[0, 0]),
            "correct at first": float(x[0, 1]),
            "steps to format .9": first_at_least(steps, x[:, 0].tolist(), 0.9),
            "correct, steps 5-15": float(x[5:15, 1].mean()),
            "steps to correct .5": first_at_least(steps, x[:, 1].tolist(), 0.5),
            "format, last 10 steps": float(x[-10:, 0].mean()),
            "correct, last 10 steps": float(x[-10:, 1].mean()),
        }
        for arm, x in runs.items()
    }
    shown = {arm: x for arm, x in runs.items() if arm != "GDPO, easy worth 4"}
    curves = {f"{arm[:4]}{arm[-2:]} correct": Curve(steps, x[:, 1].tolist()) for arm, x in shown.items()}
    return Played(
        figures, curves | {f"{arm[:4]}{arm[-2:]} format": Curve(steps, x[:, 0].tolist()) for arm, x in shown.items()}
    )


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    late, early, half = "correct, last 10 steps", "correct, steps 5-15", "steps to correct .5"
    gdpo = mean["GDPO, easy worth 1"]
    ends = all(f[f"GDPO, easy worth {w}"][late] > f[f"GRPO, easy worth {w}"][late] for f in each for w in (1, 4))
    faster = all(mean[f"GDPO, easy worth {w}"][half] < mean[f"GRPO, easy worth {w}"][half] for w in (1, 4))
    stalls = mean["GRPO, easy worth 4"][early] < min(mean[arm][early] for arm in ARMS if arm != "GRPO, easy worth 4")
    same = all(f["GDPO, easy worth 1"] == f["GDPO, easy worth 4"] for f in each)
    rises = (
        gdpo["format, last 10 steps"] > gdpo["format at first"] + 0.2 and gdpo[late] > gdpo["correct at first"] + 0.2
    )
    return [
        Statement("GDPO raises both rewards by more than .2", rises),
        Statement("the hard reward ends higher under GDPO, on every seed and at both worths", ends),
        Statement("the hard reward reaches .5 in fewer steps under GDPO, at both worths", faster),
        Statement("while the format is learned, an easy reward worth 4 holds the hard one back under GRPO", stalls),
        Statement("GDPO is the same run whatever the easy reward is worth", same),
    ]


MINIATURE = Miniature(
    name="two_rewards",
    item="F.2 item 16",
    claim=(
        "Normalising the sum of two rewards lets the easier one set the scale; normalising each on its own keeps both"
        " alive."
    ),
    source="GDPO 2601.05242",
    setup=(
        "32 prompts. An answer is a format token (right half the time at first) and an answer token (right in one of"
        " twelve). Each is rewarded with 0 or 1; a second time the format is worth 4. A network of 64 hidden units, 8"
        " siblings, all prompts every step, Adam 2e-3, 150 steps, no KL."
    ),
    predicted="Both rise under GDPO; the hard one rises later and less under GRPO on the sum.",
    verdict=(
        "Holds, weakly. At equal worth the difference is a few steps, since an easy reward stops mattering once"
        " everybody has it; worth 4 times the hard one, it holds the hard one back until then. GDPO does not see the"
        " worth at all."
    ),
    play=play,
    judge=judge,
    notes=("The second worth was added after the first showed only a small difference.",),
    picture=Picture("GDPO and GRPO on two rewards", "step", "mean reward"),
)
