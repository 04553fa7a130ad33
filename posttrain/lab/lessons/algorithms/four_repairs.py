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
    """By step: mean reward and share of mixed groups of all that were asked; share of silent groups of those that are
    learned from (1 where there are none); prompts asked, over eight; entropy of the policy in nats."""
    a: Algorithm = replace(PLAIN, clip=DAPO.clip) if k["higher"] else PLAIN
    policy, rng = world(float(k["right"])), torch.Generator().manual_seed(seed)
    trainer = ToyTrainer(a, policy, torch.optim.SGD(policy.parameters(), lr=float(k["eta"])), G, seed,
                         minibatches=2, epochs=2)  # fmt: skip
    by_step: dict[str, list[float]] = {"reward": [], "silent": [], "asked": [], "entropy": [], "mixed": []}
    for _ in range(STEPS):
        prompts = torch.randint(2 * PROMPTS, (PROMPTS * (MOST_ASKED if k["dynamic"] else 1),), generator=rng)
        answers = ask(policy, siblings(prompts, G), rng)
        rewards = (answers.tokens_ET[:, 0] == 0).double().numpy().reshape(-1, G)
        keep = np.flatnonzero(mixed(rewards))[:PROMPTS] if k["dynamic"] else np.arange(PROMPTS)
        # Prompts are asked in order until eight groups are mixed. Where fewer are, all were asked.
        asked = len(rewards) if len(keep) < PROMPTS else int(keep[-1]) + 1
        kept_answers = torch.as_tensor((keep[:, None] * G + np.arange(G)).ravel(), dtype=torch.int64)
        by_step["reward"].append(float(rewards[:asked].mean()))
        by_step["mixed"].append(float(mixed(rewards[:asked]).mean()))
        by_step["silent"].append(float(1 - mixed(rewards[keep]).mean()) if len(keep) else 1.0)
        by_step["asked"].append(asked / PROMPTS)
        one_each = ask(policy, torch.arange(2 * PROMPTS), rng)
        by_step["entropy"].append(float(said_logp(policy, one_each)[1].detach().mean()))
        if len(keep) >= 2:  # one group at least for each of two minibatches
            trainer.step(answers.subset(kept_answers), credit_by_pattern(a, rewards[keep]).ravel())
    return by_step


def penalty(length: int, overlong: bool) -> float:
    """Returns the amount that an answer of this length is paid on top of its reward, where 100 tokens are allowed."""
    group = scored_group("a", [PlainEpisode(0.0, [[length]], np.full(length, -1.0))])
    episodes = [s.episode for s in group.episodes]
    shape = (Overlong(cache=0.2),) if overlong else ()
    return float(shaped(shape, np.zeros(1), episodes, 100)[0][0])


def compute(k: lab.Values) -> lab.Readout:
    by_step = train(k, int(k["seed"]))
    steps = list(range(1, STEPS + 1))
    # The answers of 10 and 100 tokens have one prompt. Times their 110 tokens a mean over all gives each token 1.
    rule = DAPO.aggregate if k["token"] else GRPO.aggregate
    weights = weigh(rule, (10, 100), (0, 0), 100)
    lengths = list(range(60, 101, 5))
    gauges = {"rollout/reward": by_step["reward"], "rollout/solved": by_step["reward"],
              "credit/silent": by_step["silent"], "rollout/mixed": by_step["mixed"],
              "rollout/truncated": [0.0] * STEPS}  # fmt: skip
    spoken_rules = lab.by_rules(lab.recorded(gauges), Reinforce(name="rl", algorithm=PLAIN), "too_easy")
    useful, empty_steps = float(np.mean([1 - s for s in by_step["silent"]])), sum(s == 1 for s in by_step["silent"])
    return lab.Readout(
        pictures=(
            Curve("Reward and entropy", steps,
                  {"reward": by_step["reward"], "entropy, nats": by_step["entropy"]}, low=0),
            Curve("Silent share of the groups, and prompts asked (1 is 8 a step)", steps,
                  {"silent share": by_step["silent"], "prompts asked, in eights": by_step["asked"]}, low=0),
            Bars("Weight of a token, in answers of 10 and 100 tokens", ("10 tokens", "100 tokens"),
                 {rule: [float(w) * 110 for w in weights]}, low=0),
            Curve("Added to the reward, by length (100 allowed)", lengths,
                  {"overlong": [penalty(n, bool(k["overlong"])) for n in lengths]}, x_label="tokens", low=-1, high=0.1),
        ),
        sentence=f"Reward **{np.mean(by_step['reward'][:5]):.2f}** to **{np.mean(by_step['reward'][-5:]):.2f}** in "
        f"{STEPS} steps. On average **{useful:.0%}** of a step's groups were useful (not silent; 0 if it had none). It "
        f"asked **{np.mean(by_step['asked']):.1f}** times 8 prompts a step."
        + (f" In {empty_steps} of the steps all groups were silent (silent share 1)." if empty_steps else ""),
        values={"reward at the end": float(np.mean(by_step["reward"][-5:])), "useful share": useful,
                "entropy": by_step["entropy"][-1]},
        says=spoken_rules,
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
                  "Nearly every group is all right: without dynamic sampling it learns from few.", "too_easy"),
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
