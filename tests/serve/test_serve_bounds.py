"""Numbers at and beyond the bounds of a request, with another request beside; and where in the text each token
stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from tests.serve.serve_parts import TOKEN, save_model, tokenizer, up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


BEYOND: Mapping[str, dict[str, Any]] = {
    "top_k": {"top_k": 10**30},
    "max_tokens": {"max_tokens": 10**30},
    "min_tokens": {"min_tokens": 10**30, "max_tokens": 10**30},
    "repetition_penalty": {"repetition_penalty": 1e-46},
    "temperature": {"temperature": 1e-46},
    "logit_bias": {"logit_bias": {"3": 1e300}},
    "logit_bias in other digits": {"logit_bias": {"३": 1}},
    "logit_bias in two spellings": {"logit_bias": {"3": 1, "03": 2}},
    "logit_bias of a long number": {"logit_bias": {"9" * 5000: 1}},
    "allowed_token_ids": {"allowed_token_ids": [10**30]},
    "stop_token_ids": {"stop_token_ids": [10**30]},
    "logprobs": {"logprobs": 10**30},
}
WITHIN: tuple[dict[str, Any], ...] = (
    {"top_k": 2**31 - 1, "max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
    {"repetition_penalty": 0.01, "temperature": 0.01, "logit_bias": {"3": 100, "4": -100}},
    {"repetition_penalty": 100, "temperature": 100, "logit_bias": {"3": 100}},
)


async def test_a_number_out_of_bounds_is_refused_by_name_and_nobody_else_notices(model: Path) -> None:
    async with up(model) as u, httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as client:

        async def post(**fields: Any) -> tuple[int, Any]:
            answer = await client.post(u.url + "/completions", json={"model": "tiny", "prompt": "user says", **fields})
            return answer.status_code, answer.json()

        innocent: dict[str, Any] = {"max_tokens": 60, "seed": 1, "ignore_eos": True}
        _, alone = await post(**innocent)
        for fields in (*BEYOND.values(), *WITHIN):
            beside = asyncio.create_task(post(**innocent))
            await asyncio.sleep(0.02)
            status, body = await post(**fields)
            if (case := next((n for n, f in BEYOND.items() if f is fields), None)) is not None:
                name = case.partition(" ")[0]
                assert status == 400 and (body["error"]["param"] or name).startswith(name), (fields, body)
                assert name in body["error"]["message"]
            else:
                assert status == 200, (fields, body)
            status, body = await beside
            assert status == 200 and body["choices"][0]["text"] == alone["choices"][0]["text"]


EMOJI = "🙂a日b"


@dataclass
class Spoken:
    """An engine that says the same tokens whoever asks, one by one where somebody listens."""

    ids: list[int]
    context: int = 96

    async def generate(self, prompt: np.ndarray, sampling: Sampling, place: int, heard: Any = None) -> SampledTurn:
        ids, logp = np.array(self.ids, np.int32), np.zeros(len(self.ids), np.float32)
        for i in range(len(ids)) if heard is not None else ():
            heard(ids[i : i + 1], logp[i : i + 1])
        return SampledTurn(ids, logp, np.zeros(len(ids), np.int32), Stop.LENGTH)


@pytest.mark.parametrize("stop", [None, "ab", "b!"])
async def test_a_token_stands_where_its_character_begins(model: Path, stop: str | None) -> None:
    """Four tokens of one character have its offset, and what follows comes after it; in a stream as in the whole."""
    words = tokenizer()
    ids = words.encode(EMOJI, add_special_tokens=False)
    pieces = [words.encode(c, add_special_tokens=False) for c in EMOJI]
    assert ids == [i for p in pieces for i in p] and len(pieces[0]) > 1
    async with up(model, sampler=Spoken(ids)) as u:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "user", "max_tokens": len(ids), "logprobs": 0, "stop": stop}
        whole = (await u.client.completions.create(**asked)).choices[0].logprobs
        streamed: list[int] = []
        async for chunk in await u.client.completions.create(**asked, stream=True):
            streamed += [x for c in chunk.choices if c.logprobs is not None for x in c.logprobs.text_offset]
    assert whole.text_offset == streamed == [at for at, p in enumerate(pieces) for _ in p]


@pytest.mark.prove
async def test_a_stream_and_a_whole_answer_tell_the_same_offsets(model: Path) -> None:
    """Random tokens of a byte-level vocabulary: many are parts of characters, and some never become one."""
    async with up(model) as u:
        for seed in range(20):
            asked: dict[str, Any] = {
                "model": "tiny",
                "prompt": "日本",
                "max_tokens": 40,
                "seed": seed,
                "logprobs": 0,
                "temperature": 1.5,
            }
            asked["extra_body"] = {"ignore_eos": True}
            answer = (await u.client.completions.create(**asked)).choices[0]
            offsets: list[int] = []
            async for chunk in await u.client.completions.create(**asked, stream=True):
                offsets += [x for c in chunk.choices if c.logprobs is not None for x in c.logprobs.text_offset]
            assert offsets == answer.logprobs.text_offset
            assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(answer.text)
