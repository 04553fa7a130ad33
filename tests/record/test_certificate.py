"""The export certificate: every healthy export passes, each planted fault is refused by name, and nothing that could be
taken for good is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.cli import main
from posttrain.config.model_settings import Lora
from posttrain.config.run import Model, Run
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.model import policy_model
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.model.tiny_models import characters
from posttrain.ladder.policy_rows import LADDER
from posttrain.record.certificate import CERTIFICATE, FAILED, verify_certificate
from posttrain.record.checkpoint import find, scan
from posttrain.record.run_reader import run_file
from posttrain.report.export import certify_export, recorded_prompts
from posttrain.report.export import export_model as exporting
from posttrain.system import files
from posttrain.system.errors import ConfigError, DataError, InvariantError, RunFolderError
from tests import families
from tests.tiny import MODEL, tiny_run

pytestmark = pytest.mark.prove


def short(model: Model = MODEL, ema: float = 0.0, **more: Any) -> Run:
    """SFT and one RL step, at a rate that moves the weights far."""
    run = tiny_run(steps=2)
    stages = tuple(
        replace(s, optimizer=replace(s.optimizer, lr=0.02, warmup=0, ema=ema or None), steps=2) for s in run.stages
    )
    return replace(run, model=model, stages=stages, **more)


def played(folder: Path, run: Run) -> Path:
    posttrain.run(run, out=folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(tmp_path_factory.mktemp("runs") / "full", short(ema=0.9, keep_checkpoints=9))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter over an exported model."""
    folder = tmp_path_factory.mktemp("runs")
    base = posttrain.export(played(folder / "base", short()), folder / "model")
    return played(folder / "lora", short(Model(path=str(base), lora=Lora(rank=4, alpha=64), context=64)))


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CERTIFICATE).read_text())


def rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["what"].partition(" of checkpoint")[0]: c for c in data["compared"]}


# --- healthy exports --------------------------------------------------------------------------------------------------


def test_what_was_compared_is_written_beside_the_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "m")]) == 0
    data = read(tmp_path / "m")
    found = rows(data)
    assert data["passed"] and data["made"] == "weights" and data["checkpoint"] == find(run).name
    assert found["ids of prompts"]["notes"]["as_recorded"] == found["ids of prompts"]["count"] == 6
    assert found["greedy answers"]["count"] > 0 and found["log-probs"]["worst"] <= found["log-probs"]["bound"] == 2e-3
    assert data["weights"] == find(run).state["weights"], "bit for bit what the checkpoint says of itself"
    assert {"model.safetensors", "tokenizer.json", "config.json", "lineage.json"} <= data["files"].keys()
    assert data["versions"].keys() >= {"posttrain", "torch", "transformers"} and data["second_copy"] > 4 * 10_000
    assert "MiB for the second copy" in capsys.readouterr().out
    assert not [p for p in (tmp_path / "m").iterdir() if p.name.startswith(".")]
    assert verify_certificate(tmp_path / "m")


def test_each_checkpoint_and_the_average_pass(run: Path, tmp_path: Path) -> None:
    middle = next(c for c in scan(run) if c.state["weights"] != find(run).state["weights"])
    digests = {
        read(Path(posttrain.export(run, tmp_path / name, checkpoint, ema=ema)))["weights"]
        for name, checkpoint, ema in (("a", "last", False), ("b", "last", True), ("c", middle.name, False))
    }
    assert len(digests) == 3
    assert read(tmp_path / "b")["made"] == "moving average of the weights"


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_run_that_learned_values_passes(ema: float, tmp_path: Path) -> None:
    """Its checkpoint holds a value head that no longer is what every head begins as."""
    asked = short(ema=ema)
    sft, rl = asked.stages
    played(tmp_path / "run", replace(asked, stages=(sft, replace(rl, algorithm=LADDER["ppo"]))))
    for checkpoint in ("last", "best"):
        data = read(Path(posttrain.export(tmp_path / "run", tmp_path / checkpoint, checkpoint, ema=ema > 0)))
        assert data["passed"]


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_passes_merged_and_alone(lora: Path, tmp_path: Path, alone: bool) -> None:
    data = read(Path(posttrain.export(lora, tmp_path / "m", adapter=alone)))
    back = rows(data)["weights read back"]
    assert data["passed"] and ("adapter_model.safetensors" in data["files"]) == alone
    assert alone or (back["notes"]["merged"] == 14 and 0 < back["worst"] <= 1)
    assert not alone or data["versions"]["peft"]


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gemma"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_architectures_and_dtypes_pass_merged(arch: Any, dtype: Any, tmp_path: Path) -> None:
    heads = {"kv_heads": 2} if arch == "gpt2" else {}
    kind = Lora(rank=4, alpha=64, dora=arch == "llama", rslora=arch == "gemma")
    out = played(tmp_path / "run", short(replace(MODEL, arch=arch, dtype=dtype, lora=kind, **heads)))
    assert read(Path(posttrain.export(out, tmp_path / "m")))["dtype"] == dtype


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_models_with_a_state_pass(family: str, tmp_path: Path) -> None:
    families.build(families.config(family)).save_pretrained(tmp_path / "model")
    characters("0123456789+-*=<> abcdefghijklmnopqrstuv").save_pretrained(tmp_path / "model")
    out = played(tmp_path / "run", short(Model(path=str(tmp_path / "model"), context=48)))
    assert read(Path(posttrain.export(out, tmp_path / "m")))["passed"]


