"""The policy of a target: a run folder with its own model and tokenizer files, a model directory or a hub id.

Also what a run folder keeps of its policy, and the check that these files are still the ones of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.build.request.branch import (
    MODEL,
    TOKENIZER,
    begun_with,
    branched_policy,
    refuse_reward_model,
    run_source,
    same_base,
    was_built,
)
from posttrain.build.request.defaults import for_model, given_paths
from posttrain.build.request.input_digests import changed_files
from posttrain.build.request.trust_prompt import admitted, edit_notes, to_stderr
from posttrain.config import overrides as dotted
from posttrain.config.run import Env, Model, Reinforce, Run
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.model.locate_model import check_source
from posttrain.record.checkpoint import find, refuse_damage_beside
from posttrain.record.run_folder import RunFolder
from posttrain.record.run_reader import folder_of, is_run, run_file
from posttrain.system.errors import ConfigError, DataError, RunFolderError, UntrustedError
from posttrain.system.shell import command_line

if TYPE_CHECKING:
    from posttrain.engine.model.policy_model import Policy


def target_run(
    target: str | Path,
    checkpoint: str,
    *overrides: str,
    parts: Sequence[str],
    allow: bool,
    change: Callable[[Run], Run] = lambda run: run,
    say: Callable[[str], None] = to_stderr,
) -> tuple[Run, Path | None]:
    """(the run of a target with overrides applied, the weights to load into its policy or None).

    Args:
        parts, allow, change: see `trust_prompt.admitted`. A model directory or hub id needs no permission: the user
            named it.
        say: gets a line for each setting that is chosen for a model directory or hub id.
    """
    if is_run(target):
        run = admitted(target, *overrides, parts=parts, allow=allow, change=change)
        for line in (*edit_notes(Path(target)), *_changed(Path(target), run)):
            say(line)
        return run, find(Path(target), checkpoint).folder
    base = model_run(target)
    run = dotted.apply(base, list(overrides))
    given = given_paths(base, overrides) | {"model"}  # the target itself, as with `model=` in a run
    # Only settings that this command reads are chosen. Others would be printed and never used.
    ready = for_model(run, given, trained=not was_built(run.model.path), only=(*parts, "threads", "slots", "sampling"))
    for line in ready.lines:
        say(line)
    return change(ready.run), None


def _changed(folder: Path, run: Run) -> Iterator[str]:
    """Lines about changed files that the run reads; RunFolderError for the model, over which its weights are read."""
    for c in changed_files(folder, run):
        # The checkpoint of an adapter is loaded over this model. With another model it would be another policy.
        if c.path == "model.path":
            raise RunFolderError(
                f"{folder} holds what was learned over another model. {c.line} since the run began. Put it back as it"
                " was; or export the run, which needs its folder alone"
            )
        yield f"note: {c.line} since the run began"


def run_and_checkpoint(target: str | Path, checkpoint: str) -> tuple[str | Path, str]:
    """A target that is a checkpoint inside a run (`RUN/checkpoints/NAME`) as that run and the checkpoint's name.

    Raises:
        ConfigError: another checkpoint is named beside it.
    """
    source = run_source(target)
    if source is None or is_run(target):
        return target, checkpoint
    # `last` is the option's default, so it says nothing.
    if checkpoint not in ("last", source[1]):
        raise ConfigError(f"{target} is a checkpoint, and --checkpoint {checkpoint} names another: keep one of them")
    return source


def check_target(target: str | Path, checkpoint: str) -> None:
    """Refuse a target that is not there, before anything is imported or chosen for it.

    Raises:
        RunFolderError: a run folder without such a checkpoint, or whose weights there are a reward model's.
        ConfigError, DataError: no model can be read from there.
    """
    if is_run(target):
        refuse_reward_model(
            Path(target),
            find(Path(target), checkpoint).state,
            "posttrain eval and posttrain serve sample from a policy",
            f"the command posttrain eval says what its scores are worth; env.rewards=model:{target} uses it",
        )
    else:
        check_source("", str(target))


def model_run(target: str | Path) -> Run:
    """A run that evaluates a model of the user's."""
    return Run(recipe="eval", model=Model(path=str(target)), env=Env(), stages=(Reinforce(name="eval"),))


DIGESTED = ("base_digest", "tokenizer_digest", "template_digest")
"""Entries of run.json with which a policy is compared."""


def keep_policy(book: RunFolder, policy: Policy) -> None:
    """Write the model configuration and tokenizer, and weights beneath an adapter that are in no model directory."""
    from posttrain.engine.files.policy_files import write_config

    path = book.run.model.path
    # Weights beneath an adapter that a run built or trained are in no model directory, and its folder may be deleted.
    base = policy.lora is not None and (path is None or run_source(path) is not None)
    book.beside(TOKENIZER, policy.tokenizer.save_pretrained)
    book.beside(MODEL, lambda folder: write_config(policy, folder, base))


