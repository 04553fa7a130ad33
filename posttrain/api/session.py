"""One run from its start to its end: the parts it works with, and how they are closed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.api.plan_against import watch_plan
from posttrain.build.build_engines import check_engine
from posttrain.build.build_run import facts, make_parts, make_policy, words_in_tokens
from posttrain.build.distributed_run import choose_reading, leading, over_ranks, rank_threads, refuse_policy
from posttrain.build.open_model import keep_policy
from posttrain.build.preflight_checks import prove_start
from posttrain.build.request.branch import is_branch, same_base
from posttrain.build.request.extend import ResumedRun, begin
from posttrain.build.request.input_digests import INPUTS, input_digests, task_digests
from posttrain.build.request.run_request import RunRequest
from posttrain.build.request.trust_prompt import remember_run
from posttrain.build.trackers import make_trackers, tracker_lines
from posttrain.build.weight_lineage import BEGAN, began_with, write_lineage
from posttrain.config.placement import learner_cores
from posttrain.config.run import Run
from posttrain.config.stages.stage import START, LearnsRows
from posttrain.core.measure.right import FULL
from posttrain.core.ports import Environment, Tracker
from posttrain.core.types import Task
from posttrain.diagnose.learning_verdict import PROMPTS
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.learner.torch_settings import use_deterministic, use_threads
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.environment.rows.own_prompts import HELDOUT_SHARE, PromptsEnv
from posttrain.record import run_reader
from posttrain.record.certificate import LINEAGE
from posttrain.record.checkpoint import Checkpoint
from posttrain.record.run_folder import RunFolder
from posttrain.record.run_reader import damage_is_named
from posttrain.record.runtime_objects import DATA
from posttrain.report.live.live_terminal import Terminal
from posttrain.report.live.role_table import RoleWatch
from posttrain.report.run_summary import conclude, planted_lines
from posttrain.role.memory_peaks import resident
from posttrain.role.weights.saved_weights import load_weights
from posttrain.stages import Progress, Stages, check_drivers, where
from posttrain.stages.interrupt import Interrupted, Stopper
from posttrain.stages.progress import StageResult
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import DataError, RunFolderError
from posttrain.system.files import disk_full_is_reported
from posttrain.system.shell import command_line
from posttrain.verifier.reward_source import CALLS, CountedSource

PROMPT_PARTS = ("input", "context", "system", "system_prompt")
"""Columns that usually carry a part of the prompt, in data of the form of Alpaca, Dolly and Orca."""


@contextmanager
def open_session(request: RunRequest) -> Iterator[RunSession]:
    """A run that is ready for its first step. The block's end closes it and writes its summary, which is printed unless
    the run is quiet or an error ended it."""
    session = build_session(request)
    shows_summary = not request.quiet
    try:
        yield session
    except BaseException as error:
        shows_summary = shows_summary and isinstance(error, Interrupted)
        raise
    finally:
        try:
            # Closed before the summary is made, which reads the whole record.
            session.close()
        finally:
            conclude(session.book.folder, session.terminal.console if shows_summary else None)


@dataclass
class RunSession:
    """A run with its parts, from before its first step to its end."""

    run: Run
    book: RunFolder
    parts: RunParts
    policy: Policy
    terminal: Terminal
    progress: Progress
    checkpoint: Path | None
    quiet: bool
    stopper: Stopper
    closing: ExitStack
    """Closes each part, also where closing another one raises."""

    @property
    def results(self) -> tuple[StageResult, ...]:
        return self.progress.results

    async def play(self) -> None:
        """Prove what must hold before the first step, then run the stages that are left, in order."""
        notes = await prove_start(self.parts, self.policy.tokenizer)
        for note in notes if not self.quiet else ():
            self.terminal.say(f"note: {note}")
        try:
            with self.stopper.listening():
                for stage in Stages(self.parts, self.progress, self.stopper).left(self.checkpoint):
                    if isinstance(pool := self.parts.sampler, EnginePool):
                        self.terminal.roles = RoleWatch(pool, self.parts, stage.clock)
                    await stage.run()
                    if self.stopper.asked:
                        break
        finally:
            # Also after an error: nothing that was logged is lost, and the program may begin another run.
            for tracker in self.parts.trackers:
                tracker.close(final_scalars(self.results))

    def close(self) -> None:
        """Close the parts that the session made. The environments and a resumed book belong to the request."""
        self.closing.close()


def build_session(request: RunRequest) -> RunSession:
    """Build the parts of a run. If one of them fails, those built before it are closed."""
    with ExitStack() as cleanup:
        session = _build(request, cleanup)
        # All parts are built. From here on the session closes them, and no longer this block.
        session.closing = cleanup.pop_all()
    return session


def new_folder(runs: Path, recipe: str) -> Path:
    """Make `runs/RECIPE-TIME`. Runs that begin in the same second get `-2`, `-3` and so on.

    Raises:
        RunFolderError: it cannot be made.
    """
    began = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = runs / (began if number == 1 else f"{began}-{number}")
        try:
            # It raises if the folder exists: two runs that begin at once cannot both get it.
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not runs.is_dir():
                raise RunFolderError(f"cannot create run folder {folder}: {runs} is not a folder") from None
        except OSError as error:
            raise RunFolderError(f"cannot create run folder {folder}: {error.strerror}") from error
        number += 1


def _build(request: RunRequest, cleanup: ExitStack) -> RunSession:
    """Builds the parts in order. The run folder is made only after the checks before it have passed.

    `cleanup` gets a function for each part that closes it.
    """
    # Memory is read before the model is loaded: what the run takes is counted above it.
    run, book, quiet, resident_before = request.run, request.book, request.quiet, resident()
    check_drivers(run)
    check_engine(run)
    in_ranks = request.ranks.world is not None
    threads = use_threads(rank_threads(run, request.ranks) if in_ranks else run.threads or learner_cores(run.placement))
    # A setting of the whole process. It is undone at the end, so that a later run in the same program does not have it.
    cleanup.callback(use_deterministic(run.deterministic))
    # Ranks meet before a model is loaded: whether this process loads it depends on what they see.
    lead = cleanup.enter_context(leading(run, request.ranks))
    weightless_policy, reading_notes = choose_reading(run, lead) if lead is not None else (None, ())
    policy = session_policy(request, weightless_policy)
    if lead is not None:
        refuse_policy(policy, lead, weightless_policy is not None)
    notes = (*request.notes, *reading_notes)
    if book is None:
        # The folder is made after the policy: so a model that cannot be loaded or shared leaves no folder behind.
        folder = request.out or new_folder(Path("runs"), run.recipe)
        contained = dict.fromkeys(x for e in request.environments for x in e.abilities.contained)
        by_stage = {s.name: request.others.get(s.name, request.environment) for s in run.stages}
        begun_with = {**began_with(run, policy, by_stage), **prompt_count(request.environment)}
        begun_with[BEGAN][INPUTS] = {**input_digests(run), **task_digests(run, by_stage)}
        book = RunFolder.create(
            folder, run, {**facts(policy, threads, tuple(contained), resident_before), **begun_with, **request.recorded}
        )
        cleanup.callback(book.close)
        if request.objects.data:
            book.beside(DATA, request.objects.write_data)
        notes = (*notes, *heldout_notes(run, by_stage), *unread_notes(run, by_stage), *remember_run(folder, run))
    else:
        # Only here, after the model: what is refused leaves the record as it was.
        book.cut_back(request.checkpoint)
        restore_call_counts(book.folder, (request.environment, *request.others.values()))
    notes = (*notes, *note_session(book, request.checkpoint))
    trackers = start_trackers(run, policy, book)
    terminal = Terminal(run)
    cleanup.callback(lambda: terminal.close({}))
    if not quiet:
        trackers.insert(0, terminal)
        opening_lines = (*planted_lines(run), *policy.describe(), *words_in_tokens(run, policy), *notes)
        opening_lines += (*price_lines(run), *right_lines(run), f"run folder: {book.folder}", *tracker_lines(trackers))
        for line in opening_lines:
            terminal.say(line)
    say = (lambda line: None) if quiet else terminal.say
    parts = make_parts(run, policy, request.environment, book, trackers, request.others, say, lead)
    parts = parts if lead is None else over_ranks(parts, run, lead)
    cleanup.callback(parts.close)
    if not quiet and lead is None:
        # Added to the list that `parts` has, so it gets every step. It reads the model's shape from the run folder.
        trackers.append(watch_plan(run, book.folder, resident_before, terminal.say))
    if not quiet and isinstance(parts.sampler, EmbeddedEngine | EnginePool):
        terminal.say(parts.sampler.describe())
    checkpoint = request.checkpoint
    if request.longer is not None:
        # Recorded only after all parts are built, since each of them could still refuse the new settings.
        checkpoint = begin(request.longer, book, checkpoint)
    progress = restore_progress(run, parts, checkpoint, request.longer)
    if checkpoint is not None and not quiet:
        terminal.say(resume_line(run, progress, book.folder))
    resumed_from = checkpoint.folder if checkpoint is not None else None
    return RunSession(
        run, book, parts, policy, terminal, progress, resumed_from, quiet, Stopper(on_step=request.on_step), cleanup
    )


def restore_call_counts(folder: Path, environments: Iterable[Environment]) -> None:
    """Sets the counts of reward sources with a limit of calls to those in the record of the resumed run."""
    sources = [s for e in environments for s in getattr(e, "rewards", ()) if isinstance(s, CountedSource)]
    steps = run_reader.steps(folder) if sources else ()
    for source in sources:
        name = f"verifier/{source.name}/{CALLS}"
        # Counts depend on time, so the record has them in `clock` (`training_step`). The largest one is the last.
        source.calls = max((int(s.clock.get(name, 0)) for s in steps), default=0)


def price_lines(run: Run) -> tuple[str, ...]:
    """Returns the effect and the cost of `deterministic=true`, as lines for people."""
    if not run.deterministic:
        return ()
    return (
        "deterministic: torch's deterministic algorithms, and passes of a fixed size in the engine, whose idle rows are"
        " its price (docs/guides/precision.md has figures)",
    )


def right_lines(run: Run) -> tuple[str, ...]:
    """Returns lines that say what counts as a right answer, where answers are judged."""
    if not run.env.judges:
        return ()
    # The outcome is what is measured, where anything is, and else what is paid, as in `Env.named_right`.
    measured = run.env.measured or any(r.measured for r in run.env.rewards)
    scored_by_model = any(r.graded for r in run.env.rewards if r.measured == measured)
    if run.env.right is None and scored_by_model:
        return ("right: no reward, since the score of a model is a grade (env.right=X says which is right)",)
    at = FULL if run.env.right is None else run.env.right
    return (f"right: a reward of at least {at:g} (env.right); of rewards other than 0 and 1 the mean leads",)


def prompt_count(env: Environment) -> dict[str, int]:
    """The entry of run.json with the number of distinct prompts; empty where tasks are generated without end."""
    rows, key = env.abilities.rows, env.abilities.key
    if rows is not None and key is not None:
        return {PROMPTS: len({key(r.task) for r in rows})}
    return {} if env.train.count is None else {PROMPTS: env.train.count + len(env.heldout)}


def heldout_notes(run: Run, by_stage: Mapping[str, Environment]) -> tuple[str, ...]:
    """A note where the data lets fewer prompts be held out than were asked for."""
    out: list[str] = []
    for stage, env in by_stage.items():
        asked, held, rest = run.env_of(run.stage(stage)).heldout, len(env.heldout), env.train.count
        if rest is not None and held < asked:
            out.append(
                f"env.heldout={asked}: {held} of {held + rest} rows are held out, as at most one distinct prompt in"
                f" {HELDOUT_SHARE} is, with all its rows, but at least one of each data set"
            )
    return tuple(dict.fromkeys(out))


def unread_notes(run: Run, by_stage: Mapping[str, Environment]) -> tuple[str, ...]:
    """A note about text in `PROMPT_PARTS` that the prompts do not have, where a stage learns from the user's own rows.

    Of other columns (ids, sources, categories) nothing is said, and nothing of rows whose prompts are messages or that
    are texts: there such columns are usually not meant for the model.
    """
    out: list[str] = []
    for stage, env in by_stage.items():
        # A class of the user's own may put further columns into what is learned.
        own = env.__class__ is not PromptsEnv
        if own or not isinstance(env, PromptsEnv) or not isinstance(run.stage(stage), LearnsRows):
            continue
        asked = [r.task for r in env.rows if r.task.prompt and isinstance(r.task.prompt, str)]
        names = [n for n in PROMPT_PARTS if n != env.answer_column and any(_lacks(t, n) for t in asked)]
        if names:
            out.append(
                f"note: the prompts do not have the text of these columns: {', '.join(names)}. What the model shall"
                f" read must stand in {env.prompt_column!r} (env.args.prompt_column)"
            )
    return tuple(dict.fromkeys(out))


def _lacks(task: Task, column: str) -> bool:
    """True where this column of a row has text that the row's prompt has not."""
    return isinstance(text := task.info.get(column), str) and text.strip() not in task.prompt


