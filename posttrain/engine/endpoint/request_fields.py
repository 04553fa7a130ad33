"""A contract as the fields of a request. Every field is sent. One that the endpoint does not
know is refused by name."""

from __future__ import annotations

from typing import Any

from posttrain.core.sampling import Sampling
from posttrain.system.errors import ConfigError
from posttrain.verifier.discover import Dialect, RemoteModel

STOPS = 4
"""Most stop strings of OpenAI's API."""
_EXTENSIONS: dict[Dialect, tuple[str, ...]] = {
    "openai": (),
    "compatible": (),
    "posttrain": ("top_k", "min_p", "repetition_penalty", "min_tokens", "allowed_ids"),
    "vllm": ("top_k", "min_p", "repetition_penalty", "min_tokens", "allowed_ids"),
}
"""Contract fields beyond OpenAI's that each dialect has. Stop ids are not listed; `TokenSampler` sends them."""


def fields(s: Sampling, look: RemoteModel, place: int, *, chat: bool) -> dict[str, Any]:
    """The sampling part of a request's body.

    Raises:
        ConfigError: names each field of `s` that this endpoint does not support.
    """
    check(s, look, chat=chat)
    known = _EXTENSIONS[look.dialect]
    out: dict[str, Any] = {
        "model": look.model,
        "n": 1,
        "stream": False,
        "temperature": 0.0 if s.greedy else s.temperature,
        "top_p": 1.0 if s.greedy else s.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {str(i): x for i, x in s.logit_bias},
        "seed": place & (2**63 - 1),
        "max_completion_tokens" if chat and look.dialect == "openai" else "max_tokens": s.max_tokens,
    }
    if s.stop:
        out["stop"] = list(s.stop)
    if "top_k" in known:
        out |= {"top_k": 0 if s.greedy else s.top_k, "min_p": 0.0 if s.greedy else s.min_p}
    if "repetition_penalty" in known:
        out |= {"repetition_penalty": s.repetition_penalty, "min_tokens": s.min_tokens}
        if s.allowed_ids is not None:
            out["allowed_token_ids"] = list(s.allowed_ids)
    if look.dialect == "vllm":
        out |= {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }
    return out


def check(s: Sampling, look: RemoteModel, *, chat: bool) -> None:
    """ConfigError with the names of the contract's fields that this endpoint does not support."""
    known = _EXTENSIONS[look.dialect]
    asked = {
        "top_k": s.top_k > 0,
        "min_p": s.min_p > 0,
        "repetition_penalty": s.repetition_penalty != 1,
        "min_tokens": s.min_tokens > 0,
        "allowed_ids": s.allowed_ids is not None,
        "allowed_words": bool(s.allowed_words),
        "bad_ids": bool(s.bad_ids),
        "bad_words": bool(s.bad_words),
    }
    if unknown := [name for name, on in asked.items() if on and name not in known]:
        raise ConfigError(
            f"an endpoint of dialect {look.dialect!r} knows no {', '.join(f'sampling.{n}' for n in unknown)}, and would"
            " ignore or refuse it: leave it at its default, or use another engine"
        )
    if chat and s.logit_bias and look.dialect == "compatible":
        raise ConfigError(
            "sampling.logit_bias names token ids of a tokenizer that a compatible chat endpoint does not tell: leave"
            " it out"
        )
    if look.dialect in ("openai", "compatible") and len(s.stop) > STOPS:
        raise ConfigError(f"sampling.stop: {len(s.stop)} texts, and OpenAI's API takes {STOPS}")
    if look.dialect == "openai" and s.temperature > 2:
        raise ConfigError(f"sampling.temperature={s.temperature}: OpenAI's API takes at most 2")
