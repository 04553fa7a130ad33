"""One run from its start to its end: which run was asked for, the parts it works with, and how they are closed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain import faults
from posttrain.api import overrides as dotted
from posttrain.api.admit import admitted, edit_notes, missing_notes, remember_run
from posttrain.api.branch import pinned, was_built
from posttrain.api.build import (
    distinct,
    facts,
    make_environment,
    make_parts,
    make_policy,
    own_environments,
    use_threads,
    words_in_tokens,
)
from posttrain.api.defaults import for_model, given_paths
from posttrain.api.engines import check_engine
from posttrain.api.proofs import prove_start
from posttrain.api.summary import conclude, planted_lines
from posttrain.api.target import keep_policy
from posttrain.api.terminal import Terminal
from posttrain.api.trackers import check_trackers, make_trackers, tracker_lines
from posttrain.controller.interrupt import Interrupted, Stopper
from posttrain.controller.parts import RunParts
from posttrain.controller.stages import Progress, Stages, check_drivers, where
from posttrain.controller.stages.progress import StageResult
from posttrain.core.book import Book
from posttrain.core.checkpoint import Checkpoint
from posttrain.core.errors import ConfigError
from posttrain.core.files import disk_full_is_reported
from posttrain.core.ports import Environment, Tracker
from posttrain.core.reader import damage_is_named, folder_of
from posttrain.core.run import Run
from posttrain.core.shell import command_line
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.models import Policy
from posttrain.recipe.recipes import listed
from posttrain.recipe.recipes import recipe as shipped
from posttrain.role.weights import load_weights


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is started, beside its recipe and overrides; the arguments of `posttrain.run`."""

    out: str | Path | None = None
    resume: str | Path | None = None
    quiet: bool = False
    allow_fault: bool = False
    trust: bool = False


