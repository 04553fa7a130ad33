"""Judged rows of the user's data: every kind in every form, what is wrong with them, and what they can give."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import posttrain
from posttrain.build.build_environments import check_environment
from posttrain.config.env import Reward
from posttrain.config.run import Env, Reinforce, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating, StepLabels
from posttrain.core.types import Task
from posttrain.engine.model.tiny_models import build_module
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.rows.row_reader import digest
from posttrain.environment.templates.renderer import RenderedDialogue
from posttrain.ladder.preference_rows import ODPO
from posttrain.stages.preference.judged_batches import segments
from posttrain.system.errors import ConfigError, DataError
from tests.environment.template_parts import FAMILIES, renderer, tokenizer
from tests.tiny import MODEL

SKY = {"role": "user", "content": "What colour is the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": f"It is {c}."} for c in ("blue", "green"))


def env(tmp_path: Path, rows: list[Any], **args: Any) -> PromptsEnv:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    built = environment(Env(name="prompts", prompts=str(path), heldout=0, args=args), 0)
    assert isinstance(built, PromptsEnv)
    return built


def tasks(env: PromptsEnv) -> list[Task]:
    return [r.task for r in env.rows]


def drawn(env: PromptsEnv, kind: Kind, row: int = 0, seed: int = 0) -> Judgement:
    assert env.abilities.judgements is not None
    return env.abilities.judgements.draw(tasks(env)[row], kind, np.random.default_rng(seed))


def pair(env: PromptsEnv, row: int = 0, seed: int = 0) -> Pair:
    found = drawn(env, "pair", row, seed)
    assert isinstance(found, Pair)
    return found


TEXTS = {
    "text with a prompt": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "text without": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "the cut parts no word": {"chosen": "The sky is blue.", "rejected": "The sky is black."},
}
UNSPACED = [
    ("天空是蓝色的", "天空是绿色的", "天空是"),
    ("空は青い", "空は緑だ", "空は"),
    ("天空", "天空是", "天"),
    ("ท้องฟ้าสีฟ้า", "ท้องฟ้าสีเขียว", "ท้องฟ้าสี"),
]
READ_AS = [
    ({"label": "true"}, "'label' is text ('true'), and a judgement is true or false, 1 or 0"),
    ({"label": 2}, "'label' is a number (2)"),
    ({"helpfulness": "4"}, "'helpfulness' is text ('4'), and a judgement is a number"),
    ({"completions": '["a", "b"]'}, "'completions' is text"),
]


@pytest.mark.parametrize(("beside", "says"), READ_AS)
def test_a_judgement_of_another_type_is_named(tmp_path: Path, beside: dict[str, Any], says: str) -> None:
    built: Any = env(tmp_path, [{"prompt": "p", "completion": "c", **beside}])
    check_environment(built, [Supervised(name="sft", style="completion")], Env())  # a column of another meaning
    with pytest.raises(DataError) as error:
        check_environment(built, [Preference(name="dpo")], Env())
    assert "rows.jsonl:1" in str(error.value) and says in str(error.value)


def test_as_which_of_two_kinds_rows_are_read_is_said(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "completion": "c"}
    assert not env(tmp_path, [row]).without and not env(tmp_path, [{**row, "label": True}], judged="pair").without
    for beside, other in (
        ({"label": True}, "label"),
        ({"helpfulness": 3}, "rating"),
        ({"completions": ["x", "y"]}, "ranking"),
    ):
        (line,) = env(tmp_path, [{**row, **beside}]).without
        assert "read as judged by pair" in line and f"env.args.judged={other}" in line


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Preference(name="dpo", algorithm=ODPO), "dpo.algorithm.margin=none"),
        (RewardModel(name="rm"), "rm.margin=false"),
        (Preference(name="dpo"), ""),
        (RewardModel(name="rm", margin=False), ""),
    ],
)
def test_a_pair_without_a_margin_is_named_where_margins_are_read(tmp_path: Path, stage: Any, says: str) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "margin": None if i == 3 else 1} for i in range(5)]
    built: Any = env(tmp_path, rows)
    why = pytest.raises(DataError, match=r"rows\.jsonl:4: the pair has no margin.*1 of 5.*" + says)
    with why if says else nullcontext():
        check_environment(built, [stage], Env(name="prompts"))


TALKS = {
    "messages": {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
    "conversations": {"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
    "conversations with a prompt": {"prompt": [SKY], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
    "conversations with a text": {"prompt": SKY["content"], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
    "texts after messages": {"prompt": [SKY], "chosen": "It is blue.", "rejected": "It is green."},
}


@pytest.mark.parametrize("name", TEXTS)
def test_pairs_of_text(tmp_path: Path, name: str) -> None:
    found = pair(env(tmp_path, [TEXTS[name]]))
    assert found.task.prompt == "The sky is" and found.chosen == " blue." and found.rejected in (" green.", " black.")


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), UNSPACED)
def test_texts_without_spaces_share_a_prompt(tmp_path: Path, chosen: str, rejected: str, prompt: str) -> None:
    found = pair(env(tmp_path, [{"chosen": chosen, "rejected": rejected}]))
    assert (found.task.prompt, prompt + found.chosen, prompt + found.rejected) == (prompt, chosen, rejected)


def test_letters_that_two_first_words_share_are_no_prompt(tmp_path: Path) -> None:
    for texts in (("Sure, here is how", "Sorry, I cannot"), ("Yes", "Yes, it is"), ("किताब", "कीमत"), ("12", "13")):
        with pytest.raises(DataError, match=r"share no beginning.*leave_out=drift"):
            env(tmp_path, [dict(zip(("chosen", "rejected"), texts, strict=True))])


@pytest.mark.parametrize("name", TALKS)
def test_pairs_of_messages(tmp_path: Path, name: str) -> None:
    found = pair(env(tmp_path, [TALKS[name]]))
    assert found.task.prompt == (SKY,) and (found.chosen, found.rejected) == ("It is blue.", "It is green.")


ASKED, TOLD = {"role": "assistant", "content": "By day?"}, {"role": "user", "content": "Yes."}
CALL = {"role": "assistant", "content": '<tool_call>{"name": "look"}</tool_call>'}
SEEN = {"role": "tool", "content": "blue"}
ENDS = {"chosen": [ASKED, TOLD, BLUE], "rejected": [ASKED, TOLD, GREEN]}
TURNS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "turns after the prompt": ({"prompt": [SKY], **ENDS}, (SKY, ASKED, TOLD)),
    "turns after a text": ({"prompt": SKY["content"], **ENDS}, (SKY, ASKED, TOLD)),
    "conversations that begin with the prompt": (
        {"prompt": [SKY], "chosen": [SKY, ASKED, TOLD, BLUE], "rejected": [SKY, ASKED, TOLD, GREEN]},
        (SKY, ASKED, TOLD),
    ),
    "a tool was called": (
        {"prompt": [SKY], "chosen": [CALL, SEEN, BLUE], "rejected": [CALL, SEEN, GREEN]},
        (SKY, CALL, SEEN),
    ),
    "the tool's answer stands in the prompt": (
        {"prompt": [SKY, CALL, SEEN], "chosen": [BLUE], "rejected": [GREEN]},
        (SKY, CALL, SEEN),
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_that_both_sides_share_belong_to_the_prompt(tmp_path: Path, name: str) -> None:
    """A judged completion is one message; what stands before it is the same on both sides, tools' answers too."""
    row, prompt = TURNS[name]
    found = pair(env(tmp_path, [row]))
    assert found.task.prompt == prompt and (found.chosen, found.rejected) == ("It is blue.", "It is green.")


