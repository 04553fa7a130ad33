"""The answers to the same prompts at two steps of a stage, one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.cli.screen_text import fold, folded, number, paint, screen_width
from posttrain.cli.shown_episodes import GRADES, PROMPT_LINES, SAID_LINES, ShowOptions, choose_stage, is_wrong, read_as
from posttrain.config.run import Run
from posttrain.config.stages.stage import starts
from posttrain.core.content import conversation
from posttrain.core.measure.number_text import number_text
from posttrain.core.types import Task
from posttrain.record.run_reader import EpisodeFile, read_episodes
from posttrain.record.step_format import Recorded
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import visible


@dataclass(frozen=True)
class PromptPair:
    """One prompt with its answers at the two steps."""

    task: Task
    answers: tuple[Sequence[Recorded], Sequence[Recorded]]

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Mean reward of the judged answers at each step."""
        one, two = (_mean(a) for a in self.answers)
        return one, two

    @property
    def change(self) -> float | None:
        """Mean reward at the second step minus that at the first; None if one of them has no judged answer."""
        one, two = self.means
        return None if one is None or two is None else two - one


def _mean(answers: Sequence[Recorded]) -> float | None:
    """The mean reward of the judged answers; None where none was judged."""
    figures = [r.episode.figure for r in answers if r.episode.figure is not None]
    return float(np.mean(figures)) if figures else None


def compared(run: Run, files: Sequence[EpisodeFile], wanted: ShowOptions, colours_on: bool) -> Iterator[str]:
    """The lines of `posttrain show RUN --compare STEP STEP`."""
    assert wanted.compare is not None
    one, two = _files(run, files, wanted, wanted.compare)
    pairs, steps = _pairs(one, two), wanted.compare
    width = screen_width()
    kind = ", held-out evaluation" if one.kind == "eval" else ""
    for line in fold(f"{visible(two.stage)} step {steps[0]} and step {steps[1]}{kind}: {_tally(pairs)}", width):
        yield paint(line, "bold", colours_on)
    grades = read_as(r for p in pairs for r in p.answers[1])
    rows = [p for p in pairs if not wanted.wrong or any(is_wrong(r, grades) for r in p.answers[1])]
    if wanted.best or wanted.worst:
        sign = -1 if wanted.best else 1
        rows = sorted((p for p in rows if p.change is not None), key=lambda p: sign * (p.change or 0.0))
    if not rows:
        none_wrong = f"no prompt is answered wrong at step {steps[1]}" if grades.tells else GRADES
        yield f"  {none_wrong if wanted.wrong else 'none of them was judged'}"
        return
    shown = rows[: wanted.limit] if wanted.limit > 0 else rows
    for pair in shown:
        yield ""
        yield from _pair_lines(pair, steps, wanted.full, width, colours_on)
    if len(shown) < len(rows):
        yield ""
        yield paint(f"  ... {len(rows) - len(shown)} more; --limit 0 shows all", "dim", colours_on)


def _files(
    run: Run, files: Sequence[EpisodeFile], wanted: ShowOptions, steps: tuple[int, int]
) -> tuple[EpisodeFile, EpisodeFile]:
    """Two files: held-out evaluations, or training steps that share prompts. ConfigError says what there is."""
    kinds = {f.kind for f in files if wanted.stage in (None, f.stage)}
    # Held-out prompts are always the same; training steps share prompts only where the data comes again.
    if "eval" in kinds:
        evaluations = _evaluations(run, files, wanted)
        if all(s in evaluations for s in steps):
            return evaluations[steps[0]], evaluations[steps[1]]
        stage = list(evaluations.values())[-1].stage
    else:
        evaluations, stage = dict[int, EpisodeFile](), wanted.stage or "this run"
    if "train" in kinds:
        trained = {f.index: f for f in choose_stage(run, files, wanted, "train")}
        if all(s in trained for s in steps):
            one, two = trained[steps[0]], trained[steps[1]]
            if _by_task(one).keys() & _by_task(two).keys():
                return one, two
            stage = one.stage
    known = [*evaluations]
    held_out = (
        f"held-out evaluations of {stage} are at steps {', '.join(map(str, known))}" if known else f"{stage} has none"
    )
    example = f". Compare two of these, for example --compare {known[0]} {known[-1]}" if len(known) > 1 else ""
    raise ConfigError(
        f"--compare {steps[0]} {steps[1]}: only answers to the same prompts are compared. Training steps have other"
        f" prompts each; {held_out}{example}"
    )


