"""Every form in the table of kernels lies within its stated bound of the plain one, and a form from outside is taken up
by all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.config.engines import KernelChoice
from posttrain.core.sampling import Sampling
from posttrain.core.types import TruncationSets
from posttrain.engine.embedded.cache.cache_blocks import BLOCK
from posttrain.engine.embedded.cache.key_value_cache import CachedLayout, CachePool
from posttrain.engine.head.kernel_table import FORMS, TABLE, Kernel, kernel
from posttrain.engine.head.logprob import logprobs
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers import attention
from posttrain.engine.layers.attention import AttentionCall, PackedLayout
from posttrain.engine.layers.prefix_tree_attention import SharedTree, TreeLayout
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.supported_models import LayerShape
from posttrain.ladder.policy_rows import GRPO
from tests.engine.engine_parts import packed, policy
from tests.tiny import only_rl, play, tiny_parts, tiny_run

Made = Callable[[Callable[..., Any]], list[Tensor]]
"""What a form computes of one fixed case."""
CPU = torch.device("cpu")


def _random(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _with_gradients(out: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    by = [_random(9, x.device, x.dtype, *x.shape) for x in out]
    return [*(x.detach() for x in out), *torch.autograd.grad(out, inputs, by)]


def attends(device: torch.device, dtype: torch.dtype) -> list[Made]:
    """Causal and within a window, heads shared and not, soft-capped and not."""

    def case(kv_heads: int, window: int | None, softcap: float | None) -> Made:
        def made(form: Callable[..., Any]) -> list[Tensor]:
            inputs = [
                _random(i, device, dtype, 2, h, 37, 16).requires_grad_() for i, h in enumerate((4, kv_heads, kv_heads))
            ]
            at = torch.arange(37, device=device)
            away = at[:, None] - at
            mask = None if window is None else (away >= 0) & (away < window)
            return _with_gradients([form(*inputs, mask, 0.25, softcap)], inputs)

        return made

    return [case(4, None, None), case(2, 9, None), case(1, None, 4.0), case(2, 9, 4.0)]


def attends_packed(device: torch.device, dtype: torch.dtype) -> list[Made]:
    """Segments alone, and a tree of runs with more than one block of queries; heads too wide for one sum."""
    parts = [
        np.r_[np.arange(at), np.full(n, 100 + i)] for i, (at, n) in enumerate(((20, 3), (20, 70), (31, 9), (0, 1)))
    ]
    lengths = np.array([len(x) for x in parts])
    tree = SharedTree.of(np.concatenate(parts).astype(np.int32), lengths)
    assert tree.saving > 0

    def case(layout: Any, kv_heads: int, widths: tuple[int, int], window: int | None, softcap: float | None) -> Made:
        def made(form: Callable[..., Any]) -> list[Tensor]:
            count = int(layout.runs._length.sum())
            shapes = ((4, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
            inputs = [
                _random(i, device, dtype, 1, count, h, d).transpose(1, 2).requires_grad_()
                for i, (h, d) in enumerate(shapes)
            ]
            call = AttentionCall(torch.nn.Module(), *inputs, 0.25, window, softcap)
            return _with_gradients([form(layout, call)], inputs)

        return made

    long, alone = PackedLayout([300, 2]), PackedLayout(lengths)
    return [
        case(alone, 4, (16, 16), None, None),
        case(alone, 2, (20, 12), 9, None),
        case(TreeLayout(tree), 1, (16, 32), None, None),
        case(TreeLayout(tree), 2, (64, 64), 33, None),
        case(TreeLayout(tree), 2, (16, 16), None, 4.0),
        case(long, 4, (48, 48), None, None),
        case(long, 1, (8, 8), 40, None),
        case(alone, 2, (288, 272), None, None),
    ]


def attends_pages(device: torch.device, dtype: torch.dtype) -> list[Made]:
    """Sequences in blocks that lie anywhere, one idle query among them; the keys stored on the way are compared too."""
    lengths = np.array([1, 40, 16, 0, 17, 130])

    def case(kv_heads: int, window: int | None, softcap: float | None, tables: bool = False) -> Made:
        def made(form: Callable[..., Any]) -> list[Tensor]:
            pool = CachePool([LayerShape(kv_heads, 24, 16)], dtype, device)
            pool.grow(20)
            for i, part in enumerate((pool.keys[0], pool.values[0])):
                part.copy_(_random(i, device, dtype, *part.shape))
            free = (np.random.default_rng(0).permutation(20)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
            starts = -(-np.cumsum(lengths) // BLOCK) * BLOCK
            rows = [free[s : s + n] for s, n in zip((0, *starts[:-1]), lengths, strict=True)]
            visible, begin = np.concatenate(rows), None
            if tables:  # as an engine's slots hold them, in another order
                visible, begin = np.zeros((6, 144), np.int64), np.arange(6)[::-1] * 144
                for row, r in zip(visible[::-1], rows, strict=True):
                    row[: len(r)] = r
            last = np.array([r[-1] for r in rows if len(r)])
            layout = CachedLayout(pool, last, visible.ravel(), lengths, None, (), begin)
            shapes = (4, 24), (kv_heads, 24), (kv_heads, 16)
            rows = [_random(i, device, dtype, h, 6, d)[None] for i, (h, d) in enumerate(shapes)]
            module: Any = SimpleNamespace(layer_idx=0)
            call = AttentionCall(module, *rows, 0.2, window, softcap)
            return [form(layout, call).clone(), pool.keys[0], pool.values[0]]

        return made

    return [
        case(4, None, None),
        case(2, 19, None),
        case(1, None, 4.0),
        case(4, None, None, True),
        case(2, 19, None, True),
    ]


def decodes(device: torch.device, dtype: torch.dtype) -> list[Made]:
    def made(form: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2}
        config = AutoConfig.for_model("qwen3", **sizes, num_attention_heads=4, num_key_value_heads=2)
        attention.register()
        model = (
            AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype).eval().to(device)
        )
        ids, at = torch.arange(37, device=device) * 7 % 97, torch.cat([torch.arange(30), torch.arange(7)]).to(device)
        return [form(model, read_out(model), 64).hidden(ids, at, PackedLayout([30, 7]))]

    return [made]


def layers(device: torch.device, dtype: torch.dtype) -> list[Made]:
    """Hidden states of two sequences, and the gradient of every weight."""

    def case(family: str, more: dict[str, Any]) -> Made:
        def made(form: Callable[..., Any]) -> list[Tensor]:
            torch.manual_seed(0)
            sizes = {"vocab_size": 97, "hidden_size": 72, "intermediate_size": 52, "num_hidden_layers": 2}
            config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=2, **more)
            attention.register()
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype).to(device)
            ids, at = (
                torch.arange(37, device=device) * 7 % 97,
                torch.cat([torch.arange(30), torch.arange(7)]).to(device),
            )
            hidden = form(model, read_out(model)).hidden(ids, at, PackedLayout([30, 7]))
            return _with_gradients([hidden], list(model.get_decoder().parameters()))

        return made

    window = {"sliding_window": 9}
    return [case("qwen3", {"head_dim": 20}), case("llama", {}), case("mistral", window), case("qwen2", {})]


def draws(device: torch.device, dtype: torch.dtype) -> list[Made]:
    logits = _random(0, device, dtype, 60, 33) * 3
    logits[20:, ::3] = -torch.inf
    logp, rng = logits.log_softmax(-1), np.random.default_rng(0)
    numbers = (rng.random(60), np.zeros(60), np.full(60, np.nextafter(1, 0)))
    return [lambda form, u=u: [form(logp, u).double()] for u in numbers]


def heads(device: torch.device, dtype: torch.dtype) -> list[Made]:
    targets = torch.arange(300, device=device) % 50
    kept = TruncationSets.of([np.array([i % 50, (i + 7) % 50, (i + 9) % 50], np.int32) for i in range(300)])

    def case(sampling: Sampling, softcap: float | None) -> Made:
        def made(form: Callable[..., Any]) -> list[Tensor]:
            inputs = [
                _random(i, device, dtype, *s).requires_grad_() for i, s in enumerate(((300, 16), (50, 16), (50,)))
            ]
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(TABLE, "head", (Kernel("reference", form),))
                sets = kept if sampling.truncated else None
                logp, entropy = logprobs(
                    *inputs, targets, sampling=sampling, kept=sets, softcap=softcap, want_entropy=True
                )
            assert entropy is not None
            return _with_gradients([logp, entropy], inputs)

        return made

    return [case(Sampling(temperature=0.7), None), case(Sampling(top_k=3), 5.0)]


def optimizes(device: torch.device, dtype: torch.dtype) -> list[Made]:
    def made(form: Callable[..., Any]) -> list[Tensor]:
        parameters = [_random(i, device, dtype, *s).requires_grad_() for i, s in enumerate(((7, 5), (11,)))]
        adam = form(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step in range(5):
            for p in parameters:
                p.grad = _random(step, device, dtype, *p.shape)
            adam.step()
        return [p.detach() for p in parameters]

    return [made]


CASES: Mapping[str, Callable[[torch.device, torch.dtype], list[Made]]] = {
    "attention": attends,
    "packed_attention": attends_packed,
    "paged_attention": attends_pages,
    "decoder": decodes,
    "layers": layers,
    "draw": draws,
    "head": heads,
    "adamw": optimizes,
}
DEVICES = (CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else []))
FAST = [
    (k, device, dtype)
    for forms in TABLE.values()
    for k in forms
    if k.form != "reference"
    for device in DEVICES
    for dtype in k.bounds
]


def within(form: Kernel, made: Made, bound: float) -> None:
    """A case by a form and by the reference form of its operation."""
    for ours, theirs in zip(made(form.function), made(TABLE[form.operation][-1].function), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        gap = float((ours.double() - theirs.double()).abs().max() / max(1.0, float(theirs.double().abs().max())))
        assert gap <= bound, f"{form.operation} {form.form}: {gap:.3g} > {bound:.3g}"


@pytest.mark.parametrize(
    ("form", "device", "dtype"), FAST, ids=lambda x: f"{x.operation}-{x.form}" if isinstance(x, Kernel) else str(x)
)
def test_a_form_is_within_its_bound_of_the_plain_one(form: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    if why := form.unfit(device, dtype):
        pytest.skip(why)
    for made in CASES[form.operation](device, dtype):
        with torch.inference_mode(form.operation in ("paged_attention", "decoder", "draw")):
            within(form, made, form.bounds[dtype])


def test_the_table_is_whole_and_the_choice_goes_down_its_forms() -> None:
    assert set(TABLE) == set(CASES), "an operation is compared by a case of its own"
    for name, forms in TABLE.items():
        assert [k.form for k in forms] == sorted((k.form for k in forms), key=FORMS.index) and forms[
            -1
        ].form == "reference"
        assert kernel(name, CPU, torch.float32, "reference") is forms[-1]
        assert kernel(name, CPU, torch.int8) is forms[-1], "what no faster form serves is computed by definition"
        assert kernel(name, CPU, torch.float32, "torch").form != "compiled"
        assert kernel(name, CPU, torch.float32) is kernel(name, CPU, torch.float32, "compiled")


def _one_query_at_a_time(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention as somebody else might write it: row by row, over the keys a query sees and no others."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows: list[Tensor] = []
    for i in range(q.shape[2]):
        seen = torch.arange(i + 1, device=q.device) if mask is None else mask[i].nonzero()[:, 0]
        s = (q[:, :, i : i + 1] * k[:, :, seen]).sum(-1) * scaling
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        rows.append((s.softmax(-1)[..., None] * v[:, :, seen]).sum(2))
    return torch.stack(rows, 2)


def test_a_form_from_outside_is_one_more_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner computes by it as soon as it stands in the table, and no more where the choice is another."""
    calls = [0]

    def mine(*given: Any) -> Tensor:
        calls[0] += 1
        return _one_query_at_a_time(*given)

    bounds = {torch.float32: 1e-5}
    row = Kernel("compiled", mine, devices=("cpu",), bounds=bounds, operation="attention")
    for made in attends(CPU, torch.float32):
        within(row, made, 1e-5)
    p, batch = policy(), packed(3)
    before, calls[0] = HFLearner(p).score(batch), 0
    monkeypatch.setitem(TABLE, "attention", (row, *TABLE["attention"]))
    monkeypatch.setitem(TABLE, "packed_attention", TABLE["packed_attention"][-1:])  # none that needs no dense attention
    np.testing.assert_allclose(HFLearner(p).score(batch), before, atol=1e-4)
    assert calls[0] > 0
    calls[0] = 0
    HFLearner(replace(p, kernels="torch")).score(batch)
    assert not calls[0]


@pytest.mark.parametrize("choice", ["torch", "reference"])
def test_a_run_without_the_faster_forms(tmp_path: Path, choice: KernelChoice) -> None:
    """One word in the tree reaches learner, reference, optimizer and engine, and the run's own checks find them
    alike."""
    run = only_rl(tiny_run(algorithm=GRPO))
    seen: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, forms in TABLE.items():
            patch.setitem(
                TABLE, name, tuple(replace(k, function=_noted(k, seen.setdefault(name, set()))) for k in forms)
            )
        parts = tiny_parts(tmp_path / choice, replace(run, model=replace(run.model, kernels=choice)))
        at_birth = {name: set(forms) for name, forms in seen.items()}
        for forms in seen.values():
            forms.clear()
        asyncio.run(play(parts))
    assert all(seen[name] == {choice} for name in ("attention", "paged_attention", "head", "adamw"))
    assert seen["draw"] == {"reference"} and at_birth["decoder"] == {choice}
    assert isinstance(parts.learner, HFLearner) and parts.learner.policy.kernels == choice


def _noted(form: Kernel, into: set[str]) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        into.add(form.form)
        return form.function(*args, **options)

    return function
