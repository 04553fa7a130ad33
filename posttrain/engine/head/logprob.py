"""The one head: hidden states to (log-prob, entropy). It works in tiles, some tokens and one block of the vocabulary,
forward and backward. So no matrix [tokens, vocabulary] exists at once, and beyond the weight and its gradient no memory
grows with the vocabulary. Weights of less than float32 are converted block by block.

Every loss differentiates the policy through this head. A log-prob here belongs to the distribution that was sampled
from. To logits the head applies the architecture's scale and soft-cap first, and then the contract (`core.sampling`):
its rules, the temperature, and the kept token set, renormalised.

Axis letters: M spoken tokens, V vocabulary, H hidden width, C tokens and B ids of one tile, K named ids of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.sampling import Sampling
from posttrain.core.types import TruncationSets
from posttrain.engine.head.kernel_table import kernel
from posttrain.engine.head.logit_rules import LogitRules
from posttrain.engine.head.logit_transform import KeptMask, LogitTransform, check_kept, logit_dtype
from posttrain.engine.head.tiled_head import TiledHead, block_of, picked
from posttrain.engine.head.tiles import TORCH, Blocks, Tile, each, normalised, within
from posttrain.system.errors import InvariantError

CHUNK_ELEMENTS = {"cpu": 1 << 21, "accelerator": 1 << 27}
"""Logits (C * V) of one tile on each kind of device. 8 MiB of float32 stay near a CPU's caches; 512 MiB fill a GPU."""
CHUNK_ROWS = 128
"""Fewest tokens of a tile. With fewer, reading the weight of the head costs too much per token."""
KEPT_ELEMENTS = {"cpu": 1 << 22, "accelerator": 0}
"""Most logits (M * V) of a pass that are kept until its backward; more are computed again. 16 MiB of float32 on a CPU,
and none on an accelerator, where it was not measured what that saves."""
CHUNK_IDS = 16384
"""The largest vocabulary that is one block, in ids."""
TILE = {"cpu": (256, 4096), "accelerator": (8192, 16384)}
"""Tokens, and most ids, of a tile where the vocabulary is several blocks. On a CPU with 1 MiB of second-level cache,
tiles of 4 MiB were the fastest at 151,936 ids."""


class HeadContract(TypedDict, total=False):
    """What shapes the distribution of each token: the contract it was drawn under, and the architecture's own steps."""

    sampling: Required[Sampling]
    kept: TruncationSets | None
    """One set per token, exactly where `sampling.truncated`."""
    rules: LogitRules | None
    """Exactly where `sampling.rules`."""
    softcap: float | None
    scale: float


def logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    want_entropy: bool = False,
    chunk: int | None = None,
    block: int | None = None,
    kernels: KernelChoice = "auto",
    **contract: Unpack[HeadContract],
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from. Both [M], in `logit_dtype`.

    Args:
        hidden: [M, H]. weight: [V, H]. bias: [V]. targets: [M] integer ids.
        contract: what the tokens were drawn under; greedy is refused.
        chunk: tokens of one tile; None: as many as `CHUNK_ELEMENTS` allows, and at least `CHUNK_ROWS`. For a vocabulary
            of more than `CHUNK_IDS` ids, None means as many as `TILE` says.
        block: ids of one tile; None: all ids. For a vocabulary of more than `CHUNK_IDS` ids, None means equal blocks of
            at most as many as `TILE` says.

    With p the distribution, the backward is d logp_t / dz = onehot(t) - p and d H / dz_i = -p_i (log p_i + H). The
    chain rule then multiplies by the derivative of each step that made z: the temperature, a repetition penalty (its
    factor depends on the sign of the logit), and a soft-cap.
    """
    sampling, kept, rules = contract["sampling"], contract.get("kept"), contract.get("rules")
    sampling.for_training()
    # Without its sets a truncating contract would give the log-probs of another distribution. The same holds for rules.
    if (kept is not None) != sampling.truncated or (kept is not None and len(kept) != len(targets)):
        sets_given = 0 if kept is None else len(kept)
        raise InvariantError(
            f"{len(targets)} tokens with {sets_given} kept sets under {sampling}: one each exactly where it truncates"
        )
    if (rules is not None) != sampling.rules:
        raise InvariantError(f"rules must be given exactly where the contract has some: {sampling}")
    if hidden.shape[0] != targets.shape[0]:
        raise InvariantError(f"{hidden.shape[0]} hidden states for {targets.shape[0]} tokens")
    if kept is not None:
        check_kept(kept, targets)
    transform = _transform(hidden.device, **contract)
    # By the dtype of the tiles: blocks of a bfloat16 weight are converted first.
    form = kernel("head", hidden.device, logit_dtype(weight.dtype), kernels)
    tile = _tile(hidden, weight, transform, chunk, block)
    logp, entropy = form.function(hidden, weight, bias, targets.long(), transform, want_entropy, tile)
    return logp, entropy if want_entropy else None


def candidates(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids_MK: Tensor,
    **contract: Unpack[HeadContract],
) -> Tensor:
    """Differentiable log-probs [M, K] of the tokens `ids_MK`. One of probability 0 gets the dtype's lowest number."""
    transform = _transform(hidden.device, **contract)
    tile = _tile(hidden, weight, transform)
    logp, _ = TiledHead.apply(hidden, weight, bias, ids_MK.long(), transform, False, tile, TORCH)
    # A divergence multiplies these by probabilities, and 0 times -inf is nan.
    return logp.clamp_min(torch.finfo(logp.dtype).min)


