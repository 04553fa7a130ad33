"""Tokens over HTTP: prompts are sent as ids, and turns are returned as ids with their log-probs.

It needs an endpoint with vLLM's extensions (vLLM, `posttrain serve`). No text is decoded and encoded again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.types import OUTSIDE, SampledTurn, Stop, Top
from posttrain.engine.endpoint.endpoint_sampler import EndpointSampler, checked_prompt
from posttrain.system.errors import ConfigError, DataError, EndpointError, EngineError
from posttrain.verifier.discover import RemoteModel
from posttrain.verifier.http_client import Endpoint

LOOSE = 0.05
"""Log-probs of one distribution may differ so much between two requests: bfloat16 servers are not deterministic."""


class TokenSampler(EndpointSampler):
    """`core.ports.Sampler` over /completions with token ids. ConfigError where the endpoint's dialect has none."""

    def __init__(self, endpoint: Endpoint, look: RemoteModel, *, cut: Sampling | None = None) -> None:
        super().__init__(endpoint, look, cut=cut)
        if not look.by_tokens:
            raise ConfigError(
                f"{endpoint.role} ({endpoint.url}): an endpoint of dialect {look.dialect!r} (its model is owned by"
                f" {look.owner!r}) is not known to take prompts as token ids and return what was said as such. Leave"
                " the tokenizer out (evaluation by text), or say dialect=vllm if it is vLLM behind a proxy"
            )

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """Continue int32 [T] `ids` by one turn; `place` becomes the request's seed."""
        if sampling.stop_ids is None:
            raise EngineError(
                "sampling.stop_ids is not resolved: call sampling.resolve(stop_ids) once at load, or set stop_ids=()"
            )
        prompt = checked_prompt(ids)
        # Servers answer a request that passes their context with an error, and this turn ends with Stop.CONTEXT.
        room = self.context - len(prompt)
        if room < 1:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}: shorten it"
            )
        most = min(sampling.max_tokens, room)
        body = self._body(sampling, place, chat=False) | {
            "prompt": prompt,
            "max_tokens": most,
            "min_tokens": min(sampling.min_tokens, most),
            # At least 1: to a server that tests this field for truth, 0 would ask for no log-probs at all.
            "logprobs": max(sampling.top, 1),
            # The contract's ids end the turn and no others: the server's own end token is ignored unless it is listed.
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        choice, count = await self._choice("/completions", body, most)
        turn_ids = self._ids(choice.get("token_ids"), "token_ids")
        # A server that adds a token, or cuts a prompt, continues another text than the learner will score.
        read = choice.get("prompt_token_ids")
        if read is not None and self._ids(read, "prompt") != prompt:
            raise self.broken("it read another prompt than it was sent: prompt_token_ids differ")
        if len(turn_ids) != count:
            raise self.broken(f"it returned {len(turn_ids)} token_ids and counted {count} tokens")
        logp = self._logp(choice, len(turn_ids))
        top = self._top(choice, len(turn_ids), sampling.top) if sampling.top else None
        stop = self._stop(choice.get("finish_reason"), turn_ids, sampling, most)
        # With `cut` the tokens come of another distribution than the contract of the episode says.
        version = np.full(len(turn_ids), 0 if self.cut is None else OUTSIDE, np.int32)
        # Under the argmax a token has probability 1, whatever a server reports for it.
        turn_logp = np.zeros(len(turn_ids), np.float32) if sampling.greedy else logp
        return SampledTurn(np.array(turn_ids, np.int32), turn_logp, version, stop, None, top)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`; from the endpoint's prompt_logprobs."""
        prompt = checked_prompt(ids)
        # The API scores a prompt only together with a token that it draws; that one is thrown away.
        body = self._body(Sampling(max_tokens=1, stop_ids=()), 0, chat=False) | {
            "prompt": prompt,
            "prompt_logprobs": 0,
            "ignore_eos": True,
        }
        choice, _ = await self._choice("/completions", body, 1)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(prompt):
            raise self.broken("it returned no prompt_logprobs, so it cannot score")
        try:
            # The first row is null, because nothing comes before the first token.
            logp = [row[str(i)]["logprob"] for row, i in zip(rows[1:], prompt[1:], strict=True)]
            if not all(map(_finite, logp)):
                raise TypeError("a log-prob is no number")
            return np.array(logp, np.float32)
        except (KeyError, TypeError) as error:
            raise self.broken(
                f"its prompt_logprobs do not hold the prompt's own tokens ({type(error).__name__}: {error})"
            ) from error

    async def for_training(self, sampling: Sampling) -> None:
        """Check with two requests at two temperatures that the returned tokens and log-probs can be trained on.
        ConfigError where they are missing, or not of the distribution that is drawn from."""
        sampling.for_training(keeps_sets=False)
        probe = np.arange(1, 3, dtype=np.int32)
        try:
            # Of the distribution that is drawn from, log p_T = z / T - log Z_T for logits z. Differences between tokens
            # do not depend on Z_T, so halving T must double them; those of the raw logits would be equal at both.
            at_1, at_half = [
                await self.generate(probe, Sampling(temperature=t, max_tokens=1, stop_ids=(), top=3), 0)
                for t in (1.0, 0.5)
            ]
        except EndpointError as error:
            raise ConfigError(f"this endpoint's samples cannot be trained on: {error}") from error
        assert at_1.top is not None and at_half.top is not None
        warm = dict(zip(at_1.top.ids[0].tolist(), at_1.top.logp[0].tolist(), strict=True))
        cold = dict(zip(at_half.top.ids[0].tolist(), at_half.top.logp[0].tolist(), strict=True))
        if set(warm) != set(cold):
            raise ConfigError(
                "this endpoint's samples cannot be trained on: its most probable tokens after one prompt are"
                f" {sorted(warm)} at temperature 1 and {sorted(cold)} at 0.5, so log-probs and draws are not of one"
                " model"
            )
        a, b = (np.array([x[i] for i in sorted(warm)]) for x in (warm, cold))
        # The bound grows with the differences to one token, because 16-bit logits round in proportion.
        a, b = a - a[0], b - b[0]
        # Written as `not <=`, so that NaN is refused as well.
        if not np.abs(b - 2 * a).max() <= LOOSE + 0.05 * np.abs(a).max():
            raise ConfigError(
                "this endpoint's samples cannot be trained on: at temperature 0.5 its log-probs are not those of the"
                f" distribution it draws from (differences {b[1:].round(3).tolist()}, should be"
                f" {(2 * a[1:]).round(3).tolist()}). Start vLLM with --logprobs-mode processed_logprobs"
            )

    def _ids(self, x: Any, name: str) -> list[int]:
        """A list of token ids of an answer, checked; EndpointError where it is none."""
        if not isinstance(x, list) or not all(type(i) is int and 0 <= i < 2**31 for i in x):
            raise self.broken(
                f"it returned no {name}, so what was said is known as text only (vLLM returns them since 0.10.2)"
            )
        return x

    def _logp(self, choice: dict[str, Any], n: int) -> np.ndarray:
        """float32 [n]: the log-prob of each said token."""
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(values, list) or len(values) != n or not all(map(_finite, values)):
            raise self.broken(f"it returned no log-prob for each of {n} tokens")
        return np.array(values, np.float32)

    def _top(self, choice: dict[str, Any], n: int, k: int) -> Top:
        """The k most probable of each position's table, whose keys are token_id:N."""
        tables = choice["logprobs"].get("top_logprobs")
        if (
            not isinstance(tables, list)
            or len(tables) != n
            or any(not isinstance(t, dict) or len(t) < k or not all(map(_finite, t.values())) for t in tables)
        ):
            raise self.broken(f"it returned fewer than {k} alternatives with their log-probs for a token")
        try:
            rows = [
                # One row more than was asked for is the drawn token, where it is not among the best.
                sorted(((int(name.removeprefix("token_id:")), p) for name, p in t.items()), key=lambda x: -x[1])[:k]
                for t in tables
            ]
            ids = np.array([[i for i, _ in row] for row in rows], np.int32).reshape(n, k)
        except (ValueError, OverflowError):
            raise self.broken(
                "it names alternatives by their text (return_tokens_as_token_ids has no effect), so their ids are not"
                " known"
            ) from None
        return Top(ids, np.array([[p for _, p in row] for row in rows], np.float32).reshape(n, k))

    def _stop(self, reason: Any, said: list[int], s: Sampling, most: int) -> Stop:
        """The reason for the end of a turn. EndpointError where finish_reason and the tokens do not fit together."""
        # "stop" is said for ids and for strings alike; the last token tells which it was.
        if reason == "stop" and said and said[-1] in (s.stop_ids or ()):
            return Stop.SAID
        if reason == "stop" and s.stop:
            return Stop.STRING
        # The server was asked for `most`, so it cannot tell the contract's bound from the end of the context.
        if reason == "length" and len(said) == most:
            return Stop.LENGTH if most == s.max_tokens else Stop.CONTEXT
        raise self.broken(
            f"a turn of {len(said)} tokens ended with reason {reason!r}, which neither its last token nor its length"
            " explains"
        )


def _finite(x: Any) -> bool:
    """Returns whether x is a number that float32 holds."""
    # Comparisons with NaN are false, and those of a whole number with hundreds of digits are exact.
    return isinstance(x, int | float) and abs(x) < 3e38
