"""Peak memory of a piece of work on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator had given out at once while `work` ran, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    trace = found.profiler
    assert trace is not None and trace.kineto_results is not None
    changes = [(e.start_ns(), e.nbytes()) for e in trace.kineto_results.events() if e.name() == "[memory]"]
    live = np.cumsum([n for _, n in sorted(changes, key=lambda x: x[0])])
    return int(live.max(initial=0))
