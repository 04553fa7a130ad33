"""One packed forward pass and one head: how a learner and a reference read segments.

Axis letters: N packed positions, M spoken tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import Packed
from posttrain.core.engines import KernelChoice
from posttrain.core.errors import DataError
from posttrain.core.scores import Odds
from posttrain.core.types import Top
from posttrain.engine.logit_rules import LogitRules
from posttrain.engine.logprob import candidates, energies, logprobs, most_probable, odds
from posttrain.engine.models import Policy
from posttrain.engine.sharing import Sharing
from posttrain.engine.stateful import Alone, is_stateful
from posttrain.engine.training_layers import training_read_out
from posttrain.engine.wide_head import prove_logprobs

SCORE_TOKENS = 16384
"""Packed tokens of one forward-only pass."""


class PackedReader:
    """Runs packed segments through the decoder and the head of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.module = policy.module
        self.context = policy.context
        self.kernels: KernelChoice = policy.kernels
        self._proved = False
        self.out = training_read_out(policy.module, policy.kernels)
        self._rows = (
            Alone(self.out, policy.kernels)
            if is_stateful(policy.module)
            else Sharing(self.out, policy.kernels, policy.share_prefixes)
        )

    @property
    def computed(self) -> int:
        """Positions computed so far."""
        return self._rows.computed

    def hidden(self, packed: Packed, at: np.ndarray | None = None) -> Tensor:
        """[M, H]: the hidden state that predicts each spoken token, or those `at` these packed positions.

        Raises:
            DataError: a segment is longer than the context, so it has positions that the model does not have.
        """
        longest = int(packed.lengths_S.max())
        if longest > self.context:
            raise DataError(
                f"a segment of {longest} tokens in a context of {self.context}: raise model.context, or shorten prompts"
                " and sampling.max_tokens"
            )
        return self._rows.hidden(packed, at)

    def head(self, packed: Packed, hidden: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(log-prob, entropy or None) [M] each."""
        out = self.out
        if not self._proved and out.weight.dtype.itemsize < 4:
            prove_logprobs(out, hidden, self.kernels)
            self._proved = True
        return logprobs(
            hidden,
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
            parts = [self.head(part, self.hidden(part), False)[0] for part in packed.split(SCORE_TOKENS)]
            return torch.cat(parts).to(dtype).cpu().numpy()

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M], forward only."""
        with forward_only(self.module):
            found = (self.head(part, self.hidden(part), True)[1] for part in packed.split(SCORE_TOKENS))
            return joined([x for x in found if x is not None])

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
        """float32 [M], forward only; not `targeted`: of the distribution alone."""
        out, parts = self.out, list[Tensor]()
        with forward_only(self.module):
            for part in packed.split(SCORE_TOKENS):
                hidden = self.hidden(part)
                target = device_ids(part.target_M, hidden.device) if targeted else None
                parts.append(energies(hidden, out.weight, out.bias, target, **self._contract(part)))
            return joined(parts)

    def candidates(self, packed: Packed, hidden: Tensor, ids_MK: Tensor) -> Tensor:
        """[M, K] log-probs of `ids_MK`, differentiable."""
        return candidates(hidden, self.out.weight, self.out.bias, ids_MK, **self._contract(packed))

    def top(self, packed: Packed, k: int) -> Top:
        """Most probable tokens first, forward only."""
        out, parts = self.out, list[Top]()
        with forward_only(self.module):
            for part in packed.split(SCORE_TOKENS):
                found = most_probable(self.hidden(part), out.weight, out.bias, k, **self._contract(part))
                parts.append(Top(found.indices.int().cpu().numpy(), found.values.float().cpu().numpy()))
        return Top.join(parts, parts[0].ids.shape[1])

    def _contract(self, packed: Packed) -> dict[str, Any]:
        """The arguments of the head's functions that shape the distribution of each spoken token."""
        out = self.out
        rules = LogitRules.of(packed, out.weight.shape[0], out.weight.device)
        return {
            "sampling": packed.sampling,
            "kept": packed.kept,
            "rules": rules,
            "softcap": out.softcap,
            "scale": out.scale,
        }


def device_ids(x: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(x.astype(np.int64)).to(device)


def joined(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).float().cpu().numpy()


@contextmanager
def forward_only(module: nn.Module) -> Iterator[None]:
    """Inside: no gradient and no checkpointing. Afterwards training mode is as it was before."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
