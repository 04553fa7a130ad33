"""A run as it is played: what was chosen, everything it works with, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain import faults
from posttrain.api import overrides as dotted
from posttrain.api.admit import admitted, gone, noted, told
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
from posttrain.api.engines import check_engine
from posttrain.api.proofs import prove_start
from posttrain.api.summary import planted_lines, show
from posttrain.api.target import keep_policy
from posttrain.api.terminal import Terminal
from posttrain.api.trackers import check_trackers, make_trackers
from posttrain.controller.interrupt import Stopper
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
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.models import Policy
from posttrain.recipe.recipes import listed
from posttrain.recipe.recipes import recipe as shipped
from posttrain.role.weights import load_weights


@contextmanager
def begun(
    recipe: str | Run = "",
    *overrides: str,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    allow_fault: bool = False,
    trust: bool = False,
) -> Iterator[RunSession]:
    """A run that is ready to be played (arguments as of `posttrain.run`); all of it is closed at the end of the block,
    and the end shown."""
    chosen = (
        again(resume, recipe, overrides, out, trust) if resume is not None else afresh(recipe, overrides, out, trust)
    )
    chosen.refuse_faults(allow_fault)
    with faults.planted(chosen.run.fault):
        session = opened(chosen, quiet)
        try:
            yield session
        finally:
            session.close()
    if not quiet:
        show(session.terminal.console, session.run, session.results, session.book.folder)


@dataclass(frozen=True)
class Chosen:
    """The run that is wanted, and where it stands: in no folder yet, or in one that it is gone on in."""

    run: Run
    out: Path | None
    book: Book | None = None
    checkpoint: Checkpoint | None = None
    said: tuple[str, ...] = ()
    """What people are told of it."""

    def refuse_faults(self, allowed: bool) -> None:
        """ConfigError where the run plants a fault and nobody allowed it."""
        try:
            faults.refuse_silent(self.run.fault, allowed)
        except ConfigError:
            if self.book is not None:
                self.book.close()
            raise


def afresh(recipe: str | Run, overrides: Sequence[str], out: str | Path | None, trust: bool) -> Chosen:
    """A recipe with its overrides."""
    if trust:
        raise ConfigError("--trust is about the folder of a run that somebody else made: give it with --resume RUN")
    if not recipe:
        raise ConfigError(f"no recipe given: posttrain run RECIPE, or posttrain run --resume RUN\n{listed()}")
    run = dotted.apply(recipe if isinstance(recipe, Run) else shipped(recipe), list(overrides))
    return Chosen(run, Path(out) if out else None)


def again(
    resume: str | Path, recipe: str | Run, overrides: Sequence[str], out: str | Path | None, trust: bool
) -> Chosen:
    """A run that was cut, as it was written."""
    if recipe or overrides or out:
        raise ConfigError("--resume goes on with the run as it was written: leave out recipe, overrides and --out")
    admitted(folder_of(resume)[0], allow=trust, links=True)
    book, checkpoint = Book.open_for_resume(Path(resume))
    return Chosen(book.run, None, book, checkpoint, (*told(book.folder), *gone(book.folder)))


@dataclass
class RunSession:
    """A run with everything it works with, from before its first step to its end."""

    run: Run
    book: Book
    parts: RunParts
    policy: Policy
    environments: tuple[Environment, ...]
    """Every one that a stage plays on, once."""
    terminal: Terminal
    progress: Progress
    checkpoint: Path | None
    quiet: bool
    stopper: Stopper

    @property
    def results(self) -> tuple[StageResult, ...]:
        return self.progress.results

    async def play(self) -> None:
        """What must hold before the first step, then the stages that are left, one after another."""
        told = await prove_start(self.parts, self.policy.tokenizer)
        for note in told if not self.quiet else ():
            self.terminal.say(f"note: {note}")
        with self.stopper.listening():
            for stage in Stages(self.parts, self.progress, self.stopper).left(self.checkpoint):
                await stage.run()
        for tracker in self.parts.trackers:
            tracker.close(final(self.results))

    def close(self) -> None:
        """Each part is closed, whatever another one raises."""
        with ExitStack() as closing:
            for close in (
                self.book.close,
                *(e.close for e in self.environments),
                self.parts.close,
                lambda: self.terminal.close({}),
            ):
                closing.callback(close)


def opened(chosen: Chosen, quiet: bool) -> RunSession:
    """Build what the run needs, or close again what was built of it."""
    with ExitStack() as undone:
        if chosen.book is not None:
            undone.callback(chosen.book.close)
        session = _built(chosen, quiet, undone)
        undone.pop_all()
    return session


def _built(chosen: Chosen, quiet: bool, undone: ExitStack) -> RunSession:
    """Everything of a session; a run folder is made once all before it has been found good. `undone` is told how each
    is closed."""
    run, book = chosen.run, chosen.book
    check_drivers(run)
    check_trackers(run)
    check_engine(run)
    threads = use_threads(run.threads)
    environment = make_environment(run)
    undone.callback(environment.close)
    others = own_environments(run, environment)
    everywhere = distinct(environment, others)
    for own in everywhere[1:]:
        undone.callback(own.close)
    policy = make_policy(run, environment, others)
    said = chosen.said
    if book is None:
        folder = chosen.out or Path("runs") / f"{run.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        contained = dict.fromkeys(x for e in everywhere for x in e.abilities.contained)
        book = Book.create(folder, run, facts(policy, threads, tuple(contained)))
        undone.callback(book.close)
        said = (*said, *noted(folder, run))
    trackers = beside(run, policy, book)
    terminal = Terminal(run)
    if not quiet:
        trackers.insert(0, terminal)
        for line in (
            *planted_lines(run),
            *policy.describe(),
            *words_in_tokens(run, policy),
            *said,
            f"run folder: {book.folder}",
        ):
            terminal.say(line)
    parts = make_parts(run, policy, environment, book, trackers, others)
    undone.callback(parts.close)
    if not quiet and isinstance(parts.sampler, EmbeddedEngine):
        terminal.say(parts.sampler.describe())
    progress = restored(run, parts, chosen.checkpoint)
    if chosen.checkpoint is not None and not quiet:
        terminal.say(standing(run, progress))
    kept = chosen.checkpoint.folder if chosen.checkpoint is not None else None
    return RunSession(run, book, parts, policy, tuple(everywhere), terminal, progress, kept, quiet, Stopper())


def restored(run: Run, parts: RunParts, checkpoint: Checkpoint | None) -> Progress:
    """Where the run stands, with the checkpoint's weights in the learner."""
    if checkpoint is None:
        return Progress()
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        progress = where(run, checkpoint.state)
    load_weights(checkpoint.folder, parts.learner)
    parts.version = progress.version
    return progress


def final(results: Sequence[StageResult]) -> dict[str, float]:
    """What trackers keep of a run: accuracy and mean reward on held-out tasks after each stage."""
    both = [(r.name, what, x) for r in results for what, x in (("accuracy", r.accuracy), ("reward", r.reward))]
    return {f"final/{name}/{what}": x[0] for name, what, x in both if x is not None}


def beside(run: Run, policy: Policy, book: Book) -> list[Tracker]:
    """The run's trackers, with the tokenizer and the model's config beside the record."""
    keep_policy(book, policy)
    with disk_full_is_reported(book.folder / "trackers", lambda: "Nothing was lost"):
        return [*make_trackers(run, book.folder)]


def standing(run: Run, p: Progress) -> str:
    """Where a resumed run stands, in words."""
    if p.stage >= len(run.stages):
        return "this run is finished: nothing is left to do"
    stage = run.stages[p.stage]
    return (
        f"resuming at stage {p.stage + 1} of {len(run.stages)}: {stage.name}, after"
        f" {p.running.step if p.running else 0} of {stage.steps} steps"
    )
