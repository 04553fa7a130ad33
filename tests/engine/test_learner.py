"""The learner: packing changes nothing, every token is scored by the model transformers would run, the optimizer is
AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.config.run import Checkpointing, Optimizer
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.streams import SCORED, Scoring
from posttrain.engine.layers import packed_attention
from posttrain.engine.learner import packed_reader
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.ladder.policy_rows import LADDER
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import DataError, RunFolderError
from tests.engine.engine_parts import ARCHS, packed, policy, segments, tiny


def separately(p: Policy, batch: Packed, temperature: float = 1.0) -> np.ndarray:
    """Log-probs by transformers' own attention and head, one segment at a time."""
    module = p.clone().module
    module.set_attn_implementation("sdpa")
    out: list[Tensor] = []
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S
    for s, (start, length) in enumerate(zip(starts.tolist(), batch.lengths_S.tolist(), strict=True)):
        ids = torch.from_numpy(batch.ids_N[start : start + length].astype(np.int64))
        with torch.no_grad():
            logp = (module(input_ids=ids[None], use_cache=False).logits[0].float() / temperature).log_softmax(-1)
        at = batch.segment_M == s
        out.append(
            logp[torch.from_numpy(batch.source_M[at] - start), torch.from_numpy(batch.target_M[at].astype(np.int64))]
        )
    return torch.cat(out).numpy()


def gradients(learner: HFLearner, parts: list[Packed]) -> dict[str, Tensor]:
    """Of a loss that reads log-probs, entropies and values, summed over parts."""
    for part in parts:
        scores = learner.forward(part, Reads(entropy=True, value=True))
        (
            scores.logp * torch.from_numpy(np.sin(part.target_M.astype(float))) + 0.3 * scores.entropy + scores.value**2
        ).sum().backward()
    out = {n: p.grad.clone() for n, p in learner.parameters().items()}
    for p in learner.parameters().values():
        p.grad = None
    return out


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def exact_learner(arch: str = "qwen3") -> HFLearner:
    learner = HFLearner(policy(arch, dtype=torch.float64))
    torch.nn.init.constant_(learner.value_head.weight, 0.1)
    return learner


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_equals_separate(arch: str) -> None:
    p, batch = policy(arch), packed(8)
    gap = np.abs(HFLearner(p).score(batch) - separately(p, batch)).max()
    assert gap < 1e-5, gap


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_equals_separate_in_bfloat16(arch: str) -> None:
    p, batch = policy(arch, dtype=torch.bfloat16), packed(8)
    gap = np.abs(HFLearner(p).score(batch) - separately(p, batch))
    print(f"{arch} bfloat16: worst log-prob gap {gap.max():.3f}, mean {gap.mean():.4f}")
    assert gap.max() < 0.25 and gap.mean() < 0.02


def test_temperature_and_forward_agree_with_score() -> None:
    p, batch = policy(), packed(5, sampling=Sampling(temperature=0.6))
    learner = HFLearner(p)
    scores = learner.forward(batch, Reads(entropy=True, value=True))
    assert np.abs(learner.score(batch) - separately(p, batch, 0.6)).max() < 1e-5
    assert np.array_equal(scores.logp.detach().numpy(), learner.score(batch))
    assert (
        np.array_equal(scores.value.detach().numpy(), np.zeros(batch.spoken, np.float32))
        and learner.value(batch).dtype == np.float32
    )
    assert bool((scores.entropy >= 0).all())


