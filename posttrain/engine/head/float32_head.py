"""Proves that the head computes in float32 although its weights are narrower, such as bfloat16.

Learner and sampler each compare their own head, log-probs and logits, with a float64 computation before its first use.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.sampling import Sampling
from posttrain.engine.head.logprob import logprobs
from posttrain.engine.head.readout import ReadOut
from posttrain.system.errors import InvariantError

TOKENS = 64
"""Most hidden states with which a head is tried."""
BLOCK = 8192
"""The float64 logits of at most this many ids exist at once."""
BOUND = 5e-5
"""Largest difference that counts as float32's rounding, relative to the largest logit. Logits that are rounded to
float16 differ by about 2e-4, and by 2e-3 in bfloat16."""


@torch.no_grad()
def prove_logprobs(out: ReadOut, hidden: Tensor, kernels: KernelChoice) -> None:
    """InvariantError where the learner's head is narrower than float32 at these hidden states [M, H]."""
    hidden = hidden.detach()[:TOKENS]
    # Multiples of a prime: ids from all over the vocabulary, so that every block is read, without a random generator.
    targets = torch.arange(len(hidden), device=hidden.device) * 7919 % out.weight.shape[0]
    ours, _ = logprobs(
        hidden,
        out.weight,
        out.bias,
        targets,
        sampling=Sampling(stop_ids=()),
        want_entropy=False,
        kernels=kernels,
        softcap=out.softcap,
        scale=out.scale,
    )
    # At least 1, so that a model whose logits are all near 0 is not judged by a relative error.
    largest, block_norms, target_logits = torch.tensor(1.0).double(), [], torch.zeros(len(hidden)).double()
    for first, z in _exact(out, hidden):
        largest = torch.maximum(largest, z.abs().max())
        block_norms.append(z.logsumexp(1))
        in_block = (targets.cpu() >= first) & (targets.cpu() < first + z.shape[1])
        target_logits[in_block] = z[in_block, targets.cpu()[in_block] - first]
    theirs = target_logits - torch.stack(block_norms).logsumexp(0)
    _refuse("the learner's", float((ours.double().cpu() - theirs).abs().max() / largest))


@torch.no_grad()
def prove_logits(out: ReadOut) -> None:
    """InvariantError where the sampler's head is narrower than float32."""
    width = out.weight.shape[1]
    hidden = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0)).to(out.weight)
    ours, gap, largest = out.logits(hidden).double().cpu(), torch.zeros(()).double(), torch.ones(()).double()
    for first, z in _exact(out, hidden):
        gap = torch.maximum(gap, (ours[:, first : first + z.shape[1]] - z).abs().max())  # `max` would pass over NaN
        largest = torch.maximum(largest, z.abs().max())
    _refuse("the sampler's", float(gap / largest))


def _exact(out: ReadOut, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first id, logits [M, B] in float64 on the CPU) of each block of the vocabulary."""
    # float64 on the CPU: what may narrow the head on an accelerator, TF32 or an autocast there, cannot touch it.
    h = hidden.cpu().double()
    for first in range(0, out.weight.shape[0], BLOCK):
        w = out.weight[first : first + BLOCK].detach().cpu().double()
        z = h @ w.T
        if out.bias is not None:
            z = z + out.bias[first : first + BLOCK].detach().cpu().double()
        z = z * out.scale
        yield first, z if out.softcap is None else torch.tanh(z / out.softcap) * out.softcap


def _refuse(whose: str, gap: float) -> None:
    """InvariantError where the difference from float64, relative to the largest logit, is more than `BOUND`, or nan."""
    if not gap <= BOUND:
        raise InvariantError(
            f"{whose} head computes in less than float32: its logits differ from float64 by {gap:.2g} of the largest"
            f" (bound {BOUND:g}). Log-probs would be rounded to a few digits, and ratios with them. Look for an"
            " autocast around the head, a cast of its logits, or TF32 (torch.backends.cuda.matmul.allow_tf32)"
        )
