"""The common part of samplers over an endpoint: requests, answers and gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.engine.endpoint.request_fields import fields
from posttrain.system.errors import EndpointError, EngineError
from posttrain.verifier.discover import RemoteModel
from posttrain.verifier.http_client import Endpoint


class EndpointSampler:
    """Base of the samplers over an endpoint. The weights are the endpoint's: their version is 0,
    and none can be loaded.

    Args:
        cut: a contract whose top_p, top_k and min_p are sent in place of those given to `generate`. It is for
            evaluation: episodes with a truncating contract must hold kept sets, and an endpoint returns none.
    """

    version, draws_by_place, keeps_sets = 0, False, False

    def __init__(self, endpoint: Endpoint, look: RemoteModel, *, cut: Sampling | None = None) -> None:
        self.endpoint, self.look, self.cut = endpoint, look, cut
        self._requests, self._tokens, self._retried = 0, 0, 0

    @property
    def context(self) -> int:
        return self.look.context

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        raise EngineError(
            f"{self.endpoint.role} ({self.endpoint.url}): OpenAI's API has no way to take weights, so this engine"
            " samples for evaluation and judging only. Train with engine=embedded or engine=vllm"
        )

    def gauges(self) -> Gauges:
        """Since the last call: `engine/tokens` said, per request; `engine/requests` answered;
        `engine/retried`, repeated tries."""
        out = {
            "engine/tokens": Gauge(self._tokens, self._requests),
            "engine/requests": Gauge(self._requests, 1),
            "engine/retried": Gauge(self.endpoint.retried - self._retried, 1),
        }
        self._tokens, self._requests, self._retried = 0, 0, self.endpoint.retried
        return out

    def clock(self) -> Mapping[str, float]:
        return {}

    def _body(self, s: Sampling, place: int, *, chat: bool) -> dict[str, Any]:
        body = fields(s, self.look, place, chat=chat)
        if self.cut is not None and not s.greedy:
            asked = fields(self.cut, self.look, place, chat=chat)
            body |= {name: asked[name] for name in ("top_p", "top_k", "min_p") if name in asked}
        return body

    async def _choice(self, path: str, body: Mapping[str, Any], most: int) -> tuple[dict[str, Any], int]:
        """(the answer's only choice, number of tokens it reports).

        Raises:
            EndpointError: the answer has another shape, or more tokens than were asked for.
        """
        answer = await self.endpoint.post(path, body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self.broken(f"{path} answered without exactly one choice")
        usage = answer.get("usage")
        said = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(said, int):
            raise self.broken(
                f"{path} answered without usage.completion_tokens, so the length of what was said is not known"
            )
        if said > most:
            raise self.broken(
                f"{path} said {said} tokens where at most {most} were asked for: it does not obey max_tokens"
            )
        self._requests, self._tokens = self._requests + 1, self._tokens + said
        return choices[0] | {k: v for k, v in answer.items() if k == "prompt_token_ids" and v is not None}, said

    def broken(self, text: str) -> EndpointError:
        return EndpointError(f"{self.endpoint.role} ({self.endpoint.url}): {text}", self.endpoint.role)


def checked_prompt(ids: np.ndarray) -> list[int]:
    """The ids as a list for JSON; EngineError where there are none."""
    if ids.ndim != 1 or not len(ids):
        raise EngineError(f"a prompt is a non-empty list of token ids, got shape {ids.shape}")
    return [int(i) for i in ids]
