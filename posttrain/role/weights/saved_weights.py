"""Weights and optimizer state on disk, as safetensors only: loading them runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from posttrain.core.exchange.sharded_protocols import DividedState, DividedWeights
from posttrain.core.ports import Learner
from posttrain.role.trainer import WeightOptimizer
from posttrain.role.weights.saved_parts import SavedTensors, part_files
from posttrain.system.errors import RunFolderError

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
REWARD_HEAD = "reward_head."
"""Begins the names of a reward head's weights."""
AVERAGE = "ema."
"""Begins the names of moving averages in the optimizer's state."""


def save_weights(folder: Path, learner: Learner) -> None:
    """Every trainable parameter, the value head included."""
    if isinstance(learner, DividedWeights):
        learner.write_weights(folder)
        return
    save_file({n: p.detach().contiguous() for n, p in learner.parameters().items()}, folder / WEIGHTS)


def load_weights(folder: Path, learner: Learner) -> None:
    """Load weights into the learner, in place; RunFolderError if their names or shapes are another model's. A learner
    without a reward head takes the other weights alone."""
    if isinstance(learner, DividedWeights):
        learner.read_weights(folder)
        return
    _copy(_load(folder / WEIGHTS), learner.parameters(), folder / WEIGHTS)


def save_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    if isinstance(optimizer, DividedState):
        optimizer.write_state(folder)
        return
    save_file({n: t.contiguous() for n, t in optimizer.state_tensors().items()}, folder / OPTIMIZER)


def load_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    if isinstance(optimizer, DividedState):
        optimizer.read_state(folder)
        return
    optimizer.load_state_tensors(_load(folder / OPTIMIZER))


def load_average(folder: Path, learner: Learner) -> None:
    """Load the weights of a checkpoint, and over them the moving averages that its optimizer kept (`Optimizer.ema`).
    Raises RunFolderError: it has none."""
    load_weights(folder, learner)
    held = _load(folder / OPTIMIZER) if part_files(folder / OPTIMIZER) else {}
    averages = {n.removeprefix(AVERAGE): t for n, t in held.items() if n.startswith(AVERAGE)}
    if not averages:
        raise RunFolderError(
            f"{folder} holds no moving average of the weights: a stage keeps one with optimizer.ema=0.99, in the"
            " checkpoints inside it and in the last one of the run"
        )
    parameters = learner.parameters()
    weights = {n: p.detach() for n, p in parameters.items()}
    known = {n: t for n, t in averages.items() if n in weights or not n.startswith(REWARD_HEAD)}
    _copy({**weights, **known}, parameters, folder / OPTIMIZER)


def _load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of the files of several processes; RunFolderError if they are missing, not files, cut
    short or damaged."""
    return SavedTensors(path).whole()


def snapshot(learner: Learner) -> Any:
    """A copy of the weights in memory, for `restore`."""
    if isinstance(learner, DividedWeights):
        return learner.copied_weights()
    return {n: p.detach().clone() for n, p in learner.parameters().items()}


def restore(learner: Learner, weights: Any) -> None:
    if isinstance(learner, DividedWeights):
        learner.put_weights(weights)
        return
    _copy(weights, learner.parameters(), None)


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], path: Path | None) -> None:
    if not any(n.startswith(REWARD_HEAD) for n in target):
        source = {n: t for n, t in source.items() if not n.startswith(REWARD_HEAD)}
    if set(source) != set(target) or any(source[n].shape != target[n].shape for n in target):
        wrong = sorted(set(source) ^ set(target)) or [n for n in target if source[n].shape != target[n].shape]
        raise RunFolderError(
            f"{path or 'these weights'} belong to another model: {', '.join(wrong[:4])} differ. Resume with the model"
            " the run was started with"
        )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
