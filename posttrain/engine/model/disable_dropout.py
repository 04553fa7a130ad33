"""Noise that a model adds in training mode is switched off at load: learner, reference and sampler must be the same
function.

Dropout is set to 0 in the config. Other modules that draw random numbers in training mode (a router's jitter, whole
layers dropped) are found by what they do: they change the state of a random generator. Such a module stays in
evaluation mode. Its children do not, so that `.train()` keeps its other effects (activation checkpointing).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.engine.head.readout import CANARY, ReadOut, positions
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.model.tiny_models import generators_kept
from posttrain.system.errors import EngineError

SEEDS = (1, 2)
"""Seeds of the passes in training mode that are compared with a pass in evaluation mode."""


def silence(module: PreTrainedModel, out: ReadOut) -> list[str]:
    """Keep modules that draw random numbers in training mode in evaluation mode. Returns a note that names them.
    EngineError names a module that stays random, or computes something else in training mode."""
    silenced: dict[str, nn.Module] = {}
    with generators_kept([module.device] if module.device.type == "cuda" else ()), torch.enable_grad():
        # First only the modules that draw. What still draws may read the mode of a child, so its children follow.
        for with_children in (False, True):
            drawing = _drawing(module, out)
            for part in drawing.values():
                for each in part.modules() if with_children else (part,):
                    _keep_in_evaluation(each)
            silenced |= drawing
            if not drawing:
                break
        if still := _drawing(module, out):
            raise EngineError(
                f"{_named(still)} draws random numbers in training mode, and in evaluation mode too: sampler and"
                " learner would differ. Switch this noise off in the model's config.json, or use another architecture"
            )
        # That nothing draws is not enough: a module may compute something else in training mode without random numbers.
        _check_same(module, out)
    module.eval()
    if not silenced:
        return []
    return [
        f"{_named(silenced)} adds noise while training and is kept in evaluation mode: sampler and learner must be the"
        " same function"
    ]


def _keep_in_evaluation(part: nn.Module) -> None:
    """Make `train()` on this module, or on one above it, change its children but not itself. Survives `copy.deepcopy`,
    and the way into another process."""
    part.training = False
    # A partial, and no closure: deepcopy copies its argument along with the module, so a copy's `train` acts on the
    # copy, and pickle finds the function.
    part.train = partial(_only_children, part)  # type: ignore[method-assign]


def _only_children(self: nn.Module, mode: bool = True) -> nn.Module:
    """`nn.Module.train` that leaves the mode of the module itself."""
    for child in self.children():
        child.train(mode)
    return self


def _run(module: PreTrainedModel, out: ReadOut) -> Tensor:
    """Hidden states [N, H] of the canary."""
    # Ids are spread by a large prime, because the first ones are often special tokens.
    at = torch.arange(min(CANARY, positions(module) or CANARY), device=out.weight.device)
    return out.hidden(at * 7919 % out.weight.shape[0], at, PackedLayout([len(at)])).detach()


def _drawing(module: PreTrainedModel, out: ReadOut) -> dict[str, nn.Module]:
    """By name, the modules whose own code draws random numbers in one forward pass in training mode."""
    # Hooks run as each module begins and ends, and `running` is the stack of modules inside which the pass is. A change
    # of a generator's state since the last hook was made by the one on top, as its children have hooks too.
    names = {id(part): name for name, part in module.named_modules()}
    drawing: dict[str, nn.Module] = {}
    running: list[nn.Module] = [module]
    last_state = [_state(module)]

    def note_draws() -> None:
        now = _state(module)
        if now != last_state[0]:
            drawing[names[id(running[-1])]] = running[-1]
        last_state[0] = now

    def enter(part: nn.Module, args: Any) -> None:
        note_draws()
        running.append(part)

    def leave(part: nn.Module, args: Any, output: Any) -> None:
        note_draws()
        running.pop()

    hooks = [part.register_forward_pre_hook(enter) for part in module.modules()]
    hooks += [part.register_forward_hook(leave) for part in module.modules()]
    module.train()
    try:
        _run(module, out)
        note_draws()
    finally:
        for hook in hooks:
            hook.remove()
    return drawing


def _check_same(module: PreTrainedModel, out: ReadOut) -> None:
    """EngineError where training mode, from two random states, does not compute the same as evaluation mode."""
    passes: list[Tensor] = []
    trails: list[list[tuple[str, Tensor]]] = []
    # The last pass is in evaluation mode. Two seeds, because noise may be without effect in one draw.
    for seed in (*SEEDS, None):
        module.train(seed is not None)
        torch.manual_seed(seed or 0)
        with _recorded_outputs(module) as trail:
            passes.append(_run(module, out))
        trails.append(trail)
    # The bounds of `check_read_out`, here relative to the largest number of the hidden states.
    rounding = 1e-4 if passes[-1].dtype in (torch.float32, torch.float64) else 0.05
    bound = rounding * max(1.0, float(passes[-1].abs().max()))
    for hidden, trail in zip(passes[:-1], trails[:-1], strict=True):
        # Written as `not <=`, so that NaN is refused as well. The trail then tells the first module that differs.
        if not float((hidden - passes[-1]).abs().max()) <= bound:
            # Not strict: in training mode other modules may run, and so more or fewer of them.
            differing = (a for (a, x), (_, y) in zip(trail, trails[-1], strict=False) if not torch.equal(x, y))
            raise EngineError(
                f"{next(differing, 'the model')} of {type(module).__name__} computes something else in training mode"
                " than in evaluation: sampler and learner would differ. Switch this off in the model's config.json, or"
                " use another architecture"
            )


@contextmanager
def _recorded_outputs(module: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """(name, sum of the first output) of every module, in the order in which they end."""
    trail: list[tuple[str, Tensor]] = []

    def ended(name: str) -> Any:
        def leave(part: nn.Module, args: Any, output: Any) -> None:
            # A sum: the trail of a whole model takes no memory.
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                trail.append((f"{name} ({type(part).__name__})", first.detach().double().sum()))

        return leave

    hooks = [part.register_forward_hook(ended(name)) for name, part in module.named_modules()]
    try:
        yield trail
    finally:
        for hook in hooks:
            hook.remove()


def _state(module: PreTrainedModel) -> tuple[Any, ...]:
    """The states of all global random generators that a model could draw from."""
    # As bytes, because arrays have no truth value when tuples are compared.
    algorithm, keys, *rest = np.random.get_state()
    device = [torch.cuda.get_rng_state(module.device).numpy().tobytes()] if module.device.type == "cuda" else []
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        algorithm,
        np.asarray(keys).tobytes(),
        *rest,
        *device,
    )


def _named(parts: dict[str, nn.Module]) -> str:
    """`ClassA (3 modules, first model.layers.0.x) and ClassB (model)`."""
    kinds: dict[str, list[str]] = {}
    for name, part in parts.items():
        kinds.setdefault(type(part).__name__, []).append(name or "the whole model")
    described = (
        f"{kind} ({f'{len(names)} modules, first ' if len(names) > 1 else ''}{names[0]})"
        for kind, names in kinds.items()
    )
    return " and ".join(described)
