"""The mathematics of a piece is a function registered for its type: `@pushed.register` above
`def _(region: Clip, inputs: TrustInputs) -> Push`.

These functions are `functools.singledispatch` on their first argument. A derived type uses the mathematics of its base
until it registers its own. A type without a function is an error that names where to register one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.ladder.pieces.link import PreferencePiece
from posttrain.ladder.pieces.piece import Piece
from posttrain.system.errors import InvariantError


def missing(piece: Piece | PreferencePiece, function: Callable[..., Any]) -> InvariantError:
    """The error for a piece without mathematics; `function` is where to register it."""
    name = type(piece).__name__
    # Read from a run folder, without its file: registering something would not help.
    if piece.absent:
        return InvariantError(f"{name} is only its record here: its class is defined in a file that was not imported")
    # The name is read from the function, so that it follows it to another file.
    where = f"{function.__module__}.{function.__qualname__}"
    return InvariantError(f"{name} has no mathematics: register a function of {name} with {where}.register")
