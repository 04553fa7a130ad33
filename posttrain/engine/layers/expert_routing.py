"""The routers of a mixture of experts: what each chose in a forward pass, and choices that are given to it.

A router scores all experts of its layer for a token, and the K best ones compute it, each with a weight: the softmax
of the scores over all experts, taken at the chosen ones, and divided by their sum where the model says so. With given
choices the weights are computed from the router's own scores in the same way, so that gradients reach the router, and
only the choice itself is given: g_i = I_i exp(s_i) / sum_j I_j exp(s_j) where they are normalised (R3, 2510.11370).

A layout (`attention`) carries a `Routing` through one forward pass, and through layers that are computed again.

Axis letters: N computed positions, R routers, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.core.batch import Packed
from posttrain.core.exchange.expert_choices import NEAR, UNKNOWN, RoutedPass, known_rows
from posttrain.engine.layers import attention
from posttrain.system.errors import EngineError

PLACE = "posttrain_router"
"""The attribute of a router's module: its place among the routers, and whether its weights are normalised."""
SPREAD = 4.0
"""The largest score in the trial that shows whether a router is understood (`_normalised`). At this size rounding
decides no choice."""
TRIED = 8
"""Hidden states in that trial."""
SAME = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Largest difference of a weight that counts as rounding; 0.02 in narrower types. Routers of transformers compute their
softmax in float32 also in float64 models."""


def weights_of(logits: Tensor, chosen: Tensor, normalised: bool, dtype: torch.dtype) -> Tensor:
    """[N, K]: the weights of the chosen experts."""
    # In float32 at least, as the routers of transformers compute it, whatever the type of the model.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = torch.softmax(wide, -1).gather(-1, chosen)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(wide.dtype if logits.dtype == torch.float64 else dtype)


@dataclass(eq=False)
class Routing:
    """The choices that routers are given in one forward pass, and the record of what they did."""

    given: Tensor | None = None
    """int64 [N, R, K], UNKNOWN where the router chooses itself; None: everywhere."""
    scores: bool = False
    """Keep the routers' logits, with their gradients."""
    used: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By router: int64 [N, K], the experts that computed each position."""
    own: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By router: int64 [N, K], the experts that the router itself chose."""
    logits: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By router: [N, E], the scores of all experts before the softmax."""

    def at(self, place: int, normalised: bool, output: Any) -> Any:
        """Returns the output of a router in this pass, from the output that the router computed itself."""
        logits, weights, own_choices = output
        self.own[place] = self.used[place] = own_choices
        if self.scores:
            self.logits[place] = logits
        # Without given choices the output is passed on as it is, and the model computes what it would without a hook.
        if self.given is None:
            return output
        choices = self.given[:, place].to(own_choices.device)
        if choices.shape != own_choices.shape:
            raise EngineError(
                f"router {place} chose {tuple(own_choices.shape)} experts, and choices of {tuple(choices.shape)} are"
                " given: they are of another model, or of other tokens"
            )
        chosen = torch.where(choices == UNKNOWN, own_choices, choices)
        self.used[place] = chosen
        return logits, weights_of(logits, chosen, normalised, weights.dtype), chosen

    def stacked(self, of: dict[int, Tensor]) -> Tensor:
        """[N, R, ...] of what was kept by router."""
        return torch.stack([of[r] for r in sorted(of)], 1)

    def regret(self) -> tuple[Tensor, float]:
        """(regret [N, R], largest |score|). The regret is the score of the best expert that was not used minus the
        score of the worst used one. The pass must have kept the scores."""
        used, logits = self.stacked(self.used), self.stacked(self.logits)
        # At most 0 where a router used its own best; above 0 the used experts are not the best ones.
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, used, True)
        best = logits.masked_fill(chosen, float("-inf")).amax(-1)
        return best - logits.masked_fill(~chosen, float("inf")).amin(-1), float(logits.detach().abs().max())

    def chosen_by_more(self, computed: torch.dtype) -> float:
        """The largest lead of an expert that was not used over a used one, in units of what rounding may decide in the
        type that the model computes in (`NEAR`). Above 1, this pass would have chosen other experts than it was given.
        0 without routers."""
        if not self.logits:
            return 0.0
        regret, scale = self.regret()
        near = NEAR[str(computed).removeprefix("torch.")]
        return float(regret.detach().max()) / (near * max(1.0, scale))


def following(passes: Sequence[Routing]) -> Routing | None:
    """The choices that these passes made, for one pass over their tokens. None where they had no router."""
    if not all(routing.used for routing in passes):
        return None
    return Routing(torch.cat([routing.stacked(routing.used) for routing in passes]), True)


def _hook(module: nn.Module, args: Any, output: Any) -> Any:
    """The forward hook of a router: passes its output through the `Routing` of the layout in use."""
    routing = getattr(attention.layout_in_use(), "routing", None)
    # None from a forward hook leaves the output as it is.
    return None if routing is None else routing.at(*getattr(module, PLACE), output)


@dataclass(frozen=True, eq=False)
class RouterModules:
    """What a module's routers are called and hold. `experts`, `names` and `stacked` are those of
    `core.exchange.expert_choices.Routers`; `normalised` says whether the weights of a token's experts sum to 1."""

    experts: int
    names: tuple[str, ...]
    stacked: tuple[tuple[str, ...], ...]
    normalised: bool


