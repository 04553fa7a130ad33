"""Fixed token ids as a packed batch, so that learner and sampler can score the same sequence."""

from __future__ import annotations

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment


def packed_text(ids: np.ndarray) -> Packed:
    """int32 ids as one packed sequence in which every token but the first counts as spoken."""
    spoken = np.arange(len(ids)) > 0
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of(
        [Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))]
    )