def test_kept_sets_are_carried_through_splits() -> None:
    learner, batch = HFLearner(policy()), packed(6, sampling=Sampling(top_k=6))
    whole = learner.score(batch)
    parts = np.concatenate([learner.score(part) for part in batch.split(30)])
    assert np.abs(whole - parts).max() < 2e-6
    # renormalising over fewer tokens only raises log-probs
    assert np.all(whole >= HFLearner(policy()).score(packed(6)) - 1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_any_order_and_split_has_the_same_gradient(arch: str) -> None:
    learner, pieces = exact_learner(arch), segments(7)
    bound = 5e-6 if arch == "gemma" else 1e-10  # Gemma's norm sums its weight's gradient in float32 whatever the dtype
    whole = gradients(learner, [Packed.of(pieces)])
    bound *= max(1.0, max(float(g.abs().max()) for g in whole.values()))
    assert furthest(whole, gradients(learner, [Packed.of(pieces[::-1])])) < bound
    assert furthest(whole, gradients(learner, Packed.of(pieces).split(25))) < bound
    assert furthest(whole, gradients(learner, [Packed.of([s]) for s in pieces])) < bound


def test_checkpointing_changes_no_gradient_and_scoring_leaves_no_trace() -> None:
    plain, batch = exact_learner(), packed(4)
    saving = HFLearner(policy(dtype=torch.float64), gradient_checkpointing="full")
    torch.nn.init.constant_(saving.value_head.weight, 0.1)
    saving.train_mode(True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(1) or t, lambda t: t):
        saving.forward(batch)
        less = len(kept)
        plain.forward(batch)
    assert less < len(kept) - less
    assert furthest(gradients(plain, [batch]), gradients(saving, [batch])) < 1e-12
    saving.score(batch)
    assert saving.policy.module.training and all(p.grad is None for p in saving.parameters().values())


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_first_pass_may_compute_its_layers_again(how: Checkpointing) -> None:
    """The compiled attention is compared with its definition then, which leaves no trace in what the backward reads."""
    batch, made = packed(4), replace(policy(), share_prefixes=False)
    saving, plain = HFLearner(made.clone(), gradient_checkpointing=how), HFLearner(made)
    saving.train_mode(True)
    packed_attention._proved.cache_clear()  # pyright: ignore[reportPrivateUsage]
    found, wanted = gradients(saving, [batch]), gradients(plain, [batch])
    assert all(torch.dist(found[n], wanted[n]) <= 1e-5 * torch.linalg.vector_norm(wanted[n]) for n in wanted)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_one_pass_reads_has_the_bits_of_each_alone(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batch, names = HFLearner(policy(arch)), packed(6), ("score", "value", "entropy", "energy")
    torch.nn.init.normal_(learner.value_head.weight)
    monkeypatch.setattr(packed_reader, "SCORE_TOKENS", 60)
    assert len(batch.split(60)) > 1
    alone, positions = dict[str, np.ndarray](), set[int]()
    for name in names:
        before = learner._reader.computed
        alone[name] = getattr(learner, name)(batch)
        positions.add(learner._reader.computed - before)
    before = learner._reader.computed
    together = learner.examine(batch, names)
    assert {learner._reader.computed - before} == positions
    assert list(together) == list(names) and all(np.array_equal(together[n], alone[n]) for n in names)
    assert list(learner.examine(batch, ["energy"])) == ["energy"] and learner.examine(batch, []) == {}


@pytest.mark.parametrize(
    ("name", "steps", "own"), [("ppo", 1, ["value"]), ("ppo", 2, ["score", "value"]), ("vcpo", 1, ["score", "energy"])]
)
def test_a_step_reads_its_own_tokens_in_one_pass(name: str, steps: int, own: list[str]) -> None:
    """The reference has weights of its own, and a pass of its own."""
    p = policy()
    learner, reference, batch = HFLearner(p), FrozenScorer(p), packed(4)
    learner.score(batch)
    once = learner._reader.computed
    scoring = Scoring(batch, LADDER[name], learner, reference, steps)
    made = {stream.name for maker in SCORED for stream in maker.make(scoring)}
    assert learner._reader.computed == 2 * once and list(scoring.own) == own
    assert {"values" if "value" in own else "energy"} | ({"start"} if "score" in own else set()) <= made


def test_names_are_those_of_transformers_with_ties_once() -> None:
    tied, apart = HFLearner(policy("qwen3")), HFLearner(policy("llama"))
    assert "lm_head.weight" not in dict(whole_tensors(tied.shards())) and "lm_head.weight" in dict(
        whole_tensors(apart.shards())
    )
    assert list(tied.parameters())[-2:] == ["value_head.weight", "value_head.bias"]
    assert set(dict(whole_tensors(tied.shards()))) == {n for n in tied.parameters() if not n.startswith("value_head.")}
    assert not tied.policy.module.load_state_dict(dict(whole_tensors(tied.shards())), strict=False).unexpected_keys
    before = tied.fingerprint()
    with torch.no_grad():
        tied.value_head.bias += 1
    assert tied.fingerprint() == before
    with torch.no_grad():
        tied.parameters()["model.norm.weight"][0] += 1e-6
    assert tied.fingerprint() != before


def test_a_frozen_scorer_stays_where_it_was_born() -> None:
    p, batch = policy(), packed(3)
    learner, reference = HFLearner(p), FrozenScorer(p)
    assert np.array_equal(reference.score(batch), learner.score(batch)) and reference.digest == learner.fingerprint()
    adam = StageOptimizer(learner.parameters(), Optimizer(warmup=0))
    learner.forward(batch).logp.sum().backward()
    adam.step()
    assert reference.fingerprint() == reference.digest != learner.fingerprint()
    assert not np.allclose(reference.score(batch), learner.score(batch))


def test_positions_beyond_the_context_are_refused() -> None:
    learner = HFLearner(load_policy(tiny("gpt2", context=16), "0123456789abcdefghijklmnop", 0))
    with pytest.raises(DataError, match=r"context of 16.*raise model\.context"):
        learner.score(packed(6, longest=40, seed=1))


# --- the optimizer ---------------------------------------------------------------------------------------------------


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        n: torch.randn(*s, generator=g).to(dtype).requires_grad_()
        for n, s in {"a": (4, 3), "b": (5,), "idle": (2,)}.items()
    }


def feed(parameters: dict[str, Tensor], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for name, p in parameters.items():
        if name != "idle":
            p.grad = (torch.randn(*p.shape, generator=g) * 3).to(p.dtype)


def test_is_adamw_with_clip_and_warm_up() -> None:
    config = Optimizer(lr=0.01, weight_decay=0.1, clip=1.5, warmup=4)
    ours, theirs = weights(), weights()
    adam = StageOptimizer(ours, config)
    reference = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda k: min(1.0, (k + 1) / 4))
    for step in range(8):
        feed(ours, step), feed(theirs, step)
        assert adam.lr == pytest.approx(schedule.get_last_lr()[0])
        norm = float(torch.nn.utils.clip_grad_norm_([p for p in theirs.values() if p.grad is not None], 1.5))
        reference.step()
        schedule.step()
        assert adam.step() == pytest.approx(norm, rel=1e-6)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-6)
    assert adam.lr == 0.01 and all(p.grad is None for p in ours.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit_from_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    config = Optimizer(warmup=3)
    on, resumed = weights(dtype), weights(dtype)
    first = StageOptimizer(on, config)
    for step in range(4):
        feed(on, step)
        first.step()
    save_file({n: t.contiguous() for n, t in first.state_tensors().items()}, tmp_path / "optimizer.safetensors")
    with torch.no_grad():
        for name in resumed:
            resumed[name].copy_(on[name])
    second = StageOptimizer(resumed, config)
    second.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    for step in range(4, 8):
        feed(on, step), feed(resumed, step)
        assert first.step() == second.step() and first.lr == second.lr
    assert all(torch.equal(on[n], resumed[n]) for n in on)
    assert all(torch.equal(t, second.state_tensors()[n]) for n, t in first.state_tensors().items())


def test_bfloat16_updates_smaller_than_its_rounding_add_up() -> None:
    p = {"w": torch.ones(3, dtype=torch.bfloat16, requires_grad=True)}
    adam = StageOptimizer(p, Optimizer(lr=1e-4, warmup=0))
    for _ in range(100):
        p["w"].grad = torch.ones(3, dtype=torch.bfloat16)
        adam.step()
    assert float(p["w"].detach()[0]) == pytest.approx(0.99, abs=0.003)
    with torch.no_grad():
        p["w"].fill_(2)
    p["w"].grad = torch.zeros(3, dtype=torch.bfloat16)
    adam.step()
    assert float(p["w"].detach()[0]) == pytest.approx(2, abs=0.01)  # weights replaced from outside are taken over


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_infinite_norm_moves_nothing(bad: float) -> None:
    p = weights()
    adam = StageOptimizer(p, Optimizer())
    feed(p, 0)
    adam.step()
    before, state = (
        {n: t.detach().clone() for n, t in p.items()},
        {n: t.clone() for n, t in adam.state_tensors().items()},
    )
    feed(p, 1)
    p["b"].grad[0] = bad  # type: ignore[index]
    assert not math.isfinite(adam.step())
    assert all(torch.equal(before[n], p[n]) for n in p) and all(
        torch.equal(t, adam.state_tensors()[n]) for n, t in state.items()
    )
    assert p["a"].grad is None


def test_foreign_optimizer_state_is_refused() -> None:
    adam = StageOptimizer(weights(), Optimizer())
    with pytest.raises(RunFolderError, match="'steps' does not fit"):
        adam.load_state_tensors({})
    with pytest.raises(RunFolderError, match="'exp_avg.c' does not fit"):
        adam.load_state_tensors({"steps": torch.tensor(1), "exp_avg.c": torch.zeros(1)})
    with pytest.raises(RunFolderError, match="'a' does not fit"):
        moments = {"exp_avg.a": torch.zeros(9), "exp_avg_sq.a": torch.zeros(9)}
        adam.load_state_tensors({"steps": torch.tensor(1), "step.a": torch.tensor(1.0)} | moments)


def test_micro_batches_of_bfloat16_add_up_in_float32() -> None:
    """1 + 4 / 1024 is no bfloat16 number: summed there, the four small gradients would be lost."""
    p = {"w": torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)}
    optimizer = StageOptimizer(p, Optimizer(lr=0.1, clip=math.inf))
    for size in (1.0, *[1 / 1024] * 4):
        p["w"].grad = torch.full((2,), size, dtype=torch.bfloat16)
        optimizer.gather()
    assert optimizer.step() == pytest.approx(math.sqrt(2) * (1 + 4 / 1024), abs=1e-7)