@contextmanager
def open_session(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> Iterator[RunSession]:
    """A run that is ready for its first step. At the end of the block its parts are closed. Then its
    summary is written, and shown unless it is quiet or an error ended the run."""
    request = (resumed_run if options.resume is not None else new_run)(recipe, overrides, options)
    request.refuse_faults(options.allow_fault)
    with ExitStack() as after, faults.planted(request.run.fault):  # what `after` holds is done without the fault
        session = build_session(request, options.quiet)
        try:
            yield session
            after.callback(conclude, session.book.folder, None if options.quiet else session.terminal.console)
        except BaseException as error:
            told = isinstance(error, Interrupted) and not options.quiet
            after.callback(conclude, session.book.folder, session.terminal.console if told else None)
            raise
        finally:
            session.close()


@dataclass(frozen=True)
class RunRequest:
    """The run that was asked for. `book` and `checkpoint` are set where it resumes one that was cut."""

    run: Run
    out: Path | None
    book: Book | None = None
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    """Lines about its settings and its folder, printed at the start."""
    recorded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What run.json records beside the settings: why some were chosen, and which run it is a branch of."""

    def refuse_faults(self, allowed: bool) -> None:
        """ConfigError where the run plants a fault and this was not allowed."""
        try:
            faults.refuse_silent(self.run.fault, allowed)
        except ConfigError:
            if self.book is not None:
                self.book.close()
            raise


def new_run(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> RunRequest:
    """A recipe with its overrides."""
    if options.trust:
        raise ConfigError("--trust is about the folder of a run that somebody else made: give it with --resume RUN")
    if not recipe:
        raise ConfigError(
            f"no recipe given: {command_line('run', 'RECIPE')}, or {command_line('run', '--resume', 'RUN')}\n{listed()}"
        )
    out = Path(options.out) if options.out else None
    if isinstance(recipe, Run):
        run, origin = pinned(dotted.apply(recipe, list(overrides)))
        return RunRequest(run, out, recorded=origin)
    base = shipped(recipe)
    run, origin = pinned(dotted.apply(base, list(overrides)))
    ready = for_model(run, given_paths(base, overrides), trained=not was_built(run.model.path))
    return RunRequest(ready.run, out, notes=ready.lines, recorded={"chosen": dict(ready.chosen), **origin})


def resumed_run(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> RunRequest:
    """A run that was cut, with the settings that were recorded."""
    assert options.resume is not None
    if recipe or overrides or options.out:
        raise ConfigError("--resume goes on with the run as it was written: leave out recipe, overrides and --out")
    admitted(folder_of(options.resume)[0], allow=options.trust, links=True)
    book, checkpoint = Book.open_for_resume(Path(options.resume))
    return RunRequest(book.run, None, book, checkpoint, (*edit_notes(book.folder), *missing_notes(book.folder)))


@dataclass
class RunSession:
    """A run with its parts, from before its first step to its end."""

    run: Run
    book: Book
    parts: RunParts
    policy: Policy
    environments: tuple[Environment, ...]
    """The environments of all stages, each once."""
    terminal: Terminal
    progress: Progress
    checkpoint: Path | None
    quiet: bool
    stopper: Stopper

    @property
    def results(self) -> tuple[StageResult, ...]:
        return self.progress.results

    async def play(self) -> None:
        """Prove what must hold before the first step, then run the stages that are left, in order."""
        notes = await prove_start(self.parts, self.policy.tokenizer)
        for note in notes if not self.quiet else ():
            self.terminal.say(f"note: {note}")
        with self.stopper.listening():
            for stage in Stages(self.parts, self.progress, self.stopper).left(self.checkpoint):
                await stage.run()
        for tracker in self.parts.trackers:
            tracker.close(final_scalars(self.results))

    def close(self) -> None:
        """Close each part, also where closing another one raises."""
        with ExitStack() as closing:
            for close in (
                self.book.close,
                *(e.close for e in self.environments),
                self.parts.close,
                lambda: self.terminal.close({}),
            ):
                closing.callback(close)


def build_session(request: RunRequest, quiet: bool) -> RunSession:
    """Build the parts of a run. If one of them fails, those built before it are closed."""
    with ExitStack() as cleanup:
        if request.book is not None:
            cleanup.callback(request.book.close)
        session = _build(request, quiet, cleanup)
        cleanup.pop_all()
    return session


def _build(request: RunRequest, quiet: bool, cleanup: ExitStack) -> RunSession:
    """Build in order; the run folder is made only after the checks before it have passed.

    `cleanup` collects how each part is closed.
    """
    run, book = request.run, request.book
    check_drivers(run)
    check_trackers(run)
    check_engine(run)
    threads = use_threads(run.threads)
    environment = make_environment(run)
    cleanup.callback(environment.close)
    others = own_environments(run, environment)
    environments = distinct(environment, others)
    for other in environments[1:]:
        cleanup.callback(other.close)
    policy = make_policy(run, environment, others, own=None if book is None else book.folder)
    notes = request.notes
    if book is None:
        folder = request.out or Path("runs") / f"{run.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        contained = dict.fromkeys(x for e in environments for x in e.abilities.contained)
        book = Book.create(folder, run, {**facts(policy, threads, tuple(contained)), **request.recorded})
        cleanup.callback(book.close)
        notes = (*notes, *remember_run(folder, run))
    trackers = start_trackers(run, policy, book)
    terminal = Terminal(run)
    if not quiet:
        trackers.insert(0, terminal)
        for line in (
            *planted_lines(run),
            *policy.describe(),
            *words_in_tokens(run, policy),
            *notes,
            f"run folder: {book.folder}",
            *tracker_lines(trackers),
        ):
            terminal.say(line)
    parts = make_parts(run, policy, environment, book, trackers, others)
    cleanup.callback(parts.close)
    if not quiet and isinstance(parts.sampler, EmbeddedEngine):
        terminal.say(parts.sampler.describe())
    progress = restore_progress(run, parts, request.checkpoint)
    if request.checkpoint is not None and not quiet:
        terminal.say(resume_line(run, progress))
    kept = request.checkpoint.folder if request.checkpoint is not None else None
    return RunSession(run, book, parts, policy, tuple(environments), terminal, progress, kept, quiet, Stopper())


def restore_progress(run: Run, parts: RunParts, checkpoint: Checkpoint | None) -> Progress:
    """The progress that a checkpoint records; its weights are loaded into the learner."""
    if checkpoint is None:
        return Progress()
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        progress = where(run, checkpoint.state)
    load_weights(checkpoint.folder, parts.learner)
    parts.version = progress.version
    return progress


def final_scalars(results: Sequence[StageResult]) -> dict[str, float]:
    """The summary that trackers keep: accuracy and mean reward on held-out tasks after each stage."""
    both = [(r.name, what, x) for r in results for what, x in (("accuracy", r.accuracy), ("reward", r.reward))]
    return {f"final/{name}/{what}": x[0] for name, what, x in both if x is not None}


def start_trackers(run: Run, policy: Policy, book: Book) -> list[Tracker]:
    """The run's trackers. The tokenizer and the model's config are written into the run folder first."""
    keep_policy(book, policy)
    with disk_full_is_reported(book.folder / "trackers", lambda: "Nothing was lost"):
        return [*make_trackers(run, book.folder)]


def resume_line(run: Run, p: Progress) -> str:
    """At which stage and step a resumed run continues, as a line of text."""
    if p.stage >= len(run.stages):
        return "this run is finished: nothing is left to do"
    stage = run.stages[p.stage]
    return (
        f"resuming at stage {p.stage + 1} of {len(run.stages)}: {stage.name}, after"
        f" {p.running.step if p.running else 0} of {stage.steps} steps"
    )
