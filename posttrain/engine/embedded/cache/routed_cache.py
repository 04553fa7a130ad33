"""A pool of cached keys and values that also keeps which experts computed each cached token.

The choices lie in the rows of the pool. So they are shared, copied and kept with the keys and values that they made: a
prompt that several requests share, or that an earlier turn left in the cache, has its choices there too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain.core.exchange.expert_choices import UNKNOWN
from posttrain.engine.embedded.cache.key_value_cache import CachePool
from posttrain.engine.layers.expert_routing import Routing, as_array


class RoutedPool(CachePool):
    """`CachePool` of a mixture of experts, with the choices of its routers for each row."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._routed = np.zeros((0, 0, 0), np.int16)
        """int16 [rows, R, K]."""

    def grow(self, blocks: int) -> None:
        super().grow(blocks)
        self._room()

    def release(self) -> None:
        super().release()
        self._routed = self._routed[:0]

    def copy(self, source: np.ndarray, to: np.ndarray) -> None:
        super().copy(source, to)
        self._routed[to] = self._routed[source]

    def keep(self, rows: np.ndarray, routing: Routing) -> None:
        """Store what the routers chose for the positions of a pass, which are cached in these rows. Idle positions
        come after them."""
        chosen = as_array(routing.stacked(routing.used))[: len(rows)]
        # How many routers and experts there are is seen at the first pass.
        if self._routed.shape[1:] != chosen.shape[1:]:
            self._routed = np.zeros((0, *chosen.shape[1:]), np.int16)
        self._room()
        self._routed[rows] = chosen

    def routed(self, rows: np.ndarray) -> np.ndarray:
        """int16 [T, R, K]: the choices of the tokens in these rows."""
        return self._routed[rows]

    def _room(self) -> None:
        """Give the choices as many rows as the pool has. New rows hold UNKNOWN."""
        if (missing := self.rows - len(self._routed)) > 0:
            unknown = np.full((missing, *self._routed.shape[1:]), UNKNOWN, np.int16)
            self._routed = np.concatenate([self._routed, unknown])
