"""What a sampler draws is what it says it draws: chi-square of 50,000 draws against its own stored log-probs.

Every engine's sampling function belongs here. Each contract's test must pass on the function and fail on the same
draws with 2 % of the mass moved, so that a pass means something. Probabilities are few and large for power: moving
0.02 of mass between outcomes of about 0.3 shifts chi-square by about 50,000 * 2 * 0.02**2 / 0.3 = 133.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.engine.embedded.schedule.slot_rules import NothingLeft
from posttrain.engine.embedded.token_sampler import Contracts, draw, kept_mask, lowest_argmax, pick
from posttrain.system.errors import EngineError

DRAWS = 50_000
LOGITS = torch.log(torch.tensor([0.32, 0.05, 0.28, 0.21, 0.10, 0.04])) + 1.8
"""Of both signs, because a repetition penalty treats them differently."""
PROMPT, SAID = np.int32([0, 4, 0]), np.int32([5, 2])
"""What came before a draw: the prompt, and two tokens of the turn."""
CONTRACTS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.7),
    "hot": Sampling(temperature=1.5),
    "top_k": Sampling(top_k=3),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.3),
    "all": Sampling(temperature=1.2, top_k=5, top_p=0.9, min_p=0.2),
    "greedy": Sampling(greedy=True),
    "penalty": Sampling(repetition_penalty=1.8),
    "reward": Sampling(repetition_penalty=0.6),
    "bias": Sampling(logit_bias=((3, 1.0), (0, -0.5))),
    "allowed": Sampling(allowed_ids=(0, 3, 4)),
    "bad_token": Sampling(bad_ids=((0,), (1,))),
    "bad_sequence": Sampling(bad_ids=((2, 3), (5, 2, 4), (0, 5, 2, 1), (4, 0))),
    "min_tokens": Sampling(min_tokens=3, stop_ids=(0, 5)),
    "min_tokens_over": Sampling(min_tokens=2, stop_ids=(0, 5)),
    "bans": Sampling(allowed_ids=(0, 2, 3, 4), bad_ids=((2, 3), (1,)), min_tokens=5, stop_ids=(4,)),
    "everything": Sampling(
        temperature=1.3,
        repetition_penalty=1.4,
        logit_bias=((1, 2.0), (2, 0.3)),
        allowed_ids=(0, 1, 2, 3, 5),
        bad_ids=((5, 2, 3),),
        min_tokens=3,
        stop_ids=(5,),
        top_k=4,
        top_p=0.98,
        min_p=0.05,
    ),
    "greedy_ruled": Sampling(greedy=True, bad_ids=((0,),), repetition_penalty=1.8, logit_bias=((3, 0.1),)),
}


PLAIN = {
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "allowed_ids": None,
    "bad_ids": (),
    "min_tokens": 0,
}


def draws(s: Sampling, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Many draws at one place, after PROMPT and SAID: (ids, log-probs, kept sets)."""
    uniform = seeds.uniforms(seeds.key(seed, "chi-square", repr(s)), DRAWS)
    out = draw(LOGITS.repeat(DRAWS, 1), Contracts.of([s], [PROMPT], [SAID]).at(np.zeros(DRAWS, np.int64)), uniform)
    return out.ids, out.logp, out.kept


def by_hand(s: Sampling) -> np.ndarray:
    """[V] the contract's distribution after PROMPT and SAID, a token at a time."""
    z = LOGITS.double().numpy().copy()
    for i, x in s.logit_bias:
        z[i] += x
    for i in {*PROMPT.tolist(), *SAID.tolist()}:
        z[i] = z[i] * s.repetition_penalty if z[i] < 0 else z[i] / s.repetition_penalty
    banned = set(range(6)) - set(range(6) if s.allowed_ids is None else s.allowed_ids)
    banned |= set(s.stop_ids or ()) if len(SAID) < s.min_tokens else set()
    banned |= {b[-1] for b in s.bad_ids if len(b) <= 3 and b[:-1] == tuple(SAID.tolist())[2 - len(b) + 1 :]}
    z[list(banned)] = -np.inf
    order = np.argsort(-z / s.temperature, kind="stable")
    p = np.exp(z / s.temperature)[order]
    p[s.top_k or 6 :] = 0
    p /= p.sum()
    p[np.cumsum(p) - p >= s.top_p] = 0
    p /= p.sum()
    p[p < s.min_p * p[0]] = 0
    if s.greedy:
        p[1:] = 0
    out = np.zeros(6)
    out[order] = p / p.sum()
    return out


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
    """The same draws with 2 % of all mass moved from the most said outcome to the one said most after it."""
    other, first = np.argsort(np.bincount(ids, minlength=6), kind="stable")[-2:]
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


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_contract_is_what_it_is_by_hand(name: str) -> None:
    s = CONTRACTS[name]
    ids, logp, _ = draws(s)
    expected = by_hand(s)
    assert set(np.unique(ids).tolist()) == set(np.flatnonzero(expected).tolist())
    for i in np.unique(ids):
        assert abs(np.exp(logp[ids == i][0]) - expected[i]) < 1e-6
    assert s.rules == bool(np.abs(expected - by_hand(replace(s, **PLAIN))).max() > 1e-3) or name == "min_tokens_over"


