"""The facts that advice reads of a stage and its run, and questions about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.config.env import Env
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import Stage
from posttrain.core.measure.interval import Gain, number_text
from posttrain.diagnose.run_outcome import Curve, StageOutcome
from posttrain.ladder.pieces.pull import KL
from posttrain.system.shell import command_line

WORTH = 0.05
"""The smallest gain that a run is worth, as a share of the scale. An interval that holds 0 and stays below this says
that nothing was learned; one that goes beyond it says that more prompts are needed to tell."""
MOST_PROMPTS = 20_000
"""No more held-out prompts are advised."""
HELDOUT_SHARE = 5
"""At most one in this many prompts of a file is held out."""

Word = Literal["learned", "got worse", "did not learn", "cannot be told", "paid more, not more often right"]
By = Literal["reward", "pairs", "loss", "nothing"]
"""By what the sentence goes."""


@dataclass(frozen=True)
class Case:
    """The facts that advice reads of a stage."""

    run: Run
    s: StageOutcome
    folder: str
    word: Word
    by: By
    gain: Gain | None = None
    """Gain of the quantity that the sentence goes by."""
    width: float = 1.0
    """Width of the scale of that quantity."""
    change: float | None = None
    """By how much it became better."""
    exploited: bool = False
    """Whether what is paid rose, and what is measured did not."""
    found: tuple[str, ...] = ()
    """Messages of live rules in the last fifth of the stage's steps."""
    prompts: int | None = None
    """Prompts of the data, where they were counted."""

    @property
    def env(self) -> str:
        return "env" if self.s.stage.env is None else f"{self.s.name}.env"

    @property
    def curve(self) -> Curve:
        """Held-out scores by step, of what leads; higher is better."""
        return self.s.heldout_reward if self.s.graded else self.s.heldout

    @property
    def passed(self) -> Gain | None:
        """The accuracy, where rewards are pass or fail."""
        return None if self.s.graded else self.s.accuracy

    @property
    def still(self) -> bool:
        """True where, by rewards, nothing is known to have been learned."""
        return self.by == "reward" and self.word in ("did not learn", "cannot be told")

    @property
    def fell(self) -> bool:
        """True where the result became worse, surely or not."""
        return self.change is not None and self.change < -0.2 * WORTH * self.width

    @property
    def moved(self) -> bool:
        """True where some step changed the weights."""
        return self.s.updates > 0 or not self.s.steps

    @property
    def paid_levels(self) -> set[float]:
        return {x for _, x in self.s.rewards}

    @property
    def lr(self) -> str:
        return f"{self.s.name}.optimizer.lr"

    @property
    def most_heldout(self) -> int | None:
        """The most prompts that the data lets be held out."""
        return None if self.prompts is None else max(1, self.prompts // HELDOUT_SHARE)

    def show(self, *words: str) -> str:
        return command_line("show", self.folder, "--stage", self.s.name, *words)

    def wanted(self) -> int:
        """Returns the number of held-out prompts that would show a gain of the size that was seen, or of `WORTH`."""
        g = self.gain
        if g is None or not math.isfinite(g.high - g.low):
            return 100
        size = max(abs(g.mean), WORTH * self.width)
        need = g.prompts * ((g.high - g.low) / 2 / size) ** 2 * 1.2
        return min(int(math.ceil(need / 50) * 50), MOST_PROMPTS)


def judged(env: Env) -> bool:
    """Returns whether anything judges answers in this environment. Data that was judged beforehand may come without
    rewards."""
    return env.name != "prompts" or bool(env.rewards)


def env_of(c: Case) -> Env:
    return c.run.env_of(c.s.stage)


def cut_short(c: Case) -> bool:
    return c.s.end is None or c.s.end.step == 0


def more_heldout(c: Case) -> str:
    wanted = c.wanted()
    least = WORTH * c.width
    size = "more" if c.gain is None else f"a gain of {number_text(max(abs(c.gain.mean), least), '.2g')}"
    size += f", a {1 / WORTH:.0f}th of the range of rewards" if c.gain is not None and abs(c.gain.mean) < least else ""
    told = f"hold more prompts out: about {wanted:,} would tell {size}"
    if c.most_heldout is not None and c.most_heldout < wanted:
        return f"{told}, and its data lets {c.most_heldout:,} be held out ({c.env}.heldout={c.most_heldout})"
    return f"{told} ({c.env}.heldout={wanted})"


def room(c: Case) -> bool:
    """Returns whether the data lets more prompts be held out."""
    most, now = c.most_heldout, c.gain.prompts if c.gain is not None else 0
    return now < MOST_PROMPTS if most is None else now < most


def more_rows(c: Case) -> str:
    return (
        f"its data has {c.prompts} prompts, of which at most one in {HELDOUT_SHARE} is held out: about"
        f" {c.wanted() * HELDOUT_SHARE:,} prompts would tell, or env.args of a larger set; with these, more"
        " evaluation.samples narrow the interval a little"
    )


def longer(stage: Stage) -> str:
    """The setting with which a stage goes on for as long again; '' where its time is what ends it."""
    if stage.wall_time is not None or stage.time_of is not None:
        return ""
    if isinstance(stage, Rejection) and stage.rounds is not None:
        return f"{stage.name}.rounds={2 * stage.rounds}"
    return f"{stage.name}.steps={2 * stage.steps}"


def rose(curve: Curve) -> float:
    """By how much a curve rose, from the mean of its first fifth to that of its last fifth."""
    began, ended = fifths(curve)
    return ended - began


def fifths(curve: Curve) -> tuple[float, float]:
    """The means of the first and of the last fifth of a curve."""
    values = np.array([x for _, x in curve])
    part = max(1, len(values) // 5)
    return (float(values[:part].mean()), float(values[-part:].mean())) if len(values) else (0.0, 0.0)


def began_and_ended(c: Case) -> str:
    """The training reward at first and at last."""
    began, ended = fifths(c.s.rewards)
    return f"{number_text(began)} to {number_text(ended)}"


def rising(c: Case) -> bool:
    points = [x for _, x in c.curve]
    full = not c.s.graded and bool(points) and points[-1] >= 0.97
    return len(points) >= 3 and points[-1] > points[-2] + 0.01 * c.width and not full


def best(c: Case) -> tuple[int, float]:
    return max(c.curve, key=lambda p: p[1], default=(0, 0.0))


def was_better(c: Case) -> bool:
    at, score = best(c)
    return 0 < at < c.s.steps and score > c.curve[0][1] + 0.01 * c.width


def slower(c: Case) -> str:
    return f"lower the learning rate: {c.lr}={c.s.stage.optimizer.lr / 3:.1g}"


def faster(c: Case) -> str:
    return f"{c.lr}={c.s.stage.optimizer.lr * 3:.1g}"


def paid_by_models(c: Case) -> bool:
    return any(r.by_model and not r.measured for r in env_of(c).rewards)


def sources(c: Case) -> int:
    env = env_of(c)
    return sum(not r.measured and r.weight != 0 for r in env.rewards) + (env.name != "prompts" and not env.measured)


def kl(c: Case) -> str:
    assert isinstance(c.s.stage, Reinforce)
    pull, place = c.s.stage.algorithm.pull, f"{c.s.name}.algorithm.pull"
    coef = 3 * pull.coef if isinstance(pull, KL) else 0.3
    return f"a larger KL to its start ({place}=kl {place}.coef={coef:.2g}), or fewer steps"


def rates(c: Case) -> bool:
    return any(f"{c.lr}=" in x for x in c.found)


def lowest(c: Case) -> tuple[tuple[int, float], tuple[int, float]]:
    curve = c.s.heldout_losses
    return min(curve, key=lambda p: p[1]), curve[-1]


def by_heart(c: Case) -> bool:
    if c.by != "loss" or not c.s.heldout_losses:
        return False
    best, last = lowest(c)
    return best[0] not in (0, last[0]) and last[1] > best[1] + WORTH


def level(c: Case) -> str:
    return f"{next(iter(c.paid_levels)):g}"


def first_score(c: Case) -> str:
    if path := c.run.model.path:
        command = command_line("eval", path)
        return f"{command}  # with this run's env.* settings: the score before, to compare by hand"
    return "the model began with random weights, so its score before is that of guessing"
