"""Operations of the engine by their definition, in plain torch. Every faster form is compared with them.

Shapes: B sequences, H query heads, K key-value heads, L queries, T keys, D head width, M spoken tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from posttrain.engine.head.logit_transform import LogitTransform


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """q [B, H, L, D], k and v [B, K, T, D] -> [B, H, L, D]; causal where no mask [L, T] is given, which needs L == T.

    With a softcap the scores become softcap * tanh(s / softcap). The softmax is in float32 at least.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    product = q @ k.transpose(-1, -2)
    s = product * scaling if softcap is None else softcap * torch.tanh(product * (scaling / softcap))
    visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril() if mask is None else mask
    weights = s.masked_fill(~visible, float("-inf")).softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32))
    return weights.to(v.dtype) @ v


def head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    want_entropy: bool,
    tile: object,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy) [M] over all logits [M, V] at once, differentiated by autograd. `tile` is not
    read: it is there because all forms of an operation take the same arguments."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    z = transform.scores(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), 0)
    logp, outside = z.log_softmax(1), transform.outside(z)
    # p log p has the limit 0 where p is 0, and 0 times -inf is nan, also in the backward pass.
    finite = logp if outside is None else logp.masked_fill(outside, 0)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * finite).sum(1)


def adamw(parameters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    """AdamW that updates one parameter after the other."""
    return torch.optim.AdamW(parameters, foreach=False, fused=False, **options)
