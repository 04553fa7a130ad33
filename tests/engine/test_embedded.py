"""The embedded engine says what transformers says, counts what it computes, shares, drains, cancels and cleans up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf

from posttrain.core.types import Stop
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.layers import attention
from posttrain.engine.model.policy_model import check_read_out, named_tensors, read_out
from posttrain.system.errors import ConfigError, DataError, EngineError
from tests.engine.embedded_parts import (
    FAMILIES,
    ROPE,
    V,
    ask,
    engine,
    module,
    one_thread,
    prompts,
    reference_logp,
    sampling,
)

__all__ = ["one_thread"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_generate(family: str) -> None:
    """Short prompts attend raggedly, the long ones densely; more requests than slots."""
    e, plain = engine(family, context=128), module(family)
    asked = [
        *prompts(6),
        *prompts(2, seed=1, longest=3),
        np.arange(70, dtype=np.int32) % V,
        np.arange(90, dtype=np.int32) * 7 % V,
    ]
    for prompt, said in zip(asked, asyncio.run(ask(e, asked, sampling(greedy=True))), strict=True):
        ids = torch.from_numpy(prompt)[None].long()
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert out[0, len(prompt) :].tolist() == said.ids.tolist()
        assert not said.logp.any()
    assert e.blocks_in_use == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_logp_is_that_of_a_full_forward(family: str) -> None:
    e, plain = engine(family), module(family)
    asked = prompts(10)
    contracts = [
        sampling(temperature=0.7, stop_ids=(3,)),
        sampling(top_k=5, temperature=1.5),
        sampling(top_p=0.8, stop_ids=(5, 7)),
        sampling(min_p=0.1, top_k=7, top_p=0.9),
        sampling(),
    ] * 2
    for prompt, said, contract in zip(asked, asyncio.run(ask(e, asked, contracts)), contracts, strict=True):
        assert np.abs(reference_logp(plain, prompt, said, contract) - said.logp).max() < 2e-5
        assert (said.kept is not None) == contract.truncated
        assert said.stop is (Stop.SAID if said.ids[-1] in contract.stop_ids else Stop.LENGTH)
        assert not np.isin(said.ids[:-1], contract.stop_ids).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_its_own_full_forward(family: str) -> None:
    """Greedy text may differ where two tokens are as probable; log-probs differ by the rounding of one pass against
    many."""
    e, plain = (
        EmbeddedEngine(module(family, dtype=torch.bfloat16), slots=4, context=96),
        module(family, dtype=torch.bfloat16),
    )
    asked = prompts(6)
    gaps = [
        np.abs(reference_logp(plain, prompt, said, sampling()) - said.logp)
        for prompt, said in zip(asked, asyncio.run(ask(e, asked, sampling())), strict=True)
    ]
    gap = np.concatenate(gaps)
    print(f"bfloat16 {family}: worst {gap.max():.3f}, mean {gap.mean():.4f}")
    assert gap.mean() < 0.01 and gap.max() < 0.05


def test_context_ends_a_turn() -> None:
    e = engine(context=32)
    full, short = asyncio.run(
        ask(e, [np.ones(20, np.int32), np.ones(22, np.int32)], [sampling(max_tokens=20), sampling(max_tokens=10)])
    )
    assert (full.stop, len(full.ids)) == (Stop.CONTEXT, 12)
    assert (short.stop, len(short.ids)) == (Stop.LENGTH, 10)


def test_only_needed_positions_are_computed_on_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, V, min(180, int(rng.pareto(1.2) * 8) + 1)).astype(np.int32) for _ in range(60)]
    contracts = [sampling(max_tokens=min(200, int(rng.pareto(1.2) * 6) + 1)) for _ in asked]
    e = engine(slots=8, context=256)
    asyncio.run(ask(e, asked, contracts))
    gauges = e.gauges()
    for kind in ("linear", "attention"):
        assert 1 <= gauges[f"engine/positions_{kind}"].mean <= 1.02
    assert gauges["engine/tokens"].count == 60


def test_a_slot_is_refilled_in_the_next_step() -> None:
    """Ten tokens each for 12 requests on 4 slots: 30 steps, and not one more."""
    e = engine(slots=4)
    asyncio.run(ask(e, prompts(12), sampling(max_tokens=10)))
    gauges = e.gauges()
    assert gauges["engine/steps"].sum == 30
    assert gauges["engine/occupancy"].mean == 1
    assert gauges["engine/tokens"].sum == 120
    assert e.gauges()["engine/steps"].sum == 0


def test_a_finished_coroutine_speaks_again_in_the_next_step() -> None:
    e = engine(slots=1)

    async def turns() -> None:
        ids = np.arange(5, dtype=np.int32)
        for turn in range(3):
            said = await e.generate(ids, sampling(max_tokens=4), turn)
            ids = np.concatenate([ids, said.ids])

    asyncio.run(turns())
    assert e.gauges()["engine/steps"].sum == 12


@pytest.mark.parametrize("size", [16, 21, 70])
def test_siblings_share_their_prefill(size: int) -> None:
    """Eight siblings on three slots: late ones find the prompt cached; whole and partial last blocks."""
    prompt = np.arange(size, dtype=np.int32) % V
    e, alone = engine(slots=3), engine(slots=3)
    together = asyncio.run(ask(e, [prompt] * 8, sampling()))
    gauges = e.gauges()
    assert gauges["engine/shared"].sum == 7 * size
    assert gauges["engine/positions_linear"].sum == size + 8 * 19
    assert e.blocks_in_use == 0
    for place, said in enumerate(together):
        (one,) = asyncio.run(ask(alone, [prompt], sampling(), [place]))
        assert np.array_equal(one.ids, said.ids)


def test_tokens_do_not_depend_on_neighbours() -> None:
    asked = prompts(12)
    many = asyncio.run(ask(engine(slots=12), asked, sampling()))
    few = asyncio.run(ask(engine(slots=2), asked, sampling()))
    for a, b in zip(many, few, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.abs(a.logp - b.logp).max() < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_deterministic_bits_do_not_depend_on_neighbours(family: str) -> None:
    asked = [*prompts(20), np.arange(70, dtype=np.int32) % V]
    contracts = [sampling(top_p=0.9) if i % 3 else sampling(temperature=0.7) for i in range(21)]
    e = engine(family, slots=8, deterministic=True)
    base = asyncio.run(ask(e, asked, contracts))
    order = np.random.default_rng(1).permutation(21)
    shuffled = asyncio.run(ask(e, [asked[i] for i in order], [contracts[i] for i in order], order.tolist()))
    for i, said in zip(order, shuffled, strict=True):
        assert said.ids.tobytes() == base[i].ids.tobytes()
        assert said.logp.tobytes() == base[i].logp.tobytes()
    for i in (0, 7, 20):
        (alone,) = asyncio.run(ask(e, [asked[i]], contracts[i], [i]))
        assert alone.logp.tobytes() == base[i].logp.tobytes()


def test_load_drains_and_forgets() -> None:
    e, newer = engine(slots=2), module(seed=1)
    prompt = np.arange(20, dtype=np.int32)

    async def main() -> None:
        running = [asyncio.create_task(e.generate(prompt, sampling(max_tokens=30), i)) for i in range(4)]
        for _ in range(5):
            await asyncio.sleep(0)
        served = await e.load(3, named_tensors(newer))
        assert served == fingerprint(named_tensors(newer))
        assert e.version == 3
        said = await asyncio.gather(*running)
        assert [set(s.version.tolist()) for s in said] == [{0}, {0}, {3}, {3}]
        for s, model in zip(said, (module(), module(), newer, newer), strict=True):
            assert np.abs(reference_logp(model, prompt, s, sampling()) - s.logp).max() < 2e-5

    asyncio.run(main())
    assert e.blocks_in_use == 0


def test_weights_are_replaced_whole_or_not_at_all() -> None:
    e = engine()
    tensors = dict(named_tensors(module(seed=1)))
    first = next(iter(tensors))
    before = fingerprint(named_tensors(e._module))
    bad = {
        "missing: .*" + first.replace(".", r"\."): {n: t for n, t in tensors.items() if n != first},
        "unknown tensor 'model.embed'": {**tensors, "model.embed": tensors[first]},
        "must hold the same architecture": tensors | {first: tensors[first][1:]},
        "bfloat16": tensors | {first: tensors[first].bfloat16()},
    }
    for message, given in bad.items():
        with pytest.raises(EngineError, match=message):
            asyncio.run(e.load(1, given.items()))
    with pytest.raises(EngineError, match="only increase"):
        asyncio.run(e.load(0, tensors.items()))
    assert e.version == 0
    assert fingerprint(named_tensors(e._module)) == before
    asyncio.run(e.load(1, tensors.items()))
    asyncio.run(ask(e, prompts(2), sampling()))


def test_cancelled_requests_leave_nothing() -> None:
    e = engine(slots=2)

    async def main() -> None:
        tasks = [
            asyncio.create_task(e.generate(np.arange(20, dtype=np.int32) + i // 3, sampling(max_tokens=60), i))
            for i in range(9)
        ]
        for _ in range(6):
            await asyncio.sleep(0)
        assert e.blocks_in_use
        for t in (tasks[0], tasks[4], tasks[5], tasks[8]):
            t.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(d, asyncio.CancelledError) for d in done) == 4
        assert e.blocks_in_use == 0
        late = asyncio.create_task(e.generate(np.arange(5, dtype=np.int32), sampling(max_tokens=60), 0))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)

    asyncio.run(main())
    assert e.blocks_in_use == 0
    assert e.gauges()["engine/tokens"].count == 5


def test_a_loop_that_ended_leaves_the_engine_usable() -> None:
    e = engine(slots=2)

    async def abandon() -> None:
        waiting = asyncio.ensure_future(ask(e, prompts(5), sampling(max_tokens=50)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(abandon())
    assert len(asyncio.run(ask(e, prompts(5), sampling()))) == 5
    assert e.blocks_in_use == 0


def test_an_error_in_a_step_reaches_everyone_and_the_engine_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(slots=2)
    with monkeypatch.context() as patch:
        patch.setattr(e._served, "logits", lambda hidden: (_ for _ in ()).throw(RuntimeError("no logits")))

        async def main() -> list[object]:
            return await asyncio.gather(*[e.generate(p, sampling(), 0) for p in prompts(5)], return_exceptions=True)

        assert all(isinstance(x, RuntimeError) for x in asyncio.run(main()))
    assert e.blocks_in_use == 0
    assert len(asyncio.run(ask(e, prompts(5), sampling()))) == 5


def test_a_thousand_requests() -> None:
    e = engine(slots=64)
    said = asyncio.run(ask(e, prompts(100) * 10, sampling(max_tokens=12, stop_ids=(1, 2))))
    assert len(said) == 1000
    assert e.blocks_in_use == 0
    assert e.gauges()["engine/tokens"].sum == sum(len(s.ids) for s in said)


def test_a_small_cache_serves_everyone_in_turn() -> None:
    """Room for three sequences: admission waits, cached prompts are given up, nothing is lost."""
    e = engine(slots=8, context=64, cache_bytes=12 * 16 * 2 * 2 * 16 * 4)
    asked = [p for _ in range(2) for p in prompts(8)]
    small = asyncio.run(ask(e, asked, sampling()))
    for a, b in zip(small, asyncio.run(ask(engine(slots=8), asked, sampling())), strict=True):
        assert np.array_equal(a.ids, b.ids)
    assert e.blocks_in_use == 0
    assert e.gauges()["engine/positions_linear"].mean >= 1
    with pytest.raises(EngineError, match="does not fit the key-value cache"):
        asyncio.run(
            ask(
                engine(context=256, cache_bytes=12 * 16 * 2 * 2 * 16 * 4),
                [np.ones(150, np.int32)],
                sampling(max_tokens=90),
            )
        )


def test_prompts_that_cannot_be_served() -> None:
    e = engine(context=32)
    for prompt, message in (([], "non-empty"), ([1] * 32, "leaves no room"), ([V], "0..39"), ([-1], "0..39")):
        with pytest.raises(DataError, match=message):
            asyncio.run(e.generate(np.array(prompt, np.int32), sampling(), 0))
    with pytest.raises(EngineError, match="not resolved"):
        asyncio.run(e.generate(np.ones(3, np.int32), replace(sampling(), stop_ids=None), 0))


def test_sequences_that_cannot_be_scored() -> None:
    """A whole context can; nothing is computed of what lies beyond it or beyond the vocabulary."""
    e, whole = engine(context=32), np.arange(33, dtype=np.int32) % V
    with torch.no_grad():
        logp = module()(torch.from_numpy(whole[None, :32]).long()).logits[0].log_softmax(-1).numpy()
    assert np.abs(asyncio.run(e.score(whole[:32])) - logp[np.arange(31), whole[1:32]]).max() < 2e-5
    assert asyncio.run(e.score(whole[:1])).shape == (0,)
    assert np.array_equal(asyncio.run(e.score(whole[:9].astype(np.uint64))), asyncio.run(e.score(whole[:9])))
    far = [np.array([1, i, 2]) for i in (V, -1, 10**6, 2**32 + 7, -(2**32) + 7)]
    for ids, message in (
        (whole, "does not fit a context of 32"),
        (whole[:0], "non-empty"),
        (whole[None, :3], "non-empty"),
    ):
        with pytest.raises(DataError, match=message):
            asyncio.run(e.score(ids))
    for ids in far:
        for refused in (e.score(ids), e.generate(ids, sampling(), 0)):
            with pytest.raises(DataError, match="0..39"):
                asyncio.run(refused)
    with pytest.raises(DataError, match="float64"):
        asyncio.run(e.score(np.array([1.5, 2.0])))


def test_models_that_cannot_be_served() -> None:
    tiny = {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "num_layers": 1, "vocab_size": V}
    with pytest.raises(EngineError, match="T5.*encoder-decoder"):
        EmbeddedEngine(tf.T5ForConditionalGeneration(tf.T5Config(**tiny)), slots=1, context=8)
    mamba = tf.MambaForCausalLM(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=V, state_size=4))
    with pytest.raises(ConfigError, match="mamba keeps.*deterministic=false"):
        EmbeddedEngine(mamba, slots=1, context=8, deterministic=True)
    with pytest.raises(EngineError, match="exceeds the 256 positions"):
        engine(context=257)
    dynamic = ROPE | {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 256,
    }
    longer = tf.LlamaConfig(**dynamic, original_max_position_embeddings=64)
    with pytest.raises(EngineError, match="dynamic rope"):
        EmbeddedEngine(tf.LlamaForCausalLM(longer), slots=1, context=128)
    with pytest.raises(ConfigError, match="experts"):
        experts = tf.MixtralConfig(**ROPE, num_local_experts=2, num_experts_per_tok=1)
        EmbeddedEngine(tf.MixtralForCausalLM(experts), slots=1, context=64, deterministic=True)


def phimoe(**changes: int | None) -> tf.PreTrainedModel:
    return tf.PhimoeForCausalLM(tf.PhimoeConfig(**{**ROPE, "num_local_experts": 4, **changes})).eval()


def test_a_window_that_only_a_mask_knows_is_refused() -> None:
    """By the engine for its context, by the learner for all positions of the config."""
    windowed = phimoe(sliding_window=8)
    with pytest.raises(EngineError, match="Phimoe.* has sliding_window=8 .*max_position_embeddings=8"):
        EmbeddedEngine(windowed, slots=1, context=64)
    with pytest.raises(EngineError, match="sliding_window=8"):
        check_read_out(windowed, read_out(windowed))
    EmbeddedEngine(windowed, slots=1, context=8)
    for harmless in (
        phimoe(sliding_window=None),
        phimoe(sliding_window=8, max_position_embeddings=8),
        phimoe(sliding_window=256),
    ):
        harmless.set_attn_implementation(attention.NAME)
        check_read_out(harmless, read_out(harmless))
    windowed.config.sliding_window, windowed.config.attention_chunk_size = None, 16
    with pytest.raises(EngineError, match="attention_chunk_size=16"):
        EmbeddedEngine(windowed, slots=1, context=64)


def test_windows_that_layers_are_given_or_that_none_has_are_served() -> None:
    """Of all layers, of some, and of none though the config names one."""
    qwen = {"sliding_window": 8, "use_sliding_window": True}
    for config in (
        tf.Qwen3Config(**ROPE, **qwen, max_window_layers=1),
        tf.Qwen3Config(**ROPE, **qwen, max_window_layers=2),
        tf.Qwen3Config(**ROPE, **{**qwen, "use_sliding_window": False}),
    ):
        config.sliding_window = 8
        EmbeddedEngine(tf.Qwen3ForCausalLM(config), slots=1, context=64)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_the_fused_decoder_is_the_decoder(family: str) -> None:
    """Same tokens, nearly the same log-probs, the same named weights, and new weights reach both."""
    fused, plain = engine(family), engine(family, kernels="reference")
    assert fused.fused and engine(family, kernels="torch").fused and not plain.fused
    newer = module(family, seed=1)
    for _ in range(2):
        asked = prompts(6)
        for a, b in zip(*(asyncio.run(ask(e, asked, sampling())) for e in (fused, plain)), strict=True):
            assert np.array_equal(a.ids, b.ids)
            assert np.abs(a.logp - b.logp).max() < 2e-5
        served = [asyncio.run(e.load(e.version + 1, named_tensors(newer))) for e in (fused, plain)]
        assert served == [fingerprint(named_tensors(newer))] * 2


def test_only_plain_layers_are_fused() -> None:
    assert not engine("gpt2").fused
    assert not engine("gemma").fused
    assert not EmbeddedEngine(module(dtype=torch.bfloat16), slots=1, context=8).fused
    hooked = module()
    hooked.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert not EmbeddedEngine(hooked, slots=1, context=8).fused
