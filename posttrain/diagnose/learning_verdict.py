"""Did it learn? One plain sentence about a stage, from the gain of its held-out score, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.config.run import Run
from posttrain.core.gauge import Step
from posttrain.core.measure.heldout_loss import perplexity
from posttrain.core.measure.interval import Gain, Score
from posttrain.diagnose.advice import WORTH, Case, LearningVerdict, advice
from posttrain.diagnose.measurement import common_scale
from posttrain.diagnose.rules.notes_once import findings_of
from posttrain.diagnose.run_outcome import RunOutcome, StageOutcome
from posttrain.record.run_reader import steps
from posttrain.system.shell import command_line

PROMPTS = "prompts"
"""The entry of run.json with the number of prompts of the data."""


@dataclass(frozen=True)
class Learning:
    """The answer to "did it learn?" for one stage."""

    word: LearningVerdict
    text: str
    """One sentence, with the figures, the steps they were measured at, and the number of prompts."""
    advice: tuple[str, ...] = ()
    """Pieces of advice, the first thing to try first. One with `#` is a command and the reason for it."""


def learned(of: RunOutcome) -> Learning:
    """The answer for a run: that of the last stage whose weights it goes on with."""
    last = of.last
    if last is None:
        return Learning(
            "cannot be told",
            "cannot be told whether it learned: no step was taken",
            (f"{command_line('run', '--resume', of.folder)}  # takes its first steps",),
        )
    counted = of.file.facts.get(PROMPTS)
    # The prompts were counted in the run's own data, so they are no number of another stage's.
    prompts = counted if isinstance(counted, int) and counted > 0 and of.run.env_of(last.stage) == of.run.env else None
    return stage_learned(of.run, last, str(of.folder), said_at_the_end(steps(of.folder), last), prompts)


IDLE = 0.25
"""If at least this share of the steps took no optimizer step, the sentence says so."""


def said_at_the_end(record: Sequence[Step], s: StageOutcome) -> tuple[str, ...]:
    """Returns the messages of live rules in the last fifth of a stage's steps."""
    # What rules said early may be long over.
    late = s.steps - max(1, s.steps // 5)
    return tuple(n.message for n in findings_of(record) if n.stage == s.name and n.steps[-1] > late)


def stage_learned(
    run: Run, s: StageOutcome, folder: str, found: tuple[str, ...] = (), prompts: int | None = None
) -> Learning:
    """The answer for one stage. It is based on accuracy where rewards are pass or fail, else on the mean reward.

    A reward that rose while accuracy did not has a word of its own: the policy may be paid for other things. This needs
    grades of which something says which are right (`env.right`, or several sources).

    Args:
        found: messages of live rules in its last steps.
        prompts: number of prompts of the data, where they were counted.
    """
    undecided = Case(run, s, folder, "cannot be told", "nothing", found=found, prompts=prompts)
    if s.unpaired or s.accuracy is None or s.reward is None or s.start is None or s.end is None:
        # Nothing was paired. A stage may still be judged by pairs that it orders, or by rows that it makes likelier.
        if s.end is None and s.agreement is not None and s.agreement_before is not None and s.updates:
            return _ordering(undecided, s.agreement, s.agreement_before)
        if s.end is None and s.loss is not None and s.updates:
            return _likelier(undecided, s.loss)
        return _answer(undecided, f"cannot be told whether {s.name} learned: {s.unpaired}")
    gain, what = (s.reward, "mean reward") if s.graded else (s.accuracy, "accuracy")
    low, high = common_scale((s.start, s.end))
    width = high - low if s.graded else 1.0
    verdict, figures, accuracy_words = _verdict(gain, width), f"held-out {what} {_figures(s, gain)}", _accuracy_words(s)
    case = replace(undecided, verdict=verdict, by="reward", gain=gain, change=gain.mean, width=width)
    # No update, no learning, whatever noise the two evaluations show.
    if s.steps and not s.updates:
        sentence = f"{s.name} did not learn: none of its {s.steps} steps changed the weights"
        return _answer(replace(case, verdict="did not learn"), sentence)
    paid_more = replace(case, verdict="paid more, not more often right")
    # The reward rose and the share of right answers did not: paid for something else.
    if verdict == "learned" and _wants_right(run, s) and _verdict(s.accuracy, 1.0) in ("did not learn", "got worse"):
        return _answer(paid_more, f"{s.name} is paid more, but not more often right: {figures}{accuracy_words}")
    # The proxy rose for sure, and neither of the measured figures did.
    if s.proxy is not None and s.proxy.low > 0 and max(gain.low, s.reward.low) <= 0:
        proxy_words = f"its reward pays {s.proxy.means} for held-out answers, gain {s.proxy}"
        return _answer(
            replace(paid_more, exploited=True),
            f"{s.name} is paid more, and no gain is seen in what is measured: {proxy_words}; {figures}",
        )
    if verdict == "cannot be told":
        return _answer(case, f"cannot be told whether {s.name} learned: {figures}, which holds 0{accuracy_words}")
    return _answer(case, f"{s.name} {verdict}: {figures}{accuracy_words}")


def _answer(case: Case, text: str) -> Learning:
    """The answer with its advice. The text is completed where many steps changed no weights."""
    s = case.s
    if s.updates and s.idle >= IDLE * s.steps:
        text += f"; {s.idle} of its {s.steps} steps changed no weights: they had no credit, or were skipped"
    return Learning(case.verdict, text, advice(case))


def _wants_right(run: Run, s: StageOutcome) -> bool:
    """Returns whether the share of right answers is compared with the mean reward of a graded stage.

    Some answer must have been right, and it must be known what is right: it is named, or several sources are paid.
    """
    # Where nothing was ever right, the share of right answers tells nothing of the reward.
    ever_right = s.accuracy is not None and max(s.accuracy.before, s.accuracy.after) > 0
    several = len(run.env_of(s.stage).paid_weights) > 1
    return s.graded and ever_right and s.tells is not None and (s.tells.named or several)


def _accuracy_words(s: StageOutcome) -> str:
    """Words with the accuracy, to follow those of a mean reward; '' where it says nothing."""
    if not s.graded or s.tells is None or s.accuracy is None:
        return ""
    at = "1" if s.tells.at is None else f"{s.tells.at:g}"
    return f"; rewards of {at} or more: {s.accuracy.means} of the answers, gain {s.accuracy}"


def _ordering(undecided: Case, after: Score, before: float) -> Learning:
    """The answer for a stage whose data has pairs and no reward, based on the held-out pairs."""
    s, case = undecided.s, replace(undecided, by="pairs", change=after.mean - before)
    figures = f"it orders {after} of held-out pairs as they were judged, and {before:.3f} before"
    # The interval of the later share alone, as the earlier one came without an interval.
    if after.low > before:
        return _answer(replace(case, verdict="learned"), f"{s.name} learned the pairs: {figures}")
    if after.high < before:
        return _answer(replace(case, verdict="got worse"), f"{s.name} got worse: {figures}")
    return _answer(case, f"cannot be told whether {s.name} learned: {figures}")


def _likelier(undecided: Case, gain: Gain) -> Learning:
    """The answer for a stage that imitates and whose answers nothing judges, based on the held-out loss."""
    s, case = undecided.s, replace(undecided, by="loss", gain=gain, change=-gain.mean)
    figures = (
        f"held-out loss {gain.means} (before -> step {s.heldout_losses[-1][0]}; perplexity"
        f" {perplexity(gain.before):.4g} -> {perplexity(gain.after):.4g}), change {gain}, over {gain.prompts}"
        f" row{'s' if gain.prompts != 1 else ''}"
    )
    # A loss: lower is better, so the signs are turned round.
    if gain.high < 0:
        return _answer(replace(case, verdict="learned"), f"{s.name} learned: {figures}")
    if gain.low > 0:
        return _answer(replace(case, verdict="got worse"), f"{s.name} got worse: {figures}")
    return _answer(case, f"cannot be told whether {s.name} learned: {figures}")


def _verdict(gain: Gain, width: float) -> LearningVerdict:
    """The verdict for a gain with its interval, on a scale of this width."""
    if gain.low > 0:
        return "learned"
    if gain.high < 0:
        return "got worse"
    # An interval that holds 0: "did not learn" only where it also rules out a gain that matters.
    return "did not learn" if gain.high < WORTH * width else "cannot be told"


def _figures(s: StageOutcome, gain: Gain) -> str:
    """Means with their steps, the gain with its interval, and over how many prompts."""
    assert s.start is not None and s.end is not None
    at = "before" if s.start.stage == s.name else f"after {s.start.stage}"
    at += f" -> step {s.end.step}" + (f" of {s.steps}" if s.steps != s.end.step else "")
    return f"{gain.means} ({at}), gain {gain}, paired over {gain.prompts} prompts"
