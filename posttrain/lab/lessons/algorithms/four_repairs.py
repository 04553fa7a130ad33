"""Page 13: DAPO's four repairs of GRPO, one toggle each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.credit.reward_shaping import shaped
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.config.run import Reinforce
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.shape import Overlong
from posttrain.ladder.policy_rows import DAPO, GRPO
from posttrain.toy.answers import ask, said_logp, siblings
from posttrain.toy.episodes import PlainEpisode, scored_group
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import ToyTrainer, credit_by_pattern, mixed
from posttrain.web.picture import Bars, Curve

PROMPTS, G, VOCABULARY, STEPS, MOST_ASKED = 8, 4, 6, 40, 4
PLAIN = replace(GRPO, pull=None)


def world(right: float) -> TabularPolicy:
    """Sixteen prompts of one token: token 0 is right, with a share around `right` that differs by prompt."""
    share = torch.sigmoid(torch.logit(torch.tensor(right, dtype=torch.float64)) + torch.linspace(-2, 2, 2 * PROMPTS))
    table = torch.zeros(2 * PROMPTS, 1, VOCABULARY, dtype=torch.float64)
    table[:, 0, 0] = torch.log((VOCABULARY - 1) * share / (1 - share))
    return TabularPolicy(table)


def train(k: lab.Values, seed: int) -> dict[str, list[float]]:
    """Gauges of each step: reward, shares of right answers, of silent groups and of groups that were thrown away,
    entropy."""
    a: Algorithm = replace(PLAIN, clip=DAPO.clip) if k["higher"] else PLAIN
    policy, made = world(float(k["right"])), torch.Generator().manual_seed(seed)
    trainer = ToyTrainer(
        a, policy, torch.optim.SGD(policy.parameters(), lr=float(k["eta"])), G, seed, minibatches=2, epochs=2
    )
    out: dict[str, list[float]] = {"reward": [], "silent": [], "asked": [], "entropy": [], "mixed": []}
    for _ in range(STEPS):
        drawn = torch.randint(2 * PROMPTS, (PROMPTS * (MOST_ASKED if k["dynamic"] else 1),), generator=made)
        answers = ask(policy, siblings(drawn, G), made)
        rewards = (answers.tokens_ET[:, 0] == 0).double().numpy().reshape(-1, G)
        keep = np.flatnonzero(mixed(rewards))[:PROMPTS] if k["dynamic"] else np.arange(PROMPTS)
        used = len(rewards) if len(keep) < PROMPTS else int(keep[-1]) + 1
        at = torch.as_tensor((keep[:, None] * G + np.arange(G)).ravel(), dtype=torch.int64)
        out["reward"].append(float(rewards[:used].mean()))
        out["mixed"].append(float(mixed(rewards[:used]).mean()))
        out["silent"].append(float(1 - mixed(rewards[keep]).mean()) if len(keep) else 1.0)
        out["asked"].append(used / PROMPTS)
        every = ask(policy, torch.arange(2 * PROMPTS), made)
        out["entropy"].append(float(said_logp(policy, every)[1].detach().mean()))
        if len(keep) >= 2:  # one group at least for each minibatch
            trainer.step(answers.subset(at), credit_by_pattern(a, rewards[keep]).ravel())
    return out


def penalty(length: int, overlong: bool) -> float:
    """Returns the amount that an answer of this length is paid on top of its reward, where 100 tokens are allowed."""
    group = scored_group("a", [PlainEpisode(0.0, [[length]], np.full(length, -1.0))])
    episodes = [s.episode for s in group.episodes]
    shape = (Overlong(cache=0.2),) if overlong else ()
    return float(shaped(shape, np.zeros(1), episodes, 100)[0][0])


def compute(k: lab.Values) -> lab.Readout:
    found = train(k, int(k["seed"]))
    steps = list(range(1, STEPS + 1))
    rule = DAPO.aggregate if k["token"] else GRPO.aggregate
    weights = weigh(rule, (10, 100), (0, 0), 100)
    lengths = list(range(60, 101, 5))
    gauges = {"rollout/reward": found["reward"], "rollout/solved": found["reward"], "credit/silent": found["silent"],
              "rollout/mixed": found["mixed"], "rollout/truncated": [0.0] * STEPS}  # fmt: skip
    said = lab.by_rules(lab.recorded(gauges), Reinforce(name="rl", algorithm=PLAIN), "too_easy")
    useful, none = float(np.mean([1 - s for s in found["silent"]])), sum(s == 1 for s in found["silent"])
    return lab.Readout(
        pictures=(
            Curve("Reward and entropy", steps, {"reward": found["reward"], "entropy, nats": found["entropy"]}, low=0),
            Curve("Silent share of the groups, and prompts asked (1 is 8 a step)", steps,
                  {"silent share": found["silent"], "prompts asked, in eights": found["asked"]}, low=0),
            Bars("Weight of a token, in answers of 10 and 100 tokens", ("10 tokens", "100 tokens"),
                 {rule: [float(w) * 110 for w in weights]}, low=0),
            Curve("Added to the reward, by length (100 allowed)", lengths,
                  {"overlong": [penalty(n, bool(k["overlong"])) for n in lengths]}, x_label="tokens", low=-1, high=0.1),
        ),
        sentence=f"Reward **{np.mean(found['reward'][:5]):.2f}** to **{np.mean(found['reward'][-5:]):.2f}** in {STEPS} "
        f"steps. **{useful:.0%}** of the groups that it learned from were not silent. It asked "
        f"**{np.mean(found['asked']):.1f}** times 8 prompts a step."
        + (f" In {none} steps no group was left (silent share 1): all siblings agreed." if none else ""),
        values={"reward at the end": float(np.mean(found["reward"][-5:])), "useful share": useful,
                "entropy": found["entropy"][-1]},
        says=said,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="13", name="dapo", title="DAPO: four repairs of GRPO", part="the algorithms", force="estimator", minutes=8,
    question="Which of DAPO's four changes does what?",
    idea="""
        GRPO has a clip: where a token's ratio (its probability now over that at sampling, page 02) passes 1.2, or 0.8
        on the way down, the token is not pushed further. DAPO changes four things:

        - *Clip higher*: the upper end is 1.28, so a rare token can grow and variety stays.
        - *Dynamic sampling*: silent groups are thrown away and other prompts asked instead. A step learns from full
          groups, and samples more.
        - *Token mean*: one mean over all tokens of a prompt, so a long answer weighs as much as its tokens (page 14).
        - *Overlong*: an answer near the limit of length loses reward bit by bit, not all at once.
    """,
    formula="""clip(ratio, 1 - .2, 1 + .28)          keep groups with 0 < right < K
