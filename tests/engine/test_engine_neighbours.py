"""A request that cannot be served is refused or gets its own error, and those beside it say what they would have said
without it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.speculation import Lookup
from posttrain.system.errors import ConfigError, EngineError
from tests.engine.embedded_parts import V, ask, engine, module, one_thread, prompts, reference_logp, sampling

__all__ = ["one_thread"]

ODD: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1e-46},
    "hot": {"temperature": math.inf, "bad_ids": ((1,),)},
    "nan": {"temperature": math.nan},
    "repetition_penalty": {"repetition_penalty": 1e-46},
    "logit_bias": {"logit_bias": ((3, 1e300),)},
    "top_k": {"top_k": 10**30},
    "min_tokens": {"min_tokens": 10**30, "max_tokens": 10**30},
    "allowed_ids": {"allowed_ids": (10**30,)},
    "top": {"top": 10**30},
}
EXTREME: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 1e-6},
    "hot": {"temperature": 1e6, "bad_ids": ((1,),)},
    "penalty": {"repetition_penalty": 1e-6},
    "penalty and cold": {"repetition_penalty": 1e6, "temperature": 1e-6},
    "bias": {"logit_bias": ((3, 1e6), (4, -1e6)), "temperature": 1e-6, "repetition_penalty": 1e-6},
    "wide": {"top_k": 2**31 - 1, "max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
    "all": {"top": V},
}


def beside(e: EmbeddedEngine, act: Callable[[], Any]) -> Any:
    """The result or error of `act`, awaited while another request speaks, which must say what it says alone."""

    async def main() -> tuple[SampledTurn, Any]:
        innocent = asyncio.create_task(e.generate(prompts(1)[0], sampling(max_tokens=40), 0))
        for _ in range(5):
            await asyncio.sleep(0)
        (other,) = await asyncio.gather(act(), return_exceptions=True)
        return await asyncio.wait_for(innocent, 10), other

    said, other = asyncio.run(main())
    (alone,) = asyncio.run(ask(engine(), prompts(1), sampling(max_tokens=40)))
    assert np.array_equal(said.ids, alone.ids) and np.abs(said.logp - alone.logp).max() < 2e-5
    assert e.blocks_in_use == 0 and not e._scheduler.busy and not e._scheduler._users
    return other


@pytest.mark.parametrize("name", ODD)
def test_numbers_that_no_engine_holds_are_refused_by_the_contract(name: str) -> None:
    field = {"hot": "temperature", "nan": "temperature", "min_tokens": "max_tokens"}.get(name, name)
    with pytest.raises(ConfigError, match=f"sampling.{field}.*(must|at most)"):
        sampling(**ODD[name])


@pytest.mark.parametrize("name", EXTREME)
def test_the_largest_numbers_of_a_contract_are_served(name: str) -> None:
    e, prompt = engine(), prompts(1, seed=2)[0]
    said = beside(e, lambda: e.generate(prompt, sampling(**EXTREME[name]), 1))
    assert isinstance(said, SampledTurn) and np.isfinite(said.logp).all()


def test_more_alternatives_than_tokens_are_refused_at_the_door() -> None:
    e = engine()
    with pytest.raises(ConfigError, match=f"sampling.top={V + 1}.*lower it"):
        raise beside(e, lambda: e.generate(prompts(1)[0], sampling(top=V + 1), 1))


def test_what_cannot_be_written_down_fails_alone() -> None:
    """No key of random numbers is negative. Its siblings, behind and before it, are served."""
    e, prompt = engine(), prompts(1, seed=2)[0]

    async def three() -> list[Any]:
        return await asyncio.gather(
            *[e.generate(prompt, sampling(), place) for place in (1, -1, 2)], return_exceptions=True
        )

    first, failed, last = beside(e, three)
    assert isinstance(failed, ValueError)
    for place, said in ((1, first), (2, last)):
        (alone,) = asyncio.run(ask(engine(), [prompt], sampling(), [place]))
        assert np.array_equal(said.ids, alone.ids)


@pytest.mark.parametrize("options", [{}, {"speculate": Lookup()}], ids=["plain", "lookup"])
@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
def test_a_row_without_a_distribution_fails_alone(options: dict[str, Any], kernels: str) -> None:
    """The logits of the second slot are spoilt, whatever may do that."""
    e = engine(kernels=kernels, **options)
    plain = e._scheduler.slots.contracts.put
    broken = sampling(repetition_penalty=1.5)

    def put(row: int, s: Sampling, *rest: Any) -> None:
        plain(row, s, *rest)
        if s is broken:
            rules = e._scheduler.slots.contracts.rules
            assert rules is not None
            rules.penalty[row] = np.nan

    e._scheduler.slots.contracts.put = put  # type: ignore[method-assign]
    failed = beside(e, lambda: e.generate(prompts(1, seed=2)[0], broken, 1))
    assert isinstance(failed, EngineError) and "not finite" in str(failed)


def test_diverged_weights_fail_everyone_and_the_engine_takes_new_ones() -> None:
    e = engine(slots=2)
    e._module.get_input_embeddings().weight.data.fill_(float("nan"))

    async def all_of() -> list[Any]:
        return await asyncio.gather(
            *[e.generate(p, sampling(), i) for i, p in enumerate(prompts(5))], return_exceptions=True
        )

    got = asyncio.run(asyncio.wait_for(all_of(), 10))
    assert all(isinstance(x, EngineError) and "not finite" in str(x) for x in got)
    assert e.blocks_in_use == 0
    asyncio.run(e.load(1, module(seed=1).named_parameters()))
    prompt = prompts(1)[0]
    (said,) = asyncio.run(ask(e, [prompt], sampling()))
    assert np.abs(reference_logp(module(seed=1), prompt, said, sampling()) - said.logp).max() < 2e-5


@pytest.mark.parametrize("at", [1, 20])
def test_a_listener_that_fails_fails_alone(at: int) -> None:
    """At its first token, and at its last."""
    e, told = engine(), []

    def listen(ids: np.ndarray, logp: np.ndarray) -> None:
        told.append(ids)
        if len(told) == at:
            raise KeyError("the listener's own mistake")

    failed = beside(e, lambda: e.generate(prompts(1, seed=2)[0], sampling(), 1, heard=listen))
    assert isinstance(failed, KeyError) and len(told) == at


def test_an_error_of_the_engine_wakes_every_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are decoded, those in the queue, and a load of weights that waits for them; then it serves again."""
    e = engine(slots=2)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    async def main() -> list[Any]:
        calls = [asyncio.create_task(e.generate(p, sampling(max_tokens=40), i)) for i, p in enumerate(prompts(4))]
        for _ in range(5):
            await asyncio.sleep(0)
        with monkeypatch.context() as m:
            m.setattr(e._stepper, "step", broken)
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    assert [str(x) for x in asyncio.run(main())] == ["no memory"] * 4
    (said,) = asyncio.run(ask(e, prompts(1), sampling(max_tokens=4)))
    assert len(said.ids) and not e._scheduler.busy
