"""The protocols of a learner and an optimizer of which this process holds a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DividedWeights(Protocol):
    """A learner of which this process holds a part: its weights are written and read by all processes together."""

    def write_weights(self, folder: Path) -> None:
        """Write every trainable parameter into `folder`, each process its own part."""
        ...

    def read_weights(self, folder: Path) -> None:
        """Take the weights that `folder` holds, whoever wrote them."""
        ...

    def copied_weights(self) -> Any:
        """A copy of the weights in memory, for `put_weights`."""
        ...

    def put_weights(self, copied: Any) -> None: ...


@runtime_checkable
class DividedGradients(Protocol):
    """An optimizer of which this process may hold a part, with other weights that every process has whole."""

    def agree(self) -> None:
        """Give what every process has whole the gradients of the first one. All call it at once, before the step."""
        ...


@runtime_checkable
class DividedState(Protocol):
    """An optimizer of which this process holds a part: its state is written and read by all processes together."""

    def write_state(self, folder: Path) -> None: ...

    def read_state(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        """Exact digest of the whole state, of all processes together."""
        ...
