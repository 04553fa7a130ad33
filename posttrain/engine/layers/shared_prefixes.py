"""Decides when a learner computes shared beginnings once, and proves, at the first use, that this changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.batch import Packed, positions
from posttrain.core.exchange.micro_batches import WORTH
from posttrain.core.exchange.row_gradient import square_sum, whole
from posttrain.engine.head.readout import ReadOut
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.layers.expert_routing import PackedRouting, Routing
from posttrain.engine.layers.prefix_tree_attention import SharedTree, TreeLayout
from posttrain.system.errors import InvariantError

PROOF = 512
"""Most tokens of the segments with which the first use is proved."""
SCALES = (1.0, 2.0**-6, 2.0**-12)
"""Factors of the loss of the proof. They are tried one after the other, until no gradient overflows."""
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest |difference| / |value| of hidden states and of the whole gradient that counts as rounding; 0.1 in narrower
types. Norms of transformers compute in float32 also in float64 models."""

OFF = "Set model.share_prefixes=false, and please report the model's architecture"


def refusal(gap: float, bound: float) -> str:
    """The words of the error where the proof fails."""
    return (
        "computing shared beginnings once changes what the model computes: hidden states or gradients differ"
        f" by {gap:.2g} of their size (bound {bound:g}). {OFF}"
    )


Routed = PackedRouting | Routing | None
"""The choices that routers are given in a pass, and the record of what they did."""


class Sharing:
    """Hidden states of packed segments by one read-out, with shared beginnings computed once where that is worth it.

    Args:
        on: never share where False.
        every: compute all positions, also those behind the last one that is read. A mixture of experts needs them,
            because what its routers did is recorded for every position.

    `proved`: whether the proof was made.
    """

    def __init__(self, out: ReadOut, kernels: KernelChoice, on: bool, every: bool = False) -> None:
        self._out, self.on, self.proved, self._every = out, on, False, every
        self._kernels: KernelChoice = kernels
        self.computed = 0
        """Positions of all calls of `hidden` so far, without those that sharing saved; those that were cut count."""

    def hidden(self, packed: Packed, at: np.ndarray | None = None, routing: PackedRouting | None = None) -> Tensor:
        """[M, H]: the hidden state that predicts each spoken token; with `at` those at these packed positions.

        Without `every`, positions of a segment behind its last one that is read, such as an answer's last token, are
        not computed. `routing`: the record of a mixture of experts. Where it is given different choices for equal
        beginnings, nothing is shared.
        """
        at = packed.source_M if at is None else at
        ids, lengths = packed.ids_N, packed.lengths_S
        # Cut before the tree is made, so that positions that are not read are neither shared nor computed.
        if not self._every:
            ids, lengths, at = _until_read(ids, lengths, at)
        tree = SharedTree.of(ids, lengths) if self.on and len(lengths) > 1 else None
        if tree is not None and tree.saving < WORTH:
            tree = None
        # The sampler may have sent positions of one place to different experts: then nothing is shared.
        if tree is not None and routing is not None and not routing.fold(tree.place_N):
            tree = None
        self.computed += len(packed.ids_N) - (0 if tree is None else len(ids) - len(tree.first_U))
        if tree is None:
            return self._plain(ids, lengths, at, routing)
        if not self.proved:
            self._prove(ids, lengths)
            self.proved = True
        return self._shared(ids, positions(lengths), tree, tree.place_N[at], routing)

    def either(self, packed: Packed, shared: bool) -> Tensor:
        """`hidden` of the spoken tokens, with equal beginnings computed once, however little that saves, or without."""
        if not shared:
            return self._plain(packed.ids_N, packed.lengths_S, packed.source_M)
        tree = SharedTree.of(packed.ids_N, packed.lengths_S)
        return self._shared(packed.ids_N, positions(packed.lengths_S), tree, tree.place_N[packed.source_M])

    def _plain(
        self, ids_N: np.ndarray, lengths_S: np.ndarray, at_M: np.ndarray | None, routing: Routed = None
    ) -> Tensor:
        """[M, H]: hidden states at `at_M` without sharing; [N, H]: of all positions, where `at_M` is None."""
        layout = PackedLayout(lengths_S, kernels=self._kernels)
        return self._states(ids_N, positions(lengths_S), layout, at_M, routing)

    def _shared(
        self,
        ids_N: np.ndarray,
        positions_N: np.ndarray,
        tree: SharedTree,
        at_M: np.ndarray | None,
        routing: Routed = None,
    ) -> Tensor:
        """[M, H]: hidden states of the unique positions `at_M`; [U, H]: of all, where `at_M` is None."""
        layout = TreeLayout(tree, kernels=self._kernels)
        return self._states(ids_N[tree.first_U], positions_N[tree.first_U], layout, at_M, routing)

    def _states(
        self,
        ids: np.ndarray,
        places: np.ndarray,
        layout: PackedLayout | TreeLayout,
        at_M: np.ndarray | None,
        routing: Routed,
    ) -> Tensor:
        """Hidden states of these ids by this layout: at the positions `at_M`, or all of them where it is None."""
        device = self._out.weight.device
        layout.routing = routing.pass_of(device) if isinstance(routing, PackedRouting) else routing
        inputs = self._to(ids), self._to(places), layout
        return self._out.hidden(*inputs) if at_M is None else self._out.hidden_at(*inputs, at_M)

    def _prove(self, ids_N: np.ndarray, lengths_S: np.ndarray) -> None:
        """Compare hidden states and gradients of a few segments, with sharing and without.

        Raises:
            InvariantError: they differ by more than rounding.
        """
        ids, lengths = _proof_segments(ids_N, lengths_S)
        tree, positions_N = SharedTree.of(ids, lengths), positions(lengths)
        trained = [p for p in self._out.decoder.parameters() if p.requires_grad]
        with torch.enable_grad():
            shared_routing, plain_routing = self._choices(ids, lengths, tree)
            shared = self._shared(ids, positions_N, tree, None, shared_routing)[self._to(tree.place_N)]
            alone = self._plain(ids, lengths, None, plain_routing)
            # Both passes follow the same choices. Otherwise a choice near a tie could differ, and make a difference
            # that sharing did not cause. `lead` says whether the routers would have chosen so themselves.
            lead = 0.0 if shared_routing is None else shared_routing.chosen_by_more(alone.dtype)
            gap = relative_gap([shared.detach()], [alone.detach()])
            # Without trained weights, as in a reference, there is no gradient to compare.
            if trained:
                gap = max(gap, _gradient_gap(shared, alone, trained))
        bound = BOUNDS.get(alone.dtype, 0.1)
        if not gap <= bound:
            raise InvariantError(refusal(gap, bound))
        if lead > 1:
            raise InvariantError(
                "computing shared beginnings once changes which experts the routers choose, by"
                f" {lead:.2g} times what rounding may. {OFF}"
            )

    @torch.no_grad()
    def _choices(self, ids: np.ndarray, lengths: np.ndarray, tree: SharedTree) -> tuple[Routing | None, Routing | None]:
        """The experts that both passes of the proof follow, so that rounding decides none of them: for the pass that
        computes a shared beginning once, which also keeps the routers' scores, and for the other one; None where there
        is no router."""
        recorded = Routing()
        self._plain(ids, lengths, None, recorded)
        if not recorded.used:
            return None, None
        given_U = recorded.stacked(recorded.used)[self._to(tree.first_U)]
        return Routing(given_U, True), Routing(given_U[self._to(tree.place_N)])

    def _to(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.astype(np.int64)).to(self._out.weight.device)


