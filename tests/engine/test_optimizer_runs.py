"""Runs with other optimizers, schedules, frozen parts, averages and steps that are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file

import posttrain
from posttrain.cli import main
from posttrain.config.run import Run
from posttrain.core.batch import Batch
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.role.weights.saved_weights import AVERAGE, OPTIMIZER, WEIGHTS
from posttrain.stages.skipped_updates import BATCH, load_batch, save_batch
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import RunFolderError
from tests.engine.engine_parts import segments
from tests.engine.run_parts import RL, SMALL, mine

WORDS = ("grpo", "env=arithmetic", "env.args.max_terms=2", "env.heldout=6", "model.layers=2", *SMALL, *RL)


def replaced(words: Iterable[str], *more: str) -> tuple[str, ...]:
    """Overrides of which `more` replace those of the same name."""
    keys = {w.partition("=")[0] for w in more}
    return (*(w for w in words if w.partition("=")[0] not in keys or "=" not in w), *more)


def ran(folder: Path, *words: str) -> int:
    return main(["run", *replaced(WORDS, *words), "--out", str(folder)])


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return load_file(find(folder, which).folder / WEIGHTS)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["adamw8bit", "muon", "sgd"])
def test_every_kind_trains_a_run_that_its_checks_follow(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "adamw8bit":
        pytest.importorskip("torchao.optim")
    more = ("rl.optimizer.schedule=cosine", "rl.optimizer.horizon=9", "rl.optimizer.warmup=1")
    more = (*more, "rl.optimizer.rates=embed_tokens:0.5", "model.ffn=128")  # ffn: matrices that 8 bits hold
    words = (f"rl.optimizer={kind}", "rl.optimizer.lr=0.01", *more, "rl.steps=3")
    assert ran(tmp_path / "run", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    told = {"adamw8bit": "rl: adamw8bit updates 2", "sgd": "rl: sgd updates 2", "muon": "rl: Muon updates 14 matrices"}
    assert told[kind] in said
    steps = run_reader.steps(tmp_path / "run")
    first = next(s for s in steps if "canary/update_gap" in s.gauges)
    assert abs(first.gauges["canary/update_gap"].mean) < 0.02 and first.gauges["canary/moved"].sum > 0
    rates = [s.gauges["optim/lr"].mean for s in steps if "optim/lr" in s.gauges]
    want = [0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * max(0, k - 1) / 8)) / 2) for k in range(len(rates))]
    assert rates == pytest.approx(want)
    state = load_file(find(tmp_path / "run").folder / OPTIMIZER)
    word = {"adamw8bit": "exp_avg_codes.", "muon": "momentum_buffer.", "sgd": "momentum_buffer."}[kind]
    assert any(n.startswith(word) for n in state)


@pytest.mark.prove
def test_a_longer_run_keeps_the_learning_rates_it_had(tmp_path: Path) -> None:
    """Two steps and two more are four at once, bit for bit, because the horizon is a setting of its own."""
    words = ("rl.optimizer.schedule=linear", "rl.optimizer.horizon=6", "rl.optimizer.warmup=1", "rl.optimizer.ema=0.9")
    assert ran(tmp_path / "whole", *words, "rl.steps=4") == 0
    assert ran(tmp_path / "parts", *words, "rl.steps=2") == 0
    assert main(["run", "--resume", str(tmp_path / "parts"), "rl.steps=4"]) == 0
    for name in (WEIGHTS, OPTIMIZER):
        a, b = (load_file(find(tmp_path / x).folder / name) for x in ("whole", "parts"))
        assert set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.prove
def test_what_is_frozen_stays_and_is_watched(tmp_path: Path) -> None:
    assert ran(tmp_path / "run", "rl.optimizer.freeze=layers.0,embed_tokens", "rl.optimizer.lr=0.01") == 0
    first, last = (weights(tmp_path / "run", c.name) for c in (scan(tmp_path / "run")[0], scan(tmp_path / "run")[-1]))
    still = {n for n in last if ".layers.0." in n or "embed_tokens" in n}
    started = load_file(tmp_path / "run" / "kept" / "start" / WEIGHTS)
    assert still and all(torch.equal(last[n], started[n]) == (n in still) for n in last if "value_head" not in n)
    assert set(first) == set(last), "a frozen parameter is in every checkpoint"
    checked = [
        s.gauges["canary/frozen"].mean for s in run_reader.steps(tmp_path / "run") if "canary/frozen" in s.gauges
    ]
    assert checked and set(checked) == {len(still)}


def test_a_pattern_that_fits_nothing_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(tmp_path / "run", "rl.optimizer.freeze=embed_token") == 2
    assert "'embed_token' fits no parameter that is trained; did you mean 'embed_tokens'?" in capsys.readouterr().err


@pytest.mark.prove
def test_averages_are_evaluated_and_exported_on_request(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ran(run, "rl.optimizer.ema=0.5", "rl.optimizer.lr=0.01") == 0
    averages = {n: t for n, t in load_file(find(run).folder / OPTIMIZER).items() if n.startswith(AVERAGE)}
    plain, average = tmp_path / "plain", tmp_path / "average"
    posttrain.export(run, plain)
    assert main(["export", str(run), str(average), "--ema"]) == 0
    card = (average / "README.md").read_text()
    assert "Moving average (decay 0.5) of the weights of stage `rl`" in card and "accuracy" not in card.split("---")[1]
    made, kept = load_file(average / "model.safetensors"), weights(run)
    assert all(torch.equal(t, averages[f"{AVERAGE}{n}"]) for n, t in made.items() if n in kept)
    usual = load_file(plain / "model.safetensors")
    assert any(not torch.equal(t, made[n]) for n, t in usual.items())
    assert all(torch.equal(t, kept[n]) for n, t in usual.items() if n in kept)
    assert main(["eval", str(run), "--ema", "--samples", "1"]) == 0
    other = tmp_path / "other"
    assert ran(other) == 0
    with pytest.raises(RunFolderError, match=r"holds no moving average of the weights: .* optimizer.ema"):
        posttrain.export(other, tmp_path / "none", ema=True)


@pytest.mark.prove
def test_a_run_of_before_is_read_and_goes_on(tmp_path: Path) -> None:
    """Its tree and its optimizer's state know nothing of kinds, schedules and averages."""
    run = recipe("ladder")
    plain = to_plain(run)
    for stage in plain["stages"]:
        before = ("lr", "beta1", "beta2", "eps", "weight_decay", "clip", "warmup")
        stage["optimizer"] = {n: stage["optimizer"][n] for n in before}
    assert from_plain(Run, plain) == run
    assert ran(tmp_path / "run") == 0
    state = load_file(find(tmp_path / "run").folder / OPTIMIZER)
    assert {n.partition(".")[0] for n in state} == {"steps", "step", "exp_avg", "exp_avg_sq"}


