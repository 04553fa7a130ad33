"""`posttrain new`: what it writes passes its own test, the check and two steps of training, and overwrites nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain
from posttrain.cli import main
from posttrain.cli.skeletons.benchmark_files import benchmark
from posttrain.cli.skeletons.new_files import new_env, new_reward
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.system import shell
from posttrain.system.errors import ConfigError, DataError
from tests.verifier.judge_parts import scored, scripted_judge

SMALL = (
    "model.hidden=32",
    "model.ffn=64",
    "model.heads=2",
    "model.kv_heads=1",
    "slots=8",
    "evaluation.samples=1",
    "sft.steps=2",
    "sft.batch=8",
)
RL = (
    "rl.steps=2",
    "rl.prompts=2",
    "rl.siblings=2",
    "rl.eval_every=0",
    "rl.checkpoint_every=0",
    "rl.sampling.max_tokens=6",
)


def test_it_writes_two_files_and_says_what_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "env", "sort_letters", "--folder", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["sort_letters.py", "test_sort_letters.py"]
    assert f"check {tmp_path}/mine/sort_letters.py:SortLetters" in said and "sft.style=answer" in said
    assert "__" not in (tmp_path / "mine" / "sort_letters.py").read_text().replace("__future__", "").replace(
        "__post_init__", ""
    )


@pytest.mark.prove
def test_its_own_test_passes_and_finds_a_verifier_that_was_broken(tmp_path: Path) -> None:
    env, test = new_env("sort_letters", tmp_path)
    done = subprocess.run([sys.executable, str(test)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 3, done.stderr
    env.write_text(env.read_text().replace("said == attempt.task.answer", "attempt.task.answer in said"))
    broken = subprocess.run([sys.executable, str(test)], capture_output=True, text=True, check=False)
    assert broken.returncode != 0 and "no source pays a right answer more than a wrong one" in broken.stderr


@pytest.mark.prove
def test_it_is_trained_on_by_its_path(tmp_path: Path) -> None:
    env, _ = new_env("sort_letters", tmp_path)
    where = f"env={env}:SortLetters"
    posttrain.run(
        recipe("arithmetic"),
        where,
        "env.args.length=3",
        "env.heldout=8",
        "sft.style=answer",
        *SMALL,
        *RL,
        out=tmp_path / "run",
        quiet=True,
    )
    assert [s.stage for s in run_reader.steps(tmp_path / "run")].count("rl") == 2
    assert run_reader.run_file(tmp_path / "run").run.env.name.endswith("sort_letters.py:SortLetters")


# --- with tools ------------------------------------------------------------------------------------------------------


def said_steps(said: str) -> list[list[str]]:
    """The printed commands, as words: the program in one word, then what it is given."""
    commands = [x.strip() for x in said.splitlines() if x.startswith("  ") and not x.strip().startswith("#")]
    start = shell.program()
    return [[start, *shlex.split(x.removeprefix(start))] if x.startswith(start) else shlex.split(x) for x in commands]


@pytest.mark.prove
def test_tools_and_several_turns_work_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every printed command that needs no model of the user's is run as printed, training at toy size."""
    assert main(["new", "env", "stock_room", "--tools", "--folder", str(tmp_path / "my files")]) == 0
    check, own, train, _ = said_steps(capsys.readouterr().out)
    done = subprocess.run([sys.executable, *own[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 4, done.stderr
    assert main([*check[1:], "--tasks", "4", "--rate", "1"]) == 0
    out = ["--out", str(tmp_path / "run"), "env.heldout=4", "model.context=128"]
    assert main([*train[1:], *SMALL, *RL[:-1], "rl.sampling.max_tokens=24", *out]) == 0
    played = [r for f in run_reader.episode_files(tmp_path / "run") for r in run_reader.read_episodes(f.path)]
    assert played and run_reader.run_file(tmp_path / "run").run.env.name.endswith("stock_room.py:StockRoom")


@pytest.mark.prove
def test_the_test_of_tools_finds_a_verifier_that_reads_words(tmp_path: Path) -> None:
    env, test = new_env("stock_room", tmp_path, kind="tools")
    env.write_text(env.read_text().replace("attempt.state == attempt.task.answer", '"done" in attempt.text'))
    broken = subprocess.run([sys.executable, str(test)], capture_output=True, text=True, check=False)
    assert broken.returncode != 0 and "AssertionError" in broken.stderr


# --- judged by a known taste ------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_a_known_taste_works_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own test passes, and every printed command that needs no model of the user's runs, training at toy size."""
    assert main(["new", "env", "polite_sort", "--judged", "--folder", str(tmp_path / "my files")]) == 0
    check, own, train, mine = said_steps(capsys.readouterr().out)
    done = subprocess.run([sys.executable, *own[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 4, done.stderr
    assert main([*check[1:], "--tasks", "4", "--rate", "1"]) == 0
    out = ["dpo.steps=2", "dpo.batch=4", "dpo.eval_every=0", "env.heldout=4", "--out", str(tmp_path / "run")]
    assert main([*train[1:], *SMALL, *out]) == 0
    assert [s.stage for s in run_reader.steps(tmp_path / "run")].count("dpo") == 2
    assert "model=MODEL" in mine and "sft=none" in mine


@pytest.mark.prove
def test_the_test_of_a_known_taste_finds_one_that_is_a_surface_feature(tmp_path: Path) -> None:
    env, test = new_env("polite_sort", tmp_path, kind="judged")
    text = env.read_text()
    env.write_text(
        text.replace('{"order": 0.6, "ending": 0.2, "length": 0.2}', '{"order": 0, "ending": 1, "length": 0}')
    )
    broken = subprocess.run([sys.executable, str(test)], capture_output=True, text=True, check=False)
    assert broken.returncode != 0 and "surface of pairs" in broken.stderr


# --- a conversation ---------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_a_conversation_works_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own test passes, and it is trained on as printed, at toy size, also paid by a judge."""
    assert main(["new", "env", "host", "--dialog", "--folder", str(tmp_path / "my files")]) == 0
    check, own, train, paid, _ = said_steps(capsys.readouterr().out)
    done = subprocess.run([sys.executable, *own[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 4, done.stderr
    assert main([*check[1:], "--tasks", "4", "--rate", "1"]) == 0
    out = [*SMALL, *RL, "env.heldout=4", "--out"]
    assert main([*train[1:], *out, str(tmp_path / "run")]) == 0
    with scripted_judge(lambda text: scored(float(text.count(" assistant")))) as judge:
        words = [w.replace("http://127.0.0.1:8000/v1", judge.url) for w in paid[1:]]
        assert main([*words, *out, str(tmp_path / "paid")]) == 0
    last = [s for s in run_reader.steps(tmp_path / "paid") if s.stage == "rl"][-1]
    assert {"reward/judge", "rollout/truth"} <= set(last.gauges) and judge.bodies
    played = [r.episode for f in run_reader.episode_files(tmp_path / "paid") for r in run_reader.read_episodes(f.path)]
    assert all(1 <= len(e.turns) <= 2 and e.state["conversation"][0]["role"] == "user" for e in played)


# --- a benchmark with a rubric ----------------------------------------------------------------------------------------

ITEMS = [{"prompt": f"{a}+1=", "level": a} for a in range(10)]


@pytest.mark.prove
def test_a_benchmark_works_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "bench.json", tmp_path / "my files"
    criteria = [{"criterion": "names the sum", "points": 3}, "is short"]
    file.write_text(json.dumps({"rubric": criteria, "items": ITEMS}))
    assert main(["new", "env", "sums", "--rubric", str(file), "--folder", str(out)]) == 0
    own, check, tiny, train = said_steps(capsys.readouterr().out)
    assert main([*train[1:-1], "--dry-run"]) == 0, "it runs as it stands, without a model"
    capsys.readouterr()
    assert (out / "sums.md").read_text() == "- names the sum (3 points)\n- is short\n"
    assert (out / "sums_heldout.md").read_text().endswith("- is short\n") and "strict" in (
        out / "sums_heldout.md"
    ).read_text()
    done = subprocess.run([sys.executable, *own[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 2, done.stderr
    with scripted_judge(lambda text: scored(5.0)) as judge:
        words = [w.replace("http://127.0.0.1:8000/v1", judge.url) for w in check[1:]]
        main([*words, "--tasks", "4", "--rate", "1"])
        assert judge.bodies and "raised" not in capsys.readouterr().out
        both = [f"env.rewards.{i}.function=judge:{judge.url}" for i in (0, 1)]
        small = [w for w in (*SMALL, *RL) if not w.startswith("sft.")]
        printed = {w.partition("=")[0] for w in tiny if "=" in w} - {"rl.steps"}
        small = [w for w in small if w.partition("=")[0] not in printed]
        words = [w for w in tiny[1:] if not w.startswith("rl.steps")] + [*both, *small, "--out", str(tmp_path / "run")]
        assert main(words) == 0
    last = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"][-1]
    assert {"reward/judge", "rollout/truth"} <= set(last.gauges)


def test_a_rubric_of_each_item_and_files_that_are_no_benchmark(tmp_path: Path) -> None:
    own = [{**item, "rubric": [f"says {item['level'] + 1}"]} for item in ITEMS]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, own)))
    rubric, rows = benchmark(tmp_path / "own.jsonl")
    assert rubric.endswith("{rubric}") and rows[2]["rubric"] == "- says 3"
    # A line separator of Unicode inside a text ends no line of the file.
    split = {"prompt": "a\u2028b", "rubric": "r"}
    (tmp_path / "own.jsonl").write_text(json.dumps(split, ensure_ascii=False) + "\n", encoding="utf-8")
    assert benchmark(tmp_path / "own.jsonl")[1][0]["prompt"] == split["prompt"]
    for data, says in (
        ({"items": ITEMS}, "item 1 has no rubric"),
        ({"rubric": "r", "items": [own[0], ITEMS[0]]}, "item 2 has no rubric"),
        ({"rubric": [3], "items": ITEMS}, "a criterion is a text"),
        ({"rubric": "r", "items": [{"question": "x"}]}, "write {"),
        ([], "write {"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(data))
        with pytest.raises(DataError, match=says):
            benchmark(tmp_path / "bad.json")


# --- a reward function ------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_a_reward_function_works_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "reward", "close_enough", "--folder", str(tmp_path)]) == 0
    check, own, train, with_model = said_steps(capsys.readouterr().out)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "close_enough.jsonl",
        "close_enough.py",
        "test_close_enough.py",
    ]
    done = subprocess.run([sys.executable, *own[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": passed") == 2, done.stderr
    assert main([*check[1:], "--tasks", "4", "--rate", "1"]) == 0
    small = [w for w in (*SMALL, *RL) if not w.startswith("sft.")]
    assert main([*train[1:], *small, "env.heldout=4", "--out", str(tmp_path / "run")]) == 0
    episodes = [r.episode for f in run_reader.episode_files(tmp_path / "run") for r in run_reader.read_episodes(f.path)]
    assert {j.source for e in episodes for j in e.verdicts} == {"close_enough"}
    assert "model=MODEL" in with_model and with_model[-2:] == train[-2:]


def test_the_test_of_a_reward_finds_one_that_pays_everybody(tmp_path: Path) -> None:
    reward, test, _ = new_reward("close_enough", tmp_path)
    reward.write_text(reward.read_text().replace("return 0.0", "return 1.0"))
    broken = subprocess.run([sys.executable, str(test)], capture_output=True, text=True, check=False)
    assert broken.returncode != 0 and "AssertionError" in broken.stderr


@pytest.mark.parametrize("word", ["--tools", "--judged"])
def test_kinds_belong_to_an_environment(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "reward", "mine", word]) == 2
    assert f"posttrain new env NAME {word}" in capsys.readouterr().err


# --- refused ----------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    assert main(["new", "env", "mine", "--folder", str(tmp_path)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_rows_of_a_reward_are_not_overwritten_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jsonl").write_text("mine")
    assert main(["new", "reward", "mine", "--folder", str(tmp_path)]) == 2
    assert "mine.jsonl exists: nothing is overwritten" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Two Words", "sort_letters"),
        ("Caps", "lower-case"),
        ("class", "cannot name"),
        ("test_x", "leave out test_"),
        ("math", "such as my_math"),
        ("numpy", "such as my_numpy"),
    ],
)
def test_a_name_that_is_none(name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "env", name, "--folder", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "no such class; "),
        ("def Mine(): ...", "is a function that returned a NoneType: a class of an environment"),
        ("class Mine: ...", "derive it from posttrain.environment.single.SingleTurn"),
        (
            "from posttrain.environment.single import SingleTurn\nclass Mine(SingleTurn):\n    n: int = 1",
            "@dataclass\\(frozen=True",
        ),
        (
            "from posttrain.environment.single import SingleTurn\nclass Mine(SingleTurn): ...",
            "does not say heldout, key, name, train yet",
        ),
        ("import nowhere_at_all", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_with_the_reason(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=says):
        posttrain.check(f"{tmp_path / 'mine.py'}:Mine")
