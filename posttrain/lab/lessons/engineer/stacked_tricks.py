"""Page 21: four ways to serve more tokens a second, one on top of the other, in the engine's own scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from posttrain.config.run import Reinforce
from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop
from posttrain.engine.embedded.cache.cache_blocks import Blocks
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.cache.forward_plan import Plan
from posttrain.engine.embedded.engine_step import Stepper
from posttrain.engine.embedded.schedule.engine_counters import EngineCounters
from posttrain.engine.embedded.schedule.scheduler import Scheduler
from posttrain.engine.embedded.schedule.slots import GenerateCall
from posttrain.engine.embedded.speculation import Lookup, PromptLookup
from posttrain.lab import lesson as lab
from posttrain.toy.letters import taught
from posttrain.web.picture import Bars, Gantt, Tone

READ, COMPUTE = 4.2e-3, 28e-6
"""Seconds of one H100 with 7 B parameters in bfloat16: to read all weights once (14 GB at 3.35 TB/s), and to compute
one position (14 GFLOP at 500 TFLOP/s)."""
PROMPT, PROMPTS, SIBLINGS = 512, 3, 16
WHOLE, PIECES = 1 << 20, 128
"""Most positions of a pass: all prompts at once, or what is nearly free beside reading the weights."""
TRICKS = ("refill", "share", "pieces", "drafts")
NAMES = ("refill slots", "share prompts", "prompts in pieces", "drafts")


@dataclass
class LetterModel:
    """Stands in for the network, with what `Stepper` uses of it: the next letter depends on the last one alone. It
    counts what each pass would cost."""

    now: float = 0.0  # seconds of all passes so far
    waits: float = 0.0
    """Seconds of the passes that took as long as reading the weights: more positions would have been free there."""
    passes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(seconds, slots that generate) of each pass."""
    pool: Any = None  # what copies blocks of the cache: the model itself
    kernels: str = "reference"

    def __post_init__(self) -> None:
        self.pool = self

    def copy(self, source: np.ndarray, to: np.ndarray) -> None:
        """Copies rows of the cache; here there are none."""

    def routed(self, rows: np.ndarray) -> None:
        """The experts that were chosen: None, as there is no mixture."""

    def run(self, plan: Plan) -> tuple[Tensor, None]:
        """Counts a pass; each position's "hidden state" is its token id, int64 [N, 1]."""
        seconds = max(READ, len(plan.ids) * COMPUTE)
        self.now += seconds
        self.waits += READ if seconds == READ else 0.0
        self.passes.append((seconds, len(plan.generating)))
        return torch.from_numpy(plan.ids.astype(np.int64))[:, None], None

    def logits(self, hidden: Tensor) -> Tensor:
        return letters().index_select(0, hidden[:, 0])


@cache
def letters() -> Tensor:
    """Log-probs [V, V] of the next letter (column) after each letter, in float32 as the engine has them."""
    return taught().float()


@dataclass
class Served:
    """The result of one way of serving."""

    model: LetterModel
    times: list[list[float]]
    """Moment of each token of each request."""
    accepted: float  # share of the drafted tokens that were said; 0 without drafts

    @property
    def rate(self) -> float:
        return sum(map(len, self.times)) / self.model.now

    @property
    def stream(self) -> float:
        """Tokens a second that the reader of one answer sees."""
        return float(np.mean([(len(t) - 1) / (t[-1] - t[0]) for t in self.times if t[-1] > t[0]]))


def sampling_of(temperature: float) -> Sampling:
    """The contract at this temperature; at 0 the argmax, which has a field of its own."""
    if temperature == 0:
        return Sampling(greedy=True, stop_ids=(), max_tokens=256)
    return Sampling(temperature=temperature, stop_ids=(), max_tokens=256)


def prompts_of(count: int, size: int) -> np.ndarray:
    """int32 [count, size]: letters that the table itself would say."""
    rng, cdf = np.random.default_rng(5), taught().exp().cumsum(-1).numpy()
    out = np.zeros((count, size), np.int32)
    for t in range(1, size):
        out[:, t] = (rng.random(count)[:, None] < cdf[out[:, t - 1]]).argmax(1)
    return out


