"""The stage that learns from preferences, end to end: its data, what it compares with, and how it goes on."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import posttrain
from posttrain.build.build_environments import make_environment
from posttrain.build.request.run_file import from_yaml, to_yaml
from posttrain.config.model_settings import Lora
from posttrain.config.overrides import apply
from posttrain.config.run import Env, Optimizer, Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.core.batch import Packed
from posttrain.core.gauge import Step
from posttrain.engine.learner.frozen_reference import AdapterOff
from posttrain.engine.learner.learner import FrozenScorer
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.role.learning.reference_scores import FILE, ReferenceScores
from posttrain.stages.preference.judged_batches import AgreementReport
from posttrain.stages.preference.preference_stage import PreferenceDriver
from posttrain.system import files
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError
from tests.tiny import play, tiny_parts, tiny_run

OFFLINE = [
    name for name, a in PREFERENCES.items() if not a.online and a.kind in ("pair", "label") and not a.reads_margin
]


def preference_run(**settings: Any) -> Run:
    """SFT for a few steps, then a few steps on pairs."""
    run = tiny_run()
    given = {"steps": 3, "batch": 4, "optimizer": Optimizer(lr=1e-3, warmup=1), "checkpoint_every": 1} | settings
    return replace(run, stages=(run.stages[0], Preference(name="dpo", **given)))


def lines(folder: Path) -> list[Step]:
    return [s for s in run_reader.steps(folder) if s.stage == "dpo"]


def finished(folder: Path, run: Run) -> list[Step]:
    asyncio.run(play(tiny_parts(folder, run)))
    return lines(folder)


@pytest.mark.prove
def test_before_the_first_step_the_policy_is_the_reference(tmp_path: Path) -> None:
    """Its margin is 0 and its loss log 2; after three steps the chosen completions are ahead."""
    first, *_, last = finished(tmp_path / "run", preference_run(eval_every=1))
    assert first.gauges["preference/loss"].mean == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first.gauges["preference/margin"].mean) < 1e-5
    assert last.gauges["preference/margin"].mean > 0
    assert "heldout/agreement" in last.gauges or "heldout/agreement" in first.gauges


def test_the_stage_tells_how_many_held_out_pairs_it_orders_as_judged(tmp_path: Path) -> None:
    results = asyncio.run(play(tiny_parts(tmp_path / "run", preference_run(steps=12))))
    result = results[-1]
    assert result.agreement is not None and result.agreement[1] <= result.agreement[0] <= result.agreement[2]
    assert result.agreement_before == 0.5  # the policy is its own reference


@pytest.mark.prove
@pytest.mark.parametrize("name", OFFLINE)
def test_every_algorithm_runs_and_none_moves_what_it_cannot(tmp_path: Path, name: str) -> None:
    taken = finished(tmp_path / "run", preference_run(algorithm=PREFERENCES[name], steps=2))
    assert all(math.isfinite(s.gauges["preference/loss"].mean) for s in taken)
    assert all(s.gauges["optim/grad_norm"].mean > 0 for s in taken)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["dpo", "kto", "aot"])
def test_ahead_and_beside_the_policy_are_the_same_reference(tmp_path: Path, name: str) -> None:
    """Computed before the first step, or by a frozen copy at each step: the same numbers, up to rounding."""
    found = [
        finished(tmp_path / f"{ahead}", preference_run(algorithm=PREFERENCES[name], ahead=ahead))
        for ahead in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        assert one.gauges["preference/loss"].mean == pytest.approx(other.gauges["preference/loss"].mean, rel=1e-5)
        assert one.gauges["optim/grad_norm"].mean == pytest.approx(other.gauges["optim/grad_norm"].mean, rel=1e-3)


class Killed(Exception):
    """Stands for a kill between two steps."""


@pytest.mark.prove
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_killed_stage_goes_on_as_if_it_had_never_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    algorithm = PREFERENCES[name]
    run = preference_run(algorithm=algorithm, steps=4, ahead=ahead if algorithm.reads_reference else None)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)

    def killed(self: PreferenceDriver, asked: Any, step: Step) -> Step:
        if step.index == 3:
            raise Killed
        return remember(self, asked, step)

    remember = PreferenceDriver.remember
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(PreferenceDriver, "remember", killed)
        posttrain.run(run, out=tmp_path / "cut", quiet=True)
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert find(tmp_path / "cut").state["weights"] == find(tmp_path / "whole").state["weights"]


def cut_after_two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = preference_run(steps=4, ahead=True)

    def killed(self: PreferenceDriver, asked: Any, step: Step) -> Step:
        if step.index == 3:
            raise Killed
        return step

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(PreferenceDriver, "remember", killed)
        posttrain.run(run, out=folder, quiet=True)
    return run


@pytest.mark.prove
def test_kept_reference_log_probs_that_are_lost_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the weights that the stage began with, not by those that it has come to."""
    run = cut_after_two(tmp_path / "cut", monkeypatch)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    shutil.rmtree(tmp_path / "cut" / "reference-dpo")
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")