def _evaluations(run: Run, files: Sequence[EpisodeFile], wanted: ShowOptions) -> dict[int, EpisodeFile]:
    """Held-out evaluations of the stage by their step.

    Weights are evaluated only once. So if the stage began with weights that an earlier stage had evaluated at its end,
    that evaluation is step 0 of this stage.
    """
    of_stage = choose_stage(run, files, wanted, "eval")
    evaluations = {f.index: f for f in of_stage}
    stage = next((s for s in run.stages if s.name == of_stage[0].stage), None)
    if stage is not None and 0 not in evaluations:
        before = [f for f in files if f.kind == "eval" and f.stage == starts(run.stages, stage)]
        evaluations = {0: before[-1], **evaluations} if before else evaluations
    return evaluations


def _by_task(file: EpisodeFile) -> dict[str, list[Recorded]]:
    """The episodes of a file by their tasks (`Task.asked`)."""
    out: dict[str, list[Recorded]] = {}
    for r in read_episodes(file.path):
        out.setdefault(r.episode.task.asked, []).append(r)
    return out


def _pairs(one: EpisodeFile, two: EpisodeFile) -> list[PromptPair]:
    """The prompts that both steps answer, in the order of the first."""
    first, second = _by_task(one), _by_task(two)
    return [PromptPair(a[0].episode.task, (a, second[i])) for i, a in first.items() if i in second]


def _tally(pairs: Sequence[PromptPair]) -> str:
    """One line about all prompts: the mean rewards, and how many prompts are better or worse."""
    judged = [p for p in pairs if p.change is not None]
    both = f"{len(pairs)} prompt{'s' * (len(pairs) != 1)} in both"
    if not judged:
        return f"{both}, none judged at both"
    one, two = (float(np.mean([p.means[i] for p in judged])) for i in (0, 1))  # type: ignore[arg-type]
    changes = [p.change or 0.0 for p in judged]
    # Means of equal rewards in another order may differ by rounding: such a prompt is the same.
    better, worse = sum(c > 1e-9 for c in changes), sum(c < -1e-9 for c in changes)
    change = number_text(two - one, "+.3f")
    return (
        f"{both}; mean reward {number_text(one)} -> {number_text(two)} ({change}): {better} better,"
        f" {worse} worse, {len(judged) - better - worse} the same"
    )


def _pair_lines(pair: PromptPair, steps: tuple[int, int], full: bool, width: int, colours_on: bool) -> Iterator[str]:
    """One prompt with its answers at both steps. Without `full` texts are shortened, and one answer a step is shown."""
    most = 0 if full else PROMPT_LINES
    for line in folded(conversation(pair.task.prompt), width - 2, most, "; --full shows all"):
        yield paint(f"  {line}", "cyan", colours_on)
    change = pair.change or 0.0
    for i, (step, answers) in enumerate(zip(steps, pair.answers, strict=True)):
        reward = f"reward {number(pair.means[i])}"
        samples = f"mean {reward} of {len(answers)} samples" if len(answers) > 1 else reward
        gained = f" ({number_text(change, '+.3f')})" if i and pair.change is not None else ""
        colour = "" if i == 0 or not change else "green" if change > 0 else "red"
        yield paint(f"    step {step}: {samples}{gained}", colour, colours_on)
        for r in answers if full else answers[:1]:
            lead = f"{number(r.episode.figure)}  " if len(answers) > 1 else ""
            for line in folded(lead + r.episode.text, width - 6, 0 if full else SAID_LINES, "; --full shows all"):
                yield f"      {line}".rstrip()
