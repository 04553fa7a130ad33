"""Did it learn? One plain sentence about a stage, from the gain of its held-out score, and what to try next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from posttrain.core.env import Env
from posttrain.core.heldout import perplexity
from posttrain.core.interval import Gain, Score
from posttrain.core.reader import steps
from posttrain.core.rejection import Rejection
from posttrain.core.run import Reinforce, Run
from posttrain.core.shell import command_line
from posttrain.core.stage import Stage
from posttrain.diagnose.outcome import Curve, RunOutcome, StageOutcome
from posttrain.diagnose.said import findings_of

WORTH = 0.05
"""The smallest gain that a run is worth, as a share of the scale. An interval that holds 0 and stays below this says
that nothing was learned; one that goes beyond it says that more prompts are needed to tell."""
MOST_PROMPTS = 20_000
"""No more held-out prompts are advised."""

Word = Literal["learned", "got worse", "did not learn", "cannot be told", "paid more, not more often right"]


@dataclass(frozen=True)
class Learning:
    """The answer to "did it learn?" for one stage."""

    word: Word
    text: str
    """One sentence, with the figures, the steps they were measured at, and the number of prompts."""
    advice: tuple[str, ...] = ()
    """What to try, the first thing first. One with `#` is a command and why."""


def learned(of: RunOutcome) -> Learning:
    """The answer for a run: that of the last stage whose weights it goes on with."""
    last = of.last
    if last is None:
        return Learning(
            "cannot be told",
            "cannot be told whether it learned: no step was taken",
            (f"{command_line('run', '--resume', of.folder)}  # takes its first steps",),
        )
    said = stage_learned(of.run, last, str(of.folder))
    advised = f"{last.name}.optimizer.lr="
    if any(n.stage == last.name and advised in n.message for n in findings_of(steps(of.folder))):
        # a live rule measured how far a step moves the policy: its learning rate stands, and no second one beside it
        theirs = "take the learning rate that the rules name"
        said = replace(said, advice=tuple(theirs if advised in x else x for x in said.advice))
    return said


def stage_learned(run: Run, s: StageOutcome, folder: str) -> Learning:
    """The answer for one stage.

    It goes by accuracy where any held-out answer was right, else by the mean reward. A reward that rose while accuracy
    did not has its own word, since a policy may be paid for other things than right answers.
    """
    if s.unpaired or s.accuracy is None or s.reward is None or s.start is None or s.end is None:
        if s.end is None and s.agreement is not None and s.agreement_before is not None and s.updates:
            return _ordering(s, s.agreement, s.agreement_before)
        if s.end is None and s.loss is not None and s.updates:
            return _likelier(s, s.loss)
        return Learning(
            "cannot be told", f"cannot be told whether {s.name} learned: {s.unpaired}", _how_to_tell(run, s, folder)
        )
    if s.steps and not s.updates:
        none = f"{s.name} did not learn: none of its {s.steps} steps changed the weights"
        return Learning("did not learn", none, _after_nothing(run, s, folder))
    by_accuracy = not s.graded or max(s.accuracy.before, s.accuracy.after) > 0
    gain, what = (s.accuracy, "accuracy") if by_accuracy else (s.reward, "mean reward")
    word = _word(gain, 1.0 if by_accuracy else _width(s))
    if by_accuracy and s.graded and word not in ("learned", "got worse") and _word(s.reward, _width(s)) == "learned":
        return Learning(
            "paid more, not more often right",
            f"{s.name} is paid more, but not more often right: held-out reward {s.reward.before:.3f} ->"
            f" {s.reward.after:.3f}, gain {s.reward}; accuracy {_figures(s, s.accuracy)}",
            (
                f"{_show(s, folder, '--eval', '--best')}  # what is paid now, and is it what you want?",
                "lower the weights of the rewards that do not ask for a right answer (env.rewards.N.weight)",
            ),
        )
    if s.proxy is not None and s.proxy.low > 0 and max(gain.low, s.reward.low) <= 0:
        return _exploited(s, gain, what, folder)
    figures = f"held-out {what} {_figures(s, gain)}"
    match word:
        case "learned":
            return Learning(word, f"{s.name} learned: {figures}", _after_learning(s))
        case "got worse":
            return Learning(word, f"{s.name} got worse: {figures}", _after_worse(run, s))
        case "did not learn":
            return Learning(word, f"{s.name} did not learn: {figures}", _after_nothing(run, s, folder))
        case _:
            told = f"cannot be told whether {s.name} learned: {figures}, which holds 0"
            return Learning("cannot be told", told, (_more_prompts(run, s, gain), *_after_nothing(run, s, folder)[:2]))


def _exploited(s: StageOutcome, gain: Gain, what: str, folder: str) -> Learning:
    """The answer for a policy that is paid more for held-out answers which are no better by what is measured."""
    assert s.proxy is not None
    paid = f"its reward pays {s.proxy.before:.3f} -> {s.proxy.after:.3f} for held-out answers, gain {s.proxy}"
    return Learning(
        "paid more, not more often right",
        f"{s.name} is paid more, and is no better: {paid}; held-out {what} {_figures(s, gain)}",
        (
            f"{_show(s, folder, '--eval', '--best')}  # what is paid now, and is it what you want?",
            f"a larger KL to its start ({s.name}.algorithm.pull=kl {s.name}.algorithm.pull.coef=0.3), or fewer steps",
            "a reward model of more judgements, or several with pessimism (env.rewards=model:A+B)",
        ),
    )


def _ordering(s: StageOutcome, after: Score, before: float) -> Learning:
    """The answer for a stage whose data has pairs and no reward: it goes by the held-out pairs."""
    figures = f"it orders {after} of held-out pairs as they were judged, and {before:.3f} before"
    unseen = "whether its answers are better is not measured: give env.rewards, which judge what it samples"
    blind = (unseen,) if s.stage.leaves_policy else ()
    if after.low > before:
        return Learning("learned", f"{s.name} learned the pairs: {figures}", blind)
    if after.high < before:
        return Learning("got worse", f"{s.name} got worse: {figures}", (_slower(s), *blind))
    told = f"cannot be told whether {s.name} learned: {figures}"
    more = f"more steps, or more held-out pairs (env.heldout): {_longer(s.stage)}"
    return Learning("cannot be told", told, (more, *blind))


def _likelier(s: StageOutcome, gain: Gain) -> Learning:
    """The answer for a stage that imitates where nothing judges answers: it goes by the held-out loss."""
    curve = s.heldout_losses
    last, best = curve[-1], min(curve, key=lambda p: p[1])
    figures = (
        f"held-out loss {gain.before:.3f} -> {gain.after:.3f} (before -> step {last[0]}; perplexity"
        f" {perplexity(gain.before):.4g} -> {perplexity(gain.after):.4g}), change {gain}, over {gain.prompts}"
        f" row{'s' if gain.prompts != 1 else ''}"
    )
    rose = best[0] not in (0, last[0]) and last[1] > best[1] + WORTH
    stop = (
        (
            f"it was lowest after step {best[0]} ({best[1]:.3f}) and rose since, as where rows are learned by heart:"
            f" take --checkpoint best, or stop there ({s.name}.steps={best[0]})",
        )
        if rose
        else ()
    )
    if gain.high < 0:
        return Learning("learned", f"{s.name} learned: {figures}", stop)
    if gain.low > 0:
        return Learning("got worse", f"{s.name} got worse: {figures}", stop or (_slower(s),))
    more = f"hold more rows out ({_env_of(s)}.heldout), or more steps: {_longer(s.stage)}"
    return Learning("cannot be told", f"cannot be told whether {s.name} learned: {figures}", (*stop, more))


def _env_of(s: StageOutcome) -> str:
    return "env" if s.stage.env is None else f"{s.name}.env"


def _slower(s: StageOutcome) -> str:
    return f"lower the learning rate: {s.name}.optimizer.lr={s.stage.optimizer.lr / 3:.1g}"


def _width(s: StageOutcome) -> float:
    scales = [m.scale for m in (s.start, s.end) if m is not None]
    return max(h for _, h in scales) - min(low for low, _ in scales)


def _word(gain: Gain, width: float) -> Word:
    if gain.low > 0:
        return "learned"
    if gain.high < 0:
        return "got worse"
    return "did not learn" if gain.high < WORTH * width else "cannot be told"


def _figures(s: StageOutcome, gain: Gain) -> str:
    """Means with their steps, the gain with its interval, and over how many prompts."""
    assert s.start is not None and s.end is not None
    at = "before" if s.start.stage == s.name else f"after {s.start.stage}"
    at += f" -> step {s.end.step}" + (f" of {s.steps}" if s.steps != s.end.step else "")
    return f"{gain.before:.3f} -> {gain.after:.3f} ({at}), gain {gain}, paired over {gain.prompts} prompts"


def judged(env: Env) -> bool:
    """Whether anything judges answers there. Data that was judged beforehand may come without rewards."""
    return env.name != "prompts" or bool(env.rewards)


# --- what to try -----------------------------------------------------------------------------------------------------


def _how_to_tell(run: Run, s: StageOutcome, folder: str) -> tuple[str, ...]:
    """How to make a run of which it can be told."""
    env = "env" if s.stage.env is None else f"{s.name}.env"
    if not run.env_of(s.stage).heldout:
        return (f"hold prompts out: {env}.heldout=100",)
    if not judged(run.env_of(s.stage)):
        return (f"give {env}.rewards, which judge what the model samples",)
    if not s.stage.eval:
        return (f"measure it: {s.name}.eval=true",)
    if not run.record_episodes:
        return ("record the answers: record_episodes=true",)
    if s.end is None or s.end.step == 0:
        out = [
            f"{command_line('run', '--resume', folder)}  # goes on from the last checkpoint, and measures at the end"
        ]
        if not s.stage.eval_every:
            out.append(f"measure on the way too: {s.name}.eval_every={max(1, s.stage.steps // 5)}")
        return tuple(out)
    if s.start is None and s.began == "start":
        model = run.model.path
        first = (
            f"{command_line('eval', model)}  # with this run's env.* settings: the score before, to compare by hand"
            if model
            else "the model began with random weights, so its score before is that of guessing"
        )
        return (first,)
    return (f"{_show(s, folder, '--eval')}  # what was said, and what the rewards said of it",)


def _more_prompts(run: Run, s: StageOutcome, gain: Gain) -> str:
    """How many held-out prompts would tell a gain of the size that was seen, or of `WORTH`."""
    size = max(abs(gain.mean), WORTH)
    half = (gain.high - gain.low) / 2
    env = "env" if s.stage.env is None else f"{s.name}.env"
    if not math.isfinite(half):
        return f"hold more prompts out: {env}.heldout=100"
    wanted = gain.prompts * (half / size) ** 2 * 1.2
    rounded = int(math.ceil(wanted / 50) * 50)
    return (
        f"hold more prompts out: about {min(rounded, MOST_PROMPTS):,} would tell a gain of {size:.2f}"
        f" ({env}.heldout={min(rounded, MOST_PROMPTS)})"
    )


def _after_learning(s: StageOutcome) -> tuple[str, ...]:
    """More steps, where it was still rising."""
    points = [x for _, x in s.heldout]
    if s.done and len(points) >= 3 and points[-1] > points[-2] + 0.01 and points[-1] < 0.97:
        return (f"it was still rising at its end: {_longer(s.stage)}",)
    return ()


def _after_worse(run: Run, s: StageOutcome) -> tuple[str, ...]:
    rate = _slower(s)
    points = s.heldout
    best = max(points, key=lambda p: p[1], default=(0, 0.0))
    if 0 < best[0] < s.steps and best[1] > points[0][1] + 0.01:
        return (f"it was best at step {best[0]} ({best[1]:.3f}): take --checkpoint best, or stop there", rate)
    if isinstance(s.stage, Reinforce) and _rose(s.rewards) > 0.02:
        return ("its training reward rose while held-out fell: use more prompts, or fewer steps", rate)
    return (rate,)


def _after_nothing(run: Run, s: StageOutcome, folder: str) -> tuple[str, ...]:
    """Likely causes in order, as far as the record tells them."""
    assert s.accuracy is not None
    faster = f"{s.name}.optimizer.lr={s.stage.optimizer.lr * 3:.1g}"
    if not isinstance(s.stage, Reinforce):
        return (f"more steps or a higher learning rate: {_longer(s.stage)} {faster}",)
    look = f"{_show(s, folder)}  # read what it says, and what it is paid for"
    rewards = [x for _, x in s.rewards]
    if rewards and max(rewards) == min(rewards):
        if rewards[0] > 0:
            paid = f"every answer earned {rewards[0]:g}: mend the reward if it pays for wrong answers too"
            return (f"{paid}, else use harder prompts", look)
        level = "no answer earned anything" if rewards[0] == 0 else f"every answer earned {rewards[0]:g}"
        return (f"{level}: use easier prompts, imitate right answers first, or mend the reward", look)
    if s.accuracy.before == s.accuracy.after == 0:
        return ("no answer was right, before or after: use easier prompts, or imitate right answers first", look)
    if s.accuracy.before > 0.9:
        return (f"it was right {s.accuracy.before:.0%} of the time before: use harder prompts",)
    if _rose(s.rewards) > 0.05:
        return (
            "its training reward rose and held-out did not: it learned its prompts by heart; use more of them",
            look,
        )
    return (f"training reward is flat: a higher learning rate or more steps ({faster})", look)


def _show(s: StageOutcome, folder: str, *words: str) -> str:
    return command_line("show", folder, "--stage", s.name, *words)


def _rose(curve: Curve) -> float:
    """By how much a curve rose, from the mean of its first fifth to that of its last fifth."""
    values = np.array([x for _, x in curve])
    part = max(1, len(values) // 5)
    return float(values[-part:].mean() - values[:part].mean()) if len(values) else 0.0


def _longer(stage: Stage) -> str:
    """The setting with which a stage goes on for as long again."""
    if isinstance(stage, Rejection) and stage.rounds is not None:
        return f"{stage.name}.rounds={2 * stage.rounds}"
    return f"{stage.name}.steps={2 * stage.steps}"
