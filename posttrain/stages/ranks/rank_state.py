"""The state of a rank, and the work that all ranks do together. Each function runs on every rank at once, with the
state of that rank. Rank 0 orders it (`rank_lead`), and the others carry it out (`rank_worker`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.config.run import Model
from posttrain.config.stages.stage import Optimizer, Stage
from posttrain.core.batch import Packed
from posttrain.core.exchange.expert_choices import Routers
from posttrain.core.exchange.ranks import ALONE, Ranks, check_same, of_every
from posttrain.core.exchange.shards import Shard
from posttrain.core.ports import Reference
from posttrain.engine.adapters.adapter_modules import switched_off
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.files.safetensors_rows import RowFiles
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.shard_modules import first_row, loud_rows, put_rows
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.sharded_reference import EmptyModule, TensorReference, frozen_rows
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.role.events import Event, Observer
from posttrain.role.trainer import Trainer
from posttrain.role.weights.saved_weights import OPTIMIZER, REWARD_HEAD, WEIGHTS, SavedTensors, write_part
from posttrain.system.errors import DataError, RunFolderError

RankLearner = ShardedLearner | TensorLearner
Work = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of this module, and its arguments after `state`."""


@dataclass(frozen=True)
class RowProbe:
    """Stands in `RowRoles` where `StageRoles` has its `Sync`: only the fixed sequence that a check scores."""

    probe_ids: Any


@dataclass(frozen=True)
class RowRun:
    """Stands in `RowRoles` where `StageRoles` has its `Run`: only the settings of the model."""

    model: Model


@dataclass
class RowRoles:
    """The roles that a check of a rank's own rows reads, under the names that they have in `role.roles.StageRoles`."""

    run: RowRun
    stage: Stage
    learner: RankLearner
    trainer: Trainer
    sync: RowProbe


@dataclass
class RankState:
    """The part of a run that a rank holds."""

    ranks: ProcessRanks
    own: RankLearner | None = None
    """This rank's learner; None before it is built."""
    mould: EmptyModule | None = None
    """An empty copy of the model, into which the weights of references are filled."""
    optimizer: StageOptimizer | None = None
    trained: Trainer | None = None
    references: dict[int, Reference] = field(default_factory=dict[int, Reference])
    copies: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """Weights that are kept in memory, by the number under which rank 0 knows them."""
    quiet: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The adapter's own numbers, while random numbers stand in its place (`make_loud`)."""
    checks: Sequence[Observer] = ()
    """The checks of this rank's own rows."""
    roles: Any = None
    """The roles that the checks read: `RowRoles`, and on rank 0 those of the stage."""
    event: Event | None = None
    """The event of the trainer's step that is being observed; None outside events."""

    @property
    def learner(self) -> RankLearner:
        assert self.own is not None
        return self.own

    @property
    def rows(self) -> ShardedLearner:
        """The learner, as one that has rows of every weight (`ShardedLearner`)."""
        assert isinstance(self.own, ShardedLearner)
        return self.own

    @property
    def sharing(self) -> Ranks:
        """The ranks among which a minibatch is divided. With layers cut by columns and rows (`TensorLearner`) it is not
        divided: each rank computes all of it."""
        return ALONE if isinstance(self.own, TensorLearner) else self.ranks

    @property
    def trainer(self) -> Trainer:
        assert self.trained is not None
        return self.trained

    @property
    def version(self) -> int:
        """Version of this rank's weights."""
        return 0 if self.trained is None else self.trained.version


# --- the learner ------------------------------------------------------------------------------------------------------


def ask_learner(state: RankState, method: str, arguments: tuple[Any, ...]) -> Any:
    """Calls a method of the learner that reads whole weights; returns its result."""
    return getattr(state.learner, method)(*arguments)


def ask_followed(state: RankState, method: str, arguments: tuple[Any, ...]) -> Any:
    """Calls a method of the second learner, whose passes follow a batch's choices of experts; returns its result."""
    return getattr(_routers(state).followed(), method)(*arguments)


def ask_routers(state: RankState, method: str, packed: Packed, replay: bool) -> Any:
    """Calls a method of the routers in a pass of all ranks; returns its result."""
    return getattr(_routers(state), method)(packed, replay=replay)


def _routers(state: RankState) -> Routers:
    routers = state.learner.routers()
    assert routers is not None
    return routers


def freeze(state: RankState, number: int, dropped: Sequence[int]) -> str:
    """Keep a frozen copy of the weights as reference `number`; returns its digest. Frees the `dropped` references."""
    # Freed before the new copy is made, so that memory never holds both.
    for old in dropped:
        state.references.pop(old, None)
    assert state.mould is not None
    learner = state.learner
    reference = (
        TensorReference(learner, state.mould)
        if isinstance(learner, TensorLearner)
        else frozen_rows(learner, state.mould, state.ranks)
    )
    state.references[number] = reference
    return reference.digest


