"""Checkpoints of a learner over ranks (`torch.distributed.checkpoint`). Each rank writes its own parts, and a
checkpoint of any number of ranks can be read by any other number, one process included.

Of a model with an adapter only what trains is written, with a digest of the weights beneath, which must be the same
where it is read. Of weights below float32 both the rounded ones and the master copies are, as one process has them.

A folder holds torch's files, `about.json` with the version and a digest of everything, and `digests.json` with one of
each file. It is written beside its place and renamed, so a kill leaves no half of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from posttrain.core.exchange.ranks import ALONE, Ranks
from posttrain.engine.adapters.adapter_modules import base_tensors
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.learner import HEADS, HFLearner
from posttrain.engine.model.policy_model import named_tensors
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.sharded_index import IndexReader
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.system import files
from posttrain.system.errors import RunFolderError

ABOUT = "about.json"
WEIGHTS, STATE, MASTER = "weights.", "optimizer.", "master."


def save_sharded(folder: Path, learner: HFLearner, optimizer: StageOptimizer, version: int) -> None:
    """Write weights, heads and optimizer state as `folder`. Every rank calls it."""
    about = {"version": version, "beneath": _beneath(learner)}
    _write(folder, _everything(learner, optimizer), about, _ranks(learner))


class ShardedWriter:
    """Writes checkpoints of a learner over ranks while it trains on: `begin` copies this rank's part of everything and
    returns, and a thread writes the copy. Its ranks exchange in groups of their own. A checkpoint that was not finished
    is not there, and the one before it is.

    Every process makes it, and every rank calls its methods in the same order.
    """

    def __init__(self, learner: ShardedLearner) -> None:
        ranks = learner.ranks.part(range(learner.ranks.world), learner.ranks.replicas)
        assert ranks is not None
        self._learner, self._ranks = learner, ranks
        self._thread: Thread | None = None
        self._wrong: BaseException | None = None

    def begin(self, folder: Path, optimizer: StageOptimizer, version: int) -> None:
        """Copy, and begin to write the copy as `folder`. Waits for the one before, and raises what went wrong there."""
        self.wait()
        about = {"version": version, "beneath": _beneath(self._learner)}
        copy = {name: self._copied(t) for name, t in _everything(self._learner, optimizer).items()}
        self._thread = Thread(target=self._run, args=(folder, copy, about), name=f"checkpoint {version}")
        self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is written. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._wrong is not None:
            wrong, self._wrong = self._wrong, None
            raise wrong

    def _run(self, folder: Path, copy: dict[str, Tensor], about: dict[str, Any]) -> None:
        try:
            _write(folder, copy, about, self._ranks)
        except BaseException as error:
            self._wrong = error

    @torch.no_grad()
    def _copied(self, tensor: Tensor) -> Tensor:
        """A copy, whose parts come together in the groups of the writer."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().clone()
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(
            tensor.to_local().clone(), self._ranks.mesh, tensor.placements, run_check=False, **whole
        )


def _everything(learner: HFLearner, optimizer: StageOptimizer) -> dict[str, Tensor]:
    return _weights(learner) | _state(learner, masters_of(learner, optimizer) | optimizer.state_tensors())


def _write(folder: Path, held: Mapping[str, Tensor], about: dict[str, Any], ranks: Ranks) -> None:
    about |= {"digest": _digest(held)}
    told, wrong = list[str](), list[Exception]()

    def write(staged: Path) -> None:
        told.extend(ranks.every(str(staged))[:1])
        if not told[0]:
            raise RunFolderError(f"sharded checkpoint {folder.name}: rank 0 could not make its folder")
        with _quiet():
            save(dict(held), checkpoint_id=Path(told[0]), **_group(ranks))
        if ranks.rank == 0:
            files.write_json(Path(told[0]) / ABOUT, about)

    try:
        if ranks.rank == 0:
            files.write_directory(folder, write)
        else:
            write(folder)
    except Exception as error:
        wrong.append(error)
    if not told:
        ranks.every("")  # others wait for the folder's name
    said = ranks.every(str(wrong[0]) if wrong else "")
    if wrong:
        raise wrong[0]
    if any(said):
        raise RunFolderError(f"sharded checkpoint {folder.name} was not written: {next(filter(None, said))}")


