"""Settings for a real model: chosen by its config.json, its files' sizes, the data and the machine. What is given
stays."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.planned import PlanOptions, planned
from posttrain.build.request import defaults
from posttrain.build.request.defaults import (
    LR,
    SMALL_LR,
    Choices,
    ModelDefaults,
    for_model,
    given_paths,
    learning_rate,
    room_for_minibatches,
)
from posttrain.build.request.input_measures import (
    GIB,
    Machine,
    ModelSize,
    SeenDevices,
    best_device,
    data_size,
    model_size,
)
from posttrain.build.request.run_request import RunOptions, requested
from posttrain.config import overrides
from posttrain.config.env import Env
from posttrain.config.run import Reinforce, Supervised
from posttrain.recipe.recipes import RECIPES, recipe
from posttrain.system.errors import ConfigError, DataError

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
GPU = Machine(device="cuda", why="one GPU: Some, 79 GiB", memory=79.0, cores=16)
CPU = Machine(device="cpu", why="torch sees no GPU here", memory=15.0, cores=2)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder with the config and the file sizes of a model of half a billion parameters; its weights hold nothing."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(988_097_824)
    return folder


def chosen(name: str, *words: str, on: Machine = GPU) -> ModelDefaults:
    base = recipe(name)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(defaults, "machine", lambda asked=None: on)
        return for_model(overrides.apply(base, list(words)), given_paths(base, words))


def rows(folder: Path, count: int = 300, **more: str) -> str:
    path = folder / "mine.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"what is {n}?", "answer": "1", **more}) + "\n" for n in range(count))
    )
    return f"env.prompts={path}"


def test_sizes_are_read_from_the_config_and_the_files_alone(qwen: Path) -> None:
    size = model_size(str(qwen))
    assert size is not None and (size.parameters, size.positions, size.cache_width) == (494_048_912, 32768, 256)
    (qwen / "model.safetensors").unlink()
    guessed = model_size(str(qwen))
    assert guessed is not None and abs(guessed.parameters / size.parameters - 1) < 0.02
    (qwen / "config.json").write_text("[]")
    assert model_size(str(qwen)) is None and model_size(str(qwen / "nothing")) is None


def test_a_real_model_on_a_gpu(qwen: Path, tmp_path: Path) -> None:
    ready = chosen("grpo", f"model={qwen}", rows(tmp_path), "env.rewards=exact")
    run, rl = ready.run, ready.run.stage("rl")
    assert isinstance(rl, Reinforce)
    assert (run.model.device, run.model.dtype, run.threads) == ("cuda", "bfloat16", 0)
    assert (rl.optimizer.lr, rl.prompts, rl.siblings, rl.sampling.max_tokens) == (1e-6, 128, 8, 1024)
    assert run.model.context == 1536 and run.slots == 512 and rl.micro_tokens == 8192
    assert run.model.gradient_checkpointing == "none"
    assert "  rl.optimizer.lr = 1e-06: full weights, as published for half a billion parameters and more" in ready.lines
    assert (
        all(len(line.replace(str(qwen), "MODEL").replace(str(tmp_path), "DATA")) <= 120 for line in ready.lines)
        and ready.chosen["rl.prompts"]
    )


def test_a_cpu_says_why(qwen: Path, tmp_path: Path) -> None:
    ready = chosen("verifiable", f"model={qwen}", rows(tmp_path, completion="1" * 900), "env.rewards=exact", on=CPU)
    run, sft, rl = ready.run, ready.run.stage("sft"), ready.run.stage("rl")
    assert isinstance(rl, Reinforce) and isinstance(sft, Supervised)
    assert (run.model.device, run.model.dtype, rl.prompts) == ("cpu", "float32", 16)
    assert (sft.optimizer.lr, sft.steps, rl.sampling.max_tokens) == (1e-5, round(2 * 300 / 64), 512)
    said = "\n".join(ready.lines)
    assert "the compiled kernels for CPUs are float32" in said and "the longest completion has 900 bytes" in said


@pytest.mark.parametrize(("hidden", "layers", "ffn", "tokens"), [(128, 4, 384, 4096), (512, 8, 1536, 2048)])
def test_a_small_model_takes_more_tokens_a_pass_on_a_cpu(hidden: int, layers: int, ffn: int, tokens: int) -> None:
    """A quarter of a gibibyte of activations, and at least 2,048 tokens."""
    size = ModelSize(parameters=10**6, positions=512, hidden=hidden, layers=layers, ffn=ffn, cache_width=hidden)
    made = Choices(recipe("grpo"), frozenset(), size=size, where=CPU).made()
    assert made["rl.micro_tokens"][0] == tokens


def test_what_the_user_gave_stays(qwen: Path, tmp_path: Path) -> None:
    given = {"model.dtype": "float32", "rl.optimizer.lr": "0.002", "rl.prompts": "6", "threads": "3", "slots": "7"}
    given |= {"model.context": "640", "rl.micro_tokens": "100", "engine.cache_gib": "2.0"}
    words = [f"{k}={v}" for k, v in given.items()]
    ready = chosen("grpo", f"model.path={qwen}", rows(tmp_path), "env.rewards=exact", "siblings=5", *words)
    for path, value in {**given, "rl.siblings": "5"}.items():
        of = ready.run.stage("rl") if path.startswith("rl.") else ready.run
        assert str(attrgetter(path.removeprefix("rl."))(of)) == value and path not in ready.chosen
    assert ready.run.model.device == "cuda"
    cut = chosen("grpo", f"model={qwen}", rows(tmp_path, 13), "env.rewards=exact", "minibatches=4").run.stage("rl")
    assert isinstance(cut, Reinforce) and cut.prompts == 12


def test_few_prompts_and_short_contexts_bound_what_is_chosen(qwen: Path, tmp_path: Path) -> None:
    (qwen / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 512}))
    rl = chosen("grpo", f"model={qwen}", rows(tmp_path, 12), "env.rewards=exact").run.stage("rl")
    assert isinstance(rl, Reinforce) and (rl.prompts, rl.sampling.max_tokens) == (12, 256)


def test_a_model_that_does_not_fit_is_told(qwen: Path) -> None:
    with (qwen / "model.safetensors").open("wb") as file:
        file.truncate(14_000_000_000)
    ready = chosen("grpo", f"model={qwen}")
    assert ready.run.model.gradient_checkpointing == "full" and "7 billion parameters takes about" in ready.lines[-1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_as_it_is_stays_as_it_is(name: str) -> None:
    assert for_model(recipe(name), frozenset()) == ModelDefaults(recipe(name))
    assert for_model(recipe(name), frozenset({"seed", "rl.steps"})) == ModelDefaults(recipe(name))


def test_a_small_model_keeps_the_settings_of_the_recipe(qwen: Path) -> None:
    with (qwen / "model.safetensors").open("wb") as file:
        file.truncate(200_000)
    ready = chosen("arithmetic", f"model={qwen}")
    assert ready.run.stages == recipe("arithmetic").stages and "100,000 parameters" in ready.lines[0]


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 258}


@pytest.mark.parametrize(("more", "size"), [({}, 988_097_824), (TINY, 60_000)])
@pytest.mark.parametrize("name", ["grpo", "verifiable"])
def test_a_plan_is_of_the_run_that_starts(
    name: str, more: dict[str, int], size: int, qwen: Path, tmp_path: Path
) -> None:
    """By the size of the model and by the rows: few prompts, short ones, and nothing to imitate."""
    (qwen / "config.json").write_text(json.dumps({**CONFIG, **more}))
    with (qwen / "model.safetensors").open("wb") as file:
        file.truncate(size)
    words = [f"model={qwen}", rows(tmp_path, 12), "env.rewards=exact"]
    plan = planned(name, [*words, "machine=H100"], PlanOptions())
    assert plan.run == chosen(name, *words, on=replace(GPU, memory=plan.memory / GIB)).run
    assert planned(name, [*words, "machine=H100"], PlanOptions(prompt=1500)).work.lengths.prompt == 1500


def test_the_learning_rate_falls_with_the_size(qwen: Path, tmp_path: Path) -> None:
    sizes = [10**n for n in range(4, 12)]
    for kind in (Reinforce, Supervised):
        rates = [learning_rate(kind, n)[0] for n in sizes]
        assert rates == sorted(rates, reverse=True) and (rates[0], rates[-1]) == (SMALL_LR[kind], LR[kind])
    for size, lr in ((200_000, 5e-4), (60_000_000, 1e-5)):  # bytes of bfloat16
        with (qwen / "model.safetensors").open("wb") as file:
            file.truncate(size)
        rl = chosen("grpo", f"model={qwen}", rows(tmp_path)).run.stage("rl")
        assert rl.optimizer.lr == lr
        assert chosen("grpo", f"model={qwen}", "rl.optimizer.lr=0.3").run.stage("rl").optimizer.lr == 0.3


@pytest.mark.parametrize("cut", [48, 7, 256])
def test_minibatches_that_are_given_fit_the_batch_that_is_chosen(cut: int, qwen: Path, tmp_path: Path) -> None:
    base, words = recipe("grpo"), [f"model={qwen}", rows(tmp_path), f"rl.minibatches={cut}"]
    run = overrides.apply(base, [*room_for_minibatches(base, words), *words])
    with pytest.MonkeyPatch.context() as m:
        m.setattr(defaults, "machine", lambda asked=None: GPU)
        rl = for_model(run, given_paths(base, words)).run.stage("rl")
    assert isinstance(rl, Reinforce) and rl.minibatches == cut and rl.prompts % cut == 0
    assert room_for_minibatches(base, [*words, "rl.prompts=5"]) == room_for_minibatches(base, words[1:]) == []


def test_mps_is_chosen_only_with_float64() -> None:
    assert best_device(SeenDevices(cuda=True, mps=True, mps_float64=True))[0] == "cuda"
    assert best_device(SeenDevices(mps=True, mps_float64=True))[0] == "mps"
    assert "no float64" in best_device(SeenDevices(mps=True))[1]
    assert best_device(SeenDevices(built_with_cuda=False))[1].endswith("(it is built without CUDA)")


def test_a_stage_that_has_nothing_to_imitate_is_left_out(tmp_path: Path) -> None:
    prompts = rows(tmp_path)
    ready = chosen("verifiable", prompts, "env.rewards=exact")
    assert [s.name for s in ready.run.stages] == ["rl"] and "sft: left out, because" in ready.lines[0]
    for words in (("verifiable", "sft.steps=3"), ("sft",)):
        with (
            pytest.raises(ConfigError, match="it has no demonstrations"),
            requested(words[0], [prompts, "env.rewards=exact", *words[1:]], RunOptions()),
        ):
            pass


def test_lengths_of_the_data(tmp_path: Path) -> None:
    rows(tmp_path, 3, completion="abcé")
    size = data_size(Env(name="prompts", prompts=str(tmp_path / "mine.jsonl")))
    assert size is not None and (size.rows, size.completions, size.longest_completion, size.longest) == (3, 3, 5, 15)
    assert data_size(Env(name="arithmetic")) is None
    with pytest.raises(DataError):
        data_size(Env(name="prompts", prompts=str(tmp_path / "nothing.jsonl")))
