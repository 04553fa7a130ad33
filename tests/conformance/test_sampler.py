"""What a sampler draws is what it says it draws: chi-square of 50,000 draws against its own stored log-probs.

Every engine's sampling function belongs here. Each contract's test must pass on the function and fail on the same
draws with 2 % of the mass moved, so that a pass means something. Probabilities are few and large for power: moving
0.02 of mass between outcomes of about 0.3 shifts chi-square by about 50,000 * 2 * 0.02**2 / 0.3 = 133.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from posttrain.core import seeds
from posttrain.core.errors import EngineError
from posttrain.core.sampling import Sampling
from posttrain.engine.embedded.sampler import Contracts, draw, kept_mask, lowest_argmax, pick

DRAWS = 50_000
LOGITS = torch.log(torch.tensor([0.32, 0.05, 0.28, 0.21, 0.10, 0.04]))
CONTRACTS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.7),
    "hot": Sampling(temperature=1.5),
    "top_k": Sampling(top_k=3),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.3),
    "all": Sampling(temperature=1.2, top_k=5, top_p=0.9, min_p=0.2),
    "greedy": Sampling(greedy=True),
}


def draws(s: Sampling, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    uniform = seeds.uniforms(seeds.key(seed, "chi-square", repr(s)), DRAWS)
    out = draw(LOGITS.repeat(DRAWS, 1), Contracts.of([s] * DRAWS), uniform)
    return out.ids, out.logp, out.kept


def p_value(ids: np.ndarray, probability: np.ndarray) -> float:
    """Of the counts of `ids` under `probability` [V]; 0 where something impossible was drawn."""
    counts = np.bincount(ids, minlength=len(probability))
    inside = probability > 0
    if counts[~inside].any():
        return 0.0
    if inside.sum() == 1:
        return 1.0
    expected = probability[inside] / probability.sum() * len(ids)
    return float(stats.chisquare(counts[inside], expected).pvalue)


def tilted(ids: np.ndarray) -> np.ndarray:
    """The same draws with 2 % of all mass moved from the most said outcome to another one."""
    first = np.bincount(ids, minlength=6).argmax()
    other = 3 if first != 3 else 2
    moved = ids.copy()
    moved[np.flatnonzero(ids == first)[: DRAWS // 50]] = other
    return moved


@pytest.mark.parametrize("name", CONTRACTS)
def test_draws_follow_their_stored_log_probs(name: str) -> None:
    s = CONTRACTS[name]
    ids, logp, kept = draws(s)
    probability = np.zeros(6)
    probability[ids] = np.exp(logp.astype(np.float64))
    assert abs(probability.sum() - 1) < 1e-6
    assert p_value(ids, probability) > 1e-4
    assert p_value(tilted(ids), probability) < 1e-4
    assert len(kept) == (DRAWS if s.truncated else 0)
    if s.truncated:
        assert {tuple(k.tolist()) for k in kept} == {tuple(np.flatnonzero(probability).tolist())}


def test_the_distribution_is_the_contract() -> None:
    """Worked by hand: temperature, top-k, top-p, min-p, each on what the previous left."""
    base = LOGITS.exp().double().numpy()
    for name, ids in {"top_k": [0, 2, 3], "top_p": [0, 2, 3], "min_p": [0, 2, 3, 4], "greedy": [0]}.items():
        said, logp, _ = draws(CONTRACTS[name])
        assert np.unique(said).tolist() == ids
        expected = base[ids] / base[ids].sum()
        got = np.array([np.exp(logp[said == i][0]) for i in ids])
        assert np.allclose(got, expected, atol=1e-6)
    hot = base ** (1 / 1.2)
    hot[5] = 0
    hot /= hot.sum()
    kept = [0, 1, 2, 3, 4] if hot[[0, 2, 3, 4]].sum() < 0.9 else [0, 2, 3, 4]
    kept = [i for i in kept if hot[i] >= 0.2 * hot.max()]
    assert np.unique(draws(CONTRACTS["all"])[0]).tolist() == kept


def test_rows_with_contracts_of_their_own_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(64, 30)).astype(np.float32))
    mixed = [list(CONTRACTS.values())[i % 8] for i in range(64)]
    uniform = rng.random(64)
    together = draw(logits.clone(), Contracts.of(mixed), uniform)
    of_row = dict(zip(together.truncated_rows.tolist(), together.kept, strict=True))
    for i, s in enumerate(mixed):
        alone = draw(logits[i : i + 1].clone(), Contracts.of([s]), uniform[i : i + 1])
        assert alone.ids[0] == together.ids[i]
        assert alone.logp[0] == together.logp[i]
        assert (i in of_row) == s.truncated
        if s.truncated:
            assert alone.ids[0] in of_row[i]
            assert np.array_equal(alone.kept[0], of_row[i])


def test_ties_go_to_the_lower_id() -> None:
    z = torch.tensor([[0.0, 1, 1, 1, 0]])
    assert lowest_argmax(z).tolist() == [1]
    assert kept_mask(z, Contracts.of([Sampling(top_k=2)]))[0].tolist() == [False, True, True, False, False]
    assert kept_mask(z, Contracts.of([Sampling(top_k=4)]))[0].tolist() == [True, True, True, True, False]
    even = torch.zeros(1, 4)
    assert kept_mask(even, Contracts.of([Sampling(top_p=0.5)]))[0].tolist() == [True, True, False, False]
    assert kept_mask(even, Contracts.of([Sampling(min_p=0.9)]))[0].all()


def test_a_large_vocabulary_keeps_what_a_full_sort_keeps() -> None:
    """Candidates are looked at first; flat rows and ties at their border fall back to the whole row."""
    rng = np.random.default_rng(0)
    size = 9000
    z = torch.from_numpy(rng.normal(size=(6, size)).astype(np.float32))
    z[0] *= 8
    z[1] = 0
    z[2] = torch.where(torch.arange(size) % 3 == 0, 1.0, 0.0)
    contracts = Contracts.of(
        [
            Sampling(top_p=0.9),
            Sampling(top_k=50),
            Sampling(top_k=2000, top_p=0.99),
            Sampling(min_p=0.01),
            Sampling(top_k=20),
            Sampling(top_p=0.3),
        ]
    )
    got = kept_mask(z, contracts)
    for i in range(6):
        order = np.lexsort((np.arange(size), -z[i].double().numpy()))
        p = np.exp(z[i].double().numpy())[order]
        k = int(contracts.top_k[i]) or size
        p[k:] = 0
        p /= p.sum()
        keep = (np.arange(size) < k) & (np.cumsum(p) - p < contracts.top_p[i]) & (p >= contracts.min_p[i] * p[0])
        assert abs(len(order[keep]) - int(got[i].sum())) <= 1
        assert np.array_equal(np.sort(order[keep])[:20], np.flatnonzero(got[i].numpy())[:20])


def test_extreme_uniforms_pick_possible_tokens() -> None:
    logp = torch.log(torch.tensor([[0.0, 0.3, 0.7, 0.0]] * 3))
    assert pick(logp, np.array([0.0, np.nextafter(1, 0), 0.3000001])).tolist() == [1, 2, 2]
    with pytest.raises(EngineError, match="not finite"):
        pick(torch.tensor([[float("nan"), 0.0]]), np.array([0.5]))
    flat = torch.full((1, 50_000), -np.log(50_000), dtype=torch.float32)
    assert pick(flat, np.array([np.nextafter(1, 0)])).tolist() == [49_999]
