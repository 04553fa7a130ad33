"""Before the first rollout: an environment of several turns and a template that rewrites them never start together."""

from __future__ import annotations

from pathlib import Path

import pytest
from template_parts import FAMILIES, tokenizer

import posttrain
from posttrain.core import reader
from posttrain.core.errors import DataError
from posttrain.core.run import Model
from posttrain.engine.tiny import build_module
from posttrain.recipe.recipes import recipe
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
    assert reader.steps(tmp_path / "run") == []


def test_so_is_one_that_knows_no_answer_of_a_tool(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="refused messages with roles"):
        start(tmp_path, "phi", "env.args.tools=true")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen2.5", ()),
        ("qwen3", ("model.history=rewrite",)),
        ("qwen3", ("env.args.turns=1",)),
        ("qwen3", ("env.args.tools=true",)),
    ],
    ids=["appends", "rewrite asked for", "one turn", "tools append"],
)
def test_what_can_be_one_sequence_or_was_asked_to_be_several_starts(
    tmp_path: Path, family: str, words: tuple[str, ...]
) -> None:
    assert [s.stage for s in reader.steps(start(tmp_path, family, *words))][-1] == "rl"
