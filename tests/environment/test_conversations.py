"""Conversations of several turns: which start with a template that rewrites them, and what of a row is learned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import posttrain
from posttrain.config.run import Model
from posttrain.core.conversation import LearnedConversation
from posttrain.core.types import Message
from posttrain.engine.model.tiny_models import EOS, PAD, build_module, wrap
from posttrain.environment.templates.chat_template import WEATHER
from posttrain.environment.templates.renderer import Renderer
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.system.errors import DataError
from tests.environment.template_parts import FAMILIES, renderer, tokenizer
from tests.tiny import MODEL

WORLD = '''
from dataclasses import dataclass

from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.single import Listed, SingleTurn

PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks.", "parameters": PARAMETERS}}


@dataclass(frozen=True, kw_only=True)
class Twice(SingleTurn):
    """Says a digit, is told to go on, says it again."""

    turns: int = 2
    tools: bool = False
    said: str = "0"
    knows: bool = True

    name = "twice"
    alphabet = ""
    train = property(lambda self: Listed(tuple(self._task(i) for i in range(2, 8))))
    heldout = property(lambda self: (self._task(0), self._task(1)))

    def _task(self, i):
        return Task(id=f"twice-{i}", prompt=(Message(role="user", content=f"say {i}"),), answer=str(i))

    async def play(self, task, talk):
        talk.see(task.prompt, [TOOL] if self.tools else ())
        for left in reversed(range(self.turns)):
            said = await talk.say()
            if left:
                talk.see([Message(role="tool" if self.tools else "user", content="go on")])
        return said.stop

    def verify(self, attempt):
        return Verdict.value(float(attempt.text.endswith(str(attempt.task.answer))))

    def key(self, task):
        return task.id

    def knows_gold(self, task):
        return self.knows

    def gold(self, task):
        return (f"<think>\\nhm\\n</think>\\n\\n{task.answer}",) * self.turns

    def distractor(self, task):
        return ("no",) * self.turns
'''


def start(folder: Path, family: str, *words: str) -> Path:
    """One step of the world with a template that behaves as a family's."""
    (folder / "world.py").write_text(WORLD)
    text = tokenizer(FAMILIES[family])
    text.eos_token = FAMILIES[family].stops[0]
    module = build_module(Model(**{**MODEL.__dict__, "context": 512}), text, 0)
    module.save_pretrained(folder / "model")
    text.save_pretrained(folder / "model")
    common = (
        "sft=none",
        "threads=1",
        "slots=8",
        "evaluation.samples=1",
        f"model={folder / 'model'}",
        f"env={folder / 'world.py'}:Twice",
    )
    stage = (
        "rl.steps=1",
        "rl.prompts=2",
        "rl.siblings=2",
        "rl.eval_every=0",
        "rl.checkpoint_every=0",
        "rl.sampling.max_tokens=3",
    )
    posttrain.run(recipe("arithmetic"), *common, *stage, *words, out=folder / "run", quiet=True)
    return folder / "run"


@pytest.mark.parametrize("words", [(), ("env.args.knows=false",)], ids=["gold", "probe"])
def test_a_template_that_rewrites_is_refused_before_the_first_rollout(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"twice-\d.*rewrites history.*model.history=rewrite"):
        start(tmp_path, "qwen3", *words)
    assert run_reader.steps(tmp_path / "run") == []


def test_so_is_one_that_knows_no_answer_of_a_tool(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="refused messages with roles"):
        start(tmp_path, "phi", "env.args.tools=true")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen2.5", ()),
        *(
            pytest.param("qwen3", (x,), marks=pytest.mark.prove)
            for x in ("model.history=rewrite", "env.args.turns=1", "env.args.tools=true")
        ),
    ],
    ids=["appends", "rewrite asked for", "one turn", "tools append"],
)
def test_what_can_be_one_sequence_or_was_asked_to_be_several_starts(
    tmp_path: Path, family: str, words: tuple[str, ...]
) -> None:
    assert [s.stage for s in run_reader.steps(start(tmp_path, family, *words))][-1] == "rl"


# --- whole conversations that are learned -----------------------------------------------------------------------------

ASKED: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TWO = (*ASKED, Message(role="user", content="more"), Message(role="assistant", content="bye"))
OSLO = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
CALLED = (
    Message(role="user", content="weather?"),
    Message(role="assistant", content="", tool_calls=[OSLO]),
    Message(role="tool", content="rain", name="look_up", tool_call_id="call00000"),
    Message(role="assistant", content="It rains."),
)


