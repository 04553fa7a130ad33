"""Did it learn? What a run came to, from its folder: paired gains, the sentence, curves, summary.md, comparisons."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain.cli import main
from posttrain.config.env import Env, Reward
from posttrain.config.overrides import apply
from posttrain.core.measure.interval import Gain, Score
from posttrain.diagnose.learning_verdict import stage_learned
from posttrain.diagnose.measurement import Measurement
from posttrain.diagnose.run_comparison import (
    RunGroup,
    _gain,
    compare_runs,
    differing,
    over_seeds,
    settings_of,
    student95,
)
from posttrain.diagnose.run_outcome import RunOutcome, read_outcome
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.report.compare_runs import show_comparison
from posttrain.report.console import PlainConsole
from posttrain.report.run_summary import markdown, write_summary
from posttrain.report.text_curve import CurveLine, picture
from posttrain.system.errors import ConfigError
from tests.engine.run_parts import RL, SMALL, play, refused

TINY = (
    *SMALL,
    *(w for w in RL if not w.startswith(("rl.steps", "rl.eval_every"))),
    *("sft.steps=3", "sft.batch=8", "rl.eval_every=1", "rl.steps=3", "env.heldout=12"),
)

ONLY_RL = ("sft=none", *(w for w in TINY if not w.startswith("sft.")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two stages."""
    return play(tmp_path_factory.mktemp("learned") / "a", "verifiable", *TINY, "seed=1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same but for its learning rate and its seed."""
    return play(tmp_path_factory.mktemp("learned") / "b", "verifiable", *TINY, "seed=2", "rl.optimizer.lr=1e-3")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(run, tmp_path / "copy"))


# --- from the folder -------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_the_gain_is_that_of_the_recorded_answers(run: Path) -> None:
    """Counted a second way: from the verdicts of the episodes, one mean a prompt."""
    rl = read_outcome(run).stages[-1]
    assert rl.start is not None and rl.end is not None and rl.reward is not None
    assert (rl.start.stage, rl.start.step) == ("sft", 3) and (rl.end.stage, rl.end.step) == ("rl", 3)

    def paid(stage: str, index: int) -> dict[str, float]:
        groups: dict[str, list[float]] = {}
        for r in run_reader.episodes(run, stage, index, "eval"):
            groups.setdefault(str(r.episode.task.prompt), []).append(r.episode.reward or 0.0)
        return {k: sum(v) / len(v) for k, v in groups.items()}

    before, after = paid("sft", 3), paid("rl", 3)
    assert before.keys() == after.keys() and len(before) == rl.reward.prompts == 12
    assert rl.reward.mean == pytest.approx(sum(after[k] - before[k] for k in before) / 12)
    assert rl.reward.better == sum(after[k] > before[k] + 1e-9 for k in before)


@pytest.mark.prove
def test_the_curve_has_the_evaluations_before_and_after(run: Path) -> None:
    rl = read_outcome(run).stages[-1]
    assert [x for x, _ in rl.heldout] == [0, 1, 2, 3] and len(rl.rewards) == 3


