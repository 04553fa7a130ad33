"""The learner's half of the contract's rules, against a page of plain Python and autograd in float64.

The textbook below walks over one token at a time and knows nothing of packing, chunks or ragged runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import SampledTurn, Segment, Stop, TruncationSets
from posttrain.engine.head import logprob
from posttrain.engine.head.logit_rules import LogitRules, banned_here, seen_before
from posttrain.engine.head.logprob import candidates, logprobs, most_probable
from posttrain.system.errors import ConfigError, InvariantError

V, H = 13, 6
STOPS = (11, 12)
CPU = torch.device("cpu")

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_reward": {"repetition_penalty": 0.6},
    "logit_bias": {"logit_bias": ((2, 1.5), (0, -3.0), (11, 0.25))},
    "allowed": {"allowed_ids": (0, 1, 2, 3, 5, 8, 11)},
    "bad_token": {"bad_ids": ((4,), (9,))},
    "bad_sequences": {"bad_ids": ((1, 2), (2, 1, 0), (3, 3), (0, 1, 2, 3))},
    "min_tokens": {"min_tokens": 2},
}


def banned(s: Sampling, said: list[int]) -> set[int]:
    """What cannot follow `said` in a turn."""
    out = set() if s.allowed_ids is None else set(range(V)) - set(s.allowed_ids)
    out |= {b[-1] for b in s.bad_ids if len(b) <= len(said) + 1 and tuple(said[len(said) - len(b) + 1 :]) == b[:-1]}
    return out | (set(s.stop_ids or ()) if len(said) < s.min_tokens else set())


def distribution(logits_V: Tensor, s: Sampling, sequence: list[int], said: list[int]) -> Tensor:
    """[V] log-probs after `sequence`, of which the current turn has said `said`; steps 1 to 4 and 6 of
    `core.sampling`."""
    z = list(logits_V)
    for i, x in s.logit_bias:
        z[i] = z[i] + x
    for i in set(sequence):
        z[i] = z[i] * s.repetition_penalty if z[i] < 0 else z[i] / s.repetition_penalty
    for i in banned(s, said):
        z[i] = torch.tensor(float("-inf"), dtype=logits_V.dtype)
    return (torch.stack(z) / s.temperature).log_softmax(0)


def walk(rng: np.random.Generator, s: Sampling, segments: int = 3) -> list[Segment]:
    """Segments of one to three turns each, some with nothing seen between them, that the contract could have said. Few
    ids, so that tokens repeat and bad sequences come up."""
    out: list[Segment] = []
    for _ in range(segments):
        t = Transcript(s)
        t.see(rng.integers(0, V, rng.integers(1, 6)))
        for _ in range(rng.integers(1, 4)):
            said: list[int] = []
            for _ in range(rng.integers(1, 6)):
                pool = np.setdiff1d(
                    np.append(np.arange(4), STOPS) if rng.random() < 0.8 else np.arange(V), list(banned(s, said))
                )
                said.append(int(rng.choice(pool if len(pool) else np.setdiff1d(np.arange(V), list(banned(s, said))))))
            n = len(said)
            sets = [
                np.union1d(np.setdiff1d(rng.integers(0, V, 5), list(banned(s, said[:i]))), [said[i]]).astype(np.int32)
                for i in range(n)
            ]
            kept = TruncationSets.of(sets) if s.truncated else None
            t.say(
                SampledTurn(
                    np.array(said, np.int32), np.full(n, -1, np.float32), np.zeros(n, np.int32), Stop.LENGTH, kept
                )
            )
            if rng.random() < 0.5:
                t.see(rng.integers(0, V, 2))
        out.append(t.segment())
    return out


def textbook(h: Tensor, w: Tensor, segments: list[Segment], softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob [M], entropy [M], log-distribution [M, V]) of the spoken tokens, whose hidden states are h [M, H]."""
    logp, entropy, whole, m = [], [], [], 0
    for s in segments:
        at = np.flatnonzero(s.mask)
        begins = at - (s.in_turn if s.in_turn is not None else 0)
        for k, (t, begin) in enumerate(zip(at.tolist(), begins.tolist(), strict=True)):
            z = w @ h[m]
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            q = distribution(z, s.sampling, s.ids[:t].tolist(), s.ids[begin:t].tolist())
            if s.kept is not None:
                out = torch.ones(V, dtype=torch.bool)
                out[s.kept.sets()[k].astype(np.int64)] = False
                q = q.masked_fill(out, float("-inf")).log_softmax(0)
            p = q.exp()
            logp.append(q[int(s.ids[t])])
            entropy.append(-sum(p[i] * q[i] for i in range(V) if p[i] > 0))
            whole.append(q)
            m += 1
    return torch.stack(logp), torch.stack(entropy), torch.stack(whole)


def inputs(spoken: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in ((spoken, H), (V, H))
    )  # type: ignore[return-value]


