"""Tools in chat requests: what the model is told, calls in its answers, streams, histories, and what is refused.

The real client talks to the real server over a model with random weights. What such a model would have to say to call
a tool comes from a sampler that says a given text, token by token, in the model's own tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from posttrain.serve.served_tools import ToolAnswer
from tests.serve.serve_parts import TEMPLATE, save_model, up

TOOLS_TEMPLATE = (
    "{% if tools %}tools: {% for t in tools %}{{ t | tojson }}{% endfor %}<eos>{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{\"name\": {{ c['function']['name'] | tojson }}, \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "</tool_call>{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
ASK: list[Any] = [{"role": "user", "content": "Rain in Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), TOOLS_TEMPLATE, context=2048)


@dataclass
class Saying:
    """A sampler that says one text, whatever it is asked, and keeps the prompts."""

    text: str
    encode: Callable[[str], Any]
    decode: Callable[[Any], str]
    context: int = 2048
    prompts: list[str] | None = None

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int, heard: Any = None) -> SampledTurn:
        if self.prompts is not None:
            self.prompts.append(self.decode(ids))
        stop = (sampling.stop_ids or (0,))[0]
        said = np.array([*self.encode(self.text).tolist(), stop], np.int32)[: sampling.max_tokens]
        if heard is not None:
            for i in range(len(said)):
                heard(said[i : i + 1], np.full(1, -0.5, np.float32))
        ended = Stop.SAID if said[-1] == stop else Stop.LENGTH
        return SampledTurn(said, np.full(len(said), -0.5, np.float32), np.zeros(len(said), np.int32), ended)


class Talk:
    """A server whose model says a given text."""

    def __init__(self, u: Any, text: str) -> None:
        renderer = u.served.renderer
        self.sampler = Saying(text, renderer.encode, renderer.decode, prompts=[])
        object.__setattr__(u.served, "sampler", self.sampler)
        self.client = u.client

    async def ask(self, **more: Any) -> Any:
        asked = {"model": "tiny", "messages": ASK, "tools": [WEATHER], **more}
        return await self.client.chat.completions.create(**asked)


async def test_a_call_is_returned_as_a_call(model: Path) -> None:
    async with up(model) as u:
        talk = Talk(u, f"I look.\n{CALL}")
        choice = (await talk.ask()).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Oslo"})
        assert '"name": "weather"' in talk.sampler.prompts[0] and "The weather of a town." in talk.sampler.prompts[0]


async def test_the_history_of_a_call_is_rendered_by_the_template(model: Path) -> None:
    async with up(model) as u:
        talk = Talk(u, f"{CALL}{CALL}")
        said = (await talk.ask()).choices[0].message
        assert said.content is None and len({c.id for c in said.tool_calls}) == 2
        results = [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in said.tool_calls]
        await talk.ask(messages=[*ASK, said, *results])  # the client's own object goes back as it came
        whole = talk.sampler.prompts[1]
        assert '<tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>' in whole
        assert whole.count("tool: rain") == 2 and whole.endswith("assistant: ")


async def test_a_stream_sends_text_at_once_and_calls_as_deltas(model: Path) -> None:
    async with up(model) as u:
        talk = Talk(u, f"I look it up.\n{CALL}")
        text, calls, finish, chunks = "", {}, None, 0
        async for chunk in await talk.ask(stream=True):
            choice = chunk.choices[0]
            chunks += bool(choice.delta.content)
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                held = calls.setdefault(part.index, {"name": "", "arguments": ""})
                held["name"] += part.function.name or ""
                held["arguments"] += part.function.arguments or ""
            finish = choice.finish_reason or finish
        assert text == "I look it up.\n" and chunks > 3 and finish == "tool_calls"
        assert calls == {0: {"name": "weather", "arguments": '{"town": "Oslo"}'}}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("It rains, 3 < 4 <tool", 200),
        ('<tool_call>{"name": "weather", "arguments": </tool_call>', 200),
        ("<think><tool_call>{}</tool_call></think>No.", 200),
        (CALL, 12),
    ],
)
async def test_what_is_no_call_stays_text(model: Path, text: str, limit: int) -> None:
    """A text without a call, a call that cannot be read, one in a thought, and one that was cut off."""
    async with up(model) as u:
        talk = Talk(u, text)
        choice = (await talk.ask(max_tokens=limit)).choices[0]
        streamed, ends = "", []
        async for chunk in await talk.ask(max_tokens=limit, stream=True):
            streamed += chunk.choices[0].delta.content or ""
            ends.append(chunk.choices[0].finish_reason)
            assert not chunk.choices[0].delta.tool_calls
        cut = limit == 12
        assert choice.finish_reason == ends[-1] == ("length" if cut else "stop") and not choice.message.tool_calls
        assert choice.message.content == streamed and (cut or streamed == text)


async def test_with_none_no_tool_is_offered_and_none_is_looked_for(model: Path) -> None:
    async with up(model) as u:
        talk = Talk(u, CALL)
        choice = (await talk.ask(tool_choice="none")).choices[0]
        assert choice.message.content == CALL and choice.finish_reason == "stop"
        assert "weather" not in talk.sampler.prompts[0]


async def test_the_model_itself_answers_with_tools_and_without(model: Path) -> None:
    async with up(model) as u:
        ask = {"model": "tiny", "messages": ASK, "max_tokens": 8, "seed": 1}
        told = await u.client.chat.completions.create(**ask, tools=[WEATHER], tool_choice="auto")
        plain = await u.client.chat.completions.create(**ask)
        assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 100 and told.choices[0].finish_reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": "required"}, "required cannot be enforced"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "a named function cannot be enforced"),
        ({"tools": [WEATHER, WEATHER]}, "two tools are called 'weather'"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [], "tool_choice": "auto"}, "without tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls=false cannot be enforced"),
        ({"functions": [{"name": "f"}]}, "name them in tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "arguments are not forced into the schema",
        ),
        (
            {
                "messages": [
                    *ASK,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "arguments are a text with a JSON object",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(model: Path, changes: Any, says: str) -> None:
    async with up(model) as u:
        with pytest.raises(openai.BadRequestError, match=says.replace("(", "\\(")):
            await Talk(u, "").ask(**changes)


async def test_a_model_whose_template_has_no_tools_says_so(tmp_path: Path) -> None:
    async with up(save_model(tmp_path, TEMPLATE, context=2048)) as u:
        with pytest.raises(openai.BadRequestError, match="chat template of tiny takes no tools") as error:
            await Talk(u, "").ask()
        assert error.value.param == "tools" and error.value.code == "no_tools"
        said = await u.client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2, tools=[])
        assert said.choices[0].finish_reason


@pytest.mark.parametrize(
    ("format", "text", "before"),
    [
        ("hermes", f"Well.{CALL}", "Well."),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Oslo"}}]', ""),
        ("llama", '{"name": "weather", "parameters": {"town": "Oslo"}}', ""),
        ("pythonic", '[weather(town="Oslo")]', ""),
        ("coder", "<tool_call><function=weather><parameter=town>Oslo</parameter></function></tool_call>", ""),
    ],
)
def test_nothing_of_a_call_is_sent_as_text_however_it_arrives(format: str, text: str, before: str) -> None:
    for size in (1, 3, len(text)):
        answer = ToolAnswer(format)
        sent = "".join(answer.add(text[i : i + size]) for i in range(0, len(text), size))
        rest, calls, finish = answer.finish("stop")
        assert (sent, rest, finish, len(calls)) == (before, "", "tool_calls", 1), size
