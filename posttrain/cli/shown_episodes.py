"""The choice of the episodes that `posttrain show` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from posttrain.config.run import Run
from posttrain.core.measure.right import Grades, Right, right_of
from posttrain.record.run_reader import EpisodeFile
from posttrain.record.step_format import Recorded
from posttrain.system.errors import ConfigError, nearest
from posttrain.system.terminal_output import visible

PROMPT_LINES, SAID_LINES = 6, 8
"""Lines of a prompt and of an answer that a list shows without --full."""
GRADES = "their rewards are grades, and nothing says which are right (env.right): --worst begins with the lowest"
"""The end of a message of --wrong about episodes whose rewards are grades."""


@dataclass(frozen=True)
class ShowOptions:
    """The options of `posttrain show`. `stage`, `step` None: the last. `kind` None: training, else an evaluation."""

    stage: str | None = None
    step: int | None = None
    kind: str | None = None
    episode: int | None = None
    wrong: bool = False
    """Only those that are not right."""
    best: bool = False
    """Highest reward first."""
    limit: int = 32
    failed: bool = False
    """Only those without a reward."""
    worst: bool = False
    """Lowest reward first."""
    compare: tuple[int, int] | None = None
    """Two steps whose answers to the same prompts are compared."""
    full: bool = False
    """Whole texts instead of their beginning and end."""

    def __post_init__(self) -> None:
        given = [f"--{n}" for n in ("wrong", "failed", "best", "worst") if getattr(self, n)]
        for pair in (("--wrong", "--failed"), ("--best", "--worst"), ("--failed", "--best"), ("--failed", "--worst")):
            if set(pair) <= set(given):
                why = "one order at a time" if pair[0] == "--best" else "what was not judged has no reward to sort by"
                raise ConfigError(f"{' and '.join(pair)} do not go together: {why}. Leave one of them out")
        if self.compare is None:
            return
        if conflicting := [n for n in ("step", "episode") if getattr(self, n) is not None] + ["failed"] * self.failed:
            raise ConfigError(f"--compare takes its two steps itself: leave out --{conflicting[0]}")


def named(chosen: EpisodeFile) -> str:
    """The stage and the step of an episode file, in words."""
    return f"{visible(chosen.stage)} step {chosen.index}" + (", held-out evaluation" if chosen.kind == "eval" else "")


def choose_stage(run: Run, files: Sequence[EpisodeFile], wanted: ShowOptions, kind: str) -> list[EpisodeFile]:
    """The files of one kind and one stage, in the order of their steps.

    Without a name it is the last stage with episodes whose weights the run went on with. A control stage, such as
    `sft_continued`, is taken only if there is no other.

    Raises:
        ConfigError: there are no such files; the message lists what there is.
    """
    of_kind = [f for f in files if f.kind == kind]
    stages = list(dict.fromkeys(f.stage for f in of_kind))
    if not of_kind:
        raise ConfigError(f"this run has no {kind} episodes" + ("; leave out --eval" if kind == "eval" else ""))
    if wanted.stage is not None and wanted.stage not in stages:
        raise ConfigError(f"--stage {wanted.stage}: no {kind} episodes of it; {nearest(wanted.stage, stages)}")
    not_handed_on = {s.name for s in run.stages if not s.hands_on}
    handed_on = [s for s in stages if s not in not_handed_on]
    stage = wanted.stage or (handed_on or stages)[-1]
    return [f for f in of_kind if f.stage == stage]


def choose(run: Run, files: Sequence[EpisodeFile], wanted: ShowOptions) -> EpisodeFile:
    """The last file that matches. Where none does, ConfigError lists what there is."""
    kind = wanted.kind or (
        "train" if any(f.kind == "train" and wanted.stage in (None, f.stage) for f in files) else "eval"
    )
    of_stage = choose_stage(run, files, wanted, kind)
    step = wanted.step
    if step is None:
        return of_stage[-1]
    of_step = [f for f in of_stage if f.index == step]
    if not of_step:
        steps = [f.index for f in of_stage]
        near = min(steps, key=lambda i: abs(i - step))
        raise ConfigError(
            f"--step {step}: no {kind} episodes of {of_stage[0].stage}; the nearest is {near} (from {steps[0]} to"
            f" {steps[-1]})"
        )
    return of_step[0]


def read_as(records: Iterable[Recorded]) -> Grades:
    """Returns how the main scores of these episodes are to be read: from which value on an answer is right."""
    return Grades.each(s for r in records if (s := _main_score(r)) is not None)


def is_wrong(r: Recorded, grades: Grades) -> bool:
    """True where the episode was judged and is not right. If nothing says which grades are right, none is wrong."""
    main_score = _main_score(r)
    return grades.tells and main_score is not None and not grades.right.of(main_score[0])


def _main_score(r: Recorded) -> tuple[float, Right] | None:
    """The score that says whether an episode is right, and from which value on it is.

    It is the outcome, if `env.right` says what is right. Else it is the score of the source with the largest weight.
    """
    e = r.episode
    if e.right.named:
        return None if e.figure is None else (e.figure, e.right)
    scored = [j for j in e.verdicts if j.verdict.score is not None]
    # As if this score alone were paid with weight 1: its weight, and whether it is only measured, change nothing.
    main = max(scored, key=lambda j: j.weight, default=None)
    return main and (main.verdict.score or 0.0, right_of([replace(main, weight=1.0, measured=False)], None))
