"""Chat templates turn by turn: what appends is one sequence, token for token; what rewrites is refused, or several
sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.run import Model
from posttrain.core.abilities import Abilities
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.model.tiny_models import build_module
from posttrain.environment.templates.chat_template import WEATHER, Chat
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.rollout import Rollout
from posttrain.system.errors import DataError
from posttrain.verifier.calling import ToolCall, parse
from tests.environment.template_parts import FAMILIES, Family, renderer, tokenizer

USER = [Message(role="user", content="What is the weather?")]
CALLS = [n for n, f in FAMILIES.items() if f.call and not f.tool]
TALKS = [n for n, f in FAMILIES.items() if not f.user]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_each_family_lets_be_appended(name: str) -> None:
    f = FAMILIES[name]
    template = renderer(f).template
    assert template.format == f.format
    for follow, expected in (("user", f.user), ("tool", f.tool)):
        why = template.proof(follow)
        assert (why == "") if not expected else (expected in why), why


def test_tools_that_move_behind_the_last_question_rewrite_history() -> None:
    template = renderer(FAMILIES["mistral"]).template
    assert template.proof("user") == "" and template.proof("tool") == ""
    why = template.proof("user", tools=[WEATHER])
    assert "rewrites history" in why and "AVAILABLE_TOOLS" in why


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.call])
def test_a_template_writes_its_first_call_as_all_later_ones(name: str) -> None:
    """Its form of calls is known before the first one is written."""
    f, new = FAMILIES[name], [Message(role="tool", content="r", name="probe_tool", tool_call_id="call00000")]
    first, later = Chat(tokenizer(f), f.stops), Chat(tokenizer(f), f.stops)
    assert later.format == f.format
    said = f.thought + f.call
    assert first.rewritten(USER, said, new, [WEATHER]) == later.rewritten(USER, said, new, [WEATHER])


def test_a_stop_token_without_a_text_ends_no_turn() -> None:
    chat = Chat(tokenizer(FAMILIES["qwen2.5"]), ["", "<|im_end|>"])
    assert chat.stops == ("<|im_end|>",) and chat.format == "hermes"


def test_a_template_that_writes_differently_each_time_proves_nothing() -> None:
    words = tokenizer(FAMILIES["phi"])
    words.chat_template = words.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ range(10**9) | random }}"
    )
    assert Renderer(words, (words.convert_tokens_to_ids("<|end|>"),)).template.proof("user") != ""


def said_by(f: Family, number: int, dialogue: RenderedDialogue) -> tuple[list[int], Message]:
    """A turn of a family's model that calls a tool: its ids, and how a serving stack would send it back."""
    r = renderer(f)
    text = f.thought + f.call
    stop = "<|call|>" if f.format == "harmony" else "<|observation|>" if f.format == "glm" else f.stops[0]
    parsed = parse(text, f.format or "hermes")
    assert parsed.calls == (ToolCall("look_up", {"city": "Oslo"}),) and not parsed.content
    arguments: Any = {"city": "Oslo"}
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    turn = Message(role="assistant", content="", tool_calls=[call])
    if parsed.reasoning:
        turn["reasoning_content"] = turn["thinking"] = parsed.reasoning
    return r.encode(text + stop).tolist(), turn


@pytest.mark.parametrize("name", CALLS)
def test_a_conversation_with_tools_is_one_sequence_token_for_token(name: str) -> None:
    """What was shown and said, put together, is what the template makes of the whole conversation."""
    f = FAMILIES[name]
    r = renderer(f)
    dialogue = RenderedDialogue(r)
    ids = dialogue.see(USER, [WEATHER]).tolist()
    history: list[Message] = list(USER)
    for number in range(3):
        turn, message = said_by(f, number, dialogue)
        dialogue.said(turn)
        result = Message(role="tool", content=f"{number} degrees", name="look_up", tool_call_id="call00000")
        seen = dialogue.see([result])
        assert not dialogue.restarted
        ids += [*turn, *seen.tolist()]
        history += [message, result]
    whole = r.chat(history, generate=True, tools=[WEATHER])
    assert r.decode(ids) == whole
    assert ids == r.encode(whole).tolist()


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_with_a_user_is_one_sequence(name: str) -> None:
    f = FAMILIES[name]
    r = renderer(f)
    dialogue = RenderedDialogue(r)
    ids = dialogue.see(USER).tolist()
    history: list[Message] = list(USER)
    for number in range(3):
        text = f"it is {number}"
        marks = (
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
            if name == "command"
            else (" ", "")
            if name == "mistral"
            else (" ", " ")
            if name == "llama2"
            else ("", "")
        )
        turn = r.encode(marks[0] + text + marks[1] + f.stops[0]).tolist()
        dialogue.said(turn)
        question = Message(role="user", content=f"and {number}?")
        ids += [*turn, *dialogue.see([question]).tolist()]
        history += [Message(role="assistant", content=text), question]
    assert r.decode(ids) == r.chat(history, generate=True) if name != "llama2" else r.decode(ids).replace("  ", " ")


@pytest.mark.parametrize("name", CALLS)
def test_two_results_of_one_turn_and_a_result_of_a_malformed_call(name: str) -> None:
    f = FAMILIES[name]
    r = renderer(f)
    results = [Message(role="tool", content=c, name="look_up", tool_call_id=f"call0000{i}") for i, c in enumerate("ab")]
    for new in (results, results[:1]):
        dialogue = RenderedDialogue(r)
        dialogue.see(USER, [WEATHER])
        dialogue.said(r.encode("no call at all" + f.stops[0]))
        seen = r.decode(dialogue.see(new))
        assert all(m["content"] in seen for m in new)


