"""The simulated loop beside closed forms and measured runs, and what `posttrain plan --sweep` answers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.plan_asynchrony import RESULTS, beside, holds, simulated
from posttrain.cli import main
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.plan.lengths import POINTS, Lengths
from posttrain.plan.simulation.simulated_loop import SimulatedLoop
from posttrain.plan.simulation.simulator import MOST_PLAYED, simulate
from posttrain.system.errors import ConfigError

EXPONENTIAL = [-math.log(1 - (i + 0.5) / 2000) for i in range(2000)]
PAIRS = [(r, t, k) for r, t in ((1.0, 2.0), (1.0, 1.0), (2.0, 1.0)) for k in (0, 1, 2, 4)]


@dataclass(frozen=True)
class CoupledStages:
    """Engines that need `rollout` seconds for the groups of a step, and a learner that needs `learn`, sync included.

    The engines work at one step's groups after the other. Where they are `even` both always take as long. Else both
    times are exponential, and a step that has its groups waits in a queue of at most `staleness` others (the queue
    M/M/1/K+1 with K = staleness).
    """

    rollout: float
    learn: float
    staleness: int
    even: bool = False

    @property
    def _waiting(self) -> list[float]:
        """Entry n is the probability that n steps have all their groups and are not learned yet, the one that the
        learner works at included; n = 0 to staleness + 1."""
        # p_n is proportional to (learn / rollout)^n, as in every M/M/1 queue. All powers are divided by the largest one
        # where the ratio is above 1, so that none overflows.
        ratio = self.learn / self.rollout
        each = [ratio ** (n - self.staleness - 1 if ratio > 1 else n) for n in range(self.staleness + 2)]
        return [x / math.fsum(each) for x in each]

    @property
    def step(self) -> float:
        """Mean seconds from one update to the next."""
        # The learner works unless no step has its groups, and each step takes it `learn` seconds, so
        # 1 / step = (1 - p_0) / learn.
        if not self.even:
            return self.learn / (1 - self._waiting[0])
        return max(self.rollout, self.learn) if self.staleness else self.rollout + self.learn

    @property
    def idle(self) -> dict[str, float]:
        """Share of the time in which each waits for the other."""
        return {"learner": 1 - self.learn / self.step, "engines": 1 - self.rollout / self.step}

    @property
    def behind(self) -> float:
        """Mean age of a token: the updates between its sampling and its own step's."""
        # While the queue is full the engines wait and say nothing, so that state is left out. A token that is said with
        # n steps before it is learned n steps later.
        if not self.even:
            said = self._waiting[:-1]
            return math.fsum(n * p for n, p in enumerate(said)) / math.fsum(said)
        if not self.staleness:
            return 0.0
        # Faster engines keep the queue full. Slower ones never wait, and while the learner is at the step before,
        # `learn` of `rollout` seconds, what they say is one step old.
        return float(self.staleness) if self.rollout < self.learn else self.learn / self.rollout


def loop(**changes: Any) -> SimulatedLoop:
    """Four groups of four answers of 50 tokens, a token of each every 10 ms; learning takes as long."""
    given: dict[str, Any] = {"prompts": 4, "siblings": 4, "lengths": (50,), "learn": (0.5,), "passes": lambda n: 0.01}
    return SimulatedLoop(**given | changes)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rollout", "learn", "staleness"), PAIRS)
def test_two_stages_that_wait_for_each_other(rollout: float, learn: float, staleness: int) -> None:
    """Shares of idle time, mean age and seconds of a step: exactly where all times are equal, and within the noise of
    4,000 steps where they are exponential."""
    one: dict[str, Any] = {"prompts": 1, "slots": 1, "staleness": staleness, "passes": lambda n: rollout / 1000}
    even, form = (
        simulate(SimulatedLoop(**one, lengths=(1000,), learn=(learn,)), 20),
        CoupledStages(rollout, learn, staleness, even=True),
    )
    assert even.step == pytest.approx(form.step) and even.behind == pytest.approx(form.behind, abs=1e-6)
    assert {n: even.idle[n] for n in form.idle} == pytest.approx(form.idle, abs=1e-6)
    drawn = SimulatedLoop(**one, lengths=[1000 * x for x in EXPONENTIAL], learn=[learn * x for x in EXPONENTIAL])
    found, form = simulate(drawn, 4000), CoupledStages(rollout, learn, staleness)
    assert found.step == pytest.approx(form.step, rel=0.05) and found.behind == pytest.approx(form.behind, abs=0.1)
    assert {n: found.idle[n] for n in form.idle} == pytest.approx(form.idle, abs=0.04)


def test_a_synchronous_step_waits_for_its_longest_answer() -> None:
    """The mean of the longest of n answers, by order statistics."""
    at = Lengths(prompt=1, mean=100, most=10**6, cv=1.0)
    drawn = [at.quantile((i + 0.5) / POINTS) for i in range(POINTS)]
    found = simulate(loop(prompts=1, siblings=16, lengths=drawn, learn=(0.0,)), 400)
    assert found.step == pytest.approx(0.01 * at.longest(16), rel=0.05)


