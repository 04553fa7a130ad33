"""Every planted fault is caught by a named check, in a tiny run that is otherwise real; and none is planted by
accident. Those that `posttrain faults` teaches are always played, mutants with the long suites."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain
from posttrain.cli import main
from posttrain.faults import FAULTS as TAUGHT
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError
from tests.faulty import AHEAD, ELSEWHERE, OVER_RANKS, ROOT, STEPS, catch, smallest, start
from tests.mutants import FAULTS, find, planted


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("start"))


OPEN = {"verifier_has_a_hole"}
"""Faults that nothing catches yet; docs/research/trust.md lists them."""


SHOWN = {
    *("sides_swapped", "preference_sign_flip", "reference_trained_along"),
    *("worse_sample_chosen", "opponent_is_the_policy", "nash_term_sign_flip"),
    *("wrong_completion_kept", "hint_left_in_prompt", "duplicates_kept", "kept_under_other_prompt", "rounds_add_up"),
    *("age_not_counted", "stale_relabelled_fresh", "proximal_of_older_weights", "queue_drops_the_oldest"),
    *("group_learned_twice", "queue_without_versions", "pushed_inside_a_step", "inflight_cache_kept"),
}
"""Faults of stages that learn from preferences or from their own samples, or ask ahead, that are planted here.
`tests/prove/test_trust.py` plants all of them."""
LONG = {
    *("verifier_outage_as_zero", "leaf_value_not_backed_up", "stale_relabelled_fresh", "verifier_has_a_hole"),
    *("checkpoint_of_old_weights", "optimizer_lost_at_resume", "sync_skipped", "truncation_as_failure"),
}
"""Faults whose run takes longer than a second."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in TAUGHT and n not in LONG else pytest.mark.prove)
        for n, f in FAULTS.items()
        if f.needs not in ("preference", "online", "reject", "pool", *OVER_RANKS, *ELSEWHERE, *AHEAD) or n in SHOWN
    ],
)
def test_fault_is_caught(name: str, model: Path, tmp_path: Path) -> None:
    caught = catch(FAULTS[name], model, tmp_path)
    assert (caught is None) is (name in OPEN)
    if caught is not None:
        assert caught.step <= STEPS and len(caught.message) > 60


def test_at_least_nine_in_ten_are_caught() -> None:
    assert len(FAULTS) >= 25 and len(OPEN) <= 0.1 * len(FAULTS)


@pytest.mark.prove
@pytest.mark.parametrize(
    "needs",
    [
        "",
        "tool",
        "preference",
        "online",
        "reject",
        "reward_model",
        "judge",
        "judge_anew",
        "judging",
        "votes",
        "yes",
        "verifies",
        "process",
        "implicit",
        "regenerate",
        "ahead",
    ],
)
def test_the_runs_they_are_planted_in_are_healthy_without_them(needs: str, model: Path, tmp_path: Path) -> None:
    faults = [f for f in FAULTS.values() if f.needs == needs]
    posttrain.run(smallest(faults[0], model, tmp_path, steps=6), out=tmp_path / "healthy", quiet=True)
    steps = run_reader.steps(tmp_path / "healthy")
    assert [s.index for s in steps][-6:] == [*range(1, 7)]
    assert not [n for s in steps for n in s.notes if n.startswith("rule ")]


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_replaces_what_exists_and_puts_it_back(name: str) -> None:
    fault = FAULTS[name]
    module, _, path = fault.seam.partition(":")
    owner = importlib.import_module(module)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = inspect.getattr_static(owner, last)
    with planted(name):
        assert inspect.getattr_static(owner, last) is not real
    assert inspect.getattr_static(owner, last) is real
    assert fault.what and fault.harm and fault.source and not fault.what.endswith(".")


def test_a_fault_needs_to_be_asked_for_twice(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = smallest(None, model, tmp_path)
    with pytest.raises(ConfigError, match=r"plants a bug on purpose.*--allow-fault.*allow_fault=True"):
        posttrain.run(run, "fault=sign_flip", out=tmp_path / "no", quiet=True)
    with pytest.raises(ConfigError, match="did you mean 'sign_flip'"):
        posttrain.run(run, "fault=sign_flop", out=tmp_path / "no", quiet=True, allow_fault=True)
    assert not (tmp_path / "no").exists()
    assert main(["run", "arithmetic", "fault=sign_flip", "--out", str(tmp_path / "no")]) == 2
    assert "--allow-fault" in capsys.readouterr().err


@pytest.mark.prove
def test_a_planted_fault_is_said_aloud_and_written_down(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = smallest(None, model, tmp_path, steps=1)
    posttrain.run(run, "fault=optimizer_lost_at_resume", out=tmp_path / "run", allow_fault=True)
    said = capsys.readouterr().out
    assert said.count("PLANTED FAULT optimizer_lost_at_resume") == 2
    assert run_reader.run_file(tmp_path / "run").run.fault == "optimizer_lost_at_resume"
    with pytest.raises(ConfigError, match="plants a bug"):
        posttrain.run(resume=tmp_path / "run", quiet=True)


def test_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in said] == list(TAUGHT)
    assert main(["faults", "std_ddof"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert find("std_ddof").harm in told and find("std_ddof").lesson in told
    assert main(["faults", "std_dof"]) == 2


def test_the_package_has_those_that_teach() -> None:
    """And `tests/mutants` the others. tests/prove/test_trust.py runs the commands that are printed of each."""
    assert list(FAULTS)[: len(TAUGHT)] == list(TAUGHT)
    assert {n for n, f in FAULTS.items() if f.lesson and f.caught_by} == set(TAUGHT)
    assert {f.twin.__module__.partition(".")[0] for n, f in FAULTS.items() if n not in TAUGHT} == {"tests"}
    assert 35 <= len(TAUGHT) <= 45 and len(FAULTS) >= 236


def test_a_fault_goes_to_another_process_with_the_module_that_plants_it() -> None:
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).name)"
    sent = pickle.dumps(FAULTS["rank_has_own_denominator"])
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.decode().strip() == "rank_has_own_denominator"


def test_the_page_lists_every_fault() -> None:
    """benchmarks/trust/trust.py measures docs/research/trust.md; a fault that is not in it has not been measured."""
    page = (ROOT / "docs/research/trust.md").read_text().split("## Planted faults")[1].split("## Healthy runs")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.M) == list(FAULTS)
    assert set(re.findall(r"^\| `(\w+)` \|.*\*\*open\*\*", page, flags=re.M)) == OPEN
