"""Stop strings: found with the token that completes them, however text was cut into tokens."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.types import Stop
from posttrain.engine.embedded.schedule.stop_strings import completes
from posttrain.engine.model.tiny_models import characters, raw_bytes
from posttrain.environment.templates.renderer import Renderer
from posttrain.system.errors import ConfigError, EngineError
from tests.engine.embedded_parts import V, ask, engine, one_thread, prompts, sampling
from tests.vocabularies import train_bpe, train_byte_level, train_unigram

__all__ = ["one_thread"]

CORPUS = [
    "the end of the story</answer>",
    "a stop; and a stop.\n\nthe next",
    "naïve café 終わり。 終わり 🙂🙃 ok",
    "the the the stop stop",
] * 20
FAMILIES = {
    "bytes": raw_bytes,
    "byte_level": lambda: train_byte_level(CORPUS, 330),
    "bpe": lambda: train_bpe(CORPUS, 330),
    "unigram": lambda: train_unigram(CORPUS, 90),
}


@cache
def renderer(family: str) -> Renderer:
    tokenizer = FAMILIES[family]()
    return Renderer(tokenizer, (tokenizer.eos_token_id,))


def first_end(family: str, ids: np.ndarray, stop: tuple[str, ...], least: int = 0) -> int | None:
    """Tokens of the turn under the definition itself: every prefix decoded whole; None where it does not end."""
    text = renderer(family).decode
    before = len(text(ids[:least]).rstrip("\ufffd"))
    for n in range(least + 1, len(ids) + 1):
        whole = text(ids[:n])
        if any(whole.find(s, max(0, before - len(s) + 1)) >= 0 for s in stop):
            return n
    return None


def found_end(family: str, ids: np.ndarray, stop: tuple[str, ...], least: int = 0) -> int | None:
    text = renderer(family).decode
    return next((n for n in range(1, len(ids) + 1) if completes(ids[:n], stop, text, least)), None)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(data=st.data())
def test_the_end_is_that_of_the_definition(family: str, data: st.DataObject) -> None:
    """Written text of long runs of multi-byte characters, and tokens in no order at all, which cut them."""
    r = renderer(family)
    size = len(r.tokenizer)  # type: ignore[arg-type]
    words = st.sampled_from(
        ["the ", "stop", ";", " ", "\n\n", "終わり", "。", "é", "🙂", "</ans", "wer>", "end", "🚀", "ж"]
    )
    written = st.lists(words, max_size=14).map(lambda w: r.encode("".join(w)).tolist())
    random = st.lists(st.integers(0, size - 1), max_size=12)
    ids = np.array([*data.draw(random), *data.draw(written), *data.draw(random), *data.draw(written)], np.int32)
    stop = tuple(
        data.draw(
            st.lists(
                st.sampled_from(["stop", ";", "\n\n", "。", "わり", "🙂", "ж", "🚀ж", "</answer>", "p;", "e s"]),
                min_size=1,
                max_size=3,
            )
        )
    )
    least = data.draw(st.integers(0, 5))
    assert found_end(family, ids, stop, least) == first_end(family, ids, stop, least)


def test_a_string_across_tokens_inside_one_and_of_bytes() -> None:
    tokens = ["a", "</an", "swer> and", "more", ";;", "é"]

    def text(ids: np.ndarray) -> str:
        return "".join(tokens[i] for i in ids)

    def end(ids: list[int], *stop: str, least: int = 0) -> int | None:
        turn = np.array(ids, np.int32)
        return next((n for n in range(1, len(turn) + 1) if completes(turn[:n], stop, text, least)), None)

    assert end([0, 1, 2, 3], "</answer>") == 3, "completed in the middle of a token"
    assert end([0, 1, 2, 3], "swer") == 3 and end([0, 1, 2], "d") == 3 and end([0, 1, 2], "a") == 1
    assert end([4, 3, 4], ";", least=1) == 3, "one that was complete among the first tokens ends nothing"
    assert end([4, 4, 4], ";;;", least=1) == 2, "one that begins among them and ends behind them does"
    assert end([4, 4], ";;;", least=2) is None
    assert end([3] * 50 + [4], "re;") == 51 and end([3] * 50 + [4], "x") is None
    r = renderer("bytes")
    moon = r.encode("a 終")
    assert len(moon) == 5 and found_end("bytes", moon, ("終",)) == 5 and found_end("bytes", moon[:4], ("終",)) is None
    for family in ("bytes", "byte_level", "bpe"):
        cut = renderer(family).encode("🚀" * 9 + "ж")
        assert found_end(family, cut, ("ж",)) == len(cut) >= 20, (
            "behind a long run of bytes of which a part reads as nothing"
        )


def test_special_tokens_are_text_and_empty_tokens_do_not_hide_one() -> None:
    r = renderer("byte_level")
    eos = r.stop_ids[0]
    ids = np.array([*r.encode("the"), eos, *r.encode("x")], np.int32)
    assert found_end("byte_level", ids, ("<eos>",)) == len(ids) - len(r.encode("x"))

    def text(ids: np.ndarray) -> str:
        return "".join("" if i == 0 else "ab"[i - 1] for i in ids)

    assert completes(np.array([1] + [0] * 40 + [2], np.int32), ("ab",), text)


LETTERS = "".join(chr(0x1F600 + i) if i % 7 == 0 else chr(97 + i % 26) for i in range(V))


def read(ids: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in ids)


def test_the_engine_ends_a_turn_and_says_why() -> None:
    """Beside plain requests, which go on; all tokens up to the completing one stay, with their log-probs."""
    asked = prompts(12, seed=3)
    free = asyncio.run(ask(engine(text=read, slots=6), asked, sampling()))
    stop = sorted({read(s.ids)[7:9] for s in free})[:6]
    assert len(stop) > 3
    for least in (0, 10):
        contract = sampling(stop=tuple(stop), min_tokens=least)
        mixed = [contract if i % 3 else sampling() for i in range(12)]
        got = asyncio.run(ask(engine(text=read, slots=6), asked, mixed))
        ended = 0
        for one, whole, s in zip(got, free, mixed, strict=True):
            n = next(
                (
                    n
                    for n in range(least + 1, 21)
                    if any(read(whole.ids[:n]).find(x, max(0, least - 1)) >= 0 for x in stop)
                ),
                20,
            )
            n = n if s.stop else 20
            cut = s.stop and any(x in read(whole.ids[max(0, least - 1) : n]) for x in stop)
            assert one.ids.tolist() == whole.ids[:n].tolist() and np.allclose(one.logp, whole.logp[:n], atol=1e-5)
            assert one.stop is (Stop.STRING if cut else Stop.LENGTH)
            ended += bool(cut)
        assert ended > 2


def test_a_stop_id_is_the_reason_where_both_end_a_turn() -> None:
    e = engine(text=read)
    (free,) = asyncio.run(ask(e, prompts(1), sampling()))
    last = int(free.ids[4])
    (both,) = asyncio.run(ask(e, prompts(1), sampling(stop_ids=(last,), stop=(LETTERS[last],))))
    assert both.stop is Stop.SAID and both.ids[-1] == last


def test_min_tokens_keeps_stop_ids_from_being_said() -> None:
    every = tuple(range(0, V, 2))
    got = asyncio.run(ask(engine(slots=8), prompts(8), sampling(stop_ids=every, min_tokens=6)))
    assert all(len(s.ids) >= 7 or s.stop is Stop.LENGTH for s in got)
    assert all(not set(s.ids[:6].tolist()) & set(every) for s in got)
    assert any(s.stop is Stop.SAID and len(s.ids) == 7 for s in got), "and lets them at once when it is over"
    (only,) = asyncio.run(ask(engine(), prompts(1), sampling(stop_ids=tuple(range(V - 1)), min_tokens=4, max_tokens=4)))
    assert only.ids.tolist() == [V - 1] * 4 and only.logp.tolist() == [0.0] * 4


def test_a_request_that_loses_its_slot_goes_on_under_its_rules() -> None:
    """A cache too small for all: whoever gives way reads its past again where it goes on, bit for bit under
    determinism."""
    rules = (
        sampling(max_tokens=40, repetition_penalty=1.5),
        sampling(max_tokens=40, bad_ids=tuple((a, b) for a in range(V) for b in range(a % 3, V, 3)), top_k=9),
        sampling(max_tokens=40, min_tokens=30, stop_ids=tuple(range(10))),
        sampling(max_tokens=40, stop=(LETTERS[7] + LETTERS[8], LETTERS[3])),
    )
    contracts, asked = [rules[i % 4] for i in range(12)], prompts(12, seed=5)
    block = 16 * 2 * 2 * 2 * 8 * 4
    roomy = engine(text=read, slots=6, deterministic=True)
    tight = engine(text=read, slots=6, deterministic=True, cache_bytes=9 * block)
    free, squeezed = asyncio.run(ask(roomy, asked, contracts)), asyncio.run(ask(tight, asked, contracts))
    assert tight.gauges()["engine/preempted"].sum > 3 and roomy.gauges()["engine/preempted"].sum == 0
    for a, b in zip(free, squeezed, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and np.array_equal(a.logp, b.logp) and a.stop is b.stop


def test_contracts_an_engine_cannot_keep() -> None:
    e = engine()
    with pytest.raises(EngineError, match="without a text function.*Pass text="):
        asyncio.run(ask(e, prompts(1), sampling(stop=("x",))))
    with pytest.raises(EngineError, match="not resolved"):
        asyncio.run(ask(e, prompts(1), sampling(bad_words=("x",))))
    with pytest.raises(ConfigError, match=f"token id {V}, and the model has"):
        asyncio.run(ask(e, prompts(1), sampling(logit_bias=((V, 1.0),))))
    assert asyncio.run(ask(e, prompts(1), sampling()))[0].stop is Stop.LENGTH


def test_a_request_with_nothing_left_to_say_fails_alone() -> None:
    e = engine()
    dead_end = sampling(allowed_ids=(1, 2), bad_ids=((1, 1), (1, 2), (2, 1), (2, 2)))
    asked = prompts(6)
    free = asyncio.run(ask(e, asked, sampling()))

    async def together() -> list[object]:
        contracts = [dead_end if i in (1, 4) else sampling() for i in range(6)]
        return await asyncio.gather(
            *[e.generate(x, s, i) for i, (x, s) in enumerate(zip(asked, contracts, strict=True))],
            return_exceptions=True,
        )

    for i, one in enumerate(asyncio.run(together())):
        if i in (1, 4):
            assert isinstance(one, EngineError) and "after 1 tokens of a turn the contract bans every token" in str(one)
        else:
            assert one.ids.tolist() == free[i].ids.tolist()  # type: ignore[attr-defined]
    assert len(e._scheduler.slots.free) == 4


def test_words_are_spelled_as_they_are_said() -> None:
    r = renderer("byte_level")
    assert r.spell("stop") == (tuple(r.encode("stop").tolist()), tuple(r.encode(" stop").tolist()))
    assert renderer("bytes").spell("ab") == ((64, 65),), "a space of its own adds nothing"
    letters = Renderer(characters("abc0"), (4,))
    assert letters.spell("cab") == ((2, 0, 1),), "where there is no space, there is one way"
    with pytest.raises(ConfigError, match="cannot write 'dab'"):
        letters.spell("dab")
    with pytest.raises(ConfigError, match="cannot write '終'"):
        Renderer(train_unigram(["the end"] * 9, 20), (1,)).spell("終")
