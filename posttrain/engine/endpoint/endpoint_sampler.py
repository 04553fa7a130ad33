"""The common part of samplers over an endpoint: checks of the contract, requests, answers and gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.system.errors import ConfigError, EndpointError, EngineError
from posttrain.verifier.discover import Dialect, RemoteModel
from posttrain.verifier.http_client import Endpoint

STOPS = 4
"""Most stop strings that OpenAI's API takes."""
_EXTENDED: tuple[Dialect, ...] = ("posttrain", "vllm")
"""Dialects that have contract fields beyond OpenAI's."""


def fields(s: Sampling, look: RemoteModel, place: int, *, chat: bool) -> dict[str, Any]:
    """The sampling part of a request's body. ConfigError names each field that this endpoint does not support."""
    check(s, look, chat=chat)
    # Neutral values are sent too: where a field is left out, vLLM takes its value from generation_config.json, and the
    # distribution would be another one than the contract's.
    out: dict[str, Any] = {
        "model": look.model,
        "n": 1,
        "stream": False,
        "temperature": 0.0 if s.greedy else s.temperature,
        "top_p": 1.0 if s.greedy else s.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {str(i): x for i, x in s.logit_bias},
        # A place has 128 bits, and servers read the seed as a signed number of 64.
        "seed": place & (2**63 - 1),
        # OpenAI's newer chat models refuse max_tokens, and compatible servers may know that name only.
        "max_completion_tokens" if chat and look.dialect == "openai" else "max_tokens": s.max_tokens,
    }
    if s.stop:
        out["stop"] = list(s.stop)
    if look.dialect in _EXTENDED:
        out |= {"top_k": 0 if s.greedy else s.top_k, "min_p": 0.0 if s.greedy else s.min_p}
        out |= {"repetition_penalty": s.repetition_penalty, "min_tokens": s.min_tokens}
        if s.allowed_ids is not None:
            out["allowed_token_ids"] = list(s.allowed_ids)
    # What was said must come back whole, with special tokens and the text that ended the turn.
    if look.dialect == "vllm":
        out |= {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }
    return out


def check(s: Sampling, look: RemoteModel, *, chat: bool) -> None:
    """ConfigError with the names of the contract's fields that this endpoint does not support."""
    plain = look.dialect not in _EXTENDED
    used = {
        "top_k": plain and s.top_k > 0,
        "min_p": plain and s.min_p > 0,
        "repetition_penalty": plain and s.repetition_penalty != 1,
        "min_tokens": plain and s.min_tokens > 0,
        "allowed_ids": plain and s.allowed_ids is not None,
        "allowed_words": bool(s.allowed_words),
        "bad_ids": bool(s.bad_ids),
        "bad_words": bool(s.bad_words),
    }
    if unknown := [name for name, on in used.items() if on]:
        raise ConfigError(
            f"an endpoint of dialect {look.dialect!r} knows no {', '.join(f'sampling.{n}' for n in unknown)}, and would"
            " ignore or refuse it: leave it at its default, or use another engine"
        )
    # OpenAI publishes its tokenizers, so there ids can be known.
    if chat and s.logit_bias and look.dialect == "compatible":
        raise ConfigError(
            "sampling.logit_bias names token ids of a tokenizer that a compatible chat endpoint does not tell: leave"
            " it out"
        )
    if look.dialect in ("openai", "compatible") and len(s.stop) > STOPS:
        raise ConfigError(f"sampling.stop: {len(s.stop)} texts, and OpenAI's API takes {STOPS}")
    if look.dialect == "openai" and s.temperature > 2:
        raise ConfigError(f"sampling.temperature={s.temperature}: OpenAI's API takes at most 2")


class EndpointSampler:
    """Base of the samplers over an endpoint. Its weights have version 0, and none can be loaded.

    Args:
        look: what `discover` found at the endpoint: its model, and which fields it knows.
        cut: a contract whose top_p, top_k and min_p are sent in place of those given to `generate`. It is for
            evaluation: episodes with a truncating contract must hold kept sets, and an endpoint returns none.
    """

    version, draws_by_place, keeps_sets = 0, False, False

    def __init__(self, endpoint: Endpoint, look: RemoteModel, *, cut: Sampling | None = None) -> None:
        self.endpoint, self.look, self.cut = endpoint, look, cut
        self._requests, self._tokens, self._retried = 0, 0, 0  # the last: `endpoint.retried` at the last `gauges`

    @property
    def context(self) -> int:
        return self.look.context

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Always EngineError: an endpoint takes no weights."""
        raise EngineError(
            f"{self.endpoint.role} ({self.endpoint.url}): OpenAI's API has no way to take weights, so this engine"
            " samples for evaluation and judging only. Train with engine=embedded or engine=vllm"
        )

    def gauges(self) -> Gauges:
        """Since the last call: tokens said, per request; requests answered; repeated tries."""
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
        """The sampling part of a request, with the truncation of `cut` in it."""
        body = fields(s, self.look, place, chat=chat)
        # Into the request only: the episodes keep the contract that they were given, which has no truncation.
        if self.cut is not None and not s.greedy:
            cut_fields = fields(self.cut, self.look, place, chat=chat)
            body |= {name: cut_fields[name] for name in ("top_p", "top_k", "min_p") if name in cut_fields}
        return body

    async def _choice(self, path: str, body: Mapping[str, Any], most: int) -> tuple[dict[str, Any], int]:
        """(the answer's only choice, number of tokens it reports); EndpointError where it has others, or too many."""
        answer = await self.endpoint.post(path, body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self.broken(f"{path} answered without exactly one choice")
        usage = answer.get("usage")
        # Ids of a turn in text are made up to this number, and turns in ids are checked by it.
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(count) is not int or count < 0:  # JSON's true is an int in Python
            raise self.broken(
                f"{path} answered without usage.completion_tokens, so the length of what was said is not known"
            )
        if count > most:
            raise self.broken(
                f"{path} said {count} tokens where at most {most} were asked for: it does not obey max_tokens"
            )
        # Counted after all checks, so that the mean length covers only answers that were used.
        self._requests, self._tokens = self._requests + 1, self._tokens + count
        # Servers differ in where they put prompt_token_ids: in the choice, or beside the choices.
        return choices[0] | {k: v for k, v in answer.items() if k == "prompt_token_ids" and v is not None}, count

    def broken(self, text: str) -> EndpointError:
        return EndpointError(f"{self.endpoint.role} ({self.endpoint.url}): {text}", self.endpoint.role)


def checked_prompt(ids: np.ndarray) -> list[int]:
    """The ids as a list for JSON; EngineError where there are none."""
    if ids.ndim != 1 or not len(ids):
        raise EngineError(f"a prompt is a non-empty list of token ids, got shape {ids.shape}")
    return [int(i) for i in ids]