def test_calls_before_what_was_judged_may_be_objects(tmp_path: Path) -> None:
    """As TRL has them: content null or absent, fields that a table filled with null, results with their names. The
    prompt is what the chat template makes of them."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    spread = {**call, "id": None, "function": {**call["function"], "arguments": {"at": "sky", "city": None}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [spread]}
    result = {"role": "tool", "name": "look", "content": "blue"}
    row = {"prompt": [SKY], "chosen": [asked, result, BLUE], "rejected": [asked, result, GREEN], "tools": [LOOK]}
    found = pair(env(tmp_path, [row]))
    read = ({"role": "assistant", "content": "", "tool_calls": [call]}, result)
    assert found.task.prompt == (SKY, *read) and found.chosen == "It is blue."
    render, words = renderer(FAMILIES["qwen2.5"]), tokenizer(FAMILIES["qwen2.5"])
    [chosen, _] = segments(found, render, 4096)
    told = words.apply_chat_template([SKY, *read], tools=[LOOK], add_generation_prompt=True, tokenize=False)
    assert '{"at": "sky"}' in told and render.decode(chosen.ids[: int(np.argmax(chosen.mask))]) == told
    other = {**call, "function": {**call["function"], "arguments": {"at": "sea"}}}
    sea = env(
        tmp_path, [{**row, **{k: [{**asked, "tool_calls": [other]}, *row[k][1:]] for k in ("chosen", "rejected")}}]
    )
    assert sea.key(tasks(sea)[0]) != digest(found.task.prompt, found.task.tools)


def test_a_call_may_be_what_was_judged(tmp_path: Path) -> None:
    found = pair(env(tmp_path, [{"prompt": [SKY], "chosen": [CALL], "rejected": [GREEN]}]))
    assert found.chosen == CALL["content"]


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": {}}}


@pytest.mark.parametrize("form", ["objects", "text", "from a table"])
def test_tools_of_a_row_stand_in_its_prompt_as_trl_writes_them(tmp_path: Path, form: str) -> None:
    """Tokens are those of the tokenizer's own template with `tools=`, which is what TRL calls."""
    spread = {**LOOK, "function": {**LOOK["function"], "description": None}}  # a table writes every field
    tools: Any = {"objects": [LOOK, FIND], "text": json.dumps([LOOK, FIND]), "from a table": [spread, FIND]}[form]
    found = pair(env(tmp_path, [{"prompt": [SKY], "chosen": [CALL], "rejected": [GREEN], "tools": tools}]))
    assert found.task.tools == (LOOK, FIND) and "tools" not in found.task.info
    words = tokenizer(FAMILIES["qwen2.5"])
    render = renderer(FAMILIES["qwen2.5"])
    chosen, rejected = segments(found, render, 4096)
    asked = words.apply_chat_template([SKY], tools=[LOOK, FIND], add_generation_prompt=True, tokenize=False)
    assert '"find"' in asked
    for segment, said in ((chosen, CALL), (rejected, GREEN)):
        begin = int(np.argmax(segment.mask))
        assert render.decode(segment.ids[:begin]) == asked
        assert render.decode(segment.ids[begin:]) == said["content"] + "<|im_end|>"
    rollout = RenderedDialogue(render).see(found.task.prompt, found.task.tools)
    assert render.decode(rollout) == asked


