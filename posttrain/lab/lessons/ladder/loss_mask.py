"""Page L3: which tokens a demonstration teaches. A small policy learns to reverse words, with and without the mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.checks.data_checks import same_question
from posttrain.core.batch import Batch
from posttrain.core.conversation import LearnedConversation
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.types import Message, Segment, Task
from posttrain.faults.planting import planted
from posttrain.lab import lesson as lab
from posttrain.role.learning import demonstrations
from posttrain.system.errors import DataError
from posttrain.toy.readers import PositionReader
from posttrain.web.picture import Curve, TextTile, Tiles

LETTERS = "abcdefgh<>#"
LONG, HELD, STEPS, EVERY = 4, 64, 100, 5  # letters of a word, held-out words, training steps, steps to a measurement


def ids(text: str) -> np.ndarray:
    return np.array([LETTERS.index(c) for c in text], np.int32)


def text(shown: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in shown.tolist())


class LetterTexts:
    """Writes a prompt and a completion as the ids of their letters."""

    def pair(
        self, prompt: str | Sequence[Message], completion: str, task: str = "", tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        return ids(str(prompt)), self.completion_ids(completion)

    def conversation(
        self, c: LearnedConversation, task: str = "", tools: Sequence[Mapping[str, Any]] = (), arguments: bool = True
    ) -> Sequence[tuple[np.ndarray, np.ndarray]]:
        raise DataError("a word and its reversal is no conversation of several turns")

    def completion_ids(self, text: str, *, chat: bool = False, task: str = "", behind: Any = ()) -> np.ndarray:
        return ids(f"{text}#")


def demonstrated(shown: tuple[str, ...], masked: bool) -> list[Segment]:
    """<word> and its reversal for each word, by the function that every supervised stage uses. To have the prompts
    learned too, the fault `prompt_imitated` is planted in it."""
    with planted(None if masked else "prompt_imitated"):
        return [demonstrations.demonstration(LetterTexts(), Task(w, w), f"<{w}>", w[::-1], 64) for w in shown]


@cache
def words(seed: int, count: int) -> tuple[str, ...]:
    """Different words. A letter often has its usual follower, as in a language; followers are the same at all seeds."""
    rng, follower = np.random.default_rng(seed), np.random.default_rng(3).permutation(8)  # 8 letters, without < > #
    found_words = dict[str, None]()
    while len(found_words) < count:
        word = [int(rng.integers(8))]
        for _ in range(LONG - 1):
            word.append(int(follower[word[-1]]) if rng.random() < 0.4 else int(rng.integers(8)))
        found_words["".join(LETTERS[i] for i in word)] = None
    return tuple(found_words)


def batch_of(seed: int, count: int, masked: bool) -> Batch:
    return demonstrations.imitated(demonstrated(words(seed, count), masked))


@cache
def learn(masked: bool, count: int, width: int, seed: int) -> tuple[list[float], float]:
    """(share of unseen words that are reversed, by measurement; mean log-prob of their prompts' letters at the end)."""
    batch = batch_of(seed, count, masked)
    seen = torch.from_numpy(batch.ids_N.reshape(count, -1).astype(np.int64))
    source, target = torch.from_numpy(batch.source_M), torch.from_numpy(batch.target_M.astype(np.int64))
    unseen = np.stack([ids(f"<{w}>{w[::-1]}#") for w in words(seed, count + HELD)[count:]])
    held = torch.from_numpy(unseen.astype(np.int64))
    policy = PositionReader(letters=len(LETTERS), positions=seen.shape[1], width=width, seed=seed)
    optimizer, reversed_shares = torch.optim.Adam(policy.parameters(), lr=0.03), list[float]()
    with torch.enable_grad():
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                # Each token is predicted after the right ones before it. If all are right, sampling greedily says them.
                predicted = policy(held[:, :-1]).argmax(-1)[:, LONG + 1 :]
                reversed_shares.append(float((predicted == held[:, LONG + 2 :]).all(1).double().mean()))
            logp = torch.log_softmax(policy(seen), -1).reshape(-1, len(LETTERS))[source, target]
            optimizer.zero_grad()
            Likelihood().terms(batch, TokenScores(logp, None, None)).loss.backward()
            optimizer.step()
        logp = torch.log_softmax(policy(held[:, :-1]), -1).gather(2, held[:, 1:, None])
    return reversed_shares, float(logp[:, :LONG].mean().detach())


def compute(k: lab.Values) -> lab.Readout:
    masked, count, settings = bool(k["mask"]), int(k["count"]), (int(k["count"]), int(k["width"]), int(k["seed"]))
    on, off = learn(True, *settings), learn(False, *settings)
    batch, first = batch_of(settings[2], count, masked), demonstrated(words(settings[2], 1), masked)[0]
    answer_at = len(first.ids) - LONG - 1
    tiles = [
        TextTile(LETTERS[i], "mute" if not m else "good" if j >= answer_at else "bad")
        for j, (i, m) in enumerate(zip(first.ids.tolist(), first.mask.tolist(), strict=True))
    ]
    # What stands before the first learned token of the batch, and what a rollout would be shown.
    shown, asked = batch.ids_N[: int(batch.source_M[0]) + 1], first.ids[:answer_at]
    chosen = on if masked else off
    return lab.Readout(
        pictures=(
            Tiles("The first demonstration", {"": tiles},
                  {"good": "answer, learned", "mute": "prompt, only read", "bad": "prompt, and learned"}),
            Curve("Unseen words that are reversed", list(range(0, STEPS + 1, EVERY)),
                  {"with mask": on[0], "without": off[0]}, low=0, high=1),
        ),
        sentence=f"**{int(first.mask.sum())}** of {len(first.ids)} tokens are learned. After {STEPS} steps on {count} "
        f"demonstrations **{chosen[0][-1]:.0%}** of 64 unseen words are reversed: **{on[0][-1]:.0%}** with the mask, "
        f"**{off[0][-1]:.0%}** without.",
        values={"accuracy": chosen[0][-1], "accuracy without mask": off[0][-1], "log-prob of prompts": chosen[1]},
        says=lab.refusal(lambda: same_question(shown, asked, text), "same_question"),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="L3", name="mask", title="The loss mask: learn the answer alone", part="the ladder", force="signal",
    minutes=5,
    question="A demonstration is a prompt and an answer: should the policy learn to write the prompt too?",
    idea="""
        Supervised fine-tuning makes the tokens of an answer more likely. The prompt stands before them in the same
        sequence. A mask says which tokens count in the loss. Without it the policy also learns to write prompts:
        here words of mostly random letters, which it can only learn by heart. That takes room and steps from the task.

        Both policies here see the same words and take the same steps, on the mean over the tokens that count. At width
        4, with many demonstrations both learn the task, and the mask saves time. With few, the one without a mask
        reverses fewer new words with most seeds, not with all: try 3.
    """,
    formula="loss = - mean over tokens with mask 1 of  log pi( token | all tokens before it )",
    knobs=(
        lab.Toggle("mask", "mask the prompt", True),
        lab.Slider("count", "demonstrations", 16, 8, 64, 8),
        lab.Slider("width", "width of the policy", 4, 2, 8),
        lab.Slider("seed", "seed", 0, 0, 8),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"mask": False}, "It learns the words of the prompts by heart, and reverses fewer new ones.",
                  "same_question"),
    ),
    exercises=(
        lab.AskNumber("How many tokens of <bad>dab# are learned with the mask?", 4, why="d, a, b and the stop #."),
        lab.AskKnobs("Reverse 95 % of the unseen words without the mask.", "accuracy without mask", 0.95, None,
                     {"count": 64}, why="Words that cannot be learned by heart do no more harm than noise."),
        lab.AskChoice("Which tokens of an answer does the mask keep?",
                      ("All but the stop token", "All with the stop token", "The first one"), 1,
                      why="Without the stop token the policy never learns to end."),
    ),
    code=("posttrain.role.learning.demonstrations.demonstration", "posttrain.algorithm.loss.losses.Likelihood",
          "posttrain.checks.data_checks.same_question"),
    docs="start/coming-from-trl.md", command="posttrain run arithmetic fault=prompt_imitated --allow-fault",
    grid=("mask", "count"),
)  # fmt: skip