def kept_policy(folder: Path, allow: bool) -> Policy:
    """The policy of a run folder, built from the folder alone where that is enough. Its weights are not loaded yet.

    Raises:
        RunFolderError: its tokenizer is not the one the run was made with.
        UntrustedError: building its model needs what `model.*` names, and that is not allowed.
    """
    from posttrain.engine.files.policy_files import kept
    from posttrain.engine.model.policy_model import load_policy

    file = run_file(folder)
    stops: Any = file.facts.get("stop_ids")
    # These entries decide into which model the weights are loaded. Edits of other entries are reported elsewhere.
    changed = [n for n in file.edited if n in ("run.model", "stop_ids", *DIGESTED)]
    if changed:
        raise RunFolderError(
            f"{folder}/run.json: {', '.join(changed)} changed after it was written, so it is not known of which model"
            " its weights are. Put the file back as it was"
        )
    try:
        policy = kept(file.run.model, folder / MODEL, folder / TOKENIZER, stops)
    except DataError as error:
        # A run that built its model, or began with another run, has its model in this folder alone.
        if file.run.model.path is None or run_source(file.run.model.path) is not None:
            raise
        try:
            run = admitted(folder, parts=("model",), allow=allow)
        except UntrustedError as refusal:
            raise UntrustedError(f"{error}. So it takes the model that the run began with. {refusal}") from error
        policy = load_policy(run.model, None, run.seed)
    _same_words(folder, policy)
    return same_base(folder, policy)


def open_policy(model: Model, seed: int, most: int | None = None) -> Policy:
    """The policy at `model.path`: a model directory, a hub id, a run folder or one of its checkpoints.

    `most`: tokens of the run's longest sequence, for a model whose context is not said.
    """
    from posttrain.engine.model.policy_model import load_policy

    if run_source(model.path) is not None:
        return branched_policy(model, seed, most)
    return load_policy(model, None, seed, most=most)


def adapter_base(folder: Path) -> str:
    """The model beneath the adapter that a run trained, by the name with which PEFT finds it.

    Raises:
        ConfigError: it trained no adapter, or over weights that are nowhere but in the run folder.
    """
    model = run_file(folder).run.model
    if model.lora is None:
        raise ConfigError(f"{folder} trained all weights, so there is no adapter to write: leave --adapter out")
    if model.path is None or run_source(model.path) is not None:
        advice = ""
        if model.path is not None:
            source, name = folder_of(model.path)
            option = ("--checkpoint", name) if name else ()
            advice = ". To have the adapter alone, write what lies beneath first and train with model=my-base:"
            advice += f" {command_line('export', source, 'my-base', *option)}"
        raise ConfigError(
            f"{folder} trained an adapter over weights that {'it' if model.path is None else model.path} made, and"
            f" PEFT wants them as a model directory. Leave --adapter out, and the merged model is written{advice}"
        )
    saved = saved_adapter(model.path)
    return model.path if saved is None else saved.base


def built_policy(folder: Path, run: Run) -> Policy:
    """The policy of a run folder, as `run.model` describes it; what that names was permitted before. A model that the
    run built gets its tokenizer from the folder, so no environment is needed for its alphabet."""
    from posttrain.engine.model.policy_model import load_policy

    refuse_damage_beside(folder)
    if (branched := begun_with(folder, run)) is not None:
        return branched
    if run.model.path is not None:
        return same_base(folder, open_policy(run.model, run.seed))
    if not (folder / TOKENIZER).is_dir():
        raise RunFolderError(
            f"{folder} has no {TOKENIZER}/, which a run writes before its first step: copy the whole folder again"
        )
    policy = load_policy(run.model, None, run.seed, tokenizer_files=folder / TOKENIZER)
    _same_words(folder, policy)
    return same_base(folder, policy)


def _same_words(folder: Path, policy: Policy) -> None:
    """RunFolderError where tokenizer or chat template are not those that the run was made with."""
    facts = run_file(folder).facts
    for what, now in (("tokenizer", policy.tokenizer_digest), ("template", policy.template_digest)):
        then: Any = facts.get(f"{what}_digest")
        if then not in (None, now):
            name, means = what, "its token ids mean other text"
            if what == "template":
                name, means = "chat template", "a conversation becomes other tokens"
            raise RunFolderError(
                f"{folder / TOKENIZER} is not the {name} the run was made with ({then}; now {now}): {means}. Copy the"
                " folder again"
            )