def test_slots_at_temperature_one_are_drawn_as_all_others_are() -> None:
    """Where no slot asks for more, no column is read: one slot with a contract of its own changes no other's draw."""
    rng = np.random.default_rng(2)
    logits, uniform, at = (
        torch.from_numpy(rng.normal(size=(3, 50)).astype(np.float32)),
        rng.random(3),
        np.array([3, 0, 1]),
    )
    slots = Contracts.plain(4)
    easy = draw(logits.clone(), slots.at(at), uniform)
    assert slots.easy
    for s in (*(c for c in CONTRACTS.values() if c != Sampling()), replace(Sampling(), top=2)):
        slots.put(2, s, PROMPT, SAID)
        plain = s.temperature == 1 and not (s.rules or s.truncated or s.greedy or s.top)
        assert slots.easy == plain
        beside = draw(logits.clone(), slots.at(at), uniform)
        assert np.array_equal(beside.ids, easy.ids) and np.array_equal(beside.logp, easy.logp)
        assert beside.kept == easy.kept == [] and beside.top is easy.top is None
        slots.put(2, Sampling(), PROMPT, SAID) if s.top else slots.clear(2)
        assert slots.easy


def test_rows_with_contracts_of_their_own_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    count = 4 * len(CONTRACTS)
    logits = torch.from_numpy(rng.normal(size=(count, 30)).astype(np.float32))
    mixed = [list(CONTRACTS.values())[i % len(CONTRACTS)] for i in range(count)]
    prompts, said = ([rng.integers(0, 6, rng.integers(0, 5)).astype(np.int32) for _ in mixed] for _ in range(2))
    uniform = rng.random(count)
    together = draw(logits.clone(), Contracts.of(mixed, prompts, said), uniform)
    of_row = dict(zip(together.truncated_rows.tolist(), together.kept, strict=True))
    for i, s in enumerate(mixed):
        alone = draw(
            logits[i : i + 1].clone(), Contracts.of([s], prompts[i : i + 1], said[i : i + 1]), uniform[i : i + 1]
        )
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


@pytest.mark.parametrize(
    "s",
    [
        *(
            Sampling(top_k=k, top_p=p)
            for k, p in ((2000, 0.5), (1500, 0.7), (1024, 0.7), (1025, 0.9), (4000, 0.6), (8999, 0.4))
        ),
        *(Sampling(top_k=k, top_p=p) for k, p in ((9000, 0.4), (10_000, 0.4), (0, 0.4), (1025, 0.99), (700, 0.5))),
        *(Sampling(top_k=k, top_p=p, min_p=0.02) for k, p in ((2000, 0.5), (2000, 1.0), (500, 0.9), (0, 0.3))),
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_the_whole_set_of_the_contract(s: Sampling) -> None:
    """Worked in float64 over the whole row, also where top-k reaches beyond the candidates that are looked at first."""
    size = 9000
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)) * torch.tensor(
        [[1.0], [2.0], [4.0], [0.3]]
    )
    got = kept_mask(z, Contracts.of([s] * 4)).numpy()
    for row, mask in zip(z.double().numpy(), got, strict=True):
        order = np.lexsort((np.arange(size), -row))
        p = np.exp(row)[order]
        p[s.top_k or size :] = 0
        p /= p.sum()
        keep = (p > 0) & (np.cumsum(p) - p < s.top_p)
        p[~keep] = 0
        p /= p.sum()
        assert np.array_equal(np.sort(order[keep & (p >= s.min_p * p[0])]), np.flatnonzero(mask))


def test_extreme_uniforms_pick_possible_tokens() -> None:
    logp = torch.log(torch.tensor([[0.0, 0.3, 0.7, 0.0]] * 3))
    assert pick(logp, np.array([0.0, np.nextafter(1, 0), 0.3000001])).tolist() == [1, 2, 2]
    with pytest.raises(EngineError, match="not finite"):
        pick(torch.tensor([[float("nan"), 0.0]]), np.array([0.5]))
    flat = torch.full((1, 50_000), -np.log(50_000), dtype=torch.float32)
    assert pick(flat, np.array([np.nextafter(1, 0)])).tolist() == [49_999]


RULED = {name: s for name, s in CONTRACTS.items() if s.rules}


@pytest.mark.parametrize("name", RULED)
def test_what_was_heard_is_what_was_put(name: str) -> None:
    """Tokens told one by one, told at once when a slot is taken again, or taken as said ahead of time lead to one
    distribution."""
    s, rng = RULED[name], np.random.default_rng(1)
    other = RULED["everything"]
    said = [rng.integers(0, 4, 6).astype(np.int32) for _ in range(3)]
    live = Contracts.of([s, other, s], [PROMPT] * 3)
    ahead = np.full((3, 6), -1, np.int64)
    for t in range(7):
        logits = torch.from_numpy(rng.normal(size=(3, 9)).astype(np.float32))
        uniform = rng.random(3)
        again = Contracts.of([s, other, s], [PROMPT] * 3, [x[:t] for x in said])
        supposed = Contracts.of([s, other, s], [PROMPT] * 3)
        views = (live.at(np.arange(3)), again.at(np.arange(3)), supposed.at(np.arange(3), ahead))
        one, two, three = (draw(logits.clone(), view, uniform) for view in views)
        for more in (two, three):
            assert np.array_equal(one.ids, more.ids) and np.array_equal(one.logp, more.logp)
        if t < 6:
            told = np.array([x[t] for x in said])
            live.record(np.arange(3), told.astype(np.int64))
            ahead[:, t] = told


