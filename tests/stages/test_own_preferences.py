"""Preference algorithms with pieces that a user wrote: they are trained with, read without their file, and go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import posttrain
from posttrain.build.request.algorithm_file import algorithm_of, reward_algorithm
from posttrain.build.request.run_file import from_yaml, to_yaml
from posttrain.cli import main
from posttrain.config.run import Env, Optimizer, Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.system.errors import ConfigError, RunFolderError
from tests.engine.run_parts import forget
from tests.tiny import MODEL

OWN = '''
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from posttrain.algorithm.preference.preference_link import divergence, link, noisy, owed, statistic
from posttrain.algorithm.preference.preference_loss import added
from posttrain.ladder.algorithm import patch
from posttrain.ladder.policy_rows import GRPO
from posttrain.ladder.pieces.preference_pieces import Added, LabelNoise, MarginTerm, Statistic
from posttrain.ladder.pieces.link import Link
from posttrain.ladder.preference_rows import CPO, DPO
from posttrain.core.streams import SIDE, WEIGHT


@dataclass(frozen=True, kw_only=True)
class Written(Link):
    """What DPO's link does, written again, to a power."""

    power: float = 1.0

    def words(self):
        return f"(log(1 + exp(-x)))^{self.power:g}"


@link.register
def _(kind: Written, of):
    return -logsigmoid(of.x_U) if kind.power == 1 else (-logsigmoid(of.x_U)) ** kind.power


@dataclass(frozen=True, kw_only=True)
class Shorter(Statistic):
    """The sum, divided by the root of the length."""

    def words(self):
        return "sum of l / sqrt(|y|)"


@statistic.register
def _(kind: Shorter, of):
    return of.sum(of.l_M) / of.length_E.sqrt()


@dataclass(frozen=True, kw_only=True)
class Tilted(LabelNoise):
    rate: float = 0.1

    def words(self):
        return f"f(x) + {self.rate:g} f(-x)"


@noisy.register
def _(noise: Tilted, kind, of):
    return link(kind, of) + noise.rate * link(kind, of.swapped())


@dataclass(frozen=True, kw_only=True)
class Double(MarginTerm):
    half: float = 0.25

    def words(self):
        return f"2 * {self.half:g}"


@owed.register
def _(kind: Double, margin_U, beta):
    return 2 * kind.half


@dataclass(frozen=True, kw_only=True)
class Unlikely(Added):
    coef: float = 0.1

    def words(self):
        return f"{self.coef:g} log pi(rejected)"


@added.register
def _(term: Unlikely, logp_M, batch):
    return term.coef * (batch[WEIGHT] * (batch[SIDE] == 0) * logp_M).sum()


LINK = patch(DPO, "loss", "-", link=Written())
RL = patch(GRPO, "rl", "-", aggregate="constant")


def whole():
    pieces = {"link": Written(power=1.5), "statistic": Shorter(), "noise": Tilted(), "margin": Double()}
    return patch(DPO, "whole", "-", add=(Unlikely(),), **pieces)
