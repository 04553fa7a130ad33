"""The example on word problems: every command of its page but the two that fetch something, on a model of the same
architecture with random weights and a chat template, and on generated problems."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.cli import main
from posttrain.core.types import Task
from posttrain.record import run_reader
from tests.environment.template_parts import CHATML, QWEN25
from tests.vocabularies import train_byte_level

pytestmark = pytest.mark.prove

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
TOY = {
    "slots": "16",
    "threads": "1",
    "env.heldout": "4",
    "evaluation.samples": "1",
    "model.device": "cpu",
    "rl.prompts": "2",
    "rl.siblings": "4",
    "rl.sampling.max_tokens": "8",
    "rl.eval_every": "0",
    "rl.steps": "2",
}


def problems(count: int) -> list[dict[str, str]]:
    """Rows as GSM8K has them."""
    return [
        {
            "question": f"Ann has {n} pens and buys {n + 2} boxes of {n}. How many pens has she?",
            "answer": f"The boxes hold {n + 2} * {n} = {(n + 2) * n} pens.\n#### {n * (n + 3):,}",
        }
        for n in range(20, 20 + count)
    ]


def qwen(folder: Path) -> Path:
    """A model of the family with random weights, its special tokens and a chat template that behaves as its own."""
    words = train_byte_level([row["question"] + row["answer"] for row in problems(30)], 300)
    words.add_special_tokens({"additional_special_tokens": list(CHATML)})
    words.eos_token, words.chat_template = CHATML[1], QWEN25
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words) + 8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (EXAMPLE / "README.md").read_text(), re.M | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gsm8k"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(30)))
    qwen(folder / "model")
    monkeypatch.chdir(folder)
    return folder


def toy(words: list[str]) -> list[str]:
    """The words at toy size, with the model of the test."""
    words = [w.replace(MODEL, "model") for w in words]
    if words[0] == "eval":
        small = {k: v for k, v in TOY.items() if "rl." not in k and "evaluation" not in k}
        more = [] if "runs/gsm8k" in words else [f"{k}={v}" for k, v in small.items()]
        return [*(w for w in words if w.partition("=")[0] not in TOY), *more, "--max-tokens", "8"]
    if words[0] != "run":
        return words
    if "--resume" in words:
        return [w.replace("rl.steps=200", "rl.steps=3") for w in words]
    return [*(w for w in words if w.partition("=")[0] not in TOY), *(f"{k}={v}" for k, v in TOY.items())]


def test_every_command_of_the_page_runs(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings for trained models are chosen for this one too, however small it is."""
    monkeypatch.setattr("posttrain.build.request.defaults.TRAINED", 0)
    monkeypatch.setattr("posttrain.build.request.defaults.LARGE", 0)
    asked = commands()
    assert [w[0] for w in asked].count("posttrain") == len(asked) - 2 and asked[0][:2] == ["pip", "install"]
    for program, *words in asked:
        if program == "python":
            words = [w.replace(DATA, "problems.jsonl") for w in words]
            subprocess.run([sys.executable, *words], check=True)
        elif program == "posttrain":
            assert main(toy(words)) == 0, words
    said = capsys.readouterr()
    assert "rl.optimizer.lr = 1e-06: full weights, as published" in " ".join(said.out.split())
    first, branch = (run_reader.run_file(there / "runs" / name) for name in ("gsm8k", "gsm8k-dapo"))
    assert first.run.stage("rl").optimizer.lr == 1e-6 and first.run.model.dtype == "float32"
    assert first.run.stage("rl").steps == 3 and first.facts["history"][0]["changed"] == {"rl.steps": [2, 3]}
    assert branch.facts["branched_from"]["identity"] == first.identity
    assert len(run_reader.steps(there / "runs" / "gsm8k")) == 3
    assert (there / "my-model" / "config.json").exists()
    assert "rl.optimizer.lr = 1e-05: " in " ".join(said.out.split())
    adapted = run_reader.run_file(there / "runs" / "gsm8k-lora").run
    assert adapted.model.lora and adapted.model.lora.rank == 16 and adapted.stage("rl").optimizer.lr == 1e-5
    assert (there / "my-adapter" / "adapter_config.json").exists()


def test_the_prompts_hold_each_problem_once_and_the_result_alone(there: Path) -> None:
    rows = problems(3)
    (there / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    subprocess.run([sys.executable, "prompts.py", "problems.jsonl", "prompts.jsonl"], check=True)
    made = [json.loads(line) for line in (there / "prompts.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in made] == [str(n * (n + 3)) for n in (20, 21, 22)]
    assert [m["role"] for m in made[0]["prompt"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "is_right", "has_form"),
    [
        ("20 and 440 are 460, so \\boxed{460}", 1, 1),
        ("So it is \\boxed{1,460}.", 0, 1),
        ("\\boxed{460}", 1, 0),
        ("First \\boxed{2}, then \\boxed{460}", 1, 0),
        ("It is \\boxed{460 pens}", 1, 1),
        ("It is \\boxed{460 or 461}", 0, 1),
        ("It is 460", 0, 0),
        ("It is \\boxed{460}" + " and so on" * 9, 1, 0),
        ("It is \\boxed{}", 0, 1),
    ],
)
def test_the_rewards(text: str, is_right: float, has_form: float) -> None:
    rewards = runpy.run_path(str(EXAMPLE / "rewards.py"))
    task = Task(id="a", prompt="p", answer="460")
    assert (rewards["right"](task, text), rewards["form"](task, text)) == (is_right, has_form)
