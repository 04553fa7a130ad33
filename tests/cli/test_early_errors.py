"""A wrong command is answered before torch is imported: within a second, on a machine that is not busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WRONG: dict[str, tuple[list[str], str]] = {
    "no recipe": (["run"], "no recipe given"),
    "recipe": (["run", "lader"], "did you mean 'ladder'?"),
    "key": (["run", "ladder", "rl.stps=4"], "did you mean 'steps'?"),
    "value": (["run", "ladder", "rl.steps=many"], "a whole number"),
    "range": (["run", "ladder", "rl.steps=0"], "must be >= 1"),
    "algorithm": (["run", "ladder", "algorithm=dapoo"], "did you mean 'dapo'?"),
    "combination": (["run", "ladder", "rl.minibatches=7"], "use a divisor of 64"),
    "two stages": (["run", "ladder", "optimizer.lr=1"], "say which"),
    "epsilon": (["run", "ladder", "rl.optimizer.eps=-1"], "optimizer.eps=-1: must be > 0"),
    "moments": (["run", "ladder", "sft.optimizer.beta2=1"], "optimizer.beta2=1: must be in [0, 1)"),
    "decay": (["run", "ladder", "rl.optimizer.weight_decay=inf"], "optimizer.weight_decay=inf: must be >= 0"),
    "cache": (["run", "ladder", "engine.cache_gib=inf"], "engine.cache_gib=inf: must be > 0"),
    "rank": (["run", "ladder", "model.lora.rank=1000000000"], "must be 1 to 65,536"),
    "ranks": (["run", "arithmetic", "--nproc", "2", "exact=true"], "over ranks (--nproc, torchrun): exact=true"),
    "patience of ranks": (
        ["run", "arithmetic", "--nproc", "2", "--rank-timeout", "inf"],
        "--rank-timeout inf: must be",
    ),
    "heads": (["run", "arithmetic", "--nproc", "3", "--parallel", "tensor"], "3 ranks cannot share model.heads=4"),
    "experts": (["run", "arithmetic", "--nproc", "2", "--parallel", "experts"], "model.arch=qwen3 has none"),
    "open server": (["serve", "here", "--host", "0.0.0.0", "--no-token"], "would serve everybody"),
    "sizes": (["run", "ladder", "model.heads=3"], "use a multiple of 3"),
    "length": (["run", "ladder", "rl.sampling.max_tokens=500"], "leaves no room for a prompt"),
    "environment": (["run", "ladder", "env=shopp"], "did you mean 'shop'?"),
    "environment's setting": (["run", "ladder", "env.args.therms=3"], "did you mean 'min_terms'?"),
    "style": (["run", "ladder", "sft.style=essay"], "writes document, answer, cot"),
    "prompts": (["run", "grpo", "env.prompts=nope.jsonl"], "no such file or folder: nope.jsonl"),
    "row": (["run", "grpo", "env.prompts=bad.jsonl"], "bad.jsonl:1"),
    "reward file": (["run", "grpo", "env.rewards=nope.py:reward"], "no such file"),
    "reward function": (["run", "grpo", "env.rewards=mine.py:reword"], "did you mean 'reward'?"),
    "reward": (["run", "grpo", "env.rewards=exactly"], "did you mean 'exact'?"),
    "model path": (["run", "grpo", "model=./nope"], "no such directory"),
    "model below": (["run", "grpo", "model=here/nope"], "no such directory"),
    "no model": (["run", "grpo", "model=here"], "no config.json there"),
    "reference": (["run", "grpo", "rl.reference=./nope"], "rl.reference=./nope: no such directory"),
    "draft": (["run", "grpo", "engine.draft=./nope"], "engine.draft=./nope: no such directory"),
    "hub": (["run", "grpo", "model=no-such-owner/no-such-model"], "the hub cannot be reached"),
    "engine": (["run", "grpo", "engine=vllm"], "vllm is not installed"),
    "fault": (["run", "ladder", "fault=std_dof"], "did you mean 'std_ddof'?"),
    "bits of a mixture": (["run", "ladder", "model.arch=mixtral", "deterministic=true"], "mixtral routes tokens"),
    "exact bits of one": (
        ["run", "ladder", "model.arch=qwen3_moe", "exact=true"],
        "Set deterministic=false exact=false",
    ),
    "bits of a state": (["run", "grpo", "model=mamba2", "deterministic=true"], "mamba2 keeps a recurrent state"),
    "folder": (["run", "ladder", "--out", "here"], "is not empty"),
    "resume": (["run", "--resume", "here"], "here"),
    "trust": (["run", "ladder", "--trust"], "give it with --resume"),
    "device": (["run", "ladder", "model.device=nonsense"], "use cpu, cuda"),
    "run to begin with": (["run", "grpo", "model=runs/nope/checkpoints/best"], "no such directory"),
    "run to resume": (["run", "--resume", "runs/nope"], "it does not exist"),
    "serve": (["serve", "./nope"], "./nope: no such directory. Give a run folder"),
    "serve, a folder": (["serve", "here"], "no config.json there"),
    "serve, of the hub": (["serve", "no-such-model"], "the hub cannot be reached"),
    "serve, a setting": (["serve", "./nope", "rl.steps=3"], "no such directory"),
    "eval": (["eval", "./nope"], "./nope: no such directory. Give a run folder"),
    "eval of the hub": (["eval", "no-such-owner/no-such-model", "env=arithmetic"], "the hub cannot be reached"),
    "export": (["export", "runs/nope", "out"], "it does not exist"),
    "show": (["show", "runs/nope"], "it does not exist"),
    "summary": (["summary", "runs/nope"], "it does not exist"),
    "plot": (["plot", "runs/nope"], "it does not exist"),
    "compare": (["compare", "runs/nope", "runs/nor"], "it does not exist"),
    "check": (["check", "runs/nope"], "there is no such folder"),
    "check a recipe": (["check", "verifiable"], "check prompts env.prompts=mine.jsonl"),
    "ladder --on": (["ladder", "--on", "runs/nope"], "it does not exist"),
}

PROGRAM = """
import json, sys
from posttrain.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    try:
        codes.append(main(words))
    except SystemExit as end:
        codes.append(end.code)
    print("<end>", file=sys.stderr, flush=True)
