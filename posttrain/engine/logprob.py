"""The one head: hidden states to (log-prob, entropy). It works in chunks, forward and backward, so that no matrix
[tokens, vocabulary] exists at once.

Every loss differentiates the policy through this head. The log-prob is that of the distribution that was sampled from.
It applies the architecture's scale and soft-cap first. Then it applies the contract (`core.sampling`): its rules, the
temperature, and the kept token set, renormalised.

Axis letters: M spoken tokens, V vocabulary, H hidden width, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from posttrain.core.engines import KernelChoice
from posttrain.core.errors import InvariantError
from posttrain.core.sampling import Sampling
from posttrain.core.types import Kept
from posttrain.engine import plain
from posttrain.engine.kernels import Kernel, add_forms, kernel
from posttrain.engine.logit_rules import LogitRules
from posttrain.engine.transform import KeptMask, KeptSets, LogitSlope, LogitTransform, logit_dtype

CHUNK_ELEMENTS = {"cpu": 1 << 21, "accelerator": 1 << 27}
"""Logits (C * V) of one chunk on each kind of device. 8 MiB of float32 stay near a CPU's caches; 512 MiB fill a GPU."""
CHUNK_ROWS = 128
"""Fewest tokens of a chunk, whatever the vocabulary. With fewer, reading the whole weight of the head
costs too much per token."""


def logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    sampling: Sampling,
    kept: Kept | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    want_entropy: bool = False,
    chunk: int | None = None,
    kernels: KernelChoice = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from. Both [M], in `logit_dtype`.

    Args:
        hidden: [M, H]. weight: [V, H]. bias: [V]. targets: [M] integer ids.
        sampling: the contract the tokens were drawn under; greedy is refused.
        kept: one set per token, exactly where `sampling.truncated`. rules: exactly where `sampling.rules`.
        chunk: tokens of one chunk; None: as many as `CHUNK_ELEMENTS` allows, and at least `CHUNK_ROWS`.

    With p the distribution, the backward is d logp_t / dz = onehot(t) - p and d H / dz_i = -p_i (log p_i + H). The
    chain rule then multiplies by the derivative of each step that made z: the temperature, a repetition penalty (its
    factor depends on the sign of the logit), and a soft-cap.
    """
    sampling.for_training()
    if (kept is not None) != sampling.truncated or (kept is not None and len(kept) != len(targets)):
        sets_given = 0 if kept is None else len(kept)
        raise InvariantError(
            f"{len(targets)} tokens with {sets_given} kept sets under {sampling}: one each exactly where it truncates"
        )
    if (rules is not None) != sampling.rules:
        raise InvariantError(f"rules must be given exactly where the contract has some: {sampling}")
    if hidden.shape[0] != targets.shape[0]:
        raise InvariantError(f"{hidden.shape[0]} hidden states for {targets.shape[0]} tokens")
    transform = LogitTransform(
        1 / sampling.temperature, softcap, scale, rules, None if kept is None else KeptSets(kept, targets)
    )
    form = kernel("head", hidden.device, logit_dtype(weight.dtype), kernels)
    logp, entropy = form.function(
        hidden, weight, bias, targets.long(), transform, want_entropy, chunk or _rows(hidden, weight)
    )
    return logp, entropy if want_entropy else None


def candidates(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids_MK: Tensor,
    *,
    sampling: Sampling,
    kept: Kept | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Log-probs [M, K] of the tokens `ids_MK` under the contract, differentiable. The backward computes each chunk's
    logits again. A token of probability 0 gets the lowest finite number of the dtype."""
    dtype = logit_dtype(weight.dtype)
    transform = LogitTransform(
        1 / sampling.temperature, softcap, scale, rules, None if kept is None else KeptMask(kept, hidden.device)
    )
    low = torch.finfo(dtype).min

    def some(h: Tensor, ids: Tensor, at: int) -> Tensor:
        z = transform.scores(h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), at)
        return (z.gather(1, ids) - torch.logsumexp(z, 1, keepdim=True)).clamp_min(low)

    rows = _rows(hidden, weight)
    parts = [
        checkpoint(some, hidden[a : a + rows], ids_MK[a : a + rows], a, use_reentrant=False)
        for a in range(0, len(hidden), rows)
    ]
    return torch.cat([hidden.new_zeros((0, ids_MK.shape[1]), dtype=dtype), *parts])


@torch.no_grad()
def most_probable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    sampling: Sampling,
    kept: Kept | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Any:
    """(values, indices) [M, K] of the most probable tokens, in descending order of log-prob. k = 0
    takes the whole vocabulary."""
    dtype = logit_dtype(weight.dtype)
    transform = LogitTransform(
        1 / sampling.temperature, softcap, scale, rules, None if kept is None else KeptMask(kept, hidden.device)
    )
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    k, rows = k or weight.shape[0], _rows(hidden, weight)
    values: list[Tensor] = []
    indices: list[Tensor] = []
    for at in range(0, len(hidden), rows):
        z = transform.scores(hidden[at : at + rows].to(dtype), w, b, at)
        best = torch.log_softmax(z, 1).topk(min(k, z.shape[1]), 1)
        values.append(best.values.clamp_min(torch.finfo(dtype).min))
        indices.append(best.indices)
    return torch.return_types.topk((torch.cat(values), torch.cat(indices)))


