"""Fixed token ids as a packed batch, so that learner and sampler can score the same sequence."""

from __future__ import annotations

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment

READ = Sampling(stop_ids=())
"""The contract of sequences that nobody samples: a reward model only reads them."""


def packed_text(ids: np.ndarray, prompt: int = 1) -> Packed:
    """int32 ids as one packed sequence in which every token after the first `prompt` ones counts as spoken."""
    spoken = np.arange(len(ids)) >= prompt
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of(
        [Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))]
    )