def check(s: Sampling, seed: int, chunk: int = 3, softcap: float | None = None, block: int = V) -> None:
    """Values and gradients of log-prob and entropy, in float64; candidates and most probable tokens beside them. The
    vocabulary is read in blocks of at most `block` ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "CHUNK_IDS", block)
        _check(s, seed, chunk, softcap)


def _check(s: Sampling, seed: int, chunk: int, softcap: float | None) -> None:
    segments = walk(np.random.default_rng(seed), s)
    packed = Packed.of(segments)
    rules = LogitRules.of(packed, V, CPU)
    assert (rules is not None) == s.rules
    ours, theirs = inputs(packed.spoken, seed), inputs(packed.spoken, seed)
    how: dict[str, Any] = {"sampling": s, "kept": packed.kept, "rules": rules, "softcap": softcap}
    targets = torch.from_numpy(packed.target_M.astype(np.int64))
    logp, entropy = logprobs(ours[0], ours[1], None, targets, **how, want_entropy=True, chunk=chunk)
    want_logp, want_entropy, whole = textbook(*theirs, segments, softcap)
    assert entropy is not None
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    by = torch.randn(2, packed.spoken, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (by[0] @ logp + by[1] @ entropy).backward()
    (by[0] @ want_logp + by[1] @ want_entropy).backward(retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)
        a.grad = b.grad = None
    everything = torch.arange(V).expand(packed.spoken, V)
    low = torch.finfo(torch.float64).min
    some = candidates(ours[0], ours[1], None, everything, **how)
    torch.testing.assert_close(some, whole.clamp_min(low), rtol=0, atol=1e-12)
    best = most_probable(ours[0], ours[1], None, 4, **how)
    torch.testing.assert_close(best.values, whole.clamp_min(low).topk(4).values, rtol=0, atol=1e-12)
    by = torch.randn(packed.spoken, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (by * some.clamp_min(-1e6)).sum().backward()
    (by * whole.clamp_min(low).clamp_min(-1e6)).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("chunk", "block"), [(1, V), (3, V), (100, V), (3, 5), (100, 1)])
def test_each_option_equals_the_textbook_with_its_gradient(name: str, chunk: int, block: int) -> None:
    check(Sampling(stop_ids=STOPS, **OPTIONS[name]), seed=chunk, chunk=chunk, block=block)


@settings(max_examples=60)
@given(
    names=st.sets(st.sampled_from([n for n in OPTIONS if n != "repetition_reward"]), min_size=2),
    temperature=st.sampled_from([1.0, 0.7, 1.4]),
    top_k=st.sampled_from([0, 4]),
    softcap=st.sampled_from([None, 2.0]),
    block=st.sampled_from([V, 5, 1]),
    seed=st.integers(0, 10_000),
)
def test_options_together_equal_the_textbook(
    names: set[str], temperature: float, top_k: int, softcap: float | None, block: int, seed: int
) -> None:
    fields: dict[str, Any] = {}
    for name in sorted(names):
        for field, value in OPTIONS[name].items():
            fields[field] = fields.get(field, ()) + value if field == "bad_ids" else value
    check(Sampling(stop_ids=STOPS, temperature=temperature, top_k=top_k, **fields), seed, softcap=softcap, block=block)


def test_the_slope_of_a_penalty_changes_at_zero() -> None:
    """Worked by hand: z = (2, -2, 0), all seen, p = 2 gives (1, -4, 0) with slopes (1/2, 2, 1/2)."""
    packed = Packed.of([_segment(Sampling(repetition_penalty=2.0, stop_ids=()), [0, 1, 2], [0])])
    rules = LogitRules.of(packed, 3, CPU)
    assert rules is not None
    z = torch.tensor([[2.0, -2.0, 0.0]])
    penalised = rules.adjust(z, 0)
    assert z.tolist() == [[1.0, -4.0, 0.0]] and penalised is not None
    assert dict(zip(penalised[0].tolist(), penalised[1].tolist(), strict=True)) == {0: 0.5, 1: 2.0, 2: 0.5}


def _segment(s: Sampling, seen: list[int], *turns: list[int]) -> Segment:
    t = Transcript(s)
    t.see(seen)
    for said in turns:
        t.say(
            SampledTurn(
                np.array(said, np.int32), np.full(len(said), -1, np.float32), np.zeros(len(said), np.int32), Stop.LENGTH
            )
        )
    return t.segment()


def test_what_a_position_has_seen_is_its_segments_prefix() -> None:
    s = Sampling(repetition_penalty=1.1, stop_ids=())
    ids, start, count = seen_before(Packed.of([_segment(s, [5, 6, 5], [7, 5]), _segment(s, [6], [7])]), V)
    seen = [set(ids[a : a + n].tolist()) for a, n in zip(start, count, strict=True)]
    assert seen == [{5, 6}, {5, 6, 7}, {6}]
    assert len(ids) == 5, "a segment lists each of its ids once"


def test_a_turn_begins_anew_after_another_with_nothing_between() -> None:
    """Two turns side by side look like one to the mask; bans read the second from its own start."""
    s = Sampling(min_tokens=1, bad_ids=((1, 2),), stop_ids=STOPS)
    segment = _segment(s, [0, 1], [2, 1], [2, 11])
    assert segment.in_turn is not None and segment.in_turn.tolist() == [0, 1, 0, 1]
    rows, ids = banned_here(Packed.of([segment]))
    assert list(zip(rows.tolist(), ids.tolist(), strict=True)) == [(0, 11), (0, 12), (2, 11), (2, 12)]
    one = _segment(s, [0, 1], [2, 1, 3])
    rows, ids = banned_here(Packed.of([one]))
    assert list(zip(rows.tolist(), ids.tolist(), strict=True)) == [(0, 11), (0, 12), (2, 2)], (
        "1 was just said, so 2 is banned"
    )
    assert LogitRules.of(Packed.of([segment]), V, CPU) is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_ids": (1, 2)}, [1, 3]),
        ({"bad_ids": ((3,),)}, [3]),
        ({"bad_ids": ((1, 3),)}, [1, 3]),
        ({"min_tokens": 2}, [1, 11]),
    ],
)
def test_a_token_that_was_said_against_its_contract_is_found(fields: dict[str, Any], said: list[int]) -> None:
    packed = Packed.of([_segment(Sampling(stop_ids=STOPS, **fields), [0], said)])
    with pytest.raises(
        InvariantError, match=f"spoken token {len(said) - 1} has id {said[-1]}, which its contract bans"
    ):
        LogitRules.of(packed, V, CPU)


def test_rules_and_contract_go_together() -> None:
    s = Sampling(repetition_penalty=1.2, stop_ids=())
    h, w = inputs(1)
    with pytest.raises(InvariantError, match="exactly where the contract has some"):
        logprobs(h, w, None, torch.tensor([1]), sampling=s)
    rules = LogitRules.of(Packed.of([_segment(s, [0], [1])]), V, CPU)
    with pytest.raises(InvariantError, match="exactly where the contract has some"):
        logprobs(h, w, None, torch.tensor([1]), sampling=Sampling(), rules=rules)
    assert LogitRules.of(Packed.of([_segment(Sampling(stop_ids=(), stop=("x",)), [0], [1])]), V, CPU) is None


def test_positions_in_a_turn_are_kept_where_they_are_read() -> None:
    segment = _segment(Sampling(min_tokens=1, stop_ids=STOPS), [0], [1, 2])
    for wrong in (None, np.int32([0]), np.int32([1, 2]), np.int32([0, 2])):
        with pytest.raises(InvariantError):
            replace(segment, in_turn=wrong)
    with pytest.raises(InvariantError):
        replace(segment, sampling=Sampling(stop_ids=STOPS))
    packed = Packed.of([segment, _segment(segment.sampling, [3], [4], [5])])
    assert packed.in_turn_M is not None and packed.in_turn_M.tolist() == [0, 1, 0, 0]
    part = packed.select([1])
    assert part.in_turn_M is not None and part.in_turn_M.tolist() == [0, 0]


def test_memory_of_a_penalty_is_that_of_what_was_seen() -> None:
    """A vocabulary of 150,000: the rules of 300 tokens hold a few thousand numbers, not 300 rows."""
    s = Sampling(repetition_penalty=1.1, bad_ids=((1, 2),), stop_ids=())
    packed = Packed.of([_segment(s, list(range(3, 203)), [5] * 300)])
    rules = LogitRules.of(packed, 150_000, CPU)
    assert rules is not None and rules.seen is not None and rules.never_V is None and rules.now is None
    assert len(rules.seen._ids) == 200
    assert len(rules.seen.places(0, 300, 150_000)) == 300 * 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_ids": ()}, "allowed_ids is empty"),
        ({"allowed_ids": (1, 2), "bad_ids": ((1,), (2,))}, "ban all 2 of allowed_ids"),
        ({"allowed_ids": (7,), "stop_ids": (7,), "min_tokens": 1}, "only stop ids are allowed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"logit_bias": ((1, float("-inf")),)}, "put it into bad_ids"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "token 1 is listed twice"),
        ({"bad_ids": ((),)}, "has no tokens"),
        ({"stop_ids": (-1,)}, "-1 is no token id"),
        ({"min_tokens": 65}, "more than max_tokens=64"),
        ({"min_tokens": -1}, "must be >= 0"),
        ({"stop": ("",)}, "an empty text"),
        ({"stop": ("\ufffd",)}, "U+FFFD"),
    ],
)
def test_contracts_that_mean_nothing_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        Sampling(**fields)


def test_words_are_resolved_once() -> None:
    spelled = {"no": [(5,), (6,)], "never": [(1, 2), (9, 1, 2)], "yes": [(3,), (4, 7)]}
    s = Sampling(bad_words=("no", "never"), bad_ids=((5,),), allowed_words=("yes",), allowed_ids=(8,))
    assert not s.resolved and s.in_turn and s.bans
    told = s.resolve((0,), lambda word: spelled[word])
    assert told.bad_ids == ((5,), (6,), (1, 2)), "(9, 1, 2) ends in (1, 2), which is banned anyway"
    assert told.allowed_ids == (0, 3, 4, 7, 8) and told.stop_ids == (0,)
    assert told.resolved and told.resolve((1,)) is told and hash(told) != hash(s)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        s.resolve((0,))
    with pytest.raises(ConfigError, match="token id 8, and the model has 0..7"):
        told.check_vocabulary(8)
