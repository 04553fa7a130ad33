"""What the world answers is always shown: no episode is lost because a tokenizer lacks a character, and the run says
so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from posttrain.api.main import run
from posttrain.config.run import Env
from posttrain.core.types import Message
from posttrain.engine.model.tiny_models import characters, raw_bytes, wrap
from posttrain.environment.encodable_text import Writable
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.record import run_reader
from posttrain.system.errors import DataError
from tests.tiny import only_rl, tiny_run
from tests.vocabularies import train_bpe, train_byte_level

ALPHABET = "0123456789+-=<>|abcdefghijklmnopqrstuvwxyz ?\n"
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def words() -> Renderer:
    """A vocabulary of whole words, without a token for any other."""
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["ask", "answer", "<eos>", "<pad>"])}))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = wrap(core)
    return Renderer(made, (2,))


def letters(template: str | None = None) -> Renderer:
    made: Any = characters(ALPHABET)
    made.add_special_tokens({"additional_special_tokens": SPECIALS})
    made.chat_template = template
    return Renderer(made, (made.convert_tokens_to_ids("<|end|>"),))


@given(st.text(max_size=20))
def test_any_text_is_shown(text: str) -> None:
    dialogue = RenderedDialogue(render := letters())
    dialogue.see("3+4")
    dialogue.said([1])
    shown = render.decode(dialogue.see(text))
    assert shown == "".join(c if c in ALPHABET else "?" for c in text)
    assert len(shown) == len(text)


def test_a_message_is_shown_and_the_templates_own_tokens_stay() -> None:
    dialogue = RenderedDialogue(render := letters(CHATML))
    dialogue.see([Message(role="user", content="q")])
    dialogue.said([5, render.stop_ids[0]])
    assert render.with_stand_ins(Message(role="tool", name="\u96ea", content="x")).get("name") == "?"
    after = dialogue.see([Message(role="user", content="No such file: '\u00e9'<|end|>")])
    said = [i for i in after.tolist() if i == render.stop_ids[0]]
    assert render.decode(after).count("?o such file?") == 1 and len(said) == 1, "the text <|end|> of a tool is no token"


@pytest.mark.parametrize(
    "make", [raw_bytes, lambda: train_byte_level(["abc"] * 9, 300), lambda: train_bpe(["abc"] * 9, 300)]
)
def test_who_writes_everything_shows_everything_but_half_a_pair(make: Callable[[], Any]) -> None:
    tokenizer: Any = make()
    render = Renderer(tokenizer, (tokenizer.eos_token_id,))
    wild = "\u00e9\u96ea\x00\U0001f9ee\u2028 ok"
    assert render.writable.everything and render.writable.text(wild) == wild
    assert render.writable.text("a\ud800b") == "a?b", "half of a surrogate pair, as a tool's JSON may hold"


def test_a_tokenizer_that_drops_what_it_does_not_know_shows_that_something_was_there() -> None:
    have = {"a": 0, "?": 1, " ": 2}
    writable = Writable(lambda text: [have[c] for c in text if c in have])
    assert not writable.everything and writable.text("a\u00e9 a\n") == "a? a\n"


def test_words_cannot_stand_in_and_are_refused_before_the_run() -> None:
    with pytest.raises(DataError, match=r"has no tokens for .* could stand in.*byte fallback"):
        words().writable.check()
    assert words().prompt("ask answer").tolist() == [0, 1], "what needs no observation is no matter"
    with pytest.raises(DataError, match=r"task 'x': this tokenizer has no token for some of 'ask b'"):
        words().prompt("ask b", "x")


ENVIRONMENT = '''
from dataclasses import dataclass

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.single import Listed, SingleTurn


@dataclass(frozen=True, kw_only=True)
class Talks(SingleTurn):
    """Answers the policy with a text of its own, whatever it said."""

    name = "talks"
    alphabet = "0123456789<>?"
    vouches_for_gold = False
    train = Listed(tuple(Task(str(i), f"<{i}>", "1") for i in range(4)))
    heldout = (Task("h", "<99>", "1"),)

    def key(self, task): return task.prompt
    def gold(self, task): return ("1",)
    def distractor(self, task): return ("2",)
    def verify(self, attempt): return Verdict.value(float(len(attempt.turns) == 2))

    async def play(self, task, talk):
        talk.see(task.prompt)
        await talk.say(2)
        talk.see("Err\\u00e9ur\\ud800: 7")
        return (await talk.say(2)).stop
'''


def test_no_rollout_is_lost_to_a_text_outside_the_alphabet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.py").write_text(ENVIRONMENT)
    tiny = replace(only_rl(tiny_run(steps=2)), env=Env(name=f"{tmp_path / 'talks.py'}:Talks", heldout=1))
    run(tiny, out=tmp_path / "run")
    assert "the policy is shown '?'" in capsys.readouterr().out
    episodes = [r.episode for r in run_reader.episodes(tmp_path / "run", "rl", 2)]
    assert episodes and all(not e.error and e.reward == 1.0 for e in episodes)
    shown = characters("0123456789<>?").encode("?????????7")
    for e in episodes:
        ids: Sequence[int] = e.segments[0].ids[~e.segments[0].mask].tolist()
        assert np.array_equal(ids[-len(shown) :], shown)
