"""Model directories that somebody broke, or made to break us: each ends with a sentence, in little time and memory, and
nothing of theirs runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.config.run import Model
from posttrain.engine.files.pretrained_files import read_tokenizer
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.parallel.sharded_load import blank_policy
from posttrain.role.weights.saved_weights import WEIGHTS, load_weights
from posttrain.system.errors import DataError, RunFolderError
from tests.engine.run_parts import LADDER, model_at, play, refused

Harm = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_at(tmp_path_factory.mktemp("models") / "good")


class Evil:
    """Unpickled, it makes the file `owned`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def pickled(folder: Path) -> None:
    torch.save({"x": Evil(folder.parent / "owned")}, folder / "pytorch_model.bin")


def raw(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "owned")))


def written(name: str, data: bytes) -> Harm:
    return lambda folder: (folder / name).write_bytes(data)


def config(**changes: Any) -> Harm:
    def harm(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return harm


def special(name: str, make: Callable[[Path], object]) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


NESTED = b'{"a":' + b"[" * 100_000
BIN = {
    "a pickle in a zip": (pickled, "a pickle of more than tensors"),
    "a pickle": (raw, "a pickle of more than tensors"),
    "nothing": (written("pytorch_model.bin", b""), "damaged"),
    "anything": (written("pytorch_model.bin", b"junk" * 100), "no causal LM could be loaded"),
}
OTHER = {
    "config nested": (written("config.json", NESTED), r"config\.json is damaged: .* nested too deeply"),
    "config a list": (written("config.json", b"[]"), r"config\.json is damaged: an object is wanted"),
    "config no text": (written("config.json", b"\xff\x00"), r"config\.json is damaged"),
    "config long number": (written("config.json", b'{"a": ' + b"9" * 5000 + b"}"), r"config\.json is damaged"),
    "config huge": (lambda f: os.truncate(f / "config.json", 1 << 30), r"config\.json has 1,073,741,824 bytes"),
    "heads of text": (config(num_attention_heads="x"), "describes no model"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "width below nothing": (config(hidden_size=-1), "no causal LM could be loaded"),
    "width huge": (config(hidden_size=10**9), "no causal LM could be loaded"),
    "width no machine has": (config(hidden_size=10**30), "no causal LM could be loaded"),
    "vocabulary huge": (config(vocab_size=10**12), "no causal LM could be loaded"),
    "many layers": (
        config(num_hidden_layers=10**9, layer_types=None),
        r"num_hidden_layers=1,000,000,000, and its weights hold \d+ tensors",
    ),
    "kinds of layers": (config(layer_types=["x", "y"]), "describes no model"),
    "no dtype": (config(dtype="x"), "describes no model"),
    "no activation": (config(hidden_act="x"), "no causal LM could be loaded"),
    "kind a list": (config(model_type=["x"]), "names no architecture"),
    "stops nested": (
        written("generation_config.json", b'{"eos_token_id": [[1]]}'),
        "is no token id and no list of them",
    ),
    "stops text": (written("generation_config.json", b'{"eos_token_id": "x"}'), "is no token id and no list of them"),
    "stops a list": (written("generation_config.json", b"[]"), r"generation_config\.json is damaged"),
    "stops anything": (written("generation_config.json", b"x"), r"generation_config\.json is damaged"),
    "tokenizer nested": (written("tokenizer.json", NESTED), "the tokenizer cannot be read"),
    "tokenizer settings nested": (written("tokenizer_config.json", NESTED), r"tokenizer_config\.json is damaged"),
    "header huge": (written("model.safetensors", b"\xff" * 8 + b"x" * 100), "damaged"),
    "weights empty": (written("model.safetensors", b""), "damaged"),
    "index a list": (written("model.safetensors.index.json", b"[]"), r"index\.json is damaged"),
    "index of another folder": (
        written("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "../other/model.safetensors"}}'),
        "names the file '../other/model.safetensors'",
    ),
    "index of pickles elsewhere": (
        written("pytorch_model.bin.index.json", b'{"metadata": {}, "weight_map": {"a": "/other/model.bin"}}'),
        "names the file '/other/model.bin'",
    ),
    "index of no file": (written("model.safetensors.index.json", b'{"weight_map": {"a": null}}'), "must give the file"),
    "pipe": (special("config.json", os.mkfifo), r"config\.json is a pipe"),
    "pipe of weights": (special("model.safetensors", os.mkfifo), r"model\.safetensors is a pipe"),
    "pipe of a template": (special("chat_template.jinja", os.mkfifo), r"chat_template\.jinja is a pipe"),
    "device": (
        special("tokenizer.json", lambda p: p.symlink_to("/dev/zero")),
        r"tokenizer\.json is a pipe, a socket or a device",
    ),
    "directory": (special("generation_config.json", lambda p: p.mkdir()), r"generation_config\.json is a directory"),
    "link to nothing": (
        special("chat_template.jinja", lambda p: p.symlink_to("nowhere")),
        r"cannot read .*chat_template\.jinja",
    ),
}


def load(folder: Path, says: str) -> None:
    begun = time.process_time()
    with pytest.raises(DataError, match=says):
        load_policy(Model(path=str(folder)), None, 0)
    assert time.process_time() - begun < 20 and not (folder.parent / "owned").exists()


@pytest.mark.parametrize("name", BIN)
def test_pickles_are_not_run(good: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    harm, says = BIN[name]
    harm(folder)
    load(folder, says)


@pytest.mark.parametrize("name", OTHER)
def test_broken_directories_end_with_a_sentence(good: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    harm, says = OTHER[name]
    harm(folder)
    load(folder, says)


def test_a_tokenizer_directory_is_examined_too(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(good / name, folder)
    assert read_tokenizer(str(folder))[1] is None
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json is a pipe"):
        read_tokenizer(str(folder))


@pytest.mark.parametrize("wrong", [{"max_new_tokens": []}, {"watermarking_config": 3}, {"cache_implementation": 3}])
def test_generation_settings_that_are_none_are_refused_everywhere(
    good: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    load(folder, "no causal LM could be loaded")
    for read in (lambda: read_tokenizer(str(folder)), lambda: blank_policy(Model(path=str(folder)))):
        with pytest.raises(DataError, match=r"generation_config\.json cannot be read"):
            read()


@pytest.mark.parametrize("harm", [config(vocab_size=10**12), config(num_attention_heads=0)], ids=["huge", "no heads"])
def test_a_model_that_cannot_be_built_is_refused_before_its_rows_are_read(
    harm: Harm, good: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    harm(folder)
    with pytest.raises(DataError, match="no causal LM could be loaded|describes no model"):
        blank_policy(Model(path=str(folder)))


def test_a_weight_with_more_rows_than_the_model_is_refused_where_rows_are_read(good: Path, tmp_path: Path) -> None:
    folder, name = Path(shutil.copytree(good, tmp_path / "model")), "model.embed_tokens.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.cat([weights[name], weights[name][:1]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    policy = blank_policy(Model(path=str(folder)))
    with pytest.raises(DataError, match=f"{name} has the shape"):
        policy.files.whole(policy.module, name, policy.module.get_parameter(name))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_weights_that_are_cut_are_refused_whatever_their_digest_says(tmp_path: Path, cut: int, good: Path) -> None:
    class Learner:
        def parameters(self) -> dict[str, torch.Tensor]:
            return load_file(good / "model.safetensors")

    data = (good / "model.safetensors").read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[:cut])
    with pytest.raises(RunFolderError, match=r"weights\.safetensors is damaged"):
        load_weights(tmp_path, Learner())  # type: ignore[arg-type]
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(RunFolderError, match=r"cannot read .*weights\.safetensors"):
        load_weights(tmp_path, Learner())  # type: ignore[arg-type]


@pytest.mark.prove
def test_commands_on_a_broken_run_folder_end_with_exit_code_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run, broken in several ways: resume, eval, export and show say what is damaged and what is whole."""
    folder = play(tmp_path / "run", *LADDER, "keep_checkpoints=4")
    places = sorted(p for p in (folder / "checkpoints").iterdir() if p.is_dir())
    newest, before = places[-1], places[-2]
    whole = {p: (p / "state.json").read_bytes() for p in places}
    (places[0] / "state.json").write_bytes(b"")
    refused(capsys, "export", str(folder), str(tmp_path / "out"), "--checkpoint", places[0].name, code=5)
    (newest / "state.json").write_bytes(b'{"schema": 1, "order": 0')
    said = refused(capsys, "run", "--resume", str(folder), code=5)
    assert f"posttrain run --resume {before}" in said and str(newest / "state.json") in said
    for words in (("eval", str(folder)), ("export", str(folder), str(tmp_path / "out"))):
        assert f"--checkpoint {before.name}" in refused(capsys, *words, code=5)
    (newest / "state.json").write_bytes(whole[newest])
    os.truncate(newest / WEIGHTS, 200)
    assert f"posttrain run --resume {before}" in refused(capsys, "run", "--resume", str(folder), code=5)
    play_again = ("run", "--resume", str(before))
    from posttrain.cli import main

    assert main(list(play_again)) == 0 and main(["export", str(folder), str(tmp_path / "out")]) == 0
    for data in (NESTED, b"[]", b'{"schema": 2, "run": {"stages": 3}, "lineages": {}}'):
        (folder / "run.json").write_bytes(data)
        for words in (
            ("run", "--resume", str(folder)),
            ("eval", str(folder)),
            ("show", str(folder)),
            ("export", str(folder), str(tmp_path / "x")),
        ):
            assert "run.json" in refused(capsys, *words, code=5)
