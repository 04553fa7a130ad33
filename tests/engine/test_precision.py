"""float16: the loss is scaled and the gradient is not, an overflow is data, and the scale is resumed. Sampler and
learner differ by as much as each type rounds."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.checks.learning.precision_checks import scale_was_checked
from posttrain.config import overrides
from posttrain.config.model_settings import Lora
from posttrain.config.run import Optimizer, Run
from posttrain.core.gauge import Gauge, Step
from posttrain.engine.embedded.cache.cached_model import CachedModel
from posttrain.engine.embedded.exact_replay import SamplerReplay
from posttrain.engine.head import logit_transform
from posttrain.engine.head.float32_head import prove_logits, prove_logprobs
from posttrain.engine.head.readout import ReadOut, read_out
from posttrain.engine.layers import compiled_layers
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.learner.packed_reader import PackedReader
from posttrain.engine.optimizer.loss_scale import FIRST, PATIENCE, LossScale
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.record import run_reader
from posttrain.role.rollout import Rollout
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError
from tests.engine.engine_parts import packed, policy
from tests.mutants import find
from tests.tiny import only_rl, play, tiny_parts, tiny_run

TYPES = ("float32", "bfloat16", "float16")


def in_type(run: Run, dtype: str) -> Run:
    return replace(run, model=replace(run.model, dtype=dtype))


def half(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value, dtype=torch.float16, requires_grad=True)}


def test_a_gradient_below_float16_arrives() -> None:
    """1e-8 is 0 in float16, and 6.6e-4 once it is scaled."""
    weights = half()
    optimizer = StageOptimizer(weights, Optimizer(warmup=0), "auto", True)
    for _ in range(2):
        ((weights["w"].float() * 1e-8).sum() * optimizer.loss_scale).backward()
        optimizer.gather()
    grad = optimizer.trained()["w"].grad
    assert grad is not None and grad.dtype == torch.float32
    torch.testing.assert_close(grad, torch.full((3,), 2e-8), rtol=1e-3, atol=0)
    assert optimizer.step() == pytest.approx(2e-8 * math.sqrt(3), rel=1e-3)


def test_an_overflow_halves_the_scale_and_moves_nothing() -> None:
    weights = half() | {"v": torch.ones(2, requires_grad=True)}
    optimizer = StageOptimizer(weights, Optimizer(warmup=0), "auto", True)
    before = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    ((weights["w"].float() * 10 + weights["v"].sum()).sum() * optimizer.loss_scale).backward()
    optimizer.gather()
    assert not math.isfinite(optimizer.step()) and optimizer.steps == 0 and optimizer.loss_scale == FIRST / 2
    after = optimizer.state_tensors()
    assert [n for n in before if not torch.equal(before[n], after[n])] == ["loss_scale"]
    assert all(p.grad is None for p in weights.values())


def test_the_scale_grows_after_many_good_steps_and_is_a_part_of_the_state() -> None:
    scale = LossScale()
    for _ in range(PATIENCE + 3):
        scale.after(1.0)
    assert (scale.value, scale.good) == (2 * FIRST, 3)
    one, two = (StageOptimizer(half(), Optimizer(), "auto", True) for _ in range(2))
    assert one._scale is not None
    one._scale.value, one._scale.good = 128.0, 7
    two.load_state_tensors(one.state_tensors())
    assert two._scale == LossScale(128.0, 7)
    for lacking in ("loss_scale", "loss_scale_good"):
        with pytest.raises(RunFolderError, match="loss_scale"):
            two.load_state_tensors({n: t for n, t in one.state_tensors().items() if n != lacking})
    with pytest.raises(RunFolderError, match="other parameters"):
        StageOptimizer(half(), Optimizer()).load_state_tensors(one.state_tensors())


@pytest.mark.prove
def test_a_run_goes_on_behind_an_overflow(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path / "run", in_type(only_rl(tiny_run(prompts=8, steps=4)), "float16"))

    def optimize(config: Optimizer) -> StageOptimizer:
        made = StageOptimizer(parts.learner.parameters(), config, "auto", True)
        assert made._scale is not None
        made._scale.value = 2.0**22
        return made

    parts.optimize = optimize  # type: ignore[assignment]
    asyncio.run(play(parts))
    seen = [s.gauges for s in run_reader.steps(tmp_path / "run")]
    left_out = [g for g in seen if "optim/overflowed" in g]
    assert left_out and len(left_out) < len(seen)
    assert all("optim/grad_norm" not in g and g["optim/steps"].sum == 0 for g in left_out)
    scales = [g["optim/loss_scale"].mean for g in seen if "optim/loss_scale" in g]
    assert scales == sorted(scales, reverse=True) and scales[-1] < scales[0]


@pytest.mark.prove
def test_a_resumed_stage_checks_the_scale_until_a_step_could_be_checked() -> None:
    """The first ones may overflow, or have a gradient of 0."""
    overflowed = Step("rl", 1, 0, {"optim/overflowed": Gauge(1, 1)})
    checked = Step("rl", 2, 1, {"canary/scale_gap": Gauge(0, 1)})
    assert not scale_was_checked([]) and not scale_was_checked([overflowed])
    assert scale_was_checked([overflowed, checked])


@pytest.mark.prove
def test_float16_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    run = replace(in_type(only_rl(tiny_run(prompts=8, steps=4)), "float16"), keep_checkpoints=9)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    posttrain.run(run, out=tmp_path / "cut", quiet=True)
    second = sorted((tmp_path / "cut" / "checkpoints").glob("*-rl-000002"))[0]
    posttrain.run(resume=second, quiet=True)
    one, two = (run_reader.steps(tmp_path / f)[-1] for f in ("whole", "cut"))
    assert one.index == two.index == 4 and one.gauges == two.gauges and "optim/loss_scale" in one.gauges


@pytest.mark.prove
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["all weights", "an adapter"])
def test_a_run_cut_behind_an_overflow_has_the_record_of_one_never_cut(
    lora: Lora | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After such a step no weights are pushed. An engine that lives on must not find prompts in its cache that one of
    a resumed run does not have."""

    def first(self: LossScale, value: float = 2.0**23, good: int = 0) -> None:
        self.value, self.good = value, good

    monkeypatch.setattr(LossScale, "__init__", first)
    run = in_type(only_rl(tiny_run(prompts=8, steps=4)), "float16")
    run = replace(run, model=replace(run.model, lora=lora), keep_checkpoints=9)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    overflowed = [s.index for s in run_reader.steps(tmp_path / "whole") if "optim/overflowed" in s.gauges]
    assert overflowed and overflowed[0] == 1
    for index in range(1, 4):
        cut = tmp_path / f"cut {index}"
        shutil.copytree(tmp_path / "whole", cut)
        posttrain.run(resume=sorted((cut / "checkpoints").glob(f"*-rl-{index:06d}"))[0], quiet=True)
        assert run_reader.record_digest(cut) == run_reader.record_digest(tmp_path / "whole"), index


