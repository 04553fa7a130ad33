"""What a new user does, through the real command line, on models of a few thousand parameters."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.cli import main
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.policy_rows import LADDER as ALGORITHMS
from posttrain.record import run_reader
from posttrain.stages import interrupt
from posttrain.stages.interrupt import Interrupted
from tests.engine.run_parts import LADDER, SMALL, mine, model_at, moved, play, rl_steps, weights


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished tiny ladder run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "ladder"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        play(folder, *LADDER)
    return folder, said.getvalue()


def posttrain_process(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "posttrain.cli", *words], capture_output=True, text=True, check=False, env=env
    )


# --- the first success ------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_and_ends_with_a_table(ladder: tuple[Path, str]) -> None:
    folder, said = ladder
    assert "\x1b" not in said and "\r" not in said, "plain lines where nobody watches"
    for part in (
        "parameters",
        "stop tokens: '<eos>'",
        f"run folder: {folder}",
        "pretrain 2/2",
        "tokens/s",
        "productive band",
        "sft_continued *",
    ):
        assert part in said, part
    table = said[said.index("held-out accuracy after each stage") :]
    commands = [line for line in table.splitlines() if "  # " in line]
    named_folder = ("run folder", "posttrain ")
    others = [x for x in table.splitlines() if x not in commands and not any(w in x for w in named_folder)]
    assert all(len(line) <= 80 for line in others) and any(line.startswith("Did it learn?") for line in others)
    typed = [x.partition("  # ")[0].partition("posttrain ")[2].split() for x in table.splitlines()]
    named = {words[0] for words in typed if words}
    assert named == {"show", "eval", "export", "run"}


def test_show_eval_and_export(ladder: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = ladder[0], tmp_path / "model"
    assert main(["show", str(folder)]) == 0
    assert "mean reward" in capsys.readouterr().out
    assert main(["eval", str(folder), "--samples", "4"]) == 0
    own = capsys.readouterr().out
    assert all(
        part in own
        for part in ("accuracy (sampled)", "accuracy (greedy)", "pass@1", "pass@4", "[", "tokens a response")
    )
    assert main(["export", str(folder), str(model)]) == 0
    assert (
        main(
            [
                "eval",
                str(model),
                "env=arithmetic",
                "--samples",
                "4",
                "--max-tokens",
                "6",
                "threads=1",
                "slots=16",
                "env.heldout=20",
            ]
        )
        == 0
    )
    exported = capsys.readouterr().out
    numbers = [line for line in own.splitlines() if "│" in line or "tokens a response" in line]
    assert numbers == [line for line in exported.splitlines() if "│" in line or "tokens a response" in line], (
        "the same weights, the same answers"
    )
    ids = torch.tensor([AutoTokenizer.from_pretrained(model).encode("<3+4>")])
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.shape[1]
    assert main(["export", str(folder), str(model)]) == 5 and "not empty" in capsys.readouterr().err


def test_a_finished_run_resumed_only_shows_its_table(
    ladder: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (ladder[0] / "steps.jsonl").read_bytes()
    assert main(["run", "--resume", str(ladder[0])]) == 0
    said = capsys.readouterr().out
    assert "finished" in said and "sft_continued *" in said
    assert (ladder[0] / "steps.jsonl").read_bytes() == before


KILL = """
import os, pathlib

def reward(completions, trainer_state, **columns):
    flag = pathlib.Path({flag!r})
    if trainer_state.global_step == 3 and not flag.exists():
        try:
            flag.touch(exist_ok=False)  # several groups are judged at once, and a second signal ends a run at once
            os.kill(os.getpid(), {number})
        except FileExistsError:
            pass
    return [float(sum(map(ord, text)) % 7 + len(text)) for text in completions]
