"""What can be set is found: every setting says what it means, the help lists each once, and a run is written and read
back as YAML."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.build.request.run_file import from_yaml, to_yaml
from posttrain.build.request.setting_groups import groups
from posttrain.build.request.settings_from_rows import rewards_for_rows
from posttrain.cli import main
from posttrain.cli.settings_help import settings_text
from posttrain.config.field_docs import about, meaning, sentence
from posttrain.config.overrides import apply
from posttrain.config.run import Run
from posttrain.environment.gallery import GALLERY
from posttrain.environment.make import shipped_class
from posttrain.ladder.policy_rows import LADDER
from posttrain.recipe.recipes import RECIPES, recipe
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError


def classes(cls: type, seen: set[type]) -> Iterator[type]:
    if cls in seen:
        return
    seen.add(cls)
    yield cls
    for declared in dataclass_json.hints(cls).values():
        item = dataclass_json.tuple_item(declared)
        for inner in dataclass_json.pieces(declared if item is None else item).values():
            yield from classes(inner, seen)


CLASSES = [c for c in classes(Run, set()) if c.__module__.startswith("posttrain.")]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_setting_says_what_it_means(cls: type) -> None:
    """In a sentence under the field."""
    assert about(cls)
    for f in dataclasses.fields(cls):
        text = sentence(meaning(cls, f.name))
        assert text.endswith((".", ":", "?")), f"{cls.__name__}.{f.name}: write what it means below it"


@pytest.mark.parametrize("name", [*GALLERY, "prompts"])
def test_help_tells_what_a_shipped_environment_takes(name: str) -> None:
    run = recipe("arithmetic")
    run = dataclasses.replace(run, env=dataclasses.replace(run.env, name=name))
    own = shipped_class(name)
    assert own is not None
    said = settings_text(run, "env.args", 80)
    for field in own.settings():
        assert f"  env.args.{field} = " in said and meaning(own, field).endswith("."), field
    assert "env.args.NAME" in settings_text(run, "", 80)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_help_lists_each_setting_once_and_fits(name: str, columns: int) -> None:
    run = recipe(name)
    paths = [s.path for g in groups(run) for s in g.settings]
    assert len(paths) == len({*paths})
    whole = settings_text(run, "all", columns)
    for path in paths:
        assert sum(line.startswith(f"  {path} = ") for line in whole.splitlines()) == 1, path
    prose = [line for line in whole.splitlines() if " = " not in line and "=" not in line.split(" ")[2:3]]
    assert max(map(len, prose)) <= max(columns, 60), max(prose, key=len)
    if columns == 80:
        assert len(settings_text(run, "", 80).splitlines()) <= 72
        assert max(map(len, whole.splitlines())) <= 110  # values stand whole on their line
        assert not re.search(r"\b[A-E]\d\d\b", whole), "a code of the survey, which no reader of help can look up"


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("rl.optimizer", "rl.optimizer.beta2 = 0.95"),
        ("optimizer.lr", "optimizer.lr = "),
        ("clip.high", "rl.clip.high = 0.2"),
        ("algorithm", "rl.baseline=ema"),
        ("overlong", "rl.shape.overlong.cache = 0.2"),
        ("chosennll", "dpo.add.chosennll.coef = 1"),
        ("kernels", "did you mean model.kernels?"),
    ],
)
def test_a_topic_is_looked_up(topic: str, says: str) -> None:
    try:
        said = settings_text(recipe("ladder"), topic, 80)
    except ConfigError as error:
        said = str(error)
    assert says in said


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys; from posttrain.cli import main; main(['run', 'ladder', '--help']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "STAGE.optimizer.lr = 0.004" in done.stdout and ", reinforce_ema, " not in done.stdout


# --- YAML ------------------------------------------------------------------------------------------------------------

NUMBERS = {
    "seed": st.integers(0, 2**31),
    "rl.steps": st.integers(1, 10**6),
    "rl.optimizer.lr": st.floats(1e-9, 1.0, exclude_min=True),
    "rl.optimizer.clip": st.sampled_from([1.0, float("inf"), 0.1]),
    "rl.wall_time": st.sampled_from(["none", 10, 0.5]),
    "rl.sampling.stop": st.sampled_from(["none", '["a, b", "no", "1e-6", "\\u202e~"]']),
    "rl.aggregate": st.sampled_from(["token_mean", "constant"]),
    "env.args.note": st.sampled_from(["no", "null", "# x", "1_000", "0x10", "é\u0085"]),
}


@settings(max_examples=60)
@given(st.sampled_from(sorted(RECIPES)), st.sampled_from([None, *sorted(LADDER)]), st.data())
def test_a_run_written_and_read_is_the_same(name: str, algorithm: str | None, data: st.DataObject) -> None:
    run = recipe(name)
    chosen = [f"rl.algorithm={algorithm}"] if algorithm is not None else []
    for key, values in NUMBERS.items():
        if data.draw(st.booleans()):
            chosen.append(f"{key}={data.draw(values)}")
    stages = {s.name for s in run.stages}
    words = [w for w in chosen if w.partition(".")[0] in stages or not w.startswith("rl.")]
    try:
        changed = apply(run, words)
    except ConfigError:
        return
    assert from_yaml(to_yaml(changed, run), "x") == changed


@pytest.mark.parametrize("name", sorted(LADDER))
def test_every_algorithm_survives(name: str) -> None:
    reference = [] if not LADDER[name].taught else ["rl.reference=elsewhere"]
    average = ["rl.optimizer.ema=0.95"] if LADDER[name].own_teacher else []
    siblings = [] if name not in ("pass_at_k",) else ["rl.siblings=16"]
    run = apply(recipe("ladder"), [f"algorithm={name}", *reference, *average, *siblings])
    assert from_yaml(to_yaml(run), "x") == run


HEAD = "recipe: grpo\nstages:\n  rl:\n    type: Reinforce\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "    steps: 0\n", "my.yaml:5: rl.steps=0: must be >= 1"),
        (HEAD + "    stps: 1\n", "my.yaml:5: stages.rl.stps: Reinforce has no such field; did you mean 'steps'?"),
        (HEAD + "    steps: 1.5\n", "my.yaml:5: stages.rl.steps: 1.5 is not valid here; expected a whole number"),
        (HEAD + "    algorithm: grop\n", "my.yaml:5: stages.rl.algorithm.base=grop: no such algorithm; did you mean"),
        (HEAD + "    algorithm:\n      base: grpo\n      clop: null\n", "my.yaml:7: stages.rl.algorithm.clop"),
        ("recipe: grpo\nstages:\n", "my.yaml:2: stages: write each stage under its name"),
        ("recipe: grpo\nstages: 5\n", "my.yaml:2: stages: write each stage under its name"),
        (HEAD + "sede: 1\n", "my.yaml:5: sede: Run has no such field; did you mean 'seed'?"),
        (HEAD + "seed: 1\nseed: 2\n", "my.yaml:6: seed is given twice"),
        ("recipe: grpo\n", "my.yaml: stages: write each stage under its name"),
        ("a: &x [1]\nb: *x\n", "my.yaml:1: an alias; write it out"),
        ("a: !!python/object/apply:os.system [x]\n", "is a tag of YAML, and a run has none"),
        ("a: [1\n", "this is no YAML"),
        ("[" * 5000, "nested too deeply"),
        ("- " * 60 + "1", "nested too deeply"),
        ("", "a run is an object of settings"),
        (HEAD + "    steps: 0o17\n", "my.yaml:5: stages.rl.steps: '0o17' is not valid here"),
        (
            HEAD + f"    steps: {'9' * 5000}\n",
            "my.yaml:5: '9999999999999999999999999999999999999999' cannot be read as int",
        ),
        (HEAD + "    steps: !!int x\n", "my.yaml:5: 'x' cannot be read as int"),
        (HEAD + "    steps: !!bool maybe\n", "my.yaml:5: 'maybe' cannot be read as bool"),
        (HEAD + "    steps: !!float one\n", "my.yaml:5: 'one' cannot be read as float"),
        ("a: !!timestamp 2001-01-01\n", "is a tag of YAML, and a run has none"),
        ("recipe: a\0b\n", "my.yaml: this is no YAML"),
        (b"\xff\xfe\x00", "my.yaml: this is no YAML"),
        (b"recipe: \xe9\n", "my.yaml: this is no YAML"),
        (b"\xff", "my.yaml: this is no YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: bytes | str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_yaml(text, "my.yaml")
    assert says in str(error.value)


def test_a_whole_number_is_decimal_whatever_it_begins_with() -> None:
    """YAML's own reading takes 010 for 8, and 0123 for 83."""
    text = to_yaml(apply(recipe("grpo"), ["seed=10", "rl.steps=123"]))
    for old, new in (("seed: 10", "seed: 010"), ("steps: 123", "steps: +0123")):
        assert old in text
        text = text.replace(old, new)
    run = from_yaml(text.encode("utf-16"), "x")
    assert (run.seed, run.stage("rl").steps) == (10, 123)