print(json.dumps([codes, sorted({"torch", "transformers", "datasets"} & {*sys.modules})]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[str], list[str]]:
    """(exit codes, heavy packages that were imported, messages) of all wrong commands in one process."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "here").mkdir()
    (folder / "here" / "notes.txt").write_text("mine")
    (folder / "mamba2").mkdir()
    (folder / "mamba2" / "tokenizer.json").write_text("{}")
    (folder / "mamba2" / "config.json").write_text('{"model_type": "mamba2"}')
    (folder / "bad.jsonl").write_text('{"question": "2+2"}\n')
    (folder / "mine.py").write_text("def reward(task, text):\n    return 1.0\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([words for words, _ in WRONG.values()])],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    codes, heavy = json.loads(done.stdout)
    return codes, heavy, done.stderr.split("<end>\n")[:-1]


def test_nothing_heavy_is_imported(answers: tuple[list[int], list[str], list[str]]) -> None:
    assert answers[1] == []


@pytest.mark.parametrize("name", WRONG)
def test_each_says_what_to_change(name: str, answers: tuple[list[int], list[str], list[str]]) -> None:
    number, says = [*WRONG].index(name), WRONG[name][1]
    said = answers[2][number]
    assert answers[0][number] in (2, 4, 5) and says in said, said
    assert "Traceback" not in said and said.startswith("posttrain: ")


@pytest.mark.prove
def test_python_answers_before_torch_too(tmp_path: Path) -> None:
    program = """
import sys, posttrain
for call in (
    lambda: posttrain.run("grpo", "rl.stps=4"),
    lambda: posttrain.run("grpo", model="./nope"),
    lambda: posttrain.run("grpo", env=[{"prompt": "1+1=", "answer": "2"}], rewards=["exactly"]),
    lambda: posttrain.run(resume="runs/nope"),
    lambda: posttrain.evaluate("./nope", "env=arithmetic"),
    lambda: posttrain.export("runs/nope", "out"),
    lambda: posttrain.load("runs/nope"),
):
    try:
        call()
    except posttrain.system.errors.PosttrainError as error:
        print(type(error).__name__)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    wanted = ["ConfigError"] * 3 + ["RunFolderError", "ConfigError"] + ["RunFolderError"] * 2
    assert done.stdout.split() == [*wanted, "False"]
