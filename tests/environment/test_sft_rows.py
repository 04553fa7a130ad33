"""SFT on rows of one's own: every usual form runs without a reward, and is measured by its held-out loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.api.session import final_scalars, heldout_notes, unread_notes
from posttrain.build.request.run_request import RunOptions, requested
from posttrain.cli import main
from posttrain.config.run import Run, Supervised
from posttrain.diagnose.learning_verdict import learned
from posttrain.diagnose.run_outcome import read_outcome
from posttrain.engine.model.tiny_models import build_module
from posttrain.environment.judged.judged_rows import read_row
from posttrain.environment.make import environment
from posttrain.environment.rows.columns import JudgedColumns
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.record.external_access import asks
from posttrain.report.plots import plot
from posttrain.system.errors import ConfigError, DataError
from tests.engine.engine_parts import tiny
from tests.engine.run_parts import play, refused
from tests.environment.template_parts import FAMILIES, tokenizer


def pairs(path: Path) -> Path:
    rows = [{"prompt": f"say {i}: ", "chosen": f"{i}.", "rejected": f"{i + 1}!"} for i in range(30)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def turn(speaker: str, text: str) -> dict[str, Any]:
    return {"from": speaker, "value": text}


FORMS: dict[str, Any] = {
    "messages": lambda i: {"messages": [user(f"say {i}"), bot(f"{i}"), user("more"), bot(f"{i + 1}")]},
    "text": lambda i: {"text": f"{i} is before {i + 1}."},
    "prompt and completion": lambda i: {"prompt": f"say {i}: ", "completion": f"{i}"},
    "message lists": lambda i: {"prompt": [user(f"say {i}")], "completion": [bot(f"{i}")]},
    "sharegpt": lambda i: {"conversations": [turn("human", f"say {i}"), turn("gpt", f"{i}")]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is there already, with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "m"
    words = tokenizer(FAMILIES["qwen2.5"])
    words.eos_token = "<|im_end|>"
    build_module(tiny("qwen3"), words, 0).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def rows(path: Path, form: str, count: int = 30) -> Path:
    path.write_text("".join(f"{json.dumps(FORMS[form](i))}\n" for i in range(count)))
    return path


SHORT = ("sft.batch=8", "sft.steps=6", "sft.eval_every=3", "sft.optimizer.warmup=0")


@pytest.mark.parametrize("form", [pytest.param(x, marks=[pytest.mark.prove] * (x != "messages")) for x in FORMS])
def test_every_form_runs_without_a_reward_and_is_measured(
    form: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "mine.jsonl", form)
    folder = play(tmp_path / "run", "sft", f"model={model}", f"env.prompts={data}", *SHORT)
    said = capsys.readouterr().out
    result = posttrain.load(folder)
    of = read_outcome(folder)
    (stage,) = of.stages
    assert result.loss is not None and result.accuracy is None and result.loss == stage.heldout_losses[-1][1]
    assert [i for i, _ in stage.heldout_losses] == [0, 3, 6] and stage.loss is not None and stage.loss.high < 0
    assert learned(of).word == "learned" and "held-out loss" in learned(of).text
    assert [s.index for s in run_reader.steps(folder) if "heldout/loss" in s.gauges] == [3]
    measured = posttrain.evaluate(folder).measures
    assert measured["heldout/loss"].mean == pytest.approx(result.loss, rel=1e-6)
    assert f"held-out loss {result.loss:.3f}, perplexity" in capsys.readouterr().out
    assert "accuracy" not in said and "perplexity" in said and "env.rewards: none, because" in said
    assert find(folder, "best").metric == pytest.approx(-result.loss) and len(scan(folder)) >= 1
    plot(folder, out=tmp_path / "x.svg")
    assert "held-out" in (folder / "summary.md").read_text() and "heldout/loss" in (tmp_path / "x.svg").read_text()


@pytest.mark.prove
@pytest.mark.parametrize("form", ["messages", "message lists"])
def test_a_model_that_the_run_builds_learns_chats(form: str, tmp_path: Path) -> None:
    """Its tokens are bytes, and it has a plain template, which goes with an export."""
    play(tmp_path / "run", "sft", f"env.prompts={rows(tmp_path / 'mine.jsonl', form)}", *SHORT)
    (stage,) = read_outcome(tmp_path / "run").stages
    assert stage.loss is not None and stage.loss.high < 0
    posttrain.export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text().startswith("{% for m in messages %}")


@pytest.mark.prove
def test_two_such_runs_are_compared_by_their_loss(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("sft", f"model={model}", f"env.prompts={rows(tmp_path / 'm.jsonl', 'messages')}", *SHORT)
    play(tmp_path / "a", *words)
    play(tmp_path / "b", *words, "sft.optimizer.lr=1e-5")
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    data = f"env.prompts={pairs(tmp_path / 'p.jsonl')}"
    for name, lr in (("c", "1e-3"), ("d", "1e-9")):
        play(tmp_path / name, "dpo", data, "dpo.steps=9", "dpo.batch=8", f"dpo.optimizer.lr={lr}")
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "c"), str(tmp_path / "d")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "held-out share of pairs ordered as judged" in told
    assert "held-out loss of each run" in said and "B is worse than A" in said and "accuracy" not in said


@pytest.mark.prove
def test_a_killed_run_measures_as_if_it_had_not_been(model: Path, tmp_path: Path) -> None:
    words = (f"model={model}", f"env.prompts={rows(tmp_path / 'm.jsonl', 'messages')}", *SHORT)
    posttrain.run("sft", *words, "sft.checkpoint_every=2", "sft.patience=9", out=tmp_path / "a", quiet=True)
    whole = run_reader.record_digest(tmp_path / "a"), run_reader.losses(tmp_path / "a", "sft")
    begin = next(c.folder for c in scan(tmp_path / "a") if c.state["running"])
    posttrain.run(resume=begin, quiet=True)
    assert (run_reader.record_digest(tmp_path / "a"), run_reader.losses(tmp_path / "a", "sft")) == whole


@pytest.mark.prove
def test_passes_decide_the_steps_and_too_many_are_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"env.prompts={rows(tmp_path / 'm.jsonl', 'text')}"
    words = ("sft", f"model={model}", data, "sft.batch=8", "sft.eval=false")
    play(tmp_path / "a", *words, "sft.epochs=1.5")
    said = capsys.readouterr().out
    assert run_reader.run_file(tmp_path / "a").run.stages[0].steps == math.ceil(1.5 * 24 / 8) and "warning" not in said
    assert "5 steps, 1.67 passes over 24 rows" in said
    play(tmp_path / "b", *words, "sft.steps=70")
    assert "warning: sft takes 23.3 passes over 24 rows: it will know them by heart" in capsys.readouterr().out
    said = refused(capsys, "run", *words, "sft.steps=3", "sft.epochs=1", code=2)
    assert "two lengths; keep one" in said
    falls = ("sft.epochs=1.5", "sft.optimizer.schedule=cosine", "sft.optimizer.warmup=0")
    play(tmp_path / "falls", *words, *falls)
    stage = run_reader.run_file(tmp_path / "falls").run.stages[0]
    assert stage.optimizer.horizon == stage.steps
    said = refused(capsys, "run", *words, *falls, "sft.optimizer.horizon=2", "sft.optimizer.floor=0", code=2)
    assert f"takes {stage.steps} optimizer steps" in said
    assert "without end" in refused(capsys, "run", "arithmetic", "sft.epochs=1", code=2)


@pytest.mark.prove
def test_it_stops_where_the_held_out_loss_no_longer_falls(model: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "m.jsonl", "text", 8)
    words = ("sft.batch=8", "sft.steps=400", "sft.eval_every=10", "sft.patience=2", "sft.optimizer.lr=2e-2")
    result = posttrain.run("sft", f"model={model}", f"env.prompts={data}", *words, out=tmp_path / "a", quiet=True)
    (stage,) = result.stages
    assert stage.steps < 400 and "evaluations since were not lower" in stage.why
    curve = dict(read_outcome(tmp_path / "a").stages[0].heldout_losses)
    best = min(curve, key=lambda i: curve[i])
    assert best == stage.steps - 20 and f"step {best} " in stage.why
    with pytest.raises(ConfigError, match="needs sft.eval_every"):
        Supervised(name="sft", style="completion", patience=2)


@pytest.mark.prove
def test_a_folder_that_does_not_say_which_turns_learned_the_last(model: Path, tmp_path: Path) -> None:
    words = (f"model={model}", f"env.prompts={rows(tmp_path / 'm.jsonl', 'messages')}", "sft.steps=1", "sft.batch=2")
    posttrain.run("sft", *words, out=tmp_path / "a", quiet=True)
    stage: Any = run_reader.run_file(tmp_path / "a").run.stages[0]
    assert stage.turns == "all"
    data = json.loads((tmp_path / "a" / "run.json").read_text())
    del data["run"]["stages"][0]["turns"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(data))
    stage = run_reader.run_file(tmp_path / "a").run.stages[0]
    assert stage.turns == "last"


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_pairs_need_no_reward(name: str, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(f'{{"prompt": "say {i}: ", "chosen": "{i}", "rejected": "no"}}\n' for i in range(20)))
    words = (f"model={model}", f"env.prompts={data}", f"{name}.steps=2", f"{name}.batch=4", f"{name}.eval_every=0")
    result = posttrain.run(name, *words, out=tmp_path / "a", quiet=True)
    assert result.accuracy is None and result.stages[-1].agreement is not None


def test_where_a_reward_is_missing_the_line_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"env.prompts={rows(tmp_path / 'm.jsonl', 'prompt and completion')}"
    for words in (
        *(("grpo", data), ("grpo", data, "env.rewards=none")),
        *(("verifiable", data), ("verifiable", data, "env.rewards=none")),
    ):
        assert "Add env.rewards=mine.py:reward" in refused(capsys, "run", *words, f"model={model}", code=2)
    text = f"env.prompts={rows(tmp_path / 't.jsonl', 'text')}"
    said = refused(capsys, "run", "sft", text, f"model={model}", "env.rewards=exact", code=4)
    assert "t.jsonl:1: the row is a text, to which nothing can be answered" in said
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    said = refused(capsys, "run", "sft", f"env.prompts={pairs}", f"model={model}", code=2)
    assert "Set sft.style=chosen, or leave the stage out" in said


def in_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "words", "columns"),
    [
        ({"instruction": "a", "input": "", "output": "b", "n": 1}, ["env.args.prompt_column=instruction"], "output"),
        ({"question": "a", "answer": "b"}, ["env.args.prompt_column=question"], "answer"),
        ({"prompt": [user("a")], "response": "b", "source": "c"}, [], "response, source"),
        ({"prompt": "a", "n": 1}, [], ""),
    ],
)
def test_where_completions_have_another_name_their_setting_and_the_columns_are_said(
    row: Any, words: list[str], columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"env.prompts={in_lines(tmp_path / 'm.jsonl', [row])}"
    said = refused(capsys, "run", "sft", data, "env.rewards=none", *words, code=2)
    assert said.strip().endswith(f"(the rows have also: {columns})" if columns else "sft=none")
    assert ("env.args.completion_column=COLUMN" in said) == bool(columns)


@pytest.mark.parametrize(
    ("row", "words", "columns"),
    [
        ({"prompt": "a", "input": "x", "completion": "b", "source": "web", "id": "7"}, [], "input"),
        ({"prompt": "a", "system": "s", "context": "c", "completion": "b"}, [], "context, system"),
        ({"prompt": "a", "input": "", "context": 3, "completion": "b"}, [], ""),
        ({"prompt": "sum: a x", "input": "x", "completion": "b"}, [], ""),
        ({"prompt": "a", "input": "b"}, ["env.args.completion_column=input"], ""),
        ({"messages": [user("a"), bot("b")], "context": "c"}, [], ""),
        ({"text": "a", "input": "x"}, [], ""),
    ],
)
def test_text_that_usually_is_a_part_of_the_prompt_and_is_not_read_is_told(
    row: Any, words: list[str], columns: str, tmp_path: Path
) -> None:
    data = f"env.prompts={in_lines(tmp_path / 'm.jsonl', [row])}"
    with requested("sft", [data, "env.rewards=none", "env.heldout=0", *words], RunOptions()) as asked:
        notes = unread_notes(asked.run, {"sft": asked.environment})
    assert len(notes) == bool(columns)
    assert (
        not columns or f"text of these columns: {columns}. What the model shall read must stand in 'prompt'" in notes[0]
    )


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward_model"])
def test_a_batch_of_more_rows_than_there_are_is_one_pass(stage: str, tmp_path: Path) -> None:
    data = rows(tmp_path / "m.jsonl", "messages") if stage == "sft" else pairs(tmp_path / "p.jsonl")
    words = [f"env.prompts={data}", f"{stage}.epochs=2"]
    for more, taken in (([], (24, 2)), ([f"{stage}.batch=48"], (48, 1)), ([f"{stage}.batch=8"], (8, 6))):
        with requested(stage, [*words, *more], RunOptions()) as asked:
            s: Any = asked.run.stage(stage)
            assert (s.batch, s.steps) == taken
            assert (f"{stage}.batch: 24, because a pass has 24 rows" in asked.notes) == (not more)


def test_of_two_distinct_prompts_one_is_held_out_and_that_is_said(tmp_path: Path) -> None:
    data = in_lines(tmp_path / "m.jsonl", [{"prompt": f"{i % 2}", "completion": f"{i}"} for i in range(80)])
    with requested("sft", [f"env.prompts={data}", "env.rewards=none"], RunOptions()) as asked:
        (note,) = heldout_notes(asked.run, {"sft": asked.environment})
    assert "40 of 80 rows are held out" in note and "one distinct prompt in 5" in note and "but at least one" in note


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [user("a"), bot("b", weight=-1)]}, "'weight' is -1, wanted a number"),
        ({"messages": [{**user("a"), "weight": 1}, bot("b")]}, "only the assistant's messages are learned"),
        ({"messages": [user("a"), bot("b", weight="x")]}, "'weight' is 'x'"),
        ({"conversations": [turn("humam", "a"), turn("gpt", "b")]}, "role 'humam', which chat templates do not know"),
        ({"conversations": [turn("human", "a"), {"from": "gpt"}]}, "'value' is missing"),
        ({"prompt": "a", "completion": [bot("b"), user("c"), bot("d")]}, "write the prompt as messages too"),
        ({"prompt": [user("a")], "completion": [bot("b"), user("c")]}, "it must be the assistant's"),
        ({"text": "  "}, "no column 'prompt'"),
        (
            {"messages": [user("a"), bot("b")], "completion": "c"},
            "ends with an assistant's message, and 'completion' is another",
        ),
        ({"messages": [user("a"), bot("b")], "tools": 100_000 * "["}, "'tools' is text that is no JSON"),
    ],
)
def test_a_bad_row_is_refused_in_a_sentence(row: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_row("x:1", row, JudgedColumns())


def test_what_counts_of_a_row() -> None:
    """The assistant's messages of a conversation; of a prompt and a completion, the completion's."""

    def counts(row: Any) -> Any:
        found: Any = read_row("x:1", row, JudgedColumns())
        return found.conversation.weights

    assert counts({"messages": [user("a"), bot("b"), user("c"), bot("d", weight=0.5)]}) == (0, 1, 0, 0.5)
    assert counts({"messages": [user("a"), bot("b"), user("c")]}) == (0, 1, 0)
    before = [user("a"), bot("b"), user("c")]
    assert counts({"prompt": before, "completion": [bot("d"), user("e"), bot("f")]}) == (0, 0, 0, 1, 0, 1)
    assert counts({"prompt": before, "completion": "d"}) == (0, 0, 0, 1)


@pytest.mark.prove
def test_data_sets_are_mixed_by_weight(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever their sizes, each has its share of every step, and holds rows out; a folder goes on with the same."""
    few, many = rows(tmp_path / "few.jsonl", "messages", 10), rows(tmp_path / "many.jsonl", "text", 40)
    words = ("sft", f"model={model}", f"env.prompts={few}", f"env.mix={many}:3", "sft.batch=8", "sft.epochs=1")
    play(tmp_path / "a", *words)
    said = capsys.readouterr().out
    run = run_reader.run_file(tmp_path / "a").run
    env: Any = environment(run.env, run.seed)
    drawn = [env.train.task(i) for i in range(32)]
    assert all(sum(bool(t.prompt) for t in drawn[i : i + 8]) == 2 for i in range(0, 32, 8))
    assert {bool(t.prompt) for t in env.heldout} == {True, False} and env.train.visit(31) == 0
    asked = [env.train.task(i).id for i in range(64) if env.train.task(i).prompt]
    assert len(set(asked[:8])) == 8 and set(asked[8:]) == set(asked[:8]) and env.train.visit(63) == 1
    assert not {t.id for t in env.heldout} & {*asked}
    count = len({env.train.task(i).id for i in range(400)})
    assert run.stages[0].steps == math.ceil(count / 8) and "passes over 8 rows" in said
    assert {name for a in asks(run) for name in a.reads} >= {str(few), str(many)}
    for wrong, why in ((f"env.mix={many}:0", "weight > 0"), (f"env.mix={many}", "")):
        assert why in refused(capsys, "run", "sft", f"env.prompts={few}", wrong, code=2)
    assert "give env.prompts" in refused(capsys, "run", "sft", f"env.mix={many}:1", code=2)