# --- the rule of the queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_older_than_the_bound(seed: int) -> None:
    """Whatever takes how long: tools, verifiers, filters, given up siblings, dying engines and all ways to update."""
    lengths = [float(5 + (i * 37 + seed * 11) % 90) for i in range(50)]
    for update in ("inflight", "drain", "rest"):
        for apart in (True, False):
            wild = loop(
                staleness=seed % 3, lengths=lengths, turns=1 + seed % 2, waits=(0.0, 0.4), reward=0.05, judges=2,
                kept=0.7, extra=1, failed=0.1, deaths=5.0, restart=0.2, engines=2, slots=4, sync=0.05, handle=0.001,
                update=update, apart=apart,
            )  # fmt: skip
            found = simulate(wild, 12, seed)
            assert max(found.ages) <= seed % 3 and sum(found.ages.values()) == pytest.approx(1)
            assert all(0 <= x <= 1 for x in (*found.idle.values(), found.slots_used, found.lost))
            assert found == simulate(wild, 12, seed), "the same seed is the same loop"


def test_what_each_setting_does() -> None:
    base = simulate(loop(staleness=1))
    assert base.step == pytest.approx(0.5) and base.behind == 1 and base.lost == 0
    assert simulate(loop(staleness=1, apart=False)).step == pytest.approx(1.0), "in one process they take turns"
    slow = loop(staleness=2, lengths=(200,), slots=8)
    assert simulate(slow).behind < simulate(replace(slow, update="drain")).behind == 2
    assert simulate(loop(kept=0.5), 60).lost == pytest.approx(0.5, abs=0.05)
    assert simulate(loop(failed=0.25), 100).lost == pytest.approx(0.25, abs=0.04)
    long = loop(lengths=[*[50.0] * 9, 500.0], learn=(0.0,))
    assert simulate(replace(long, extra=4), 60).step < 0.5 * simulate(long, 60).step, "the longest are given up"
    judged = simulate(loop(reward=0.1, judges=1), 20)
    assert judged.step == pytest.approx(0.5 + 16 * 0.1 + 0.5) and judged.idle["judges"] == pytest.approx(1 - 1.6 / 2.6)
    dying = simulate(loop(engines=2, deaths=3.0, restart=1.0), 60)
    assert dying.lost > 0 and dying.step > simulate(loop(engines=2), 60).step
    assert RolloutRequest(groups=1, siblings=1).most == MOST_PLAYED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": 0}, "prompts=0: must be at least 1"),
        ({"staleness": -1}, "staleness=-1"),
        ({"learn": ()}, "at least one number"),
        ({"kept": 0.0}, "kept and failed"),
        ({"deaths": 0.001, "restart": 1.0}, "no step end"),
    ],
)
def test_a_loop_that_means_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(loop(**changes))


# --- held to runs -----------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_simulated_runs_wait_as_long_as_measured_ones() -> None:
    """Idle shares within 5 points and the mean age within .2 or a tenth, of each run that was recorded."""
    told = json.loads(RESULTS.read_text())
    for name, rows in told["rows"].items():
        for row in rows:
            compared = beside(row, simulated(told["work"][name], told["shape"], row))
            assert holds(compared), (name, row["staleness"], compared)


# --- the command ------------------------------------------------------------------------------------------------------

LARGE = ["plan", "grpo", "model=Qwen2.5-7B", "machine=8xH100", "placement=processes", "placement.engines=4"]


@pytest.mark.prove
def test_a_sweep_is_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.svg"
    assert main([*LARGE, "engine.update=inflight", "--sweep", "staleness=0,1,2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.strip()[:1] in "012" and "most" in line]
    assert [r[0] for r in rows[:3]] == ["0", "1", "2"] and float(rows[1][1]) < float(rows[0][1])
    assert "steps behind" in said and "tokens by steps behind" in out.read_text()
    assert main([*LARGE, "rl.staleness=1", "--sweep", "engine.update=drain,inflight", "--json"]) == 0
    drain, inflight = json.loads(capsys.readouterr().out)["rows"]
    assert inflight["behind"] < drain["behind"] == 1
    assert main([*LARGE, "--kept", "1e-6", "--sweep", "staleness=0"]) == 0  # nothing is learned from in so few steps
    capsys.readouterr()
    assert main([*LARGE[:4], "--sweep", "staleness=0,1"]) == 0
    assert "placement=local: the engine waits" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "staleness"], "write a knob and 1 to 12 values"),
        (["--sweep", "staleness=-1"], "must be >= 0"),
        (["--sweep", "staleness=some"], "some"),
        (["--sweep", "color=1"], "no such setting"),
        (["--sweep", "answer=long"], "must be a number"),
        (["--sweep", "staleness=0,1", "--out", "x.docx"], "its ending says"),
        (["--sweep", "staleness=0,1", "--out", "nope/x.svg"], "there is no folder nope"),
        (["--out", "x.svg"], "only --sweep draws"),
    ],
)
def test_a_sweep_of_nonsense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*LARGE, *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_stage_that_samples_nothing_has_no_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sft", "model=Qwen2.5-7B", "machine=H100", "--sweep", "batch=1,2"]) == 2
    assert "samples nothing" in capsys.readouterr().err