@torch.no_grad()
def most_probable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    **contract: Unpack[HeadContract],
) -> Any:
    """(values, indices) [M, K] of the most probable tokens, in descending order of log-prob. k = 0
    takes the whole vocabulary."""
    k = min(k or weight.shape[0], weight.shape[0])
    values = [hidden.new_zeros((0, k), dtype=logit_dtype(weight.dtype))]  # empty parts first, as in `energies`
    indices = [values[0].long()]
    for _, blocks, single in _scored(hidden, weight, bias, **contract):
        best, best_ids = list[Tensor](), list[Tensor]()
        # At most k log-probs per token of the earlier blocks, and k of this one: the best k of both go on.
        for first, logp in normalised(blocks, torch.log_softmax, single)():
            top = logp.topk(min(k, logp.shape[1]), 1)
            best.append(top.values)
            best_ids.append(top.indices + first)
            if len(best) > 1:
                joined = torch.cat(best, 1).topk(min(k, best[0].shape[1] + best[1].shape[1]), 1)
                best, best_ids = [joined.values], [torch.cat(best_ids, 1).gather(1, joined.indices)]
        values.append(best[0].clamp_min(torch.finfo(best[0].dtype).min))
        indices.append(best_ids[0])
    return torch.return_types.topk((torch.cat(values), torch.cat(indices)))


@torch.no_grad()
def energies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    **contract: Unpack[HeadContract],
) -> Tensor:
    """|d log p_t / dz|^2 = |onehot(t) - p|^2 [M] of each target under the contract. z is the input of the softmax.
    Without targets |p|^2, the probability that two draws are the same."""
    # An empty part first, so that there is something to join where no token is asked about.
    out = [hidden.new_zeros(0, dtype=logit_dtype(weight.dtype))]
    for rows, blocks, single in _scored(hidden, weight, bias, **contract):
        energy = hidden.new_zeros(rows.stop - rows.start, dtype=logit_dtype(weight.dtype))
        for first, p in normalised(blocks, torch.softmax, single)():
            if targets is not None:
                # |p - onehot(t)|^2, which is the same square. Nothing is subtracted in blocks without the target.
                place, inside = within(targets[rows, None].long() - first, p.shape[1])
                p.scatter_add_(1, place, -inside.to(p.dtype))
            energy += torch.linalg.vecdot(p, p)
        out.append(energy)
    return torch.cat(out)


