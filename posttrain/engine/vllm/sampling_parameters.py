"""The log-prob contract as vLLM's parameters, and vLLM's answer as our types. This module does not import vllm.

Every field is sent, so no default of the server or of the model's generation config applies. A field that vLLM cannot
follow exactly is refused by name (`check`). One difference remains and is no error: vLLM applies min-p before top-k and
top-p, each on the full distribution, and so may keep other tokens than the embedded engine. The kept sets are stored
with the tokens, so the learner evaluates pi on the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop, Top, TruncationSets
from posttrain.system.errors import ConfigError, EngineError

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Temperatures that vLLM accepts. It raises lower ones silently."""
TIES = 8
"""Log-probs asked for beyond top_k, because vLLM keeps all tokens that tie with the last one."""
BANNED = -1e9
"""A logit bias that bans a token: its probability underflows to exactly zero, and the others do not change."""
ZERO_PROBABILITY = -9000.0
"""A log-prob at or below this means probability zero: vLLM's server writes minus infinity as -9999."""
SCORE = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0, "detokenize": False}
"""Parameters that give the log-probs of a prompt, and one token that nobody reads."""


@dataclass(frozen=True)
class Capabilities:
    """The sizes and abilities of one vLLM engine."""

    vocabulary: int
    """Embedding rows of the model."""
    context: int
    eos: int | None
    """The end token of its tokenizer. vLLM bans it together with the stop ids where min_tokens applies."""
    sequences: bool
    """Whether bad sequences of several tokens can be sent. Over HTTP they cannot."""


def check(s: Sampling, capabilities: Capabilities) -> None:
    """ConfigError where vLLM would sample from another distribution than the contract's."""
    if not s.greedy and not MIN_TEMPERATURE <= s.temperature <= MAX_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature={s.temperature}: vLLM takes {MIN_TEMPERATURE} to {MAX_TEMPERATURE}; for the argmax"
            " set greedy=true, or use engine=embedded"
        )
    if s.min_tokens and s.stop_ids is not None and capabilities.eos is not None and capabilities.eos not in s.stop_ids:
        raise ConfigError(
            f"sampling.min_tokens={s.min_tokens}: vLLM bans the tokenizer's end token {capabilities.eos} there too, and"
            " it is none of stop_ids. Add it to stop_ids, set min_tokens=0, or use engine=embedded"
        )
    if not capabilities.sequences and any(len(b) > 1 for b in s.bad_ids):
        raise ConfigError(
            "sampling.bad_ids: a vLLM server takes no sequences of several tokens. Ban single tokens, run vLLM in"
            " process (engine.server=false), or use engine=embedded"
        )


