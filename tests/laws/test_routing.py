"""Routing replay: the learner's experts are those of the sampler, the weights of the experts are the learner's own, and
the gradient is that of a mixture written down plainly with its choices fixed."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from law_mixtures import ARCHS, in_float64, plain_norms
from law_mixtures import mixture as policy
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from posttrain.algorithm.loss.load_balance_loss import GAUGE, BalancedLoss, balance_weights, to_balance
from posttrain.algorithm.loss.losses import Likelihood
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.expert_choices import UNKNOWN, check_routed, known_rows
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, MU, WEIGHT
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, SampledTurn, Segment, Stop, Task
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.speculation import Lookup
from posttrain.engine.layers.expert_routing import routers_of, weights_of, why_not
from posttrain.engine.learner.frozen_reference import freeze
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.learner.learner_routers import refuse_replay
from posttrain.engine.model.policy_model import Policy
from posttrain.record.step_format import Recorded, from_columns, to_columns
from posttrain.system.errors import ConfigError, InvariantError
from tests import families

SAMPLING = Sampling(max_tokens=12, stop_ids=())
SPREAD = 3e-6
"""Relative differences of scores that rounding decides now and then."""


def undecided(made: Policy) -> Policy:
    """The same with routers that score three experts each alike but for rounding, and choose two."""
    with torch.no_grad():
        for name, p in made.module.named_parameters():
            if name.endswith("mlp.gate.weight"):
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
                p.copy_(4 * p[[0, 0, 0, 1, 1, 1]] * (1 + SPREAD * noise))
    return made


def said(engine: EmbeddedEngine, prompts: Sequence[np.ndarray], sampling: Sampling = SAMPLING) -> list[SampledTurn]:
    async def ask() -> list[SampledTurn]:
        return await asyncio.gather(*(engine.generate(p, sampling, i) for i, p in enumerate(prompts)))

    return asyncio.run(ask())


def prompts(count: int, seed: int = 0, alike: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    one = rng.integers(0, 20, 24)
    return [(one if alike else rng.integers(0, 20, rng.integers(3, 30))).astype(np.int32) for _ in range(count)]


def segments(engine: EmbeddedEngine, asked: Sequence[np.ndarray], sampling: Sampling = SAMPLING) -> list[Segment]:
    out = list[Segment]()
    for ids, turn in zip(asked, said(engine, asked, sampling), strict=True):
        transcript = Transcript(sampling)
        transcript.see(ids)
        transcript.say(turn)
        out.append(transcript.segment())
    return out


def engine_of(made: Policy, **changes: Any) -> EmbeddedEngine:
    return EmbeddedEngine(made.twin().module, slots=8, context=made.context, **changes)


def chosen_anew(made: Policy, ids: np.ndarray) -> np.ndarray:
    """[T, R, K] of one plain pass of the whole sequence."""
    learner = HFLearner(made)
    mask = np.arange(len(ids)) > 0
    blank = np.where(mask, -1.0, np.nan).astype(np.float32)
    one = Segment(ids.astype(np.int32), mask, blank, np.where(mask, 0, -1).astype(np.int32), Sampling())
    routers = learner.routers()
    assert routers is not None
    return routers.read(Packed.of([one]), replay=False).own


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_the_weights_of_given_experts() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.5, 0.0]], dtype=torch.float64)
    given = weights_of(scores, torch.tensor([[0, 2]]), True, torch.float64)
    own = weights_of(scores, torch.tensor([[0, 1]]), True, torch.float64)
    assert np.allclose(given, [[0.817574, 0.182426]], atol=1e-6)
    assert np.allclose(own, [[0.731059, 0.268941]], atol=1e-6)


class PlainMixture(nn.Module):
    """A layer's experts, all computed for all tokens, weighed by a gate whose experts are fixed: D01's formula."""

    def __init__(self, block: Any, mask_NE: Tensor) -> None:
        super().__init__()
        self.gate, self.experts, self.mask_NE = block.gate, block.experts, mask_NE

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden[0]
        scores = x @ self.gate.weight.T
        grown = self.mask_NE * torch.exp(scores)
        gates = grown / grown.sum(1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(gates.shape[1]):
            gate, up = (x @ self.experts.gate_up_proj[e].T).chunk(2, 1)
            out = out + gates[:, e : e + 1] * ((torch.nn.functional.silu(gate) * up) @ self.experts.down_proj[e].T)
        return out[None]


def any_choices(packed: Packed, routers: int, experts: int, active: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:active] for _ in range(len(packed.ids_N) * routers)]
    return np.array(rows, np.int16).reshape(len(packed.ids_N), routers, active)


def tokens(lengths: Sequence[int], seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    out = list[Segment]()
    for n in lengths:
        mask = np.arange(n) >= n // 3 + 1
        blank = np.where(mask, -1.0, np.nan).astype(np.float32)
        version = np.where(mask, 0, -1).astype(np.int32)
        out.append(Segment(rng.integers(0, 20, n).astype(np.int32), mask, blank, version, Sampling()))
    return Packed.of(out)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", ARCHS)
def test_the_gradient_with_given_choices_is_that_of_a_plain_mixture(arch: str, seed: int) -> None:
    """Float64: log-probs and every gradient, of experts and routers too, whatever the choices are."""
    made = in_float64(policy(arch, seed))
    packed = tokens((17, 9, 23), seed)
    given = any_choices(packed, 3, 6, 2, seed)
    learner = HFLearner(made, replays=True)
    other = copy.deepcopy(made.module)
    plain_norms(other)
    logp = learner.forward(replace(packed, routed_N=given)).logp
    by = torch.from_numpy(np.random.default_rng(seed).normal(size=packed.spoken))
    (logp * by).sum().backward()
    for r, layer in enumerate(other.model.layers):
        fixed = torch.from_numpy(given[:, r].astype(int))
        mask_NE = torch.zeros(len(given), 6, dtype=torch.float64).scatter_(1, fixed, 1)
        layer.mlp = PlainMixture(layer.mlp, mask_NE)
    theirs = HFLearner(replace(made, module=other)).forward(packed).logp
    (theirs * by).sum().backward()
    assert logp.dtype == torch.float64
    assert float((logp - theirs).detach().abs().max()) <= 1e-12
    wanted = {id(p): n for n, p in other.named_parameters()}
    ours, names = dict(made.module.named_parameters()), {n.replace(".mlp.", ".mlp.") for n in wanted.values()}
    assert names == set(ours)
    for name, p in other.named_parameters():
        assert p.grad is not None and ours[name].grad is not None, name
        apart = float((ours[name].grad - p.grad).abs().max())
        assert apart <= 1e-12 * max(1.0, float(p.grad.abs().max())), (name, apart)
    assert all(float(p.grad.abs().max()) > 0 for n, p in ours.items() if n.endswith("gate.weight"))


def test_without_normalised_weights_given_choices_have_the_model_s_own_weights() -> None:
    made = policy()
    for part in made.module.modules():
        if type(part).__name__ == "Qwen3MoeTopKRouter":
            part.norm_topk_prob = False  # type: ignore[assignment]
    found = routers_of(made.module)
    assert found is not None and not found.normalised
    packed = tokens((12, 20))
    plain, replays = HFLearner(made), HFLearner(made, replays=True)
    routers = plain.routers()
    assert routers is not None
    own = routers.read(packed, replay=False)
    assert np.allclose(replays.score(replace(packed, routed_N=own.own)), own.logp, atol=1e-6)


# --- the sampler's choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_a_turn_brings_the_experts_of_every_token_that_was_computed(arch: str) -> None:
    made = policy(arch)
    found = segments(engine_of(made), prompts(6))
    for s in found:
        assert s.routed is not None and s.routed.shape == (len(s.ids), 3, 2) and s.routed.dtype == np.int16
        assert np.array_equal(known_rows(s.routed), np.arange(len(s.ids)) < len(s.ids) - 1)
        fresh = chosen_anew(made, s.ids)
        assert np.array_equal(np.sort(s.routed[:-1], 2), np.sort(fresh[:-1], 2))


@pytest.mark.parametrize("how", ["siblings", "lookup", "few blocks", "small budget", "turns"])
def test_choices_are_those_of_a_plain_pass_however_they_were_computed(how: str) -> None:
    made = policy(seed=3)
    options: dict[str, Any] = {
        "lookup": {"speculate": Lookup(3)},
        "few blocks": {"cache_bytes": 16 * 3 * 2 * 16 * 4 * 14},
        "small budget": {"budget": 8},
    }.get(how, {})
    engine = engine_of(made, **options)
    asked = prompts(8, alike=how == "siblings")
    found = segments(engine, asked, replace(SAMPLING, max_tokens=30))
    if how == "turns":
        again = [np.append(s.ids, [1, 2, 3]).astype(np.int32) for s in found]
        later = said(engine, again)
        found = list[Segment]()
        for ids, turn in zip(again, later, strict=True):
            t = Transcript(SAMPLING)
            t.see(ids)
            t.say(turn)
            found.append(t.segment())
    if how == "few blocks":
        assert engine.gauges()["engine/preempted"].sum > 0
    for s in found:
        assert s.routed is not None
        assert np.array_equal(np.sort(s.routed[:-1], 2), np.sort(chosen_anew(made, s.ids)[:-1], 2))


def test_an_earlier_turn_keeps_its_own_choices() -> None:
    t = Transcript(Sampling(stop_ids=()))
    first, second = np.full((3, 1, 1), 4, np.int16), np.full((6, 1, 1), 5, np.int16)
    t.see([1, 2])
    t.say(SampledTurn(np.int32([3, 4]), np.float32([-1, -1]), np.int32([0, 0]), Stop.LENGTH, routed=first))
    t.see([5])
    t.say(SampledTurn(np.int32([6, 7]), np.float32([-1, -1]), np.int32([1, 1]), Stop.LENGTH, routed=second))
    routed = t.segment().routed
    assert routed is not None and routed[:, 0, 0].tolist() == [4, 4, 4, 5, 5, 5, UNKNOWN]


def test_a_turn_that_is_refused_leaves_no_token() -> None:
    t = Transcript(Sampling(stop_ids=(), top=2))
    t.see([1, 2])
    with pytest.raises(InvariantError, match="sampling.top=2"):
        t.say(SampledTurn(np.int32([3]), np.float32([-1]), np.int32([0]), Stop.LENGTH))
    assert t.ids.tolist() == [1, 2]


def test_choices_of_other_tokens_than_were_computed_are_refused() -> None:
    t = Transcript(Sampling(stop_ids=()))
    t.see([1, 2])
    with pytest.raises(InvariantError, match="computed 3 tokens"):
        t.say(
            SampledTurn(
                np.int32([3, 4]),
                np.float32([-1, -1]),
                np.int32([0, 0]),
                Stop.LENGTH,
                routed=np.zeros((4, 1, 1), np.int16),
            )
        )
    with pytest.raises(InvariantError, match="int16"):
        check_routed(np.zeros((2, 1, 1), np.int64), 2, "here")
    with pytest.raises(InvariantError, match="all of its routers"):
        check_routed(np.array([[[0], [UNKNOWN]]], np.int16), 1, "here")


# --- with equal weights the learner is the sampler --------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_with_replay_learner_and_sampler_agree_where_routers_are_undecided(arch: str, share: bool) -> None:
    """Rounding decides the choice of these routers. Replay makes the learner the sampler again; alone it is another
    model."""
    made = replace(undecided(policy(arch)), share_prefixes=share)
    found = segments(engine_of(made), prompts(4) + prompts(4, 1, alike=True))
    packed = Packed.of(found)
    mu = np.concatenate([s.logp[s.mask] for s in found])
    alone, replayed = HFLearner(made).score(packed), HFLearner(made, replays=True).score(packed)
    assert np.abs(replayed - mu).max() <= 1e-5
    assert np.abs(alone - mu).max() >= 1e-2
    exact = HFLearner(made, replays=True).exact(packed)
    assert exact is not None and np.abs(exact - mu).max() <= 1e-5


def test_siblings_that_were_given_other_experts_for_their_prompt_are_not_shared() -> None:
    made = policy(seed=1)
    found = segments(engine_of(made), prompts(4, alike=True))
    packed = Packed.of(found)
    assert packed.routed_N is not None
    learner = HFLearner(made, replays=True)
    learner.score(packed)
    shared = learner._reader.computed
    assert shared < len(packed.ids_N)
    other = packed.routed_N.copy()
    other[2] = (other[2] + 1) % 6  # one token of the first sibling's prompt
    moved = replace(packed, routed_N=other)
    alone = np.concatenate([learner.score(moved.select([i])) for i in range(4)])
    before = learner._reader.computed
    assert np.abs(learner.score(moved) - alone).max() <= 1e-5
    assert learner._reader.computed - before == len(packed.ids_N)
    assert np.abs(learner.score(packed) - alone).max() > 1e-4


def test_the_reference_chooses_by_itself() -> None:
    made = policy()
    learner = HFLearner(made, replays=True)
    packed = tokens((14, 20))
    given = replace(packed, routed_N=any_choices(packed, 3, 6, 2, 0))
    assert np.array_equal(freeze(learner).score(given), freeze(learner).score(packed))
    assert np.abs(learner.score(given) - learner.score(packed)).max() > 1e-3


@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_that_are_computed_again_follow_the_same_choices(how: Any) -> None:
    packed = tokens((14, 20))
    given = replace(packed, routed_N=any_choices(packed, 3, 6, 2, 0))
    grads = list[list[Tensor]]()
    for kind in ("none", how):
        learner = HFLearner(policy(), replays=True, gradient_checkpointing=kind)
        learner.train_mode(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learner.forward(given).logp.sum().backward()
        grads.append([p.grad for p in learner.parameters().values() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in zip(*grads, strict=True))


def test_parts_of_a_batch_keep_their_choices() -> None:
    made = policy(seed=2)
    packed = Packed.of(segments(engine_of(made), prompts(6)))
    learner = HFLearner(made, replays=True)
    whole = learner.score(packed)
    assert packed.routed_N is not None
    for e in range(6):
        one = packed.select([e])
        assert one.routed_N is not None
        assert np.abs(learner.score(one) - whole[packed.segment_M == e]).max() <= 1e-5


def test_the_record_keeps_choices() -> None:
    found = [
        *segments(engine_of(policy()), prompts(3)),
        segments(engine_of(policy(experts_per_token=3)), prompts(1))[0],
    ]
    bare = [replace(s, routed=None) for s in found]
    of = lambda s: Recorded(Episode(Task("t", "p"), 0, 0, (s,), Stop.LENGTH, ()))  # noqa: E731
    mixed = [bare[0], found[0], found[3], bare[1], found[2]]
    for wanted, back in zip(mixed, from_columns(to_columns([of(s) for s in mixed])), strict=True):
        (got,) = back.episode.segments
        assert (got.routed is None) == (wanted.routed is None)
        assert wanted.routed is None or np.array_equal(got.routed, wanted.routed)
    assert "routed" not in to_columns([of(s) for s in bare])


# --- load-balance loss ------------------------------------------------------------------------------------------------


def batch_of(packed: Packed) -> Batch:
    n = packed.spoken
    rng = np.random.default_rng(0)
    streams = {WEIGHT: np.full(n, 1.0 / n), ADVANTAGE: rng.normal(size=n), MU: np.full(n, -1, np.float32)}
    fields = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
    return Batch(**fields, streams=streams)


def plain_balance(module: Any, packed: Packed, experts: int, active: int) -> Tensor:
    """transformers' own loss over the routers' logits of every segment alone, without its last token."""
    learner = HFLearner(replace(policy(), module=module, share_prefixes=False, kernels="reference"))
    kept = [list[Tensor]() for _ in module.model.layers]
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, a, out, k=k: k.append(out[0][:-1]))
        for layer, k in zip(module.model.layers, kept, strict=True)
    ]
    for s in range(len(packed.lengths_S)):
        learner.forward(packed.select([s]))
    for hook in hooks:
        hook.remove()
    found = load_balancing_loss_func(tuple(torch.cat(k) for k in kept), experts, active)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_the_load_balance_loss_is_that_of_transformers_however_the_batch_is_cut(arch: str) -> None:
    """Value and gradients; transformers counts and sums in float32, so its own rounding is the bound there. Among
    themselves the cuts agree to 1e-12."""
    made = in_float64(policy(arch))
    packed = tokens((17, 9, 23, 30))
    routers = HFLearner(made).routers()
    assert routers is not None
    own = routers.read(packed, replay=False).own.copy()
    own[np.cumsum(packed.lengths_S) - 1] = UNKNOWN
    batch = to_balance(batch_of(replace(packed, routed_N=own)), 6)
    theirs = plain_balance(made.module, packed, 6, 2)
    theirs.backward()
    wanted = {n: p.grad.clone() for n, p in made.module.named_parameters() if p.grad is not None}
    found = list[dict[str, Tensor]]()
    for cut in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 2], [1, 3]]):
        made.module.zero_grad(set_to_none=True)
        learner, total = HFLearner(made, replays=True), 0.0
        for part in cut:
            value = learner.forward(batch.select(part)).balance
            value.backward()
            total += float(value.detach())
        assert abs(total - float(theirs.detach())) <= 1e-6 * float(theirs.detach())
        found.append({n: p.grad.clone() for n, p in made.module.named_parameters() if p.grad is not None})
    for grads in found:
        assert set(grads) >= set(wanted)
        for n, g in wanted.items():
            assert float((grads[n] - g).abs().max()) <= 1e-5 * max(float(g.abs().max()), 1e-3), n
            assert float((grads[n] - found[0][n]).abs().max()) <= 1e-12, n


def test_an_even_load_has_the_least_loss() -> None:
    even = np.array([[[0, 1]], [[2, 3]]], np.int16)
    weights = balance_weights(even, 4)
    assert float(weights.sum() * 2 * 0.25) == 2.0  # experts of a token, with probabilities of 1/4
    uneven = balance_weights(np.array([[[0, 1]], [[0, 1]]], np.int16), 4)
    assert float((uneven * [0.5, 0.5, 0, 0]).sum() * 2) == 4.0


def test_shared_beginnings_count_as_often_as_they_stand_in_the_batch() -> None:
    made = policy(seed=4)
    packed = Packed.of(segments(engine_of(made), prompts(5, alike=True)))
    batch = to_balance(batch_of(packed), 6)
    found = list[float]()
    for share in (True, False):
        learner = HFLearner(replace(made, share_prefixes=share), replays=True)
        found.append(float(learner.forward(batch).balance.detach()))
        assert (learner._reader.computed < len(packed.ids_N)) == share
    assert abs(found[0] - found[1]) <= 1e-5 * found[1]


def test_the_loss_with_it_is_the_loss_and_its_weight_times_it() -> None:
    made = policy(seed=4)
    packed = Packed.of(segments(engine_of(made), prompts(5)))
    batch, learner = to_balance(batch_of(packed), 6), HFLearner(made, replays=True)
    scores = learner.forward(batch)
    inner = Likelihood()
    both = BalancedLoss(inner, 0.5)
    assert float(both.terms(batch, scores).loss.detach()) == pytest.approx(
        float((inner.terms(batch, scores).loss + 0.5 * scores.balance).detach()), rel=1e-6
    )
    assert both.gauges(batch, [both.terms(batch, scores)])[GAUGE].mean == pytest.approx(float(scores.balance.detach()))
    with pytest.raises(InvariantError, match="none is known"):
        to_balance(replace(batch, routed_N=None), 6)


# --- which models -----------------------------------------------------------------------------------------------------

UNDERSTOOD = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "flex_olmo", "mellum")


@pytest.mark.parametrize("family", UNDERSTOOD)
def test_routers_of_other_families_are_understood(family: str) -> None:
    built = families.build(families.config(family))
    found = routers_of(built)
    assert found is not None and len(found.names) >= 1 and all(found.stacked)
    assert [getattr(m, "posttrain_router", None) for m in built.modules()].count(None) == len(
        list(built.modules())
    ) - len(found.names)


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe", "gpt2"])
def test_other_routers_are_refused_by_name(family: str) -> None:
    built = families.build(families.config(family))
    assert routers_of(built) is None
    with pytest.raises(ConfigError, match=r"model.router_replay: \w+.*router_replay=none"):
        refuse_replay(built)


def test_a_router_without_weights_is_named() -> None:
    """Pain 16: a conversion lost the router's weights, and nothing said so."""
    made = policy()
    with torch.no_grad():
        made.module.model.layers[1].mlp.gate.weight.zero_()
    assert "model.layers.1.mlp.gate are 0" in why_not(made.module)
