"""Adapters in real vLLM: each push loads one, it answers, nothing else travels, and what goes wrong is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import posttrain
from posttrain.build.build_run import probe_ids
from posttrain.config.engines import VLLM
from posttrain.config.model_settings import Lora
from posttrain.config.run import Run
from posttrain.core.ports import Sampler
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.vllm import adapter_load
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.engine.vllm.vllm_server import VLLMServer
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import steps as read_steps
from posttrain.role.learning.logprob_tolerance import LEAST, packed_text
from posttrain.role.sync import Sync
from posttrain.system.errors import ConfigError, EngineError, InvariantError
from tests.conformance import subjects
from tests.conformance.subjects import contract, randomize, segment

pytestmark = pytest.mark.skipif(
    not {"vllm", "vllm-server"} & set(subjects.ENGINES), reason="needs vLLM: make test-vllm"
)
LORA = Lora(rank=3, alpha=5)
"""A rank that vLLM has to pad, and a scale that is no power of two."""


def adapted(lora: Lora = LORA, **changes: Any) -> Policy:
    """A policy with an adapter, over weights whose distributions are far from uniform."""
    policy = load_policy(replace(subjects.MODEL, lora=lora, **changes), None, 0)
    own = {n: t.detach().clone() for n, t in adapter_modules.adapter_tensors(policy.module).items()}
    randomize(policy, 1)
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(policy.module).items():
            tensor.copy_(own[name])
    return policy


def learn(policy: Policy, seed: int) -> None:
    """Numbers for B that change log-probs by much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(policy.module).items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


@dataclass
class Served:
    """An engine that serves the adapters of a policy."""

    sampler: Sampler
    policy: Policy
    learner: HFLearner
    close: Callable[[], None]

    async def push(self) -> str:
        """Push as a run does at its start: first the trial, then the adapter."""
        dtype = str(self.policy.dtype).removeprefix("torch.")
        return await Sync(self.learner, self.sampler, probe_ids(self.policy), dtype).push(self.sampler.version + 2)

    async def scored(self) -> np.ndarray:
        return await self.sampler.score(probe_ids(self.policy))

    def base(self) -> np.ndarray:
        """What the model without its adapter scores."""
        with adapter_modules.switched_off(self.policy.module):
            return self.learner.score(packed_text(probe_ids(self.policy)))


def started(name: str, policy: Policy, workers: int = 1) -> Served:
    if name == "vllm":
        engine = VLLMEngine(policy, slots=16, cache_bytes=32 << 20, eager=True, workers=workers)
        return Served(engine, policy, HFLearner(policy), engine.close)
    from posttrain.engine.vllm.spawn_server import SpawnedServer
    from posttrain.verifier.http_client import Endpoint

    own = SpawnedServer(policy, slots=16, cache_bytes=32 << 20, eager=True, workers=workers)
    endpoint = Endpoint(own.url, "rollout")
    server = VLLMServer(policy, endpoint, share=own.folder / "share", timeout=60, ended=own.ended, workers=workers)
    return Served(server, policy, HFLearner(policy), own.close)


@pytest.fixture(scope="module", params=[n for n in ("vllm", "vllm-server") if n in subjects.ENGINES])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    found = started(request.param, adapted())
    yield found
    found.close()


async def say(served: Served, count: int = 12) -> float:
    """Worst gap of the log-probs of what is said, against the learner's."""
    prompt, wanted = np.array(served.policy.tokenizer.encode("3+4=", add_special_tokens=False), np.int32), contract()
    said = await asyncio.gather(*[served.sampler.generate(prompt, wanted, i) for i in range(count)])
    assert {v for s in said for v in s.version.tolist()} == {served.sampler.version}
    return float(subjects.gap(served.learner, [segment(prompt, s, wanted) for s in said]).max())


# --- what is served ---------------------------------------------------------------------------------------------------


