"""The largest pass before the first step: it leaves nothing behind, and says what to lower where memory does not
suffice."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.config.run import Reinforce, Supervised
from posttrain.config.stages.stage import Optimizer
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.token_choice import Distill
from posttrain.ladder.policy_rows import GKD
from posttrain.record import run_reader
from posttrain.role.memory_peaks import PeakMemory, memory_suffices
from posttrain.role.trainer import Trainer
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.stages.warm_up import largest, warm_up
from posttrain.system.errors import ConfigError
from tests.engine.engine_parts import ALPHABET, tiny

IDS = np.arange(16)


def lengths(context: int, micro: int, answer: int) -> list[int]:
    stage = Reinforce(name="rl", micro_tokens=micro, sampling=Sampling(max_tokens=answer))
    return largest(stage, context, IDS).lengths_S.tolist()


def test_the_longest_sequences_that_the_settings_allow() -> None:
    assert lengths(512, 1200, 100) == [512, 512, 176]
    assert lengths(512, 1024, 100) == [512, 512]
    assert lengths(40_000, 1000, 100) == [1000]
    assert lengths(40_000, 1000, 3000) == [3000], "one answer is longer than a pass, and it is never cut"
    assert lengths(2000, 1000, 3000) == [2000]
    assert largest(Supervised(name="sft", style="answer", micro_tokens=9), 4, IDS).lengths_S.tolist() == [4, 4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_left_of_it(dtype: str) -> None:
    """Weights, optimizer state, gradients and random numbers, bit for bit."""
    learner = HFLearner(load_policy(tiny("qwen3", context=64, dtype=dtype), ALPHABET, 0))
    optimizer = StageOptimizer(learner.parameters(), Optimizer(lr=0.1, warmup=0, freeze=("*norm*",)))
    trainer = Trainer(learner, optimizer, micro_tokens=300)
    packed = largest(Reinforce(name="rl", micro_tokens=300), 64, IDS)

    def state() -> tuple[object, ...]:
        chance = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
        grads = [n for n, p in learner.parameters().items() if p.grad is not None or not p.requires_grad]
        held = fingerprint(optimizer.state_tensors().items())
        return learner.fingerprint(), held, grads, chance, learner.policy.module.training, trainer.version

    before = state()
    candidates = np.resize(packed.target_M, (packed.spoken, 3))
    said = warm_up(trainer, packed, Reads(True, True, candidates), PeakMemory())
    assert state() == before
    assert said.startswith("warm-up: a pass of 300 tokens, 5 sequences of up to 64, took ") and "MiB" in said


def test_a_process_without_memory_is_told_in_words() -> None:
    """Python's own MemoryError has no text."""
    packed = largest(Reinforce(name="rl", micro_tokens=300), 64, IDS)
    with pytest.raises(ConfigError, match=r"lower micro_tokens=300 .*\(MemoryError\)"), memory_suffices(packed, 300):
        raise MemoryError


@pytest.mark.parametrize("top", [0, 3])
def test_the_largest_pass_reads_as_many_candidates_as_the_loss(top: int) -> None:
    learner = HFLearner(load_policy(tiny("qwen3", context=64), ALPHABET, 0))
    packed = largest(Reinforce(name="rl", micro_tokens=20), 64, IDS)
    algorithm = patch(GKD, "top", "", distill=Distill(top=top)) if top else GKD
    stage = SimpleNamespace(algorithm=algorithm)
    driver: Any = SimpleNamespace(stage=stage, parts=SimpleNamespace(learner=learner))
    candidates = ReinforceDriver.reads(driver, packed).candidates_MK
    assert candidates is not None and candidates.shape == learner.top(packed, top).ids.shape


def test_room_is_held_for_the_optimizers_state() -> None:
    learner = HFLearner(load_policy(tiny("qwen3", context=64), ALPHABET, 0))
    optimizer = StageOptimizer(learner.parameters(), Optimizer(lr=0.1, warmup=0))
    count = sum(p.numel() for p in learner.parameters().values())
    assert optimizer.pending_bytes() == 8 * count
    for p in learner.parameters().values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.pending_bytes() == 0


@pytest.mark.prove
def test_a_run_with_it_is_the_run_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft.steps=2", "rl.steps=2", "rl.prompts=2", "rl.siblings=2", "env.heldout=2", "rl.algorithm=ppo")
    for on in ("none", "true"):
        posttrain.run("arithmetic", *words, f"model.warm_up={on}", out=tmp_path / on)
        said = capsys.readouterr().out
        assert ("sft: warm-up: a pass of 4,096 tokens" in said) == ("rl: warm-up: a pass of" in said) == (on == "true")
    assert run_reader.record_digest(tmp_path / "none") == run_reader.record_digest(tmp_path / "true")


STARVED = """
import pathlib, resource, sys
import posttrain, posttrain.api.main
import torch, transformers
have = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize:"))
most = int(have.split()[1]) * 1024 + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
words = ("sft=none", "model.warm_up=true", "rl.micro_tokens=400000", "env.heldout=2")
posttrain.run("arithmetic", *words, out=sys.argv[1], quiet=True)
"""


@pytest.mark.prove
def test_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    """In a process whose memory is limited."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(tmp_path / "run")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: out of memory in a forward and backward pass of 400,000 tokens" in last, last
    assert "lower micro_tokens=400000 of the stage" in last and "model.gradient_checkpointing=full" in last
    assert not run_reader.steps(tmp_path / "run")


def test_a_sequence_that_alone_is_too_long_is_said_otherwise() -> None:
    packed = largest(Reinforce(name="rl", micro_tokens=100, sampling=Sampling(max_tokens=300)), 400, IDS)
    told = r"never cut.* micro_tokens=100: lower model.context or sampling.max_tokens"
    with pytest.raises(ConfigError, match=told), memory_suffices(packed, 100):
        torch.empty(1 << 50)
    with pytest.raises(RuntimeError, match="shape"), memory_suffices(packed, 100):
        torch.ones(2) @ torch.ones(3, 3)