@torch.no_grad()
def odds(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Sequence[float],
    **contract: Unpack[HeadContract],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the place of each target in the distribution p that it was drawn from, as four float64 tensors: the mass
    of the ids below it [M], the mass of the ids up to and with it [M], and for each q proportional to p^(1 /
    temperature) its log q - log p [M, K] and the total variation between q and p [M, K]."""
    # float64: the caller compares a random number with sums over up to a vocabulary of small numbers.
    empty = hidden.new_zeros((0, len(temperatures)), dtype=torch.float64)
    out = [[empty.new_zeros(0)], [empty.new_zeros(0)], [empty], [empty]]
    for rows, blocks, single in _scored(hidden, weight, bias, **contract):
        target = targets[rows, None].long()
        # Each use of `logps` reads the blocks again: no float64 matrix of all ids is held where they are several.
        logps = normalised(each(blocks, torch.Tensor.double), torch.log_softmax, single)
        below, target_logp = empty.new_zeros(len(target)), empty.new_zeros(len(target))
        for first, logp in logps():
            ids = torch.arange(first, first + logp.shape[1], device=logp.device)
            below += torch.where(ids < target, logp.exp(), 0.0).sum(1)
            target_logp += picked(logp, target - first)[:, 0]
        ratios, variation = empty.new_zeros(2, len(target), len(temperatures))
        for k, t in enumerate(temperatures):
            # q is proportional to p^(1/t), so log q is log p / t, normalised again.
            flatter = normalised(each(logps, lambda logp, t=t: logp / t), torch.log_softmax, single)
            for (first, q), (_, logp) in zip(flatter(), logps(), strict=True):
                ratios[:, k] += picked(q, target - first)[:, 0]
                variation[:, k] += 0.5 * (q.exp() - logp.exp()).abs().sum(1)
        ratios -= target_logp[:, None]
        for part, x in zip(out, (below, below + target_logp.exp(), ratios, variation), strict=True):
            part.append(x)
    below, upto, ratio, variation = (torch.cat(part) for part in out)
    return below, upto, ratio, variation


def _transform(
    device: torch.device,
    sampling: Sampling,
    kept: TruncationSets | None = None,
    rules: LogitRules | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> LogitTransform:
    """The steps from logits to scores under the contract."""
    # Without `check_kept`: some callers ask about ids that were not said, which may lie outside of the set.
    mask = None if kept is None else KeptMask(kept, device)
    return LogitTransform(1 / sampling.temperature, softcap, scale, rules, mask)


# --- tiles ------------------------------------------------------------------------------------------------------------


def _block_width(weight: Tensor) -> int:
    """The number of ids of one block. The vocabulary is cut into blocks of equal width."""
    vocabulary = weight.shape[0]
    if vocabulary <= CHUNK_IDS:
        return vocabulary
    # V over the number of blocks, both rounded up: 151,936 ids in blocks of at most 4,096 become 38 of 3,999.
    return -(-vocabulary // -(-vocabulary // min(CHUNK_IDS, TILE[_kind(weight)][1])))


def _tile(
    hidden: Tensor, weight: Tensor, transform: LogitTransform, chunk: int | None = None, block: int | None = None
) -> Tile:
    """The sizes of the tiles of a pass, and whether their scores are kept until the backward."""
    rows, ids = chunk or _tile_rows(weight), block or _block_width(weight)
    # Where the steps after the product have slopes, scores alone are not enough for the backward.
    fits = len(hidden) * weight.shape[0] <= KEPT_ELEMENTS[_kind(weight)]
    return Tile(rows, ids, fits and torch.is_grad_enabled() and not transform.sloped)


def _tile_rows(weight: Tensor) -> int:
    """Tokens of one tile."""
    if weight.shape[0] > CHUNK_IDS:
        return TILE[_kind(weight)][0]
    return max(CHUNK_ROWS, CHUNK_ELEMENTS[_kind(weight)] // weight.shape[0])


def _kind(weight: Tensor) -> str:
    """The key of `TILE`, `CHUNK_ELEMENTS` and `KEPT_ELEMENTS` for the weight's device."""
    return "cpu" if weight.device.type == "cpu" else "accelerator"


def _scored(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, **contract: Unpack[HeadContract]
) -> Iterator[tuple[slice, Blocks, bool]]:
    """For each chunk of tokens the blocks of its scores z, forward only, and whether there is one block."""
    dtype, vocabulary, width = logit_dtype(weight.dtype), weight.shape[0], _block_width(weight)
    transform = _transform(hidden.device, **contract)
    for at in range(0, len(hidden), rows := _tile_rows(weight)):
        chunk = slice(at, min(at + rows, len(hidden)))

        # As a default argument the chunk is that of this round, whenever the blocks are read.
        def blocks(chunk: slice = chunk) -> Iterator[tuple[int, Tensor]]:
            h = hidden[chunk].to(dtype)
            for first in range(0, vocabulary, width):
                w, b = block_of(weight, bias, first, width, dtype)
                yield first, transform.scores(h, w, b, chunk.start, None, first)

        yield chunk, blocks, width == vocabulary