def note_session(book: RunFolder, checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Write the lineage record of a run that begins or is resumed. If it cannot be made, that is only a line for
    people: the run goes on, but its weights cannot be exported or used by another run."""
    try:
        with disk_full_is_reported(book.folder / LINEAGE, lambda: "Nothing was lost"):
            write_lineage(book.folder, "" if checkpoint is None else checkpoint.name)
    except (RunFolderError, DataError) as error:
        return (f"no lineage record was written: {error}",)
    return ()


def session_policy(request: RunRequest, blank: Policy | None = None) -> Policy:
    """The policy of the run; `blank` if its model is not loaded in this process.

    A resumed branch has its model in its own folder. Only if it was interrupted before it kept the weights of its
    start, the other run is read once more.
    """
    run, book, checkpoint = request.run, request.book, request.checkpoint
    if book is None:
        return make_policy(run, request.environment, request.others, blank=blank)
    if not is_branch(book.folder):
        return same_base(book.folder, make_policy(run, request.environment, request.others, blank=blank))
    # Without a checkpoint, a branch goes on from the weights of its start, which may be kept in its folder already.
    start_is_kept = (book.folder / "kept" / START).is_dir()
    own_folder = book.folder if checkpoint is not None or start_is_kept else None
    policy = make_policy(run, request.environment, request.others, own=own_folder)
    if checkpoint is None and start_is_kept:
        load_weights(book.kept(START), HFLearner(policy))
    return policy


def restore_progress(
    run: Run, parts: RunParts, checkpoint: Checkpoint | None, longer: ResumedRun | None = None
) -> Progress:
    """The progress that a checkpoint records; its weights are loaded into the learner."""
    if checkpoint is None:
        return Progress()
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        progress = where(run, checkpoint.state if longer is None or longer.state is None else longer.state)
    load_weights(checkpoint.folder, parts.learner)
    parts.version = progress.version
    return progress


def final_scalars(results: Sequence[StageResult]) -> dict[str, float]:
    """The summary for trackers: the held-out measurements at the end of each stage, as `final/STAGE/NAME`."""
    named = ("accuracy", "reward", "loss", "agreement")
    return {f"final/{r.name}/{n}": x[0] for r in results for n in named if (x := getattr(r, n)) is not None}


def start_trackers(run: Run, policy: Policy, book: RunFolder) -> list[Tracker]:
    """The run's trackers. The tokenizer and the model's config are written into the run folder first."""
    keep_policy(book, policy)
    with disk_full_is_reported(book.folder / "trackers", lambda: "Nothing was lost"):
        return [*make_trackers(run, book.folder)]


def resume_line(run: Run, p: Progress, folder: Path) -> str:
    """At which stage and step a resumed run continues, as a line of text."""
    if p.stage >= len(run.stages):
        last = run.stages[-1]
        longer = command_line("run", "--resume", folder, f"{last.name}.steps={2 * last.steps}")
        return "this run is finished: nothing is left to do" + (f". Longer: {longer}" if p.reopening else "")
    stage = run.stages[p.stage]
    return (
        f"resuming at stage {p.stage + 1} of {len(run.stages)}: {stage.name}, after"
        f" {p.running.step if p.running else 0} of {stage.steps} steps"
    )
