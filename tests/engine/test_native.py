"""The compiled kernels against torch's own operations; skipped, with the reason, where no C compiler works."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded import token_sampler
from posttrain.engine.embedded.cache.cache_blocks import BLOCK, blocks_for
from posttrain.engine.embedded.cache.fused_decoder import FusedDecoder
from posttrain.engine.embedded.cache.key_value_cache import CachedLayout, CachePool
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers import attention
from posttrain.engine.layers.attention import AttentionCall, PackedLayout
from posttrain.engine.model.supported_models import LayerShape
from posttrain.system.errors import EngineError

FOUND = compile_native.find()
needs_kernels = pytest.mark.skipif(isinstance(FOUND, str), reason=f"no compiled kernels: {FOUND}")


def test_where_a_compiler_works_there_are_kernels(tmp_path: Path) -> None:
    """Code that does not compile is no reason to skip: it fails here."""
    compiler, least = shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]), tmp_path / "least.c"
    least.write_text("#include <omp.h>\nint most(void) { return omp_get_max_threads(); }\n")
    made = [
        *shlex.split(os.environ.get("CC", "cc")),
        *compile_native.FLAGS,
        "-o",
        str(tmp_path / "least.so"),
        str(least),
    ]
    if compiler is None or subprocess.run(made).returncode:
        pytest.skip("no C compiler with OpenMP works here")
    assert not compile_native.missing()


CPU = torch.device("cpu")


class Layer:
    layer_idx = 0


def pools(heads: int, key: int, value: int, blocks: int) -> list[CachePool]:
    """The same random cache twice, attended by kernels and by torch."""
    both = [
        CachePool([LayerShape(heads, key, value)], torch.float32, CPU, kernels) for kernels in ("compiled", "torch")
    ]
    for pool in both:
        pool.grow(blocks)
    for x, y in zip((both[0].keys[0], both[0].values[0]), (both[1].keys[0], both[1].values[0]), strict=True):
        x.copy_(torch.randn_like(x))
        y.copy_(x)
    return both


def tables(lengths: list[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of each sequence, in blocks that lie anywhere."""
    free = rng.permutation(sum(map(blocks_for, lengths)))
    out: list[np.ndarray] = []
    for n in lengths:
        own, free = free[: blocks_for(n)], free[blocks_for(n) :]
        out.append((own[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:n])
    return out


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key", "value"),
    [(4, 4, 32, 32), (6, 2, 64, 64), (4, 1, 20, 12), (2, 2, 48, 80), (8, 4, 128, 128)],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (19, None), (None, 4.0)])
