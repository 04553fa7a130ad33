"""Progress in a notebook: one output that is updated in place, also by a run that works in a second thread."""

from __future__ import annotations

import html
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from posttrain.system.terminal_output import visible

EVERY = 0.25
"""Least seconds between two updates, so that a browser is not flooded."""
WIDTH = 24
"""Characters of the bar."""


def in_kernel() -> bool:
    """True where this program is a notebook's kernel. Nothing is imported to find out."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return getattr(current, "kernel", None) is not None


@dataclass
class NotebookLine:
    """One line of progress. It keeps its place in the cell's output while lines are printed after it."""

    _handle: Any = None
    """The output in the cell; None before the first one."""
    _shown: float = 0.0
    """Time of the last update."""
    _text: str = ""
    # The text that is shown at present: an equal one is not sent again.
    _last: str = field(default="", repr=False)

    def update(self, name: str, done: int, total: int | None, facts: str) -> None:
        """Show where the stage is. `total` is None where the number of steps is not known."""
        filled = 0 if not total else round(WIDTH * min(1.0, done / total))
        bar = "" if total is None else f"[{'#' * filled}{'.' * (WIDTH - filled)}] "
        count = f"{done}" if total is None else f"{done}/{total}"
        self._text = visible(f"{name} {bar}{count}  {facts}")
        if self._handle is None or time.monotonic() - self._shown >= EVERY or done == total:
            self.flush()

    def flush(self) -> None:
        """Show the last text, if it is not yet shown."""
        if not self._text or self._text == self._last:
            return
        display: Any = sys.modules["IPython"].display
        shown = {"text/plain": self._text, "text/html": f"<pre style='margin:0'>{html.escape(self._text)}</pre>"}
        # The first call makes the output and keeps its place; the others change it in place.
        if self._handle is None:
            self._handle = display.display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        self._last, self._shown = self._text, time.monotonic()