@torch.no_grad()
def energies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    sampling: Sampling,
    kept: Kept | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """|d log p_t / dz|^2 = |onehot(t) - p|^2 [M] of each target under the contract. z is the input of the softmax."""
    dtype = logit_dtype(weight.dtype)
    transform = LogitTransform(
        1 / sampling.temperature, softcap, scale, rules, None if kept is None else KeptMask(kept, hidden.device)
    )
    w, b, rows = weight.to(dtype), None if bias is None else bias.to(dtype), _rows(hidden, weight)
    out = [hidden.new_zeros(0, dtype=dtype)]
    for at in range(0, len(hidden), rows):
        p = torch.softmax(transform.scores(hidden[at : at + rows].to(dtype), w, b, at), 1)
        p.scatter_add_(1, targets[at : at + rows, None].long(), p.new_full((len(p), 1), -1.0))
        out.append(torch.linalg.vecdot(p, p))
    return torch.cat(out)


@torch.no_grad()
def odds(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Sequence[float],
    *,
    sampling: Sampling,
    kept: Kept | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each target lies in the distribution p it was drawn from. Returns four float64 tensors: the mass of the ids
    below it [M], the mass of the ids up to and with it [M], and for each q proportional to p^(1 / temperature) its log
    q - log p [M, K] and the total variation between q and p [M, K]."""
    dtype = logit_dtype(weight.dtype)
    transform = LogitTransform(
        1 / sampling.temperature, softcap, scale, rules, None if kept is None else KeptMask(kept, hidden.device)
    )
    w, b, rows = weight.to(dtype), None if bias is None else bias.to(dtype), _rows(hidden, weight)
    ids = torch.arange(weight.shape[0], device=weight.device)
    none = hidden.new_zeros((0, len(temperatures)), dtype=torch.float64)
    out = [[none.new_zeros(0)], [none.new_zeros(0)], [none], [none]]
    for at in range(0, len(hidden), rows):
        logp = torch.log_softmax(transform.scores(hidden[at : at + rows].to(dtype), w, b, at).double(), 1)
        target = targets[at : at + rows, None].long()
        p, said = logp.exp(), logp.gather(1, target)[:, 0]
        below = torch.where(ids < target, p, 0.0).sum(1)
        ratios, apart = p.new_zeros(len(p), len(temperatures)), p.new_zeros(len(p), len(temperatures))
        for k, t in enumerate(temperatures):
            q = torch.log_softmax(logp / t, 1)
            ratios[:, k], apart[:, k] = q.gather(1, target)[:, 0] - said, 0.5 * (q.exp() - p).abs().sum(1)
        for part, x in zip(out, (below, below + said.exp(), ratios, apart), strict=True):
            part.append(x)
    below, upto, ratio, apart = (torch.cat(part) for part in out)
    return below, upto, ratio, apart


def _rows(hidden: Tensor, weight: Tensor) -> int:
    """Tokens of one chunk."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "accelerator"] // weight.shape[0])


class _Head(torch.autograd.Function):
    """The head's autograd function. It saves its inputs and the normaliser [M], and the backward
    recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        want_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = logit_dtype(weight.dtype)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        count = hidden.shape[0]
        logp = torch.empty(count, dtype=dtype, device=hidden.device)
        norm = torch.empty_like(logp)
        entropy = torch.empty_like(logp) if want_entropy else logp.new_empty(0)
        for at in range(0, count, chunk):
            to = min(at + chunk, count)
            z = transform.scores(hidden[at:to].to(dtype), w, b, at)
            norm[at:to] = torch.logsumexp(z, 1)
            logp[at:to] = z.gather(1, targets[at:to, None])[:, 0] - norm[at:to]
            if want_entropy:
                outside = transform.outside(z)
                q = z.sub_(norm[at:to, None])
                p = q.exp()
                if outside is not None:
                    q.masked_fill_(outside, 0)
                entropy[at:to] = -torch.linalg.vecdot(p, q)
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.transform, ctx.want_entropy, ctx.chunk = transform, want_entropy, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        want_entropy, chunk = ctx.want_entropy, ctx.chunk
        dtype = logit_dtype(weight.dtype)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(w) if need_weight else None
        grad_bias = torch.zeros_like(b) if b is not None and need_bias else None
        for at in range(0, hidden.shape[0], chunk):
            to = min(at + chunk, hidden.shape[0])
            h = hidden[at:to].to(dtype)
            slopes: list[LogitSlope] = []
            z = transform.scores(h, w, b, at, slopes)
            by_logp, by_entropy = grads[0][at:to], grads[1][at:to] if want_entropy else None
            outside = transform.outside(z) if want_entropy else None
            d = _cotangent(z.sub_(norm[at:to, None]), outside, targets[at:to], by_logp, by_entropy, entropy[at:to])
            for slope in reversed(slopes):
                slope.times(d)
            d.mul_(transform.beta * transform.scale)
            if grad_hidden is not None:
                grad_hidden[at:to] = d @ w
            if grad_weight is not None:
                grad_weight.addmm_(d.t(), h)
            if grad_bias is not None:
                grad_bias.add_(d.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _cotangent(
    q: Tensor, outside: Tensor | None, targets: Tensor, by_logp: Tensor, by_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient [C, V] with respect to z, from the gradients [C] with respect to log-prob and entropy. The
    log-probabilities q [C, V] are overwritten."""
    p = q.exp()
    if by_entropy is None:
        d = p.mul_(-by_logp[:, None])
    else:
        if outside is not None:
            q.masked_fill_(outside, 0)
        # -(g_logp + g_H (q + H)) p
        d = q.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(by_logp[:, None]).mul_(p).neg_()
    return d.scatter_add_(1, targets[:, None], by_logp[:, None])


add_forms(
    Kernel(operation="head", form="torch", function=_Head.apply, bounds={torch.float32: 1e-5, torch.float64: 1e-13}),
    Kernel(operation="head", form="reference", function=plain.head),
)
