"""The head: gradients against finite differences and plain log-softmax, every transform, bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.sampling import Sampling
from posttrain.core.types import TruncationSets
from posttrain.engine.head import logit_transform, logprob
from posttrain.engine.head.kernel_table import TABLE
from posttrain.engine.head.logprob import candidates, energies, logprobs, most_probable, odds
from posttrain.system.errors import ConfigError, InvariantError
from tests.peak import peak_bytes

M, H, V = 7, 5, 11


@dataclass(frozen=True)
class Case:
    """One combination of what can shape the distribution."""

    name: str
    temperature: float = 1.0
    truncated: bool = False
    softcap: float | None = None
    scale: float = 1.0
    bias: bool = False

    def arguments(self) -> dict[str, Any]:
        sampling = Sampling(temperature=self.temperature, top_k=4 if self.truncated else 0)
        return {
            "sampling": sampling,
            "kept": kept_sets() if self.truncated else None,
            "softcap": self.softcap,
            "scale": self.scale,
        }


CASES = [
    Case("plain"),
    Case("temperature", temperature=0.7),
    Case("kept", truncated=True),
    Case("softcap", softcap=1.5),
    Case("scale", scale=0.25, bias=True),
    Case("everything", temperature=1.3, truncated=True, softcap=2.0, scale=1.7, bias=True),
]


def targets() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, V, M))


def kept_sets() -> TruncationSets:
    """Of 1 to 5 ids each, the token said among them."""
    rng = np.random.default_rng(2)
    return TruncationSets.of([np.union1d(rng.integers(0, V, rng.integers(0, 5)), [int(t)]) for t in targets()])


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(0)
    h, w, b = (
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((M, H), (V, H), (V,))
    )
    return h, w, b if bias else None


def plain(h: Tensor, w: Tensor, b: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """The same in five lines of autograd over all logits at once."""
    z = torch.nn.functional.linear(h, w, b) * case.scale
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    outside = torch.zeros(M, V, dtype=torch.bool)
    if case.truncated:
        outside = ~torch.stack(
            [torch.isin(torch.arange(V), torch.from_numpy(s.astype(np.int64))) for s in kept_sets().sets()]
        )
    logp = (z / case.temperature).masked_fill(outside, float("-inf")).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(outside, 0)).sum(-1)
    return logp.gather(1, targets()[:, None])[:, 0], entropy


@pytest.fixture(params=[4, 16384], ids=lambda n: f"blocks of {n}")
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most ids that are read at once. The vocabulary has 11: three blocks of 4, 4 and 3, or one."""
    monkeypatch.setattr(logprob, "CHUNK_IDS", request.param)
    return request.param


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_equals_plain_log_softmax_with_its_gradient(case: Case, chunk: int) -> None:
    ours, theirs = inputs(bias=case.bias), inputs(bias=case.bias)
    logp, entropy = logprobs(*ours, targets(), **case.arguments(), want_entropy=True, chunk=chunk)
    want_logp, want_entropy = plain(*theirs, case)
    assert entropy is not None
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    by = torch.randn(2, M, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (by[0] @ logp + by[1] @ entropy).backward()
    (by[0] @ want_logp + by[1] @ want_entropy).backward()
    for a, b in zip(ours, theirs, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradcheck(case: Case) -> None:
    h, w, b = inputs(bias=case.bias)

    def both(*x: Tensor) -> tuple[Tensor, ...]:
        logp, entropy = logprobs(
            x[0], x[1], x[2] if case.bias else None, targets(), **case.arguments(), want_entropy=True, chunk=3
        )
        assert entropy is not None
        return logp, entropy

    assert torch.autograd.gradcheck(both, (h, w, b) if b is not None else (h, w))


def test_log_prob_alone_has_the_same_gradient() -> None:
    one, two = inputs(), inputs()
    logprobs(*one, targets(), sampling=Sampling(), chunk=2)[0].sum().backward()
    logprobs(*two, targets(), sampling=Sampling(), chunk=2, want_entropy=True)[0].sum().backward()
    for a, b in zip(one, two, strict=True):
        assert a is not None and b is not None and torch.allclose(a.grad, b.grad, rtol=0, atol=1e-14)


def test_low_precision_weights_have_float32_logits() -> None:
    h, w, b = inputs(torch.bfloat16)
    assert b is not None
    logp, _ = logprobs(h, w, b, targets(), sampling=Sampling())
    exact = (
        torch.nn.functional.linear(h.double(), w.double(), b.double())
        .log_softmax(-1)
        .gather(1, targets()[:, None])[:, 0]
    )
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, rtol=0, atol=2e-6)
    logp.sum().backward()
    assert (
        h.grad is not None and h.grad.dtype == torch.bfloat16 and w.grad is not None and w.grad.dtype == torch.bfloat16
    )


def test_large_logits_stay_finite() -> None:
    h, w, b = inputs(torch.float32)
    logp, entropy = logprobs(h * 1e4, w, b, targets(), sampling=Sampling(), want_entropy=True)
    assert entropy is not None
    (logp.sum() + entropy.sum()).backward()
    assert (
        torch.isfinite(logp).all()
        and torch.isfinite(entropy).all()
        and h.grad is not None
        and torch.isfinite(h.grad).all()
    )


@pytest.mark.parametrize("kept", [False, True])
def test_never_more_than_a_chunk_of_logits(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest matrix made, in forward and backward, has at most `chunk` rows. Where all scores are kept, the
    backward makes none."""
    seen: list[int] = []
    whole = logit_transform.logits
    monkeypatch.setattr(logit_transform, "logits", lambda h, *rest: seen.append(h.shape[0]) or whole(h, *rest))
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", {"cpu": 4 * V})
    monkeypatch.setattr(logprob, "CHUNK_ROWS", 1)
    monkeypatch.setattr(logprob, "KEPT_ELEMENTS", {"cpu": 7 * V if kept else 7 * V - 1})
    h, w, b = inputs()
    logprobs(h, w, b, targets(), sampling=Sampling())[0].sum().backward()
    assert seen == [4, 3] * (1 if kept else 2)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("block", [None, 6])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kept_scores_change_no_bit(
    case: Case, block: int | None, kernels: KernelChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, entropies, and gradients, taken twice: the kept scores are not overwritten."""
    found = list[list[torch.Tensor]]()
    for most in (0, 7 * V):
        monkeypatch.setattr(logprob, "KEPT_ELEMENTS", {"cpu": most})
        ours = [x for x in inputs(torch.float32, case.bias) if x is not None]
        given = [*ours, *[None] * (3 - len(ours)), targets()]
        logp, entropy = logprobs(*given, **case.arguments(), want_entropy=True, chunk=4, block=block, kernels=kernels)
        assert entropy is not None
        total = logp.sum() + 0.3 * entropy.sum()
        twice = [torch.autograd.grad(total, ours, retain_graph=True) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
        found.append([logp, entropy, *twice[0]])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_never_more_than_a_block_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of logits has at most `block` columns, and each block of the weight is read once for all tokens."""
    seen: list[tuple[int, int]] = []
    whole = logit_transform.logits
    monkeypatch.setattr(logprob, "KEPT_ELEMENTS", {"cpu": 0})
    monkeypatch.setattr(
        logit_transform, "logits", lambda h, w, *rest: seen.append((h.shape[0], w.shape[0])) or whole(h, w, *rest)
    )
    h, w, b = inputs()
    logprobs(h, w, b, targets(), sampling=Sampling(), chunk=4, block=6)[0].sum().backward()
    assert seen == [(4, 6), (3, 6), (4, 5), (3, 5)] * 2


def test_one_block_has_the_bits_of_logsumexp() -> None:
    for vocabulary in (7, 300, 5000):
        g = torch.Generator().manual_seed(vocabulary)
        h, w = torch.randn(50, 16, generator=g), torch.randn(vocabulary, 16, generator=g)
        said = torch.randint(0, vocabulary, (50,), generator=g)
        logp, _ = logprobs(h, w, None, said, sampling=Sampling(), kernels="torch")
        z = logit_transform.logits(h, w, None)
        assert torch.equal(logp, z.gather(1, said[:, None])[:, 0] - z.logsumexp(1))


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_vocabulary_is_within_the_bound_of_its_definition(dtype: torch.dtype, truncated: bool) -> None:
    """Blocks of their usual size beside the plain definition in float64: values and gradients, relative to the
    largest number."""
    tokens, width, vocabulary = 48, 32, 2 * logprob.CHUNK_IDS + 5000
    g = torch.Generator().manual_seed(0)
    ours = [torch.randn(n, width, generator=g).to(dtype).requires_grad_() for n in (tokens, vocabulary)]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    said = torch.randint(0, vocabulary, (tokens,), generator=g)
    kept = TruncationSets.of([np.unique([int(t), 5, 20_000, vocabulary - 1]) for t in said]) if truncated else None
    how: dict[str, Any] = {"sampling": Sampling(temperature=0.8, top_k=4 if truncated else 0), "kept": kept}
    found = logprobs(*ours, None, said, softcap=20.0, want_entropy=True, **how)
    wanted = logprobs(*theirs, None, said, softcap=20.0, want_entropy=True, kernels="reference", **how)
    (found[0].sum() + 0.3 * found[1].sum()).backward()  # type: ignore[union-attr]
    (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()  # type: ignore[union-attr]
    (bound,) = (k.bounds[dtype] for k in TABLE["head"] if k.form == "torch")
    pairs = [*zip(found, wanted, strict=True), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for a, b in pairs:
        assert a is not None and b is not None
        assert float((a - b).detach().abs().max()) <= bound * max(1.0, float(b.detach().abs().max()))


def test_blocks_far_apart_in_size_lose_nothing() -> None:
    """Logits of a later block that are larger by thousands, and blocks that a kept set leaves empty, forward and
    backward, in float64."""
    logits = torch.tensor([[-9000.0, -9001.0, 3.0, 2.0, 9000.0, 8999.0]], dtype=torch.float64)
    for kept in (
        None,
        TruncationSets.of([np.array([4, 5])]),
        TruncationSets.of([np.array([2, 4])]),
        TruncationSets.of([np.array([0, 4])]),
    ):
        found = []
        for block in (1, 2, 6):
            w = logits.t().clone().requires_grad_()
            h = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
            how = {"sampling": Sampling(top_k=0 if kept is None else 2), "kept": kept}
            logp, entropy = logprobs(h, w, None, torch.tensor([4]), want_entropy=True, block=block, **how)
            assert entropy is not None
            (logp + 0.3 * entropy).sum().backward()
            found.append((logp.detach(), entropy.detach(), h.grad, w.grad))
        for one in found[:-1]:
            for x, y in zip(one, found[-1], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_odds_by_their_definition(case: Case) -> None:
    h, w, b = inputs(bias=case.bias)
    below, upto, ratio, apart = odds(h, w, b, targets(), (0.5, 1.25), **case.arguments())
    everything = torch.arange(V).expand(M, V)
    p = candidates(h, w, b, everything, **case.arguments()).detach().exp()
    for m, said in enumerate(targets().tolist()):
        assert abs(float(below[m]) - float(p[m, :said].sum())) < 1e-12
        assert abs(float(upto[m]) - float(p[m, : said + 1].sum())) < 1e-12
        for k, t in enumerate((0.5, 1.25)):
            q = p[m] ** (1 / t) / (p[m] ** (1 / t)).sum()
            assert abs(float(ratio[m, k]) - float((q[said] / p[m, said]).log())) < 1e-10
            assert abs(float(apart[m, k]) - 0.5 * float((q - p[m]).abs().sum())) < 1e-12


def head_peak(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32, entropy: bool = True
) -> int:
    """Bytes of a forward and a backward beyond the hidden states and the weight."""
    h, w = (
        torch.randn(tokens, width).to(dtype).requires_grad_(),
        torch.randn(vocabulary, width).to(dtype).requires_grad_(),
    )
    said = torch.randint(0, vocabulary, (tokens,))

    def work() -> None:
        logp, spread = logprobs(h, w, None, said, sampling=Sampling(), want_entropy=entropy)
        (logp.sum() + (0.0 if spread is None else 0.01 * spread.sum())).backward()

    return peak_bytes(work)


@pytest.mark.prove
@pytest.mark.prove
def test_memory_is_that_of_the_gradients_and_a_few_tiles() -> None:
    """At a vocabulary of 151,936 and 4,096 tokens: the gradients, six tiles of 4 MiB, and 1/8 of the plain way at most.
    The plain way holds logits, softmax and gradient, in float32."""
    tokens, width, vocabulary = 4096, 64, 151_936
    found = head_peak(tokens, width, vocabulary)
    gradients, tile = 4 * width * (vocabulary + tokens), 4 * math.prod(logprob.TILE["cpu"])
    assert found <= gradients + 6 * tile
    assert found <= 3 * 4 * tokens * vocabulary / 8


@pytest.mark.prove
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_the_gradient_is_independent_of_the_vocabulary(dtype: torch.dtype) -> None:
    """Twice the vocabulary costs its gradient, in the dtype of the weight, and nothing else."""
    width, small = 256, 2 * logprob.CHUNK_IDS
    one, two = (head_peak(256, width, n * small, dtype) for n in (1, 2))
    assert abs(two - one - small * width * dtype.itemsize) <= 1 << 16


def test_memory_between_forward_and_backward_is_not_that_of_the_logits() -> None:
    tokens, width, vocabulary = 2000, 8, 5000
    h, w = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        logp, _ = logprobs(h, w, None, torch.zeros(tokens, dtype=torch.long), sampling=Sampling(), want_entropy=True)
    assert sum(kept) < tokens * vocabulary / 100
    logp.sum().backward()


def test_the_same_bits_twice() -> None:
    runs = []
    for _ in range(2):
        h, w, b = inputs(torch.float32)
        logprobs(h, w, b, targets(), sampling=Sampling(), chunk=2)[0].sum().backward()
        assert w.grad is not None
        runs.append(w.grad)
    assert torch.equal(*runs)


def test_no_tokens() -> None:
    h, w, b = inputs()
    logp, entropy = logprobs(h[:0], w, b, targets()[:0], sampling=Sampling(), want_entropy=True)
    assert logp.shape == (0,) and entropy is not None and entropy.shape == (0,)
    best = most_probable(h[:0], w, b, 3, sampling=Sampling(stop_ids=()))
    assert best.values.shape == best.indices.shape == (0, 3) and best.indices.dtype == torch.long


def test_refuses_what_has_no_distribution() -> None:
    h, w, b = inputs()
    with pytest.raises(ConfigError, match="greedy=false"):
        logprobs(h, w, b, targets(), sampling=Sampling(greedy=True))
    with pytest.raises(InvariantError, match="kept sets"):
        logprobs(h, w, b, targets(), sampling=Sampling(top_p=0.9))
    with pytest.raises(InvariantError, match="kept sets"):
        logprobs(h, w, b, targets(), sampling=Sampling(), kept=kept_sets())
    with pytest.raises(InvariantError, match="hidden states"):
        logprobs(h[1:], w, b, targets(), sampling=Sampling())
    wrong = TruncationSets.of([np.array([(int(t) + 1) % V]) for t in targets()])
    with pytest.raises(InvariantError, match="not in its own kept set"):
        logprobs(h, w, b, targets(), sampling=Sampling(top_k=1), kept=wrong)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_candidates_are_the_said_token_and_its_rivals(case: Case) -> None:
    """Log-probs of named tokens, with the gradients of plain log-softmax, equal `logprobs` where the token was said."""
    h, w, b = inputs(bias=case.bias)
    said = targets()
    rivals = torch.stack([said, (said + 3) % V, (said + 5) % V], 1)
    how = case.arguments()
    got = candidates(h, w, b, rivals, **how)
    own, _ = logprobs(h, w, b, said, **how)
    assert torch.allclose(got[:, 0], own, atol=1e-12)
    z = logit_transform.logits(h, w, b, case.scale, case.softcap) / case.temperature
    if how["kept"] is not None:
        outside = torch.ones_like(z, dtype=torch.bool)
        for row, ids in enumerate(how["kept"].sets()):
            outside[row, torch.from_numpy(ids.astype(np.int64))] = False
        z = z.masked_fill(outside, float("-inf"))
    plain = torch.log_softmax(z, 1).gather(1, rivals)
    inside = plain > -1e30
    assert torch.allclose(got[inside], plain[inside], atol=1e-12) and bool((got[~inside] < -1e30).all())
    weight = torch.where(inside, torch.linspace(0.5, 1.5, 3, dtype=torch.float64), 0.0)
    leaves = [x for x in (h, w, b) if x is not None]
    found = torch.autograd.grad((weight * got.clamp_min(-50)).sum(), leaves)
    wanted = torch.autograd.grad((weight * plain.clamp_min(-50)).sum(), leaves)
    assert all(torch.allclose(x, y, atol=1e-10) for x, y in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("k", [1, 4, 0])
def test_most_probable_tokens_come_first(k: int) -> None:
    """The k largest log-probs of every position in descending order; 0 takes the vocabulary, which sums to 1."""
    h, w, b = inputs()
    found = most_probable(h, w, b, k, sampling=Sampling(temperature=0.7))
    plain = torch.log_softmax(logit_transform.logits(h, w, b) / 0.7, 1).detach()
    assert found.values.shape == (M, k or V)
    assert torch.allclose(found.values, plain.sort(1, descending=True).values[:, : k or V], atol=1e-12)
    assert torch.allclose(found.values, plain.gather(1, found.indices), atol=1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_energy_is_the_squared_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """|d log p_t / dz|^2 by autograd, z being what the softmax is taken of; 1 - 2 p + sum p^2; chunk by chunk."""
    monkeypatch.setattr(logprob, "_tile_rows", lambda weight: 3)
    h, w, b = inputs(bias=case.bias)
    how = case.arguments()
    z = (logit_transform.logits(h, w, b, case.scale, case.softcap) / case.temperature).detach()
    if how["kept"] is not None:
        for row, ids in enumerate(how["kept"].sets()):
            z[row, [v for v in range(V) if v not in ids]] = float("-inf")
    z.requires_grad_()
    p = torch.softmax(z, 1)
    said = p.gather(1, targets()[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(said.log().sum(), z)
    found = energies(h, w, b, targets(), **how)
    assert torch.allclose(found, gradient.nan_to_num().square().sum(1), atol=1e-12)
    assert (
        torch.allclose(found, 1 - 2 * said + p.square().sum(1), atol=1e-12)
        and float(found.min()) >= 0
        and float(found.max()) < 2
    )
    assert torch.allclose(energies(h, w, b, None, **how), p.square().sum(1), atol=1e-14), "without targets |p|^2"
