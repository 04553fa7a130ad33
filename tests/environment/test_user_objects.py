"""Rows, functions, environments and algorithms that a Python program hands to a run."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.build.request.user_objects import UserObjects, named_rewards, setting_words
from posttrain.cli import main
from posttrain.config.env import Env, Reward
from posttrain.config.overrides import apply
from posttrain.core.abilities import Abilities
from posttrain.core.ports import Environment
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.make import environment
from posttrain.environment.single import Listed
from posttrain.ladder.policy_rows import DAPO
from posttrain.recipe.recipes import recipe
from posttrain.record.external_access import asks
from posttrain.record.run_reader import run_file, steps
from posttrain.system.errors import ConfigError, DataError

ROWS = [{"prompt": f"<{a}+{b}>", "answer": str(a + b), "level": a} for a in range(6) for b in range(6)]
TINY: dict[str, Any] = {
    "rl": {"steps": 2, "prompts": 2, "siblings": 2, "eval_every": 0, "checkpoint_every": 1},
    "sampling": {"max_tokens": 3},
    "quiet": True,
}
HELD = "env.heldout=4"


def right(task: Task, text: str) -> float:
    return float(text.strip() == task.answer)


def played(rows: Any) -> Any:
    run, given = UserObjects(posttrain.prompts(rows), [right]).place(recipe("grpo"))
    return environment(replace(run.env, heldout=2), 0, given)


def test_every_kind_of_rows_gives_the_same_tasks() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(ROWS)
    kinds = [ROWS, tuple(ROWS), frame, datasets.Dataset.from_list(ROWS), {"train": datasets.Dataset.from_list(ROWS)}]
    envs = [played(rows) for rows in kinds]
    assert len({repr(e.rows) for e in envs}) == 1
    assert envs[0].train.task(0).info["level"] == ROWS[0]["level"]


def test_a_missing_value_of_a_frame_is_a_missing_column() -> None:
    pandas = pytest.importorskip("pandas")
    env = played(pandas.DataFrame([{"prompt": "a", "answer": "1", "x": 2.0}, {"prompt": "b", "answer": "2"}]))
    assert {r.task.prompt: dict(r.task.info) for r in env.rows} == {"a": {"x": 2.0}, "b": {}}


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], DataError, "there are no rows"),
        (["text"], DataError, "row 1: a row is a dict"),
        ({"prompt": "x"}, ConfigError, "a dict is one row"),
        (3, ConfigError, "int holds no rows; give a list of dicts"),
        ([{"prompt": "x", "when": object()}], DataError, "row 1: 'when' holds a object"),
    ],
)
def test_what_is_no_row_is_said(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        posttrain.prompts(rows)


def test_a_row_that_is_wrong_is_named_by_its_number() -> None:
    with pytest.raises(DataError, match="prompts row 2: no column 'prompt'"):
        played([{"prompt": "a", "answer": "1"}, {"promt": "b"}])


def test_too_many_rows_are_kept_by_reference_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.build.request.rows_in_memory.LARGEST_ROWS", 100)
    with pytest.raises(ConfigError, match="give its path"):
        posttrain.prompts(ROWS)


def test_settings_become_overrides() -> None:
    given = {"seed": 1, "sft": None, "deterministic": True, "trackers": ["wandb"], "rl": {"optimizer": {"lr": 1e-5}}}
    said = ["seed=1", "sft=none", "deterministic=true", "trackers=wandb", "rl.optimizer.lr=1e-05"]
    assert list(setting_words(given)) == said
    # Elements with commas, blanks or line ends, the word none, and lists of lists arrive as they are.
    sampling = {"stop": ["\n", "a, b"], "bad_words": ["none"], "bad_ids": [[5], [7, 8]], "logit_bias": [(17, -2.5)]}
    made = apply(recipe("grpo"), list(setting_words({"rl": {"sampling": sampling}}))).stage("rl").contract
    assert made is not None and (made.stop, made.bad_words) == (("\n", "a, b"), ("none",))
    assert (made.bad_ids, made.logit_bias) == (((5,), (7, 8)), ((17, -2.5),))
    with pytest.raises(ConfigError, match="model: give a directory"):
        list(setting_words({"model": type("M", (), {"save_pretrained": 0})()}))


def test_rewards_of_every_kind_have_names_and_weights() -> None:
    words, functions = named_rewards([right, ("exact", 0.5), (lambda task, text: 0.0, 2)])
    assert [(w.function, w.weight) for w in words] == [("inline:right", 1), ("exact", 0.5), ("inline:reward_3", 2)]
    assert list(functions) == ["right", "reward_3"]
    with pytest.raises(ConfigError, match="two functions are called 'right'"):
        named_rewards([right, right])
    with pytest.raises(ConfigError, match="is a int"):
        named_rewards([3])  # type: ignore[list-item]


def test_a_weight_beside_a_reward_is_its_weight() -> None:
    (word,), _ = named_rewards([(Reward(function="exact", weight=0.25, timeout=3.0), 0.5)])
    assert (word.weight, word.timeout) == (0.5, 3.0)


@pytest.mark.parametrize("rewards", [("exact", "think_format"), (right, right), [("exact", 0.5, 1)], ()])
def test_a_tuple_that_is_no_reward_with_its_weight_says_so(rewards: Any) -> None:
    with pytest.raises(ConfigError, match="give several rewards as a list"):
        named_rewards(rewards)


def test_rewards_handed_again_keep_the_weights_of_the_run() -> None:
    begun, _ = UserObjects(posttrain.prompts(ROWS), [("exact", 0.25), (right, 0.5)]).place(recipe("grpo"))

    def weights(*rewards: Any) -> dict[str, float]:
        return {r.function: r.weight for r in UserObjects(rewards=list(rewards)).place(begun)[0].env.rewards}

    own = {"exact": 0.25, "inline:right": 0.5}
    assert weights(right) == weights("exact", right) == weights(right, "exact") == own
    assert weights((right, 0.9)) == weights("exact", (right, 0.9)) == {**own, "inline:right": 0.9}
    assert weights(Reward(function="exact", weight=2.0), right) == {**own, "exact": 2.0}
    assert weights("exact") == {"exact": 1.0} and weights(right, "contains") == {"inline:right": 1.0, "contains": 1.0}


def test_a_list_that_holds_itself_is_no_row() -> None:
    """Also where it is deep, and where its keys are long."""
    row: dict[str, Any] = {"prompt": "x", "answer": []}
    row["answer"].append(row["answer"])
    with pytest.raises(DataError, match="row 1: 'answer' is nested more than 100 deep, or holds itself"):
        posttrain.prompts([row])
    row["answer"] = {"k" * 10: row}
    with pytest.raises(DataError, match="holds itself") as error:
        posttrain.prompts([row])
    assert len(str(error.value)) < 300
    whole: list[Any] = []
    whole.append(whole)
    with pytest.raises(DataError, match="a row is a dict"):
        posttrain.prompts(whole)


def test_functions_of_a_program_do_not_go_to_workers() -> None:
    run, given = UserObjects(posttrain.prompts(ROWS), [right]).place(recipe("grpo"))
    reward = replace(run.env.rewards[0], workers=2)
    with pytest.raises(ConfigError, match="cannot go to a worker process"):
        environment(replace(run.env, rewards=(reward,)), 0, given)


def test_what_is_handed_asks_for_nothing_outside() -> None:
    run, _ = UserObjects(posttrain.prompts(ROWS), [right]).place(recipe("grpo"))
    assert not asks(run)


# --- a run ------------------------------------------------------------------------------------------------------------


def begun(folder: Path, weight: float = 0.25) -> posttrain.Result:
    def near(completions, answer, log_metric, **columns):
        log_metric("said", float(len(completions)))
        return [weight * (len(c) == len(a)) for c, a in zip(completions, answer, strict=True)]

    return posttrain.run("grpo", HELD, env=ROWS, rewards=[right, (near, 0.5)], out=folder, **TINY)


def test_a_run_with_objects_is_data_and_goes_on_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "r"
    result = begun(folder)
    assert steps(folder)[0].gauges["metric/said"].mean == 2.0
    found = run_file(folder)
    assert [r.function for r in found.run.env.rewards] == ["inline:right", "inline:near"]
    (one, two) = found.facts["objects"]
    assert one["name"] == "right" and "text.strip() == task.answer" in one["source"]
    assert two["closes_over"] == ["weight"]
    assert (
        len((folder / "data" / f"{found.run.env.prompts.removeprefix('inline:')}.jsonl").read_text().split("\n")) == 37
    )
    assert len(result.rollouts()) == 4 and result.frame().shape[0] == 2

    assert main(["run", "--resume", str(folder)]) == 2
    assert main(["eval", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"posttrain.run(resume={str(folder)!r}, rewards=[right, near])" in said
    assert main(["show", str(folder)]) == 0

    def near(completions, **columns):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="the run has no object 'other'"):
        posttrain.run(resume=folder, rewards=[right, near, other], quiet=True)
    level = [{**row, "level": -1} for row in ROWS]
    for handed, says in (
        ({"rewards": [right, (near, 0.9)]}, "reward 'near' has weight 0.5 in this run, and was handed with 0.9"),
        ({"rewards": [right, near], "env": level}, "the run has no object 'env'"),
        ({"rewards": [right, near], "env": Next()}, "the run has no object 'Next'"),
        ({"rewards": [right, near, "exact"]}, "the run has no object 'exact'"),
        ({"rewards": [right, near], "env": posttrain.prompts(ROWS, turns=3)}, "env.args.turns is None in this run"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)) as error:
            posttrain.run(resume=folder, **handed, quiet=True)
        assert f"model={folder}" in str(error.value)
    again = posttrain.run(resume=folder, env=ROWS, rewards=[right, (near, 0.5)])
    assert "note: reward 'near' is not as it was" in capsys.readouterr().out
    assert [r.weight for r in again.run.env.rewards] == [1.0, 0.5]
    report = posttrain.evaluate(folder, rewards=[right, near], samples=2, quiet=True)
    assert len(report.groups) == 4


def other(task: Task, text: str) -> float:
    return 0.0


@pytest.mark.prove
def test_kept_rows_that_were_changed_are_refused(tmp_path: Path) -> None:
    posttrain.run("grpo", HELD, env=ROWS, rewards=["exact"], out=tmp_path / "r", **TINY)
    (path,) = (tmp_path / "r" / "data").glob("*.jsonl")
    path.write_text(path.read_text().replace('"level": 1', '"level": 9'))
    with pytest.raises(Exception, match="is not as it was written"):
        posttrain.evaluate(tmp_path / "r", quiet=True)


def test_a_name_of_rows_leads_nowhere_outside(tmp_path: Path) -> None:
    run, given = UserObjects(posttrain.prompts(ROWS), ["exact"]).place(recipe("grpo"))
    (tmp_path / "data").mkdir()
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ConfigError, match="handed to the run"):
        environment(replace(run.env, prompts="inline:../x"), 0, replace(given, data={}, folder=tmp_path))


# --- environments and algorithms --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mine(Arithmetic):
    extra: int = 1


class Next(Environment):
    """`<3>` is answered `4`."""

    name = "next"
    train = Listed(tuple(Task(f"n{i}", f"<{i}>", str(i + 1)) for i in range(8)))
    heldout = (Task("held", "<8>", "9"),)
    abilities = Abilities(alphabet="0123456789<>")

    async def play(self, task: Task, talk: Any) -> Any:
        talk.see(task.prompt)
        return (await talk.say()).stop

    async def judge(self, attempt: Any) -> tuple[Judged, ...]:
        return (Judged("next", 1.0, Verdict.value(float(attempt.text == attempt.task.answer))),)


@pytest.mark.prove
@pytest.mark.parametrize(
    "env",
    [Mine, Mine(max_operand=5, heldout_count=4), Next(), Next],
    ids=["class", "settings", "object", "other class"],
)
def test_environments_of_a_program_are_played(env: Any, tmp_path: Path) -> None:
    result = posttrain.run("grpo", env=env, out=tmp_path / "r", **TINY)
    assert result.run.env.name == ("inline:Mine" if "Mine" in repr(env) else "inline:Next")
    if isinstance(env, Mine):
        assert result.run.env.args["max_operand"] == 5 and result.run.env.heldout == 4
    posttrain.evaluate(result.folder, env=env, samples=1, quiet=True)


def test_an_evaluation_closes_its_environment_however_it_ends() -> None:
    closed = list[str]()

    class Closing(Next):
        heldout = ()

        def close(self) -> None:
            closed.append(self.name)

    with pytest.raises(ConfigError, match="leaves no task to evaluate on"):
        posttrain.evaluate("http://127.0.0.1:9/v1", env=Closing(), quiet=True)
    assert closed == ["next"]


def test_settings_of_an_environment_object_can_be_overridden() -> None:
    run, given = UserObjects(Mine(max_operand=5, heldout_count=4)).place(recipe("grpo"))
    env = environment(replace(run.env, args={**run.env.args, "max_operand": 7}, heldout=3), 0, given)
    assert (env.max_operand, env.heldout_count) == (7, 3)


def test_an_algorithm_goes_into_the_stage_that_learns() -> None:
    run, _ = UserObjects(algorithm=DAPO).place(recipe("grpo"))
    assert run.stage("rl").algorithm is DAPO
    with pytest.raises(ConfigError, match="2 stages that learn from reward"):
        UserObjects(algorithm=DAPO).place(replace(run, stages=(*run.stages, replace(run.stages[0], name="two"))))


@pytest.mark.prove
def test_results_read_well(tmp_path: Path) -> None:
    result = posttrain.run("grpo", HELD, env=ROWS, rewards=["exact"], out=tmp_path / "r", **TINY)
    said = repr(result)
    assert said.splitlines()[0].startswith("Result of grpo, seed 0, in ") and "held-out accuracy" in said
    assert max(map(len, said.splitlines()[1:])) <= 100
    read = posttrain.load(tmp_path / "r")
    assert repr(read) == said and read.accuracy == result.accuracy
    (worst,) = read.rollouts(worst=1)
    assert worst.prompt in repr(worst) and worst.answer and worst.reward == 0.0
    hostile = replace(
        worst, record=replace(worst.record, episode=replace(worst.record.episode, text="<script>\x1b[2J"))
    )
    assert "<script>" not in hostile._repr_html_() and "\x1b" not in repr(hostile) + hostile._repr_html_()
    assert [r.heldout for r in read.rollouts(heldout=True, best=2)] in ([True, True], [])
    for wrong in ({"worst": -1}, {"worst": 1, "best": 1}, {"stage": "rk"}, {"step": 77}):
        with pytest.raises(ConfigError):
            read.rollouts(**wrong)  # type: ignore[arg-type]


@pytest.mark.prove
async def test_a_run_inside_a_running_loop(tmp_path: Path) -> None:
    await asyncio.sleep(0)
    result = posttrain.run("grpo", HELD, env=ROWS, rewards=[right], out=tmp_path / "r", **TINY)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["objects"][0]["name"] == "right"
    assert result.stages[0].steps == 2


# --- a function of each step ------------------------------------------------------------------------------------------

FEW = ("sft.steps=2", "rl.steps=4", "rl.prompts=2", "rl.siblings=2", "rl.eval_every=0", "env.heldout=4", "threads=1")


@pytest.mark.prove
def test_on_step_sees_each_line_of_the_record_and_ends_the_run(tmp_path: Path) -> None:
    seen = list[tuple[str, int]]()

    def watch(step: Any) -> bool:
        seen.append((step.stage, step.index))
        return step.stage == "rl" and step.index == 2

    result = posttrain.run("arithmetic", *FEW, on_step=watch, out=tmp_path / "a", quiet=True)
    assert seen == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)] == [(s.stage, s.index) for s in steps(tmp_path / "a")]
    assert result.stages[-1].why == "on_step ended the run at step 2" and result.accuracy is not None


@pytest.mark.prove
def test_a_run_that_on_step_ended_goes_on_with_the_stages_that_are_left(tmp_path: Path) -> None:
    posttrain.run("arithmetic", *FEW, on_step=lambda step: step.index == 1, out=tmp_path / "a", quiet=True)
    assert [(s.stage, s.index) for s in steps(tmp_path / "a")] == [("sft", 1)]
    result = posttrain.run(resume=tmp_path / "a", quiet=True)
    assert [s.name for s in result.stages] == ["sft", "rl"] and result.stages[-1].steps == 4


@pytest.mark.prove
def test_what_on_step_returns_is_read_strictly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_step returned a float: return True to end the run"):
        posttrain.run("arithmetic", *FEW, on_step=lambda step: 0.5, out=tmp_path / "a", quiet=True)
    with pytest.raises(ZeroDivisionError):
        posttrain.run("arithmetic", *FEW, on_step=lambda step: 1 / 0, out=tmp_path / "b", quiet=True)


@pytest.mark.prove
def test_a_stage_of_each_kind_stops_where_its_measure_is_no_longer_the_best(tmp_path: Path) -> None:
    """At a rate of almost nothing no evaluation is better than the first."""
    still = ("rl.optimizer.lr=1e-12", "rl.eval_every=1", "rl.patience=2", "rl.steps=9")
    few = [w for w in FEW if not w.startswith(("rl.steps", "rl.eval_every"))]
    result = posttrain.run("arithmetic", *few, *still, out=tmp_path / "a", quiet=True)
    (stage,) = [s for s in result.stages if s.name == "rl"]
    assert stage.steps == 3 and "held-out mean reward was highest after step 1" in stage.why
    longer = posttrain.run("rl.steps=20", resume=tmp_path / "a", quiet=True)
    assert longer.stages[-1].steps == 5, "one that is made longer waits anew"
    still = ("dpo.optimizer.lr=1e-12", "dpo.eval_every=1", "dpo.patience=2", "dpo.steps=9", "dpo.batch=4")
    (stage,) = posttrain.run(
        "dpo", "sft=none", "env.rewards=none", *still, "env.heldout=8", out=tmp_path / "b", quiet=True
    ).stages
    assert stage.steps == 3 and "held-out share of pairs was highest after step 1" in stage.why


def test_settings_of_an_environment_with_rewards_are_the_users_own() -> None:
    """A reward in an `Env` that a program hands is as much its own as one in `rewards=`: rows need no answer."""
    env = Env(name="prompts", prompts="rows.jsonl", rewards=(Reward(function="exact"),))
    assert "env.rewards" in UserObjects(env=env).paths
    assert "env.rewards" not in UserObjects(env=replace(env, rewards=())).paths
