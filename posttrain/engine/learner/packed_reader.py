"""One packed forward pass and one head: how a learner and a reference read segments.

Axis letters: N packed positions, M spoken tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.config.engines import KernelChoice
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Odds
from posttrain.core.types import Top
from posttrain.engine.head.float32_head import prove_logprobs
from posttrain.engine.head.logit_rules import LogitRules, device_ids
from posttrain.engine.head.logprob import HeadContract, candidates, energies, logprobs, most_probable, odds
from posttrain.engine.layers.expert_routing import PackedRouting, routers_of
from posttrain.engine.layers.fused_layers import training_read_out
from posttrain.engine.layers.shared_prefixes import Sharing
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.model.recurrent_state import SeparateRows, is_stateful
from posttrain.system.errors import DataError

SCORE_TOKENS = 16384
"""Packed tokens of one forward-only pass."""
Reading = Callable[[Packed, Tensor], Tensor]
"""From a part of a batch and its hidden states [M, H] to [M]."""


class PackedReader:
    """Runs packed segments through the decoder and the head of one policy."""

    def __init__(self, policy: Policy, *, replays: bool = False) -> None:
        self.module = policy.module
        self.routers = routers_of(policy.module)
        """None where the model is no mixture of experts, or its routers are not understood."""
        self.replays = replays
        """Whether a token is computed by the experts that its sampler chose, where these are known."""
        self.routing: PackedRouting | None = None
        """The record of what the routers did in the last pass that asked for it."""
        self.context = policy.context
        self.kernels: KernelChoice = policy.kernels
        # The head is proved once, on the first hidden states of the run, and only for weights below float32.
        self._proved = False
        self.out = training_read_out(policy.module, policy.kernels)
        self._rows = (
            SeparateRows(self.out, policy.kernels)
            if is_stateful(policy.module)
            else Sharing(self.out, policy.kernels, policy.share_prefixes, every=self.routers is not None)
        )

    @property
    def computes_once(self) -> bool:
        """True where a beginning that several segments of a pass share is computed once, whatever its tokens are. In a
        mixture of experts it is computed again where samplers chose different experts for it."""
        return isinstance(self._rows, Sharing) and self._rows.on and self.routers is None

    @property
    def computed(self) -> int:
        """Positions computed so far."""
        return self._rows.computed

    def hidden(self, packed: Packed, at: np.ndarray | None = None) -> Tensor:
        """[M, H]: the hidden state that predicts each spoken token; with `at` those at these packed positions.

        Raises:
            DataError: a segment is longer than the context, so it has positions that the model does not have.
        """
        longest = int(packed.lengths_S.max())
        if longest > self.context:
            raise DataError(
                f"a segment of {longest} tokens in a context of {self.context}: raise model.context, or shorten prompts"
                " and sampling.max_tokens"
            )
        # Without choices to follow, and without a loss that reads the routers, the pass keeps nothing of them.
        choices = packed.routed_N if self.replays else None
        balanced = packed.balance_E is not None
        recorded = choices is not None or balanced
        return self.routed(packed, at, PackedRouting(packed, choices, balanced) if recorded else None)

    def routed(self, packed: Packed, at: np.ndarray | None, routing: PackedRouting | None) -> Tensor:
        """`hidden`, with a record that gives the routers their choices and keeps what they did; None: neither."""
        self.routing = None if self.routers is None else routing
        return self._rows.hidden(packed, at, self.routing)

    def head(self, packed: Packed, hidden: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(log-prob, entropy or None) [M] each."""
        out = self.out
        if not self._proved and out.weight.dtype.itemsize < 4 and len(hidden):
            prove_logprobs(out, hidden, self.kernels)
            self._proved = True
        return logprobs(
            hidden,
            # The node of the embedding's look-up where head and embedding
            # share the weight, so that both have one gradient.
            out.weight_to_read(),
            out.bias,
            device_ids(packed.target_M, hidden.device),
            want_entropy=entropy,
            kernels=self.kernels,
            **self._contract(packed),
        )

    def score(self, packed: Packed, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """[M], forward only, in parts of at most `SCORE_TOKENS`."""
        with forward_only(self.module):
            parts = [self.logp_of(part, self.hidden(part)) for part in packed.split(SCORE_TOKENS)]
            return torch.cat(parts).to(dtype).cpu().numpy()

    def each(self, packed: Packed, functions: Mapping[str, Reading]) -> dict[str, np.ndarray]:
        """float32 [M] of each function, forward only. The layers run once for all of them."""
        out: dict[str, list[Tensor]] = {name: [] for name in functions}
        with forward_only(self.module):
            for part in packed.split(SCORE_TOKENS):
                hidden = self.hidden(part)
                # Each function runs the head by itself, so it has the bits that it has alone.
                for name, function in functions.items():
                    out[name].append(function(part, hidden))
            return {name: joined(parts) for name, parts in out.items()}

    def logp_of(self, part: Packed, hidden: Tensor) -> Tensor:
        """[M] log-probs of the spoken tokens."""
        return self.head(part, hidden, False)[0]

    def entropy_of(self, part: Packed, hidden: Tensor) -> Tensor:
        """[M] entropies."""
        entropy = self.head(part, hidden, True)[1]
        assert entropy is not None
        return entropy

    def energy_of(self, part: Packed, hidden: Tensor, targeted: bool = True) -> Tensor:
        """[M]: |onehot(t) - p|^2 of each spoken token t; not `targeted`: |p|^2."""
        target = device_ids(part.target_M, hidden.device) if targeted else None
        return energies(hidden, self.out.weight, self.out.bias, target, **self._contract(part))

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M], forward only."""
        return self.each(packed, {"": self.entropy_of})[""]

    def odds(self, packed: Packed, temperatures: Sequence[float]) -> Odds:
        """float64, forward only."""
        out, parts = self.out, list[tuple[Tensor, ...]]()
        with forward_only(self.module):
            for part in packed.split(SCORE_TOKENS):
                hidden = self.hidden(part)
                target = device_ids(part.target_M, hidden.device)
                parts.append(odds(hidden, out.weight, out.bias, target, temperatures, **self._contract(part)))
            return Odds(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))

    def energy(self, packed: Packed, targeted: bool = True) -> np.ndarray:
        """float32 [M], forward only: `energy_of` each spoken token."""
        return self.each(packed, {"": partial(self.energy_of, targeted=targeted)})[""]

    def candidates(self, packed: Packed, hidden: Tensor, ids_MK: Tensor) -> Tensor:
        """[M, K] log-probs of `ids_MK`, differentiable."""
        return candidates(hidden, self.out.weight, self.out.bias, ids_MK, **self._contract(packed))

    def top(self, packed: Packed, k: int) -> Top:
        """Most probable tokens first, forward only."""
        out, parts = self.out, list[Top]()
        with forward_only(self.module):
            for part in packed.split(SCORE_TOKENS):
                top_tokens = most_probable(self.hidden(part), out.weight, out.bias, k, **self._contract(part))
                parts.append(Top(top_tokens.indices.int().cpu().numpy(), top_tokens.values.float().cpu().numpy()))
        return Top.join(parts, parts[0].ids.shape[1])

    def _contract(self, packed: Packed) -> HeadContract:
        """What shapes the distribution of these tokens: the batch's contract, and the model's scale and soft-cap."""
        out = self.out
        # From the part itself, since rules speak of packed positions.
        rules = LogitRules.of(packed, out.weight.shape[0], out.weight.device)
        return HeadContract(
            sampling=packed.sampling, kept=packed.kept, rules=rules, softcap=out.softcap, scale=out.scale
        )


def joined(parts: list[Tensor]) -> np.ndarray:
    """The parts one after the other, as float32 on the CPU."""
    return torch.cat(parts).float().cpu().numpy()


@contextmanager
def forward_only(module: nn.Module) -> Iterator[None]:
    """Inside: no gradient, and no checkpointing, which transformers does in training mode only."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