def ask_reference(state: RankState, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
    """Calls a method of a reference; returns its result."""
    return getattr(state.references[number], method)(*arguments)


def send_weights(state: RankState) -> None:
    """Send this rank's parts of the weights to rank 0, which receives them in its own call of `gathered`."""
    # On this rank it yields nothing, and sends one bucket each time it is asked to go on.
    for _ in gathered(state.learner.shards(), state.ranks, state.version):
        pass


def make_loud(state: RankState) -> None:
    """Let the adapter add random numbers to what its layers compute, until `make_quiet`."""
    state.quiet = loud_rows(state.rows)


def make_quiet(state: RankState) -> None:
    """Put the adapter's own numbers back."""
    put_rows(state.learner, state.quiet)
    state.quiet = {}


def score_without_adapter(state: RankState, packed: Packed) -> Any:
    with switched_off(state.learner.policy.module):
        return state.learner.packed_score(packed)


def see_files(state: RankState, folder: str) -> list[str]:
    """Returns what each rank sees of a model's files in a folder: a digest, or why it sees none."""
    try:
        digest_or_reason = RowFiles(Path(folder)).digest
    except DataError as error:
        digest_or_reason = str(error)
    return state.ranks.every(digest_or_reason)


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(state: RankState, config: Optimizer, make: Callable[..., StageOptimizer], arguments: Any) -> None:
    """Makes this rank's optimizer with `make`. As in one process, master copies begin with the rounded weights."""
    learner = state.learner
    if isinstance(learner, TensorLearner):
        state.optimizer = make(learner.parameters(), config, *arguments, parts=learner)
        return
    learner.round_masters()
    state.optimizer = make(learner.parameters(), config, *arguments, ranks=state.ranks)


def make_trainer(state: RankState, micro_tokens: int, version: int) -> None:
    assert state.optimizer is not None
    state.trained = Trainer(state.learner, state.optimizer, micro_tokens, version, ranks=state.sharing)


def watch(state: RankState, model: Model, stage: Stage, checks: Sequence[Observer], probe_ids: Any) -> None:
    """Take the checks of this rank's own rows, for a stage that begins now."""
    state.checks = checks
    state.roles = RowRoles(RowRun(model), stage, state.learner, state.trainer, RowProbe(probe_ids))


def begin_check(state: RankState, number: int) -> None:
    # Only ranks other than 0 come here, and they have no event loop. Rank 0 awaits its own check (`RowCheck.begin`).
    asyncio.run(state.checks[number].begin(state.roles))


def check_rows(state: RankState, number: int) -> Any:
    """One check observes the present event on every rank, each with its own rows; returns its report."""
    assert state.event is not None
    return state.checks[number].on_event(state.roles, state.event)


# --- files ------------------------------------------------------------------------------------------------------------


def write_weights(state: RankState, folder: str) -> None:
    _write(state, Path(folder) / WEIGHTS, state.learner.rounded_parts(), lambda name: name)


def write_state(state: RankState, folder: str) -> None:
    _write(state, Path(folder) / OPTIMIZER, _whole_state(state), _parameter)


def _whole_state(state: RankState) -> dict[str, Tensor]:
    """The optimizer's state as one process has it: with the master copies, which over ranks the learner holds."""
    assert state.optimizer is not None
    return state.learner.masters(state.optimizer) | state.optimizer.state_tensors()


def read_weights(state: RankState, folder: str) -> None:
    """Load this rank's rows of the weights in a folder, however many ranks wrote it."""
    of_every(state.ranks, lambda: _read_weights(state, Path(folder) / WEIGHTS))


def _read_weights(state: RankState, path: Path) -> None:
    saved, parameters = SavedTensors(path), state.learner.parameters()
    names = set(saved.shapes)
    # A learner without a reward head reads the saved weights of a reward model, and leaves the head in the file.
    if not any(n.startswith(REWARD_HEAD) for n in parameters):
        names = {n for n in names if not n.startswith(REWARD_HEAD)}
    places = {name: part_of(state.learner, name, p.detach()) for name, p in parameters.items()}
    wrong = sorted(names ^ set(parameters)) or [n for n in parameters if saved.shapes[n] != places[n].shape]
    if wrong:
        raise RunFolderError(
            f"{path} belong to another model: {', '.join(wrong[:4])} differ. Resume with the model the run was started"
            " with"
        )
    with torch.no_grad():
        for name, place in places.items():
            # Only the box of this rank's rows is read from the files.
            parameters[name].copy_(saved.box(name, place.offsets, tuple(place.tensor.shape)))


def read_state(state: RankState, folder: str) -> None:
    """Load this rank's part of an optimizer's state from a folder."""
    assert state.optimizer is not None
    saved, parameters, optimizer = SavedTensors(Path(folder) / OPTIMIZER), state.learner.parameters(), state.optimizer
    tensors: dict[str, Tensor] = {}
    for name, shape in saved.shapes.items():
        parameter = parameters.get(_parameter(name))
        place = None if parameter is None else part_of(state.learner, _parameter(name), parameter.detach())
        # Single numbers are the same on all ranks and are read whole: of the optimizer (`steps`), or of a parameter.
        if place is None or not shape:
            tensors[name] = saved.tensor(name)
        elif place.shape != shape:
            raise RunFolderError(
                f"the optimizer state is of other parameters ({name!r} does not fit): resume with the model and stage"
                " the run was started with"
            )
        else:
            tensors[name] = saved.box(name, place.offsets, tuple(place.tensor.shape))
    # The file has master copies, as a run in one process writes them. Where ranks cut weights by rows, the learner's
    # own parameters are the masters. So these tensors are copied into the parameters, and the optimizer gets the rest.
    masters = state.learner.masters(optimizer)
    if missing := sorted(masters.keys() - tensors.keys()):
        raise RunFolderError(f"the optimizer state lacks {missing[0]!r}: resume with the model and stage of the run")
    with torch.no_grad():
        for name in masters:
            parameters[_parameter(name)].copy_(tensors[name])
    names_of_optimizer = optimizer.state_tensors().keys()
    optimizer.load_state_tensors({n: t for n, t in tensors.items() if n not in masters or n in names_of_optimizer})


def state_fingerprint(state: RankState) -> str:
    """Fingerprint of the whole state of the optimizer. One tensor is whole at a time."""
    tensors = _whole_state(state)
    # Each tensor is gathered in an exchange of its own: other names would join parts of different tensors, or hang.
    check_same(
        state.ranks, sorted(tensors), "optimizer state", "A rank left out an update: go on from the last checkpoint"
    )
    learner = state.learner

    # A moment is cut like its parameter, and `like` says how. Single numbers are whole on each rank.
    def whole(name: str, tensor: Tensor) -> Tensor:
        cut: Any = learner.like(_parameter(name), tensor) if tensor.ndim else tensor
        return cut.full_tensor() if isinstance(cut, DTensor) else tensor

    return fingerprint((name, whole(name, tensors[name])) for name in sorted(tensors))


def keep_copy(state: RankState, number: int) -> None:
    """Keep a copy of this rank's parameters in memory under a number."""
    state.copies[number] = {n: p.detach().clone() for n, p in state.learner.parameters().items()}


def put_copy(state: RankState, number: int) -> None:
    """Put the copy of this number back into the parameters, and forget it."""
    put_rows(state.learner, state.copies.pop(number))


def part_of(learner: RankLearner, name: str, part: Tensor) -> Shard:
    """This rank's `part` of a parameter, or of a tensor of the same shape, with its place in the whole."""
    if isinstance(learner, TensorLearner):
        return learner.place(name, part)
    # Weights are cut along their first dimension: a part begins at its first row, and at 0 in all other dimensions.
    whole: DTensor = learner.like(name, part)  # type: ignore[assignment]
    return Shard(name, part, tuple(whole.shape), (first_row(whole), *[0] * (whole.ndim - 1)))


def _write(state: RankState, path: Path, tensors: dict[str, Tensor], parameter: Callable[[str], str]) -> None:
    """Writes this rank's tensors to its file. With several copies of the weights (`replicas`), the first one is
    written.

    Args:
        parameter: returns the parameter to which a tensor of this name belongs.
    """
    # The first `world // replicas` ranks hold the first copy. The other ranks write files too, since the reader expects
    # a file of every rank. Their tensors have no rows, so `write_part` leaves them out.
    first_copy = state.ranks.rank < state.ranks.world // state.ranks.replicas

    def shard(name: str, tensor: Tensor) -> Shard:
        if not tensor.ndim:
            return Shard.of(name, tensor)
        place = part_of(state.learner, parameter(name), tensor)
        return Shard(name, tensor if first_copy else tensor[:0], place.shape, place.offsets)

    write_part(path, (shard(n, t) for n, t in tensors.items()), state.ranks.rank, state.ranks.world)
    # No rank goes on before all files are there: rank 0 renames the folder next.
    state.ranks.every("written")


def _parameter(name: str) -> str:
    """The parameter that a tensor of an optimizer's state belongs to: exp_avg.w -> w."""
    return name.partition(".")[2]
