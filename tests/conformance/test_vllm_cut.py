"""Models and adapters on vLLM of two workers (`make test-vllm-workers`): each is cut, found again and served whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from posttrain.engine.vllm.vllm_server import VLLMServer
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.system.errors import EngineError
from tests.conformance import subjects
from tests.conformance.test_architectures import serves
from tests.conformance.test_vllm_adapters import Served, adapted, learn, say, started

pytestmark = pytest.mark.skipif(
    not {"vllm", "vllm-server"} & set(subjects.ENGINES), reason="needs vLLM: make test-vllm-workers"
)


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        ("float32", {"arch": "llama", "kv_heads": 2}),
        ("float32", {"arch": "gpt2", "kv_heads": 2}),
        ("float32", {"arch": "gemma", "kv_heads": 1}),
        ("bfloat16", {"arch": "qwen3", "heads": 4, "kv_heads": 2, "hidden": 128}),
    ],
)
def test_each_architecture_is_cut_among_workers(dtype: str, model: dict[str, Any]) -> None:
    if "vllm" not in subjects.ENGINES:
        pytest.skip("in this process")
    serves(dtype, 2, **model)


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[n for n in ("vllm", "vllm-server") if n in subjects.ENGINES])
def adapters(request: pytest.FixtureRequest) -> Iterator[Served]:
    found = started(request.param, adapted(), workers=2)
    yield found
    found.close()


def test_every_adapter_is_served_by_both_workers(adapters: Served) -> None:
    async def main() -> None:
        base = adapters.base()
        for seed in (1, 2, 3):
            learn(adapters.policy, seed)
            assert await adapters.push() == adapters.learner.fingerprint()
            assert np.abs(await adapters.scored() - base).mean() > 0.1, "and the base says something else"
            assert await say(adapters) < LEAST["float32"].worst

    asyncio.run(main())


def test_a_worker_that_keeps_the_adapter_before_is_found(adapters: Served) -> None:
    """Worker 1 says that it loaded the new one, and computes with the numbers of the old one."""
    if isinstance(adapters.sampler, VLLMServer):
        pytest.skip("a server takes no functions")
    learn(adapters.policy, 4)
    asyncio.run(adapters.push())
    engine: Any = adapters.sampler
    engine._engine.collective_rpc(deaf)
    learn(adapters.policy, 5)
    with pytest.raises(EngineError, match=r"another adapter than was sent[\s\S]*worker 1 of 2 serves \d+ tensors"):
        asyncio.run(adapters.push())


def deaf(worker: Any) -> None:
    """Runs in each worker. In the second one new adapters leave the layers' numbers as they were."""
    if worker.rank != 1:
        return
    runner, layers = worker.model_runner, list(worker.get_model().modules())
    add = runner.add_lora

    def keeps(request: Any) -> Any:
        rooms = [getattr(m, n, ()) for m in layers for n in ("lora_a_stacked", "lora_b_stacked")]
        stacks = [t for room in rooms for t in (room if isinstance(room, tuple) else (room,))]
        held = [t.clone() for t in stacks]
        added = add(request)
        for tensor, before in zip(stacks, held, strict=True):
            tensor.copy_(before)
        return added

    runner.add_lora = keeps
