"""Page L2: the distribution of the next character, and what sampling does to it."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.config.run import Reinforce
from posttrain.core.sampling import Sampling
from posttrain.engine.embedded.token_sampler import Contracts, DrawDistributions
from posttrain.lab import lesson as lab
from posttrain.toy.letters import LETTERS, taught
from posttrain.web.picture import Bars, TextTile, Tiles

SAID = 48  # characters that are sampled


def contract(k: lab.Values) -> Sampling:
    if k["greedy"]:
        return Sampling(greedy=True, stop_ids=())
    return Sampling(temperature=float(k["temperature"]), top_p=float(k["top_p"]), stop_ids=())


def spread(after: int, sampling: Sampling) -> DrawDistributions:
    """The sampler's distribution after a character: the engine's own code on the logits of the table."""
    return DrawDistributions.of(taught()[after : after + 1].float().clone(), Contracts.of([sampling]))


def sentence_of(k: lab.Values) -> tuple[str, list[float]]:
    """(48 characters that the sampler says, the probability of each)."""
    rng, sampling = np.random.default_rng(int(k["seed"])), contract(k)
    letter, text, chances = LETTERS.index(str(k["after"])), "", list[float]()
    for _ in range(SAID):
        distribution = spread(letter, sampling)
        letter = int(distribution.pick(rng.random(1))[0])
        chances.append(float(distribution.probabilities()[0, letter]))
        text += LETTERS[letter]
    return text, chances


def compute(k: lab.Values) -> lab.Readout:
    sampling, after = contract(k), LETTERS.index(str(k["after"]))
    model = taught()[after].exp().tolist()
    drawn = spread(after, sampling).probabilities()[0].double()
    drawn = (drawn / drawn.sum()).tolist()  # the engine's float32 adds up to 1 only about
    entropy = float(sum(p * -np.log(p) for p in drawn if 0 < p < 1))  # p log p is 0 at 0 and 1
    text, chances = sentence_of(k)
    tiles = [
        TextTile("_" if c == " " else c, "plain", None, float(p), f"probability {p:.2f}")
        for c, p in zip(text, chances, strict=True)
    ]
    shown = [i for i in range(len(LETTERS)) if model[i] > 0.01 or drawn[i] > 0.01]
    return lab.Readout(
        pictures=(
            Bars(f"What may follow '{k['after']}'", ["_" if LETTERS[i] == " " else LETTERS[i] for i in shown],
                 {"the model's": [model[i] for i in shown], "sampled from": [drawn[i] for i in shown]}, low=0, high=1),
            Tiles("What the sampler says, one character after the other", {"": tiles},
                  {"plain": "darker: more probable; _ is a space"}),
        ),
        sentence=f"After **{k['after']}** the sampler has **{entropy:.2f}** nats of choice. It wrote {len(set(text))} "
        "different characters.",
        values={"entropy": entropy, "largest": max(drawn), "different characters": float(len(set(text)))},
        says=lab.refusal(lambda: Reinforce(name="rl", sampling=sampling)),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="L2", name="sampling", title="The next token, and temperature", part="the ladder", force="cost", minutes=5,
    question="The model gives every token a probability: how is one of them chosen?",
    idea="""
        A language model is a distribution over the next token. Sampling draws from it. Temperature divides the logits
        first: below 1 the probable becomes more probable, above 1 all become more alike. Top-p keeps the most probable
        tokens until their sum reaches p, and drops the rest.

        For training, the log-prob must be that of the distribution that was really drawn from, so these settings are
        kept with each answer. Always taking the most probable token explores nothing: it is refused.
    """,
    formula="p = softmax(logits / temperature), then only the smallest set with sum >= top_p",
    knobs=(
        lab.Options("after", "after the character", "t", tuple(c for c in "taeishpo")),
        lab.Slider("temperature", "temperature", 1.0, 0.1, 3.0, 0.1),
        lab.Slider("top_p", "top-p", 1.0, 0.1, 1.0, 0.05),
        lab.Toggle("greedy", "always the most probable", False),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(lab.Break({"greedy": True}, "The same few characters again and again: nothing is tried.", "ConfigError"),),
    claims=(
        lab.Claim("Largest entropy of 27 characters, nats", "log 27", float(np.log(27)),
                  lambda: float(-(torch.full((27,), 1 / 27, dtype=torch.float64) * np.log(1 / 27)).sum())),
    ),
    exercises=(
        lab.AskNumber("Two tokens with logits 1 and 0 at temperature 1: probability of the first?", 0.731,
                      why="1 / (1 + e^-1)."),
        lab.AskKnobs("Bring the entropy after 't' below 0.6 nats without the greedy toggle.", "entropy", None, 0.6,
                     {"temperature": 0.1}),
        lab.AskChoice("Temperature goes to 0. What becomes of sampling?",
                      ("It becomes uniform", "It takes the most probable", "Nothing changes"), 1,
                      why="Differences of logits grow without bound."),
    ),
    code=("posttrain.engine.embedded.token_sampler.DrawDistributions", "posttrain.core.sampling.Sampling"),
    docs="guides/sampling.md", command="posttrain run arithmetic rl.sampling.temperature=0.7 rl.sampling.top_p=0.9",
    grid=("temperature", "after"),
)  # fmt: skip
