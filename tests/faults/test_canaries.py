"""Each canary has a fault of its own: planted in the real code path, it stops the run with its message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.checks.learning.gradient_and_update_checks import StepGradients, moved
from posttrain.config.run import Optimizer, Run
from posttrain.core.batch import Packed
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.ladder.policy_rows import GRPO
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import InvariantError, RewardError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


def stops(
    tmp_path: Path, plant: Callable[[RunParts], None], run: Run | None = None, error: type[Exception] = InvariantError
) -> str:
    parts = tiny_parts(tmp_path / "run", run or only_rl(tiny_run()))
    plant(parts)
    with pytest.raises(error) as caught:
        asyncio.run(play(parts))
    return str(caught.value)


def test_a_healthy_run_trips_nothing(tmp_path: Path) -> None:
    results = asyncio.run(play(tiny_parts(tmp_path / "run")))
    assert [r.name for r in results] == ["sft", "rl"]
    assert results[-1].optimizer_steps >= 1


@pytest.mark.prove
def test_temperature_on_one_side_only(tmp_path: Path) -> None:
    """The learner evaluates pi at temperature 1 while the sampler drew at 0.7."""

    def plant(parts: RunParts) -> None:
        score = parts.learner.score
        parts.learner.score = lambda packed: score(replace(packed, sampling=replace(packed.sampling, temperature=1.0)))  # type: ignore[method-assign]

    run = tiny_run(sampling=replace(tiny_run().stages[-1].sampling, temperature=0.7))  # type: ignore[union-attr]
    message = stops(tmp_path, plant, only_rl(run))
    assert "sampler and learner disagree" in message and "temperature" in message and "Worst token" in message


@pytest.mark.prove
def test_stale_tensor_at_a_push(tmp_path: Path) -> None:
    """One tensor of every push is the one from before."""

    def plant(parts: RunParts) -> None:
        first: dict[str, torch.Tensor] = {}

        class Stale:
            async def load(self, version: int, given: Iterable[tuple[str, Any]]) -> str:
                out = list(given)
                name, tensor = out[1]
                first.setdefault(name, tensor.detach().clone())
                return await engine.load(version, [out[0], (name, first[name]), *out[2:]])

            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

        engine = parts.sampler
        parts.sync.sampler = Stale()  # type: ignore[assignment]

    message = stops(tmp_path, plant)
    assert "weight sync" in message and "fingerprint" in message


@pytest.mark.prove
def test_engine_that_ignores_a_push(tmp_path: Path) -> None:
    """The sampler says it has the new version and serves the old weights."""

    def plant(parts: RunParts) -> None:
        engine = parts.sampler

        class Skips:
            pushed = 0

            async def load(self, version: int, given: Iterable[tuple[str, Any]]) -> str:
                self.pushed += 1
                kept = {n: t.detach().clone() for n, t in given} if self.pushed == 1 else self.kept
                self.kept = kept
                return await engine.load(version, kept.items())

            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

        parts.sync.sampler = Skips()  # type: ignore[assignment]

    assert "weight sync" in stops(tmp_path, plant)


@pytest.mark.prove
def test_engine_that_holds_the_weights_and_computes_something_else(tmp_path: Path) -> None:
    """Fingerprints agree, and a canary scored after the push does not: a stale prefix cache, an adapter that was not
    applied."""

    def plant(parts: RunParts) -> None:
        score = parts.sampler.score

        async def other(ids: np.ndarray) -> np.ndarray:
            return await score(ids) + np.where(np.arange(len(ids) - 1) == 5, 0.01, 0).astype(np.float32)

        parts.sampler.score = other  # type: ignore[method-assign]

    message = stops(tmp_path, plant)
    assert "scores a canary otherwise" in message and "token 7 of 16" in message and "prefix cache" in message


@pytest.mark.prove
def test_reference_that_trains(tmp_path: Path) -> None:
    """The reference shares its tensors with the learner."""

    def plant(parts: RunParts) -> None:
        class Shared:
            digest = parts.learner.fingerprint()

            def score(self, packed: Packed) -> np.ndarray:
                return parts.learner.score(packed)

            def fingerprint(self) -> str:
                return parts.learner.fingerprint()

        parts.freeze = Shared  # type: ignore[assignment]

    message = stops(tmp_path, plant, only_rl(tiny_run(algorithm=GRPO)))
    assert "the reference has changed" in message


@pytest.mark.prove
def test_reference_of_other_weights(tmp_path: Path) -> None:
    """The reference differs from the learner before the first step."""

    def plant(parts: RunParts) -> None:
        freeze = parts.freeze

        class Off:
            def __init__(self) -> None:
                self._inner = freeze()
                self.digest = self._inner.digest

            def score(self, packed: Packed) -> np.ndarray:
                return self._inner.score(packed) - np.float32(0.1)

            def fingerprint(self) -> str:
                return self._inner.fingerprint()

        parts.freeze = Off  # type: ignore[assignment]

    message = stops(tmp_path, plant, only_rl(tiny_run(algorithm=GRPO)))
    assert "reference scores differently" in message


def test_frozen_layer(tmp_path: Path) -> None:
    """One tensor is cut off from the gradient."""

    def plant(parts: RunParts) -> None:
        tensor = list(parts.learner.parameters().values())[2]
        tensor.register_hook(torch.zeros_like)

    message = stops(tmp_path, plant, tiny_run(prompts=16))
    assert "get no gradient from the log-probs that they change" in message and "k_proj" in message


def test_frozen_value_head(tmp_path: Path) -> None:
    """Nothing of it learns, whatever the returns are."""

    def plant(parts: RunParts) -> None:
        parts.learner.value_head.weight.register_hook(torch.zeros_like)  # type: ignore[attr-defined]

    message = stops(tmp_path, plant, tiny_run(prompts=16))
    assert "value_head.weight get no gradient from the values" in message


def test_a_move_that_earlier_gradients_cancel_is_no_fault() -> None:
    """The moments pull one way and the gradient the other; what is left is below the rounding of a weight near 1, and
    so no fault."""
    config = Optimizer(lr=1e-6, warmup=0, clip=1e9)
    w = torch.full((4,), 1.0)
    optimizer = StageOptimizer({"norm": w}, config)
    w.grad = torch.full((4,), 1.0)
    optimizer.step()
    w.grad = torch.full((4,), -0.9)
    handed, told = StepGradients.of(optimizer, config), StepGradients.of(StageOptimizer({"norm": w}, config), config)
    optimizer.step()
    assert float(w[0]) == handed.largest["norm"].weight
    assert moved(handed, {"norm": w}, config.lr) == {}
    with pytest.raises(InvariantError, match="did not move in an optimizer step"):
        moved(told, {"norm": w}, config.lr)


@pytest.mark.prove
@pytest.mark.parametrize("only", [False, True], ids=["imitation", "reinforcement"])
def test_optimizer_that_moves_copies(tmp_path: Path, only: bool) -> None:
    """The gradients arrive, and what the optimizer moves is put back: a master that is never published, a sharded
    copy."""

    def plant(parts: RunParts) -> None:
        optimize = parts.optimize

        class Copies:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def step(self) -> float:
                tensor = list(self._inner.trained().values())[3]
                before = tensor.detach().clone()
                norm = self._inner.step()
                tensor.data.copy_(before)
                return norm

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

        parts.optimize = lambda config: Copies(optimize(config))  # type: ignore[assignment,return-value]

    run = tiny_run(prompts=16, steps=20)
    message = stops(tmp_path, plant, only_rl(run) if only else run)
    assert "did not move in an optimizer step" in message and "learning rate" in message


@pytest.mark.prove
def test_observation_counted_as_said(tmp_path: Path) -> None:
    """The transcript claims one more spoken token than the engine said."""

    def plant(parts: RunParts) -> None:
        engine = parts.sampler
        gauges = engine.gauges

        def fewer() -> Any:
            out = gauges()
            tokens = out["engine/tokens"]
            return out | {"engine/tokens": replace(tokens, sum=tokens.sum - 1)}

        engine.gauges = fewer  # type: ignore[method-assign]

    assert "masks of this step cover" in stops(tmp_path, plant)


def test_verifier_outage_is_no_wrong_answer(tmp_path: Path) -> None:
    """A judge that is down stops the run instead of scoring zero."""

    class Down:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def judge(self, attempt: Any) -> tuple[Judged, ...]:
            return (Judged("judge", 1.0, Verdict.failed("outage", "connection refused")),)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    def plant(parts: RunParts) -> None:
        parts.rollout.environment = Down(parts.rollout.environment)  # type: ignore[assignment]

    message = stops(tmp_path, plant, error=RewardError)
    assert "judge: outage" in message and "connection refused" in message and "could not be judged" in message
