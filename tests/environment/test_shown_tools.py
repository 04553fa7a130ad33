"""Tools beside a demonstration stand in the prompt that is imitated, as a rollout's prompt shows them."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.config.env import Reward
from posttrain.config.run import Env
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.templates.renderer import RenderedDialogue
from posttrain.recipe.recipes import recipe
from posttrain.role.learning.demonstrations import demonstration
from posttrain.stages.data_fits_model import check_prompts
from posttrain.system.errors import DataError
from tests.environment.template_parts import FAMILIES, renderer, tokenizer

SKY = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
CALL = {"role": "assistant", "content": '<tool_call>{"name": "look"}</tool_call>'}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


def env(tmp_path: Path, rows: list[Any], **args: Any) -> PromptsEnv:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"answer": "1", **r}) for r in rows))
    paid = (Reward(function="last_integer"),)
    built = environment(Env(name="prompts", prompts=str(path), heldout=0, args=args, rewards=paid), 0)
    assert isinstance(built, PromptsEnv)
    return built


DEMONSTRATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [SKY, CALL], "tools": [LOOK]},
    "prompt and completion": {"prompt": [SKY], "completion": [CALL], "tools": [LOOK]},
}


@pytest.mark.parametrize("form", DEMONSTRATIONS)
def test_tools_of_a_demonstration_stand_in_its_prompt(tmp_path: Path, form: str) -> None:
    made = env(tmp_path, [DEMONSTRATIONS[form], {"messages": [SKY, BLUE]}])
    task = made.train.task(0)
    assert task.tools == (LOOK,) and "tools" not in task.info and made.train.task(1).tools == ()
    assert len({r.key for r in made.rows}) == 2
    render = renderer(FAMILIES["qwen2.5"])
    found = demonstration(render, task, task.prompt, CALL["content"], 4096)
    words = tokenizer(FAMILIES["qwen2.5"])
    asked = words.apply_chat_template([SKY], tools=[LOOK], add_generation_prompt=True, tokenize=False)
    assert render.decode(found.ids[: int(np.argmax(found.mask))]) == asked
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'tools' offers tools, .* and the prompt is text"):
        env(tmp_path, [{"prompt": "The sky is", "completion": "blue", "tools": [LOOK]}])
    with pytest.raises(DataError, match=r"each an object; set env\.args\.tools_column= where"):
        env(tmp_path, [{"messages": [SKY, BLUE], "tools": ["look"]}])


def test_an_environments_tools_stand_in_the_prompt_of_its_demonstrations(tmp_path: Path) -> None:
    """As a rollout sees them; a prompt of text offers none."""
    made = env(
        tmp_path, [{"messages": [SKY, BLUE]}, {"prompt": "The sky is", "completion": "blue"}], tools="calculator"
    )
    chat, text = made.train.task(0), made.train.task(1)
    assert [t["function"]["name"] for t in chat.tools] == ["calculate"] and text.tools == ()
    render = renderer(FAMILIES["qwen2.5"])
    found = demonstration(render, chat, chat.prompt, BLUE["content"], 4096)

    class Seen(Exception):
        """Ends the episode at its prompt."""

    class Listens:
        format = None

        def leave(self, state: Any) -> None: ...

        def see(self, content: Any, tools: Any = ()) -> None:
            self.ids = RenderedDialogue(render).see(content, tools)
            raise Seen

    talk: Any = Listens()
    with pytest.raises(Seen):
        asyncio.run(made.play(chat, talk))
    assert found.ids[: int(np.argmax(found.mask))].tolist() == talk.ids.tolist()


def test_they_count_where_a_demonstration_is_too_long(tmp_path: Path) -> None:
    """Before the first step, with the row's place, where it would fit without them."""
    made = env(tmp_path, [{"messages": [SKY, BLUE]}], tools="calculator")
    render, task = renderer(FAMILIES["qwen2.5"]), made.train.task(0)
    plain, whole = (
        sum(map(len, render.pair(task.prompt, BLUE["content"], task.id, t))) for t in ((), tuple(task.tools))
    )
    assert plain + 9 < whole
    run = recipe("sft")
    for context in (whole - 1, whole):
        policy: Any = SimpleNamespace(tokenizer=render.tokenizer, stop_ids=render.stop_ids, context=context)
        said = rf"rows\.jsonl:1: the prompt and its completion have {whole} tokens, and the context is {context}"
        with nullcontext() if context == whole else pytest.raises(DataError, match=said):
            check_prompts(run, made, policy, run.stages)