@pytest.mark.prove
def test_figures_carry_the_step_they_were_measured_at(
    run: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after an evaluation: the step of the figure is not the last step."""
    index = copy / "episodes" / "index.jsonl"
    index.write_text("".join(x + "\n" for x in index.read_text().splitlines() if "rl-000003-eval" not in x))
    for checkpoint in (copy / "checkpoints").glob("*-rl-000000"):
        shutil.rmtree(checkpoint)
    of = read_outcome(copy)
    assert not of.finished and of.last is not None and of.last.end is not None
    assert (of.last.steps, of.last.end.step) == (3, 2)
    assert main(["summary", str(copy)]) == 0
    assert "2 of 3" in (said := capsys.readouterr().out) and "step 2 of 3" in " ".join(said.split())


def test_a_run_writes_its_summary_quiet_or_not(run: Path) -> None:
    page = (run / "summary.md").read_text()
    assert "Did it learn?" in page and "](summary.svg)" in page and "at step" in page
    assert (run / "summary.svg").read_text().startswith("<?xml")


@pytest.mark.prove
def test_quiet_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    posttrain.run("verifiable", *ONLY_RL, out=tmp_path / "q", quiet=True)
    assert capfd.readouterr().out == "" and (tmp_path / "q" / "summary.md").is_file()


def test_the_report_keeps_to_80_columns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run)]) == 0
    said = capsys.readouterr().out
    assert "Did it learn?" in said and "o held-out reward" in said and "\x1b" not in said
    assert all(len(x) <= 80 for x in said.splitlines() if not any(w in x for w in ("  # ", "run folder", "posttrain ")))


def test_a_folder_of_somebody_else_prints_no_control_characters(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's name and the folder's are somebody else's words, in the terminal and in the page."""
    path = copy / "run.json"
    data = json.loads(path.read_text())
    data["run"]["recipe"] = "<script>x</script>\x1b[2J| a"
    path.write_text(json.dumps(data))
    for words in ([], ["--markdown"]):
        assert main(["summary", str(copy), *words]) == 0
        assert "\x1b" not in capsys.readouterr().out
    page = markdown(read_outcome(copy))
    assert "<script" not in page.replace("\\<script", "") and "\x1b" not in page


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "why", "advice"),
    [
        (("env.heldout=0",), "no task is held out", "env.heldout=100"),
        (("rl.eval=false", "rl.eval_every=0"), "the stage was not measured", "rl.eval=true"),
        (("record_episodes=false",), "not recorded", "record_episodes=true"),
    ],
)
def test_what_cannot_be_told_says_how_to_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str, advice: str
) -> None:
    given = {x.split("=")[0] for x in words}
    small = [w for w in ONLY_RL if w.split("=")[0] not in given]
    play(tmp_path / "run", "verifiable", *small, *words)
    said = " ".join(capsys.readouterr().out.split())
    assert "Did it learn? cannot be told" in said and why in said and advice in said


def test_a_run_without_a_step_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "steps.jsonl").write_text("")
    (copy / "episodes" / "index.jsonl").write_text("")
    assert main(["summary", str(copy)]) == 0
    assert "no step was taken" in capsys.readouterr().out
    assert "no run.json" in refused(capsys, "summary", str(copy / "episodes"), code=5)


