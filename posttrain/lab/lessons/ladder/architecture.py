"""Page L1: the shapes of a small transformer, its parameters, and what a token costs."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from posttrain.config.run import Model
from posttrain.engine.model.tiny_models import characters, config
from posttrain.lab import lesson as lab
from posttrain.web.picture import Bars, Matrix

LETTERS = "0123456789+=()#<>abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?-*/%'"
PARTS: tuple[str, ...] = ("embeddings", "attention", "feed-forward", "norms")


def model(k: lab.Values) -> Model:
    hidden, heads = int(k["hidden"]), int(k["heads"])
    return Model(hidden=hidden, heads=heads, kv_heads=heads, layers=int(k["layers"]), ffn=3 * hidden)


@cache
def parameters(m: Model, vocabulary: int) -> dict[str, int]:
    """Parameters by part, counted on the library's own model, which is built without memory for its weights."""
    settings = config(m, characters(LETTERS[:vocabulary]))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, weight in module.named_parameters():
        part = (
            "embeddings"
            if "embed" in name or "lm_head" in name
            else "norms"
            if "norm" in name
            else ("attention" if "attn" in name else "feed-forward")
        )
        counts[part] += weight.numel()
    return counts


def flops(counts: dict[str, int], k: lab.Values) -> dict[str, float]:
    """Floating point operations of a forward pass for each token: two for each weight it meets (norms left out), and
    those of attention over the tokens before it (half of the length on average)."""
    weights = 2.0 * (counts["attention"] + counts["feed-forward"])
    head = 2.0 * counts["embeddings"]
    scores = 2.0 * 2.0 * int(k["layers"]) * int(k["hidden"]) * int(k["length"]) / 2  # products with keys and values
    return {"layers' weights": weights, "head": head, "attention scores": scores}


def compute(k: lab.Values) -> lab.Readout:
    refused = lab.refusal(lambda: model(k))
    if refused:
        k = {**k, "heads": 1}  # one head fits every width, so that the page shows a model beside the refusal
    counts = parameters(model(k), int(k["vocabulary"]))
    total, cost = sum(counts.values()), flops(counts, k)
    b, t, d, h, v = int(k["batch"]), int(k["length"]), int(k["hidden"]), int(k["heads"]), int(k["vocabulary"])
    shapes = (
        ("token ids", f"[{b}, {t}]", float(b * t)),
        ("hidden states", f"[{b}, {t}, {d}]", float(b * t * d)),
        ("queries, keys, values", f"3 x [{b}, {h}, {t}, {d // h}]", float(3 * b * t * d)),
        ("attention scores", f"[{b}, {h}, {t}, {t}]", float(b * h * t * t)),
        ("logits", f"[{b}, {t}, {v}]", float(b * t * v)),
    )
    side = min(t, 8)  # tokens of the mask that are drawn
    mask = np.tril(np.ones((side, side)))
    return lab.Readout(
        pictures=(
            Bars("Parameters by part", PARTS, {"parameters": [float(counts[p]) for p in PARTS]}),
            Bars("Operations of a token, forward", tuple(cost), {"operations": list(cost.values())}),
            Matrix("Shapes on the way", ("shape", "numbers"), [s[0] for s in shapes], [[0.0, s[2]] for s in shapes],
                   [[s[1], f"{s[2]:,.0f}"] for s in shapes]),
            Matrix("Causal mask: which token (row) reads which (column)", [str(i) for i in range(side)],
                   [str(i) for i in range(side)], mask.tolist(), [["x" if x else "" for x in row] for row in mask],
                   low=0, high=1),
        ),
        sentence=f"**{total:,}** parameters. A token costs **{sum(cost.values()):,.0f}** operations forward, and about "
        f"three times that where it is trained.",
        values={
            "parameters": float(total),
            "operations a token": sum(cost.values()),
            "share of the scores": cost["attention scores"] / sum(cost.values()),
        },
        says=refused,
    )  # fmt: skip


def layer_weights(hidden: int, layers: int) -> float:
    """Weights of attention and feed-forward networks of a model with four heads."""
    counts = parameters(model({"hidden": hidden, "heads": 4, "layers": layers}), 30)
    return float(counts["attention"] + counts["feed-forward"])


LESSON = lab.Lesson(
    number="L1", name="architecture", title="The model: shapes and sizes", part="the ladder", force="cost", minutes=6,
    question="What is inside a language model, and what does one more token cost?",
    idea="""
        Token ids become vectors of width d. Each layer mixes them in two ways: attention, where a token reads those
        before it (the causal mask hides what comes later), and a feed-forward network, where it is worked on alone. The
        last vectors are compared with every token of the vocabulary: the logits.

        Each weight that a token meets costs two operations. Attention also grows with the length of the sequence.
        Training costs three times a forward pass.
    """,
    formula="operations a token = 2 * weights + 2 * layers * d * length          training = 3 * forward",
    knobs=(
        lab.Slider("hidden", "d, width", 128, 32, 512, 32),
        lab.Slider("layers", "layers", 4, 1, 12),
        lab.Slider("heads", "attention heads", 4, 1, 8),
        lab.Slider("length", "T, tokens of a sequence", 64, 8, 4096, log=True),
        lab.Slider("batch", "B, sequences", 8, 1, 64),
        lab.Slider("vocabulary", "V, vocabulary", 30, 16, 80),
    ),
    compute=compute, pace="release",
    breaks=(lab.Break({"heads": 5}, "The width cannot be shared equally by five heads.", "ConfigError"),),
    claims=(
        lab.Claim("Weights of the default model's layers, 13 d^2 L",
                  "4 d^2 of attention, 9 d^2 of a gated network of 3 d", 13 * 128**2 * 4,
                  lambda: layer_weights(128, 4), within=0.01),
    ),
    exercises=(
        lab.AskNumber("A model meets 1,000 weights a token. How many operations is that forward?", 2000,
                      why="Two each."),
        lab.AskKnobs("Make attention scores the larger half of the cost.", "share of the scores", 0.5, None,
                     {"length": 4096, "hidden": 64}),
        lab.AskChoice("What does the causal mask hide?", ("Rare tokens", "Later tokens", "The prompt"), 1,
                      why="A token may not read what it has to predict."),
    ),
    code=("posttrain.engine.model.tiny_models.config", "posttrain.config.run.Model"),
    docs="reference/models.md", command="posttrain run ladder model.hidden=128 model.layers=4",
    grid=("hidden", "length"),
)  # fmt: skip