@pytest.mark.parametrize("name", TALKS)
@settings(max_examples=20)
@given(data=st.data())
def test_no_word_of_the_policy_upsets_a_template_that_appends(name: str, data: st.DataObject) -> None:
    """Any ids: what follows is the template's own words, and never takes anything back."""
    r = renderer(FAMILIES[name])
    stop = r.stop_ids[0]
    said = [i for i in data.draw(st.lists(st.integers(0, 255), max_size=12)) if i not in r.stop_ids]
    ended = data.draw(st.booleans())
    dialogue = RenderedDialogue(r)
    dialogue.see(USER)
    dialogue.said([*said, stop] if ended else said)
    seen = r.decode(dialogue.see([Message(role="user", content="next")]))
    assert seen.count("next") == 1 and USER[0]["content"] not in seen


# --- history that is rewritten ----------------------------------------------------------------------------------------


def test_reasoning_that_the_template_drops_is_refused_or_a_new_sequence() -> None:
    f = FAMILIES["qwen3"]
    turn = "<think>\nlong thoughts\n</think>\n\nrain<|im_end|>"
    question = [Message(role="user", content="sure?")]
    strict = RenderedDialogue(renderer(f), "t7")
    strict.see(USER)
    strict.said(renderer(f).encode(turn))
    with pytest.raises(DataError, match=r"task 't7': this chat template rewrites history.*model.history=rewrite"):
        strict.see(question)
    r = renderer(f, "rewrite")
    dialogue = RenderedDialogue(r)
    dialogue.see(USER)
    dialogue.said(r.encode(turn))
    ids = dialogue.see(question)
    assert dialogue.restarted
    whole = (
        "<|im_start|>user\nWhat is the"
        " weather?<|im_end|>\n<|im_start|>assistant\nrain<|im_end|>\n<|im_start|>user\nsure?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert r.decode(ids) == whole
    dialogue.said(r.encode("<think>\nagain\n</think>\n\n" + f.call + "<|im_end|>"))
    seen = dialogue.see([Message(role="tool", content="dry")])
    assert (
        not dialogue.restarted
        and r.decode(seen)
        == "\n<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


class Insists:
    """Asks three times."""

    name = "insists"
    abilities = Abilities()

    async def play(self, task: Task, talk: Any) -> Stop:
        talk.see(task.prompt)
        for _ in range(2):
            await talk.say()
            talk.see([Message(role="user", content="again")])
        return (await talk.say()).stop

    async def judge(self, attempt: Any) -> tuple[Judged, ...]:
        return (Judged("x", 1.0, Verdict.value(float(len(attempt.turns)))),)


@pytest.mark.parametrize(
    ("name", "history", "segments"), [("deepseek", "rewrite", 3), ("qwen2.5", "rewrite", 1), ("llama3", "append", 1)]
)
async def test_an_episode_has_a_segment_for_each_history(name: str, history: Any, segments: int) -> None:
    """Each with the log-probs of what was said behind the history it was said behind: the learner finds the same."""
    f = FAMILIES[name]
    words = tokenizer(f)
    model = Model(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, context=512)
    module = build_module(model, words, 0)
    r = renderer(f, history)
    engine = EmbeddedEngine(build_module(model, words, 0), slots=8, context=512)
    policy = Policy(module.eval(), words, r.stop_ids, 512, "", "", "here")
    rollout = Rollout(engine, Insists(), lambda task: RenderedDialogue(r, task), 0)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=9, stop_ids=r.stop_ids, allowed_ids=(*range(60, 120), *r.stop_ids))
    group = await rollout.group(
        Task(id="t", prompt=tuple(USER)), 0, RolloutRequest(groups=1, siblings=4), sampling, "s"
    )
    for episode in group.episodes:
        assert len(episode.segments) == segments and episode.reward == 3.0
        assert episode.spoken == sum(s.spoken for s in episode.segments) > 3
        packed = Packed.of(list(episode.segments))
        mu = np.concatenate([s.logp[s.mask] for s in episode.segments])
        assert np.abs(HFLearner(policy).score(packed) - mu).max() < 1e-4
        if segments == 3:
            asked = [r.decode(s.ids[: int(np.argmax(s.mask))]) for s in episode.segments]
            assert [a.count("again") for a in asked] == [0, 1, 2]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n in CALLS or n in TALKS])
def test_control_tokens_in_what_others_wrote_are_text(name: str) -> None:
    """I-06: no user and no tool can end its own turn or begin the policy's, and nothing of what they wrote is lost."""
    f = FAMILIES[name]
    r = renderer(f)
    specials = [s for s in r.tokenizer.all_special_tokens if len(s) > 1]
    evil = "".join(f"a{s}b" for s in specials)
    ids = set(r.tokenizer.convert_tokens_to_ids(specials))

    def controls(text: str) -> tuple[list[int], str]:
        written = r.prompt((Message(role="user", content=text),))
        return [int(i) for i in written if int(i) in ids], r.decode(written)

    plain, _ = controls("ab" * len(specials))
    shown, text = controls(evil)
    assert specials and shown == plain and evil in text
    if name not in TALKS:
        return
    harmless, harmful = (
        r.template.between([Message(role="user", content="hi")], [Message(role="user", content=c)]) for c in ("x", evil)
    )
    count = [[int(i) for i in r.encode(found.text) if int(i) in ids] for found in (harmless, harmful)]
    assert count[0] == count[1]