@cache
def serve(slots: int, length: int, temperature: float, on: tuple[bool, ...], prompt: int = PROMPT,
          prompts: int = PROMPTS) -> Served:  # fmt: skip
    """16 answers to each prompt, through the engine's scheduler, with these of the four tricks (`TRICKS`, in order)."""
    refill, share, pieces, drafts = on
    model, blocks, loop = LetterModel(), Blocks(1 << 16), asyncio.new_event_loop()
    budget = PIECES if pieces else WHOLE
    scheduler = Scheduler(slots, prompt + 256, blocks, lambda n: None, rows=None, budget=budget, retain=1 << 16,
                          version=0)  # fmt: skip
    proposer = PromptLookup(Lookup(4)) if drafts else None
    counters = EngineCounters(slots)
    stepper = Stepper(cast(CachedModel, model), scheduler, counters, proposer)
    asked, times = prompts_of(prompts, prompt), list[list[float]]()
    # A lognormal of mean 1: -.18 is -.6 ** 2 / 2. Four times the largest mean, 48, stay below the 256 that are allowed.
    sizes = np.random.default_rng(7).lognormal(-0.18, 0.6, prompts * SIBLINGS).clip(0.2, 4) * length
    waiting = list[GenerateCall]()
    for i, size in enumerate(sizes.astype(int)):
        ids = asked[i // SIBLINGS].copy()
        if not share:
            ids[:2] = i % 26 + 1, i // 26  # two letters of its own at the start, so that nothing is found to be shared
        times.append([])
        # Two tokens at least, as a reader's speed is measured between the first and the last.
        waiting.append(GenerateCall(ids, sampling_of(temperature), i, max(2, int(size)), Stop.LENGTH,
                                    loop.create_future(), _clock(model, times[-1])))  # fmt: skip
    while waiting or scheduler.unfinished or scheduler.queue:
        # With refill all requests queue at once. Without it a batch begins only when every slot is free.
        if refill or not scheduler.busy:
            for _ in range(len(waiting) if refill else min(slots, len(waiting))):
                scheduler.submit(waiting.pop(0))
        stepper.step(0, admit=True)
    loop.close()
    accepted = counters.take(scheduler).get("engine/accepted")
    return Served(model, times, accepted.mean if accepted else 0.0)


def _clock(model: LetterModel, moments: list[float]) -> Callable[[np.ndarray, np.ndarray], None]:
    """What an engine calls with each token that is said: it notes the moment."""
    return lambda ids, logp: moments.extend([model.now] * len(ids))


def lanes(found: Served, most: int = 8) -> dict[str, list[tuple[float, float, str, Tone]]]:
    """For `most` of the answers, evenly chosen: the wait for the first token, and from there to the last."""
    tones: tuple[Tone, ...] = ("one", "two", "three", "four")
    out = dict[str, list[tuple[float, float, str, Tone]]]()
    for i in range(0, len(found.times), len(found.times) // most):
        t = found.times[i]
        spoken = (t[0], t[-1], f"{len(t)} tokens", tones[i // SIBLINGS])
        out[f"answer {i + 1}"] = [(0.0, t[0], "waits", "mute"), spoken]
    return out


def compute(k: lab.Values) -> lab.Readout:
    setting = int(k["slots"]), int(k["length"]), round(float(k["temperature"]), 2)
    on = tuple(bool(k[name]) for name in TRICKS)
    served, plain = serve(*setting, on), serve(*setting, (False,) * 4)
    rates = [("none", plain.rate)]  # each trick that is on, on top of those before it
    for i, name in enumerate(NAMES):
        if on[i]:
            rates.append((f"+ {name}", serve(*setting, tuple(x and j <= i for j, x in enumerate(on))).rate))
    reading_share = served.model.waits / served.model.now
    pause = max((s for s, n in served.model.passes if n), default=0.0)
    return lab.Readout(
        pictures=(
            Bars("Tokens a second, trick upon trick", [n for n, _ in rates], {"tokens a second": [r for _, r in rates]},
                 low=0),
            Gantt("Eight of the 48 answers", lanes(served), key={"mute": "waits for its first token"}),
        ),
        sentence=f"**{served.rate:.0f}** tokens a second, **{served.rate / plain.rate:.1f}** times as many as without "
        f"tricks. One reader sees **{served.stream:.0f}** a second, with pauses up to **{pause * 1e3:.0f} ms**. For "
        f"**{reading_share:.0%}** of the time reading the weights is what takes longest."
        + (f" **{served.accepted:.0%}** of the drafts were said." if on[3] else ""),
        values={"tokens a second": served.rate, "one reader, tokens a second": served.stream,
                "speed-up": served.rate / plain.rate, "longest pause, ms": pause * 1e3, "drafts said": served.accepted},
        says=lab.refusal(lambda: Reinforce(name="rl", sampling=sampling_of(setting[2]))),
    )  # fmt: skip


def first_token(share: bool) -> float:
    """Seconds until 16 siblings of one prompt have their first token."""
    return max(t[0] for t in serve(16, 4, 1.0, (True, share, False, False), PROMPT, 1).times)


def gain(temperature: float) -> float:
    """By how much drafts speed up a single stream, beside the other three tricks."""
    at = 1, 20, temperature
    return serve(*at, (True, True, True, True)).stream / serve(*at, (True, True, True, False)).stream


LESSON = lab.Lesson(
    number="21", name="scheduling", title="Serving: stack the tricks", part="the engineer", force="cost", minutes=8,
    question="The same weights and the same GPU: how many more tokens a second can the order of work give?",
    idea="""
        To say one token, a GPU reads all weights once. Reading takes as long as computing 150 positions, so a pass with
        few positions wastes the GPU. Four tricks fill it. *Refill*: when an answer ends, the next one takes its slot,
        and no slot waits for the longest. *Share*: siblings have the same prompt, which is computed once. *Pieces*: a
        long prompt is computed in parts beside the answers, so no reader waits. *Drafts*: guess the next tokens, check
        all of them in one pass, keep those that would have been drawn anyway.

        Here the engine's own scheduler serves 48 answers to 3 prompts. A table of letters stands in for the network;
        a pass costs what it would cost a 7 B model on one H100.
    """,
    formula="seconds of a pass = max( 4.2 ms to read the weights,  positions * 28 us )",
    knobs=(
        lab.Slider("slots", "answers at once (B)", 8, 4, 48, log=True),
        lab.Slider("length", "mean length (L)", 20, 8, 48),
        lab.Slider("temperature", "temperature (T)", 1.0, 0.0, 1.5, 0.1),
        lab.Toggle("refill", "refill slots at once", True),
        lab.Toggle("share", "share the prompt of siblings", True),
        lab.Toggle("pieces", "compute prompts in pieces", True),
        lab.Toggle("drafts", "draft 4 tokens by lookup", False),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"temperature": 0.0, "drafts": True},
                  "It is fast: more of the drafts are right, because every sibling says "
                  "the same. Then no answer is better than another, and nothing is learned.", "ConfigError"),
    ),
    claims=(
        lab.Claim("16 siblings share their prompt: the first tokens come sooner by a factor of", "curriculum 21", 16,
                  lambda: first_token(False) / first_token(True)),
        lab.Claim("Drafts at temperature 1: one stream is faster by", "curriculum 21", 1.0, lambda: gain(1.0),
                  within=0.1,
                  why="A table of letters repeats its prompt a little even at temperature 1, and one stream has room."),
        lab.Claim("Drafts at temperature 0.5: faster by", "curriculum 21", 2.0, lambda: gain(0.5), within=0.1,
                  why="It depends on what is guessed: looking up letters is seldom right at 0.5."),
        lab.Claim("Drafts at temperature 0: faster by", "curriculum 21", 3.0, lambda: gain(0.0), within=0.1,
                  why="Ours is of mean length 20 and grows with it: 3.4 at 48, 4.2 at 120."),
    ),
    exercises=(
        lab.AskNumber("A pass computes 300 positions at 28 us each. How many milliseconds does it take?", 8.4,
                      why="300 * 28 us = 8.4 ms, more than the 4.2 ms of reading."),
        lab.AskKnobs("Make drafts a loss for the reader of one answer: fewer than 236 tokens a second.",
                     "one reader, tokens a second", None, 236, {"slots": 48, "drafts": True, "pieces": False},
                     why="48 answers with 4 drafts each are 240 positions: more than the 150 that are free."),
        lab.AskChoice("Why do drafts help a batch of 4 more than one of 48?",
                      ("More drafts are right", "Positions are free while weights are read", "Memory is larger"), 1,
                      why="Below 150 positions a pass takes 4.2 ms in any case."),
    ),
    code=("posttrain.engine.embedded.schedule.scheduler.Scheduler",
          "posttrain.engine.embedded.speculation.PromptLookup"),
    docs="design/engine.md", command="posttrain run arithmetic engine.budget=2048 engine.lookup=4",
    grid=("slots", "drafts"),
)  # fmt: skip
