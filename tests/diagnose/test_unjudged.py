"""What could not be judged is seen: on the progress line, in notes, gauges and the summary, failures apart from
abstentions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import posttrain
from posttrain.checks.judging.verdict_checks import measured_right
from posttrain.core.types import Episode, Group, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.heldout_evaluation import report
from posttrain.stages.reinforce.reinforce_stage import productive_band
from posttrain.system.errors import InvariantError
from tests.engine.run_parts import mine, play, rl_steps

SOME = """
def reward(task, text):
    if sum(map(ord, text)) % 5 == 0:
        raise OSError("the judge did not answer")
    if sum(map(ord, text)) % 5 == 1:
        return None
    return float(len(text) % 2)
"""
WORDS = ("rl.max_failed=1", "seed=1")


@pytest.mark.prove
def test_a_reward_that_raises_now_and_then_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below max_failed the run goes on, and says how many failed, of what, and that others were abstained from."""
    folder = play(tmp_path / "run", *mine(tmp_path, reward=SOME), *WORDS)
    said = capsys.readouterr().out
    steps = rl_steps(folder)
    failed, abstained = (sum(s.gauges[f"rollout/{what}"].sum for s in steps) for what in ("failed", "abstained"))
    assert failed and abstained and sum(s.gauges["rollout/unjudged"].sum for s in steps) == failed + abstained
    assert sum(s.gauges["failed/raised"].sum for s in steps if "failed/raised" in s.gauges) == failed
    assert sum(s.gauges["abstained/reward"].sum for s in steps if "abstained/reward" in s.gauges) == abstained
    assert not any(n.startswith("verdict/") for s in steps for n in s.gauges)
    told = [n for s in steps for n in s.notes if "could not be judged" in n]
    assert "reward: raised x" in told[0] and "the judge did not answer" in told[0] and len(told) <= 2
    assert f"rl: a source failed to judge {failed:.0f} of 24 samples (raised x {failed:.0f})" in said
    assert f"rl: every source abstained from {abstained:.0f} of 24 samples" in said
    assert "note: " in said and "failed: reward: raised x" in said
    line = next(x for x in said.splitlines() if x.startswith("rl 2/2"))
    assert "failed " in line or "abstained " in line, line


@pytest.mark.prove
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise OSError('the judge is down')", "failed: reward: raised x 4"),
        ("return None", "4 abstained: no source gave a score"),
    ],
    ids=["all failed", "all abstained"],
)
def test_nothing_judged_is_no_pass_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, word: str
) -> None:
    """No 0.0 %, no advice to teach it more: nothing is known, and why. The table has no number either."""
    reward = f"def reward(task, text):\n    {body}\n"
    folder = play(tmp_path / "run", *mine(tmp_path, reward=reward), *WORDS)
    said = capsys.readouterr().out
    assert "pass rate before RL: not known, none of 4 held-out samples could be judged" in said and word in said
    assert " 0.0%" not in said and "teach it more" not in said and "nan" not in said
    assert all(s.gauges["rollout/reward"].count == 0 for s in rl_steps(folder))
    shown = posttrain.evaluate(folder, quiet=True)
    assert shown.unmeasured and shown.accuracy.known is None and shown.unjudged == 4
    result = posttrain.run(resume=folder, quiet=True)
    assert result.accuracy is None and result.reward is None


@pytest.mark.prove
def test_a_graded_reward_and_accuracy_have_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half points are no right answers: accuracy is pass@1, the mean of what was paid is the mean reward, in tables,
    record and results."""
    graded = "def reward(task, text):\n    return (0.0, 0.5, 1.0)[sum(map(ord, text)) % 3]\n"
    own = [w for w in mine(tmp_path, reward=graded) if not w.startswith("env.heldout")]
    folder = play(tmp_path / "run", *own, "env.heldout=8")
    said = capsys.readouterr().out
    assert "held-out accuracy after each stage" in said and "held-out mean reward after each stage" in said
    found = posttrain.evaluate(folder, samples=6)
    table = capsys.readouterr().out
    assert "mean reward (sampled)" in table and "accuracy (sampled)" in table
    assert found.accuracy == found.pass_at[1] and found.reward.mean != found.accuracy.mean and found.graded
    assert {"eval/accuracy", "eval/reward", "eval/greedy", "eval/greedy_reward", "eval/pass_at_1"} <= set(
        found.gauges()
    )
    outcomes = [r for g in found.groups for r in g.rewards]
    assert found.reward.mean == pytest.approx(sum(outcomes) / len(outcomes))
    assert found.accuracy.mean == pytest.approx(sum(r == 1 for r in outcomes) / len(outcomes))


def test_the_evaluation_counts_as_cut_off_what_a_step_does() -> None:
    """Every limit on tokens or time, not that of a turn alone; a limit on turns cuts nothing off."""
    task = Task("a", "1 + 1", 2)
    for stop in Stop:
        e = Episode(task, 0, 0, (), stop, (Judged("v", 1.0, Verdict.value(1.0)),))
        assert report([Group(task, 0, (e,))], None).truncated == (stop in ("length", "tokens", "context", "time"))


def test_rows_that_ask_the_same_are_one_task_in_every_number() -> None:
    """Three rows, two prompts: the mean is over the prompts, as in the table of a run, and so is its interval."""
    rows = [(Task("a", "?"), 0.0), (Task("b", "?"), 0.4), (Task("c", "!"), 1.0)]
    judged = [(t, (Judged("mine", 1.0, Verdict.value(x)),)) for t, x in rows]
    groups = [Group(t, 0, (Episode(t, 0, 0, (), Stop.SAID, v),)) for t, v in judged]
    found = report(groups, None)
    assert found.reward.mean == pytest.approx(0.6) and found.reward.prompts == 2
    measured_right(found)
    with pytest.raises(InvariantError, match="held-out mean reward is reported as"):
        measured_right(replace(found, reward=replace(found.reward, mean=1.4 / 3)))


def test_the_rate_says_what_was_left_out() -> None:
    """Half of the samples could not be judged: the rate is of the others, and the line says so."""
    task = Task("t", "?")

    def answer(i: int, verdict: Verdict) -> Episode:
        return Episode(task, 0, i, (), Stop.SAID, (Judged("mine", 1.0, verdict),))

    verdicts = [Verdict.value(1.0), Verdict.value(0.0), Verdict.failed("raised", "line 3"), Verdict.abstain()]
    line = productive_band(report([Group(task, 0, tuple(answer(i, v) for i, v in enumerate(verdicts)))], None))
    assert "50.0%" in line and "2 of 4 samples could not be judged and are left out" in line


@pytest.mark.parametrize(
    ("measured", "counted", "word"),
    [(Verdict.failed("down", "no answer"), (3, 0), "truth: down x 3"), (Verdict.abstain(), (0, 3), "abstained")],
)
def test_an_outage_of_what_is_measured_is_no_pass_rate(measured: Verdict, counted: tuple[int, int], word: str) -> None:
    """Rewards were paid, and the outcome is what is measured: nothing is known of it."""
    task, paid = Task("t", "?"), Judged("mine", 1.0, Verdict.value(1.0))
    verdicts = (paid, Judged("truth", 1.0, measured, measured=True))
    found = report([Group(task, 0, tuple(Episode(task, 0, i, (), Stop.SAID, verdicts) for i in range(3)))], None)
    assert (found.failed, found.abstained) == counted
    line = productive_band(found)
    assert "not known, none of 3 held-out samples could be judged" in line and word in line and "0.0%" not in line
