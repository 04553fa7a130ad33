"""The run that a command asks for, and all checks that need no torch, so that a wrong setting is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain import faults
from posttrain.build.build_environments import check_environment, distinct, own_environments
from posttrain.build.request.algorithm_file import check_same, without_algorithm
from posttrain.build.request.branch import MODEL, is_branch, pinned, run_source, was_built
from posttrain.build.request.defaults import for_model, given_paths, room_for_minibatches
from posttrain.build.request.extend import ResumedRun, check_changes, extension
from posttrain.build.request.input_digests import accepted, changed_files, changed_tasks, input_notes, refuse_gone
from posttrain.build.request.own_pieces import own_classes
from posttrain.build.request.run_file import is_recipe, is_yaml, run_of
from posttrain.build.request.settings_from_rows import rewards_for_rows, with_epochs
from posttrain.build.request.trust_prompt import admitted, edit_notes, missing_notes, permit_file
from posttrain.build.request.user_objects import UserObjects, given_again, given_notes, object_notes, recorded
from posttrain.build.reward_paths import check_reward_models
from posttrain.build.trackers import check_trackers
from posttrain.config import overrides as dotted
from posttrain.config.engines import VLLM, Embedded
from posttrain.config.model_settings import check_frozen
from posttrain.config.placement import check_machine
from posttrain.config.rank_limits import RankOptions, check_ranks, torchrun_restarts, under_torchrun
from posttrain.config.run import BUILT_CONTEXT, MIXTURES, Run
from posttrain.core.gauge import Step
from posttrain.core.ports import Environment
from posttrain.diagnose.next_steps import asked_words
from posttrain.engine.files.check_folder import read_object
from posttrain.engine.model.architecture_kinds import refuse_same_bits, refuse_vllm
from posttrain.engine.model.locate_model import check_source, locate
from posttrain.engine.vllm import installed
from posttrain.environment.make import environment as named_environment
from posttrain.recipe.recipes import listed
from posttrain.record.checkpoint import Checkpoint
from posttrain.record.run_folder import RunFolder
from posttrain.record.run_reader import folder_of, run_file
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run besides recipe and overrides: the other arguments of `posttrain.run`."""

    out: str | Path | None = None
    resume: str | Path | None = None
    quiet: bool = False
    allow_fault: bool = False
    trust: bool = False
    accept_changed: bool = False
    """Resume the run although files that it reads have changed since it was begun."""
    ranks: RankOptions = RankOptions()
    handed: UserObjects = UserObjects()
    """Objects of the Python program that starts it."""
    on_step: Callable[[Step], object] | None = None
    """Called after each step; it ends the run where it returns True."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The run that was asked for, with its environments. `book` and `checkpoint` are set where a run is resumed."""

    run: Run
    out: Path | None = None
    book: RunFolder | None = None
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    """Lines about its settings and its folder, printed at the start."""
    quiet: bool = False
    environments: tuple[Environment, ...] = ()
    """The environments of all stages, each once; the run's own first."""
    others: Mapping[str, Environment] = field(default_factory=dict[str, Environment])
    """The environments of stages that have their own, by the stage's name."""
    longer: ResumedRun | None = None
    """Set where a resumed run gets other settings."""
    recorded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts that run.json records beside the settings: why some were chosen, and which run it is a branch of."""
    given: frozenset[str] | None = None
    """Full paths of the settings that the user gave with a recipe. All others may be chosen for a real model. None: the
    user gave a whole run, and nothing is chosen."""
    objects: RuntimeObjects = RuntimeObjects()
    """Objects that a Python program handed to the run."""
    ranks: RankOptions = RankOptions()
    """The processes that train its model together."""
    on_step: Callable[[Step], object] | None = None
    """Called after each step."""

    @property
    def environment(self) -> Environment:
        """The run's environment, used by all stages that have none of their own."""
        return self.environments[0]


