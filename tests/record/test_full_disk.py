"""A disk that takes no more, at every writer by name and for real: a sentence, exit code 5, nothing lost, and
`--resume` goes on."""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.configuration_utils import PreTrainedConfig

from posttrain.cli import main
from posttrain.engine.cpu import compile_native
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.role.weights import saved_weights
from posttrain.system import files
from tests.engine.run_parts import mine, play, refused

MORE = ("rl.steps=3", "rl.eval_every=1", "engine.timeline=true")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    words = mine(tmp_path_factory.mktemp("given"))
    return (*(w for w in words if not w.startswith(tuple(m.partition("=")[0] for m in MORE))), *MORE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, given: tuple[str, ...]) -> str:
    """Digest of the record of a run whose disk was never full."""
    return run_reader.record_digest(play(tmp_path_factory.mktemp("runs") / "whole", *given))


class Disk:
    """Full from the n-th write of a path that matches: half of what is written arrives, then the system refuses, as it
    does."""

    def __init__(self, pattern: str, after: int) -> None:
        self.pattern, self.left, self.full, self.hit = re.compile(pattern), after, True, ""

    def refuses(self, path: Path | str) -> bool:
        if not self.full or not self.pattern.search(str(path)):
            return False
        self.left -= 1
        if self.left < 0:
            self.hit = self.hit or str(path)
        return self.left < 0

    def error(self) -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    def whole(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Of a function that writes `data` to a path at once."""

        @functools.wraps(write)
        def wrapped(path: Path, data: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.refuses(path):
                return write(path, data, *args, **kwargs)
            write(path, data[: len(data) // 2], *args, **kwargs)
            raise self.error()

        return wrapped

    def lines(self, fd: int, data: Any) -> int:
        if not self.refuses(os.readlink(f"/proc/self/fd/{fd}")):
            return os.write(fd, data)
        if self.left == -1:
            return os.write(fd, data[: len(data) // 2])
        raise self.error()

    def tensors(self, write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(data: Any, path: Path) -> None:
            if not self.refuses(path):
                return write(data, path)
            Path(path).write_bytes(b"half")
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

        return wrapped

    def pretrained(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(own: Any, folder: Path, *args: Any, **kwargs: Any) -> Any:
            if not self.refuses(folder):
                return write(own, folder, *args, **kwargs)
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / "half.json").write_text("{")
            raise self.error()

        return wrapped


class Written:
    """`os` as `system.files` sees it, with a disk that may be full."""

    def __init__(self, disk: Disk) -> None:
        self.write = disk.lines

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def install(monkeypatch: pytest.MonkeyPatch, pattern: str, after: int) -> Disk:
    disk = Disk(pattern, after)
    monkeypatch.setattr(files, "os", Written(disk))
    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, disk.whole(getattr(Path, name)))
    monkeypatch.setattr(saved_weights, "save_file", disk.tensors(saved_weights.save_file))
    for kind in (PreTrainedTokenizerFast, PreTrainedConfig, PreTrainedModel):
        monkeypatch.setattr(kind, "save_pretrained", disk.pretrained(kind.save_pretrained))
    return disk


WRITERS = {
    "steps.jsonl, at once": (r"/steps\.jsonl$", 0),
    "steps.jsonl, later": (r"/steps\.jsonl$", 2),
    "episodes of a step": (r"/\.rl-000002\.npz\.part$", 0),
    "episodes of an evaluation": (r"/\.rl-000002-eval\.npz\.part$", 0),
    "the index of episodes": (r"/episodes/index\.jsonl$", 3),
    "weights of a checkpoint": (r"/checkpoints/.*/weights\.safetensors$", 1),
    "optimizer of a checkpoint": (r"/checkpoints/.*/optimizer\.safetensors$", 0),
    "state of a checkpoint": (r"/checkpoints/.*/state\.json$", 1),
    "digests of a checkpoint": (r"/checkpoints/.*/digests\.json$", 1),
    "the index of checkpoints": (r"/checkpoints/\.index\.json\.part$", 1),
    "weights kept at the start": (r"/kept/.*start.*/weights\.safetensors$", 0),
    "weights kept at the end": (r"/kept/.*-rl-.*/weights\.safetensors$", 0),
    "the tokenizer beside the run": (r"/\.staged-tokenizer-\d+$", 0),
    "the config beside the run": (r"/\.staged-model-\d+$", 0),
    "the timeline": (r"/timeline\.json$", 0),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_full_at_any_writer_loses_nothing(
    name: str,
    tmp_path: Path,
    given: tuple[str, ...],
    undisturbed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = install(monkeypatch, *WRITERS[name])
    folder = tmp_path / "run"
    said = refused(capsys, "run", *given, "--out", str(folder), code=5)
    assert disk.hit and "the disk is full" in said and "was not written" in said and "go on with --resume" in said
    steps = run_reader.steps(folder)
    for row in run_reader.episode_files(folder):
        assert len(run_reader.read_episodes(row.path)) == row.episodes
    for c in scan(folder):
        c.verify()
        assert (c.state["running"] or {"step": 0})["step"] <= len(steps)
    if scan(folder):
        assert find(folder).name in said or "index.json" in said or "timeline" in said
    assert not [p for p in folder.rglob("*") if p.name == "half.json" or p.name.endswith(".part")]
    assert main(["show", str(folder)]) in (0, 2, 5)
    capsys.readouterr()
    assert "the disk is full" in refused(capsys, "run", "--resume", str(folder), code=5) or name == "the timeline", (
        "still full"
    )
    disk.full = False
    assert main(["run", "--resume", str(folder)]) == 0, "there is room again"
    assert run_reader.record_digest(folder) == undisturbed
    assert (folder / "tokenizer" / "tokenizer.json").exists() and (folder / "model" / "config.json").exists()


@pytest.mark.prove
def test_a_run_that_cannot_begin_leaves_nothing_that_stands_in_the_way(
    tmp_path: Path, given: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = install(monkeypatch, r"/\.run\.json\.part$", 0)
    assert "the disk is full" in refused(capsys, "run", *given, "--out", str(tmp_path / "run"), code=5)
    disk.full = False
    play(tmp_path / "run", *given)


@pytest.mark.prove
def test_an_export_that_does_not_fit_leaves_an_empty_folder(
    tmp_path: Path, given: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = play(tmp_path / "run", *given)
    capsys.readouterr()
    with monkeypatch.context() as m:
        install(m, r"/my-model/\.unverified$", 1)
        assert "export again" in refused(capsys, "export", str(folder), str(tmp_path / "my-model"), code=5)
    assert not list((tmp_path / "my-model").iterdir())
    assert main(["export", str(folder), str(tmp_path / "my-model")]) == 0


@pytest.mark.parametrize("command", [["ladder"], ["faults"], ["ladder", "--table"]])
def test_an_output_that_takes_no_more_ends_with_a_sentence(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "posttrain.cli", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (
        done.returncode == 5
        and done.stderr == "posttrain: the disk is full: the output was not written. Free some space\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "posttrain.cli", *command], stdout=full, stderr=full, check=False)
    assert done.returncode == 5


def test_a_cache_that_cannot_be_written_leaves_the_engine_without_its_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(compiler: str, library: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_native, "_compile", full)
    found = compile_native.find.__wrapped__()
    assert isinstance(found, str) and ("No space left on device" in found or "no C compiler" in found)


# --- for real ---------------------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(largest: int) -> Iterator[None]:
    """Files may grow to so many bytes, as any user can arrange."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def resumed(folder: Path, given: tuple[str, ...]) -> str:
    """Digest of the record of a run that is gone on with, or begun again where nothing of it stands."""
    again = ("--resume", str(folder)) if (folder / "run.json").exists() else (*given, "--out", str(folder))
    assert main(["run", *again]) == 0
    return run_reader.record_digest(folder)


@pytest.mark.prove
@pytest.mark.parametrize("largest", [1000, 9000, 30000])
def test_files_that_may_grow_no_further(
    tmp_path: Path, largest: int, given: tuple[str, ...], undisturbed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with files_up_to(largest):
        code = main(["run", *given, "--out", str(tmp_path / "run")])
    said = capfd.readouterr().err
    assert code == 5 and "the largest size that is allowed here" in said and "ulimit -f" in said
    assert resumed(tmp_path / "run", given) == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system whose size in KiB can be changed; mounting one needs root."""
    where = tmp_path / "disk"
    where.mkdir()

    def size(kibibytes: int) -> Path:
        how = f"size={kibibytes}k" + (",remount" if os.path.ismount(where) else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(where)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting a small file system needs root")
        return where

    yield size
    if os.path.ismount(where):
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.prove
@pytest.mark.parametrize("kibibytes", [8, 60, 150, 300])
def test_a_small_disk(
    small_disk: Callable[[int], Path],
    kibibytes: int,
    given: tuple[str, ...],
    undisturbed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = small_disk(kibibytes) / "run"
    assert "the disk is full" in refused(capsys, "run", *given, "--out", str(folder), code=5)
    small_disk(65536)
    assert resumed(folder, given) == undisturbed
