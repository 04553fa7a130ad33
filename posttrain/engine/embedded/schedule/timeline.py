"""Records when each request was queued, admitted, drew its first token and finished, as a Chrome trace
(chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from posttrain.engine.embedded.schedule.slots import GenerateCall

MAX_EVENTS = 200_000
"""Events kept. Later ones are only counted; the file has their number."""


class Timeline:
    """Phases of requests, one row per slot: `queued` (row 0), `prefill`, `speak`. Times are in
    microseconds since construction."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._open: dict[int, tuple[str, float, int]] = {}
        self._dropped = 0

    def phase(self, request: GenerateCall, name: str | None) -> None:
        """End the request's phase and begin phase `name`; None: the request has finished."""
        now, row = (time.perf_counter() - self._zero) * 1e6, 0 if request.slot is None else request.slot + 1
        open_phase = self._open.pop(request.number, None)
        if open_phase is not None:
            # "X" is a complete event: its begin and its duration in one record, which is written when the phase ends.
            # In process 0 every slot is a thread, and process 1 has the steps.
            label, begun, at = open_phase
            self._add(
                {
                    "name": label,
                    "ph": "X",
                    "ts": begun,
                    "dur": now - begun,
                    "pid": 0,
                    "tid": at,
                    "args": {"request": request.number},
                }
            )
        if name is not None:
            self._open[request.number] = (name, now, row)

    def step(self, begun: float, positions: int, speaking: int) -> None:
        """Record one step that began at `time.perf_counter()` = begun."""
        now = time.perf_counter()
        args = {"positions": positions, "speaking": speaking}
        self._add(
            {
                "name": "step",
                "ph": "X",
                "ts": (begun - self._zero) * 1e6,
                "dur": (now - begun) * 1e6,
                "pid": 1,
                "tid": 0,
                "args": args,
            }
        )

    def _add(self, event: dict[str, Any]) -> None:
        """Keep an event, or count it where `MAX_EVENTS` are kept already."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1

    def write(self, path: Path | str) -> None:
        """Save all events so far as Chrome trace JSON."""
        names = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "slots (row 0: queue)"}},
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "forward passes"}},
        ]
        text = json.dumps({"traceEvents": names + self._events, "otherData": {"events not kept": self._dropped}})
        Path(path).write_text(text, encoding="utf-8")
