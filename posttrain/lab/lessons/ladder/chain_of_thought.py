"""Page L4: a sum of many numbers, answered at once or step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from posttrain.lab import lesson as lab
from posttrain.system.terminal_output import tell
from posttrain.toy.answers import said_logp
from posttrain.toy.chains import Chain
from posttrain.web.picture import Bars, Curve, TextTile, Tiles

MODES = ("direct", "step by step")
STEPS, CHUNKS = 2400, 12
RECORDED = {
    "direct": {2: 0.0, 3: 0.0, 4: 0.247, 5: 0.097, 6: 0.143},
    "step by step": {2: 0.0, 3: 0.282, 4: 0.96, 5: 0.853, 6: 0.47},
}
"""Held-out accuracy by depth, of seed 0 and width 96: `python -m posttrain.lab.lessons.ladder.chain_of_thought`."""


def train(depth: int, mode: str, seed: int, width: int) -> Iterator[tuple[float, float]]:
    """(share of the training that is done, held-out accuracy) before a small network is trained to imitate right
    answers, and after each of `CHUNKS` parts of its training."""
    chain = Chain(depth, step_by_step=mode == MODES[1], seed=seed)
    policy = chain.policy(width)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    yield 0.0, chain.accuracy(policy)
    for chunk in range(CHUNKS):
        for _ in range(STEPS // CHUNKS):
            answers = chain.batch(128, generator)
            loss = -said_logp(policy, answers)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield (chunk + 1) / CHUNKS, chain.accuracy(policy)


def compute(k: lab.Values) -> Iterator[lab.Readout]:
    depth, mode = int(k["depth"]), str(k["mode"])
    chain = Chain(depth, step_by_step=mode == MODES[1], seed=int(k["seed"]))
    depths = sorted(RECORDED[mode])
    steps_done, accuracy = list[float](), list[float]()
    for share, held_out in train(depth, mode, int(k["seed"]), int(k["width"])):
        steps_done.append(share * STEPS)
        accuracy.append(held_out)
        prompt, answer = chain.written(0)
        yield lab.Readout(
            pictures=(
                Tiles(
                    "A problem, and what the model has to say",
                    {"reads": [TextTile(x, "mute") for x in prompt], "says": [TextTile(x, "good") for x in answer]},
                    {"mute": "given", "good": "learned"},
                ),
                Curve("Held-out accuracy of this training", steps_done, {"accuracy": accuracy}, low=0, high=1),
                Curve(
                    "Recorded: accuracy by depth, seed 0 and width 96",
                    depths,
                    {m: [RECORDED[m][d] for d in depths] for m in MODES},
                    x_label="numbers to add",
                    low=0,
                    high=1,
                    at=depth,
                ),
                Bars(
                    "This training, beside the record",
                    ("now", "recorded"),
                    {"accuracy": [held_out, RECORDED[mode].get(depth, 0.0)]},
                    low=0,
                    high=1,
                ),
            ),
            sentence=f"**{mode}**, {depth} numbers: **{held_out:.0%}** of the unseen problems are right after "
            f"**{share * STEPS:.0f}** steps.",
            values={"accuracy": held_out},
            progress=share,
        )


LESSON = lab.Lesson(
    number="L4", name="thought", title="Chain of thought: one step at a time", part="the ladder", force="signal",
    minutes=7,
    question="Why does a model that says its steps solve what it cannot answer at once?",
    idea="""
        A small network adds numbers modulo 7. Answered at once, it must carry the whole sum through one pass. Step by
        step it says each partial sum, and reads it again: each token is then one small addition. With few numbers there
        are few different problems, and it learns them by heart; with many it has to learn to add.

        In the ladder this is the stage between SFT and preferences: the model is shown answers with their steps. Later,
        RL pays the final number alone, and keeps the steps because they help.
    """,
    formula="direct: 3+1+4= -> 1          step by step: 3+1+4= -> 3 4 1",
    knobs=(
        lab.Slider("depth", "numbers to add", 4, 2, 6),
        lab.Options("mode", "the model answers", MODES[1], MODES),
        lab.Slider("width", "width of the network", 96, 16, 128, 16),
        lab.Slider("seed", "seed", 0, 0, 5),
    ),
    compute=compute, pace="train",
    breaks=(lab.Break({"mode": "direct", "depth": 6}, "Six numbers at once: on unseen problems it is about as good as "
                      "a guess, one in seven.", None),),
    claims=(
        lab.Claim("Illustrative: direct at depth 6", "curriculum L4", 0.15, lambda: RECORDED["direct"][6], within=0.35,
              why="It depends on the network and on its training; the order of the two curves is what holds."),
        lab.Claim("Illustrative: step by step at depth 6", "curriculum L4", 0.9, lambda: RECORDED["step by step"][6],
              within=0.1, why="This network is small and is trained for seconds: later steps are learned less well."),
    ),
    exercises=(
        lab.AskNumber("3 + 1 + 4 modulo 7?", 1, why="8 - 7."),
        lab.AskKnobs("Train a setting that solves less than half.", "accuracy", None, 0.5,
                     {"mode": "direct", "depth": 6}),
        lab.AskChoice("Step by step: what does a token after the first need?",
                      ("The whole sum anew", "One addition", "The last number alone"), 1,
                      why="It is the sum of what was said last and the next number."),
    ),
    code=("posttrain.algorithm.loss.policy_loss.supervised", "posttrain.toy.chains.Chain"),
    docs="start/recipes.md", command="posttrain run ladder", grid=("depth", "mode"),
)  # fmt: skip


def measure() -> None:
    """Print the record anew."""
    torch.set_num_threads(1)
    for mode in MODES:
        tell(f"{mode} { {d: round([a for _, a in train(d, mode, 0, 96)][-1], 3) for d in range(2, 7)} }")


if __name__ == "__main__":
    measure()