@torch.inference_mode()
def test_attention_is_torchs(
    heads: int, kv_heads: int, key: int, value: int, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(0)
    lengths = [1, 40, 16, 17, 130, 64]
    rows = tables(lengths, np.random.default_rng(0))
    idle = 2
    count = len(lengths) + idle
    both = pools(kv_heads, key, value, sum(map(blocks_for, lengths)))
    q, k, v = (torch.randn(1, h, count, d) for h, d in ((heads, key), (kv_heads, key), (kv_heads, value)))
    seen = [
        CachedLayout(
            p, np.array([r[-1] for r in rows]), np.concatenate(rows), np.array([*lengths, *[0] * idle]), None
        ).attend(AttentionCall(Layer(), q, k, v, key**-0.5, window, softcap))  # type: ignore[arg-type]
        for p in both
    ]
    torch.testing.assert_close(*seen, rtol=1e-5, atol=2e-6)
    assert not seen[0][:, -idle:].any()
    assert torch.equal(both[0].keys[0], both[1].keys[0])
    assert torch.equal(both[0].values[0], both[1].values[0])


@needs_kernels
@torch.inference_mode()
def test_rows_of_a_table_are_attended_where_they_lie() -> None:
    """Rows given one query after the other, or anywhere by their starts, have the same bits in every form."""
    lengths = np.array([1, 40, 0, 130])
    rows = tables([int(n) for n in lengths], np.random.default_rng(3))
    table = np.full((4, 144), 3, np.int64)  # what lies behind a sequence is never seen
    for row, r in zip(table[::-1], rows, strict=True):
        row[: len(r)] = r
    last, begin = np.array([r[-1] for r in rows if len(r)]), np.arange(4)[::-1] * 144
    q, k, v = torch.randn(1, 4, 4, 32), torch.randn(1, 2, 4, 32), torch.randn(1, 2, 4, 32)
    for pool in pools(2, 32, 32, 20):
        for window in (None, 19):
            one = CachedLayout(pool, last, np.concatenate(rows), lengths, None)
            two = CachedLayout(pool, last, table.ravel(), lengths, None, (), begin)
            for form in (CachedLayout.by_compiled, CachedLayout.by_sparse_product, CachedLayout.by_definition):
                call = AttentionCall(Layer(), q, k, v, 0.2, window)  # type: ignore[arg-type]
                seen = [form(x, call).clone() for x in (one, two)]
                assert torch.equal(*seen)


@needs_kernels
@torch.inference_mode()
def test_attention_bits_know_no_neighbour_and_no_thread() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 200, 70).tolist()
    rows = tables(lengths, rng)
    pool = pools(4, 64, 64, sum(map(blocks_for, lengths)))[0]
    q, k, v = torch.randn(1, 8, 70, 64), torch.randn(1, 4, 70, 64), torch.randn(1, 4, 70, 64)

    def attend(which: list[int]) -> torch.Tensor:
        layout = CachedLayout(
            pool,
            np.array([rows[i][-1] for i in which]),
            np.concatenate([rows[i] for i in which]),
            np.array([lengths[i] for i in which]),
            None,
        )
        return layout.attend(AttentionCall(Layer(), q[:, :, which], k[:, :, which], v[:, :, which], 0.125))[0]  # type: ignore[arg-type]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([attend([i]) for i in range(70)])
        torch.set_num_threads(3)
        together = attend(list(range(70)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)


@needs_kernels
@torch.inference_mode()
def test_scores_that_are_not_finite_reach_the_output() -> None:
    """A diverged model must not look healthy."""
    pool = pools(1, 32, 32, 1)[0]
    pool.keys[0][3] = torch.nan
    layout = CachedLayout(pool, np.array([8]), np.arange(9), np.array([9]), None)
    out = layout.attend(AttentionCall(Layer(), *torch.randn(3, 1, 1, 1, 32), 1.0))  # type: ignore[arg-type]
    assert out.isnan().all()


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_the_decoder_is_torchs(family: str) -> None:
    torch.manual_seed(0)
    more = {"attention_bias": True} if family == "llama" else {"head_dim": 20} if family == "qwen3" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )
    attention.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    for name, p in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            p.add_(torch.randn_like(p) * 0.3)
    out = read_out(model)
    ids, at = torch.randint(97, (37,)), torch.cat([torch.arange(30), torch.arange(7)])
    decoders = [FusedDecoder(model, out, 64, compiled) for compiled in (True, False)]
    seen = [d.hidden(ids, at, PackedLayout([30, 7])) for d in decoders]
    with torch.inference_mode(False), torch.no_grad():
        again = decoders[0].hidden(ids, at, PackedLayout([30, 7]))
    assert torch.equal(again, seen[0])
    torch.testing.assert_close(*seen, rtol=2e-5, atol=2e-5)