@pytest.mark.prove
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", 1e308, -1e308, 1e-320])
def test_numbers_that_are_none_or_huge_break_no_report(
    value: Any, copy: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every gauge of two steps of three: read, drawn and compared, or an error with a sentence."""
    path = copy / "steps.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    for i, row in enumerate(r for r in rows if r["stage"] == "rl"):
        row["gauges"] = {n: [value if i < 2 else -value if isinstance(value, float) else 1, 1] for n in row["gauges"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["summary", str(copy)]) == 0 and main(["summary", str(copy), "--markdown"]) == 0
    assert main(["compare", str(copy), str(other)]) == 0
    assert "Did it learn?" in capsys.readouterr().out
    done = main(["plot", str(copy), str(other), "--out", str(copy / "x.svg")])
    assert done == 0 or (done == 2 and "cannot be drawn" in capsys.readouterr().err)
    notes = write_summary(read_outcome(copy))
    assert notes == [] or "cannot be drawn" in notes[0]


# --- the sentence ----------------------------------------------------------------------------------------------------


def told(of: RunOutcome, before: list[float], after: list[float], graded: bool = False) -> str:
    """The word for a stage whose prompts had these values before and after."""
    s = of.stages[-1]

    def measured(values: list[float], step: int) -> Measurement:
        right = {i: float(v >= 1) if graded else v for i, v in enumerate(values)}
        return Measurement(
            "rl", step, Score.of(list(right.values())), Score.of(values), graded, right, dict(enumerate(values))
        )

    start, end = measured(before, 0), measured(after, 3)
    changed = replace(
        s, start=start, end=end, unpaired="", updates=3,
        accuracy=Gain.of(start.right, end.right), reward=Gain.of(start.outcomes, end.outcomes),
    )  # fmt: skip
    said = stage_learned(of.run, changed, "runs/x")
    assert "step 3" in said.text or said.word.startswith("paid")
    return said.word


def test_the_word_follows_the_interval(run: Path) -> None:
    of = read_outcome(run)
    half = [i % 2 / 1 for i in range(100)]
    assert told(of, half, [1.0] * 100) == "learned"
    assert told(of, [1.0] * 100, half) == "got worse"
    assert told(of, half * 10, half * 10) == "did not learn"
    assert told(of, half[:10], [*half[:9], 1.0]) == "cannot be told"
    assert told(of, [0.0] * 100, [0.5] * 100, graded=True) == "learned", "no answer is ever right: by its reward"
    few = [1.0] * 5 + [0.2] * 195
    more = [1.0] * 5 + [0.6] * 195
    assert told(of, few, more, graded=True) == "paid more, not more often right"
    # An own verdict that is only measured is not paid, so one source pays, and what is right is not known.
    one = Env(measured=True, rewards=(Reward(function="exact"),))
    of = replace(of, file=replace(of.file, run=replace(of.run, env=one)))
    assert told(of, few, more, graded=True) == "learned"


def test_a_reward_that_is_the_same_is_not_answered_with_easier_prompts(run: Path) -> None:
    of = read_outcome(run)
    values = [1.0] * 100
    start = Measurement("rl", 0, Score.of(values), Score.of(values), False, dict(enumerate(values)), {})
    same = Gain.of(start.right, start.right)
    end = replace(start, step=3)
    paid = replace(
        of.stages[-1], rewards=((1, 1.0), (2, 1.0)), updates=3, unpaired="",
        start=start, end=end, accuracy=same, reward=same,
    )  # fmt: skip
    said = stage_learned(of.run, paid, "runs/x")
    assert said.word == "did not learn" and "harder prompts" in said.advice[0] and "easier" not in said.advice[0]


def test_a_reward_that_rises_while_what_is_measured_does_not_is_exploited(run: Path) -> None:
    """The word for a policy whose reward model pays more for held-out answers that are no better, and for one whose
    answers are better too."""
    of = read_outcome(run)
    values = [0.5 + 0.5 * (i % 2) for i in range(100)]
    right: dict[Hashable, float] = {i: float(v >= 1) for i, v in enumerate(values)}
    start = Measurement("rl", 0, Score.of(list(right.values())), Score.of(values), True, right, dict(enumerate(values)))
    none = dict.fromkeys(right, 0.0)
    same, more = Gain.of(right, right), Gain.of(none, dict.fromkeys(right, 2.0), 4.0)
    paid = replace(
        of.stages[-1], updates=3, unpaired="", start=start, end=replace(start, step=3), accuracy=same, reward=same,
        proxy=more,
    )  # fmt: skip
    said = stage_learned(of.run, paid, "runs/x")
    assert said.word == "paid more, not more often right"
    assert "its reward pays 0.000 -> 2.000" in said.text and "a larger KL" in said.advice[1]
    better = Gain.of(none, dict.fromkeys(right, 1.0))
    assert stage_learned(of.run, replace(paid, accuracy=better, reward=better), "runs/x").word == "learned"


# --- pictures --------------------------------------------------------------------------------------------------------


def test_the_picture_in_characters() -> None:
    lines = picture([CurveLine("reward", ".", ((0, 0.0), (10, 1.0))), CurveLine("held", "X", ((10, 0.5),))], 20, 5)
    assert lines[0].endswith(".") and lines[2].endswith("X") and lines[4].strip().startswith("0.00 |.")
    assert "X held" in lines[-1] and all(len(x) <= 80 for x in lines)
    assert picture([CurveLine("reward", ".", ((1, math.nan),))]) == [] == picture([])
    for odd in (((-7, 0.5), (9, 1.0)), ((1, 1e308), (3, -1e308)), ((1, 1e14), (3, 1e14)), ((1, math.inf), (2, 0.0))):
        drawn = picture([CurveLine("reward", ".", odd, averaged=True)])
        assert all(len(x) <= 80 for x in drawn)


@pytest.mark.prove
def test_plots_are_written_and_refuse_what_is_not_there(
    run: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.svg", "x.png"):
        assert main(["plot", str(run), str(other), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    figure = posttrain.plot(run, gauges=("optim/grad_norm",))
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows no figure"
    assert [a.get_xlabel() for a in figure.axes] == ["step of sft", "step of rl"]
    assert [a.get_xlabel() for a in posttrain.plot(run).axes] == ["", "step of rl"]
    capsys.readouterr()
    assert "optim/grad_norm" in refused(capsys, "plot", str(run), "--gauge", "optim/grad_nor", code=2)
    assert ".svg, .png" in refused(capsys, "plot", str(run), "--out", "x.txt", code=2)


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_two_runs_are_paired_by_prompt(run: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = posttrain.compare(run, other)
    assert [g.letter for g in c.groups] == ["A", "B"] and c.prompts == 12
    assert c.groups[0].settings == {"rl.optimizer.lr": "0.0005"} and c.groups[1].settings == {
        "rl.optimizer.lr": "0.001"
    }
    a, b = (g.runs[0].measured for g in c.groups)
    mine = a.right if c.what == "accuracy" else a.outcomes
    theirs = b.right if c.what == "accuracy" else b.outcomes
    assert c.gains[0].over_prompts.mean == pytest.approx(sum(theirs[k] - mine[k] for k in mine) / 12)
    assert c.gains[0].over_seeds is None
    said = capsys.readouterr().out
    assert "another seed may" in " ".join(said.split()) and all(len(x) <= 80 for x in said.splitlines())


def test_what_differs_is_told_by_weight_and_a_stage_that_one_lacks_is_one_line() -> None:
    one, two = (apply(recipe("arithmetic"), words) for words in ([], ["sft=none", "algorithm=dapo", "rl.steps=9"]))
    two = apply(
        two, ["model.lora.rank=4", "evaluation.samples=3", *(f"rl.optimizer.{n}=0.5" for n in ("beta1", "eps"))]
    )
    a, b = differing([one, two], [settings_of(one), settings_of(two)])
    assert [*a][:4] == ["sft", "rl.algorithm.name", "model.lora", "rl.steps"] and [*a][-1] == "evaluation.samples"
    assert (a["sft"], b["sft"]) == ("supervised, 240 steps", "-") and not any(n.startswith("sft.") for n in a)
    assert (a["rl.algorithm.pull"], b["rl.algorithm.pull"]) == ("KL", "None") and "rl.algorithm.pull.coef" not in a
    assert b["rl.algorithm.shape"] == "Signed, Overlong" and b["model.lora"].startswith("rank=4, ")


def test_a_comparison_leads_with_the_sentence_and_ten_settings(
    run: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare_runs([run, other])
    many = {f"rl.x{i}": "1" for i in range(14)}
    found = replace(found, groups=tuple(replace(g, settings=many) for g in found.groups))
    show_comparison(PlainConsole(width=80), found)
    said = capsys.readouterr().out.splitlines()
    assert re.match("(B is|It cannot|B and A|A and B)", said[0]), said[0]
    assert sum(x.startswith("rl.x") for x in said) == 10 and any("the first 10 of 14 (all: --all)" in x for x in said)
    show_comparison(PlainConsole(width=80), found, every=True)
    assert sum(x.startswith("rl.x") for x in capsys.readouterr().out.splitlines()) == 14


def test_a_seed_that_was_run_twice_counts_once(
    run: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says nothing of what another seed would give, and its interval would be a point."""
    a, b = (Path(shutil.copytree(x, tmp_path / x.name)) for x in (run, other))
    c = compare_runs([run, other, a, b])
    assert [len(g.runs) for g in c.groups] == [2, 2]
    (gain,) = c.gains
    assert gain.over_seeds is None and gain.seeds == (1, 1) and not gain.by_seed
    assert gain.over_prompts == compare_runs([run, other]).gains[0].over_prompts
    assert main(["compare", str(run), str(a)]) == 0
    assert "the same settings and the same seed, 1" in " ".join(capsys.readouterr().out.split())


def test_seeds_that_agree_give_no_interval_of_a_point() -> None:
    assert over_seeds({1: 0.5}, {1: 0.75}) is None
    assert over_seeds({1: 0.5, 2: 0.25}, {1: 0.75, 2: 0.5}) is None, "equal differences"
    assert over_seeds({1: 0.5, 2: 0.5}, {3: 0.75, 4: 0.75}) is None
    one, two = over_seeds({1: 0.5, 2: 0.5}, {1: 0.75, 2: 0.5}), over_seeds({1: 0.5, 2: 0.5}, {3: 0.75, 4: 0.5})
    assert one is not None and one.low < 0 < one.high and one.prompts == 2
    assert two is not None and two.low < 0 < two.high and two.prompts == 4


def test_seeds_that_differ_much_are_not_the_same_whatever_prompts_say() -> None:
    def group(letter: str, *right: float) -> RunGroup:
        each = (dict.fromkeys(range(400), x) for x in right)
        score = Score(0.5, 0.0, 1.0, 400)
        runs = (Measurement("rl", 1, score, score, False, x, x) for x in each)
        members: Any = tuple(SimpleNamespace(seed=i, measured=m) for i, m in enumerate(runs))
        return RunGroup(letter, members, {})

    apart = [_gain(group("A", 0.3, b), group("B", b, 0.3), "accuracy", range(400)).word for b in (0.7, 0.301)]
    assert apart == ["cannot be told", "the same"]


@pytest.mark.prove
def test_seeds_are_grouped(run: Path, tmp_path: Path) -> None:
    """The same settings with another seed: one group. Two such groups: an interval over seeds, paired by seed."""
    second = play(tmp_path / "a2", "verifiable", *TINY, "seed=2")
    assert len(compare_runs([run, second]).groups) == 1
    b = [play(tmp_path / f"b{i}", "verifiable", *TINY, f"seed={i}", "rl.optimizer.lr=2e-3") for i in (1, 2)]
    c = compare_runs([run, b[0], second, b[1]])
    assert [[r.seed for r in g.runs] for g in c.groups] == [[1, 2], [1, 2]]
    gain = c.gains[0]
    assert gain.by_seed and gain.over_seeds is not None
    assert gain.over_seeds.mean == pytest.approx(gain.over_prompts.mean)


@pytest.mark.prove
def test_nonsense_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "twice" in refused(capsys, "compare", str(run), str(run), code=2)
    assert "two runs" in refused(capsys, "compare", str(run), code=2)
    arithmetic = play(tmp_path / "x", "arithmetic", *TINY)
    with pytest.raises(ConfigError, match=r"different rewards|share no held-out prompt"):
        compare_runs([run, arithmetic])
    judged = play(tmp_path / "y", "verifiable", *ONLY_RL, "env.rewards=exact")
    with pytest.raises(ConfigError, match="different rewards"):
        compare_runs([run, judged])
    blind = play(tmp_path / "z", "verifiable", *(w for w in ONLY_RL if "heldout" not in w), "env.heldout=0")
    with pytest.raises(ConfigError, match=r"env\.heldout=100"):
        compare_runs([run, blind])


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 3, 4, 4.5, 5, 8, 20, 200])
def test_students_point(freedom: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    true = stats.t.ppf(0.975, freedom)
    assert true * 0.998 <= student95(freedom) <= true * (1.002 if freedom >= 2 else 1.2)


@pytest.mark.prove
@pytest.mark.parametrize("recipe", ["verifiable", "dpo", "reward_model"])
def test_what_a_single_judgement_measured_is_read_everywhere(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its interval is infinite, which JSON has no number for. No episodes are recorded, so the checkpoint says it."""
    pairs = "".join(f'{{"prompt": "say {i}: ", "chosen": "{i}", "rejected": "{i}9"}}\n' for i in range(9))
    (tmp_path / "pairs.jsonl").write_text(pairs)
    judged = (f"env.prompts={tmp_path / 'pairs.jsonl'}", f"{recipe}.steps=2", f"{recipe}.batch=4")
    own = {"verifiable": TINY, "dpo": (*judged, "sft=none", "env.rewards=none"), "reward_model": judged}[recipe]
    words = [*(w for w in own if "heldout" not in w), *(w for w in SMALL if w not in own)]
    run = play(tmp_path / "run", recipe, *words, "env.heldout=1", "record_episodes=false")
    capsys.readouterr()
    assert main(["summary", str(run)]) == 0 and "[one prompt]" in capsys.readouterr().out
    assert "[one prompt]" in posttrain.load(run).__repr__()
    assert main(["plot", str(run), "--out", str(tmp_path / "p.svg")]) == 0
    assert main(["export", str(run), str(tmp_path / "m")]) == 0
    card = (tmp_path / "m" / "README.md").read_text()
    assert "inf " not in card and "-inf" not in card
    last = {"verifiable": "rl", "dpo": "dpo", "reward_model": "reward_model"}[recipe]
    posttrain.run(f"{last}.steps=4", f"{last}.wall_time=inf", resume=run, quiet=True)
    assert main(["summary", str(run)]) == 0
    json.loads((run / "run.json").read_text(), parse_constant=pytest.fail)
