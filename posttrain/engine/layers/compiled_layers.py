"""`model.compile=true`: the learner's decoder layers by torch.compile.

Norms, projections and feed-forward layers become compiled code, one graph for every number of positions. Attention
stays between the graphs, because its layout belongs to a pass. Copies of the policy (sampler, reference) are not
compiled. Before the first step a warm-up compiles, and compares log-probs and gradient with those before.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor, nn

from posttrain.engine.cpu import compile_native
from posttrain.engine.head.readout import ReadOut
from posttrain.engine.layers import attention
from posttrain.engine.layers.shared_prefixes import BOUNDS, relative_gap
from posttrain.system.errors import ConfigError, InvariantError

Measure = Callable[[], tuple[Tensor, dict[str, Tensor]]]
"""Computes log-probs and gradient of the same tokens."""


def missing(device: str) -> str:
    """Returns in words what torch.compile lacks on this machine for a device; '' where it lacks nothing."""
    if device.startswith("cuda"):
        return "" if find_spec("triton") else "Triton is not installed"
    wanted = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return "" if any(name and shutil.which(name) for name in wanted) else "there is no C++ compiler (g++ or clang++)"


def compile_layers(out: ReadOut) -> int:
    """Compile the layers of a decoder; returns how many. ConfigError where they are not in one list."""
    lists = [part for part in out.decoder.children() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1:
        raise ConfigError(
            f"model.compile=true: {type(out.decoder).__name__} has {len(lists)} lists of layers, and one is compiled."
            " Set model.compile=false"
        )
    attention.stay_outside_graphs()
    if (cache := compile_native.own_cache()) is not None:  # torch's own choice is a folder that any user may make first
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    for layer in lists[0]:
        # dynamic: the number of positions differs from pass to pass, and each would be compiled anew.
        layer.compile(dynamic=True)
    return len(lists[0])


def warmed_up(out: ReadOut, measure: Measure) -> str:
    """Compile, and compare what it computes; returns a line for people. InvariantError where it is something else."""
    wanted_logp, wanted_gradient = measure()
    begun = time.perf_counter()
    count = compile_layers(out)
    logp, gradient = measure()
    seconds = time.perf_counter() - begun
    # Of the log-probs or of the whole gradient, whichever differs more.
    gap_of_gradient = relative_gap([*gradient.values()], [*wanted_gradient.values()])
    gap = max(relative_gap([logp], [wanted_logp]), gap_of_gradient)
    bound = BOUNDS.get(out.weight.dtype, 0.1)
    if not gap <= bound:
        raise InvariantError(
            f"the compiled layers compute something else: log-probs or gradient differ by {gap:.2g} of their size"
            f" (bound {bound:g}). Set model.compile=false, and please report the model's architecture"
        )
    layers = f"{count} layer{'s' * (count != 1)}"
    return f"compiled {layers} of the learner in {seconds:.0f} s (differences of at most {gap:.1g})"