def test_without_a_record_prompts_are_generated(tmp_path: Path) -> None:
    out = played(tmp_path / "run", short(record_episodes=False))
    found = rows(read(Path(posttrain.export(out, tmp_path / "m"))))
    assert found["ids of prompts"]["unit"] == "generated prompts" and found["greedy answers"]["count"] > 0


def test_the_run_itself_says_what_the_export_says(run: Path, tmp_path: Path) -> None:
    """The certificate takes the answers of the model that was read back and asks the run of each token; here both
    answer for themselves."""
    from posttrain.build.open_model import kept_policy
    from posttrain.engine.files.reload_export import reload
    from posttrain.engine.learner.learner import HFLearner
    from posttrain.role.weights.saved_weights import load_weights

    policy = kept_policy(run, allow=False)
    load_weights(find(run).folder, HFLearner(policy))
    again = reload(Path(posttrain.export(run, tmp_path / "m")), policy)
    for p in recorded_prompts.recorded_prompts(run, 18, 64):
        theirs = again.answer(p.ids, 12)
        ours = policy.greedy(torch.from_numpy(p.ids.astype(np.int64)), 12)[len(p.ids) :][: len(theirs)]
        assert theirs.tolist() == ours.tolist()
        assert len(theirs) == 12 or theirs[-1] in policy.stop_ids


# --- planted faults ---------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def written_and(change: Callable[[Path], object]) -> Plant:
    """Something happens to the files of a model right after they were written."""

    def plant(m: pytest.MonkeyPatch) -> None:
        real = Policy.write

        def write(self: Policy, folder: Path) -> None:
            real(self, folder)
            change(folder)

        m.setattr(Policy, "write", write)

    return plant


