"""What `updates.py` runs of lines that sums do not show, and what it is to find, written down before it was run.

`echo` learns what a tool says, so it plays with a calculator. `rae` keeps a baseline for each role, so it plays a game
of two roles against itself. `sdpo` and `sdft` learn from themselves behind a hint, so they begin as a policy that has
learned to use one. Batches, updates a batch, steps and rate are those of the mild study of sums.

No arm was run here before this was written, and no pilot. Known were `no_ratio` and `clip` of the study of sums, and of
40 steps with one update a batch: the calculator to .99 (`agents.py`), `sdft` .97, .81 and `sdpo` .95, .60 (`hints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import posttrain
from benchmarks.learning import hints
from benchmarks.learning.from_start import start
from benchmarks.learning.updates_regions import CLIP, Figures, Prediction
from posttrain.config.env import Env
from posttrain.config.run import Optimizer, Reinforce, Run, Supervised
from posttrain.core import seeds
from posttrain.core.ports import Attempt, Talk
from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.gallery import GALLERY
from posttrain.environment.generated import GeneratedTasks
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Ema
from posttrain.ladder.pieces.source_ema import SourceEma
from posttrain.ladder.policy_rows import DR_GRPO, ECHO, EMA, PRIME_RL, RAE, SDFT, SDPO
from posttrain.recipe.recipes import recipe

MOST = 3
"""Stones that one move may take."""


@dataclass(frozen=True, kw_only=True)
class Nim(GeneratedTasks):
    """A heap of stones, of which the players take 1 to 3 in turn; who takes the last one wins. The trained seat is the
    first player, or the second one after a first move that left a multiple of 4, against which the other wins who
    plays well: the task's `source` says which. The reward is 1 for a win. A move that is none loses.

    Held-out games are against moves drawn at random, so that their accuracy says how well the policy plays, and not
    how well against itself.
    """

    opponent: str = "self"
    """Of training games. self: the policy plays the other seat. random: as in held-out games."""
    least: int = 5
    """Fewest stones of a heap."""
    most: int = 20
    """Most stones of a heap."""

    @property
    def name(self) -> str:
        return "nim"

    @property
    def alphabet(self) -> str:
        return "0123456789<>ab"

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        role = ("first", "second")[int(rng.integers(2))]
        heaps = [n for n in range(self.least, self.most + 1) if (n % (MOST + 1) == 0) == (role == "second")]
        heap = heaps[int(rng.integers(len(heaps)))]
        info = {"heap": heap, "source": f"nim/{role}", "game": int(rng.integers(2**40))}
        return Task(id=name, prompt=f"{'a' if role == 'first' else 'b'}<{heap}>", answer="", info=info)

    def key(self, task: Task) -> Hashable:
        return (task.info["heap"], task.info["source"], task.info["game"])

    def _drawn(self, task: Task, heap: int) -> int:
        """The random move with `heap` stones left."""
        return int(seeds.generator(0, "nim", task.info["game"], heap).integers(1, min(MOST, heap) + 1))

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        other = talk.seat("opponent") if self.opponent == "self" and "-heldout-" not in task.id else None
        if other is not None:
            other.see(str(task.prompt).translate(str.maketrans("ab", "ba")))
        heap, mine, end = int(task.info["heap"]), True, Stop.SAID
        while True:
            if mine or other is not None:
                said = await (talk if mine else other or talk).say(MOST)
                taken = int(said.text) if said.stop.finished and said.text in ("1", "2", "3") else 0
                end = said.stop if mine else end
            else:
                taken = self._drawn(task, heap)
            if not 1 <= taken <= heap or taken == heap:
                break
            heap, mine = heap - taken, not mine
            if mine:
                talk.see(f"<{heap}>")
            elif other is not None:
                other.see(f"<{heap}>")
        talk.leave({"won": mine == (taken == heap)})
        return end

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.value(float(bool(attempt.state and attempt.state["won"])))

    def knows_gold(self, task: Task) -> bool:
        return False

    def gold(self, task: Task) -> tuple[str, ...]:
        return ()

    def distractor(self, task: Task) -> tuple[str, ...]:
        return ("0",)

    @property
    def styles(self) -> tuple[str, ...]:
        """`move`: moves drawn at random."""
        return ("move",)

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str, tuple[str, ...]]:
        heap, mine, turns = int(task.info["heap"]), True, list[str]()
        while heap:
            taken = int(rng.integers(1, min(MOST, heap) + 1)) if mine else self._drawn(task, heap)
            turns += [str(taken)] if mine else []
            heap, mine = heap - taken, not mine
        return str(task.prompt), tuple(turns)


GALLERY["nim"] = f"{__name__}:Nim"


# --- the runs ---------------------------------------------------------------------------------------------------------


def game() -> Run:
    """Random moves are imitated (sft), and then the game is played against itself."""
    base = recipe("arithmetic")
    sft = Supervised(
        name="sft", style="move", wrong=0.0, steps=200, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20), eval=False
    )
    rl = base.stages[1]
    assert isinstance(rl, Reinforce)
    rl = replace(rl, sampling=Sampling(max_tokens=MOST))
    return replace(base, env=Env(name="nim", heldout=200), stages=(sft, rl))


def imitated(run: Run, seed: int, folder: Path, env: Env | None = None) -> Path:
    """The policy after the first stage of a run, as a plain model directory."""
    first = replace(run, seed=seed, env=env or run.env, stages=run.stages[:1])
    done = posttrain.run(first, out=folder / f"sft-{run.env.name}-{seed}", quiet=True)
    return Path(posttrain.export(done.folder, folder / f"start-{run.env.name}-{seed}"))


@dataclass(frozen=True)
class World:
    """Where some lines are shown: the run they take their second stage from, and the policy they begin with."""

    what: str
    run: Callable[[], Run]
    start: Callable[[int, Path], Path]
    arms: Mapping[str, Algorithm]
    ema: float | None = None
    """Decay of the moving average of the weights, where a teacher is one (`sdpo`)."""


def _named(*arms: Algorithm) -> dict[str, Algorithm]:
    return {a.name: a for a in arms}


RAE_CLIP = patch(CLIP, "rae_clip", RAE.paper, baseline=SourceEma(), scale="one")
EMA_CLIP = patch(CLIP, "ema_clip", EMA.paper, baseline=Ema(), scale="one")
WORLDS: Mapping[str, World] = {
    "game": World(
        "a game of two roles, played against itself (heap of 5 to 20 stones, take 1 to 3, who takes the last one wins);"
        " accuracy is the share of games won against moves drawn at random",
        game,
        lambda seed, folder: imitated(game(), seed, folder, Env(name="nim", args={"opponent": "random"}, heldout=200)),
        _named(RAE, EMA, RAE_CLIP, EMA_CLIP),
    ),
    "tool": World(
        "the calculator of the recipe `calculator`, after its imitation",
        lambda: recipe("calculator"),
        lambda seed, folder: imitated(recipe("calculator"), seed, folder),
        _named(PRIME_RL, ECHO),
    ),
    "hint": World(
        "sums, after an imitation in which every other task stands behind a hint (`benchmarks/learning/hints.py`,"
        " `told`)",
        lambda: recipe("arithmetic"),
        lambda seed, folder: hints.start("told", seed, folder),
        _named(DR_GRPO, SDFT, SDPO),
        ema=0.95,
    ),
}


def begin(rate: str, seed: int, folder: Path) -> Path:
    """What the arms of a study begin with, made once."""
    world = WORLDS.get(rate)
    if world is None:
        return start(seed, folder)
    own = folder / rate
    own.mkdir(exist_ok=True)
    made = own / f"made-{seed}"
    if not made.exists():
        made.write_text(str(world.start(seed, own)), encoding="utf-8")
    return Path(made.read_text(encoding="utf-8"))


def _after(f: Figures, arm: str, world: str) -> float:
    return f[arm, world]["after"]


PREDICTIONS: tuple[Prediction, ...] = (
    Prediction(
        "`game`: `rae_clip` and `ema_clip` end above their start.",
        lambda f: all(_after(f, a, "game") > f[a, "game"]["before"] for a in ("rae_clip", "ema_clip")),
    ),
    Prediction(
        "`game`: `rae`, which forms no ratio, ends below `rae_clip`, as `no_ratio` ended below `clip`.",
        lambda f: _after(f, "rae", "game") < _after(f, "rae_clip", "game"),
    ),
    Prediction(
        "`game`: `rae_clip` and `ema_clip` end within .1 of each other: both roles are played as often, and the edge of"
        " a role is a small part of the credit.",
        lambda f: abs(_after(f, "rae_clip", "game") - _after(f, "ema_clip", "game")) < 0.1,
    ),
    Prediction(
        "`tool`: `prime_rl` and `echo` end above their start, within .15 of each other.",
        lambda f: (
            all(_after(f, a, "tool") > f[a, "tool"]["before"] for a in ("prime_rl", "echo"))
            and abs(_after(f, "echo", "tool") - _after(f, "prime_rl", "tool")) < 0.15
        ),
    ),
    Prediction(
        "`tool`: the mean log-prob of what `echo` is told rises by .1 nats at least. Five other computations stand on"
        " the tape, and nobody can foresee their digits.",
        lambda f: f["echo", "tool"]["heard"] > 0.1,
    ),
    Prediction(
        "`hint`: `sdft` ends above its start, and above `sdpo`.",
        lambda f: _after(f, "sdft", "hint") > max(f["sdft", "hint"]["before"], _after(f, "sdpo", "hint")),
    ),
    Prediction(
        "`hint`: `sdpo` ends within .15 of its start: an average over 20 updates follows sixteen updates of one batch.",
        lambda f: abs(_after(f, "sdpo", "hint") - f["sdpo", "hint"]["before"]) < 0.15,
    ),
)

LEARNED: tuple[str, ...] = (
    "`game`: all four lines gained on each seed, the clipped ones .73 and .75 from .47, `rae` .68. Who is compared with"
    " the average of its own role alone (`rae`) ends where one average serves both (`reinforce_ema`): .683 and .685.",
    "`tool`: `echo` with sixteen updates a batch is **not** safe: .49, .82 and .02 after starts of .29, .27 and .21,"
    " where `prime_rl` ends at .92 to .96 on each seed. What it is told became more likely by 3.8 nats (seeds 0 and 2),"
    " so it did learn that. That loss has no trust region, and each of the sixteen updates follows it on the same text"
    " again.",
    "`hint`: `sdft` ends at .91, above `dr_grpo` (.86), without a ratio: its loss pulls towards a fixed teacher and"
    " comes to rest there. `sdpo` reached 1 on its way and ended at .86, .42 and .62.",
)
"""What the runs showed, in words."""
