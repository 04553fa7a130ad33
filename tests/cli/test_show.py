"""`posttrain show`: the stage people mean, text below its prompt, wrapped and never cut, and two steps compared."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.cli import main
from posttrain.cli.show_rollouts import lines
from posttrain.cli.shown_episodes import ShowOptions
from posttrain.config.env import Env
from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, EpisodeCredit, GroupCredit, Scored
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.record.run_folder import RunFolder
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import visible

PYTHON = (sys.executable, "-m", "posttrain.cli")


def a_group(task: Task, rewards: list[float | None]) -> Group:
    episodes: list[Episode] = []
    for i, reward in enumerate(rewards):
        t = Transcript(Sampling(stop_ids=(9,)))
        t.see([1, 2, 3])
        t.say(SampledTurn(np.int32([4, 9]), np.float32([-0.1, -3.0]), np.int32([5, 5]), Stop.SAID))
        verdict = Verdict.failed("outage", "down") if reward is None else Verdict.value(reward, "", "as expected")
        brief = Judged("brief", 0.1, Verdict.value(1.0))
        episodes.append(
            Episode(
                task, 0, i, (t.segment(),), Stop.SAID, (Judged("sum", 1.0, verdict), brief), f"it is \x1b[31m{i}", ""
            )
        )
    return Group(task, 0, tuple(episodes))


def evaluated(said: str, reward: float, task: str = "t0") -> Group:
    """A held-out prompt with one answer."""
    one = a_group(Task(task, f"prompt of {task}", 4), [reward])
    return replace(one, episodes=tuple(replace(e, text=said) for e in one.episodes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    group = a_group(Task("t0", "2+2=", 4), [1.0, 0.0, None])
    signs = [1.5, -0.5]
    credits = tuple(
        EpisodeCredit(Scored(e), s, tuple(np.full(x.spoken, s) for x in e.segments))
        for e, s in zip(group.judged, signs, strict=True)
    )
    stages = (
        Supervised(name="sft", style="answer"),
        Reinforce(name="rl"),
        Supervised(name="control", style="answer", start="sft", hands_on=False),
    )
    with RunFolder.create(tmp_path / "run", Run(recipe="r", stages=stages), {}) as book:
        book.write_evaluation("sft", 60, [evaluated("4", 1.0), evaluated("2", 0.0, "t1")])
        book.write_evaluation("rl", 2, [evaluated("five", 0.0), evaluated("2", 1.0, "t1"), evaluated("1", 0.0, "t2")])
        book.write_evaluation("control", 9, [evaluated("0", 0.0)])
        for step in (1, 2):
            book.write_episodes("rl", step, Credit((GroupCredit(group, credits, False),), 0.0))
    (tmp_path / "run" / "tokenizer").mkdir()
    vocabulary = {f"<{i}>": i for i in range(10)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path / "run"


def text(folder: Path, colour: bool = False, **wanted: Any) -> str:
    return "\n".join(lines(folder, ShowOptions(**wanted), colour))


def rows(folder: Path, **wanted: Any) -> list[int]:
    """Numbers of the listed episodes, in order."""
    listed = [x.split() for x in text(folder, **wanted).splitlines()]
    return [int(x[0]) for x in listed if len(x) == 7 and x[0].isdigit()]


def test_show_lists_the_last_training_step(folder: Path) -> None:
    shown = text(folder)
    assert shown.startswith("rl step 2: 3 episodes of 1 prompt, mean reward 0.600, 1 not judged (--failed)")
    assert shown.splitlines().count("  2+2=") == 1  # the prompt once, what was said three times
    assert len([x for x in shown.splitlines() if x.startswith("           it is \\x1b[31m")]) == 3
    assert f"show {folder} --stage rl --step 2 --episode 0" in shown and "\x1b" not in shown


def test_show_filters_and_orders(folder: Path) -> None:
    assert rows(folder, wrong=True) == [1]
    assert rows(folder, best=True) == [0, 1] and rows(folder, worst=True) == [1, 0]
    assert rows(folder, failed=True) == [2]
    assert "           ! sum could not judge it: outage: down" in text(folder, failed=True)
    assert "all of them were judged" in text(folder, kind="eval", stage="sft", failed=True)
    assert "2 more; --limit 0 shows all" in text(folder, limit=1)
    assert "held-out evaluation" in text(folder, kind="eval")


def test_siblings_that_are_alike_are_one_and_mixed_prompts_come_first(tmp_path: Path) -> None:
    alike, mixed = a_group(Task("t0", "all right", 4), [1.0] * 4), a_group(Task("t1", "mixed", 4), [1.0, 0.0, 0.0, 0.0])
    told = [replace(g, episodes=tuple(replace(e, text="it is 4") for e in g.episodes)) for g in (alike, mixed)]
    with RunFolder.create(tmp_path / "run", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}) as book:
        book.write_evaluation("rl", 1, told)
    shown = text(tmp_path / "run").splitlines()
    assert [x.strip() for x in shown if x in ("  mixed", "  all right")] == ["mixed", "all right"]
    assert rows(tmp_path / "run") == [4, 5, 0]
    assert [x.split()[:2] for x in shown if "it is 4" in x] == [["it", "is"], ["3", "x"], ["4", "x"]]
    assert rows(tmp_path / "run", limit=2) == [4, 5] and "4 more; --limit 0" in text(tmp_path / "run", limit=2)
    assert rows(tmp_path / "run", best=True)[0] == 0, "an order that was asked for stays"


def test_show_one_episode_token_by_token(folder: Path) -> None:
    seen = text(folder, step=1, episode=1).splitlines()
    assert seen[0] == "rl step 1" and "task t0, visit 0, sibling 1, stop stop" in seen[1]
    assert "  sum (weight 1): 0.000  as expected" in seen
    world, first, last = seen[-4:-1]
    assert world.split() == ["0-2", "world", "<1>", "<2>", "<3>"]
    assert first.split() == ["3", "said", "5", "-0.100", "0.905", "-0.500", "<4>"]
    assert last.split() == ["4", "said", "5", "-3.000", "0.050", "-0.500", "<9>"]
    assert "\x1b[31m" in text(folder, colour=True, step=1, episode=1)


def test_show_without_tokenizer_or_episodes_says_so(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert "#4" in text(folder, episode=0) and "token ids are shown" in text(folder, episode=0)
    RunFolder.create(tmp_path / "empty", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}).close()
    assert (
        " ".join(text(tmp_path / "empty").split())
        == f"no episodes in {tmp_path / 'empty'} yet: they appear after its first step or evaluation"
    )
    rows = Run(recipe="r", stages=(Supervised(name="sft", style="completion"),), env=Env(name="prompts"))
    RunFolder.create(tmp_path / "rows", rows, {}).close()
    assert "its stages learn from rows and sample nothing" in " ".join(text(tmp_path / "rows").split())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"stage": "rll"}, "did you mean 'rl'"),
        ({"step": 9}, "the nearest is 2 (from 1 to 2)"),
        ({"episode": 9}, "has episodes 0 to 2"),
    ],
)
def test_show_says_what_there_is(folder: Path, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        text(folder, **wanted)
    assert message in str(error.value)


def test_show_of_something_else_is_code_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 5
    assert "is not a run folder" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    shown = subprocess.run(
        f"{' '.join(PYTHON)} show {folder} | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in shown.stderr and "rl step 2" in shown.stdout


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[2Jb\nc\u202ed") == "a\\x1b[2Jb\\nc\\u202ed" and visible("größe 数") == "größe 数"


def test_the_stage_people_mean_is_the_last_whose_weights_the_run_kept(folder: Path) -> None:
    assert text(folder, kind="eval").startswith("rl step 2, held-out evaluation")
    assert text(folder, kind="eval", stage="control").startswith("control step 9, held-out")


def test_two_steps_are_compared_on_the_prompts_of_both(folder: Path) -> None:
    """The stage began with weights that the stage before had evaluated: that is its step 0."""
    shown = text(folder, compare=(0, 2)).splitlines()
    assert " ".join(shown[:2]) == (
        "rl step 0 and step 2, held-out evaluation: 2 prompts in both; mean reward 0.600 -> 0.600 (+0.000): 1 better,"
        " 1 worse, 0 the same"
    )
    at = shown.index("  prompt of t0")
    assert shown[at + 1 : at + 5] == [
        "    step 0: reward 1.100",
        "      4",
        "    step 2: reward 0.100 (-1.000)",
        "      five",
    ]
    order = [x for x in text(folder, compare=(0, 2), best=True).splitlines() if x.startswith("  prompt of")]
    assert order == ["  prompt of t1", "  prompt of t0"]
    assert "prompt of t1" not in text(folder, compare=(0, 2), wrong=True)


def test_training_steps_are_compared_only_where_they_share_prompts(folder: Path, tmp_path: Path) -> None:
    assert text(folder, compare=(1, 2)).startswith("rl step 1 and step 2: 1 prompt in both")
    with RunFolder.create(tmp_path / "two", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}) as book:
        for step in (1, 2):
            group = a_group(Task(f"t{step}", f"{step}+2=", step + 2), [1.0])
            book.write_episodes("rl", step, Credit((), 0.0), [group])
    with pytest.raises(ConfigError, match=r"Training steps have other prompts each; rl has none") as error:
        text(tmp_path / "two", compare=(1, 2))
    assert "held-out" not in str(error.value).split(";")[1]
    with pytest.raises(ConfigError, match=r"of rl are at steps 0, 2\. Compare two of these, for example --compare 0 2"):
        text(folder, compare=(0, 9))


def test_long_text_is_wrapped_and_a_hint_says_what_is_left_out(tmp_path: Path) -> None:
    long = "\n".join(f"line {i} " + "word " * 30 for i in range(20)) + "\nthe end"
    with RunFolder.create(tmp_path / "run", Run(recipe="r", stages=(Reinforce(name="rl"),)), {}) as book:
        group = evaluated(long, 1.0)
        prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "数" * 100})
        task = replace(group.task, prompt=prompt)
        group = replace(group, task=task, episodes=tuple(replace(e, task=task) for e in group.episodes))
        book.write_evaluation("rl", 1, [group])
    short, full = text(tmp_path / "run").splitlines(), text(tmp_path / "run", full=True).splitlines()
    from rich.cells import cell_len

    # the last line is a command, which must stay in one piece to be copied
    assert max(cell_len(x) for x in (*short[:-1], *full[:-1])) <= 80
    assert "  system: Be brief." in short and "           the end" in short
    assert any("lines left out; --full shows all" in x for x in short)
    assert sum(x.split().count("word") for x in full) == 20 * 30 and not any("left out" in x for x in full)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"best": True, "worst": True}, "one order at a time"),
        ({"wrong": True, "failed": True}, "--wrong and --failed"),
        ({"failed": True, "worst": True}, "has no reward to sort"),
        ({"compare": (0, 1), "step": 3}, "leave out --step"),
    ],
)
def test_options_that_exclude_each_other_say_so(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShowOptions(**wanted)


def test_an_evaluation_counts_prompts_and_of_grades_nothing_is_wrong(tmp_path: Path) -> None:
    """Rows that ask the same are one task in the figures, as in every table. An answer is wrong by `env.right` where it
    is named, else by a main source of pass or fail; of grades none is."""

    def groups(*scores: float, right: float | None = None) -> list[Group]:
        made = [a_group(Task(f"t{i}", f"{min(i, 1)}+2=", 4), [x]) for i, x in enumerate(scores)]
        verdicts = [(replace(g.episodes[0].verdicts[0], by_model=right is None),) for g in made]
        return [
            replace(g, episodes=(replace(g.episodes[0], verdicts=v, right_at=right),))
            for g, v in zip(made, verdicts, strict=True)
        ]

    for name, of in (("grades", groups(0.9, 0.3, 0.5)), ("named", groups(0.9, 0.3, 0.5, right=0.5))):
        with RunFolder.create(tmp_path / name, Run(recipe="r", stages=(Reinforce(name="rl"),)), {}) as book:
            book.write_evaluation("rl", 0, of)
        assert "3 episodes of 2 prompts, mean reward 0.650" in text(tmp_path / name, kind="eval")
    wrong = text(tmp_path / "named", kind="eval", wrong=True)
    assert "0.300" in wrong and "0.500" not in wrong and "0.900" not in wrong
    assert "nothing says which are right (env.right)" in text(tmp_path / "grades", kind="eval", wrong=True)
