"""What a chat template does with the data: messages that it leaves out, where turns begin and end, thoughts that it
opens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import posttrain
from posttrain.checks.judging.rejudge import RejudgedAnswers
from posttrain.config.run import Model
from posttrain.core.abilities import Abilities
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Message, SampledTurn, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model.stop_tokens import turn_end
from posttrain.engine.model.tiny_models import build_module, raw_bytes
from posttrain.environment.check import Mark
from posttrain.environment.rows.row_reader import PromptRow
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.environment.templates.template_lint import template_findings
from posttrain.environment.tools.tool import Toolbox, tool
from posttrain.environment.tools.tool_loop import Loop
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.episode_conversation import Conversation, Player
from posttrain.role.judges.reward_judge import JudgeMember
from posttrain.role.judging import attempt_of
from posttrain.role.rollout import Rollout
from posttrain.system.errors import ConfigError
from posttrain.verifier.format_rewards import answer_format, think_format
from tests.environment.template_parts import FAMILIES, renderer

# --- a template that does not write what it is given ------------------------------------------------------------------

_HEAD = "<|im_start|>{{ m['role'] }}\n"
_BODY = _HEAD + "{{ m['content'] }}<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(body: str = _BODY, ask: str = _ASK, where: str = "") -> str:
    """A plain template with one thing changed."""
    return f"{{% for m in messages {where} %}}{body}{{% endfor %}}{ask}"


def words_of(template: str) -> Any:
    made = raw_bytes()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def render_with(template: str) -> Renderer:
    words = words_of(template)
    return Renderer(words, [words.convert_tokens_to_ids("<|im_end|>")])


class Data:
    """An environment with these rows."""

    name = "data"

    def __init__(self, *rows: PromptRow) -> None:
        self.abilities = Abilities(rows=rows)


def said_of(template: str, *messages: dict[str, Any], follows: tuple[str, ...] = ()) -> list[str]:
    task: Any = Task(id="t", prompt=cast("Any", messages))
    found = template_findings(render_with(template), cast("Any", Data()), [task], follows)
    return [f.seen for f in found if f.warns]


SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
ASKED: dict[str, Any] = {"role": "user", "content": "a"}
SAID: dict[str, Any] = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
LONG: dict[str, Any] = {"role": "user", "content": "a long question " * 20 + "and its end"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "r", "name": "f", "tool_call_id": "call00000"}


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (chatml(where="if m['role'] != 'system'"), [SYSTEM, ASKED], "the system message 'Be brief.' (1 of 2)"),
        ("{% set m = messages[-1] %}" + _BODY + _ASK, [ASKED, SAID, ASKED], "the user message 'a' (1 of 3)"),
        ("{% set m = messages[0] %}" + _BODY + _ASK, [SYSTEM, ASKED], "the user message 'a' (2 of 2)"),
        (chatml(where="if m['role'] == 'user'"), [ASKED, SAID, ASKED], "the assistant message"),
        (
            chatml(where="if m['role'] in ('system', 'user', 'assistant')"),
            [ASKED, CALLED, RESULT],
            "message 'f' (2 of 3)",
        ),
        (chatml(_BODY.replace("m['content']", "m['content'][:100]")), [LONG], "the user message 'a long question"),
        (chatml(_BODY.replace("m['content']", "m['content'] | upper")), [LONG], "the user message"),
        (chatml(_BODY.replace("m['content']", "m['content'] | truncate(60)")), [LONG], "the user message"),
        (
            chatml(_BODY.replace("m['content']", "m['content'].split(':')[0]")),
            [{**ASKED, "content": "Q: 1 + 1"}],
            "Q: 1",
        ),
        (
            chatml("{% if loop.index0 != 1 %}" + _BODY + "{% endif %}"),
            [SYSTEM, {"role": "developer", "content": "Be kind."}, ASKED],
            "developer",
        ),
        (
            chatml("{% if m['role'] != 'system' or loop.first %}" + _BODY + "{% endif %}"),
            [SYSTEM, ASKED, SAID, SYSTEM, ASKED],
            "(4 of 5)",
        ),
        (
            chatml(_BODY.replace("m['content']", "m['content'].split('</think>')[-1] | trim")),
            [SYSTEM, ASKED, SAID, ASKED],
            "",
        ),
        (chatml(_BODY.replace("m['content']", "m['content'] | tojson")), [{**ASKED, "content": 'a "b"\nc'}], ""),
    ],
)
def test_a_message_that_the_template_leaves_out_is_named(template: str, messages: list[Any], missing: str) -> None:
    found = said_of(template, *messages)
    assert missing in found[0] if missing else found == []


@pytest.mark.parametrize(
    ("template", "differs"),
    [
        (chatml(ask=""), True),
        (chatml(ask="{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"), True),
        (chatml(ask="{% if add_generation_prompt %}<|im_start|>user\n{% endif %}"), True),
        (chatml(ask="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"), False),
        (chatml(ask="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"), False),
        ("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}", False),
    ],
)
def test_a_prompt_that_ends_before_the_policys_turn_begins_is_said(template: str, differs: bool) -> None:
    found = said_of(template, ASKED)
    assert bool(found) is differs and all("the policy would have to say itself" in f for f in found)


def test_what_follows_a_turn_and_is_left_out_is_said() -> None:
    users = chatml("{% if not loop.last or loop.first %}" + _BODY + "{% endif %}")
    assert "user message 'r0'" in said_of(users, ASKED, follows=("user",))[0]
    assert "message 'probe_tool' (2 of 3)" in said_of(chatml(), ASKED, follows=("tool",))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_warned_about(name: str) -> None:
    f = FAMILIES[name]
    r = renderer(f)
    talks = [[ASKED], [ASKED, SAID, ASKED], *([] if name in ("llama2", "gemma") else [[SYSTEM, ASKED]])]
    tasks = [Task(id="t", prompt=cast("Any", tuple(t))) for t in talks]
    follows = [role for role, why in (("user", f.user), ("tool", f.tool)) if "refused" not in why]
    assert [x.seen for x in template_findings(r, cast("Any", Data()), tasks, follows) if x.warns] == []
    assert turn_end(r.tokenizer, r.stop_ids) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "note"),
    [
        ("<|im_end|>\n", ""),
        ("<|im_start|><|im_end|>", ""),
        ("</s>\n", "writes '</s>\\n' behind a turn"),
        ("\n", "writes '\\n' behind a turn: let it end a turn with '<|im_end|>'"),
        ("", "writes '' behind a turn"),
        ("<|im_start|>", "ends a turn with '<|im_start|>'"),
    ],
)
def test_a_turn_that_ends_otherwise_than_with_a_stop_token_is_said(end: str, note: str) -> None:
    words = words_of(chatml(_HEAD + "{{ m['content'] }}" + end))
    found = turn_end(words, (words.convert_tokens_to_ids("<|im_end|>"),))
    assert (note in found[0] and len(found) == 1) if note else found == []


def test_a_stop_id_that_is_no_end_for_the_tokenizer_is_said() -> None:
    words = words_of(chatml())
    end = words.convert_tokens_to_ids("<|im_end|>")
    words.bos_token = "<|im_start|>"
    for strange in (101, words.bos_token_id):
        (note,) = turn_end(words, (end, strange))
        assert f"({strange})" in note and "eos_token_id" in note


# --- a thought that the template opens --------------------------------------------------------------------------------

OPENS = chatml(ask="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
CLOSES = chatml(
    "{% if m['role'] == 'assistant' %}<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m['content'] }}<|im_end|>\n"
    "{% else %}" + _BODY + "{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
)


@pytest.mark.parametrize("template", [OPENS, CLOSES])
@pytest.mark.parametrize(
    ("completion", "learned"),
    [
        ("4", "\n</think>\n\n4"),
        ("<think>\nwhy\n</think>\n\n4", "why\n</think>\n\n4"),
        ("<think>why</think>4", "why</think>4"),
        ("why</think>4", "why</think>4"),
    ],
)
def test_a_completion_goes_on_behind_an_opened_thought(template: str, completion: str, learned: str) -> None:
    r = render_with(template)
    prompt = (Message(role="user", content="2 + 2"),)
    before, after = r.pair(prompt, completion)
    assert before.tolist() == r.prompt(prompt).tolist() and r.decode(after) == learned + "<|im_end|>"
    assert r.decode(r.pair("2 + 2 <think>", completion)[1]) == completion + "<|im_end|>"  # text is as it was written


@pytest.mark.parametrize(("template", "how"), [(OPENS, "without any"), (CLOSES, "as the template writes it")])
def test_completions_without_a_thought_are_said(template: str, how: str) -> None:
    task = Task(id="t", prompt=(Message(role="user", content="2 + 2"),))
    rows = [PromptRow(task, said, "") for said in ("4", "x</think>4")]
    name = "template: completions without a thought"
    found = {f.name: f.seen for f in template_findings(render_with(template), cast("Any", Data(*rows)), [])}
    assert "1 of 2 completions have no </think>" in found[name] and how in found[name]
    plain = template_findings(render_with(chatml()), cast("Any", Data(*rows)), [])
    rest = template_findings(render_with(template), cast("Any", Data(*rows)), [], learns=False)
    assert name not in {f.name for f in (*plain, *rest)}


@pytest.mark.parametrize(
    ("template", "said", "reward", "paid"),
    [
        (OPENS, "why</think>4", think_format, 1.0),
        (OPENS, "<think>why</think>4", think_format, 0.0),
        (OPENS, "why", think_format, 0.0),
        (chatml(), "why</think>4", think_format, 0.0),
        (chatml(), "<think>why</think>4", think_format, 1.0),
        (OPENS, "why</think><answer>4</answer>", answer_format, 1.0),
    ],
)
def test_a_verifier_reads_the_turn_with_the_thought_that_the_prompt_opened(
    template: str, said: str, reward: Any, paid: float
) -> None:
    r = render_with(template)
    task = Task(id="t", prompt=(Message(role="user", content="2 + 2"),))
    transcript = Transcript(Sampling(stop_ids=r.stop_ids))
    transcript.see(r.prompt(task.prompt))
    transcript.show(r.encode(said + "<|im_end|>"))
    attempt = attempt_of(task, (said,), Stop.SAID, (transcript.segment(),), r.text, lambda n: n)
    assert reward(task, attempt.text).score == paid
    assert attempt.spoken_upto(len(attempt.text)) == len(said)


class Reads:
    """Keeps what it judges."""

    name = "reads"
    abilities = Abilities()

    def __init__(self) -> None:
        self.read: list[Attempt] = []

    async def play(self, task: Task, talk: Any) -> Stop:
        talk.see(task.prompt)
        return (await talk.say()).stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        self.read.append(attempt)
        return (Judged("x", 1.0, Verdict.value(0.0)),)


@pytest.mark.parametrize(("template", "opened"), [(OPENS, "<think>\n"), (chatml(), "")])
async def test_a_rollout_is_judged_with_the_thought_that_its_prompt_opened(template: str, opened: str) -> None:
    r, env = render_with(template), Reads()
    model = Model(hidden=32, layers=1, heads=2, kv_heads=2, ffn=48, context=128)
    engine = EmbeddedEngine(build_module(model, cast("Any", r.tokenizer), 0), slots=4, context=128)
    rollout = Rollout(engine, env, lambda task: RenderedDialogue(r, task), 0)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=4, stop_ids=r.stop_ids, allowed_ids=(*range(60, 120), *r.stop_ids))
    task = Task(id="t", prompt=(Message(role="user", content="2 + 2"),))
    group = await rollout.group(task, 0, RolloutRequest(groups=1, siblings=2), sampling, "s")
    assert {a.text for a in env.read} == {opened + e.text for e in group.episodes}
    judge = RejudgedAnswers(text=r.text)
    assert await judge.after(env, [group]) == () and env.read[-1].text.startswith(opened)  # type: ignore[arg-type]


class Looks(Toolbox):
    def __init__(self) -> None:
        self.words: list[str] = []

    @tool
    def look(self, word: str) -> str:
        """Look a word up."""
        self.words.append(word)
        return word


@dataclass
class Says:
    """A sampler that says one text."""

    ids: list[int]
    context: int = 512

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = np.array(self.ids, np.int32)
        return SampledTurn(said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), Stop.SAID)


@pytest.mark.parametrize(("begin", "run"), [("", []), ("perhaps</think>", ["W"])])
async def test_a_call_in_a_thought_that_the_prompt_opened_is_not_run(begin: str, run: list[str]) -> None:
    """Before the thought is closed it is what the policy considers."""
    r, box = render_with(OPENS), Looks()
    sampler: Any = Says([*r.encode(f'{begin}[look(word="W")]'), *r.stop_ids])
    player = Player(sampler, lambda task: RenderedDialogue(r, task), Sampling(max_tokens=400, stop_ids=r.stop_ids))
    talk = Conversation(player, "t", EpisodeLimits(), lambda *turn: 0)
    await Loop(EpisodeLimits(), 1).converse(talk, [Message(role="user", content="hi")], box)
    assert box.words == run


@pytest.mark.parametrize(("said", "read"), [("3?</think>4", "<think>\n3?</think>4"), ("4", "4")])
def test_a_reward_model_of_another_tokenizer_reads_the_whole_thought(said: str, read: str) -> None:
    r = render_with(chatml())
    member = JudgeMember("m", cast("Any", None), 512, cast("Any", r))
    task = Task(id="t", prompt=(Message(role="user", content="2 + 2"),))
    one = Episode(task, 0, 0, (), Stop.SAID, (), said)
    assert r.text(member.segment(one).ids).partition("<|im_start|>assistant\n")[2].startswith(read)


# --- by name ----------------------------------------------------------------------------------------------------------


def rows_file(folder: Path) -> str:
    rows = [
        {"prompt": [SYSTEM, {"role": "user", "content": f"{i} + 1"}], "answer": str(i + 1), "completion": str(i + 1)}
        for i in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return f"env.prompts={folder / 'rows.jsonl'}"


def model_folder(folder: Path, template: str) -> str:
    words = words_of(template)
    words.eos_token = "<|im_end|>"
    module = build_module(Model(hidden=32, layers=1, heads=2, kv_heads=2, ffn=48, context=256), words, 0)
    module.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [words.eos_token_id, 101]}))
    words.save_pretrained(folder / "model")
    return f"model={folder / 'model'}"


def test_check_reads_a_models_template_with_the_data(tmp_path: Path) -> None:
    model = model_folder(tmp_path, OPENS)
    report = posttrain.check("prompts", rows_file(tmp_path), "env.rewards=think_format", "env.heldout=4", model)
    seen = {f.probe: f for f in report.findings if f.probe.startswith(("model", "template"))}
    assert seen["template: messages"].mark is Mark.OK and seen["template: thought"].mark is Mark.OK
    assert "12 of 12 completions" in seen["template: completions without a thought"].detail
    assert (
        seen["model: stop tokens"].mark is Mark.WARN and "(101), by eos_token_id" in seen["model: stop tokens"].detail
    )
    with pytest.raises(ConfigError, match="name the model"):
        posttrain.check("arithmetic", "model.trust_remote_code=false")


@pytest.mark.prove
def test_a_run_says_before_its_first_step_which_message_is_missing(tmp_path: Path, capsys: Any) -> None:
    model = model_folder(tmp_path, chatml(where="if m['role'] != 'system'"))
    words = [model, rows_file(tmp_path), "env.rewards=exact", "env.heldout=4", "rl.steps=1", "rl.prompts=2"]
    posttrain.run("grpo", *words, "rl.siblings=2", "rl.sampling.max_tokens=4", out=tmp_path / "run")
    shown = " ".join(capsys.readouterr().out.split())
    assert "leaves out the system message 'Be brief.' (1 of 2)" in shown.partition("rl 1/1")[0]
    assert "(101), by eos_token_id" in shown