@needs_kernels
@torch.inference_mode()
def test_decoder_bits_know_no_neighbour_and_no_thread() -> None:
    """Widths on both sides of every way the product is cut: 1 to 130 positions, 1 and 3 threads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=97,
        hidden_size=200,
        intermediate_size=712,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    attention.register()
    decoder = FusedDecoder(
        model := AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval(),
        read_out(model),
        64,
        True,
    )
    ids, at = torch.randint(97, (130,)), torch.arange(130) % 64
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([decoder.hidden(ids[i : i + 1], at[i : i + 1], PackedLayout([1])) for i in range(130)])
        torch.set_num_threads(3)
        for count in (2, 8, 9, 16, 17, 24, 25, 33, 41, 49, 64, 65, 80, 88, 89, 130):
            together = decoder.hidden(ids[:count], at[:count], PackedLayout([1] * count))
            assert torch.equal(together, alone[:count])
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("size", [1, 16, 33, 1024])
def test_the_pick_is_torchs(size: int) -> None:
    """Also at the ends of the interval, and where most tokens have probability zero."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    logits = torch.randn(60, size) * 3
    logits[20:, ::3] = -torch.inf
    logits[:, size // 2] = 1
    logp = torch.log_softmax(logits, -1)
    for uniform in (rng.random(60), np.zeros(60), np.full(60, np.nextafter(1, 0))):
        ids = token_sampler.pick(logp, uniform)
        assert torch.equal(ids, token_sampler._pick(logp, uniform))
        assert (logp.gather(1, ids[:, None]) > -torch.inf).all()
    logp[3, 0] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        token_sampler.pick(logp, rng.random(60))


def test_what_it_says_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    compile_native.find.cache_clear()
    shapes = [LayerShape(1, 8, 8)]
    try:
        assert CachePool(shapes, torch.float32, CPU).kernel.form == "torch"
        with pytest.raises(EngineError, match="no C compiler 'no-such-compiler': install gcc or clang, or set CC"):
            CachePool(shapes, torch.float32, CPU, "compiled")
        with pytest.raises(EngineError, match="no C compiler"):
            compile_native.library()
    finally:
        compile_native.find.cache_clear()
    with pytest.raises(EngineError, match=r"serve float32 on cpu, not torch\.float64 on cpu"):
        CachePool(shapes, torch.float64, CPU, "compiled")


@needs_kernels
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    compile_native.find.cache_clear()
    try:
        why = compile_native.find()
    finally:
        compile_native.find.cache_clear()
    assert isinstance(why, str)
    assert "does not compile decoder.c" in why


@pytest.mark.prove
@needs_kernels
@pytest.mark.parametrize("harm", ["written by others", "cut", "another library"])
def test_a_library_that_is_not_as_it_was_written_is_never_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harm: str
) -> None:
    """Loaded, the planted one would make the file `ran`; the cut one would end this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_native, "FLAGS", ("-O0", *compile_native.FLAGS[1:]))
    compiler, source, ran = os.environ.get("CC", "cc"), tmp_path / "planted.c", tmp_path / "ran"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        f'__attribute__((constructor)) void run(void) {{ close(open("{ran}", O_CREAT | O_WRONLY, 0600)); }}\n'
    )
    assert not isinstance(compile_native.find.__wrapped__(), str)
    (library,) = (tmp_path / "posttrain").glob("kernels-*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it mapped
    if harm == "cut":
        library.write_bytes(whole[: len(whole) // 3])
    else:
        subprocess.run([*shlex.split(compiler), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    if harm == "written by others":
        library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        library.parent.chmod(0o777)
    assert not isinstance(compile_native.find.__wrapped__(), str)
    assert not ran.exists()
    assert (library.read_bytes() == whole) == (harm != "written by others")


@needs_kernels
def test_a_compiler_may_be_a_command_of_several_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_native, "FLAGS", ("-O0", *compile_native.FLAGS[1:]))
    monkeypatch.setenv("CC", f"env {os.environ.get('CC', 'cc')}")
    assert not isinstance(compile_native.find.__wrapped__(), str)
    monkeypatch.setenv("CC", 'cc "')
    assert "is no command" in str(compile_native.find.__wrapped__())


LINE, SETS = 64, 64
"""Bytes of a line of a processor's first cache, and into how many sets its lines are sorted (32 KiB, eight ways)."""


@pytest.mark.parametrize("count", [1, 16, 17, 64, 100, 128, 256, 512, 1024])
def test_rows_are_spread_over_the_cache(count: int) -> None:
    """The elements of one column, in as many rows as there are sets, lie in as many sets. In rows of a power of two of
    floats they would share a few."""
    row = compile_native.stride(count)
    assert count <= row < count + 2 * compile_native.LANES and row % compile_native.LANES == 0
    assert len({r * row * 4 // LINE % SETS for r in range(SETS)}) == SETS
    assert count < 32 or len({r * 2 ** count.bit_length() * 4 // LINE % SETS for r in range(SETS)}) < SETS