def _until_read(
    ids_N: np.ndarray, lengths_S: np.ndarray, at_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, lengths, at_M) of the segments, each cut behind its last position that is read. A segment of which nothing
    is read is left out, and `at_M` is numbered anew. Where nothing is read at all, nothing is cut."""
    if not len(at_M):
        return ids_N, lengths_S, at_M
    # kept_S is how much of each segment is needed: up to its last read position. The new number of a place is how many
    # places before it were kept.
    starts, segment_N = np.cumsum(lengths_S) - lengths_S, np.repeat(np.arange(len(lengths_S)), lengths_S)
    kept_S = np.zeros_like(lengths_S)
    np.maximum.at(kept_S, segment_N[at_M], at_M - starts[segment_N[at_M]] + 1)
    kept_N = positions(lengths_S) < kept_S[segment_N]
    return ids_N[kept_N], kept_S[kept_S > 0], np.cumsum(kept_N)[at_M] - 1


def _proof_segments(ids_N: np.ndarray, lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) of a few segments that begin alike: the two that share the most, and those that follow them in
    sorted order, as long as all have at most `PROOF` tokens. Each is cut to `PROOF` tokens."""
    ends = np.cumsum(lengths_S)
    parts = [ids_N[a:b] for a, b in zip(ends - lengths_S, ends, strict=True)]
    parts.sort(key=lambda x: x.astype(">u4").tobytes())
    # The neighbours that share most, and those that follow: a
    # proof on segments which share nothing would prove nothing.
    best = max(range(1, len(parts)), key=lambda i: SharedTree.of(*_joined(parts[i - 1 : i + 1])).saving)
    chosen = parts[best - 1 : best + 1]
    for part in parts[best + 1 :]:
        if sum(map(len, chosen)) + len(part) > PROOF:
            break
        chosen.append(part)
    return _joined([part[:PROOF] for part in chosen])


def _gradient_gap(shared: Tensor, alone: Tensor, trained: Sequence[Tensor]) -> float:
    """`relative_gap` between the gradients of one weighted sum of the hidden states, with and without sharing.

    Gradients in float16 may overflow. Where those without sharing do, both are computed again of a smaller sum.
    """
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0)).to(alone)

    def gradients(hidden: Tensor, scale: float) -> list[Tensor]:
        loss = (hidden * (weights * scale)).sum()
        # The graph stays for the next scale.
        of_weights = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
        return [whole(g) for g in of_weights if g is not None]

    gap = float("inf")
    for scale in SCALES:
        wanted = gradients(alone, scale)
        gap = relative_gap(gradients(shared, scale), wanted)
        # The scale falls only where it must: a small one pushes float16 gradients below its least number.
        if all(bool(g.isfinite().all()) for g in wanted):
            break
    return gap


def _joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the parts back to back, lengths of the parts)."""
    return np.concatenate(parts), np.array([len(x) for x in parts], np.int64)


def relative_gap(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """|difference| / |wanted| of all numbers together; inf where it is not a number."""
    return ratio(sum(square_sum(a - b) for a, b in zip(ours, wanted, strict=True)), sum(map(square_sum, wanted)))


def ratio(apart: float, size: float) -> float:
    """|difference| / |value| from the sums of their squares; inf where it is not a number."""
    gap = (apart / max(size, 1e-60)) ** 0.5
    return gap if gap == gap else float("inf")
