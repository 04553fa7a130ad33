"""The Python surface behind the command line: run, evaluate, export. Works inside a running event loop too."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from posttrain.controller.stages import Progress, StageResult, Stages, check_drivers, where
from posttrain.controller.stop import Stopper
from posttrain.core.book import Book
from posttrain.core.checkpoint import Checkpoint, find
from posttrain.core.errors import ConfigError, RunFolderError
from posttrain.core.files import disk_full_is_reported, full
from posttrain.core.ports import Tracker
from posttrain.core.reader import damage_is_named, folder_of
from posttrain.core.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner import HFLearner
from posttrain.engine.models import Policy
from posttrain.recipe import faults
from posttrain.recipe import overrides as dotted
from posttrain.recipe.admit import admitted, gone, noted, told
from posttrain.recipe.build import (
    distinct,
    facts,
    make_environment,
    make_parts,
    make_policy,
    make_roles,
    own_environments,
    use_threads,
    words_in_tokens,
)
from posttrain.recipe.console import PlainConsole
from posttrain.recipe.engines import check_engine
from posttrain.recipe.progress import Terminal
from posttrain.recipe.proofs import prove_start
from posttrain.recipe.remote import Remote, evaluate_remote, is_url, refuse, remote_run
from posttrain.recipe.shipped import recipe as shipped
from posttrain.recipe.summary import planted_lines, show, show_report
from posttrain.recipe.target import TOKENIZER, keep_policy, kept_policy, target_run
from posttrain.recipe.trackers import check_trackers, make_trackers
from posttrain.role.evaluate import Report
from posttrain.role.evaluate import evaluate as measure
from posttrain.role.weights import load_weights

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a finished run hands back: its stages' results and where everything lies."""

    folder: Path
    run: Run
    stages: tuple[StageResult, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of held-out answers that are right, of the weights the run ended with; None where nothing was measured."""
        return next((s.accuracy[0] for s in self._measures if s.accuracy is not None), None)

    @property
    def reward(self) -> float | None:
        """Mean held-out reward of the same weights: another number where a reward grades."""
        return next((s.reward[0] for s in self._measures if s.reward is not None), None)

    @property
    def _measures(self) -> list[StageResult]:
        """Stages whose weights the run went on with, measured on its own tasks; the last one first."""
        return [s for s in reversed(self.stages) if s.hands_on and self.run.stage(s.name).env is None]


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end: here, or in a thread of its own where an event loop is already running (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[Any] = []

    def body() -> None:
        try:
            box.append((True, asyncio.run(work)))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=body, name="posttrain")
    thread.start()
    thread.join()
    ok, value = box[0]
    if not ok:
        raise value
    return value


def run(
    recipe: str | Run = "",
    *overrides: str,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    allow_fault: bool = False,
    trust: bool = False,
) -> Result:
    """Run a recipe, or go on with a run that was cut.

    Args:
        recipe: name of a shipped recipe, or a `Run` of your own.
        overrides: dotted `key=value` changes.
        out: run folder; default runs/RECIPE-DATE-TIME.
        resume: an existing run folder to go on with; then no recipe and no overrides are given.
        allow_fault: start although `fault=NAME` plants a bug on purpose (`posttrain faults`).
        trust: allow a folder that somebody else made what it asks for: code, addresses, secrets, files elsewhere.
    """
    said: tuple[str, ...] = ()
    if resume is not None:
        if recipe or overrides or out:
            raise ConfigError("--resume goes on with the run as it was written: leave out recipe, overrides and --out")
        admitted(folder_of(resume)[0], allow=trust, links=True)
        book, checkpoint = Book.open_for_resume(Path(resume))
        chosen, said = book.run, (*told(book.folder), *gone(book.folder))
    else:
        if trust:
            raise ConfigError("--trust is about the folder of a run that somebody else made: give it with --resume RUN")
        if not recipe:
            raise ConfigError("no recipe given: posttrain run ladder, or posttrain run --resume RUN")
        chosen = dotted.apply(recipe if isinstance(recipe, Run) else shipped(recipe), list(overrides))
        book, checkpoint = None, None
    try:
        faults.refuse_silent(chosen.fault, allow_fault)
    except ConfigError:
        if book is not None:
            book.close()
        raise
    with faults.planted(chosen.fault):
        return wait(_run(chosen, Path(out) if out else None, book, checkpoint, quiet, said))


async def _run(run: Run, out: Path | None, book: Book | None, checkpoint: Checkpoint | None, quiet: bool, said: Sequence[str]) -> Result:
    check_drivers(run)
    check_trackers(run)
    check_engine(run)
    threads = use_threads(run.threads)
    environment = make_environment(run)
    others = own_environments(run, environment)
    everywhere = distinct(environment, others)
    policy = make_policy(run, environment, others)
    if book is None:
        folder = out or Path("runs") / f"{run.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        contained = dict.fromkeys(x for e in everywhere for x in getattr(e, "contained", ()))
        book = Book.create(folder, run, facts(policy, threads, tuple(contained)))
        said = [*said, *noted(folder, run)]
    trackers = _beside(run, policy, book)
    terminal = Terminal(run)
    if not quiet:
        trackers.insert(0, terminal)
        for line in (*planted_lines(run), *policy.describe(), *words_in_tokens(run, policy), *said, f"run folder: {book.folder}"):
            terminal.say(line)
    parts = make_parts(run, policy, environment, book, trackers, others)
    if not quiet and isinstance(parts.sampler, EmbeddedEngine):
        terminal.say(parts.sampler.describe())
    progress = Progress()
    if checkpoint is not None:
        with damage_is_named(f"{checkpoint.folder}/state.json"):
            progress = where(run, checkpoint.state)
        load_weights(checkpoint.folder, parts.learner)
        parts.version = progress.version
        if not quiet:
            terminal.say(_standing(run, progress))
    stopper = Stopper()
    try:
        told = await prove_start(parts, policy.tokenizer)
        for note in told if not quiet else ():
            terminal.say(f"note: {note}")
        with stopper.listening():
            results = await Stages(parts, progress, stopper).run(checkpoint.folder if checkpoint is not None else None)
        for tracker in trackers:
            tracker.close(final(results))
    finally:
        with ExitStack() as closing:  # each is closed, whatever another one raises
            for close in (book.close, *(e.close for e in everywhere), parts.close, lambda: terminal.close({})):
                closing.callback(close)
    if not quiet:
        show(terminal.console, run, results, book.folder)
    return Result(book.folder, run, tuple(results))


def final(results: Sequence[StageResult]) -> dict[str, float]:
    """What trackers keep of a run: accuracy and mean reward on held-out tasks after each stage."""
    both = [(r.name, what, x) for r in results for what, x in (("accuracy", r.accuracy), ("reward", r.reward))]
    return {f"final/{name}/{what}": x[0] for name, what, x in both if x is not None}


def _beside(run: Run, policy: Policy, book: Book) -> list[Tracker]:
    """The run's trackers, with the tokenizer and the model's config beside the record; where they cannot be written, the book is closed."""
    try:
        keep_policy(book, policy)
        with disk_full_is_reported(book.folder / "trackers", lambda: "Nothing was lost"):
            return [*make_trackers(run, book.folder)]
    except BaseException:
        book.close()
        raise


def _standing(run: Run, p: Progress) -> str:
    """Where a resumed run stands, in words."""
    if p.stage >= len(run.stages):
        return "this run is finished: nothing is left to do"
    stage = run.stages[p.stage]
    return f"resuming at stage {p.stage + 1} of {len(run.stages)}: {stage.name}, after {p.running.step if p.running else 0} of {stage.steps} steps"


def evaluate(
    target: str | Path,
    *overrides: str,
    samples: int | None = None,
    checkpoint: str = "last",
    max_tokens: int | None = None,
    temperature: float | None = None,
    remote: Remote = Remote(),
    quiet: bool = False,
    trust: bool = False,
) -> Report:
    """Held-out accuracy, mean reward and pass@k of a run, of any model directory or hub id, or of what is served at an address.

    Args:
        target: a run folder, a model, or the address of an OpenAI-compatible endpoint; the last two are asked the `arithmetic`
            environment unless `env=...` overrides say otherwise.
        overrides: dotted changes of `env.*`, `seed`, `slots` (of an endpoint: requests at once), `threads`.
        samples: samples a prompt; default that of the run.
        checkpoint: of a run folder: `last`, `best` or a checkpoint's name.
        remote: how an endpoint is asked.
        trust: allow a run folder that somebody else made what it asks for: code, addresses, secrets, files elsewhere.
    """
    if is_url(target):
        run, weights = dotted.apply(remote_run(str(target)), list(overrides)), None
    else:
        run, weights = target_run(target, checkpoint, *overrides, parts=("model", "env", "engine"), allow=trust)
    how = run.evaluation if samples is None else replace(run.evaluation, samples=samples)
    contract = next((s.sampling for s in run.stages if isinstance(s, Reinforce)), Sampling())
    contract = replace(contract, **{k: v for k, v in (("max_tokens", max_tokens), ("temperature", temperature)) if v is not None})
    use_threads(run.threads)
    written = Path(target) / TOKENIZER if weights is not None and any(s.env for s in run.stages) else None
    asked = tuple(replace(s, sampling=contract) for s in run.stages if isinstance(s, Reinforce))
    run = replace(run, stages=asked or run.stages)
    environment = make_environment(run)
    if not environment.heldout:
        raise ConfigError("env.heldout=0 leaves no task to evaluate on; say how many, for example env.heldout=100")
    console = PlainConsole(soft_wrap=True, quiet=quiet)
    if is_url(target):
        report = wait(evaluate_remote(str(target), remote, run, environment, contract, how, console.print))
        show_report(console, str(target), environment.name, report)
        return report
    refuse(remote)
    policy = make_policy(run, environment, written=written)
    roles = make_roles(run, policy, environment)
    if weights is not None:
        load_weights(weights, roles.learner)

    async def work() -> Report:
        await roles.sync.push(roles.engine.version + 1)
        return await measure(roles.rollout, environment.heldout, contract.resolve(policy.stop_ids, roles.renderer.spell), how)

    try:
        report = wait(work())
    finally:
        roles.close()
        environment.close()
    show_report(console, str(target), environment.name, report)
    return report


def export(run_folder: str | Path, folder: str | Path, checkpoint: str = "last", trust: bool = False) -> Path:
    """A plain `save_pretrained` directory (model, tokenizer, generation config) of a run's weights, loadable anywhere.

    It is made of what lies in the run folder, so that nothing the run names elsewhere is touched. Where that is not enough (a model
    with code of its own, or a folder of an older version), the model that the run started from is loaded.
    """
    source, target = Path(run_folder), Path(folder)
    if target.exists() and any(target.iterdir()):
        raise RunFolderError(f"{target} exists and is not empty: choose another folder")
    weights = find(source, checkpoint).folder
    policy = kept_policy(source, allow=trust)
    load_weights(weights, HFLearner(policy))
    try:
        policy.save(target)
    except Exception as error:
        if (why := full(error)) is None:
            raise
        for path in target.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise RunFolderError(
            f"{why[0]}: {target} was not written, and what was begun of it is removed. {why[1]} and export again"
        ) from error
    return target