@pytest.mark.prove
def test_the_mismatch_follows_the_type(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    for dtype in TYPES:
        posttrain.run(in_type(only_rl(tiny_run(prompts=8, steps=1)), dtype), out=tmp_path / dtype, quiet=True)
        seen[dtype] = run_reader.steps(tmp_path / dtype)[0]
    gap = {d: s.gauges["mismatch/logp_gap"].mean for d, s in seen.items()}
    assert gap["float32"] < 1e-5 < 4 * gap["float16"] < gap["bfloat16"]
    assert [bool(s.notes and s.notes[0].startswith("noise band: ")) for s in seen.values()] == [False, True, True]


def test_a_cpu_without_float16_says_that_it_rounds(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path / "run", in_type(tiny_run(), "float16"))
    supported = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    said = parts.learner.policy.describe()  # type: ignore[attr-defined]
    assert any("rounds each result to float16" in line for line in said) is not supported


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_head_is_float32_in_every_type_and_a_narrow_one_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = policy(dtype=dtype)
    out = read_out(p.module)
    hidden = torch.randn(20, out.weight.shape[1]).to(dtype)
    prove_logprobs(out, hidden, "auto")
    prove_logits(out)
    HFLearner(p).score(packed(2))
    real = logit_transform.logits
    monkeypatch.setattr(logit_transform, "logits", lambda *given: real(*given).half().float())
    with pytest.raises(InvariantError, match=r"the learner's head computes in less than float32.*autocast"):
        prove_logprobs(out, hidden, "auto")
    monkeypatch.setattr(ReadOut, "logits", lambda self, h: (h @ self.weight.T).bfloat16().float())
    with pytest.raises(InvariantError, match="the sampler's head"):
        prove_logits(out)
    monkeypatch.setattr(ReadOut, "logits", lambda self, h: (h @ self.weight.T).float() * float("nan"))
    with pytest.raises(InvariantError, match="the sampler's head .* by nan of the largest"):
        prove_logits(out)


def test_no_tokens_prove_no_head() -> None:
    p, nothing = policy(dtype=torch.bfloat16), packed(2).select([])
    reader = PackedReader(p)
    assert reader.head(nothing, torch.zeros(0, reader.out.weight.shape[1], dtype=p.dtype), False)[0].shape == (0,)
    assert not reader._proved


@pytest.mark.prove
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float32", ()),
        ("float32", ("model.kernels=torch", "rl.sampling.temperature=0.7", "slots=70")),
        ("bfloat16", ("rl.sampling.top_p=0.8",)),
        ("float16", ("rl.minibatches=2", "model.arch=llama")),
        ("float32", ("model.lora.rank=4",)),
        ("float32", ("model.lora.rank=4", "model.kernels=torch", "model.lora.targets=q_proj,up_proj")),
        ("bfloat16", ("model.lora.rank=4", "model.lora.dora=true", "model.lora.rslora=true")),
        ("float32", ("model.lora.rank=4", "model.quantize=int8", "rl.minibatches=2")),
        ("float32", ("model.arch=llama", "model.gradient_checkpointing=full")),
        ("float32", ("rl.sampling.repetition_penalty=1.3", "rl.sampling.min_tokens=3", "rl.sampling.temperature=0.8")),
        (
            "bfloat16",
            ("rl.sampling.logit_bias=5:-1.5,7:0.7", "rl.sampling.bad_ids=[[9],[4,6]]", "rl.sampling.top_p=0.9"),
        ),
    ],
)
def test_exact_means_the_same_bits(dtype: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    posttrain.run(in_type(only_rl(tiny_run(steps=2)), dtype), "exact=true", *settings, out=tmp_path / "run", quiet=True)
    seen = run_reader.steps(tmp_path / "run")
    assert len(seen) == 2
    for name in ("canary/logp_gap_worst", "mismatch/logp_gap", "mismatch/kl"):
        assert all(s.gauges[name].sum == 0.0 for s in seen)
    assert any("agree bit for bit" in note and "times as long" in note for note in seen[0].notes)
    assert any(s.gauges["optim/grad_norm"].mean > 0 for s in seen if "optim/grad_norm" in s.gauges)


def test_exact_log_probs_keep_their_own_gradient() -> None:
    p = policy()
    batch = packed(5)
    plain, exact = HFLearner(p), HFLearner(p, sampled=SamplerReplay(p, 8).values)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for learner in (plain, exact):
        logp = learner.forward(batch).logp
        found.append((logp.detach(), list(torch.autograd.grad(logp.sum(), list(p.module.parameters())))))
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert 0 < float((found[0][0] - found[1][0]).abs().max()) < 1e-5
    with torch.no_grad():
        next(iter(p.module.parameters())).mul_(1.5)
    np.testing.assert_allclose(exact.score(batch), plain.score(batch), rtol=0, atol=1e-4)


@pytest.mark.prove
def test_exact_counts_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of one token stops the run."""
    real = SamplerReplay.values

    def off(self: SamplerReplay, batch: Any) -> torch.Tensor:
        out = real(self, batch)
        out[0] = torch.nextafter(out[0], torch.tensor(0.0))
        return out

    monkeypatch.setattr(SamplerReplay, "values", off)
    with pytest.raises(InvariantError, match=r"disagree about the same weights.*bound 0 in float32"):
        posttrain.run(only_rl(tiny_run(steps=1)), "exact=true", out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize("name", ["adapter_left_out", "adapter_merged_twice", "adapter_of_the_last_step"])
def test_the_same_bits_hide_no_fault_of_an_adapter(name: str, tmp_path: Path) -> None:
    """Sampler and learner share the code, and the fault in it; the learner's own pass does not."""
    settings = ("exact=true", "model.lora.rank=4", f"fault={name}")
    with pytest.raises(InvariantError, match=r"does not compute with the adapter|scores a canary otherwise"):
        posttrain.run(only_rl(tiny_run(steps=1)), *settings, out=tmp_path / "run", quiet=True, allow_fault=True)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["attention_crosses_answers", "tree_leaks_a_sibling"])
