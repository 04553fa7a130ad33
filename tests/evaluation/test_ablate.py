"""Other algorithms on a run's recorded batches: the run's own step comes out as it was, nothing is touched, nothing is
made up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.cli import main
from posttrain.cli.ablation_tables import HEAD, table
from posttrain.core.sampling import Sampling
from posttrain.evaluation.ablation.ablation import Ablation, AblationRow, ablate
from posttrain.evaluation.ablation.replayable_algorithms import RecordedFacts
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Greedy, Value
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.pieces.trust_region import Divergence
from posttrain.ladder.policy_rows import GRPO, LADDER, REINFORCE, VAPO, algorithm
from posttrain.record import run_reader
from posttrain.record.run_folder import RunFolder
from posttrain.system.errors import ConfigError, RunFolderError
from tests.tiny import play, tiny_parts, tiny_run

WARM = patch(VAPO, "warm", "here", baseline=Value(gae_lambda=1.0, warmup=1))
MUCH = patch(
    REINFORCE,
    "much",
    "here",
    baseline=Greedy(),
    ratio="token",
    clip=Divergence(top=4),
    pull=KL(refresh=1),
    entropy=EntropyBonus(coef=0.01, target=0.5),
)
PICKY = patch(GRPO, "picky", "here", filter="mixed")


def played(folder: Path, **rl: Any) -> Path:
    """A tiny run of two steps, its episodes and all its checkpoints."""
    run = tiny_run(**{"steps": 2} | rl)
    sft = replace(run.stages[0], steps=20, checkpoint_every=0)
    asyncio.run(play(tiny_parts(folder, replace(run, keep_checkpoints=9, stages=(sft, *run.stages[1:])))))
    return folder


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(tmp_path_factory.mktemp("grpo") / "run", steps=3)


@pytest.fixture(scope="module")
def everything(grpo: Path) -> Ablation:
    (found,) = ablate(grpo)
    return found


def digest(folder: Path) -> str:
    """Every file of a folder: name, content, time of the last change."""
    h = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        h.update(f"{path} {path.stat().st_mtime_ns}".encode() + (path.read_bytes() if path.is_file() else b""))
    return h.hexdigest()


def recorded_norm(folder: Path, step: int) -> float:
    return (
        next(s for s in run_reader.steps(folder) if (s.stage, s.index) == ("rl", step)).gauges["optim/grad_norm"].mean
    )


# --- the run's own step -----------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_the_own_step_comes_out_as_it_was_and_the_folder_is_only_read(grpo: Path) -> None:
    before = digest(grpo)
    for found in ablate(grpo, ["grpo", "dr_grpo", "maxrl"], steps=[1, 2, 3]):
        own, again, *others = found.rows
        assert own.cosine == 1 and own.ratio == 1 and found.own == own.name == "grpo"
        assert own.norm == found.recorded_norm == recorded_norm(grpo, found.step)
        assert found.behind == 0 and found.credit_gap == 0 and found.logp_gap < 1e-5
        assert again.name == "grpo" and again.norm == own.norm and again.cosine == pytest.approx(1)
        assert [r.name for r in others] == ["dr_grpo", "maxrl"] and own.norm > 0
        assert len({r.norm for r in (own, *others)}) == 3 and all(abs(r.cosine) < 1 - 1e-6 for r in others)
        assert own.clipped == 0 and own.effective == pytest.approx(1) and -1 <= found.halves <= 1
    assert digest(grpo) == before


@pytest.mark.prove
@pytest.mark.parametrize("a", [WARM, MUCH, algorithm("luffy")], ids=lambda a: a.name)
def test_what_an_algorithm_reads_is_rebuilt(a: Algorithm, tmp_path: Path) -> None:
    folder = played(tmp_path / "run", algorithm=a)
    first, second = ablate(folder, ["dr_grpo", "chord", "ppo", "remax", "dppo_top"], steps=[1, 2])
    for found in (first, second):
        own, plain = found.rows[:2]
        assert own.norm == found.recorded_norm == recorded_norm(folder, found.step) > 0
        assert found.behind == 0 and found.credit_gap == 0 and plain.name == "dr_grpo"
        assert plain.note == ("shown siblings left out" if a.shown else "")
    assert ("warming up" in first.rows[0].note) == (a is WARM) and not second.rows[0].note
    reads = {"warm": {"ppo"}, "much": {"remax"}, "luffy": {"chord"}}[a.name]
    assert {r.name for r in second.rows[2:]} == reads
    if a is MUCH:
        assert "8 most probable tokens, and 4 were stored" in dict(second.refused)["dppo_top"]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizer steps a step, a filter, and no checkpoint within the stage."""
    return played(tmp_path_factory.mktemp("sparse") / "run", algorithm=PICKY, minibatches=2, checkpoint_every=0)


