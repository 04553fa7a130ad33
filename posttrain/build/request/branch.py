"""A run that begins with the weights of another one: `model=runs/X`, or of one checkpoint,
`model=runs/X/checkpoints/NAME`.

Model configuration, tokenizer and weights come from that folder alone. The new run's settings name the checkpoint, and
its folder has a copy of the model, so it can go on even if the other run is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config.model_settings import goes_on
from posttrain.config.run import Model, Run
from posttrain.config.stages.reward_model_settings import trained_at
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import folder_of, is_run, run_file
from posttrain.system.errors import ConfigError, DataError, RunFolderError

MODEL, TOKENIZER = "model", "tokenizer"
"""Folders inside a run folder, with the policy's model configuration and tokenizer at the start of the run."""
LONGEST_CHAIN = 32
"""How far a line of branches (a run that began with a run that began with ...) is followed at most."""


def refuse_reward_model(folder: Path, state: Mapping[str, Any], what: str, otherwise: str) -> None:
    """Raises RunFolderError if a checkpoint of this run has the weights of a reward model.

    Args:
        state: the checkpoint's state.
        what: what is not possible with a reward model, for the message.
        otherwise: a sentence about what to do instead.
    """
    stage = trained_at(run_file(folder).run.stages, state)
    if stage is not None:
        raise RunFolderError(f"{folder} holds the reward model that {stage.name} trained, and {what}. {otherwise}")


def run_source(path: str | Path | None) -> tuple[Path, str] | None:
    """(run folder, name of the checkpoint, `last` where none is named) of a path; None where it is no run."""
    if path is None:
        return None
    folder, inside = folder_of(Path(path).expanduser())
    return (folder, inside or "last") if is_run(folder) else None


def pinned(run: Run) -> tuple[Run, dict[str, Any]]:
    """(the run, whose settings name the checkpoint with which it begins; what run.json records about that checkpoint).

    Raises:
        RunFolderError: there is no checkpoint yet, or it is damaged.
    """
    source = run_source(run.model.path)
    if source is None:
        saved = saved_adapter(run.model.path) if run.model.path is not None else None
        if saved is None:
            return run, {}
        # No run: a folder with a saved adapter, which is trained further. Its settings become the run's.
        lora = goes_on(run.model.lora, saved.lora, f"model={run.model.path}")
        return replace(run, model=replace(run.model, lora=lora)), {}
    # From here on: the run begins with another run. `last` is replaced by the checkpoint's own name, since the other
    # run may go on and then has another last checkpoint.
    folder, name = source
    checkpoint, file = find(folder, name), run_file(folder)
    refuse_reward_model(
        folder,
        checkpoint.state,
        "no policy starts from it",
        f"Begin with the model that it began with, and reward it: env.rewards=model:{folder}",
    )
    origin = {
        "run": str(folder),
        "identity": file.identity,
        "recipe": file.run.recipe,
        "checkpoint": checkpoint.name,
        "version": checkpoint.state.get("version"),
        "weights": checkpoint.state.get("weights"),
        "before": file.facts.get("branched_from"),
    }
    path = str(folder / "checkpoints" / checkpoint.name)
    trained_lora = file.run.model.lora
    # An adapter that was trained goes on with its own settings; weights without one may get a new adapter.
    lora = run.model.lora if trained_lora is None else goes_on(run.model.lora, trained_lora, f"model={folder}")
    quantize = run.model.quantize if trained_lora is None else file.run.model.quantize
    if run.model.quantize not in (None, quantize):
        raise ConfigError(
            f"model={folder}: its adapter was trained over weights that were held otherwise, and goes on over them."
            " Leave model.quantize out; or export it merged first and give the merged model"
        )
    model = replace(run.model, path=path, lora=lora, quantize=quantize)
    return replace(run, model=model), {"branched_from": origin}


def was_built(path: str | Path | None) -> bool:
    """True where the weights at a path go back to a model that a run built, over any number of branches."""
    # A damaged folder may name itself, so the line is followed for `LONGEST_CHAIN` runs at most.
    for _ in range(LONGEST_CHAIN):
        source = run_source(path)
        if source is None:
            return False
        path = run_file(source[0]).run.model.path
        if path is None:
            return True
    return False


def branched_policy(model: Model, seed: int, most: int | None = None) -> Any:
    """The policy (`engine.model.policy_model.Policy`) at `model.path`, which is a run or one of its checkpoints.

    The weights beneath an adapter are the run's own copy, where it has one, or else those of the model that it was
    given. `most`: tokens of the run's longest sequence, for a model whose context is not said.

    Raises:
        DataError: the model needs code of its own, so its folder is not enough.
        RunFolderError: the model beneath the adapter has changed since.
    """
    from posttrain.engine.files.policy_files import BASE
    from posttrain.engine.learner.learner import HFLearner
    from posttrain.engine.model.locate_model import check_source
    from posttrain.engine.model.policy_model import load_policy, with_adapter
    from posttrain.role.weights.saved_weights import load_weights

    source = run_source(model.path)
    assert source is not None
    checkpoint = find(*source)
    before = run_file(source[0]).run.model
    # The other run's policy is rebuilt as it was, with its own adapter and its own quantization, and its weights are
    # loaded into it. After that a new adapter may be added.
    own_adapter = before.lora
    as_it_was = replace(model, lora=own_adapter, quantize=before.quantize)
    try:
        # The checkpoint has all weights that trained. The frozen ones beneath an adapter are in the run folder, if it
        # keeps them, or in the model that the run was given.
        if own_adapter is None or before.path is None or (source[0] / MODEL / BASE).exists():
            policy = kept_in(source[0], as_it_was, most)
        else:
            check_source(f"{source[0]}: model.path", before.path)
            policy = same_base(source[0], load_policy(replace(as_it_was, path=before.path), None, seed, most=most))
    except DataError as error:
        raise DataError(
            f"{error}. To begin with its weights, write them as a plain model first: posttrain export {source[0]}"
            f" MODEL --checkpoint {checkpoint.name}, then model=MODEL"
        ) from error
    load_weights(checkpoint.folder, HFLearner(policy))
    policy = replace(policy, source=f"from {model.path}")
    return policy if own_adapter is not None else with_adapter(policy, model, seed)


def kept_in(folder: Path, model: Model, most: int | None = None) -> Any:
    """The policy that a run folder keeps, with the context, dtype and device of `model`; its weights are not loaded."""
    from posttrain.engine.files.policy_files import kept

    stops: Any = run_file(folder).facts.get("stop_ids")
    return kept(model, folder / MODEL, folder / TOKENIZER, stops, most)


def same_base(folder: Path, policy: Any) -> Any:
    """Returns the policy; RunFolderError where its frozen weights are not those with which the folder's run began."""
    from posttrain.engine.model.policy_model import base_digest

    then: Any = run_file(folder).facts.get("base_digest")
    if policy.lora is not None and then is not None and then != (now := base_digest(policy)):
        raise RunFolderError(
            f"{folder} holds an adapter over weights with digest {then}, and those of {policy.source} have {now}: they"
            " have changed since. Put the weights that the run began with there again"
        )
    return policy


def is_branch(folder: Path) -> bool:
    """True where the run of a folder began with the weights of another run."""
    return "branched_from" in run_file(folder).facts


def begun_with(folder: Path, run: Run) -> Any:
    """The policy of a branched run from its own folder, with weights not loaded yet; None for a run that is no branch,
    or where the folder does not have the model."""
    return kept_in(folder, run.model) if is_branch(folder) and (folder / MODEL).is_dir() else None