def routers_of(module: PreTrainedModel) -> RouterModules | None:
    """The routers of a model, which from now on follow the `Routing` of a pass; None where it has none that is
    understood (`why_not` says why). A second call changes nothing."""
    routers = list(_candidates(module))
    if not routers or why_not(module):
        return None
    normalised = _normalised(routers[0][1])
    for place, (_, router) in enumerate(routers):
        if not hasattr(router, PLACE):
            router.register_forward_hook(_hook)
        setattr(router, PLACE, (place, bool(normalised)))
    names = {id(p): n for n, p in module.named_parameters()}
    experts = int(routers[0][1].weight.shape[0])
    parents = (module.get_submodule(name.rpartition(".")[0]) for name, _ in routers)
    # Experts of a layer are often one tensor [E, ...], which the router's parent holds.
    stacked = tuple(
        tuple(names[id(p)] for p in parent.parameters() if p.ndim == 3 and p.shape[0] == experts) for parent in parents
    )
    # A weight that is no parameter is named after its module.
    gates = tuple(names.get(id(router.weight), f"{name}.weight") for name, router in routers)
    return RouterModules(experts, gates, stacked, bool(normalised))


def why_not(module: PreTrainedModel) -> str:
    """Returns the reason why the choices of a model's routers can be neither read nor given; '' where they can."""
    routers = list(_candidates(module))
    if not routers:
        return f"{type(module).__name__} has no router"
    if empty := [name for name, router in routers if not bool(router.weight.any())]:
        return (
            f"all weights of the router {empty[0]} are 0, so it scores all experts alike: it was not loaded, or was"
            " lost when the model was quantised or converted"
        )
    forms = {(type(r).__name__, r.weight.shape[0], _normalised(r)) for _, r in routers}
    if any(n is None for _, _, n in forms):
        return (
            f"{type(module).__name__}: its {type(routers[0][1]).__name__} does not choose the experts with the largest"
            " scores and weigh them by a softmax of all scores"
        )
    return "" if len(forms) == 1 else f"{type(module).__name__} has routers of several kinds: {sorted(map(str, forms))}"


def _candidates(module: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The modules that choose experts, each inside of another module, in the order of the layers."""
    for name, part in module.named_modules():
        if "Router" in type(part).__name__ and isinstance(getattr(part, "weight", None), Tensor) and "." in name:
            yield name, part


@torch.no_grad()
def _normalised(router: Any) -> bool | None:
    """Returns whether the weights of a token's experts sum to 1; None where the router computes something else than
    `weights_of` its largest logits. A trial shows it."""
    weight: Tensor = router.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TRIED, weight.shape[-1], generator=generator).to(weight)
    try:
        # The first call shows how large the scores are; in the second the largest is
        # `SPREAD`. Tiny scores would leave the choice to rounding. With huge ones all
        # weights but one vanish, and normalised and plain weights look alike.
        size = float(router(hidden)[0].abs().max())
        logits, weights, chosen = router(hidden * (SPREAD / size if size else 1.0))
        # The chosen are the K best exactly if the worst of them has the K-th largest score. Scores are compared and not
        # ids, because equal scores may be ordered in either way.
        shortfall = logits.topk(chosen.shape[-1], -1).values[:, -1] - logits.gather(-1, chosen).amin(-1)
    except Exception:  # a router of another form: its own code may raise anything
        return None
    rounding = SAME.get(weight.dtype, 0.02)
    if logits.shape != (TRIED, weight.shape[0]) or not float(shortfall.abs().max()) <= SPREAD * rounding:
        return None
    for normalised in (True, False):
        gap = (weights_of(logits, chosen, normalised, weights.dtype) - weights).abs().max()
        if float(gap) <= rounding:
            return normalised
    return None


def as_array(choices: Tensor) -> np.ndarray:
    """int16, on the CPU."""
    return choices.to(torch.int16).cpu().numpy()


class PackedRouting:
    """The choices that routers are given in a pass over packed segments, and the record of what they did.

    The pass may compute a beginning once that several segments share.

    Arrays by computed place have the letter C, arrays by packed position N.

    Args:
        given_N: int16 [N, R, K] choices to follow; None: each router chooses itself.
        scores: keep the routers' logits, with their gradients.
    """

    def __init__(self, packed: Packed, given_N: np.ndarray | None, scores: bool) -> None:
        self.routing = Routing()
        # Until `fold` each packed position is a place of its own.
        self._given_C, self._scores = given_N, scores
        self._place_N = np.arange(len(packed.ids_N))

    def fold(self, place_N: np.ndarray) -> bool:
        """From now on the pass computes each place once, for all positions of it. Returns False, and changes nothing,
        where positions of one place are given different choices.

        Args:
            place_N: the place of each packed position.
        """
        given_N = self._given_C
        if given_N is not None:
            known_N = known_rows(given_N)
            given_C = np.full((int(place_N.max()) + 1, *given_N.shape[1:]), UNKNOWN, np.int16)
            # Written to the place, then read back for every position: so two that disagree are found.
            given_C[place_N[known_N]] = given_N[known_N]
            if not np.array_equal(given_C[place_N[known_N]], given_N[known_N]):
                return False
            self._given_C = given_C
        self._place_N = place_N
        return True

    def pass_of(self, device: torch.device) -> Routing:
        """Returns the routing that the layout of the pass carries."""
        choices = None if self._given_C is None else torch.from_numpy(self._given_C.astype(np.int64)).to(device)
        self.routing = Routing(choices, self._scores)
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
        """The load-balance loss: the routers' probabilities times `packed.balance_E`, over tokens of known experts."""
        assert packed.balance_E is not None and packed.routed_N is not None
        # A place that is computed once counts once for each of its positions whose experts are known.
        times_C = np.bincount(self._place_N, known_rows(packed.routed_N), int(self._place_N.max()) + 1)
        logits = self.routing.stacked(self.routing.logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probability = torch.softmax(wide, -1)
        times = torch.from_numpy(times_C).to(probability)
        weights = torch.from_numpy(packed.balance_E).to(probability)
        return torch.einsum("cre,c,e->", probability, times, weights)
