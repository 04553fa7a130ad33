"""The routers' choices for packed segments, also where beginnings that segments share are computed once.

Axis letters: N packed positions, C computed ones (those that segments share come once), R routers, K experts of a
token, E experts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Packed
from posttrain.core.exchange.expert_choices import UNKNOWN, RoutedPass, known_rows
from posttrain.engine.layers.expert_routing import Routing, as_array


class PassRouting:
    """The choices that the routers are given in one pass, and the record of what they did.

    Args:
        given: int64 [C, R, K] choices to follow; None: each router chooses itself.
        scores: keep the routers' logits, with their gradients.
    """

    def __init__(self, given: Tensor | None = None, scores: bool = False) -> None:
        self.routing = Routing(given, scores)

    def pass_of(self, device: torch.device) -> Routing:
        """Returns the routing that the layout of the pass carries."""
        return self.routing


class PackedRouting(PassRouting):
    """The same for packed segments.

    Args:
        given_N: int16 [N, R, K] choices to follow; None: each router chooses itself.
        scores: keep the routers' logits, with their gradients.
    """

    def __init__(self, packed: Packed, given_N: np.ndarray | None, scores: bool) -> None:
        super().__init__()
        self._given_C, self._scores = given_N, scores
        self._place_N = np.arange(len(packed.ids_N))

    def fold(self, place_N: np.ndarray) -> bool:
        """Compute each place once; False, and nothing is changed, where positions of one place have other choices."""
        given_N = self._given_C
        if given_N is not None:
            known_N = known_rows(given_N)
            given_C = np.full((int(place_N.max()) + 1, *given_N.shape[1:]), UNKNOWN, np.int16)
            given_C[place_N[known_N]] = given_N[known_N]
            if not np.array_equal(given_C[place_N[known_N]], given_N[known_N]):
                return False
            self._given_C = given_C
        self._place_N = place_N
        return True

    def pass_of(self, device: torch.device) -> Routing:
        given = None if self._given_C is None else torch.from_numpy(self._given_C.astype(np.int64)).to(device)
        self.routing = Routing(given, self._scores)
        return self.routing

    def told(self, logp_M: Tensor) -> RoutedPass:
        """Returns the record of what the routers did at every packed position. The pass must have kept their logits."""
        r = self.routing
        regret, scale = r.regret()
        return RoutedPass(
            as_array(r.stacked(r.used))[self._place_N],
            as_array(r.stacked(r.own))[self._place_N],
            regret.float().cpu().numpy()[self._place_N],
            scale,
            logp_M.float().cpu().numpy(),
        )

    def probabilities(self) -> np.ndarray:
        """float32 [N, R, E]: the softmax of the routers' logits. The pass must have kept them."""
        logits = self.routing.stacked(self.routing.logits).detach()
        return torch.softmax(logits.float(), -1).cpu().numpy()[self._place_N]

    def balance(self, packed: Packed) -> Tensor:
        """The load-balance loss of these positions: the routers' probabilities times `packed.balance_E`, over the
        tokens whose experts are known."""
        assert packed.balance_E is not None and packed.routed_N is not None
        times_C = np.bincount(self._place_N, known_rows(packed.routed_N), int(self._place_N.max()) + 1)
        logits = self.routing.stacked(self.routing.logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probability = torch.softmax(wide, -1)
        times = torch.from_numpy(times_C).to(probability)
        weights = torch.from_numpy(packed.balance_E).to(probability)
        return torch.einsum("cre,c,e->", probability, times, weights)
