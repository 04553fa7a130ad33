"""Input that is far too big, or no file at all: bounded memory, a sentence with file and line, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.engine.model.tiny_models import characters, raw_bytes
from posttrain.environment.rows import data_files
from posttrain.environment.templates.chat_template import SHIELD
from posttrain.environment.templates.renderer import PIECE, Renderer
from posttrain.system.errors import DataError
from tests.engine.run_parts import mine
from tests.environment.environment_parts import read
from tests.vocabularies import train_bpe, train_byte_level, train_unigram

MEASURE = """
import os, sys
from posttrain.cli import main
def most():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
import posttrain.api.main, torch, transformers, posttrain.verifier.user_functions
before = most()
code = main(sys.argv[1:])
print("GREW", most() - before)
sys.exit(code)
"""


def command(*words: str, timeout: float = 300) -> tuple[int, str, int]:
    """(exit code, what it said, MiB by which its memory grew) of one command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1], int(done.stdout.rsplit("GREW ", 1)[1])


@pytest.mark.prove
@pytest.mark.parametrize("size", [5, 20])
def test_a_huge_row_is_refused_in_little_memory(size: int, tmp_path: Path) -> None:
    """Before, 5 MB took 2.4 GB under a model of characters, and 20 MB ended the process."""
    words = mine(tmp_path / "data", rows=3)
    with (tmp_path / "data" / "mine.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "say " * (size * 250_000), "answer": "1", "id": "long"}) + "\n")
    code, said, grew = command("run", *words, "--out", str(tmp_path / "run"))
    assert code == 4
    assert (
        "long" in said and "the prompt has more than" in said
        if size == 5
        else "mine.jsonl:4: the line has more than 16,777,216 bytes" in said
    )
    assert grew < 400, grew


def renderers(context: int) -> dict[str, Renderer]:
    texts = ["the cat sat on the mat, and 42 + 7 = 49. ", "naïve café — one two three\n"] * 3
    made: dict[str, Any] = {
        "characters": characters("".join(sorted(set("".join(texts))))),
        "bytes": raw_bytes(),
        "byte_level": train_byte_level(texts, 280),
        "bpe": train_bpe(texts, 300),
        "unigram": train_unigram(texts, 80),
    }
    return {name: Renderer(t, [t.eos_token_id], context) for name, t in made.items()}


@pytest.mark.parametrize("name", ["characters", "bytes", "byte_level", "bpe", "unigram"])
def test_a_text_that_fits_is_encoded_as_ever_and_one_that_cannot_only_begun(name: str) -> None:
    text = "the cat sat on the mat, and 42 + 7 = 49. " * (3 * PIECE // 40)
    roomy, tight = renderers(4 * PIECE)[name], renderers(100)[name]
    whole = roomy._encode(text)  # pyright: ignore[reportPrivateUsage]
    assert len(text) > 2 * PIECE and np.array_equal(roomy.encode(text), whole)
    assert np.array_equal(roomy.encode(text[:-5] + SHIELD + "."), [*roomy._encode(text[:-5]), *roomy._encode(".")])  # pyright: ignore[reportPrivateUsage]
    begun = tight.encode(text)
    assert 200 < len(begun) <= PIECE
    with pytest.raises(DataError, match=r"task 'x': the prompt has more than 200 tokens, and a context of 100"):
        tight.prompt(text, "x")
    assert len(tight.encode(SHIELD.join("cat" for _ in range(PIECE)))) <= 400
    assert len(tight.completion_ids(text)) > 200


def row(path: Path, data: bytes) -> str:
    path.write_bytes(b'{"prompt": "fine"}\n' + data + b"\n")
    return str(path)


def test_rows_are_bounded_by_size_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.jsonl"
    deep = b"[" * 200 + b"]" * 200
    with pytest.raises(DataError, match=r"p\.jsonl:2: lists and objects .* more than 100 deep"):
        read(row(path, b'{"prompt": "a", "x": ' + deep + b"}"))
    with pytest.raises(DataError, match=r"p\.jsonl:2: cannot be read as JSON"):
        read(row(path, b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"}"))
    with pytest.raises(DataError, match=r"p\.jsonl:2: cannot be read as JSON.*4300"):
        read(row(path, b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}"))
    with pytest.raises(DataError, match=r"p\.jsonl:2: not JSON"):
        read(row(path, b'{"prompt": "a\x00b"}'))
    assert read(row(path, b'{"prompt": "a\\u0000b"}'))[1].task.prompt == "a\0b"
    monkeypatch.setattr(data_files, "LONGEST_ROW", 1000)
    monkeypatch.setattr(data_files, "LARGEST_ARRAY", 5000)
    with pytest.raises(DataError, match=r"p\.jsonl:2: the line has more than 1,000 bytes"):
        read(row(path, b'{"prompt": "' + b"a" * 1000 + b'"}'))
    with pytest.raises(DataError, match=r"p\.jsonl:2: the line has more than 1,000 bytes"):
        read(row(path, b"x" * 100_000))
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b" * 2000}]))
    with pytest.raises(DataError, match=r"p\.jsonl row 2: the row has more than 1,000 characters"):
        read(str(path))
    path.write_text(json.dumps([{"prompt": "a" * 100}] * 100))
    with pytest.raises(DataError, match=r"p\.jsonl has [\d,]+ bytes; at most 5,000"):
        read(str(path))


def test_rows_of_data_sets_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b" * 2000, "answer": "2"}])
    data.to_parquet(str(tmp_path / "p.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    assert [len(str(r.task.prompt)) for r in read(str(tmp_path / "p.parquet"))] == [1, 2000]
    monkeypatch.setattr(data_files, "LONGEST_ROW", 1000)
    for where in ("p.parquet", "saved"):
        with pytest.raises(DataError, match=rf"{where} row 2: the row has more than 1,000 characters"):
            read(str(tmp_path / where))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "p.parquet").read_bytes()[:-50])
    with pytest.raises(DataError, match=r"cut\.parquet: cannot be read as parquet"):
        read(str(tmp_path / "cut.parquet"))


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet", "p"])
def test_prompts_that_are_no_file_are_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} is a pipe"):
        read(str(tmp_path / name))
    (tmp_path / f"dev-{name}").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=rf"dev-{name} is a pipe, a socket or a device"):
        read(str(tmp_path / f"dev-{name}"))
    with pytest.raises(DataError, match="File name too long"):
        read("x" * 5000 + name)
