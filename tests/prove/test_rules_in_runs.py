"""Live rules that no situation of `benchmarks/trust/situations.py` and no planted fault is about, each in a real run
that goes wrong in its way. Their healthy runs are those of `benchmarks/trust/taught.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import posttrain
from benchmarks.trust.blind import unwatched
from benchmarks.trust.situations import Stage, tuned
from posttrain.config.run import Reinforce
from posttrain.diagnose.rules.all_rules import findings
from posttrain.diagnose.rules.notes_once import findings_of
from posttrain.record import run_reader
from tests.faulty import smallest, start
from tests.mutants import FAULTS

pytestmark = pytest.mark.prove

REWARDS = """
import hashlib

def down(task, text):
    if hashlib.blake2b((task.id + text).encode()).digest()[0] < 80:
        raise ConnectionError("no answer")
    return float(text == task.answer)

def right(task, text):
    return float(text == task.answer)

def unreachable(task, text):
    return 0.0

def brief(task, text):
    return hashlib.blake2b(task.id.encode()).digest()[0] / 255 - 0.1 * min(len(text), 12) / 12
"""

WORLD = '''
from dataclasses import dataclass

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.single import Listed, SingleTurn


@dataclass(frozen=True, kw_only=True)
class Trap(SingleTurn):
    """The answer of a training task is its largest digit, that of a held-out task its first one."""

    @property
    def name(self):
        return "trap"

    def tasks(self, numbers, place, at):
        digits = [f"{x:03d}" for x in numbers]
        return tuple(
            Task(id=f"{place}{d}", prompt=f"max of {' '.join(d)}?", answer=f"so {at(d)}", info={"d": d}) for d in digits
        )

    @property
    def train(self):
        return Listed(self.tasks(range(0, 1000, 2), "t", max))

    @property
    def heldout(self):
        small_last = [x for x in range(1, 1000, 2) if f"{x:03d}"[0] != max(f"{x:03d}")]
        return self.tasks(small_last[: self.heldout_count], "h", lambda d: d[0])

    @property
    def alphabet(self):
        return "0123456789maxof ?s"

    def verify(self, attempt):
        return Verdict.value(float(attempt.text == attempt.task.answer))

    def key(self, task):
        return task.info["d"]

    def gold(self, task):
        return (task.answer,)

    def distractor(self, task):
        return ("so x",)
'''


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage(tuned(0), tmp_path_factory.mktemp("stage"))
    (stage.folder / "own.py").write_text(REWARDS)
    (stage.folder / "trap.py").write_text(WORLD)
    return stage


def found(stage: Stage, *words: str, lr: float = 1.0) -> set[str]:
    """Rules that speak in a run with these words."""
    before = set(stage.folder.glob("run-*"))
    output = stage.rl(*words, lr=lr)
    runs = set(stage.folder.glob("run-*")) - before
    assert len(runs) == 1, output
    (run,) = runs
    out = {f.rule for f in findings_of(run_reader.steps(run))}
    print(output)
    return out


def own(stage: Stage, *names: str) -> str:
    return "env.rewards=" + ",".join(f"{stage.folder / 'own.py'}:{n}" for n in names)


def test_a_judge_that_is_often_down(stage: Stage) -> None:
    assert found(stage, own(stage, "down"), "rl.steps=5") == {"judges_fail"}


def test_a_source_that_pays_nothing(stage: Stage) -> None:
    assert found(stage, own(stage, "right", "unreachable"), "rl.steps=7") == {"source_is_mute"}


def test_a_policy_that_runs_away_within_a_step(stage: Stage) -> None:
    assert "policy_runs_away" in found(stage, "rl.minibatches=4", "rl.epochs=2", "rl.steps=4", lr=100)


def test_answers_that_shrink_until_the_policy_says_one_thing(stage: Stage) -> None:
    """Shorter is paid a little, beside a reward of the task that no answer changes."""
    assert found(stage, own(stage, "brief"), "rl.steps=120", lr=2) >= {"length_drifts", "entropy_collapses"}


def test_held_out_reward_that_falls(stage: Stage) -> None:
    trap = f"env.name={stage.folder / 'trap.py'}:Trap"
    words = ("env.prompts=none", "env.rewards=none", trap, "env.heldout=150", "rl.steps=30", "rl.eval_every=3")
    assert found(stage, *words, lr=2) == {"heldout_falls"}


@pytest.mark.parametrize(
    ("fault", "rule"),
    [("old_logprob_after_step", "old_policy_is_the_new_one"), ("reference_trained", "reference_follows")],
)
def test_broken_machinery_shows_in_a_record_that_no_check_stopped(fault: str, rule: str, tmp_path: Path) -> None:
    """A check stops these runs before a rule could speak, so all are off here; the rules read the record."""
    run = smallest(FAULTS[fault], start(tmp_path), tmp_path, steps=6)
    with unwatched():
        posttrain.run(run, *FAULTS[fault].shows, f"fault={fault}", out=tmp_path / "run", quiet=True, allow_fault=True)
    stage, steps = run.stages[-1], run_reader.steps(tmp_path / "run")
    assert isinstance(stage, Reinforce)
    if fault == "old_logprob_after_step":
        stage = replace(stage, minibatches=2)
    spoken = {f.rule for i in range(1, len(steps) + 1) for f in findings(steps[:i], stage)}
    assert rule in spoken
