"""Weights and optimizer state on disk, as safetensors only: loading them runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from posttrain.core import foreign
from posttrain.core.errors import RunFolderError
from posttrain.core.ports import Learner
from posttrain.role.trainer import WeightOptimizer

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
REWARD_HEAD = "reward_head."
"""Begins the names of a reward head's weights."""
AVERAGE = "ema."
"""Begins the names of moving averages in the optimizer's state."""


def save_weights(folder: Path, learner: Learner) -> None:
    """Every trainable parameter, the value head included."""
    save_file({n: p.detach().contiguous() for n, p in learner.parameters().items()}, folder / WEIGHTS)


def load_weights(folder: Path, learner: Learner) -> None:
    """Load weights into the learner, in place; RunFolderError if their names or shapes are another model's. A learner
    without a reward head takes the other weights alone."""
    _copy(_load(folder / WEIGHTS), learner.parameters(), folder / WEIGHTS)


def save_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    save_file({n: t.contiguous() for n, t in optimizer.state_tensors().items()}, folder / OPTIMIZER)


def load_optimizer(folder: Path, optimizer: WeightOptimizer) -> None:
    optimizer.load_state_tensors(_load(folder / OPTIMIZER))


def load_average(folder: Path, learner: Learner) -> None:
    """Load the weights of a checkpoint, and over them the moving averages that its optimizer kept (`Optimizer.ema`).

    Raises:
        RunFolderError: it has none.
    """
    load_weights(folder, learner)
    held = _load(folder / OPTIMIZER) if (folder / OPTIMIZER).exists() else {}
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
    """The tensors of a file; RunFolderError if it is missing, not a file, cut short or damaged."""
    with foreign.opened(path, RunFolderError):
        pass
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}). Go on from another checkpoint") from error


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    """A copy of the weights in memory."""
    return {n: p.detach().clone() for n, p in learner.parameters().items()}


def restore(learner: Learner, weights: Mapping[str, torch.Tensor]) -> None:
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