@pytest.mark.parametrize("text", ["def run():\n    raise SystemExit(3)\n", "import sys\nsys.exit()\n"])
def test_a_run_file_that_exits_is_an_error_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "my_run.py").write_text(text)
    assert main(["run", f"{tmp_path / 'my_run.py'}:run", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "SystemExit" in said and "my_run.py:" in said and "Traceback" not in said


def test_a_large_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text("# " + "x" * 300_000)
    assert main(["run", str(tmp_path / "my.yaml"), "--dry-run"]) == 2
    assert "at most 262,144 are read" in capsys.readouterr().err


def test_dry_run_writes_what_run_takes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpo", "rl.steps=3", "--dry-run"]) == 0
    first = capsys.readouterr().out
    assert "    steps: 3  # was 100\n" in first and not (tmp_path / "runs").exists()
    (tmp_path / "my.yaml").write_text(first)
    assert main(["run", str(tmp_path / "my.yaml"), "seed=7", "--dry-run"]) == 0
    assert "seed: 7" in capsys.readouterr().out
    (tmp_path / "my_run.py").write_text(
        "from posttrain.build.request.run_file import read_run\nfrom pathlib import Path\n"
        f"def run():\n    return read_run(Path({str(tmp_path / 'my.yaml')!r}))\nRUN = run()\nWRONG = 3\n"
    )
    for name in ("run", "RUN"):
        assert main(["run", f"{tmp_path / 'my_run.py'}:{name}", "--dry-run"]) == 0
        assert "    steps: 3\n" in capsys.readouterr().out
    assert main(["run", f"{tmp_path / 'my_run.py'}:WRONG", "--dry-run"]) == 2
    assert "WRONG is a int: a Run is wanted" in capsys.readouterr().err


def test_code_that_a_file_names_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def reward(task, text):\n    return 1.0\n")
    run = apply(recipe("grpo"), [f"env.rewards={tmp_path / 'mine.py'}:reward"])
    (tmp_path / "my.yaml").write_text(to_yaml(run))
    assert main(["run", str(tmp_path / "my.yaml"), "--dry-run"]) == 0
    assert "  code     env.rewards.0.function: runs reward of the Python file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("verifiable", "", "weights of what pays are 1, 0.1. Set env.rewards.N.weight"),
        ("verifiable", "env.rewards.0.weight=.5 env.rewards.1.weight=-.5", "weights of what pays are 0.5, -0.5. Set"),
        ("arithmetic", "env.rewards=contains env.rewards.0.weight=.1", "are 1, 0.1. .*or env.rewards.N.measured=true"),
        ("rlhf", "", "score of reward model model:stage:.* is no number of 0 to 1. Set env.rewards.0.measured=true"),
    ],
)
def test_what_is_paid_is_no_chance_and_is_refused_where_chances_are_learned(name: str, words: str, why: str) -> None:
    """PRIME learns the chance of a right answer. The run would end at the first answer that is paid beyond 0 to 1."""
    with pytest.raises(ConfigError, match=why):
        apply(recipe(name), [*words.split(), "algorithm=prime"])


def test_rewards_whose_weights_sum_to_one_are_chances() -> None:
    run = recipe("verifiable")
    kept = apply(run, ["env.rewards.0.weight=0.5", "env.rewards.1.weight=0.5", "algorithm=prime"])
    assert kept.env.paid_weights == (0.5, 0.5)


@pytest.mark.parametrize(
    ("answer", "more"),
    [
        ("7", ""),
        ("Four more.\n#### 7", ". {}:1 has a solution there, which an answer never equals whole: .*rewards=math"),
    ],
)
def test_the_recipes_reward_on_rows_of_ones_own_is_told(answer: str, more: str, tmp_path: Path) -> None:
    (data := tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "3 + 4", "answer": answer}) + "\n")
    run = apply(recipe("grpo"), [f"env.prompts={data}"])
    same, (line,) = rewards_for_rows(run, {"env.prompts"}, RuntimeObjects())
    assert same == run
    assert re.fullmatch(f"env.rewards: exact, the recipe's, on column 'answer'{more.format(data)}", line)
    assert rewards_for_rows(run, {"env.prompts", "env.rewards"}, RuntimeObjects()) == (run, ())