def test_reference_log_probs_that_do_not_fit_their_lengths_are_damaged(tmp_path: Path) -> None:
    """Also where the digests of the folder are right: it may come from elsewhere."""
    folder = tmp_path / "reference"
    arrays = {"keys": np.zeros((2, 16), np.uint8), "logp": np.zeros(3, np.float32)}
    for lengths in (np.array([1.0, 2.0]), np.array([[1], [2]])):
        files.write_directory(
            folder, lambda to, n=lengths: save_file({**arrays, "lengths": n}, to / FILE, {"reference": "r"})
        )
        with pytest.raises(RunFolderError, match="does not hold log-probs by digest"):
            ReferenceScores.load(folder, "r")


@pytest.mark.prove
@pytest.mark.parametrize("harm", ["cut", "other", "digest"])
def test_kept_reference_log_probs_that_are_damaged_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    cut_after_two(tmp_path / "cut", monkeypatch)
    folder = tmp_path / "cut" / "reference-dpo"
    path = folder / FILE
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:40])
    scores = ReferenceScores("another model", {b"0" * 16: np.zeros(2, np.float32)})
    if harm == "other":
        files.write_directory(folder, scores.save)
    if harm == "digest":
        path.unlink()
    with pytest.raises(RunFolderError, match=r"reference-dpo.*Remove"):
        posttrain.run(resume=tmp_path / "cut", quiet=True)


@pytest.mark.prove
def test_a_longer_stage_computes_what_its_further_steps_need(tmp_path: Path) -> None:
    run = preference_run(steps=2, ahead=True)
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    posttrain.run(preference_run(steps=4, ahead=True), out=tmp_path / "whole", quiet=True)
    posttrain.run("dpo.steps=4", resume=tmp_path / "run", quiet=True)
    one, other = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert [s.gauges for s in one] == [s.gauges for s in other] and len(one) == 4
    assert find(tmp_path / "run").state["weights"] == find(tmp_path / "whole").state["weights"]


def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> tuple[list[Step], Any, list[float]]:
    """A run with an adapter, whose reference is compared with a copy of all weights that was made when it was: the
    stage's steps, the reference, and how far the policy is from it when its log-probs are asked for."""
    real, score = PreferenceDriver._reference, PreferenceDriver._reference_logp
    held: list[Any] = []
    moved: list[float] = []

    def begins(self: PreferenceDriver, checkpoint: Path | None) -> Any:
        learner: Any = self.parts.learner
        held[:] = [real(self, checkpoint), FrozenScorer(learner.policy)]
        return held[0]

    def scored(self: PreferenceDriver, of: Any) -> np.ndarray:
        found, packed = score(self, of), Packed.of(of)
        np.testing.assert_allclose(found, held[1].score(packed), rtol=0, atol=1e-6)
        moved.append(float(np.abs(self.parts.learner.score(packed) - found).max()))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(PreferenceDriver, "_reference", begins)
        patched.setattr(PreferenceDriver, "_reference_logp", scored)
        taken = finished(tmp_path, replace(run, model=replace(run.model, lora=Lora(rank=4))))
    return taken, held[0], moved


