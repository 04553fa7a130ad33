"""The lineage record: the whole line from the base model to the weights at hand, and what is refused in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.build.weight_lineage import lineage_of
from posttrain.cli import main
from posttrain.config.run import Model
from posttrain.record.certificate import CERTIFICATE, LINEAGE
from posttrain.record.checkpoint import find
from posttrain.record.lineage import LineageLink, chain, check_links, links_from, read_lineage
from posttrain.record.run_reader import digests, run_file
from posttrain.system import files
from posttrain.system.errors import DataError, InvariantError, RunFolderError
from tests.record.test_certificate import edited, one_weight, other_tokenizer, played, short

pytestmark = pytest.mark.prove


def model(path: Path) -> Model:
    return Model(path=str(path), context=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, `model` exported from it, `next` trained from that, and `branch` of `next`."""
    folder = tmp_path_factory.mktemp("made")
    played(folder / "run", short())
    posttrain.export(folder / "run", folder / "model")
    played(folder / "next", short(model(folder / "model")))
    played(folder / "branch", short(model(folder / "next")))
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    shutil.copytree(made, tmp_path / "own")
    return tmp_path / "own"


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_line_goes_from_the_base_to_the_last_export(made: Path, tmp_path: Path) -> None:
    out = Path(posttrain.export(made / "branch", tmp_path / "m"))
    links = read_lineage(out)
    assert [x.kind for x in links] == ["base", "run", "export", "run", "run", "export"]
    ids = [run_file(made / n).identity for n in ("run", "next", "branch")]
    assert [x.name for x in links if x.kind == "run"] == ids
    for before, link in pairwise(links):
        assert before.weights == link.began, "each begins bit for bit with what the one before it left"
    assert len({x.tokenizer for x in links}) == len({x.template for x in links}) == 1
    text = (out / LINEAGE).read_text()
    assert str(made) not in text and str(tmp_path) not in text, "no path of this machine"
    stages = links[3].about["stages"]
    assert [(s["name"], s["steps"], s["algorithm"]) for s in stages] == [("sft", 2, ""), ("rl", 2, "grpo")]
    assert all(len(s["data_digest"]) == len(s["environment_digest"]) == 32 for s in stages)
    card = (out / "README.md").read_text()
    assert all(f"| run `{name}` |" in card for name in ids) and "| `2 + 2` |" in card


def test_a_run_folder_has_its_record_from_the_beginning(made: Path) -> None:
    links = read_lineage(made / "branch")
    assert links == lineage_of(made / "branch", find(made / "branch"))
    assert links[-1].weights == find(made / "branch").state["weights"] and links[-1].about["sessions"] == 1


def test_going_on_and_longer_is_written_down(own: Path) -> None:
    posttrain.run("rl.steps=3", resume=own / "next", quiet=True)
    link = read_lineage(own / "next")[-1]
    assert link.about["sessions"] == 2 and link.about["stages"][1]["steps"] == 3
    assert link.about["changes"] == [{"stage": "rl", "step": 2, "changed": {"rl.steps": [2, 3]}}]
    assert main(["export", str(own / "next"), str(own / "m")]) == 0


def test_a_run_is_exported_where_its_parents_are_gone(own: Path) -> None:
    for name in ("run", "model", "next"):
        shutil.rmtree(own / name)
    assert len(read_lineage(Path(posttrain.export(own / "branch", own / "m")))) == 6


def test_data_and_code_have_digests(tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(9)))
    code = tmp_path / "mine.py"
    code.write_text("def right(task, text):\n    return float(task.answer == text)\n")
    tiny = ("model.hidden=32", "model.ffn=64", "model.heads=2", "model.kv_heads=1", "slots=4", "rl.steps=1")
    small = ("rl.prompts=2", "rl.siblings=2", "rl.eval_every=0", "rl.sampling.max_tokens=4", "env.heldout=2")
    data = (f"env.prompts={rows}", f"env.rewards={code}:right")
    posttrain.run("grpo", *tiny, *small, *data, out=tmp_path / "run", quiet=True)
    stage = read_lineage(tmp_path / "run")[-1].about["stages"][0]
    assert list(stage["code"]) == ["mine.py"] and len(stage["code"]["mine.py"]) == 32
    first = stage["data_digest"]
    rows.write_text(rows.read_text().replace('"9"', '"10"'))
    posttrain.run("grpo", *tiny, *small, *data, out=tmp_path / "two", quiet=True)
    assert read_lineage(tmp_path / "two")[-1].about["stages"][0]["data_digest"] != first


# --- what is refused --------------------------------------------------------------------------------------------------


