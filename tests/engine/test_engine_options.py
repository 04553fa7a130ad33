"""The embedded engine's settings through the real command line: drafts of two kinds, a timeline, and what is
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.build.build_engines import embedded_engine
from posttrain.config.engines import Embedded
from posttrain.engine.cpu import compile_native
from posttrain.engine.model.policy_model import load_policy
from posttrain.record.run_reader import record_digest, run_file
from tests.engine.run_parts import mine, model_at, play, refused, rl_steps


@pytest.mark.prove
def test_drafts_by_lookup_change_nothing(tmp_path: Path) -> None:
    """Rewards and tokens of a run with prompt lookup are those of the run without it."""
    words = mine(tmp_path / "task")
    plain = rl_steps(play(tmp_path / "plain", *words))
    drafted = rl_steps(play(tmp_path / "drafted", *words, "engine.lookup=3"))
    for a, b in zip(plain, drafted, strict=True):
        for name in ("rollout/reward", "rollout/tokens", "engine/tokens"):
            assert a.gauges[name] == b.gauges[name]
    assert any("engine/accepted" in s.gauges for s in drafted)


@pytest.mark.prove
def test_a_draft_model_and_a_timeline(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    words = (
        "run",
        *mine(tmp_path / "task"),
        f"model.path={model}",
        f"engine.draft={model}",
        "engine.drafts=2",
        "engine.timeline=true",
    )
    folder = play(tmp_path / "run", *words[1:])
    assert all(0 < s.gauges["engine/accepted"].mean <= 1 for s in rl_steps(folder))
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"queued", "prefill", "speak", "step"} <= {e["name"] for e in events}
    assert {"engine/step", "rollout"} <= set(rl_steps(folder)[0].clock)


def test_settings_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*mine(tmp_path / "task"), "--out", str(tmp_path / "run"))
    assert "both draft" in refused(capsys, "run", *words, "engine.lookup=2", "engine.draft=somewhere", code=2)
    assert "engine.lookup=-1" in refused(capsys, "run", *words, "engine.lookup=-1", code=2)
    assert "deterministic" in refused(capsys, "run", *words, "engine.lookup=2", "deterministic=true", code=2)
    assert "engine.update=stale" in refused(capsys, "run", *words, "engine.update=stale", "deterministic=true", code=2)
    assert "about the embedded engine" in refused(
        capsys, "run", *words, "engine=vllm", "model.kernels=compiled", code=2
    )
    other = model_at(tmp_path / "other", tokenizer="bpe")
    assert "tokenizer differs" in refused(capsys, "run", *words, f"engine.draft={other}", code=2)


@pytest.mark.prove
def test_what_new_weights_do_is_a_setting(tmp_path: Path) -> None:
    """Between the steps of a run that waits for its samples nothing is being said, so the record is that of any
    other."""
    words, digests = mine(tmp_path / "task"), set[str]()
    for update in ("drain", "inflight", "stale"):
        folder = play(tmp_path / update, *words, f"engine.update={update}")
        run = run_file(folder).run
        assert isinstance(run.engine, Embedded) and run.engine.update == update
        policy = load_policy(replace(run.model, path=None), None, 0)
        assert embedded_engine(run, run.engine, policy, lambda ids: "")._update == update
        digests.add(record_digest(folder))
    assert len(digests) == 1


@pytest.mark.prove
def test_a_run_says_by_which_code_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler by compiled kernels; without one, or where it is told to, by torch's operations, and it says
    so."""
    play(tmp_path / "compiled", *mine(tmp_path / "task"))
    said = capsys.readouterr().out
    assert ("compiled kernels" in said) == isinstance(compile_native.find(), compile_native.Kernels)
    play(tmp_path / "told", *mine(tmp_path / "task"), "model.kernels=torch")
    assert "engine: embedded, torch's operations (model.kernels=torch)" in capsys.readouterr().out
    monkeypatch.setattr(compile_native, "find", lambda: "no C compiler 'cc': install gcc or clang, or set CC")
    play(tmp_path / "torch", *mine(tmp_path / "task"))
    assert "engine: embedded, torch's operations (no C compiler" in capsys.readouterr().out
    words = (*mine(tmp_path / "task"), "--out", str(tmp_path / "refused"), "model.kernels=compiled")
    assert "model.kernels=compiled, but there are no compiled kernels: no C compiler" in refused(
        capsys, "run", *words, code=2
    )