def test_every_push_is_served_and_it_alone(served: Served) -> None:
    async def main() -> None:
        base = served.base()
        for seed in (1, 2, 3):
            learn(served.policy, seed)
            assert await served.push() == served.learner.fingerprint()
            ours = served.learner.score(packed_text(probe_ids(served.policy)))
            theirs = await served.scored()
            assert np.abs(theirs - ours).max() < LEAST["float32"].worst
            assert np.abs(theirs - base).mean() > 0.1, "and the base says something else"
            assert await say(served) < LEAST["float32"].worst

    asyncio.run(main())


def test_only_the_adapter_travels(served: Served) -> None:
    """Its float32 numbers, and a header with their names."""
    own = sum(t.nbytes for t in adapter_modules.adapter_tensors(served.policy.module).values())
    served.sampler.gauges()
    given = list(adapter_modules.adapter_tensors(served.policy.module).items())
    asyncio.run(served.sampler.load(served.sampler.version + 1, given))
    gauge = served.sampler.gauges()["engine/pushed"]
    assert (gauge.sum, gauge.count) == (own, 1)
    assert own < sum(t.nbytes for t in adapter_modules.base_tensors(served.policy.module).values()) / 5


def test_nothing_of_an_adapter_stays_on_disk(served: Served) -> None:
    import tempfile

    from posttrain.engine.vllm.start_vllm import memory_folder

    def left() -> set[Path]:
        places = {memory_folder(), Path(tempfile.gettempdir())}
        if isinstance(served.sampler, VLLMServer):
            places.add(served.sampler._share)
        return {p for place in places for p in place.glob("posttrain-*")}

    before = left()
    learn(served.policy, 4)
    asyncio.run(served.push())
    assert left() == before


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_engine_that_answers_without_the_adapter_is_found(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the adapter is still nothing, so that no log-prob differs."""
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(served.policy.module).items():
            if "lora_B" in name:
                tensor.zero_()
    if isinstance(served.sampler, VLLMServer):
        monkeypatch.setattr(VLLMServer, "_model", lambda self: {})
    else:
        submit = VLLMEngine._submit

        def without(self: Any, name: str, ids: list[int], params: Any) -> None:
            held, self._weights.adapter = self._weights.adapter, None
            submit(self, name, ids, params)
            self._weights.adapter = held

        monkeypatch.setattr(VLLMEngine, "_submit", without)
    with pytest.raises(InvariantError, match="does not compute with the adapter"):
        asyncio.run(served.push())
    monkeypatch.undo()
    asyncio.run(served.push())


@pytest.mark.parametrize("fault", ["one bit", "scale left out", "a layer lost"])
def test_another_adapter_than_was_sent_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of its own: after such an update it is not used again."""
    if "vllm" not in subjects.ENGINES:
        pytest.skip("in this process")
    own = started("vllm", adapted())
    save = adapter_load.save_file

    def spoiled(tensors: dict[str, Tensor], file: Path, **words: Any) -> None:
        held = {n: t.clone() for n, t in tensors.items()}
        name = next(n for n in held if "lora_B" in n)
        if fault == "one bit":
            held[name].view(torch.int32)[0, 0] ^= 1
        if fault == "scale left out":
            held = {n: t / own.policy.lora.scale if "lora_B" in n else t for n, t in held.items()}  # type: ignore[union-attr]
        if fault == "a layer lost":
            held = {n: t for n, t in held.items() if name.partition(".lora_")[0] not in n}
        save(held, file, **words)

    try:
        learn(own.policy, 1)
        asyncio.run(own.push())
        monkeypatch.setattr(adapter_load, "save_file", spoiled)
        learn(own.policy, 2)
        with pytest.raises(EngineError, match="another adapter|no place|not sent"):
            asyncio.run(own.push())
    finally:
        own.close()


def test_another_base_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if "vllm" not in subjects.ENGINES:
        pytest.skip("in this process")
    policy = adapted()

    def spoiled(tensors: dict[str, Tensor], file: Path, **words: Any) -> None:
        held = {n: t.clone() for n, t in tensors.items()}
        name = next(n for n in held if n.endswith("down_proj.weight"))
        held[name].view(torch.int32)[1, 1] ^= 1
        hot_load_save(held, file, **words)

    hot_load_save = adapter_load.save_file
    monkeypatch.setattr(adapter_load, "save_file", spoiled)
    own = started("vllm", policy)
    monkeypatch.undo()
    try:
        with pytest.raises(EngineError, match="weights beneath"):
            asyncio.run(own.push())
    finally:
        own.close()


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "lora"),
    [
        ("qwen3", "bfloat16", LORA),
        ("llama", "float32", Lora(rank=8, rslora=True, targets=("q_proj", "v_proj", "down_proj"))),
        ("gemma", "float32", Lora(rank=1, targets=("k_proj", "gate_proj"))),
    ],
)
def test_each_architecture_serves_adapters_on_some_of_its_layers(arch: str, dtype: str, lora: Lora) -> None:
    if "vllm" not in subjects.ENGINES:
        pytest.skip("in this process")
    own = started("vllm", adapted(lora, arch=arch, dtype=dtype))

    async def main() -> None:
        for seed in (0, 1):
            learn(own.policy, seed)
            assert await own.push() == own.learner.fingerprint()
            assert np.abs(await own.scored() - own.base()).mean() > 0.02
        assert await say(own) < LEAST[dtype].worst

    try:
        asyncio.run(main())
    finally:
        own.close()