def test_the_same_bits_hide_no_fault_of_the_pass_that_learns(name: str, tmp_path: Path) -> None:
    """The values of the loss are the sampler's, and its gradients come from the packed pass."""
    run, fault = only_rl(tiny_run(steps=1)), find(name)
    settings = (*fault.shows, "exact=true", f"fault={name}")
    with pytest.raises(InvariantError, match=r"disagree about the same weights|differ|shared"):
        posttrain.run(run, *settings, out=tmp_path / "run", quiet=True, allow_fault=True)


@pytest.mark.prove
def test_the_same_bits_hide_no_fault_of_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CachedModel.logits
    monkeypatch.setattr(CachedModel, "logits", lambda self, hidden: real(self, hidden) * 1.2)
    with pytest.raises(InvariantError, match=r"disagree about the same weights.*bound 0\.\d*[1-9]"):
        posttrain.run(only_rl(tiny_run(steps=1)), "exact=true", out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("engine=vllm",), "exact=true.*engine=embedded"),
        (("engine.lookup=2",), "exact=true.*engine.lookup=0"),
        (("model.kernels=reference",), "exact=true.*model.kernels=auto"),
    ],
)
def test_what_has_no_exact_scores_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overrides.apply(only_rl(tiny_run()), ["exact=true", *settings])


@pytest.mark.prove
def test_deterministic_asks_torch_and_lets_it_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[bool] = []
    run = only_rl(tiny_run(steps=1))
    parts = Rollout.episode

    async def watched(self: Any, *given: Any, **named: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return await parts(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "episode", watched)
        posttrain.run(run, "deterministic=true", out=tmp_path / "run")
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()
    assert "idle rows are its price" in capsys.readouterr().out


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.compile=true, but .*no C\+\+ compiler.*leave it out"):
        posttrain.run(only_rl(tiny_run()), "model.compile=true", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.prove
def test_a_compiled_learner_learns_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_rl(tiny_run(prompts=8, steps=2))
    run = replace(run, model=replace(run.model, layers=1))
    posttrain.run(run, out=tmp_path / "plain", quiet=True)
    posttrain.run(run, "model.compile=true", out=tmp_path / "compiled")
    assert "compiled 1 layer of the learner in" in capsys.readouterr().out
    one, two = (run_reader.steps(tmp_path / name)[0].gauges for name in ("plain", "compiled"))
    assert one["optim/grad_norm"].mean == pytest.approx(two["optim/grad_norm"].mean, rel=1e-3)
