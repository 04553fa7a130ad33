"""Page 25: what shared beginnings, a head in tiles and one reading of a shared prompt save."""

from __future__ import annotations

from posttrain.lab import lesson as lab
from posttrain.plan import activations
from posttrain.plan.lengths import Lengths
from posttrain.plan.models import shape_by_name
from posttrain.plan.work import Work
from posttrain.web.picture import Bars, Curve

MODELS = ("SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B", "gemma-2-9b")
COUNTS = [1, 2, 4, 8, 16, 32, 64]
PASS = 16384
GPU = {"model": "Llama-3.1-8B", "where": "GPU", "siblings": 64, "prompt": 1000, "answer": 1000}


def work(k: lab.Values, **other: int) -> Work:
    """A step of one prompt; `model.share_prefixes` is on."""
    at = {**k, **other}
    # One token more: the learner computes all of an answer but its last token, so G positions are G + 1 tokens.
    return Work(
        shape=shape_by_name(at["model"]),
        lengths=Lengths(prompt=int(at["prompt"]), mean=int(at["answer"]) + 1, most=int(at["answer"]) + 1),
        prompts=1, siblings=int(at["siblings"]), micro_tokens=PASS, width=2, accelerator=at["where"] == "GPU",
    )  # fmt: skip


def saving(prompt: int, answer: int, siblings: int) -> float:
    """The curriculum's K / (1 + K G / P): K P, the positions of all prompts without sharing, over P + K G, all
    positions with it. Below 1 where answers are long."""
    shared = work({"model": MODELS[0], "where": "GPU", "prompt": prompt, "answer": answer, "siblings": siblings})
    return siblings * prompt / shared.group_tokens


def whole(w: Work) -> float:
    """Bytes of all scores of a pass of 16,384 tokens, in float32."""
    return 4.0 * PASS * w.shape.vocabulary


def compute(k: lab.Values) -> lab.Readout:
    now = work(k)
    prompt, answer, siblings = (int(k[n]) for n in ("prompt", "answer", "siblings"))
    fewer = siblings * (prompt + answer) / now.group_tokens
    reads_once, reads_each = prompt + siblings * answer / 2, siblings * (prompt + answer / 2)  # half is said so far
    # A tile has at most as many rows as tokens are learned from: here those of the most siblings, 64.
    tile = activations.tile(work(k, siblings=64))
    return lab.Readout(
        pictures=(
            Curve("How many times fewer positions the learner computes", COUNTS,
                  {"whole sequences": [n * (prompt + answer) / work(k, siblings=n).group_tokens for n in COUNTS],
                   "prompts alone": [saving(prompt, answer, n) for n in COUNTS]},
                  x_label="siblings", low=0, log=True, at=float(siblings)),
            Bars("Scores of a pass of 16,384 tokens, GB", ["all at once", "in tiles"],
                 {"GB": [whole(now) / 1e9, tile / 1e9]}, low=0),
            Bars("Cached tokens that a decoding step reads, thousands", ["each sibling its prompt", "the prompt once"],
                 {"tokens": [reads_each / 1e3, reads_once / 1e3]}, low=0),
        ),
        sentence=f"With shared beginnings the learner computes **{fewer:.2f}** times fewer positions. A head in "
        f"tiles needs **{tile / 1e9:.2g} GB** instead of **{whole(now) / 1e9:.3g} GB** for the scores. Decoding "
        "attention that reads the prompt once for all siblings reads "
        f"**{reads_each / reads_once:.2f}** times fewer tokens.",
        values={"fewer positions": fewer, "K / (1 + K G / P)": saving(prompt, answer, siblings),
                "scores, GB": whole(now) / 1e9, "tiles, GB": tile / 1e9, "fewer reads": reads_each / reads_once},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="25", name="kernels", title="Kernels: what each one saves", part="the engineer", force="cost", minutes=6,
    question="Which special code is worth its trouble in RL, and when does it save nothing?",
    idea="""
        RL has a shape of its own: many answers to one prompt. Three pieces of code use it.

        *Shared beginnings*: the learner computes a prompt once for all its siblings. With K siblings, prompts of P and
        answers of G tokens, K (P + G) positions become P + K G - so of long prompts much is saved, of long answers
        nothing.

        *A head in tiles*: the log-prob of a token needs its own score and the sum over the vocabulary, never all scores
        of all tokens. Tiles of them are made, used and thrown away, and made again in the backward pass.

        *One reading of a shared prompt*: while siblings are decoded, the cache of their prompt can be read once for all
        of them. The engine here shares its memory, and reads it for each; so this picture is what such code would save.
    """,
    formula="saving of prompts = K / (1 + K G / P)        scores: tokens x V        tiles: rows x ids",
    knobs=(
        lab.Options("model", "model", "Qwen2.5-7B", MODELS),
        lab.Options("where", "computed on", "GPU", ("GPU", "CPU")),
        lab.Slider("siblings", "K: siblings", 16, 1, 64, log=True),
        lab.Slider("prompt", "P: tokens of a prompt", 1000, 16, 16384, log=True),
        lab.Slider("answer", "G: tokens of an answer", 100, 16, 16384, log=True),
    ),
    compute=compute,
    breaks=(
        lab.Break({"prompt": 100, "answer": 8000}, "Short prompts and long answers: sharing saves next to nothing.",
                  None, "long answers"),
        lab.Break({"siblings": 1}, "One answer a prompt: nothing is shared.", None, "no siblings"),
    ),
    claims=(
        lab.Claim("K = 16, G / P = .1", "curriculum 25", 6.15, lambda: saving(1000, 100, 16)),
        lab.Claim("K = 64, G / P = .1", "curriculum 25", 8.65, lambda: saving(1000, 100, 64)),
        lab.Claim("head in blocks of 4k of 128k ids: times fewer scores at once", "curriculum 25", 32, lambda: 128 / 4),
        lab.Claim("the tiles here, on a GPU, of 16,384 tokens and 128,256 ids: times fewer bytes", "curriculum 25",
                  32, lambda: whole(work(GPU)) / activations.tile(work(GPU)),
                  why="tiles here are 8,192 tokens by at most 16,384 ids in float32, two of them, and a block of the "
                  "weight in float32: fewer, larger products."),
    ),
    exercises=(
        lab.AskNumber("K = 8, P = 800, G = 100. How many positions does the learner compute with shared beginnings?",
                      1600, why="800 for the prompt and 8 times 100."),
        lab.AskKnobs("Compute at least 10 times fewer positions in whole sequences.", "fewer positions", 10, None,
                     {"siblings": 64, "prompt": 4000, "answer": 100}),
        lab.AskChoice("Why are the tiles made a second time in the backward pass?",
                      ("Keeping them would take the memory that tiles save", "They have changed",
                      "They are more exact"), 0, why="All scores of a pass are what does not fit."),
    ),
    code=("posttrain.engine.head.tiled_head.TiledHead", "posttrain.plan.activations.tile"),
    docs="guides/planning.md", command="posttrain run arithmetic model.share_prefixes=false",
    grid=("siblings", "answer"),
)  # fmt: skip