'''


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget()


def built() -> Run:
    stage = Preference(
        name="dpo",
        steps=3,
        batch=4,
        optimizer=Optimizer(lr=1e-3, warmup=1),
        checkpoint_every=1,
        eval=False,
        ahead=False,
    )
    env = Env(name="arithmetic", args={"max_terms": 2, "max_operand": 4}, heldout=6)
    return Run(recipe="tiny", model=MODEL, env=env, stages=(stage,), slots=16, threads=1, deterministic=True)


def file(folder: Path) -> Path:
    (folder / "own.py").write_text(OWN)
    return folder / "own.py"


def digests(folder: Path) -> tuple[str, str]:
    return run_reader.record_digest(folder), find(folder).state["weights"]


def played(folder: Path, *words: str, steps: int = 3) -> Path:
    posttrain.run(built(), f"dpo.steps={steps}", *words, out=folder, quiet=True)
    return folder


@pytest.mark.prove
def test_a_link_of_ones_own_is_the_mathematics_that_it_writes(tmp_path: Path) -> None:
    """DPO's link written again gives DPO's weights bit for bit; another power does not."""
    own = file(tmp_path)
    right = digests(played(tmp_path / "dpo"))[1]
    assert digests(played(tmp_path / "same", f"algorithm={own}:LINK"))[1] == right
    other = played(tmp_path / "other", f"algorithm={own}:LINK", "link.power=2")
    assert digests(other)[1] != right
    stage = run_reader.run_file(other).run.stage("dpo")
    assert isinstance(stage, Preference) and stage.algorithm.link.power == 2  # type: ignore[attr-defined]


@pytest.mark.prove
def test_every_piece_acts_and_is_said_to_be_unchecked(tmp_path: Path) -> None:
    """Before the first step the policy is its reference, so the loss follows from the numbers in the file."""
    run = played(tmp_path / "whole", f"algorithm={file(tmp_path)}:whole", steps=1)
    (step,) = run_reader.steps(run)
    both = math.log(1 + math.exp(0.5)) ** 1.5 + 0.1 * math.log(1 + math.exp(-0.5)) ** 1.5
    want = both + 0.1 * step.gauges["preference/rejected_logp"].mean  # every pair weighs the same
    assert step.gauges["preference/loss"].mean == pytest.approx(want, rel=1e-5)
    note = "no second computation covers Shorter, Written, Tilted, Double, Unlikely"
    assert any(note in n for n in step.notes)


@pytest.mark.prove
def test_such_a_run_is_read_without_its_file_and_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = file(tmp_path)
    run = played(tmp_path / "a", f"algorithm={own}:whole")
    forget()
    own.rename(tmp_path / "elsewhere.py")
    found, again = run_reader.run_file(run), run_reader.run_file(run)
    assert sorted(p.name for p in found.absent) == ["Double", "Shorter", "Tilted", "Unlikely", "Written"]
    assert found.run == again.run
    for command in (["show", str(run)], ["summary", str(run)]):
        assert main(command) == 0, command
    assert main(["run", "--resume", str(run), "dpo.steps=4"]) == 2
    assert "own.py, and that file is not there. Put it back as it was" in capsys.readouterr().err
    (tmp_path / "elsewhere.py").rename(own)
    assert main(["run", "--resume", str(run), "dpo.steps=4"]) == 0
    forget()
    assert main(["run", "--resume", str(run), "dpo.steps=5", f"algorithm={own}:LINK"]) == 2
    assert "is not the one that the run was begun with (whole)" in capsys.readouterr().err
    assert [s.index for s in run_reader.steps(run)] == [1, 2, 3, 4]


@pytest.mark.prove
def test_killed_and_resumed_it_is_the_straight_run(tmp_path: Path) -> None:
    word = f"algorithm={file(tmp_path)}:whole"
    run = played(tmp_path / "cut", word, steps=2)
    posttrain.run("dpo.steps=4", resume=run, quiet=True)
    assert digests(run)[1] == digests(played(tmp_path / "straight", word, steps=4))[1]


@pytest.mark.prove
def test_it_is_handed_from_python_and_written_into_yaml(tmp_path: Path) -> None:
    own = file(tmp_path)
    given = algorithm_of(f"{own}:LINK")
    assert isinstance(given, PreferenceAlgorithm)
    posttrain.run(built(), algorithm=given, out=tmp_path / "python", quiet=True)
    assert digests(tmp_path / "python")[1] == digests(played(tmp_path / "cli", f"algorithm={own}:LINK"))[1]
    run = replace(built(), stages=(replace(built().stages[0], algorithm=given),))  # type: ignore[call-arg]
    assert "Written" in to_yaml(run)
    stage = from_yaml(to_yaml(built()).replace("algorithm: dpo", f"algorithm: {own}:LINK"), "my.yaml").stage("dpo")
    assert isinstance(stage, Preference) and type(stage.algorithm.link).__name__ == "Written"


def test_a_ladder_is_not_taken_for_the_other(tmp_path: Path) -> None:
    own = file(tmp_path)
    with pytest.raises(ConfigError, match="the run has 0 stages that learn from reward"):
        posttrain.run(built(), f"algorithm={own}:RL", out=tmp_path / "no", quiet=True)
    with pytest.raises(ConfigError, match="learns from preferences, and recorded rollouts are judged by reward"):
        reward_algorithm(f"{own}:LINK")
    text = to_yaml(built()).replace("algorithm: dpo", f"algorithm: {own}:RL")
    assert f"{own}:RL" in text
    with pytest.raises(ConfigError, match="learns from reward, and this stage learns from preferences"):
        from_yaml(text, "my.yaml")
    assert not (tmp_path / "no").exists()


def test_the_ladder_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = file(tmp_path)
    assert main(["ladder", "--diff", "dpo", f"{own}:whole"]) == 0
    said = capsys.readouterr().out
    assert "written(power=1.5)" in said and "shorter" in said
    assert main(["ladder", f"{own}:whole"]) == 0
    assert "(log(1 + exp(-x)))^1.5" in capsys.readouterr().out


@pytest.mark.prove
def test_a_strange_record_is_damage(tmp_path: Path) -> None:
    run = played(tmp_path / "a", f"algorithm={file(tmp_path)}:LINK", steps=1)
    forget()
    path = run / "run.json"
    data = json.loads(path.read_text())
    data["run"]["stages"][0]["algorithm"]["link"]["__class__"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(RunFolderError, match="it has a field '__class__'"):
        run_reader.run_file(run)