def edited(name: str, **more: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    return change


def other_tokenizer(folder: Path) -> None:
    """Two characters have each other's ids."""
    data = json.loads((folder / "tokenizer.json").read_text())
    words = data["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def one_weight(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][3] += 1e-6
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def average_for_weights(m: pytest.MonkeyPatch) -> None:
    m.setattr(exporting, "load_weights", exporting.load_average)


def not_averaged(m: pytest.MonkeyPatch) -> None:
    m.setattr(exporting, "load_average", exporting.load_weights)


FAULTS: dict[str, tuple[Plant, str]] = {
    "tokenizer of another model": (written_and(other_tokenizer), "tokenizer: "),
    "template edited": (written_and(edited("tokenizer_config.json", chat_template="{{ messages }}")), "chat template"),
    "stops lost": (written_and(edited("generation_config.json", eos_token_id=None)), "stop tokens: "),
    "another stop": (written_and(edited("generation_config.json", eos_token_id=[3])), "stop tokens: "),
    "a weight altered": (written_and(one_weight), "model.norm.weight differ from the run"),
    "config of another model": (written_and(edited("config.json", rms_norm_eps=0.3)), "(greedy answers|log-probs): "),
    "average for weights": (average_for_weights, "are not the weights of the checkpoint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_by_name(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, says = FAULTS[name]
    with monkeypatch.context() as m:
        plant(m)
        with pytest.raises(InvariantError, match=says):
            posttrain.export(run, tmp_path / "m")
        shutil.rmtree(tmp_path / "m")
        assert main(["export", str(run), str(tmp_path / "m")]) == 3
    assert "is not what the run holds" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "m").iterdir()] == [FAILED], "nothing that could be taken for good"
    assert json.loads((tmp_path / "m" / FAILED).read_text())["passed"] is False
    assert main(["export", str(run), str(tmp_path / "m")]) == 0, "and it can be exported there once it is mended"


def test_weights_for_the_average_are_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_averaged(monkeypatch)
    with pytest.raises(InvariantError, match="are not the moving averages of the checkpoint"):
        posttrain.export(run, tmp_path / "m", ema=True)


@pytest.mark.parametrize("times", [0, 2])
def test_an_adapter_is_merged_once(lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Not at all, or onto weights into which it was merged before."""
    real: Any = adapter_modules._merged_layer  # pyright: ignore[reportPrivateUsage]

    def wrong(layer: Any, *more: Any) -> Any:
        base, plain = layer.get_base_layer(), real(layer, *more)
        with torch.no_grad():
            plain.weight.copy_(base.weight + times * (plain.weight - base.weight))
        return plain

    monkeypatch.setattr(adapter_modules, "_merged_layer", wrong)
    with pytest.raises(InvariantError, match="is not the run's layer with its adapter merged once"):
        posttrain.export(lora, tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == [FAILED]


def test_an_adapter_that_does_not_arrive_is_refused(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporting.write_adapter

    def zeros(policy: Policy, folder: Path, base: str) -> None:
        real(policy, folder, base)
        held = load_file(folder / "adapter_model.safetensors")
        save_file({n: t * 0 for n, t in held.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "write_adapter", zeros)
    with pytest.raises(InvariantError, match="differ from the run"):
        posttrain.export(lora, tmp_path / "m", adapter=True)


def test_an_adapter_over_weights_into_which_it_was_merged_is_refused(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = Path(posttrain.export(lora, tmp_path / "merged"))
    monkeypatch.setattr(exporting, "adapter_base", lambda folder: str(merged))
    with pytest.raises(InvariantError, match=r"weights read back: model.* differ from the run"):
        posttrain.export(lora, tmp_path / "m", adapter=True)


def test_files_that_cannot_be_read_leave_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_and(lambda folder: (folder / "config.json").write_text("{"))(monkeypatch)
    with pytest.raises(DataError, match="cannot be read back"):
        posttrain.export(run, tmp_path / "m")
    assert not list((tmp_path / "m").iterdir())


def test_without_room_for_a_second_copy_it_says_how_much_is_needed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify_export, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"a second copy of the weights must fit: 0\.00 GiB \([\d,]+ bytes\).* free"):
        posttrain.export(run, tmp_path / "m")
    assert not (tmp_path / "m").exists()


# --- after the export -------------------------------------------------------------------------------------------------


def extra_code(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


LATER: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (one_weight, r"model\.safetensors is not the file that was exported"),
    "tokenizer": (other_tokenizer, r"tokenizer\.json is not the file"),
    "stops": (edited("generation_config.json", eos_token_id=None), r"generation_config\.json is not the file"),
    "template": (lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"), "was added after the export"),
    "gone": (lambda f: (f / "generation_config.json").unlink(), "is gone"),
    "hostile": (edited(CERTIFICATE, files={"../../etc/passwd": "0"}), "is no name of a file here"),
    "failed": (edited(CERTIFICATE, passed=False), "differs from its run"),
    "damaged": (lambda f: (f / CERTIFICATE).write_text("{"), "is damaged"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_is_changed_after_the_export_is_refused_as_a_model(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, says = LATER[name]
    folder = Path(posttrain.export(run, tmp_path / "m"))
    change(folder)
    with pytest.raises(DataError, match=says):
        posttrain.run(short(Model(path=str(folder), context=64)), out=tmp_path / "run", quiet=True)
    assert main(["eval", str(folder), "env=arithmetic", "env.heldout=2", "--samples", "1"]) == 4
    assert not (tmp_path / "run").exists()


def test_the_card_may_be_edited(run: Path, tmp_path: Path) -> None:
    folder = Path(posttrain.export(run, tmp_path / "m"))
    (folder / "README.md").write_text("mine")
    assert verify_certificate(folder) and policy_model.load_policy(Model(path=str(folder)), None, 0)


def test_a_changed_model_is_a_model_of_its_own_without_its_papers(run: Path, tmp_path: Path) -> None:
    folder = Path(posttrain.export(run, tmp_path / "m"))
    one_weight(folder)
    (folder / CERTIFICATE).unlink()
    with pytest.raises(DataError, match="they are not the same model"):
        posttrain.run(short(Model(path=str(folder), context=64)), out=tmp_path / "run", quiet=True)
    (folder / "lineage.json").unlink()
    played(tmp_path / "run", short(Model(path=str(folder), context=64)))


# --- damage in the run folder -----------------------------------------------------------------------------------------


def other_angles(config: Path) -> None:
    """Another base of the rotary positions, which is a model that runs as well."""
    data = json.loads(config.read_text())
    data["rope_parameters"]["rope_theta"] = 50.0
    config.write_text(json.dumps(data))


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "model/config.json": lambda f: other_angles(f / "model" / "config.json"),
    "model/generation_config.json": lambda f: (f / "model" / "generation_config.json").write_text("{}"),
    "model/base.safetensors": lambda f: one_bit(f / "model" / "base.safetensors"),
    "tokenizer/tokenizer_config.json": lambda f: edited("tokenizer_config.json", padding_side="left")(f / "tokenizer"),
    "tokenizer/chat_template.jinja": lambda f: (f / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}"),
    "state.json": lambda f: edited("state.json", metric=0.5)(find(f).folder),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter over weights that it built."""
    return played(tmp_path_factory.mktemp("runs") / "built", short(replace(MODEL, lora=Lora(rank=2))))


@pytest.mark.parametrize("name", DAMAGE)
def test_what_lies_beside_the_weights_is_compared_before_use(name: str, built: Path, tmp_path: Path) -> None:
    """By every command that uses the weights, with the file's name."""
    folder = Path(shutil.copytree(built, tmp_path / "run"))
    DAMAGE[name](folder)
    uses: tuple[Callable[[], object], ...] = (
        lambda: posttrain.evaluate(folder, quiet=True),
        lambda: posttrain.export(folder, tmp_path / "m"),
        lambda: posttrain.run("rl.steps=3", resume=folder, quiet=True),
        lambda: played(tmp_path / "new", short(Model(path=str(folder), context=64))),
        *([lambda: posttrain.load(folder)] if name == "state.json" else []),
    )
    for use in uses:
        with pytest.raises(RunFolderError, match=name):
            use()
    assert not (tmp_path / "m").exists() and not (tmp_path / "new").exists()


def test_another_model_gives_the_recorded_answers_other_log_probs(run: Path, tmp_path: Path) -> None:
    """Also where the digests beside it were written anew."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    other_angles(folder / "model" / "config.json")
    listed = {p.name: files.digest(p) for p in (folder / "model").iterdir() if p.name != files.DIGESTS}
    (folder / "model" / files.DIGESTS).write_text(json.dumps(listed))
    with pytest.raises(InvariantError, match="log-probs of the record: .*the model is not the one of the run"):
        posttrain.export(folder, tmp_path / "m")


def test_a_record_without_answers_of_these_weights_is_said_to_be_not_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rows(read(Path(posttrain.export(run, tmp_path / "a"))))["log-probs of the record"]["count"] > 0
    folder = played(tmp_path / "silent", short(record_episodes=False))
    assert main(["export", str(folder), str(tmp_path / "b")]) == 0
    assert "not compared, the record holds no answers of these weights" in " ".join(capsys.readouterr().out.split())


def test_the_model_beneath_an_adapter_is_compared_before_it_is_evaluated(lora: Path, tmp_path: Path) -> None:
    base = Path(run_file(lora).run.model.path or "")
    held = (base / "model.safetensors").read_bytes()
    certificate_text = (base / CERTIFICATE).read_text()
    (base / CERTIFICATE).unlink()
    try:
        one_bit(base / "model.safetensors")
        with pytest.raises(RunFolderError, match=r"model.path: .*model.safetensors was changed"):
            posttrain.evaluate(lora, quiet=True)
    finally:
        (base / "model.safetensors").write_bytes(held)
        (base / CERTIFICATE).write_text(certificate_text)


def test_an_edited_model_in_run_json_is_not_exported(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    data = json.loads((folder / "run.json").read_text())
    data["run"]["model"]["dtype"] = "bfloat16"
    (folder / "run.json").write_text(json.dumps(data))
    with pytest.raises(RunFolderError, match=r"run.json: run.model changed after it was written"):
        posttrain.export(folder, tmp_path / "m")


def test_a_certificate_of_another_schema_is_not_believed(run: Path, tmp_path: Path) -> None:
    out = Path(posttrain.export(run, tmp_path / "m"))
    edited(CERTIFICATE, schema=2)(out)
    with pytest.raises(DataError, match="of another version of posttrain"):
        verify_certificate(out)
