"""Checks of a request before the engine accepts it."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop
from posttrain.engine.embedded.cache.cache_blocks import BLOCK, blocks_for
from posttrain.engine.embedded.schedule.slots import GenerateCall, TokenCallback
from posttrain.engine.embedded.schedule.stop_strings import Text, check_strings
from posttrain.system.errors import ConfigError, DataError, EngineError


class Admission:
    """Checks requests against the sizes of one engine.

    Args:
        context: most tokens of a sequence. vocabulary: rows of the read-out. most: blocks of the cache.
        text: decodes token ids; None: stop strings are refused.
    """

    def __init__(self, context: int, vocabulary: int, most: int, text: Text | None) -> None:
        self.context, self.vocabulary, self.most, self.text = context, vocabulary, most, text
        self._accepted: Sampling | None = None
        """The contract that was checked last. All requests of a stage share one."""

    def ids(self, ids: np.ndarray) -> np.ndarray:
        """int32 [T]: the tokens, given in any integer type; DataError where this engine cannot compute the sequence.

        They are checked before they are cast to 32 bits, in which 2 ** 32 + 7 becomes token 7.
        """
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise DataError(
                f"a prompt is a non-empty list of token ids, got shape {tokens.shape} of {tokens.dtype}: check the task"
                " and its chat template"
            )
        if len(tokens) > self.context:
            raise DataError(
                f"a sequence of {len(tokens)} tokens does not fit a context of {self.context}: shorten one or raise the"
                " other"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise DataError(
                f"prompt ids span {tokens.min()}..{tokens.max()}, the model has 0..{self.vocabulary - 1}: use its own"
                " tokenizer"
            )
        return np.ascontiguousarray(tokens, np.int32)

    def request(self, ids: np.ndarray, sampling: Sampling, place: int, heard: TokenCallback | None) -> GenerateCall:
        """A request of this event loop for ids [T]; DataError, ConfigError or EngineError where it cannot be met."""
        if np.ndim(ids) == 1 and len(ids) >= self.context:
            raise DataError(
                f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}: shorten one or raise the"
                " other"
            )
        ids = self.ids(ids)
        # The same object has been checked for the request before.
        if sampling is not self._accepted:
            if not sampling.resolved:
                raise EngineError(
                    "the sampling contract is not resolved: call sampling.resolve(stop_ids, spell) once, at load"
                )
            sampling.check_vocabulary(self.vocabulary)
            check_strings(sampling, self.text)
            if sampling.top > self.vocabulary:
                raise ConfigError(
                    f"sampling.top={sampling.top} of a vocabulary of {self.vocabulary} tokens: lower it to at most that"
                )
            self._accepted = sampling
        room = self.context - len(ids)
        limit = min(sampling.max_tokens, room)
        # The smaller one of both limits ends the turn, and is its stop reason.
        end = Stop.LENGTH if sampling.max_tokens <= room else Stop.CONTEXT
        # One more, for the copy of a shared last block: so any request fits an empty cache, and the oldest gets room.
        if blocks_for(len(ids) + limit) + 1 > self.most:
            raise EngineError(
                f"a sequence of {len(ids) + limit} tokens does not fit the key-value cache of {self.most * BLOCK}"
                " tokens: raise cache_bytes, or lower the context or max_tokens"
            )
        future = asyncio.get_running_loop().create_future()
        return GenerateCall(ids, sampling, place, limit, end, future, heard, time.perf_counter())
