"""What several workers of vLLM tell of their parts, put together, without vLLM: only the whole tensor passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.config.engines import VLLM
from posttrain.config.placement import Local, Processes, Ray, placement_refusals
from posttrain.engine.files.fingerprint import digest_of, fingerprints
from posttrain.engine.vllm import start_vllm, worker_parts
from posttrain.engine.vllm.sampler_requests import ExpectedTensors
from posttrain.engine.vllm.worker_parts import StagedTensors, WorkerPart, buckets, fingerprint_served, served
from posttrain.system.errors import ConfigError, EngineError

WHOLE = {
    "q": torch.arange(64.0).view(8, 8),
    "o": torch.arange(100.0, 164).view(8, 8),
    "k": torch.arange(200.0, 232).view(4, 8),
    "fused": torch.arange(300.0, 396).view(12, 8),
    "norm": torch.arange(8.0),
}
PARTS = [
    {
        "q": WorkerPart(0, ((4 * w, 4 * w + 4),)),
        "o": WorkerPart(1, ((4 * w, 4 * w + 4),)),
        "k": WorkerPart(0, ((0, 4),)),  # fewer key-value heads than workers: both hold all of it
        "fused": WorkerPart(0, ((2 * w, 2 * w + 2), (4 + 2 * w, 6 + 2 * w), (8 + 2 * w, 10 + 2 * w))),
    }
    for w in range(2)
]


def told(worker: int, holds: Mapping[str, Tensor], parts: Mapping[str, WorkerPart] | None = None) -> dict[str, Any]:
    """What a worker answers that has cut its parts out of these tensors."""
    cut = PARTS[worker] if parts is None else parts
    digests = fingerprints((n, cut[n].of(t) if n in cut else t) for n, t in holds.items())
    return {"digests": digests, "parts": {n: p.plain() for n, p in cut.items()}}


def given() -> list[tuple[str, Tensor]]:
    return list(WHOLE.items())


def of_all(answers: Sequence[Mapping[str, Any]], sent: list[tuple[str, Tensor]]) -> str:
    return fingerprint_served(answers, dict(sent).get, lambda: fingerprints(sent))


def test_right_parts_have_the_fingerprint_of_the_whole() -> None:
    assert of_all([told(0, WHOLE), told(1, WHOLE)], given()) == digest_of(fingerprints(given()))
    assert of_all([told(0, WHOLE, {})], given()) == digest_of(fingerprints(given())), "one worker: as it was"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("name", [*WHOLE])
def test_one_wrong_number_in_one_worker_is_told(name: str, worker: int) -> None:
    """Each number of each tensor, in each worker that holds it. One that another worker holds alone is not its."""
    other = WHOLE[name].clone()
    at = PARTS[worker][name].of(torch.arange(other.numel()).view(other.shape)) if name in PARTS[worker] else None
    for i in range(other.numel()) if at is None else at.flatten().tolist():
        changed = other.clone()
        changed.view(-1)[i] += 1
        mine = told(worker, {**WHOLE, name: changed})
        both = [mine if w == worker else told(w, WHOLE) for w in range(2)]
        found = of_all(both, given())
        assert f"worker {worker} of 2 serves 1 tensors otherwise than they were sent, such as {name!r}" in found
        assert f"worker {1 - worker}" not in found
        assert not found.startswith(digest_of(fingerprints(given())))


def test_a_worker_that_holds_the_part_of_another_is_told() -> None:
    """It says that it holds rows 4 to 8, and has loaded rows 0 to 4."""
    wrong = {**told(1, WHOLE), "digests": told(0, WHOLE)["digests"]}
    assert "worker 1 of 2 serves 3 tensors otherwise" in of_all([told(0, WHOLE), wrong], given())


def test_rows_that_no_worker_holds_are_told() -> None:
    gap = {**PARTS[1], "q": WorkerPart(0, ((5, 8),))}
    with pytest.raises(EngineError, match="no worker of vLLM serves some rows or columns of 'q'"):
        of_all([told(0, WHOLE), told(1, WHOLE, gap)], given())
    with pytest.raises(EngineError, match="'q'"):
        of_all([told(0, WHOLE), told(1, WHOLE, {**PARTS[1], "q": WorkerPart(1, ((4, 8),))})], given())
    with pytest.raises(EngineError, match="'q'"):
        of_all([told(w, WHOLE, PARTS[0]) for w in range(2)], given())


def test_a_tensor_that_was_not_sent_is_told() -> None:
    sent = [(n, t) for n, t in given() if n != "o"]
    assert of_all([told(0, WHOLE), told(1, WHOLE)], sent).count("such as 'o'") == 2
    digests, words = served([told(0, WHOLE), told(1, WHOLE)], dict(sent).get, fingerprints(sent))
    assert words and digests["q"] == fingerprints(given())["q"] and digests["o"] != fingerprints(given())["o"]


@pytest.mark.parametrize("most", [1, 300, 600, 10**6])
def test_buckets_hold_every_tensor_once_and_few_bytes(most: int) -> None:
    found = list(buckets(given(), most))
    assert [n for bucket in found for n in bucket] == [*WHOLE]
    assert all(len(b) == 1 or sum(t.nbytes for t in b.values()) <= most for b in found)
    assert all(torch.equal(t, WHOLE[n]) for b in found for n, t in b.items())
    sizes = [sum(t.nbytes for t in b.values()) for b in found]
    firsts = [next(iter(b.values())).nbytes for b in found[1:]]
    assert all(size + first > most for size, first in zip(sizes, firsts, strict=False)), "no bucket is left half empty"


# --- what cannot be ---------------------------------------------------------------------------------------------------


def shape(heads: int, kv_heads: int | None, inner: int | None) -> Any:
    return SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner, hidden_size=64
    )


@pytest.mark.parametrize(
    ("workers", "model", "said"),
    [
        (3, shape(4, 2, 96), "engine.workers=3 cannot share the model's 4 attention heads"),
        (2, shape(4, 2, 97), "engine.workers=2 cannot share the model's 97 channels"),
        (4, shape(12, 3, 96), "engine.workers=4 cannot share the model's 3 key-value heads"),
        (5, shape(5, None, None), "engine.workers=5 cannot share the model's 256 channels"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(workers: int, model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start_vllm.refuse_split(workers, model)


def test_a_model_that_can_be_cut_is_not() -> None:
    for workers, model in ((1, shape(3, 3, 7)), (2, shape(4, 1, 96)), (2, shape(4, 4, None)), (4, shape(4, 2, 96))):
        start_vllm.refuse_split(workers, model)


def test_each_worker_wants_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_vllm, "cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for how in (VLLM(workers=2), VLLM(workers=2, server=True), VLLM(workers=8, url="http://10.0.0.7:8000")):
        start_vllm.refuse_few(how, Local())
    start_vllm.refuse_few(VLLM(workers=2), Processes(engines=2))
    start_vllm.refuse_few(VLLM(workers=2), Processes(cores=2))
    with pytest.raises(ConfigError, match=r"engine.workers=3 need a core each.*this process may use 2: lower"):
        start_vllm.refuse_few(VLLM(workers=3), Local())
    with pytest.raises(ConfigError, match=r"placement.cores=1 gives an engine 1: lower engine.workers, or raise"):
        start_vllm.refuse_few(VLLM(workers=2), Processes(cores=1))


def test_what_else_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="engine.workers=0: must be >= 1"):
        VLLM(workers=0)
    assert "engine.workers=2 under placement=ray" in placement_refusals(Ray(), VLLM(workers=2))
    assert not placement_refusals(Ray(), VLLM()) and not placement_refusals(Processes(), VLLM(workers=2))


# --- in files on the way ----------------------------------------------------------------------------------------------


def test_weights_in_files_are_those_that_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor after another, by name; and nothing is left of them."""
    monkeypatch.setattr(worker_parts, "BUCKET", 300)
    staged = StagedTensors(tmp_path / "share", "version-3")
    staged.write(iter(given()))
    assert len(staged.files) > 2 and staged.bytes == sum(t.nbytes for t in WHOLE.values())
    for name, tensor in WHOLE.items():
        found = staged.sent(name)
        assert found is not None and torch.equal(found, tensor)
    assert staged.sent("another") is None
    whole = digest_of(fingerprints(given()))
    assert staged.fingerprint_served([told(0, WHOLE, {})]) == whole
    assert staged.fingerprint_served([told(0, WHOLE), told(1, WHOLE)]) == whole
    wrong = told(1, {**WHOLE, "o": WHOLE["o"] + 1})
    assert "worker 1 of 2 serves 1 tensors otherwise" in staged.fingerprint_served([told(0, WHOLE), wrong])
    staged.remove()
    assert list((tmp_path / "share").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    staged = StagedTensors(tmp_path / "file" / "share", "version-1")
    with pytest.raises(EngineError, match=r"cannot be written to .*file/share .*another folder in engine\.share"):
        staged.write(iter(given()))
    staged.remove()


def test_no_more_than_a_bucket_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_parts, "BUCKET", 4 * 400)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def made() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(40):
            most = max(most, sum(r() is not None for r in alive))
            tensor = torch.full((100,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor

    staged = StagedTensors(tmp_path, "version-1")
    expected = ExpectedTensors({f"t{i}": (torch.float32, (100,)) for i in range(40)})
    staged.write((n, t) for n, t in expected.checked(made()))
    assert len(staged.files) == 10 and most <= 5, most


def test_a_tensor_that_is_missing_is_found_before_anything_is_served(tmp_path: Path) -> None:
    staged = StagedTensors(tmp_path, "version-1")
    expected = ExpectedTensors({"a": (torch.float32, (2,)), "b": (torch.float32, (2,))})
    with pytest.raises(EngineError, match="1 of 2 tensors are missing: b"):
        staged.write(expected.checked([("a", torch.zeros(2))]))
