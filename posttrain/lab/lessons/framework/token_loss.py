"""Page 05: the terms of the loss, token by token, and the gradient that they make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.config.run import Reinforce
from posttrain.core.exchange.scores import TokenScores
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import Answers, batch_of_answers
from posttrain.web.picture import Bars, TextTile, Tiles

ANSWERS = (("3+4=7", "7+5=12", "#"), ("3+4=8", "8+5=13", "#"))
CREDIT = np.array([0.7071, -0.7071])
"""GRPO's credit of rewards 1 and 0: .5 / std .7071, and its negative."""


def drawn(seed: int, far: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs at sampling, those of now, those of the reference), each [2, 3]: made up, as after some updates that
    moved the policy by about `far` nats a token. The reference lies .4 nats away. All are below 0."""
    rng = np.random.default_rng(seed)
    old = -rng.gamma(1.2, 0.5, (2, 3)) - 0.02
    now = np.minimum(old + far * rng.standard_normal((2, 3)), -0.001)
    reference = np.minimum(old + 0.4 * rng.standard_normal((2, 3)), -0.001)
    return torch.tensor(old), torch.tensor(now), torch.tensor(reference)


def algorithm(k: lab.Values) -> Algorithm:
    """GRPO with the terms that are switched on."""
    pull = KL(coef=float(k["beta"]), estimator="k3", placement="loss") if k["reference"] and k["beta"] else None
    clip = Clip(low=float(k["eps"]), high=float(k["eps"]))
    return replace(GRPO, clip=clip, pull=pull) if k["old"] else replace(GRPO, ratio="one", clip=None, pull=pull)


def token_gradients(k: lab.Values) -> tuple[np.ndarray, float, float, np.ndarray]:
    """(push on each log-prob [2, 3]: minus the gradient of the loss, share of tokens whose gradient is 0, KL between
    the policy that sampled and the one of now in nats a token, ratio of each token [2, 3])."""
    a = algorithm(k)
    old, now, reference = drawn(int(k["seed"]), float(k["far"]))
    # The loss reads log-probs alone: prompts and tokens stay 0.
    answers = Answers(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), old)
    credit = CREDIT if k["advantage"] else np.ones(2)
    # Two answers of 3 tokens, both to prompt 0. GRPO's mean over each answer does not read the limit, here 8.
    batch = batch_of_answers(answers, credit, weigh(a.aggregate, [3, 3], [0, 0], 8), old, reference)
    logp = now.reshape(-1).clone().requires_grad_()
    terms = objective(a, streams(batch, dtype=torch.float64), TokenScores(logp, None, None))
    (grad,) = torch.autograd.grad(terms.loss, logp)
    return (
        -grad.reshape(2, 3).numpy(),
        float((grad == 0).double().mean()),
        terms.gauges["policy/kl_start"].mean,
        ((now - old).exp().numpy()),
    )


def compute(k: lab.Values) -> lab.Readout:
    push, silent, moved, ratio = token_gradients(k)
    largest = float(np.abs(push).max()) or 1.0  # 1: no token is pushed, and nothing is divided by 0
    rows = {
        f"{'right' if i == 0 else 'wrong'} answer, A = {CREDIT[i] if k['advantage'] else 1:+.2f}": [
            TextTile(words, "plain" if x else "mute", float(x), float(x / largest), f"ratio {r:.2f}")
            for words, x, r in zip(ANSWERS[i], push[i], ratio[i], strict=True)
        ]
        for i in (0, 1)
    }
    names = [f"{a}{t + 1}" for a in ("right ", "wrong ") for t in range(3)]
    moved_by_step = [token_gradients({**k, "seed": s})[2] for s in range(6)]  # six draws stand for six steps of a run
    stage = Reinforce(name="rl", algorithm=GRPO)
    return lab.Readout(
        pictures=(
            Tiles("Push on each token's log-prob (minus the gradient)", rows, {"plain": "pushed", "mute": "silent"}),
            Bars("Ratio now / then of each token", names, {"ratio": ratio.ravel().tolist()}, low=0,
                 marks={"1 + eps": 1 + float(k["eps"]), "1 - eps": 1 - float(k["eps"])} if k["old"] else None),
        ),
        sentence=f"**{silent:.0%}** of the tokens have no gradient. The policy has moved **{moved:.3f}** nats a token "
        "from the one that sampled.",
        values={"silent": silent, "moved": moved, "largest push": float(np.abs(push).max())},
        says=lab.by_rules(lab.recorded({"policy/kl_start": moved_by_step}), stage, "policy_runs_away"),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="05", name="loss", title="The loss, token by token", part="the framework", force="estimator", minutes=7,
    question="Which term of the loss pushes which token, and what happens if one is left out?",
    idea="""
        The loss is a weighted sum over tokens. Credit says which way the whole answer goes. The ratio compares the
        policy of now with the one that sampled; the clip silences a token that has gone far enough. The KL term pulls
        each token towards the reference, whatever was paid.

        The trainer is the only place with a backward pass. It takes any loss as a function, and it limits the size of
        the whole gradient. A batch may be computed in parts: each token has its weight before that, so the sum is the
        same.
    """,
    formula="""loss = sum_t w_t ( -sg[push_t] A log pi_t + beta ( ref/pi - 1 - log ref/pi ) )
w_t weight of a token, A credit, push_t the clipped ratio, sg: no gradient flows through it""",
    knobs=(
        lab.Toggle("old", "compare with the policy that sampled (ratio and clip)", True),
        lab.Toggle("reference", "pull towards the reference (KL)", True),
        lab.Toggle("advantage", "credit of the answer", True),
        lab.Slider("eps", "eps of the clip", 0.2, 0.05, 0.5, 0.05),
        lab.Slider("beta", "beta of the KL", 0.05, 0, 1, 0.05),
        lab.Slider("far", "how far the policy has moved", 0.15, 0, 2, 0.05),
        lab.Slider("seed", "new log-probs", 0, 0, 20),
    ),
    compute=compute,
    breaks=(
        lab.Break({"old": False, "far": 2.0}, "Without ratio and clip credit pushes every token as on the first "
                  "update, however far the policy has gone.", "policy_runs_away"),
    ),
    claims=(
        lab.Claim("k3 of a log-ratio of 0.1", "Schulman 2020", 0.0048, lambda: float(np.expm1(-0.1) + 0.1),
                  within=0.01),
    ),
    exercises=(
        lab.AskKnobs("Silence more than half of the tokens with the clip alone.", "silent", 0.5, None,
                     {"reference": False, "eps": 0.05, "far": 2.0}),
        lab.AskNumber("w = 1/6, A = 0.6, ratio 1: what is the push on a token?", 0.1, why="1/6 * 0.6 * 1."),
        lab.AskChoice("Credit is 0 for all. What still moves the policy?", ("The clip", "The KL term", "Nothing"), 1,
                      why="A pull lives where A = 0 too."),
    ),
    code=("posttrain.algorithm.loss.policy_loss.objective", "posttrain.role.trainer.Trainer"),
    docs="reference/algorithms.md", command="posttrain run arithmetic algorithm=grpo pull.coef=0.05 clip.low=0.2",
    grid=("eps", "far"),
)  # fmt: skip