def chat_model(folder: Path, template: str) -> Path:
    """A tiny model of bytes with this chat template."""
    words = tokenizer(FAMILIES["qwen2.5"])
    words.eos_token, words.chat_template = "<|im_end|>", template
    build_module(replace(MODEL, context=768), words, 0).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.prove
def test_a_run_learns_pairs_of_calls(tmp_path: Path) -> None:
    """With a template that knows tools; one that writes none is refused before the run starts, with file and line."""
    row = {"prompt": [SKY], "chosen": [CALL], "rejected": [GREEN], "tools": [LOOK]}
    rows = [{**row, "prompt": [{**SKY, "content": f"Sky {i}?"}]} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("sft=none", "dpo.steps=2", "dpo.batch=4", f"env.prompts={tmp_path / 'rows.jsonl'}", "env.rewards=none")
    model = chat_model(tmp_path / "model", FAMILIES["qwen2.5"].template)
    done = posttrain.run("dpo", *words, "env.heldout=2", f"model={model}", out=tmp_path / "run", quiet=True)
    assert done.stages[0].agreement is not None
    silent = chat_model(tmp_path / "silent", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row offers tools, and this model's chat template writes"):
        posttrain.run("dpo", *words, "env.heldout=2", f"model={silent}", out=tmp_path / "none", quiet=True)


def test_prompts_that_offer_other_tools_are_other_prompts(tmp_path: Path) -> None:
    row = {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]}
    made = env(tmp_path, [row, {**row, "tools": [LOOK]}, {**row, "tools": [FIND]}, {**row, "tools": []}])
    keys = [made.key(t) for t in tasks(made)]
    assert len(set(keys)) == 3 and keys[0] == keys[3]
    other = env(tmp_path, [{**row, "tools": 3}], tools_column="")
    assert tasks(other)[0].tools == () and tasks(other)[0].info["tools"] == 3
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row offers tools of its own"):
        env(tmp_path, [{**row, "tools": [LOOK]}], tools="calculator")


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "different turns": (
        {"prompt": [SKY], "chosen": [CALL, SEEN, BLUE], "rejected": [ASKED, TOLD, GREEN]},
        "differ at message 1, and a judged completion is one message .* If the messages 1 were judged, end",
    ),
    "one side alone has turns": (
        {"prompt": [SKY], "chosen": [CALL, SEEN, BLUE], "rejected": [GREEN]},
        "'rejected' is one message, and another completion is a whole conversation",
    ),
    "a call without a name": (
        {"prompt": [SKY, {**CALLED, "tool_calls": [{"name": "look"}]}, SEEN], "chosen": [BLUE], "rejected": [GREEN]},
        "message 2 of 'prompt': a call is an object without a function's name; write",
    ),
    "calls of a user": (
        {"prompt": [{**SKY, "tool_calls": CALLED["tool_calls"]}], "chosen": [BLUE], "rejected": [GREEN]},
        "message 1 of 'prompt' has 'tool_calls'; messages are role and content$",
    ),
    "a name that is none": (
        {"prompt": [SKY, CALLED, {**SEEN, "name": 3}], "chosen": [BLUE], "rejected": [GREEN]},
        "message 3 of 'prompt': 'name' is a number, wanted text",
    ),
    "the tool has the last word": (
        {"prompt": [SKY], "chosen": [CALL, SEEN], "rejected": [CALL, SEEN]},
        "the last message of 'chosen' has role 'tool', and a completion is the assistant's",
    ),
    "the prompt ends with a call": (
        {"prompt": [SKY, CALL], "chosen": [SEEN, BLUE], "rejected": [SEEN, GREEN]},
        "'prompt' ends with the assistant's message, .* move it into each completion",
    ),
    "no prompt": (
        {"chosen": [ASKED, TOLD, BLUE], "rejected": [ASKED, TOLD, GREEN]},
        "begins with a message of the assistant, and there is no column 'prompt'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_turns_that_were_not_judged_alike_are_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    row, says = REFUSED[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{says}"):
        env(tmp_path, [TALKS["messages"], row])


def test_a_dialogue_in_one_text_is_cut_before_its_last_answer(tmp_path: Path) -> None:
    talk = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: The sky?\n\nAssistant:"
    found = pair(env(tmp_path, [{"chosen": f"{talk} It is blue.", "rejected": f"{talk} It is green."}]))
    assert (found.task.prompt, found.chosen, found.rejected) == (talk, " It is blue.", " It is green.")


def test_a_text_without_spaces_is_cut_where_it_differs(tmp_path: Path) -> None:
    found = pair(
        env(tmp_path, [{"chosen": "天空是蓝色", "rejected": "天空是绿色"}, {"chosen": "天空是", "rejected": "天空"}])
    )
    assert (found.task.prompt, found.chosen, found.rejected) == ("天空是", "蓝色", "绿色")


def test_what_a_pair_gives(tmp_path: Path) -> None:
    rows = [{**TEXTS["text with a prompt"], "id": "a", "margin": 2, "w": 3.5, "source": "web"}]
    built = env(tmp_path, rows, weight_column="w")
    found, abilities = pair(built), built.abilities
    assert (found.margin, found.weight, found.place) == (2.0, 3.5, f"{tmp_path}/rows.jsonl:1")
    assert found.task.id == "a" and dict(found.task.info) == {"source": "web"}
    assert abilities.judgements is not None and abilities.judgements.kinds == ("pair", "ranking", "label")
    ranking = drawn(built, "ranking")
    assert isinstance(ranking, Ranking) and ranking.completions == (" blue.", " green.")
    labels = [drawn(built, "label", seed=s) for s in range(20)]
    assert {(x.completion, x.good) for x in labels if isinstance(x, Label)} == {(" blue.", True), (" green.", False)}
    assert built.styles == ("chosen",)
    assert built.demonstrate(found.task, "chosen", np.random.default_rng(0), 0.0) == ("The sky is", " blue.")
    with pytest.raises(DataError, match=r"rows.jsonl:1: rows judged as pair give no steps: use one of pair"):
        drawn(built, "steps")
    assert set(" blue.green") <= set(abilities.alphabet or "")


RANKED = [
    {"completions": ["best", "middle", "worst"]},
    {"completions": ["middle", "worst", "best"], "scores": [0.5, -1e9, 7]},
    {"completions": ["worst", "best", "middle"], "ranks": [3, 1, 2]},
]


@pytest.mark.parametrize("row", RANKED)
def test_rankings(tmp_path: Path, row: dict[str, Any]) -> None:
    built = env(tmp_path, [{"prompt": "p", **row}])
    found = drawn(built, "ranking")
    assert isinstance(found, Ranking) and found.completions == ("best", "middle", "worst")
    assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("ranking", "pair")
    pairs = {(p.chosen, p.rejected): p.margin for p in (pair(built, seed=s) for s in range(60))}
    assert set(pairs) == {("best", "middle"), ("best", "worst"), ("middle", "worst")}
    assert pairs[("best", "middle")] == (6.5 if "scores" in row else None)
    assert built.styles == ("chosen",) and built.demonstrate(tasks(built)[0], "chosen", np.random.default_rng(0), 0)[1]


def test_which_pairs_are_made_of_a_ranking(tmp_path: Path) -> None:
    row = {"prompt": "p", **RANKED[0]}
    for rule, wanted in {"best": {("best", "middle"), ("best", "worst")}, "ends": {("best", "worst")}}.items():
        built = env(tmp_path, [row], pairs=rule)
        assert {(p.chosen, p.rejected) for p in (pair(built, seed=s) for s in range(40))} == wanted


def test_tied_scores_give_pairs_and_no_ranking(tmp_path: Path) -> None:
    built = env(tmp_path, [{"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 1, 0]}])
    assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("pair",)
    assert {(p.chosen, p.rejected) for p in (pair(built, seed=s) for s in range(40))} == {("a", "c"), ("b", "c")}


LABELLED = [
    {"prompt": "p", "completion": "good", "label": True},
    {"prompt": "p", "completion": "bad", "label": False},
    {"prompt": "q", "completion": "fine", "label": 1},
    {"prompt": "q", "completion": "poor", "label": 0},
]


def test_labels_and_the_pairs_made_of_them(tmp_path: Path) -> None:
    built = env(tmp_path, LABELLED)
    found = drawn(built, "label", 1)
    assert isinstance(found, Label) and (found.completion, found.good) == ("bad", False)
    assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("label", "pair")
    assert [(pair(built, i).chosen, pair(built, i).rejected) for i in range(4)] == [("good", "bad")] * 2 + [
        ("fine", "poor")
    ] * 2
    assert pair(built).place == f"{tmp_path}/rows.jsonl:1 and {tmp_path}/rows.jsonl:2" and pair(built).margin is None
    texts = [built.demonstrate(t, "chosen", np.random.default_rng(0), 0)[1] for t in tasks(built)]
    assert texts == ["good", "good", "fine", "fine"]


def test_labels_of_which_no_pair_can_be_made(tmp_path: Path) -> None:
    rows = [*LABELLED, {"prompt": "r", "completion": "alone", "label": False}]
    built = env(tmp_path, rows)
    assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("label",)
    assert built.styles == ()
    built = env(tmp_path, rows, leave_out="unpaired")
    assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("label", "pair")
    assert len(built.rows) == 4 and built.without == (
        "left out 1 of 5 rows as unpaired (no pair can be made of its prompt, because nothing there was judged better"
        f" than anything else): {tmp_path}/rows.jsonl:5",
    )
    with pytest.raises(DataError, match="no pair can be made"):
        env(tmp_path, rows[-1:], leave_out="unpaired")


def test_ratings(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a", "ratings": {"helpfulness": 4, "verbosity": 1.5}},
        {"prompt": "p", "completion": "b", "ratings": {"helpfulness": 1, "verbosity": 3}},
    ]
    flat = [{"prompt": r["prompt"], "completion": r["completion"], **r["ratings"]} for r in rows]
    for given_rows in (rows, flat):
        built = env(tmp_path, given_rows)
        found = drawn(built, "rating", 1)
        assert isinstance(found, Rating) and found.ratings == {"helpfulness": 1.0, "verbosity": 3.0}
        assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("rating",)
        built = env(tmp_path, given_rows, attribute="verbosity")
        assert (pair(built).chosen, pair(built).margin) == ("b", 1.5)
        assert built.abilities.judgements is not None and built.abilities.judgements.kinds == ("rating", "pair")
        with pytest.raises(DataError, match=r"helpfulness, verbosity; say by which .* env.args.attribute"):
            env(tmp_path, given_rows, leave_out="unpaired")
    own = [{"prompt": "p", "completion": "a", "taste": 1}, {"prompt": "p", "completion": "b", "taste": 2}]
    assert pair(env(tmp_path, own, attributes="taste")).chosen == "b"


def test_steps(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]},
        {"prompt": "q", "completions": ["one"], "labels": [0]},
    ]
    found = drawn(env(tmp_path, rows), "steps")
    assert isinstance(found, StepLabels) and (found.steps, found.labels) == (("one", "two"), (1, -1))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* not known whether 0 is neutral or wrong"):
        env(tmp_path, rows[1:])
    wrong = drawn(env(tmp_path, rows[1:], zero_label="wrong"), "steps")
    assert isinstance(wrong, StepLabels) and wrong.labels == (-1,)
    assert env(tmp_path, rows[1:], zero_label="neutral").styles == ("chosen",)


def test_several_pairs_of_one_prompt_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 10}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    built = environment(Env(name="prompts", prompts=str(path), heldout=2), 0)
    held = {t.prompt for t in built.heldout}
    assert len(held) == 2 and len(built.heldout) == 8
    assert not held & {built.train.task(i).prompt for i in range(built.train.count or 0)}


def test_the_environment_judges_nothing_itself(tmp_path: Path) -> None:
    built = env(tmp_path, [TEXTS["text with a prompt"]])
    assert not built.abilities.judges
    world: Any = built
    check_environment(world, [Supervised(name="sft", style="chosen")], Env())
    with pytest.raises(ConfigError, match="rl needs verdicts .* Add env.rewards"):
        check_environment(world, [Reinforce(name="rl")], Env())
    check_environment(world, [Reinforce(name="rl")], Env(rewards=(Reward(function="model:judge"),)))
    bare: Any = env(tmp_path, [TEXTS["text with a prompt"]], judged="none")
    with pytest.raises(ConfigError, match="no judged completions"):
        check_environment(bare, [Preference(name="dpo")], Env())


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"q": "p", "yes": "a", "no": "b", "by": 1}]
    args = {"prompt_column": "q", "chosen_column": "yes", "rejected_column": "no", "margin_column": "by"}
    assert pair(env(tmp_path, rows, **args)).margin == 1.0


