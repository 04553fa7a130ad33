"""Text becomes tokens exactly once, specials are neither doubled nor dropped, and history is never rewritten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from posttrain.engine.model.tiny_models import characters
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.system.errors import DataError, InvariantError

ALPHABET = [chr(c) for c in range(32, 127)] + ["\n"]
SPECIALS = ["<bos>", "<eos>", "<|end|>", "<|user|>", "<|assistant|>"]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)
TRIMS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
DROPS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('#')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
)
CLOSES = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|>##{% endif %}")


def tokenizer(template: str | None = None, leading: bool = True, trailing: bool = False) -> PreTrainedTokenizerFast:
    vocabulary = {t: i for i, t in enumerate([*SPECIALS, *ALPHABET, "<unk>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIALS)
    if leading or trailing:
        single = f"{'<bos> ' if leading else ''}$A{' <eos>' if trailing else ''}"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    t = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    t.chat_template = template
    return t


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("trailing", [True, False])
def test_text_prompt_gets_its_leading_specials_once_and_no_trailing_ones(leading: bool, trailing: bool) -> None:
    r = Renderer(tokenizer(leading=leading, trailing=trailing), (1,))
    wanted = ([0] if leading else []) + ids("<3+4>")
    assert r.prompt("<3+4>").tolist() == wanted
    assert r.prompt("<3+4>").dtype == np.int32
    if leading:
        assert r.prompt("<bos><3+4>").tolist() == wanted, "a BOS written in the text is not doubled"


def test_chat_prompt_is_the_template_once() -> None:
    r = Renderer(tokenizer(CHATML), (2,))
    assert r.prompt([{"role": "user", "content": "hi"}]).tolist() == ids("<|user|>hi<|end|>\n<|assistant|>")


def test_messages_without_a_template_are_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Renderer(tokenizer(), (1,)).prompt([{"role": "user", "content": "hi"}])


def test_a_prompt_must_fit_and_must_not_be_empty() -> None:
    r = Renderer(tokenizer(leading=False), (1,), context=5)
    assert len(r.prompt("1234")) == 4
    with pytest.raises(DataError, match=r"task 'long': the prompt has 5 tokens.*context of 5"):
        r.prompt("12345", "long")
    with pytest.raises(DataError, match="no tokens"):
        r.prompt("")


def test_documents_begin_with_a_token_the_policy_did_not_say() -> None:
    assert Renderer(tokenizer(leading=True), (1,)).start().tolist() == [0]
    assert Renderer(tokenizer(leading=False), (1,)).start().tolist() == [0]
    t = tokenizer(leading=False)
    t.bos_token = None
    assert Renderer(t, (1,)).start().tolist() == [1]
    before, after = Renderer(t, (1,)).pair("", "12")
    assert before.tolist() == [1] and after.tolist() == [*ids("12"), 1]


@pytest.mark.parametrize("text", ["12", "12<eos>", "12<eos><eos>", "12<|end|>"])
def test_a_completion_ends_on_exactly_one_stop(text: str) -> None:
    assert Renderer(tokenizer(), (1, 2)).completion_ids(text).tolist() == [*ids("12"), 1]


def test_a_chat_completion_ends_as_its_template_ends_a_turn() -> None:
    r = Renderer(tokenizer(CHATML), (1, 2))
    assert r.pair([{"role": "user", "content": "q"}], "12")[1].tolist() == [*ids("12"), 2]
    assert r.pair("q", "12")[1].tolist() == [*ids("12"), 1]


def test_a_stop_inside_a_completion_is_refused() -> None:
    with pytest.raises(DataError, match="before its end"):
        Renderer(tokenizer(), (1,)).completion_ids("1<eos>2")


@given(st.text(alphabet=ALPHABET, max_size=30))
def test_text_undoes_completion_ids(text: str) -> None:
    r = Renderer(tokenizer(), (1,))
    assert r.text(r.completion_ids(text)) == text


def test_text_drops_only_the_stop_that_ended_the_turn() -> None:
    r = Renderer(tokenizer(), (1,))
    assert r.text([*ids("12"), 2, 1]) == "12<|end|>"
    assert r.text(ids("12")) == "12"


def test_a_text_observation_is_encoded_on_its_own_without_specials() -> None:
    d = RenderedDialogue(Renderer(tokenizer(), (1,)))
    assert d.see("ab").tolist() == [0, *ids("ab")]
    assert d.said([*ids("x"), 1]) == "x"
    assert d.see("cd").tolist() == ids("cd")


@pytest.mark.parametrize("template", [CHATML, TRIMS])
@pytest.mark.parametrize("said", ["calc:1+2", " padded ", ""])
def test_chat_turns_append_to_the_tokens_the_policy_said(template: str, said: str) -> None:
    r = Renderer(tokenizer(template), (2,))
    d = RenderedDialogue(r)
    whole = d.see([{"role": "user", "content": "q"}]).tolist()
    for n in range(3):
        turn = [*ids(said), 2]
        d.said(turn)
        seen = d.see([{"role": "user", "content": f"r{n}"}]).tolist()
        assert seen == ids(f"\n<|user|>r{n}<|end|>\n<|assistant|>")
        whole += turn + seen
    assert r.tokenizer.decode(whole).count("<|end|>") == 7


def test_a_turn_cut_by_length_is_closed_by_the_world() -> None:
    d = RenderedDialogue(Renderer(tokenizer(CHATML), (2,)))
    d.see([{"role": "user", "content": "q"}])
    d.said(ids("cut"))
    assert d.see([{"role": "user", "content": "r"}]).tolist() == ids("<|end|>\n<|user|>r<|end|>\n<|assistant|>")


def test_a_template_that_drops_earlier_reasoning_is_refused() -> None:
    d = RenderedDialogue(Renderer(tokenizer(DROPS), (2,)), "t1")
    d.see([{"role": "user", "content": "q"}])
    d.said([*ids("think#answer"), 2])
    with pytest.raises(DataError, match=r"t1.*rewrites history"):
        d.see([{"role": "user", "content": "r"}])


def test_a_template_whose_generation_prompt_vanishes_is_refused() -> None:
    d = RenderedDialogue(Renderer(tokenizer(CLOSES), (2,)))
    d.see([{"role": "user", "content": "q"}])
    d.said([*ids("a"), 2])
    with pytest.raises(DataError, match="rewrites history"):
        d.see([{"role": "user", "content": "r"}])


def test_text_and_messages_do_not_mix() -> None:
    d = RenderedDialogue(Renderer(tokenizer(CHATML), (2,)))
    d.see([{"role": "user", "content": "q"}])
    with pytest.raises(InvariantError, match="not both"):
        d.see("text")
    with pytest.raises(InvariantError, match="without a turn"):
        d.see([{"role": "user", "content": "r"}])


def test_an_alphabet_without_digits_is_a_tokenizer_too() -> None:
    made = Renderer(characters("<>bcd"), ())
    assert made.leading == () and made.decode(made.prompt("<bcd>")) == "<bcd>"