token mean: 1 / sum |y|               overlong: -(|y| - 80) / 20 above 80 tokens""",
    knobs=(
        lab.Toggle("higher", "clip higher (.2 / .28)", True),
        lab.Toggle("dynamic", "dynamic sampling", True),
        lab.Toggle("token", "token mean", True),
        lab.Toggle("overlong", "soft overlong penalty", True),
        lab.Slider("right", "share of right answers at the start", 0.3, 0.02, 0.98, 0.02),
        lab.Slider("eta", "step size", 4.0, 0.5, 30.0, log=True),
        lab.Slider("seed", "seed", 0, 0, 10),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"dynamic": False, "right": 0.98},
                  "Nearly every group is all right: without dynamic sampling it learns " "from nothing.", "too_easy"),
    ),
    claims=(
        lab.Claim("Silent groups of 4 siblings, each right with probability .9", "curriculum 13", 0.656,
              lambda: float(1 - mixed((np.random.default_rng(0).random((20_000, 4)) < 0.9).astype(float)).mean())),
    ),
    exercises=(
        lab.AskNumber("Four siblings, each right with probability 0.5: which share of groups is silent?", 0.125,
                      why="2 * 0.5^4."),
        lab.AskKnobs("Make it worse: let at most 60 % of the groups be useful (not silent).", "useful share", None,
                     0.6, {"dynamic": False}),
        lab.AskChoice("Which change costs more sampling?", ("Clip higher", "Dynamic sampling", "Token mean"), 1,
                      why="Silent groups are sampled and thrown away."),
    ),
    code=("posttrain.algorithm.loss.push_factor.push", "posttrain.algorithm.loss.token_weights.weigh",
          "posttrain.ladder.pieces.shape.Overlong"),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=dapo", grid=("dynamic", "right"),
)  # fmt: skip