P = {"prompt": "p"}
WRONG = [
    ([{**P, "chosen": "a"}], "rows.jsonl:1: there is 'chosen' and no 'rejected'"),
    ([{**P, "chosen": "a", "rejected": ""}], "rows.jsonl:1: 'rejected' is empty"),
    ([{**P, "chosen": "a", "rejected": " \n"}], "'rejected' is empty"),
    ([{**P, "chosen": "a", "rejected": "a"}], "same text.*leave_out=identical"),
    ([{**P, "chosen": "a", "rejected": [BLUE]}], "one completion is text, and 'rejected' is not"),
    ([{**P, "chosen": 1, "rejected": 2}], "'chosen' is a number, wanted text or a list of messages"),
    ([{**P, "chosen": {"a": 1}, "rejected": []}], "'chosen' is an object"),
    ([{"chosen": [BLUE], "rejected": [GREEN]}], "no column 'prompt'.*is one message"),
    ([{"chosen": [SKY], "rejected": [SKY, GREEN]}], "last message of 'chosen' has role 'user'"),
    ([{"chosen": [SKY, BLUE, GREEN], "rejected": [SKY, GREEN]}], "'chosen' ends with two messages of the assistant"),
    ([{"prompt": [SKY], "chosen": [BLUE], "rejected": [SKY, GREEN]}], "'chosen' is one message, and another"),
    ([{"prompt": [SKY, BLUE], "chosen": "a", "rejected": "b"}], "'prompt' ends with the assistant's message"),
    ([{"chosen": [SKY, BLUE], "rejected": [{**SKY, "content": "x"}, GREEN]}], "differ at message 1.*leave_out=drift"),
    ([{"prompt": "x", "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}], "no message of the user in 'chosen'"),
    ([{"prompt": [BLUE | {"role": "user"}], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}], "differ at message 1"),
    ([{"chosen": "ab", "rejected": "cd"}], "share no beginning.*leave_out=drift"),
    ([{"chosen": "ab", "rejected": "ab"}], "same text, and there is no prompt"),
    ([{**P, "chosen": "a", "rejected": "\ud800"}], "half of a surrogate pair"),
    ([{"chosen": [{"role": "bot", "content": "x"}], "rejected": "b", **P}], "write all as text|has role 'bot'"),
    ([{"chosen": [SKY, {"role": "bot", "content": "x"}], "rejected": [SKY, BLUE]}], "chat templates do not know"),
    ([{**P, "chosen": "a", "rejected": "b", "margin": float("nan")}], "'margin' is nan"),
    ([{**P, "chosen": "a", "rejected": "b", "margin": 10**400}], "'margin' is a whole number of 1329 bits"),
    ([{**P, "chosen": "a", "rejected": "b", "margin": -1}], "'margin' is -1, below 0"),
    ([{**P, "chosen": "a", "rejected": "b", "margin": True}], "'margin' is true or false, wanted a number"),
    (
        [{**P, "chosen": "a", "rejected": "b", "tools": [{"name": "f"}]}],
        "'tools' offers tools, .* write it as messages",
    ),
    ([{**P, "chosen": "a", "rejected": "b", "tools": "look"}], "'tools' is text that is no JSON"),
    ([{**P, "chosen": "a", "rejected": "b", "tools": ["look"]}], "'tools' is a list, wanted a list of tools, each an"),
    ([{**P, "chosen": "a", "rejected": "b", "tools": [{"function": {}}]}], r"'tools'\[0\] has no name"),
    ([{**P, "completions": ["a"]}], "has 1 completions"),
    ([{**P, "completions": ["a", "b"], "scores": [1]}], "'scores' has 1 entries for 2 completions"),
    ([{**P, "completions": ["a", "b"], "scores": [1, None]}], r"'scores\[1\]' is missing"),
    ([{**P, "completions": ["a", "b"], "scores": [1, 1]}], "all of 'scores' are 1.*leave_out=unpaired"),
    ([{**P, "completions": ["a", "a"], "scores": [1, 2]}], "same text, judged differently"),
    ([{**P, "completions": ["a", "b"], "scores": [1, 2], "ranks": [2, 1]}], "give one of them"),
    ([{**P, "completions": ["a"] * 2000}], "at most 1024"),
    ([{**P, "completion": "a", "label": True, "ratings": {"x": 1}}], "say which, env.args.judged=label or rating"),
    ([{**P, "completion": "a", "ratings": {"x": "high"}}], "'x' is text, wanted a number"),
    ([{**P, "completion": "a", "ratings": {"x": float("inf")}}], "'x' is inf"),
    ([{**P, "completion": "a", "ratings": {}}], "no ratings"),
    ([{**P, "completion": "a", "ratings": [1]}], "no ratings"),
    (
        [{**P, "completion": "a", "ratings": {"x": 1}}, {**P, "completion": "a", "ratings": {"y": 1}}],
        "rows.jsonl:2: the ratings are y, and at .*rows.jsonl:1 they are x",
    ),
    ([{**P, "completions": [], "labels": []}], "wanted at least one step"),
    ([{**P, "completions": ["a"], "labels": [2]}], r"'labels\[0\]' is a number \(2\)"),
    ([{**P, "completions": ["a"], "labels": [1.0]}], r"'labels\[0\]' is a number \(1.0\)"),
    ([{**P, "completions": ["a"], "labels": [True, True]}], "2 entries for 1 completions"),
    ([{**P, "completions": [""], "labels": [True]}], "wanted the text of a step"),
    ([{"completions": ["a"], "labels": [True]}], "no column 'prompt'"),
    (
        [{**P, "chosen": "a", "rejected": "b"}, {**P, "completion": "a", "label": True}],
        "rows.jsonl:2: the row is judged as label, and the one at .*rows.jsonl:1 is judged as pair",
    ),
    ([{**P, "chosen": "a", "rejected": "b"}, P], "rows.jsonl:2: the row is not judged"),
]


@pytest.mark.parametrize(("rows", "message"), WRONG)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        env(tmp_path, rows)
    assert str(error.value).startswith(str(tmp_path / "rows.jsonl"))


def test_keys_that_are_given_twice(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt":"p","chosen":"a","rejected":"b","chosen":"c"}')
    with pytest.raises(DataError, match=r"rows.jsonl:1: key 'chosen' is given twice"):
        environment(Env(name="prompts", prompts=str(tmp_path / "rows.jsonl")), 0)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("judged", "pairs", "'pair'"), ("pairs", "bset", "'best'"), ("leave_out", "identicl", "'identical'")],
)
def test_settings_that_do_not_exist(tmp_path: Path, name: str, value: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"env.args.{name}='{value}': did you mean {near}"):
        env(tmp_path, [TEXTS["text with a prompt"]], **{name: value})


def test_rows_are_left_out_by_what_is_wrong_with_them_and_counted(tmp_path: Path) -> None:
    rows = [{**P, "chosen": f"a{i}", "rejected": f"a{i}" if i % 2 else "b"} for i in range(10)]
    built = env(
        tmp_path,
        [*rows, {"chosen": [SKY, BLUE], "rejected": [GREEN | {"role": "user"}, GREEN]}],
        leave_out="identical, drift",
    )
    at = [f"{tmp_path}/rows.jsonl:{i}" for i in (2, 4, 6, 11)]
    assert len(built.rows) == 5 and [w.partition("): ")[2] for w in built.without] == [
        f"{', '.join(at[:3])} and 2 more",
        at[3],
    ]
    assert built.without[0].startswith("left out 5 of 11 rows as identical")


texts = st.text(max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), v, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "bot"]), "content": texts}), max_size=3
)
columns = st.sampled_from(
    [
        "prompt",
        "chosen",
        "rejected",
        "completion",
        "completions",
        "scores",
        "ranks",
        "label",
        "labels",
        "ratings",
        "margin",
        "helpfulness",
        "id",
        "answer",
        "messages",
    ]
)
any_row = st.dictionaries(columns, values | messages | st.lists(texts, max_size=3), max_size=7)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(rows=st.lists(any_row, min_size=1, max_size=4))
def test_any_rows_are_read_whole_or_refused_in_a_sentence(tmp_path: Path, rows: list[Any]) -> None:
    try:
        built = env(tmp_path, rows)
    except (DataError, ConfigError) as error:
        assert str(error).startswith(str(tmp_path))
        return
    assert len(built.rows) == len(rows)
    if built.abilities.judgements is None:
        return
    for kind in built.abilities.judgements.kinds:
        for i in range(len(rows)):
            found = drawn(built, kind, i)
            assert found.task is tasks(built)[i]
            if isinstance(found, Pair):
                assert found.chosen != found.rejected and found.chosen.strip() and found.rejected.strip()


sides = st.lists(st.sampled_from(["a", "b ", " c", "\n", "dd"]), max_size=8).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shared=sides, one=sides, other=sides)
def test_the_sides_of_a_whole_text_are_what_was_given(tmp_path: Path, shared: str, one: str, other: str) -> None:
    row = {"chosen": shared + one, "rejected": shared + other}
    try:
        found = pair(env(tmp_path, [row]))
    except DataError:
        return
    assert isinstance(found.task.prompt, str)
    assert found.task.prompt + found.chosen == row["chosen"]
    assert found.task.prompt + found.rejected == row["rejected"]
