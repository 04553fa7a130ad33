"""The mathematics of a piece is a function registered by its type: `@pushed.register` over
`def _(region: Clip, look: Look) -> Push`.

Functions of a piece are `functools.singledispatch` on their first argument, so a type that derives from another has its
mathematics until it brings its own. What nobody registered is an error that says where to.
"""

from __future__ import annotations

from posttrain.core.errors import InvariantError
from posttrain.core.pieces.piece import Piece


def missing(piece: Piece, function: str) -> InvariantError:
    """Of a piece without mathematics; `function` is where to register it."""
    name = type(piece).__name__
    return InvariantError(
        f"{name} has no mathematics: register a function of {name} with posttrain.algorithm.{function}.register"
    )