def load_sharded(folder: Path, learner: HFLearner, optimizer: StageOptimizer) -> int:
    """Continue from `folder`, whatever the number of ranks that wrote it; returns the version. Every rank calls it.

    Raises:
        RunFolderError: the folder is damaged, or is of another model or optimizer. The weights may be read already.
    """
    ranks = _ranks(learner)
    if wrong := ranks.every(files.damage(folder) if ranks.rank == 0 else "")[0]:
        raise RunFolderError(f"sharded checkpoint {folder.name}: {wrong}. Go on from another one")
    about, known = files.read_json(folder / ABOUT), _known(folder)
    if (beneath := _beneath(learner)) != about.get("beneath", ""):
        raise RunFolderError(
            f"sharded checkpoint {folder.name}: its adapter lies over weights with the digest"
            f" {about.get('beneath') or 'of none'}, and the model here has {beneath or 'none'}. Resume with the model"
            " that it was trained on"
        )
    held = _weights(learner)
    _must_fit(held, {n: k for n, k in known.items() if n.startswith(WEIGHTS)}, folder)
    saved = sorted(n.removeprefix(STATE) for n in known if n.startswith(STATE))
    state = _state(learner, {n: _blank(learner, n, known[STATE + n]) for n in saved})
    _must_fit(held | state, known, folder)
    with _quiet():
        load(dict(held | state), storage_reader=IndexReader(folder), **_group(ranks))
    found = _digest(held | state)
    if found != about.get("digest"):
        raise RunFolderError(
            f"sharded checkpoint {folder.name}: what was read has the digest {found}, and {about.get('digest')} was"
            " written. It was changed on the way; go on from another one"
        )
    own = {n.removeprefix(STATE): t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
    if isinstance(learner, ShardedLearner):
        masters = masters_of(learner, optimizer)
        learner.take({n.removeprefix(WEIGHTS): t for n, t in held.items()}, {n: own[n] for n in masters if n in own})
        kept = optimizer.state_tensors().keys()
        own = {n: t for n, t in own.items() if n not in masters or n in kept}
    optimizer.load_state_tensors(own)
    return int(about["version"])


def _ranks(learner: HFLearner) -> Ranks:
    if isinstance(learner, TensorLearner):
        return learner.holders
    return learner.ranks if isinstance(learner, ShardedLearner) else ALONE


def _group(ranks: Ranks) -> dict[str, Any]:
    """Arguments of torch's functions: who takes part."""
    return {"process_group": ranks.group} if isinstance(ranks, ProcessRanks) else {"no_dist": True}


def _weights(learner: HFLearner) -> dict[str, Tensor]:
    if isinstance(learner, (ShardedLearner, TensorLearner)):
        held = learner.held()
    elif learner.policy.lora is not None:
        held = learner.parameters()
    else:
        held = dict(named_tensors(learner.policy.module)) | learner.parameters()
    return {WEIGHTS + name: tensor.detach() for name, tensor in held.items()}


def masters_of(learner: HFLearner, optimizer: StageOptimizer) -> dict[str, Tensor]:
    """The master copies that a learner over ranks has itself, named as an optimizer in one process names its own."""
    if not isinstance(learner, ShardedLearner) or learner.narrow is None:
        return {}
    moved, own = optimizer.trained(), learner.parameters()
    return {f"{MASTER}{n}": p.detach() for n, p in own.items() if n in moved and not n.startswith(HEADS)}


def _beneath(learner: HFLearner) -> str:
    """Digest of the weights beneath an adapter, which never change; '' where there is none."""
    if learner.policy.lora is None:
        return ""
    if learner not in _BENEATH:
        _BENEATH[learner] = _digest(base_tensors(learner.policy.module))
    return _BENEATH[learner]


_BENEATH: WeakKeyDictionary[HFLearner, str] = WeakKeyDictionary()


def _state(learner: HFLearner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state, each part as one of the whole. Numbers are the same on every rank."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parameter = name.partition(".")[2]
        cut_up = isinstance(learner, (ShardedLearner, TensorLearner)) and tensor.ndim > 0
        out[STATE + name] = learner.like(parameter, tensor) if cut_up else tensor  # pyright: ignore[reportAttributeAccessIssue]
    return out


def _known(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Dtype and shape of everything in a checkpoint."""
    listed = IndexReader(folder).read_metadata().state_dict_metadata
    return {name: kind for name, kind in listed.items() if isinstance(kind, TensorStorageMetadata)}


def _blank(learner: HFLearner, name: str, kind: TensorStorageMetadata) -> Tensor:
    """Room for this rank's part of one tensor of the optimizer's state."""
    dtype = kind.properties.dtype
    if not kind.size:
        return torch.zeros((), dtype=dtype)
    parameter = learner.parameters().get(name.partition(".")[2])
    if parameter is None:
        raise RunFolderError(f"the checkpoint has {name!r}, and no parameter is called so: resume the model it is of")
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _must_fit(held: Mapping[str, Tensor], known: Mapping[str, TensorStorageMetadata], folder: Path) -> None:
    def form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    ours = {name: form(t.dtype, tuple(t.shape)) for name, t in held.items()}
    theirs = {name: form(k.properties.dtype, tuple(k.size)) for name, k in known.items()}
    if ours != theirs:
        name = next(n for n in sorted(ours.keys() | theirs.keys()) if ours.get(n) != theirs.get(n))
        raise RunFolderError(
            f"sharded checkpoint {folder.name} is of another model or optimizer: {name!r} is {theirs.get(name)} there"
            f" and {ours.get(name)} here. Resume with the model and stage that it was written with"
        )


def _digest(held: Mapping[str, Tensor]) -> str:
    """Returns the digest of whole tensors, so that it does not depend on how they are cut. One tensor is whole at a
    time."""
    return fingerprint((n, t.full_tensor() if isinstance(t, DTensor) else t) for n, t in sorted(held.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch does not warn that one process saves alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