def test_what_vllm_cannot_serve_is_refused_before_it_starts() -> None:
    with pytest.raises((ConfigError, EngineError), match="serves no adapters of GPT2LMHeadModel"):
        started("vllm", adapted(arch="gpt2", kv_heads=2))
    with pytest.raises(ConfigError, match="DoRA"):
        Run(recipe="x", stages=(), engine=VLLM(), model=replace(subjects.MODEL, lora=Lora(dora=True)))
    with pytest.raises(ConfigError, match="up to 512"):
        adapter_load.rank_for(Lora(rank=600))


# --- a run ------------------------------------------------------------------------------------------------------------


SMALL = (
    *("rl.prompts=2", "rl.siblings=4", "rl.sampling.max_tokens=6", "evaluation.samples=1", "env.heldout=2"),
    *("rl.eval_every=0", "rl.steps=4", "slots=8", "threads=1", "rl.optimizer.lr=0.02", "rl.optimizer.warmup=0"),
    *("engine=vllm", "engine.eager=true", "engine.cache_gib=0.05", "model.lora.rank=4"),
    *("model.hidden=64", "model.heads=2", "model.kv_heads=1"),  # vLLM for CPU attends with heads of 32 and more
)


@pytest.mark.parametrize("server", [False, True])
def test_grpo_trains_an_adapter_through_vllm(tmp_path: Path, server: bool) -> None:
    """Each step's sampler and learner agree within the bound of float32, and only the adapter travels."""
    if ("vllm-server" if server else "vllm") not in subjects.ENGINES:
        pytest.skip("another engine")
    (tmp_path / "mine.py").write_text("def odd(task, text):\n    return float(sum(map(ord, text)) % 2)\n")
    words = (*SMALL, f"env.rewards={tmp_path / 'mine.py'}:odd", f"engine.server={str(server).lower()}")
    out = tmp_path / "run"
    posttrain.run("grpo", *words, out=out, quiet=True)
    steps = [s for s in read_steps(out) if s.index]
    worst = [s.gauges["canary/logp_gap_worst"].sum for s in steps if "canary/logp_gap_worst" in s.gauges]
    assert worst and max(worst) < LEAST["float32"].worst
    held = load_file(find(out, "last").folder / "weights.safetensors")
    moved = [n for n, t in held.items() if "lora_B" in n and bool(t.any())]
    assert moved, "B began as 0"
    own = sum(t.nbytes for n, t in held.items() if "lora_" in n)
    pushed = [s.gauges["engine/pushed"] for s in steps if "engine/pushed" in s.gauges]
    assert pushed and all(g.sum == own * g.count for g in pushed)