HUGE = """
def reward(task, text):
    return 1e45 * (sum(map(ord, text)) % 2) if task.answer in {wanted} else float(len(text) % 3)
"""


def bad(folder: Path, *words: str) -> tuple[str, ...]:
    prompts = {str(a) for a in range(0, 20, 2)}
    reward = HUGE.replace("{wanted}", repr(prompts))
    return ("run", *replaced(mine(folder, reward=reward), "algorithm=dr_grpo", *words))


@pytest.mark.prove
def test_a_step_that_is_not_finite_is_left_out_counted_and_kept(tmp_path: Path) -> None:
    words = bad(tmp_path, "seed=3", "rl.steps=4", "rl.optimizer.skips=4")
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    out = [s for s in steps if "optim/skipped" in s.gauges]
    assert len(steps) == 4 and out and any("optim/grad_norm" in s.gauges for s in steps)
    for s in out:
        assert s.gauges["optim/steps"].sum == 0 and any(n.startswith("left out (") for n in s.notes)
    versions = [0, *(s.version for s in steps)]
    assert all((a == b) == (s in out) for a, b, s in zip(versions, versions[1:], steps, strict=False))
    folders = sorted((tmp_path / "run").glob("skipped-rl-*"))
    assert len(folders) == len(out)
    batch = load_batch(folders[0])
    assert batch.spoken and any(s.name == "advantage" and abs(x).max() > 1e40 for s, x in batch.streams.items())


def test_a_batch_of_a_mixture_is_kept_whole(tmp_path: Path) -> None:
    batch = Batch.of(segments(3), [0, 1, 2])
    n = len(batch.ids_N)
    batch = replace(batch, routed_N=np.arange(4 * n, dtype=np.int16).reshape(n, 2, 2), balance_E=np.arange(4.0))
    save_batch(batch, tmp_path)
    again = load_batch(tmp_path)
    names = [f.name for f in fields(Batch) if f.name not in ("streams", "sampling", "kept")]
    assert {"routed_N", "balance_E"} <= {*names} and again.sampling == batch.sampling
    assert all(np.array_equal(getattr(again, n), getattr(batch, n)) for n in names)


def test_a_batch_that_does_not_fit_together_is_damaged(tmp_path: Path) -> None:
    save_batch(Batch.of(segments(3), [0, 1, 2]), tmp_path)
    whole, path = load_arrays(tmp_path / BATCH), tmp_path / BATCH
    sampling = '{"top_k": 2}'
    for changes, contract in (
        ({"source_M": whole["source_M"] + 10**6}, "{}"),
        ({"kept.offsets": np.zeros(0, np.int64), "kept.ids": np.zeros(0, np.int32)}, sampling),
        ({}, "[" * 100_000),
    ):
        save_arrays({**whole, **changes}, path, {"sampling": contract})
        with pytest.raises(RunFolderError, match=r"batch\.safetensors is damaged"):
            load_batch(tmp_path)


@pytest.mark.prove
def test_too_many_steps_in_a_row_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also over a resume: what was left out before it counts."""
    every = "def reward(task, text):\n    return 1e45 * (sum(map(ord, text)) % 2)\n"
    words = replaced(mine(tmp_path, reward=every), "algorithm=dr_grpo", "rl.steps=9", "rl.optimizer.skips=2")
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().err
    assert "It is the 3rd optimizer step in a row that is not finite, and rl.optimizer.skips=2" in said
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert [("optim/skipped" in s.gauges) for s in steps] == [True, True, False]
    assert steps[-1].notes[-1].startswith("stopped: ")
    assert main(["run", "--resume", str(tmp_path / "run")]) == 3
    assert "It is the 3rd optimizer step in a row" in capsys.readouterr().err
