"""What segments begin with is computed once, and nothing else changes: hidden states and gradients are those of the
segments one by one, for every tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.config.engines import KernelChoice
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.micro_batches import LEAST
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.streams import REFERENCE, SIDE
from posttrain.core.types import Segment
from posttrain.engine.head.readout import read_out
from posttrain.engine.layers import prefix_tree_attention, shared_prefixes
from posttrain.engine.layers.attention import AttentionCall, PackedLayout
from posttrain.engine.layers.packed_attention import Runs
from posttrain.engine.layers.prefix_tree_attention import SharedTree, TreeLayout
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.ladder.preference_rows import DPO
from posttrain.system.errors import InvariantError
from tests.engine.engine_parts import ALPHABET, ARCHS, tiny
from tests.mutants import planted


def policy(arch: str = "gpt2", **changes: Any) -> Policy:
    return load_policy(tiny(arch, context=192, **changes), ALPHABET, 0)


def forest(seed: int, prompts: int = 3, siblings: int = 4) -> list[np.ndarray]:
    """Siblings of prompts, later turns of some, one twice, in any order."""
    rng = np.random.default_rng(seed)
    out = list[np.ndarray]()
    system = rng.integers(0, 24, rng.integers(0, 20))
    for _ in range(prompts):
        prompt = np.concatenate([system, rng.integers(0, 24, rng.integers(2, 25))])
        for _ in range(siblings):
            first = np.concatenate([prompt, rng.integers(0, 24, rng.integers(1, 14))])
            out.append(first)
            if rng.random() < 0.4:
                turns = [np.concatenate([first, rng.integers(0, 24, rng.integers(1, 20))]) for _ in range(2)]
                out += turns
                out.append(np.concatenate([turns[0], rng.integers(0, 24, 9)]))
            if rng.random() < 0.2:
                out.append(first.copy())
    return [out[i].astype(np.int32) for i in rng.permutation(len(out))]


def segment(ids: np.ndarray, spoken: int) -> Segment:
    mask = np.arange(len(ids)) >= len(ids) - spoken
    blank = np.where(mask, -1.0, np.nan).astype(np.float32)
    return Segment(ids, mask, blank, np.where(mask, 0, -1).astype(np.int32), Sampling())


def batch(parts: list[np.ndarray]) -> Packed:
    return Packed.of([segment(x, max(1, len(x) // 2)) for x in parts])


def longs(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.int64))


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), prompts=st.integers(1, 6), siblings=st.integers(1, 6))
def test_the_tree_holds_every_segment_once(seed: int, prompts: int, siblings: int) -> None:
    parts = forest(seed, prompts, siblings)
    ids, lengths = np.concatenate(parts), np.array([len(x) for x in parts])
    at = np.concatenate([np.arange(n) for n in lengths])
    found = SharedTree.of(ids, lengths)
    assert np.array_equal(ids[found.first_U][found.place_N], ids)
    assert np.array_equal(at[found.first_U][found.place_N], at)
    whole = {tuple(x[: n + 1].tolist()) for x in parts for n in range(len(x))}
    assert len(whole) <= len(found.first_U) <= len(ids), "no position is left out, and none is invented"
    assert sum(r.length for r in found.runs) == len(found.first_U)
    for run in found.runs:
        path = np.append(run.above, np.arange(run.start, run.start + run.length))
        depth = at[found.first_U][path]
        assert np.array_equal(depth, np.arange(len(path))), "what is above a run leads to it from the beginning"


def test_siblings_of_one_prompt_share_all_of_it() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 24, 40)
    parts = [np.append(prompt, [i, *rng.integers(0, 24, 39)]).astype(np.int32) for i in range(16)]
    found = SharedTree.of(np.concatenate(parts), np.full(16, 80))
    assert len(found.first_U) == 40 + 16 * 40 and found.saving == pytest.approx(1 - 680 / 1280)


@pytest.mark.parametrize("alike", [LEAST - 1, LEAST])
def test_a_few_tokens_are_not_worth_it(alike: int) -> None:
    parts = [np.r_[np.zeros(alike), np.full(30, 1 + i)].astype(np.int32) for i in range(2)]
    assert (SharedTree.of(np.concatenate(parts), np.array([len(x) for x in parts])).saving > 0) is (alike >= LEAST)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", range(3))
def test_hidden_states_and_gradients_are_those_without_sharing(arch: str, seed: int) -> None:
    """In float64. The norms of transformers compute in float32, but for GPT-2's, so gradients of others agree to their
    rounding."""
    module = policy(arch).module.double()
    out, parts = read_out(module), forest(seed)
    ids, lengths = np.concatenate(parts), np.array([len(x) for x in parts])
    at = np.concatenate([np.arange(n) for n in lengths])
    found = SharedTree.of(ids, lengths)
    alone = out.hidden(longs(ids), longs(at), PackedLayout(lengths))
    shared = out.hidden(longs(ids[found.first_U]), longs(at[found.first_U]), TreeLayout(found))[longs(found.place_N)]
    torch.testing.assert_close(shared, alone, rtol=1e-6, atol=1e-10 if arch == "gpt2" else 1e-6)
    weights = torch.randn(alone.shape, dtype=alone.dtype, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad((x * weights).sum(), list(module.parameters()), allow_unused=True) for x in (alone, shared)
    ]
    for one, two in zip(*grads, strict=True):
        if one is not None:
            bound = (1e-10 if arch == "gpt2" else 2e-6) * float(one.abs().max())
            torch.testing.assert_close(two, one, rtol=0, atol=bound)


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("waste", [0.0, 0.12, 0.9])
def test_attention_alone_is_exact(window: int | None, softcap: float | None, waste: float) -> None:
    """With grouped heads, a sliding window, a soft-cap and any padding, in float64."""
    parts = forest(7, prompts=4)
    ids, lengths = np.concatenate(parts), np.array([len(x) for x in parts])
    found = SharedTree.of(ids, lengths)
    generator = torch.Generator().manual_seed(0)
    given_U = [
        torch.randn(1, heads, len(found.first_U), 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    ]
    for x in given_U:
        x.requires_grad_(True)

    def attended(layout: Any, rows: list[torch.Tensor]) -> torch.Tensor:
        return layout.attend(AttentionCall(torch.nn.Module(), *rows, 0.3, window, softcap))[0]

    place = longs(found.place_N)
    shared = attended(TreeLayout(found, waste=waste), given_U)[place]
    alone = attended(PackedLayout(lengths), [x[:, :, place] for x in given_U])
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
    weights = torch.randn(alone.shape, dtype=torch.float64, generator=generator)
    for one, two in zip(*(torch.autograd.grad((x * weights).sum(), given_U) for x in (alone, shared)), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10)


def test_a_learner_scores_and_learns_the_same() -> None:
    data, learners = batch(forest(3)), [HFLearner(policy(share_prefixes=on)) for on in (True, False)]
    scores = [learner.forward(data, Reads(entropy=True, value=True)) for learner in learners]
    for name in ("logp", "entropy", "value"):
        torch.testing.assert_close(getattr(scores[0], name), getattr(scores[1], name), rtol=1e-4, atol=1e-5)
    for score in scores:
        score.logp.sum().backward()
    for one, two in zip(*(x.parameters().values() for x in learners), strict=True):
        if one.grad is not None and two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-4 * float(two.grad.abs().max()))
    for verb in ("score", "entropy", "energy"):
        np.testing.assert_allclose(*(getattr(x, verb)(data) for x in learners), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*(FrozenScorer(x.policy).score(data) for x in learners), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_with_recomputed_layers_the_gradient_is_the_same(kernels: KernelChoice) -> None:
    data = batch(forest(3))
    grads = list[list[torch.Tensor]]()
    for again in ("none", "selective", "full"):
        made = policy("qwen3", kernels=kernels)  # layers that are computed again are the plain ones
        learner = HFLearner(made, gradient_checkpointing=again)
        learner.train_mode(True)
        learner.forward(data).logp.sum().backward()
        grads.append([p.grad for p in learner.parameters().values() if p.grad is not None])
    for one, *others in zip(*grads, strict=True):
        for two in others:
            exact = 1e-6 if kernels == "torch" else 1e-5 * float(two.abs().max())  # none: fused layers
            torch.testing.assert_close(one, two, rtol=1e-4, atol=max(exact, 1e-6))


@pytest.mark.prove
@pytest.mark.parametrize("arch", ["gpt2", "qwen3", "gemma"])
@pytest.mark.parametrize("share", [True, False])
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), part=st.sampled_from([0.02, 0.3, 1.0]))
def test_what_nobody_reads_is_not_computed_and_the_rest_is_the_same(
    arch: str, share: bool, seed: int, part: float
) -> None:
    """For any positions that are read, in any order and some of them twice; of some segments none is."""
    rng, data = np.random.default_rng(seed), batch(forest(seed))
    at = rng.choice(len(data.ids_N), max(1, int(part * len(data.ids_N))))
    made = policy(arch)
    out, ran = read_out(made.module.double()), list[int]()
    rows = shared_prefixes.Sharing(out, made.kernels, share)
    rows.hidden(data, at)  # the first use proves itself, which computes too
    handle = out.decoder.get_submodule("h.0" if arch == "gpt2" else "layers.0").register_forward_pre_hook(
        lambda _, args: ran.append(args[0].shape[-2])  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    )
    found = rows.hidden(data, at)
    handle.remove()
    starts_N = np.arange(len(data.ids_N)) - data.positions_N
    last_S = [max(data.positions_N[at][starts_N[at] == a], default=-1) for a in np.unique(starts_N)]
    read = [data.ids_N[a : a + n + 1] for a, n in zip(np.unique(starts_N), last_S, strict=True) if n >= 0]
    least = len({tuple(x[: n + 1].tolist()) for x in read for n in range(len(x))})
    assert len(ran) == 1 and (least <= ran[0] <= sum(map(len, read)) if share else ran[0] == sum(map(len, read)))
    alone = out.hidden(longs(data.ids_N), longs(data.positions_N), PackedLayout(data.lengths_S))[longs(at)]
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-10 if arch == "gpt2" else 1e-6)


def leak(layout: type[TreeLayout]) -> Callable[..., Any]:
    """A mask by which a run sees all of what is above it and all of itself: the future too."""
    return lambda self, longest, deep, window, device: (
        torch.ones(longest, deep + longest, dtype=torch.bool) if deep else None
    )


@pytest.mark.parametrize("name", ["tree_leaks_a_sibling", "positions_begin_again_after_prefix"])
def test_the_first_use_finds_a_planted_fault(name: str) -> None:
    with planted(name), pytest.raises(InvariantError, match="share_prefixes=false"):
        HFLearner(policy("qwen3")).score(batch(forest(3)))


def steep() -> Policy:
    """A float16 model with gradients beyond the largest number of its type."""
    made = policy("qwen3", dtype="float16")
    weights = dict(made.module.named_parameters())
    with torch.no_grad():
        weights["model.embed_tokens.weight"].mul_(2**-7)
        weights["model.norm.weight"].fill_(100.0)
    return made


def test_gradients_that_overflow_are_no_wrong_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(forest(3))
    HFLearner(steep()).score(data)
    with planted("positions_begin_again_after_prefix"), pytest.raises(InvariantError, match="share_prefixes=false"):
        HFLearner(steep()).score(data)
    monkeypatch.setattr(shared_prefixes, "SCALES", (1.0,))
    with pytest.raises(InvariantError, match="differ by inf"):
        HFLearner(steep()).score(data)


class _Shallow(Runs):
    """Runs that do not see the last position above them."""

    def __init__(self, start: np.ndarray, length: np.ndarray, above: Sequence[np.ndarray] = ()) -> None:
        super().__init__(start, length, [a[:-1] if len(a) > 1 else a for a in above])


@pytest.mark.parametrize("fault", ["mask", "one token more", "gradient", "runs"])
def test_the_first_use_finds_a_wrong_tree(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: KernelChoice = "torch"
    if fault == "mask":
        monkeypatch.setattr(TreeLayout, "_mask", leak(TreeLayout))
    elif fault == "one token more":
        kernels = "auto"
        monkeypatch.setattr(prefix_tree_attention, "alike", lambda a, b: min(len(a), len(b)) - 1)
    elif fault == "runs":
        kernels = "auto"
        monkeypatch.setattr(prefix_tree_attention, "Runs", _Shallow)
    else:
        real = prefix_tree_attention._Padded.backward  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(
            prefix_tree_attention._Padded,  # pyright: ignore[reportPrivateUsage]
            "backward",
            staticmethod(lambda ctx, *grads: (real(ctx, *grads)[0] * 0.5, None, None)),
        )
    with pytest.raises(InvariantError, match="share_prefixes=false"):
        HFLearner(policy("qwen3", kernels=kernels)).score(batch(forest(3)))


def test_switched_off_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a tree was made")

    monkeypatch.setattr(SharedTree, "of", never)
    HFLearner(replace(policy(), share_prefixes=False)).score(batch(forest(3)))


@pytest.mark.parametrize(("arch", "bound"), [("gpt2", 1e-11), ("qwen3", 1e-5)])
def test_a_pair_has_the_same_gradient_whether_its_prompt_is_computed_once_or_twice(arch: str, bound: float) -> None:
    """DPO on pairs whose two completions follow one long prompt, in float64. Qwen3's own norms and rotations are in
    float32."""
    rng = np.random.default_rng(8)
    said, sides = list[Segment](), list[int]()
    for _ in range(3):
        prompt = rng.integers(0, 24, 3 * LEAST)
        for side in (1, 0):
            n = int(rng.integers(2, 15))
            said.append(segment(np.concatenate([prompt, rng.integers(0, 24, n)]).astype(np.int32), n))
            sides.append(side)
    spoken = [s.spoken for s in said]
    streams = {SIDE: np.repeat(np.array(sides, np.int32), spoken), REFERENCE: np.full(sum(spoken), -3.0, np.float32)}
    pairs = Batch.of(said, unit_E=np.repeat(np.arange(3, dtype=np.int32), 2), streams=streams)
    pairs, _ = prepared(DPO, pairs)
    found = list[tuple[float, dict[str, torch.Tensor], int]]()
    for share in (True, False):
        model = policy(arch, share_prefixes=share)
        learner = HFLearner(replace(model, module=model.module.double()))
        scores = learner.forward(pairs)
        loss = PreferenceLoss(DPO).terms(pairs, scores).loss
        loss.backward()
        gradient = {n: p.grad.clone() for n, p in learner.parameters().items() if p.grad is not None}
        found.append((float(loss.detach()), gradient, len(pairs.ids_N) if scores.computed is None else scores.computed))
    (once, g1, computed), (twice, g2, all_of_them) = found
    assert computed <= all_of_them - 3 * 2 * LEAST and all_of_them == len(pairs.ids_N)
    assert once == pytest.approx(twice, rel=bound) and g1.keys() == g2.keys()
    apart = sum(float((g - g2[n]).square().sum()) for n, g in g1.items()) ** 0.5
    size = sum(float(g.square().sum()) for g in g2.values()) ** 0.5
    assert size > 0 and apart <= bound * size