def fields(s: Sampling, place: int, limit: int, capabilities: Capabilities) -> dict[str, Any]:
    """Keyword arguments of `vllm.SamplingParams` for one turn of at most `limit` tokens.

    `seed` is the low 63 bits of the place. vLLM draws position t with the t-th number of a generator with that seed,
    whatever else runs. So the same place gives the same tokens again in vLLM, and other ones in another engine.
    """
    # A server has no field for banned ids: single tokens are banned by their bias. `VLLMEngine` sets a field itself.
    bias = dict(s.logit_bias)
    if not capabilities.sequences:
        bias |= {b[0]: BANNED for b in s.bad_ids}
    return {
        "n": 1,
        "temperature": 0.0 if s.greedy else s.temperature,
        "top_p": 1.0 if s.greedy else s.top_p,
        "top_k": 0 if s.greedy else min(s.top_k, capabilities.vocabulary),
        "min_p": 0.0 if s.greedy else s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": place & (2**63 - 1),
        "max_tokens": limit,
        "min_tokens": min(s.min_tokens, limit),
        "stop": list(s.stop),
        "stop_token_ids": list(s.stop_ids or ()),
        "ignore_eos": True,
        "logit_bias": bias or None,
        "allowed_token_ids": None if s.allowed_ids is None else list(s.allowed_ids),
        "bad_words": [],
        "logprobs": _logprob_count(s, capabilities.vocabulary),
        "prompt_logprobs": None,
        # Text is needed to find stop strings, and costs time otherwise.
        "detokenize": bool(s.stop),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def _logprob_count(s: Sampling, vocabulary: int) -> int:
    """Number of most probable tokens to ask for with every token: enough for the kept set and `top`, and one more,
    because a server counts the said token among them even where it is not one of them."""
    if s.top > vocabulary:
        raise EngineError(f"sampling.top={s.top} of a vocabulary of {vocabulary} tokens. Lower it to at most that")
    for_kept_set = 0
    if s.truncated and not s.greedy:
        # top_p and min_p alone may keep any number of tokens.
        for_kept_set = s.top_k + TIES if s.top_k else vocabulary
    most = max(for_kept_set, s.top)
    return min(vocabulary, most + 1) if most else 0


@dataclass(frozen=True, eq=False)
class Answer:
    """One turn as vLLM returns it. `rows` holds, for each token, (ids, log-probs) of the said token and
    the most probable ones. `finish` and `why` are vLLM's finish_reason and stop_reason."""

    ids: Sequence[int]
    rows: Sequence[tuple[Sequence[int], Sequence[float]]]
    finish: str | None
    why: int | str | None
    spans: Sequence[tuple[str, int, int]]
    """(version, first token, end): which weights drew which tokens, as vLLM reports it."""


def said(a: Answer, s: Sampling, limit: int, end: Stop, capabilities: Capabilities) -> SampledTurn:
    """The turn in our types. Every guarantee of vLLM is checked: EngineError where the answer contradicts itself or the
    contract. `end`: what reaching `limit` means, LENGTH or CONTEXT."""
    ids = np.array(a.ids, np.int32)
    if not len(ids) or len(a.rows) != len(ids) or len(ids) > limit:
        raise EngineError(
            f"vLLM answered {len(ids)} tokens with {len(a.rows)} log-probs, at most {limit} were asked for"
        )
    rows = [(token, dict(zip(*row, strict=True))) for token, row in zip(ids.tolist(), a.rows, strict=True)]
    if missing := [token for token, row in rows if token not in row]:
        raise EngineError(f"vLLM sent no log-prob of token {missing[0]}, which it said")
    logp = np.array([row[token] for token, row in rows], np.float32)
    if not s.greedy and not np.all(np.isfinite(logp) & (logp > ZERO_PROBABILITY)):
        raise EngineError(
            "vLLM said a token that has probability zero, or its logits are not finite: its weights have diverged"
        )
    stop = _stop(a, s, int(ids[-1]), len(ids) == limit, end)
    kept = TruncationSets.of([_kept(row, t, s, capabilities) for t, row in rows]) if s.truncated else None
    top = Top.join([_top(row, s.top) for _, row in rows], s.top) if s.top else None
    # Greedy gives the argmax all of the probability, and vLLM the probabilities without that.
    if s.greedy:
        logp = np.zeros(len(ids), np.float32)
    # Rounding can put the log-prob of a nearly certain token a little above 0.
    return SampledTurn(ids, np.minimum(logp, 0), _versions(a.spans, len(ids)), stop, kept, top)


def _stop(a: Answer, s: Sampling, last: int, full: bool, end: Stop) -> Stop:
    """Why the turn ended after its token `last`. `full`: it has as many tokens as it may have."""
    if a.finish == "stop" and last in (s.stop_ids or ()):
        return Stop.SAID
    if a.finish == "stop" and isinstance(a.why, str) and s.stop:
        return Stop.STRING
    if a.finish == "length" and full:
        return end
    raise EngineError(
        f"vLLM ended a turn with finish_reason={a.finish!r}, stop_reason={a.why!r} after token {last}, which the"
        " contract does not"
    )


def _kept(row: dict[int, float], token: int, s: Sampling, capabilities: Capabilities) -> np.ndarray:
    """int32, ascending: the tokens with positive probability."""
    if s.greedy:
        return np.array([token], np.int32)
    inside = sorted(i for i, x in row.items() if x > ZERO_PROBABILITY)
    # Where all that came have a positive probability, the kept set may go on behind the last of them, unless fewer came
    # than `_logprob_count` asks for: then there are no others.
    if len(inside) == len(row) < capabilities.vocabulary and len(row) > s.top_k + TIES - 1:
        raise EngineError(
            f"more than {TIES} tokens have the same probability at the border of top_k={s.top_k}, so the kept set was"
            " not sent whole. Another top_k, or float32 weights, separates them"
        )
    return np.array(inside, np.int32)


def _top(row: dict[int, float], k: int) -> Top:
    # Equal log-probs by id, so that the answer does not depend on the order in which they came.
    best = sorted(row.items(), key=lambda item: (-item[1], item[0]))[:k]
    if len(best) < k:
        raise EngineError(f"vLLM sent {len(best)} of the {k} most probable tokens")
    return Top(
        np.array([[i for i, _ in best]], np.int32),
        np.array([[x if x > ZERO_PROBABILITY else -np.inf for _, x in best]], np.float32),
    )


def _versions(spans: Sequence[tuple[str, int, int]], n: int) -> np.ndarray:
    """int32 [n]: the version of each token, from spans that must cover every token once."""
    out = np.full(n, -1, np.int32)
    for version, start, end in spans:
        if not version.isdigit():
            raise EngineError(
                f"vLLM served tokens with weights {version!r}, which posttrain did not send: push weights before asking"
            )
        out[start:end] = int(version)
    # The sum of lengths also tells of spans that overlap.
    if np.any(out < 0) or sum(end - start for _, start, end in spans) != n:
        raise EngineError(
            f"vLLM says which weights said {sum(e - b for _, b, e in spans)} of {n} tokens: every token needs its"
            " version"
        )
    return out
