"""The experts that a mixture's routers chose for each token: the sampler's choices, as they travel to the learner.

`routed` is int16 [T, R, K]: for each of T tokens and each of R layers with a router, the K experts that computed the
token, in the order of their weights. A row is UNKNOWN where no choice is known: the sampler never computes the last
token of a sequence, and demonstrations have no sampler. The learner reuses the choices and computes the experts'
weights itself (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from posttrain.system.errors import InvariantError

if TYPE_CHECKING:
    from posttrain.core.batch import Packed
    from posttrain.core.ports import Learner

UNKNOWN = -1
"""Value of every entry of a token whose choices are not known."""
NEAR = {"float64": 1e-3, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""By dtype: the largest lead of an expert that was not chosen over one that was, for which rounding may explain the
choice. It is relative to the largest score (at least 1). float64 has the bound of float32, in which norms and
routers of transformers compute there too."""


def check_routed(routed: np.ndarray, tokens: int, where: str) -> None:
    """InvariantError unless `routed` is int16 [tokens, R, K], and each row is known or UNKNOWN as a whole."""
    if routed.dtype != np.int16 or routed.ndim != 3 or len(routed) != tokens:
        wanted = f"int16 [{tokens}, routers, experts of a token]"
        raise InvariantError(f"{where}: router choices are {routed.dtype} {routed.shape}, and {wanted} is declared")
    known = routed != UNKNOWN
    # With half of a token's choices known, some layers would follow the sampler and others choose anew:
    # that is neither the sampler's model nor the learner's.
    if np.any(known.any((1, 2)) != known.all((1, 2))) or np.any(routed < UNKNOWN):
        raise InvariantError(f"{where}: the choices of a token are known for all of its routers, or for none")


def known_rows(routed: np.ndarray) -> np.ndarray:
    """bool [T]: the tokens whose choices are known."""
    # Without routers `all` over nothing would be True for every token.
    return (routed != UNKNOWN).all((1, 2)) & (routed.shape[1] > 0)


def filled(routed: np.ndarray, tokens: int) -> np.ndarray:
    """The choices of a longer sequence, UNKNOWN for the tokens after them."""
    more = np.full((tokens - len(routed), *routed.shape[1:]), UNKNOWN, np.int16)
    return np.concatenate([routed, more])


def packed_routed(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """int16 [N, R, K]: the choices of sequences back to back, UNKNOWN where a sequence has none; None where none has.

    Raises:
        InvariantError: they have different numbers of routers, or of experts for each token.
    """
    shapes = {p.shape[1:] for p in parts if p is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise InvariantError(f"router choices of several models in one batch: [routers, experts] are {sorted(shapes)}")
    shape = shapes.pop()
    # A sequence without choices is treated as one of length 0 that `filled` lengthens.
    none = np.zeros((0, *shape), np.int16)
    return np.concatenate([filled(none if p is None else p, n) for p, n in zip(parts, lengths, strict=True)])


@dataclass(frozen=True, eq=False)
class RoutedPass:
    """The record of the routers in one forward pass of N packed tokens. int16 [N, R, K] and float32."""

    used: np.ndarray
    """The experts that computed each token."""
    own: np.ndarray
    """The experts that each router would have chosen from the same hidden state."""
    regret: np.ndarray
    """[N, R]: router logit of the best expert that was not used, less that of the worst used expert. It is below 0
    where the used experts are the router's own choice."""
    scale: float
    """The largest |router logit|."""
    logp: np.ndarray
    """[M]: the log-probs of the spoken tokens in this pass."""

    @staticmethod
    def join(parts: Sequence[RoutedPass]) -> RoutedPass:
        used, own, regret, logp = (
            np.concatenate([getattr(p, n) for p in parts]) for n in ("used", "own", "regret", "logp")
        )
        return RoutedPass(used, own, regret, max(p.scale for p in parts), logp)


class Routers(Protocol):
    """The routers of a learner's mixture of experts."""

    def read(self, packed: Packed, *, replay: bool) -> RoutedPass:
        """The record of the routers in a forward pass with the learner's present weights, without gradient. `replay`:
        follow the choices of `packed.routed_N` where they are known."""
        ...

    def probabilities(self, packed: Packed, *, replay: bool) -> np.ndarray:
        """float32 [N, R, E]: each router's probabilities of all experts, from a pass as in `read` that is not split."""
        ...

    def followed(self) -> Learner:
        """The learner with passes that follow the known choices of their batch. Checks compare a sampler with it: where
        two experts have nearly equal scores, two correct passes could choose differently."""
        ...

    @property
    def experts(self) -> int:
        """Experts that each router chooses among."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The weight of each router, as `Learner.parameters` names it, in the order of R."""
        ...

    @property
    def stacked(self) -> tuple[tuple[str, ...], ...]:
        """For each router the parameters that hold its experts' weights along their first axis."""
        ...

    @property
    def held(self) -> slice:
        """The experts whose weights this process has: all, or those of its rank."""
        ...

    @property
    def of_all(self) -> Callable[[np.ndarray], np.ndarray]:
        """A function from rows of this process's experts to the rows of all experts. All ranks call it at once."""
        ...