"""


@pytest.mark.prove
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
    ],
)
def test_a_signal_ends_with_a_checkpoint_and_the_run_goes_on(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward function sends the signal, once, in the middle of the third step."""
    flag = tmp_path / "flag"
    words = [*mine(tmp_path / "data", reward=KILL.format(flag=str(flag), number=int(number))), "rl.checkpoint_every=0"]
    words = [w for w in words if w not in ("rl.steps=2", "rl.checkpoint_every=1")] + ["rl.steps=5"]
    cut = posttrain_process("run", *words, "--out", str(tmp_path / "run"))
    assert cut.returncode == code, cut.stderr
    assert (
        "the last checkpoint is complete" in cut.stderr and f"posttrain run --resume {tmp_path / 'run'}" in cut.stderr
    )
    assert "Traceback" not in cut.stderr
    done = len(rl_steps(tmp_path / "run"))
    assert 1 <= done < 5
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert f"resuming at stage 1 of 1: rl, after {done} of 5 steps" in capsys.readouterr().out
    assert [s.index for s in rl_steps(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.prove
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_ends_a_run_that_waits(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of a step never comes: the step is given up, and the run goes on from its last checkpoint."""
    monkeypatch.setattr(interrupt, "GRACE", 1.0)
    left = [number]  # rewards are asked in threads: one of them takes it

    def waits(task: Any, text: str) -> float:
        record = tmp_path / "run" / "steps.jsonl"
        if record.exists() and record.stat().st_size:  # in the step after the first
            with contextlib.suppress(IndexError):
                os.kill(os.getpid(), left.pop())
                time.sleep(60)
        return float(sum(map(ord, text)) % 7 + len(text))

    words = [w for w in mine(tmp_path / "data") if not w.startswith(("env.rewards", "rl.steps"))]
    begun = time.monotonic()
    with pytest.raises(Interrupted, match=r"middle of rl step \d, which did not end.*last checkpoint is complete"):
        posttrain.run(*words, "rl.steps=5", rewards=[waits], out=tmp_path / "run", quiet=True)
    assert time.monotonic() - begun < 50


@pytest.mark.prove
def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def cell() -> Any:
        return posttrain.run(*mine(tmp_path / "data"), out=tmp_path / "run", quiet=True)

    result = asyncio.run(cell())
    assert result.folder == tmp_path / "run" and result.reward is not None


# --- one's own model, environment, algorithm --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "tokenizer"),
    [
        ("llama", "byte_level"),
        *(
            pytest.param(*x, marks=pytest.mark.prove)
            for x in (
                ("qwen3", "bpe"),
                ("llama", "unigram"),
                ("gpt2", "byte_level"),
                ("gemma", "bpe"),
                ("qwen3", "characters"),
            )
        ),
    ],
)
def test_a_checkpoint_of_ones_own(arch: str, tokenizer: str, tmp_path: Path) -> None:
    model = model_at(tmp_path / "model", arch, tokenizer)
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), f"model={model}")
    assert moved(folder)
    assert max(s.gauges["canary/logp_gap"].mean for s in rl_steps(folder)) < 1e-5
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type
        == AutoModelForCausalLM.from_pretrained(model).config.model_type
    )


@pytest.mark.parametrize(
    "env", ["calculator", *(pytest.param(x, marks=pytest.mark.prove) for x in ("countdown", "gym:chain_sum"))]
)
def test_one_step_of_every_environment(env: str, tmp_path: Path) -> None:
    words = (
        "arithmetic",
        "sft=none",
        *SMALL,
        f"env={env}",
        "env.heldout=3",
        "rl.steps=1",
        "rl.prompts=2",
        "rl.siblings=2",
        "model.context=256",
    )
    folder = play(tmp_path / "run", *words)
    assert len(rl_steps(folder)) == 1 and len(run_reader.read_episodes(run_reader.episode_files(folder)[-1].path)) > 0


ALWAYS = ("grpo", "ppo")
"""One of each way to learn from samples: a group, a critic, groups drawn anew, a teacher. The rest: long suites."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.prove) for n in ALGORITHMS])
def test_every_algorithm_learns_something_finite(name: str, tmp_path: Path) -> None:
    words = [f"algorithm={name}", "rl.minibatches=2", "rl.epochs=2"]
    if ALGORITHMS[name].learns_values:
        words.append("baseline.warmup=0")
    if any(isinstance(s, BestOf) for s in ALGORITHMS[name].shape):
        words.append("shape.bestof.k=2")
    if isinstance(ALGORITHMS[name].baseline, ImplicitOthers):
        words.append("env.rewards.0.weight=0.01")  # outcomes lie in 0..1
    if ALGORITHMS[name].hint is not None:
        words += ["env.args.hint=it is {answer}: ", "rl.optimizer.ema=0.95"]
    if ALGORITHMS[name].taught:
        teacher = play(tmp_path / "teacher", *mine(tmp_path / "data"))
        assert main(["export", str(teacher), str(tmp_path / "model")]) == 0
        words.append(f"rl.reference={tmp_path / 'model'}")
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), *words)
    steps = rl_steps(folder)
    assert moved(folder) and len(steps) == 2
    assert all(s.gauges["optim/steps"].sum == 4 for s in steps)


@pytest.mark.parametrize(
    "words",
    [
        ("sampling.top_p=0.8", "sampling.temperature=0.7"),
        *(pytest.param((x,), marks=pytest.mark.prove) for x in ("sampling.top_k=5", "sampling.min_p=0.05")),
    ],
)
def test_truncated_sampling_is_on_policy(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), *words)
    assert moved(folder) and all(s.gauges["canary/logp_gap_worst"].mean < 1e-4 for s in rl_steps(folder))


@pytest.mark.prove
def test_bfloat16(tmp_path: Path) -> None:
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), "model.dtype=bfloat16")
    assert len(rl_steps(folder)) == 2


@pytest.mark.prove
def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    words = mine(tmp_path / "data")
    plain, saving = (
        weights(play(tmp_path / f"run{on}", *words, f"model.gradient_checkpointing={on}"))[1]
        for on in ("false", "true")
    )
    assert all(torch.allclose(plain[n], saving[n], atol=1e-5) for n in plain)


@pytest.mark.prove
def test_tensorboard_is_written(tmp_path: Path) -> None:
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), "trackers=tensorboard")
    events = list((folder / "trackers" / "tensorboard").glob("events*"))
    assert events and events[0].stat().st_size > 1000