@pytest.mark.prove
def test_every_stage_that_imitates_is_measured(tmp_path: Path) -> None:
    """Pretraining, cold start, and the demonstrations beside rejection sampling."""
    base = recipe("reject")
    assert isinstance(base, Run)
    words = (
        "env.heldout=6",
        "evaluation.samples=1",
        "sft.steps=2",
        "sft.batch=8",
        "reject.steps=2",
        "reject.prompts=4",
    )
    more = ("reject.siblings=2", "reject.batch=8", "reject.general=0.5", "reject.style=answer", "reject.eval_every=1")
    result = posttrain.run("reject", *words, *more, out=tmp_path / "a", quiet=True)
    assert all(s.loss is not None and s.loss_before is not None and s.accuracy is not None for s in result.stages)
    assert "held-out loss" not in learned(read_outcome(tmp_path / "a")).text  # it goes by what judges answers


@pytest.mark.prove
@pytest.mark.parametrize("stage", ["dpo", "reward_model"])
def test_pairs_are_learned_in_passes_and_their_held_out_order_is_seen(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (stage, f"env.prompts={pairs(tmp_path / 'p.jsonl')}", f"{stage}.batch=8", f"{stage}.eval_every=3")
    falls = (f"{stage}.optimizer.schedule=cosine", f"{stage}.optimizer.warmup=0")
    folder = play(tmp_path / "a", *words, f"{stage}.epochs=2", *falls)
    said = capsys.readouterr().out
    (s,) = read_outcome(folder).stages
    assert (s.steps, s.stage.optimizer.horizon) == (6, 6) and "6 steps, 2 passes over 24 rows" in said
    assert [i for i, _ in s.agreements] == [0, 3, 6] and said.count("of held-out pairs ordered as judged") >= 2
    assert "X held-out pairs ordered as judged" in said and "warning" not in said
    assert final_scalars(posttrain.load(folder).stages)[f"final/{stage}/agreement"] == s.agreements[-1][1]
    assert main(["eval", str(folder)]) == 0 and f"orders {s.agreement}" in capsys.readouterr().out
    play(tmp_path / "b", *words, f"{stage}.steps=70")
    assert f"warning: {stage} takes 23.3 passes over 24 rows" in capsys.readouterr().out
