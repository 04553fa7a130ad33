"""A fixed text of token ids as a packing, for scoring the same thing on several sides."""

from __future__ import annotations

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment


def packed_text(ids: np.ndarray) -> Packed:
    """int32 ids as if the policy had said all but the first."""
    spoken = np.arange(len(ids)) > 0
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of(
        [Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))]
    )