@contextmanager
def requested(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> Iterator[RunRequest]:
    """The run that was asked for, after all checks that need no torch. Its environments and fault end with the
    block."""
    try:
        with _prepared(recipe, overrides, options) as request:
            yield request
    except BaseException:
        # Under torchrun the other ranks wait for this process to begin.
        if under_torchrun():
            from posttrain.build.distributed_run import dismiss

            dismiss(options.ranks)
        raise


@contextmanager
def _prepared(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> Iterator[RunRequest]:
    with ExitStack() as closing:
        # torchrun repeats the command line of a new run, whose folder exists by now. That run is resumed.
        if started_again(options):
            recipe, overrides, options = "", (), replace(options, out=None, resume=options.out)
        asked = (resumed_run if options.resume is not None else new_run)(recipe, overrides, options)
        if asked.book is not None:
            closing.callback(asked.book.close)
        run = asked.run
        # Checks without an environment come first, since an environment may read much data, or start programs.
        faults.refuse_silent(run.fault, options.allow_fault)
        check_ranks(run, options.ranks)
        check_early(run, own=None if asked.book is None else asked.book.folder)
        closing.enter_context(faults.planted(run.fault))
        environment = named_environment(run.env, run.seed, asked.objects)
        closing.callback(environment.close)
        others = own_environments(run, environment, asked.objects)
        environments = distinct(environment, others)
        for other in environments[1:]:
            closing.callback(other.close)
        asked = settled(same_tasks(asked, environment, others, options.accept_changed))
        if asked.book is None:
            # Passes become steps here, where the number of tasks and the batch are known. A resumed run has its steps.
            counted, lines = with_epochs(asked.run, asked.given, environment, others)
            asked = replace(asked, run=counted, notes=(*asked.notes, *lines))
        # Once more, now with the settings that were chosen for the model, such as its device.
        check_environment(environment, [s for s in asked.run.stages if s.env is None], asked.run.env)
        check_ranks(asked.run, options.ranks)
        asked = replace(asked, quiet=options.quiet, ranks=options.ranks, on_step=options.on_step)
        yield replace(asked, environments=tuple(environments), others=others)


def started_again(options: RunOptions) -> bool:
    """True where torchrun has started this command again after a process died: then the run that it began goes on."""
    again = under_torchrun() and torchrun_restarts() > 0
    return again and options.out is not None and (Path(options.out) / "run.json").exists()


def new_run(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> RunRequest:
    """A new run from a recipe, a file or a `Run`, with overrides and the objects of a program."""
    if options.trust and not is_yaml(recipe):
        raise ConfigError(
            "--trust is about the folder or the file of a run that somebody else made: give it with --resume RUN, or"
            " with FILE.yaml"
        )
    if not recipe:
        raise ConfigError(
            f"no recipe given: {command_line('run', 'RECIPE')}, or {command_line('run', '--resume', 'RUN')}\n{listed()}"
        )
    if options.out is not None:
        RunFolder.refuse(options.out)
    # No command can repeat a run with objects of a program, so its words are not recorded.
    words = asked_words(recipe, overrides) if options.handed == UserObjects() else {}
    overrides, handed = without_algorithm(overrides, options.handed)
    base, objects = handed.place(run_of(recipe))
    room = room_for_minibatches(base, overrides) if is_recipe(recipe) else []
    # `room` only has settings that the user left open, so no setting is given twice.
    run, origin = pinned(dotted.apply(base, [*room, *overrides]))
    objects = replace(objects, pieces=own_classes(run))  # overrides may have named others than the base has
    user_paths = given_paths(base, overrides) | handed.paths
    if isinstance(recipe, str) and is_yaml(recipe):
        permit_file(recipe, run, user_paths, options.trust)
    out = Path(options.out) if options.out else None
    about = {**words, **origin, **recorded(objects)}
    given = user_paths if is_recipe(recipe) else None
    run, unjudged = rewards_for_rows(run, given or (), objects)
    notes = (*object_notes(objects), *unjudged)
    return RunRequest(run=run, out=out, notes=notes, recorded=about, given=given, objects=objects)


def settled(request: RunRequest) -> RunRequest:
    """The request in which open settings are chosen for the user's model. With a user's model this imports torch, to
    look at the machine."""
    if request.given is None:
        return request
    ready = for_model(
        request.run, request.given, trained=not was_built(request.run.model.path), objects=request.objects
    )
    facts = {"chosen": dict(ready.chosen), **request.recorded}
    return replace(request, run=ready.run, notes=(*request.notes, *ready.lines), recorded=facts)


def resumed_run(recipe: str | Run, overrides: Sequence[str], options: RunOptions) -> RunRequest:
    """A run that was interrupted or is finished, with its recorded settings and those that change now."""
    assert options.resume is not None
    # No recipe is given here, so the first word may be an override already.
    if isinstance(recipe, str) and "=" in recipe:
        recipe, overrides = "", (recipe, *overrides)
    if recipe or options.out:
        raise ConfigError(
            "--resume goes on with the run as it was written: leave out recipe and --out. Settings may follow that"
            " make it longer, such as rl.steps=200"
        )
    folder = folder_of(options.resume)[0]
    overrides, handed = without_algorithm(overrides, options.handed)
    # A missing file is reported first, before anything is imported or the user is asked for permission.
    if not options.accept_changed:
        refuse_gone(folder)
    # The user's permission comes next: digests and objects read files that the folder names.
    run = admitted(folder, *overrides, allow=options.trust, links=True)
    stored = run_file(folder).run
    check_same(folder, stored, handed)
    check_changes(folder, stored, run, overrides)
    objects = given_again(folder, handed)
    inputs = accepted(folder, changed_files(folder, run), options.accept_changed)
    # From here on this process has the lock of the folder, so after an error the book must be closed. The session cuts
    # the record back to the checkpoint, when nothing can refuse the run any more.
    book, checkpoint = RunFolder.open_for_resume(Path(options.resume), cut=False)
    try:
        longer = replace(extension(book, checkpoint, run), inputs=inputs) if overrides or inputs else None
    except BaseException:
        book.close()
        raise
    # All overrides repeat what the run has already.
    if longer is not None and not (longer.changes or inputs):
        longer = None
    notes = (*edit_notes(book.folder), *missing_notes(book.folder), *given_notes(folder, objects))
    notes = (*notes, *input_notes(folder, inputs), *(longer.lines if longer is not None else ()))
    return RunRequest(run=run, book=book, checkpoint=checkpoint, notes=notes, objects=objects, longer=longer)


def same_tasks(
    asked: RunRequest, environment: Environment, others: Mapping[str, Environment], accept: bool
) -> RunRequest:
    """The request of a resumed run, after checking that its stages have the tasks with which it began.

    Raises:
        RunFolderError: they have other tasks, and the user did not accept that (`accept`).
    """
    book, run = asked.book, asked.run
    if book is None:
        return asked
    changed = changed_tasks(book.folder, run, {s.name: others.get(s.name, environment) for s in run.stages})
    if not (inputs := accepted(book.folder, changed, accept)):
        return asked
    longer = asked.longer or extension(book, asked.checkpoint, run)
    return replace(asked, longer=replace(longer, inputs={**longer.inputs, **inputs}))


def check_early(run: Run, own: Path | None = None) -> None:
    """Checks what is not about one setting alone: missing packages, missing models, answers longer than the context.

    Later checks need torch: the files of a model, its tokenizer, the device, the engine.

    Args:
        own: the folder of a resumed run. A branch has there the model with which it began.

    Raises:
        ConfigError, DataError: one of these is wrong.
    """
    check_trackers(run)
    _check_architecture(run, own)
    check_installed(run)
    check_frozen(run.model.lora, run.model.quantize)
    check_reward_models(run)
    for path, model in _models(run):
        if run_source(model) is None and not (path == "model.path" and own is not None and is_branch(own)):
            check_source(path, model)
    if run.model.path is None:
        check_lengths(run, run.model.context or BUILT_CONTEXT)


def _check_architecture(run: Run, own: Path | None) -> None:
    """Raises ConfigError for an engine that cannot serve the model's architecture: vLLM, if the model has a recurrent
    state whose weights could not be checked there; the embedded engine, if it shall compute the same bits each time
    (`deterministic`, `exact`) and the model is computed in batches whose shape varies."""
    same_bits = isinstance(run.engine, Embedded) and (run.deterministic or run.exact)
    if run.model.path is None:
        if same_bits and run.model.arch in MIXTURES:
            refuse_same_bits({"model_type": run.model.arch, "num_experts": run.model.experts})
        return
    if isinstance(run.engine, Embedded) and not same_bits:
        return
    source = run_source(run.model.path)
    # A run folder keeps the configuration of its model; a directory has its own.
    run_folder = own or (None if source is None else source[0])
    file = (run_folder / MODEL if run_folder is not None else Path(locate(run.model.path))) / "config.json"
    # For a hub id the file may not be here yet. The same is checked again before vLLM starts.
    if file.is_file():
        (refuse_same_bits if same_bits else refuse_vllm)(read_object(file))


def check_installed(run: Run) -> None:
    """ConfigError where the engine's package is not installed, or the machine lacks what its placement needs."""
    check_machine(run.placement)
    if isinstance(run.engine, VLLM) and run.engine.url is None:
        installed()


def _models(run: Run) -> Iterator[tuple[str, str]]:
    """(path of the setting, model directory or hub id) of every model that the run loads."""
    if run.model.path is not None:
        yield "model.path", run.model.path
    if isinstance(run.engine, Embedded) and run.engine.draft is not None:
        yield "engine.draft", run.engine.draft
    for stage in run.stages:
        for name in type(stage).models:
            if (path := getattr(stage, name)) is not None:
                yield f"{stage.name}.{name}", path


def check_lengths(run: Run, context: int) -> None:
    """ConfigError for a stage whose longest answer leaves no room for a prompt in the context."""
    for stage in run.stages:
        if stage.contract is not None and stage.contract.max_tokens >= context:
            raise ConfigError(
                f"{stage.name}.sampling.max_tokens={stage.contract.max_tokens} leaves no room for a prompt in a context"
                f" of {context} tokens; lower it (posttrain eval: --max-tokens N), or raise model.context where the"
                " model has more positions"
            )