@pytest.mark.prove
def test_several_optimizer_steps_are_taken_as_one_and_said(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = ablate(sparse, ["dr_grpo"])
    assert found.minibatches == 2 and found.recorded_norm is None
    assert found.rows[1].note == "groups without spread were turned away and are not recorded"
    assert main(["ladder", "dr_grpo", "--on", str(sparse)]) == 0
    assert "took 2 optimizer steps" in capsys.readouterr().out


# --- the others -------------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_every_algorithm_is_evaluated_or_named_with_its_reason(everything: Ablation) -> None:
    rows, refused = {r.name: r for r in everything.rows}, dict(everything.refused)
    assert {*rows, *refused} == set(LADDER) and not {*rows} & {*refused}
    learned = {"ppo", "dual_clip", "v_trace", "vapo"}
    taught = {"opd", "iw_opd", "mopd", "gkd", "sdpo", "sdft"}
    assert {*refused} == {"remax", "luffy", "chord", "dppo_top", "prime"} | learned | taught
    assert "greedy answer" in refused["remax"] and "values" in refused["ppo"] and "demonstrations" in refused["luffy"]
    assert "implicit process reward model" in refused["prime"]
    assert "most probable tokens" in refused["dppo_top"] and "teacher" in refused["gkd"]
    assert all(math.isfinite(r.norm) and 0 <= r.silent <= 1 and r.tokens <= everything.tokens for r in rows.values())
    assert rows["gspo"].norm == pytest.approx(rows["sapo"].norm), "on policy their trust regions are silent"
    assert rows["top_entropy"].tokens < rows["gspo"].tokens
    assert "turn" not in rows["dapo"].note and rows["grpo_process"].note == "no step was judged"
    assert rows["reinforce"].unsolved == 0 < rows["reinforce"].solved and rows["dr_grpo"].unsolved < 0


def test_a_moving_baseline_is_replayed_from_the_steps_before(grpo: Path) -> None:
    (found,) = ablate(grpo, ["reinforce_ema", "reinforce"], steps=[3])
    ema, plain = found.rows[1:]
    moving, credits = 0.0, list[float]()
    for i in (1, 2, 3):
        for r in run_reader.episodes(grpo, "rl", i):
            assert r.episode.reward is not None
            credits += [r.episode.reward - moving] * r.episode.spoken * (i == 3)
            moving = 0.95 * moving + 0.05 * r.episode.reward
    assert ema.credit == pytest.approx(float(np.mean(np.abs(credits)))) and ema.credit != plain.credit


# --- other weights ----------------------------------------------------------------------------------------------------


def test_later_weights_make_the_batch_stale(grpo: Path) -> None:
    (found,) = ablate(grpo, ["dppo", "aipo", "gspo"], steps=[1], checkpoint="last")
    rows = {r.name: r for r in found.rows}
    assert found.behind == -3 and found.logp_gap > 1e-4 and rows["grpo"].norm != found.recorded_norm
    assert rows["aipo"].effective < 1 and rows["gspo"].effective == pytest.approx(1), (
        "anchor=start does not see a stale batch"
    )
    (named,) = ablate(grpo, ["dppo"], steps=[1], checkpoint="kept/rl")
    assert named.behind == -3 and named.rows[0].norm == rows["grpo"].norm


@pytest.mark.prove
def test_without_a_checkpoint_at_the_step_older_weights_are_used_and_named(
    sparse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate(sparse, ["dppo"])[0].step == 1, "the last step whose first weights lie in the folder"
    (found,) = ablate(sparse, ["dppo"], steps=[2])
    assert found.behind == 1 and found.weights == "kept/sft" and found.logp_gap > 1e-5
    assert main(["ladder", "dppo", "--on", str(sparse), "--step", "1,2"]) == 0
    text = capsys.readouterr().out
    assert "1 step older than those the step began with" in text and "exactly those the step began with" in text


# --- the command ------------------------------------------------------------------------------------------------------


def test_tiny_norms_join_no_columns_and_move_no_row() -> None:
    """Every cell ends below the end of its heading, whatever its size."""
    made = AblationRow("grpo", 1.0, 0.7423, 1.0, 0.12, 0.0, 1.0, 0.66, 1.0, -0.5, 2028)
    small = replace(made, name="dr_grpo", norm=1.234e-25, ratio=1.66e-25, credit=12345.678, solved=-98765.4321)
    gone = replace(made, name="gspo", norm=0.0, ratio=0.0, cosine=math.nan, effective=math.nan, tokens=123_456_789)
    head, *lines = table([made, small, gone, replace(gone, name="cispo")])
    ends = [m.end() for m in re.finditer(r"\S+", head)][1:]
    assert len(lines) == 4 and lines[3] == "  = cispo"
    for line in lines[:3]:
        assert [m.end() for m in re.finditer(r"\S+", line)][1:] == ends, line


def test_tables_and_json(grpo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--on", str(grpo), "--step", "1,3", "--against", "dr_grpo,gspo,sapo,dapo,remax"]) == 0
    text = capsys.readouterr().out
    assert text.count("\nalgorithm ") == 2 and all(h in text for h in HEAD) and "over 2 steps" in text
    assert "grpo (own)" in text and "not evaluated:" in text and "recorded" in text
    assert max(len(x) for x in text.splitlines() if not x.startswith(str(grpo))) <= 100
    assert main(["ladder", "gspo", "--on", str(grpo), "--step", "1", "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in data["rows"]] == ["grpo", "gspo"] and data["behind"] == 0


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--step", "9"), "the nearest is 3 (from 1 to 3)", 2),
        (("--step", "x"), "several with commas", 2),
        (("--stage", "sft"), "not a reinforcement stage", 2),
        (("--against", "grop"), "did you mean 'grpo'", 2),
        (("--checkpoint", "nowhere"), "has no checkpoint 'nowhere'", 5),
    ],
)
def test_refusals_say_what_there_is(
    grpo: Path, words: tuple[str, ...], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", "--on", str(grpo), *words]) == code
    assert message in capsys.readouterr().err


def test_options_of_a_run_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--step", "3"]) == 2 and "say which with --on RUN" in capsys.readouterr().err
    assert main(["ladder", "--on", str(tmp_path)]) == 5 and "is not a run folder" in capsys.readouterr().err


def test_a_run_that_recorded_nothing_or_has_several_stages_says_so(tmp_path: Path) -> None:
    run = tiny_run()
    sft, rl = run.stages
    made = {
        "silent": replace(run, record_episodes=False),
        "early": run,
        "two": replace(run, stages=(rl, replace(rl, name="more"))),
        "none": replace(run, stages=(sft,)),
    }
    for name, each in made.items():
        RunFolder.create(tmp_path / name, each, {}).close()
    for name, error, message in (
        ("silent", RunFolderError, "record_episodes=false"),
        ("early", RunFolderError, "has taken no step yet"),
        ("two", ConfigError, r"--stage \(rl, more\)"),
        ("none", ConfigError, "no reinforcement stage"),
    ):
        with pytest.raises(error, match=message):
            ablate(tmp_path / name)


def test_turns_in_segments_of_their_own_are_turns() -> None:
    """With a rewritten history each turn has a segment, whose mask has one answer."""
    mask = np.array([False, True, True])
    segments = tuple(SimpleNamespace(mask=mask, sampling=Sampling()) for _ in range(2))
    episode = SimpleNamespace(verdicts=(), segments=segments, shown=False, turns=(2, 2))
    recorded: Any = SimpleNamespace(
        records=[SimpleNamespace(episode=episode)], top=0, stage=SimpleNamespace(reference=None)
    )
    assert RecordedFacts.of(recorded, algorithm("grpo"), True).turns
