"""Settings of torch in one process: its threads, and whether it computes every operation the same way each time."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from posttrain.system.machine import cores


def use_threads(count: int) -> int:
    """Set torch's CPU threads (0: all cores this process may use) and return how many there are."""
    torch.set_num_threads(count or cores())
    return torch.get_num_threads()


def use_deterministic(on: bool) -> Callable[[], None]:
    """Make torch compute every operation the same way each time, or raise where it cannot; returns what undoes it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    # The variable of cuBLAS stays. It is read when the library is first used, so taking it away would change nothing.
    return lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1])