def learned(r: Any, c: LearnedConversation, **more: Any) -> list[list[tuple[float, str]]]:
    """Runs of tokens with one weight, of each sequence, as text."""
    out: list[list[tuple[float, str]]] = []
    for ids, weight in r.conversation(c, "t", more.get("tools", ()), more.get("arguments", True)):
        edges = [0, *(np.flatnonzero(np.diff(weight)) + 1), len(ids)]
        out.append([(float(weight[a]), r.decode(ids[a:b])) for a, b in itertools.pairwise(edges)])
    return out


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("deepseek", "harmony")])
def test_what_the_template_renders_is_learned_prefix_by_prefix(name: str) -> None:
    """Before each learned turn stands what a rollout of that turn is shown; each turn ends in its one stop token."""
    r = renderer(FAMILIES[name])
    (runs,) = learned(r, LearnedConversation(TWO, (0, 1, 0, 1)))
    assert [w for w, _ in runs] == [0, 1, 0, 1]
    text = [t for _, t in runs]
    assert text[0] == r.chat(TWO[:1], generate=True)
    assert "".join(text[:3]) == r.chat(TWO[:3], generate=True)
    assert r.chat(TWO, generate=False).startswith("".join(text[:3]) + r.text(r.encode(text[3])))
    for said, content in ((text[1], "ho"), (text[3], "bye")):
        assert content in said and sum(int(i) in r.stop_ids for i in r.encode(said)) == 1


def test_a_conversation_without_a_message_is_no_completion_of_a_prompt() -> None:
    assert LearnedConversation(TWO, (0, 0, 0, 1)).after(TWO[:3])
    assert not LearnedConversation((), ()).after(())


def test_a_turn_may_weigh_and_be_masked() -> None:
    r = renderer(FAMILIES["qwen2.5"])
    (runs,) = learned(r, LearnedConversation(TWO, (0, 0.5, 0, 2)))
    assert [w for w, _ in runs] == [0, 0.5, 0, 2]
    (runs,) = learned(r, LearnedConversation(TWO, (0, 0, 0, 1)))
    assert runs == [(0, r.chat(TWO[:3], generate=True)), (1, "bye<|im_end|>")]
    with pytest.raises(DataError, match="no message of the assistant counts"):
        r.conversation(LearnedConversation(TWO, (0, 0, 0, 0)))


def test_a_text_of_which_no_character_has_a_token_is_refused() -> None:
    letters = wrap(Tokenizer(models.BPE(vocab={EOS: 0, PAD: 1, "a": 2}, merges=[])))
    with pytest.raises(DataError, match="has no token to learn"):
        Renderer(letters, [0]).conversation(LearnedConversation("\u00e9", (1.0,)))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-coder", "llama3", "mistral", "glm"])
def test_arguments_of_calls_may_be_masked(name: str) -> None:
    r = renderer(FAMILIES[name])
    (runs,) = learned(r, LearnedConversation(CALLED, (0, 1, 0, 1)), tools=[WEATHER], arguments=False)
    assert "Oslo" in runs[2][1] and "look_up" not in runs[2][1] and [w for w, _ in runs] == [0, 1, 0, 1, 0, 1]
    (whole,) = learned(r, LearnedConversation(CALLED, (0, 1, 0, 1)), tools=[WEATHER])
    assert [t for _, t in whole] == [runs[0][1], "".join(t for _, t in runs[1:4]), *(t for _, t in runs[4:])]


def test_a_template_that_drops_reasoning_needs_a_sequence_for_each_turn() -> None:
    first, last = (Message(role="assistant", content=f"<think>\nhm\n</think>\n\n{x}") for x in ("ho", "bye"))
    c = LearnedConversation((TWO[0], first, TWO[2], last), (0, 1, 0, 1))
    with pytest.raises(DataError, match=r"message 2: .*text of it is lost.*model.history=rewrite"):
        renderer(FAMILIES["qwen3"]).conversation(c)
    r = renderer(FAMILIES["qwen3"], "rewrite")
    second, alone = learned(r, c)
    assert [w for w, _ in second] == [0, 1] and [w for w, _ in alone] == [0, 1]
    assert alone[1][1].startswith("<think>\nhm") and "hm" not in second[0][1]
    r = renderer(FAMILIES["deepseek"])  # its prompt opens a thought, which its turns do not have
    (runs,) = learned(r, LearnedConversation((TWO[0], first), (0, 1)))
    assert runs == [(0, r.chat(TWO[:1], generate=True)), (1, "hm\n</think>\n\nho<｜end▁of▁sentence｜>")]


def test_a_text_is_learned_from_its_second_token() -> None:
    """Without a begin token there is nothing from which the first could be foreseen."""
    r = renderer(FAMILIES["qwen2.5"])
    assert learned(r, LearnedConversation("one<|im_end|>two", (1.0,))) == [[(0, "o"), (1, "ne<|im_end|>two<|im_end|>")]]