@pytest.mark.prove
def test_an_adapter_switched_off_is_a_frozen_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step the reference says what a copy says that was made before the first one, while the policy moves."""
    run = preference_run(optimizer=Optimizer(lr=0.02, warmup=1))
    run = replace(run, stages=run.stages[1:])
    taken, reference, moved = adapted(tmp_path / "off", monkeypatch, run)
    assert isinstance(reference, AdapterOff) and not (tmp_path / "off" / "reference-dpo").exists()
    assert moved[0] < 1e-6 and moved[-1] > 0.01, "it begins as the policy, which then leaves it"
    ahead = replace(run, stages=(replace(run.stages[0], ahead=True),))
    before, _, _ = adapted(tmp_path / "ahead", monkeypatch, ahead)
    for one, other in zip(taken, before, strict=True):
        assert one.gauges["preference/loss"].mean == pytest.approx(other.gauges["preference/loss"].mean, rel=1e-6)


@pytest.mark.prove
def test_an_adapter_that_has_learned_is_part_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an imitation with the same adapter the reference is a copy with it, not the model without it."""
    taken, reference, moved = adapted(tmp_path / "run", monkeypatch, preference_run())
    assert isinstance(reference, FrozenScorer) and moved[0] < 1e-6
    assert taken[0].gauges["preference/loss"].mean == pytest.approx(math.log(2), abs=1e-6)


def test_its_settings_are_settings_like_others() -> None:
    run = preference_run()
    assert from_plain(Run, to_plain(run)) == run
    changed = apply(run, ["algorithm=simpo", "beta=2.0", "dpo.batch=8"]).stages[-1]
    assert isinstance(changed, Preference)
    assert (changed.algorithm.name, changed.algorithm.beta, changed.batch) == ("simpo+user", 2.0, 8)
    changed_run = replace(run, stages=(run.stages[0], changed))
    assert from_yaml(to_yaml(changed_run), "run.yaml") == changed_run
    assert "algorithm: simpo" in to_yaml(apply(run, ["algorithm=simpo"]))


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("algorithm=grpo", "learns from reward, and this stage does not"),
        ("algorithm=dpoo", "did you mean 'dpo'"),
        ("algorithm=oaif", "draws its own pairs"),
        ("dpo.batch=0", "must be >= 1"),
        ("link=hinged", "hinge"),
        ("beta=0.1", ""),
    ],
)
def test_a_setting_that_means_nothing_is_refused(word: str, why: str) -> None:
    if not why:
        assert apply(preference_run(), [word]) == preference_run()  # a change that changes nothing is left out
        return
    with pytest.raises(ConfigError, match=why):
        apply(preference_run(), [word])


def test_a_reference_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="simpo reads no reference"):
        preference_run(algorithm=PREFERENCES["simpo"], reference="somewhere")
    with pytest.raises(ConfigError, match="simpo reads no reference"):
        preference_run(algorithm=PREFERENCES["simpo"], ahead=True)


def test_an_environment_without_judgements_is_refused(tmp_path: Path) -> None:
    run = replace(preference_run(), env=Env(name="shop", heldout=4))
    with pytest.raises(ConfigError, match="has no judged completions"):
        make_environment(replace(run, stages=run.stages[1:]))


def test_only_pairs_are_no_ranking(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind 'ranking'.*gives pair, label"):
        make_environment(preference_run(algorithm=PREFERENCES["tpo"]))


def test_agreement_counts_a_tie_half_and_reads_labels() -> None:
    pairs = np.array([1, 0, 1, 0, 1, 0]), np.array([0, 0, 1, 1, 2, 2])
    found = AgreementReport.of(np.array([1.0, 0.0, 0.0, 0.0, 2.0, 3.0]), *pairs, ["a", "b", "c"])
    assert found is not None and found.accuracy.mean == 0.5 and found.margin == 0.0
    assert found.rows == {"a": (0.0, 1.0), "b": (0.5, 1.0), "c": (1.0, 1.0)}
    labels = AgreementReport.of_labels(np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, True, False, False]))
    assert labels is not None and labels.accuracy.mean == pytest.approx((1.0 + 0.25) / 2)
    assert AgreementReport.of_labels(np.array([1.0]), np.array([True])) is None
    with pytest.raises(InvariantError, match="not finite"):
        AgreementReport.of(np.array([np.nan]), np.array([0.0]), np.array([0]))
