"""Numbers at and beyond the bounds of a request, with another request beside; and where in the text each token stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve_parts import TOKEN, save_model, up


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
            if (name := next((n for n, f in BEYOND.items() if f is fields), None)) is not None:
                assert status == 400 and (body["error"]["param"] or name).startswith(name), (fields, body)
                assert name in body["error"]["message"]
            else:
                assert status == 200, (fields, body)
            status, body = await beside
            assert status == 200 and body["choices"][0]["text"] == alone["choices"][0]["text"]