def test_rows_may_repeat_a_slot_some_tokens_ahead() -> None:
    """A slot that said (1) with drafts (2, 3): its three rows see (1), (1 2) and (1 2 3)."""
    s = Sampling(bad_ids=((1, 0), (2, 0), (1, 2, 3)), repetition_penalty=3.0, min_tokens=2, stop_ids=(4,))
    contracts = Contracts.of([Sampling(), s], [PROMPT, np.int32([5])], [np.int32([]), np.int32([1])])
    ahead = np.array([[-1, -1], [2, -1], [2, 3], [-1, -1]])
    got = draw(torch.ones(4, 6), contracts.at(np.array([1, 1, 1, 0]), ahead), np.zeros(4))
    assert got.ids.tolist() == [1, 1, 0, 0]
    new, old, p = np.e, np.exp(1 / 3), np.exp(got.logp)
    assert abs(p[0] - old / (2 * old + 2 * new)) < 1e-6, "0 would follow 1, and 4 is early; 1 and 5 were seen"
    assert abs(p[1] - old / (3 * old + new)) < 1e-6, "0 would follow 2, and 3 the other two"
    assert abs(p[2] - new / (4 * old + 2 * new)) < 1e-6, "nothing is banned"
    assert abs(p[3] - 1 / 6) < 1e-6


def test_a_slot_forgets_whom_it_served() -> None:
    contracts = Contracts.of([RULED["everything"], RULED["penalty"]], [PROMPT] * 2, [SAID] * 2)
    draw(torch.zeros(2, 6), contracts.at(np.arange(2)), np.zeros(2))
    contracts.clear(0)
    contracts.put(1, Sampling())
    view = contracts.at(np.arange(2))
    assert view.rules is None, "a plain contract pays nothing where a ruled one was"
    contracts.put(0, RULED["penalty"], np.int32([3]))
    got = draw(torch.ones(2, 6), contracts.at(np.arange(2)), np.full(2, 0.999))
    q = np.exp(1 / 1.8)
    assert abs(np.exp(got.logp[0]) - np.e / (5 * np.e + q)) < 1e-6, "only 3 was seen"


def test_a_contract_that_leaves_nothing_is_refused_at_the_draw() -> None:
    s = Sampling(allowed_ids=(1, 2), bad_ids=((1, 1), (1, 2)), stop_ids=())
    contracts = Contracts.of([Sampling(), s, s], None, [np.int32([]), np.int32([2]), np.int32([1])])
    with pytest.raises(
        NothingLeft, match="after 1 tokens of a turn the contract bans every token.*allowed_ids=\\(1, 2\\)"
    ) as error:
        draw(torch.zeros(3, 6), contracts, np.zeros(3))
    assert error.value.rows.tolist() == [2]
    assert draw(torch.zeros(2, 6), contracts.at(np.arange(2)), np.zeros(2)).ids.tolist() == [0, 1]


def test_most_probable_tokens_are_those_of_the_final_distribution() -> None:
    s = Sampling(top=4, allowed_ids=(1, 3, 4), repetition_penalty=2.0)
    got = draw(LOGITS[None].clone(), Contracts.of([s], [PROMPT], [SAID]), np.zeros(1))
    assert got.top is not None and got.top.ids[0, :3].tolist() == [3, 4, 1]
    expected = by_hand(s)
    assert np.allclose(np.exp(got.top.logp[0]), [*expected[[3, 4, 1]], 0], atol=1e-6)


def test_a_kept_set_holds_no_banned_token() -> None:
    """Truncation that would keep more than the bans leave keeps what they leave."""
    for s in (
        Sampling(top_k=5, allowed_ids=(1, 3)),
        Sampling(top_p=0.999999, allowed_ids=(1, 3)),
        Sampling(min_p=0.0001, allowed_ids=(1, 3)),
    ):
        got = draw(LOGITS.repeat(2, 1), Contracts.of([s, s]), np.array([0.0, 0.999]))
        assert [k.tolist() for k in got.kept] == [[1, 3], [1, 3]]
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(500, 40)).astype(np.float32))
    s = Sampling(top_k=20, allowed_ids=(3, 4, 8, 9, 20, 33, 34))
    got = draw(z, Contracts.of([s]).at(np.zeros(500, np.int64)), rng.random(500))
    assert {tuple(k.tolist()) for k in got.kept} == {s.allowed_ids}, (
        "also where rounding leaves the sum of the others below 1"
    )
