"""Records when requests were queued, admitted, began and finished, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from posttrain.engine.embedded.schedule.slots import GenerateCall

MAX_EVENTS = 200_000
"""Events kept. Later ones are only counted; the file has their number."""


class Timeline:
    """Phases of requests, one row per slot: `queued` (row 0), `prefill`, `speak`. Times are in microseconds since
    construction."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._open: dict[int, tuple[str, float, int]] = {}
        """(phase, when it began, row) of each request that has not finished, by the request's number."""
        self._dropped = 0

    def phase(self, request: GenerateCall, name: str | None) -> None:
        """End the request's phase and begin phase `name`; None: the request has finished."""
        now, row = time.perf_counter(), 0 if request.slot is None else request.slot + 1
        if request.number in self._open:
            ended_name, begun, begun_row = self._open.pop(request.number)
            self._add(ended_name, begun, now, 0, begun_row, {"request": request.number})
        if name is not None:
            self._open[request.number] = (name, now, row)

    def step(self, begun: float, positions: int, speaking: int) -> None:
        """Record one step that began at `time.perf_counter()` = begun."""
        self._add("step", begun, time.perf_counter(), 1, 0, {"positions": positions, "speaking": speaking})

    def _add(self, name: str, begun: float, ended: float, process: int, row: int, args: dict[str, Any]) -> None:
        """Keep an event, or count it where `MAX_EVENTS` are kept already."""
        if len(self._events) >= MAX_EVENTS:
            self._dropped += 1
            return
        # "X" is a complete event: its begin and its duration in one record, which is written when it ends. Rows are
        # the threads of the trace: in process 0 the queue and the slots, in process 1 the steps.
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": (begun - self._zero) * 1e6,
                "dur": (ended - begun) * 1e6,
                "pid": process,
                "tid": row,
                "args": args,
            }
        )

    def write(self, path: Path | str) -> None:
        """Save all events so far as Chrome trace JSON."""
        names = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "slots (row 0: queue)"}},
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "forward passes"}},
        ]
        text = json.dumps({"traceEvents": names + self._events, "otherData": {"events not kept": self._dropped}})
        Path(path).write_text(text, encoding="utf-8")
