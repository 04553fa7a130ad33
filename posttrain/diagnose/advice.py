"""Advice after a run: the facts that are read of a stage, and each piece of advice with its condition.

For each piece `tests/diagnose/test_advice.py` has a situation in which it is given, and one in which it must not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from posttrain.config.env import Env
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.rejection import Rejection
from posttrain.core.measure.interval import Gain
from posttrain.core.measure.number_text import number_text
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

LearningVerdict = Literal["learned", "got worse", "did not learn", "cannot be told", "paid more, not more often right"]
By = Literal["reward", "pairs", "loss", "nothing"]
"""What the sentence about a stage is based on: held-out rewards, held-out pairs, the held-out loss, or nothing."""


@dataclass(frozen=True)
class Case:
    """The facts that advice reads of a stage."""

    run: Run
    s: StageOutcome
    folder: str
    verdict: LearningVerdict
    """The answer to whether it learned."""
    by: By
    gain: Gain | None = None
    """Gain of the quantity that the sentence is based on."""
    width: float = 1.0
    """Width of the scale of that quantity."""
    change: float | None = None
    """By how much it became better."""
    exploited: bool = False
    """Whether the reward that is paid rose, and the score that is only measured did not."""
    found: tuple[str, ...] = ()
    """Messages of live rules in the last fifth of the stage's steps."""
    prompts: int | None = None
    """Prompts of the data, where they were counted."""

    @property
    def env(self) -> Env:
        return self.run.env_of(self.s.stage)

    @property
    def env_path(self) -> str:
        """The path of the environment's settings, as it is written in an override."""
        return "env" if self.s.stage.env is None else f"{self.s.name}.env"

    @property
    def data_path(self) -> str:
        """The path of the setting that gives the data."""
        return f"{self.env_path}.{'prompts' if self.env.prompts else 'args'}"

    @property
    def curve(self) -> Curve:
        """Held-out scores by step: mean rewards where outcomes are grades, else accuracy. Higher is better."""
        return self.s.heldout_reward if self.s.graded else self.s.heldout

    @property
    def best(self) -> tuple[int, float]:
        """(step, score) of the highest held-out score."""
        return max(self.curve, key=lambda p: p[1], default=(0, 0.0))

    @property
    def no_gain_known(self) -> bool:
        """True where held-out rewards show neither that it learned nor that it got worse."""
        return self.by == "reward" and self.verdict in ("did not learn", "cannot be told")

    @property
    def fell(self) -> bool:
        """True where the result became worse, surely or not."""
        # A change that is a small part of what matters is neither a rise nor a fall.
        return self.change is not None and self.change < -0.2 * WORTH * self.width

    @property
    def moved(self) -> bool:
        """True where some step changed the weights."""
        # A stage without a step says nothing about whether steps would move it.
        return self.s.updates > 0 or not self.s.steps

    @property
    def one_level(self) -> float | None:
        """The reward of every answer that was sampled for training, where all are the same."""
        # Equal means alone do not show it: within a step rewards may differ. The bound is for rounding.
        stds, levels = self.s.reward_stds, {x for _, x in self.s.rewards}
        alike = len(stds) == len(self.s.rewards) and all(x < 1e-9 for _, x in stds)
        return levels.pop() if len(levels) == 1 and alike else None

    @property
    def began_and_ended(self) -> tuple[float, float]:
        """The training reward: the means of the first and of the last fifth of its steps."""
        values = np.array([x for _, x in self.s.rewards])
        fifth = max(1, len(values) // 5)
        return (float(values[:fifth].mean()), float(values[-fifth:].mean())) if len(values) else (0.0, 0.0)

    @property
    def rose(self) -> float:
        """By how much the training reward rose."""
        began, ended = self.began_and_ended
        return ended - began

    @property
    def most_heldout(self) -> int | None:
        """The most prompts that the data lets be held out."""
        # Of a single prompt none: something must be left to train on.
        return None if self.prompts is None else min(self.prompts - 1, max(1, self.prompts // HELDOUT_SHARE))

    @property
    def room(self) -> bool:
        """True where the data lets more prompts be held out."""
        now = self.gain.prompts if self.gain is not None else 0
        return now < (MOST_PROMPTS if self.most_heldout is None else self.most_heldout)

    @property
    def wanted(self) -> int:
        """The number of held-out prompts that would show a gain of the size that was seen, or of `WORTH`."""
        g = self.gain
        if g is None or not math.isfinite(g.high - g.low):
            return 100  # no interval to compute from: the number that `_to_tell` advises, too
        size = max(abs(g.mean), WORTH * self.width)
        # The width of an interval falls with the root of the prompts; 20 % more for a gain that is smaller than it
        # looked.
        need = g.prompts * ((g.high - g.low) / 2 / size) ** 2 * 1.2
        # In fifties, since the number is an estimate.
        return min(int(math.ceil(need / 50) * 50), MOST_PROMPTS)

    @property
    def by_heart(self) -> tuple[int, float] | None:
        """(step, loss) of the lowest held-out loss, where it rose since, as where rows are learned by heart."""
        if self.by != "loss" or not (curve := self.s.heldout_losses):
            return None
        low, last = min(curve, key=lambda p: p[1]), curve[-1]
        # Neither at the start, where nothing was trained, nor at the end, where it may still fall.
        return low if low[0] not in (0, last[0]) and last[1] > low[1] + WORTH else None

    @property
    def longer(self) -> str:
        """The setting that makes the stage twice as long; '' where a time limit ends it."""
        stage = self.s.stage
        if stage.wall_time is not None or stage.time_of is not None:
            return ""
        if isinstance(stage, Rejection) and stage.rounds is not None:
            return f"{stage.name}.rounds={2 * stage.rounds}"
        return f"{stage.name}.steps={2 * stage.steps}"

    def rate(self, times: float) -> str:
        """The setting of `times` times the learning rate."""
        return f"{self.s.name}.optimizer.lr={self.s.stage.optimizer.lr * times:.1g}"

    def show(self, *words: str) -> str:
        """The command that shows answers of the stage."""
        return command_line("show", self.folder, "--stage", self.s.name, *words)


@dataclass(frozen=True)
class Advice:
    """One piece of advice. Of the pieces of one topic only the first that applies is given."""

    name: str
    topic: str
    text: str


def advice(case: Case, most: int = 3) -> tuple[str, ...]:
    """Returns the pieces of advice, the first thing to try first."""
    return tuple(a.text for a in chosen(case))[:most]


def chosen(case: Case) -> list[Advice]:
    """The pieces that apply, the first one of each topic."""
    # What to try first comes first. Of two functions with a piece of one topic, the first one's is given.
    parts = (_to_tell,) if case.by == "nothing" else (_paid, _heldout, _worse, _flat, _onward, _rows)
    of_topic = dict[str, Advice]()
    for piece in chain.from_iterable(part(case) for part in parts):
        of_topic.setdefault(piece.topic, piece)
    return list(of_topic.values())


# Topics that several functions share: of all their pieces of one topic only the first is given.
TELL, CAUSE = "how to tell", "cause"


def _to_tell(c: Case) -> Iterator[Advice]:
    """Advice for a stage of which nothing can be told: how to make it tell."""
    env, stage, env_path = c.env, c.s.stage, c.env_path
    cut_short = c.s.end is None or c.s.end.step == 0
    if not env.heldout and c.most_heldout == 0:
        text = f"give more prompts, and hold some out: its data has one ({c.data_path}, {env_path}.heldout)"
        yield Advice("give more prompts", TELL, text)
    elif not env.heldout:
        most = 100 if c.most_heldout is None else min(100, c.most_heldout)
        yield Advice("hold prompts out", TELL, f"hold prompts out: {env_path}.heldout={most}")
    if not env.judges:
        yield Advice("give rewards", TELL, f"give {env_path}.rewards, which judge what the model samples")
    if not stage.eval:
        yield Advice("measure it", TELL, f"measure it: {stage.name}.eval=true")
    if not c.run.record_episodes and stage.leaves_policy:
        yield Advice("record the answers", TELL, "record the answers: record_episodes=true")
    if not stage.leaves_policy and c.s.done and stage.eval and env.heldout:
        yield Advice("hold judgements out", TELL, f"hold more judgements out, until some differ: {env_path}.heldout")
    if cut_short and not c.s.done:
        again = command_line("run", "--resume", c.folder)
        yield Advice("go on", TELL, f"{again}  # goes on from the last checkpoint, and measures at the end")
    measured = stage.eval and env.heldout and env.judges and c.run.record_episodes
    if cut_short and measured and stage.leaves_policy and not stage.eval_every:
        often = f"measure on the way too: {stage.name}.eval_every={max(1, stage.steps // 5)}"
        yield Advice("measure on the way", "on the way", often)
    if c.s.start is None and c.s.began == "start" and stage.leaves_policy:
        text = "the model began with random weights, so its score before is that of guessing"
        if model_path := c.run.model.path:
            measure = command_line("eval", model_path)
            text = f"{measure}  # with this run's env.* settings: the score before, to compare by hand"
        yield Advice("the score before", TELL, text)
    if stage.leaves_policy:
        command = f"{c.show('--eval')}  # what was said, and what the rewards said of it"
        yield Advice("what was said there", TELL, command)


def _paid(c: Case) -> Iterator[Advice]:
    """Advice for a stage that is paid more and is no better: what is paid is not what is wanted."""
    if c.verdict == "paid more, not more often right":
        look = f"{c.show('--eval', '--best')}  # what is paid now, and is it what you want?"
        yield Advice("what is paid now", "paid", look)
    if c.exploited and isinstance(c.s.stage, Reinforce):
        pull, place = c.s.stage.algorithm.pull, f"{c.s.name}.algorithm.pull"
        coef = 3 * pull.coef if isinstance(pull, KL) else 0.3
        text = f"a larger KL to its start ({place}=kl {place}.coef={coef:.2g}), or fewer steps"
        yield Advice("a larger KL", "kl", text)
    rewards = c.env.rewards
    if c.exploited and any(r.by_model and not r.measured for r in rewards):
        text = "a reward model of more judgements, or several with pessimism (env.rewards=model:A+B)"
        yield Advice("more judgements", "judgements", text)
    if c.verdict == "paid more, not more often right" and not c.exploited and len(c.env.paid_weights) > 1:
        text = f"lower the weights of the rewards that do not ask for a right answer ({c.env_path}.rewards.N.weight)"
        yield Advice("lower other weights", "weights", text)


def _heldout(c: Case) -> Iterator[Advice]:
    """Advice for a stage whose result more held-out prompts would make clear."""
    if c.by != "reward" or c.verdict != "cannot be told":
        return
    if c.room:
        least, wanted, most = WORTH * c.width, c.wanted, c.most_heldout
        size = "more" if c.gain is None else f"a gain of {number_text(max(abs(c.gain.mean), least), '.2g')}"
        if c.gain is not None and abs(c.gain.mean) < least:
            size += f", a {1 / WORTH:.0f}th of the range of rewards"
        advised = f"hold more prompts out: about {wanted:,} would tell {size}"
        # The data may not have as many prompts as would tell.
        heldout = wanted if most is None else min(wanted, most)
        if heldout < wanted:
            advised += f", and its data lets {heldout:,} be held out"
        yield Advice("more held out", "held out", f"{advised} ({c.env_path}.heldout={heldout})")
    elif c.prompts is not None:
        text = (
            f"its data has {c.prompts} prompts, of which {c.most_heldout} can be held out: about"
            f" {c.wanted * HELDOUT_SHARE:,} would tell ({c.data_path} of a larger set); with these, more"
            " evaluation.samples narrow the interval a little"
        )
        yield Advice("more data", "held out", text)


def _worse(c: Case) -> Iterator[Advice]:
    """Advice from what rules said, and about the causes of a fall."""
    lr = f"{c.s.name}.optimizer.lr="
    # A rate that a rule has computed from what it saw is better than a factor of three.
    if (c.no_gain_known or c.verdict == "got worse") and any(lr in x for x in c.found):
        yield Advice("the rate that the rules name", "rules", "take the learning rate that the rules name")
    if (c.no_gain_known or (c.verdict == "got worse" and c.by == "reward")) and c.found:
        yield Advice("what the rules saw", "rules", "do first what the rules say of its last steps")
    if c.verdict == "got worse" and c.by == "reward":
        at, score = c.best
        # At a step between, and better than the start by a hundredth of the scale: else it was at no time better.
        if 0 < at < c.s.steps and score > c.curve[0][1] + 0.01 * c.width:
            text = f"it was best at step {at} ({number_text(score)}): take --checkpoint best, or stop there"
            yield Advice("best at a step", CAUSE, text)
    # How far the training reward must have risen for the next piece. Under any other verdict it is never given.
    enough = {"did not learn": 0.05, "got worse": 0.02}.get(c.verdict, math.inf) * c.width
    if isinstance(c.s.stage, Reinforce) and c.by == "reward" and c.rose > enough:
        text = "its training reward rose and held-out did not: use more prompts, or fewer steps"
        yield Advice("learned by heart", CAUSE, text)
    # With a named cause the rate is not to blame.
    if c.verdict == "got worse" and c.moved and not c.found and c.by_heart is None:
        yield Advice("slower", "rate", f"lower the learning rate: {c.rate(1 / 3)}")


def _flat(c: Case) -> Iterator[Advice]:
    """Advice about the causes of a stage that did not learn."""
    level, passed = c.one_level, None if c.s.graded else c.s.accuracy
    # A reward that is one number for all answers has nothing to learn from, whatever the rate.
    if c.no_gain_known and c.s.graded and level is not None and not c.found:
        text = f"every answer earned {level:g}: if the reward pays wrong answers as much, mend it; else use"
        yield Advice("one reward for all, of grades", CAUSE, f"{text} prompts of another difficulty")
    if c.no_gain_known and not c.s.graded and level is not None and level > 0 and not c.found:
        text = f"every answer earned {level:g}: mend the reward if it pays for wrong answers too, else use"
        yield Advice("one reward for all", CAUSE, f"{text} harder prompts")
    never = passed is not None and passed.before == passed.after == 0 and not c.s.greedy
    if c.no_gain_known and never and c.rose <= 0.05:
        text = "no held-out answer was right, before or after: use easier prompts, imitate right answers first, or"
        yield Advice("never right", CAUSE, f"{text} mend the reward")
    if c.no_gain_known and passed is not None and passed.before > 0.9:
        yield Advice("right before", CAUSE, f"it was right {passed.before:.0%} of the time before: use harder prompts")
    # From here on the advice is to change the rate or the steps, which helps only a stage that moved.
    if not c.moved or c.found:
        return
    if c.fell and c.verdict in ("did not learn", "cannot be told"):
        yield Advice("it fell", CAUSE, f"it rather fell: fewer steps, or a lower learning rate ({c.rate(1 / 3)})")
    sampled = isinstance(c.s.stage, Reinforce)
    # A single step has nothing to be compared with.
    if c.no_gain_known and sampled and level is None and len(c.s.rewards) > 1 and abs(c.rose) <= 0.05 * c.width:
        began, ended = map(number_text, c.began_and_ended)
        of = f" of a range of {number_text(c.width, '.2g')}" if c.s.graded else ""
        text = f"training reward hardly changed ({began} to {ended}{of}): a higher learning rate or more steps"
        yield Advice("faster", CAUSE, f"{text} ({c.rate(3)})")
    if c.no_gain_known and not sampled and c.longer:
        yield Advice("longer or faster", CAUSE, f"more steps or a higher learning rate: {c.longer} {c.rate(3)}")


def _onward(c: Case) -> Iterator[Advice]:
    """Advice for a stage that samples: what to read, and whether to go on."""
    if c.no_gain_known and isinstance(c.s.stage, Reinforce):
        yield Advice("read what it says", "look", f"{c.show()}  # read what it says, and what it is paid for")
    points = [x for _, x in c.curve]
    # Near 1 there is nothing left to rise.
    full = not c.s.graded and bool(points) and points[-1] >= 0.97
    rising = len(points) >= 3 and points[-1] > points[-2] + 0.01 * c.width and not full
    if c.verdict == "learned" and c.by == "reward" and c.s.done and rising and c.longer:
        yield Advice("still rising", CAUSE, f"it was still rising at its end: {c.longer}")


def _rows(c: Case) -> Iterator[Advice]:
    """Advice for a stage that is judged by its held-out pairs or by its held-out loss."""
    # A stage that fell is not to go on for longer.
    unsure = c.verdict == "cannot be told" and not c.fell and bool(c.longer)
    if c.by == "pairs" and unsure:
        text = f"more steps, or more held-out pairs ({c.env_path}.heldout): {c.longer}"
        yield Advice("longer, or more pairs", CAUSE, text)
    if c.by == "pairs" and c.s.stage.leaves_policy and not c.env.judges:
        text = "whether its answers are better is not measured: give env.rewards, which judge what it samples"
        yield Advice("answers are not measured", "answers", text)
    if c.by_heart is not None:
        text = (
            f"it was lowest after step {c.by_heart[0]} ({c.by_heart[1]:.3f}) and rose since, as where rows are"
            f" learned by heart: take --checkpoint best, or stop there ({c.s.name}.steps={c.by_heart[0]})"
        )
        yield Advice("stop at the lowest loss", CAUSE, text)
    if c.by == "loss" and unsure and c.by_heart is None:
        text = f"hold more rows out ({c.env_path}.heldout), or more steps: {c.longer}"
        yield Advice("more rows, or longer", "rows", text)
