"""Ids to text in pieces: whatever the tokenizer and the tokens, the pieces are the whole and no half characters."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from posttrain.engine.model.tiny_models import raw_bytes
from posttrain.serve.detokenize import HALF, Decoder, Stops, TokenText
from tests.engine.run_parts import TOKENIZERS

KINDS = {**TOKENIZERS, "raw_bytes": raw_bytes}


@cache
def made(kind: str) -> tuple[PreTrainedTokenizerFast, TokenText]:
    t = KINDS[kind]()
    return t, TokenText(t)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_pieces_are_the_whole(kind: str, data: st.DataObject) -> None:
    """Any ids at all, most of them no valid UTF-8. Byte-fallback decoders take back a character that invalid bytes
    follow."""
    tokenizer, words = made(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    decoder = Decoder(words)
    pieces = [decoder.add(i) for i in ids]
    assert all(not p.endswith(HALF) for p in pieces)
    said, whole = "".join(pieces) + decoder.finish(), words.text(ids)
    assert said == whole or (kind == "bpe" and HALF in whole and len(said) <= len(whole))


@pytest.mark.parametrize("kind", ["raw_bytes", "byte_level", "bpe"])
def test_characters_of_several_tokens_come_whole(kind: str) -> None:
    tokenizer, words = made(kind)
    text = "é日本👩‍🚀!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    decoder = Decoder(words)
    pieces = [decoder.add(i) for i in ids]
    assert "".join(pieces) == text and all(HALF not in p for p in pieces) and "" in pieces
    assert b"".join(words.bytes(i) for i in ids).decode() == text


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_are_the_bytes_of_the_text(kind: str) -> None:
    tokenizer, words = made(kind)
    ids = tokenizer.encode("say cat and naïve café: ", add_special_tokens=False)
    assert b"".join(words.bytes(i) for i in ids).decode().lstrip() == words.text(ids).lstrip()
    assert words.bytes(tokenizer.eos_token_id) == b"<eos>" and words.bytes(10**6) == b""


def test_an_unfinished_character_is_told_at_the_end() -> None:
    tokenizer, words = made("raw_bytes")
    decoder = Decoder(words)
    assert [decoder.add(i) for i in tokenizer.encode("aé", add_special_tokens=False)[:2]] == ["a", ""]
    assert decoder.finish() == HALF


@settings(max_examples=300)
@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_where_they_are_first_complete(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut into pieces: what is shown never holds a stop string, and nothing shown is taken back."""
    found = Stops(stops)
    shown, rest, read = "", text, ""
    while rest and not found.found:
        size = data.draw(st.integers(1, len(rest)))
        shown, read, rest = shown + found.add(rest[:size]), read + rest[:size], rest[size:]
        assert not any(s in shown for s in stops)
    ends = [read.find(s) for s in stops if s in read]
    assert found.found == bool(ends)
    assert shown + found.finish() == (read[: min(ends)] if ends else read)
