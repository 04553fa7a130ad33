"""The target of a command: a run folder with its own model and tokenizer files, or a model directory or hub id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.api import overrides as dotted
from posttrain.api.admit import admitted
from posttrain.core.book import Book
from posttrain.core.checkpoint import find
from posttrain.core.errors import DataError, RunFolderError, UntrustedError
from posttrain.core.reader import is_run, run_file
from posttrain.core.run import Env, Model, Reinforce, Run
from posttrain.engine.kept import kept, write_config
from posttrain.engine.models import Policy, load_policy

MODEL, TOKENIZER = "model", "tokenizer"
"""Folders inside a run folder, with the policy's model configuration and tokenizer at the start of the run."""


def target_run(
    target: str | Path,
    checkpoint: str,
    *overrides: str,
    parts: Sequence[str],
    allow: bool,
    change: Callable[[Run], Run] = lambda run: run,
) -> tuple[Run, Path | None]:
    """(the run of a target with overrides applied, the weights to load into its policy or None).

    Args:
        parts, allow, change: see `admit.admitted`. A model directory or hub id needs no permission: the user named it.
    """
    if is_run(target):
        run = admitted(target, *overrides, parts=parts, allow=allow, change=change)
        return run, find(Path(target), checkpoint).folder
    return change(dotted.apply(model_run(target), list(overrides))), None


def model_run(target: str | Path) -> Run:
    """A run that evaluates a model of the user's."""
    return Run(recipe="eval", model=Model(path=str(target)), env=Env(), stages=(Reinforce(name="eval"),))


# --- what a run folder keeps of its policy ----------------------------------------------------------------------------


def keep_policy(book: Book, policy: Policy) -> None:
    """Write the model configuration and tokenizer that `kept_policy` and `show` read."""
    book.beside(TOKENIZER, policy.tokenizer.save_pretrained)
    book.beside(MODEL, lambda folder: write_config(policy, folder))


def kept_policy(folder: Path, allow: bool) -> Policy:
    """The policy of a run folder, built from the folder alone where that is enough. Its weights are not loaded yet.

    Raises:
        RunFolderError: its tokenizer is not the one the run was made with.
        UntrustedError: building its model needs what `model.*` names, and that is not allowed.
    """
    found = run_file(folder)
    stops: Any = found.facts.get("stop_ids")
    try:
        policy = kept(found.run.model, folder / MODEL, folder / TOKENIZER, stops)
    except DataError as error:
        if found.run.model.path is None:
            raise
        try:
            run = admitted(folder, parts=("model",), allow=allow)
        except UntrustedError as asked:
            raise UntrustedError(f"{error}. So it takes the model that the run began with. {asked}") from error
        return load_policy(run.model, None, run.seed)
    _same_tokenizer(folder, found.facts.get("tokenizer_digest"), policy)
    return policy


def built_policy(folder: Path, run: Run) -> Policy:
    """The policy of a run folder, as `run.model` describes it.

    A model that was built by the run gets its tokenizer from the folder, so no environment is needed for its alphabet.
    """
    if run.model.path is not None:
        return load_policy(run.model, None, run.seed)
    if not (folder / TOKENIZER).is_dir():
        raise RunFolderError(
            f"{folder} has no {TOKENIZER}/, which a run writes before its first step: copy the whole folder again"
        )
    policy = load_policy(run.model, None, run.seed, tokenizer_files=folder / TOKENIZER)
    _same_tokenizer(folder, run_file(folder).facts.get("tokenizer_digest"), policy)
    return policy


def _same_tokenizer(folder: Path, then: object, policy: Policy) -> None:
    if then not in (None, policy.tokenizer_digest):
        raise RunFolderError(
            f"{folder / TOKENIZER} is not the tokenizer the run was made with ({then}; now {policy.tokenizer_digest}):"
            " its token ids mean other text. Copy the folder again"
        )