def template(folder: Path) -> None:
    edited("tokenizer_config.json", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")(folder)


@pytest.mark.parametrize(("change", "what"), [(other_tokenizer, "tokenizer"), (template, "chat template")])
def test_words_that_changed_in_a_run_folder_are_refused(own: Path, change: Callable[[Path], None], what: str) -> None:
    change(own / "next" / "tokenizer")
    (own / "next" / "tokenizer" / files.DIGESTS).unlink()  # as if they had been written anew
    with pytest.raises(RunFolderError, match=f"is not the {what} the run was made with"):
        posttrain.export(own / "next", own / "m")
    with pytest.raises(DataError, match=f"the {what} changed between run .* and run"):
        played(own / "new", short(model(own / "next")))
    assert not (own / "new").exists() and not (own / "m").exists()


@pytest.mark.parametrize(("change", "what"), [(other_tokenizer, "tokenizer"), (template, "chat template")])
def test_words_that_changed_beside_exported_weights_are_refused(
    own: Path, change: Callable[[Path], None], what: str
) -> None:
    change(own / "model")
    (own / "model" / CERTIFICATE).unlink()
    with pytest.raises(DataError, match=f"the {what} changed between the export weights"):
        played(own / "new", short(model(own / "model")))


def test_weights_that_changed_in_a_run_folder_are_refused(own: Path) -> None:
    """Also where the digests of the checkpoint's files were written anew."""
    folder = find(own / "next").folder
    held = load_file(folder / "weights.safetensors")
    held["model.norm.weight"][0] += 1e-6
    save_file(held, folder / "weights.safetensors")
    listed = {n: files.digest(folder / n) for n in json.loads((folder / "digests.json").read_text())}
    (folder / "digests.json").write_text(json.dumps(listed))
    with pytest.raises(InvariantError, match="fingerprint in the checkpoint"):
        posttrain.export(own / "next", own / "m")
    with pytest.raises(DataError, match=r"began with weights .* they are not the same model"):
        played(own / "new", short(model(own / "next")))


def test_a_base_beneath_an_adapter_that_changed_is_refused(own: Path) -> None:
    from dataclasses import replace

    from posttrain.config.model_settings import Lora

    (own / "model" / CERTIFICATE).unlink()
    (own / "model" / LINEAGE).unlink()
    played(own / "lora", short(replace(model(own / "model"), lora=Lora(rank=2))))
    alone = Path(posttrain.export(own / "lora", own / "alone", adapter=True))
    played(own / "goes_on", short(model(alone)))
    assert [x.kind for x in read_lineage(own / "goes_on")] == ["base", "run", "export", "run"]
    one_weight(own / "model")
    with pytest.raises(DataError, match="they are not the same model"):
        played(own / "new", short(model(alone)))


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None], digest: bool) -> None:
    """run.json, changed; with `digest`, its digests too."""
    data = json.loads((folder / "run.json").read_text())
    change(data)
    if digest:
        data["digests"] = digests({k: v for k, v in data.items() if k != "digests"})
    (folder / "run.json").write_text(json.dumps(data))


def other_weights(data: dict[str, Any]) -> None:
    data["began_with"]["weights"] = "0" * 32


def other_parent(data: dict[str, Any]) -> None:
    data["began_with"]["links"][0]["name"] = "a better model"


@pytest.mark.parametrize(
    ("change", "digest", "says"),
    [
        (other_weights, False, "began_with was changed after it was written"),
        (other_weights, True, "they are not the same model"),
        (other_parent, True, "is not as it was written"),
    ],
)
def test_a_record_that_was_changed_is_refused(
    own: Path, change: Callable[[dict[str, Any]], None], digest: bool, says: str
) -> None:
    rewritten(own / "next", change, digest)
    for verb in (
        lambda: posttrain.export(own / "next", own / "m"),
        lambda: played(own / "n", short(model(own / "next"))),
    ):
        with pytest.raises((RunFolderError, DataError), match=says):
            verb()


def test_two_records_that_differ_are_refused(own: Path) -> None:
    shutil.copyfile(own / "run" / LINEAGE, own / "next" / LINEAGE)
    with pytest.raises(RunFolderError, match="names other models before this run"):
        posttrain.export(own / "next", own / "m")
    (own / "next" / LINEAGE).unlink()
    assert posttrain.export(own / "next", own / "m")


def test_a_parent_that_is_there_with_other_weights_is_refused(made: Path, tmp_path: Path) -> None:
    played(tmp_path / "parent", short())
    played(tmp_path / "child", short(model(tmp_path / "parent")))
    state = find(tmp_path / "parent").folder / "state.json"
    data = json.loads(state.read_text())
    data["state"]["weights"] = "0" * 32
    state.write_text(json.dumps(data))
    listed = json.loads((state.parent / files.DIGESTS).read_text())
    (state.parent / files.DIGESTS).write_text(json.dumps({**listed, state.name: files.digest(state)}))
    with pytest.raises(RunFolderError, match=r"whose weights were .* then and are 0+ now"):
        posttrain.export(tmp_path / "child", tmp_path / "m")
    shutil.rmtree(tmp_path / "parent")
    assert posttrain.export(tmp_path / "child", tmp_path / "m")


LINK = LineageLink(kind="run", name="x", weights="a", tokenizer="t", template="c", dtype="float32", began="b")


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        [3],
        [{}],
        chain([LINK] * 300),
        [{**chain([LINK])[0], "kind": "god"}],
        [{**chain([LINK])[0], "kind": []}],
        [{**chain([LINK])[0], "weights": 3}],
        [{**chain([LINK])[0], "weights": "z"}],
        [{**chain([LINK])[0], "more": "z"}],
        [{**chain([LINK])[0], "about": []}],
        chain([LINK, LINK])[1:],
    ],
)
def test_hostile_links_are_refused_with_a_sentence(rows: Any) -> None:
    with pytest.raises(DataError, match=r"damaged|as it was written"):
        links_from(rows, "here")


def test_links_that_are_not_known_are_not_compared() -> None:
    old = LineageLink(kind="base", name="of an older version")
    check_links((old, LINK))
    check_links((LINK, LineageLink(kind="run", name="y", began="other", dtype="bfloat16")))
    assert links_from(chain([old, LINK]), "here") == (old, LINK)
