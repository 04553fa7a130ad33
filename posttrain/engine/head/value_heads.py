"""The heads beside the language model's: values of tokens, and the scores of a reward model for whole sequences.

Training and scoring with a reward model read the same forward pass of the learner: the head says at which packed
positions it reads, and makes its score of the hidden states there.
Axis letters: N packed positions, M spoken tokens, S segments, K outputs, R positions read, H hidden width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Rewards
from posttrain.system.errors import DataError

REWARD_HEAD = "reward_head"
"""The first word of the names of a reward head's parameters in a learner."""


class RewardHead(nn.Module):
    """The head of a reward model: linear layers without bias on hidden states. `places` says where it reads, `read`
    makes the scores of those states.

    Its weights begin as normal numbers of variance 1 / (H + 1) (2009.01325), drawn by `seed` alone.

    Args:
        width: H.
        dtype: of its weights; float32 at least.
        blank: the id of a token that is skipped at the end of a sequence, as transformers skips padding; None: no
            token is skipped.
    """

    def __init__(
        self,
        shape: HeadShape,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        blank: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.blank = shape, blank
        generator = torch.Generator().manual_seed(seeds.torch_seed(seed, REWARD_HEAD))

        def layer() -> nn.Linear:
            # On "meta" the layer's own initialisation draws nothing, so the random numbers of the run are the same.
            linear = nn.Linear(width, shape.width, bias=False, device="meta")
            weight = torch.randn(shape.width, width, generator=generator) * (width + 1) ** -0.5
            linear.weight = nn.Parameter(weight.to(device=device, dtype=dtype))
            return linear

        self.score = layer()
        self.gate = layer() if shape.gate else None

    def places(self, packed: Packed) -> np.ndarray:
        """int64 [R]: the packed positions that it reads, in the order in which `read` takes their hidden states."""
        # `source_M` is the position that predicts a token, so the token itself is at the next one.
        pooled = self._last(packed) if self.shape.pool == "last" else packed.source_M + 1
        if self.shape.pool == "last" and self.gate is None:
            return pooled
        # A segment without a spoken token has no mean and no last one, and the index below would be the next one's.
        spoken_S = np.bincount(packed.segment_M, minlength=len(packed.lengths_S))
        if not spoken_S.all():
            raise DataError(
                f"{int((spoken_S == 0).sum())} of {len(spoken_S)} sequences have no token of a completion, and this"
                " reward head reads the completion: leave empty completions out"
            )
        # The gate reads the prompt: the position that predicts the first spoken token is its last one.
        before = packed.source_M[np.cumsum(spoken_S) - spoken_S]
        return pooled if self.gate is None else np.concatenate([pooled, before])

    def _last(self, packed: Packed) -> np.ndarray:
        """int64 [S]: the packed position of the last token of each segment that is not `blank`."""
        ends = np.cumsum(packed.lengths_S)
        last = ends - 1
        if self.blank is None:
            return last
        real_N = packed.ids_N != self.blank
        for s, (begin, end) in enumerate(zip(ends - packed.lengths_S, ends, strict=True)):
            real = np.flatnonzero(real_N[begin:end])
            # Of a sequence of padding alone, transformers reads the first position.
            last[s] = begin + (real[-1] if len(real) else 0)
        return last

    def read(self, packed: Packed, hidden: Tensor) -> Rewards:
        """The score of each segment, from the hidden states [R, H] at `places`."""
        count = len(packed.lengths_S)
        hidden = hidden.to(self.score.weight.dtype)
        # `places` put the S positions of the gate behind the pooled ones.
        pooled, before = (hidden, None) if self.gate is None else (hidden[:-count], hidden[-count:])
        if self.shape.pool == "mean":
            segment_M = torch.from_numpy(packed.segment_M.astype(np.int64)).to(hidden.device)
            spoken_S = torch.bincount(segment_M, minlength=count).to(hidden.dtype)
            pooled = hidden.new_zeros(count, hidden.shape[1]).index_add(0, segment_M, pooled) / spoken_S[:, None]
        outputs = self.score(pooled)
        if self.shape.pool == "token":
            # Every spoken token has a score. The score of a segment is that of its last token.
            ends = torch.from_numpy(np.cumsum(np.bincount(packed.segment_M, minlength=count)) - 1).to(hidden.device)
            return Rewards(outputs[ends, 0], outputs)
        return Rewards(self._score(outputs, before), outputs)

    def _score(self, outputs: Tensor, before: Tensor | None) -> Tensor:
        """[S, K] -> [S]"""
        if self.shape.classes:
            classes = torch.arange(self.shape.classes, dtype=outputs.dtype, device=outputs.device)
            return torch.softmax(outputs, -1) @ classes
        if self.gate is not None and before is not None:
            return (torch.softmax(self.gate(before), -1) * outputs).sum(-1)
        return outputs.mean(-1)


def value_head(width: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """A linear head hidden -> 1, all zeros: the first estimate is 0 everywhere. It uses no random generator."""
    head = nn.Linear(width, 1, device="meta", dtype=dtype).to_empty(device=device)
    for p in head.parameters():
        nn.init.zeros_(p)
    return head
