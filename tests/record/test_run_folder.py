"""core.book: what was written comes back, a kill leaves the old or the new, damage and full disks are named."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config.engines import Embedded
from posttrain.config.overrides import apply
from posttrain.config.run import Reinforce, Run
from posttrain.core.gauge import Gauge, Step
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, EpisodeCredit, GroupCredit, Scored
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Segment, Stop, Task, TruncationSets
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.policy_rows import GRPO
from posttrain.record import checkpoint as cp
from posttrain.record import run_reader, step_format
from posttrain.record.run_folder import RunFolder
from posttrain.system import files
from posttrain.system.errors import InvariantError, RunFolderError

RUN = Run(recipe="test", stages=(Reinforce(name="rl"),), keep_checkpoints=2)
SHORT = replace(RUN, keep_checkpoints=1)
FACTS = {
    "versions": {"python": "3.11"},
    "tokenizer_digest": "ab",
    "template_digest": "cd",
    "argv": ["posttrain", "run", "ladder"],
}


def segment(rng: np.random.Generator, truncated: bool = False) -> Segment:
    """Prompt, a turn, an observation, another turn."""
    t = Transcript(Sampling(stop_ids=(0,), top_k=2 if truncated else 0, max_tokens=9))
    for turn in range(2):
        t.see(rng.integers(0, 99, rng.integers(1, 5)))
        n = int(rng.integers(1, 6))
        ids = rng.integers(0, 99, n).astype(np.int32)
        kept = TruncationSets.of([np.unique([i, 100]) for i in ids]) if truncated else None
        t.say(SampledTurn(ids, -rng.random(n).astype(np.float32), np.full(n, turn, np.int32), Stop.SAID, kept))
    return t.segment()


def episode(
    rng: np.random.Generator,
    task: Task,
    sibling: int,
    score: float | None = 1.0,
    segments: int = 1,
    truncated: bool = False,
) -> Episode:
    verdict = Verdict.failed("outage", "down") if score is None else Verdict.value(score, "exact", "because")
    parts = tuple(segment(rng, truncated) for _ in range(segments))
    return Episode(
        task,
        3,
        sibling,
        parts,
        Stop.LENGTH,
        (Judged("answer", 0.5, verdict),),
        "said «x»",
        "" if score is not None else "broke",
    )


def a_step(seed: int = 0, truncated: bool = False) -> tuple[Credit, tuple[Group, ...]]:
    """Two groups with credit (one episode of them unjudged) and one group that nobody could judge."""
    rng = np.random.default_rng(seed)
    tasks = [
        Task("t0", "2+2=", 4, {"terms": 2}),
        Task("t1", ({"role": "user", "content": "hi"},), "x"),
        Task("t2", "?", None),
    ]
    one = Group(
        tasks[0], 3, tuple(episode(rng, tasks[0], i, [1.0, None, 0.0][i], 1 + i % 2, truncated) for i in range(3))
    )
    two = Group(tasks[1], 3, tuple(episode(rng, tasks[1], i) for i in range(2)))
    lost = Group(tasks[2], 3, (episode(rng, tasks[2], 0, None),))
    groups = tuple(GroupCredit(g, tuple(_credit(rng, e) for e in g.judged), silent=False) for g in (one, two))
    return Credit(groups, ema=0.0), (lost,)


def _credit(rng: np.random.Generator, e: Episode) -> EpisodeCredit:
    return EpisodeCredit(
        Scored(e),
        rng.normal(),
        tuple(rng.normal(size=s.spoken) for s in e.segments),
        dropped="overlong" if e.sibling else "",
    )


def step(index: int = 1, **gauges: Gauge) -> Step:
    return Step("rl", index, index, gauges or {"reward": Gauge(0.1 + index, 3)}, {"learn": 0.5 + index}, ("a note",))


def weights(value: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(bytes([value]) * 1000)
        (folder / "sub").mkdir()
        (folder / "sub" / "more.bin").write_bytes(b"more")

    return write


@pytest.fixture
def book(tmp_path: Path) -> Iterator[RunFolder]:
    book = RunFolder.create(tmp_path / "run", RUN, FACTS)
    yield book
    crash(book)


def crash(book: RunFolder) -> None:
    """The owner is gone without a word: only the lock is released, as the system does."""
    book._lock.release()  # pyright: ignore[reportPrivateUsage]


def same(a: Episode, b: Episode) -> bool:
    rest = (a.task, a.visit, a.sibling, a.stop, a.verdicts, a.text, a.error) == (
        b.task,
        b.visit,
        b.sibling,
        b.stop,
        b.verdicts,
        b.text,
        b.error,
    )
    pairs = list(zip(a.segments, b.segments, strict=True))
    arrays = all(
        np.array_equal(getattr(x, n), getattr(y, n), equal_nan=n == "logp")
        for x, y in pairs
        for n in ("ids", "mask", "logp", "version")
    )
    kept = all((x.kept is None) == (y.kept is None) and x.sampling == y.sampling for x, y in pairs)
    sets = all(
        np.array_equal(x.kept.ids, y.kept.ids) and np.array_equal(x.kept.offsets, y.kept.offsets)
        for x, y in pairs
        if x.kept and y.kept
    )
    return rest and arrays and kept and sets


# --- what was written comes back --------------------------------------------------------------------------------------


def test_run_file(tmp_path: Path) -> None:
    run = apply(RUN, ["clip.high=0.3"])
    RunFolder.create(tmp_path / "r", run, FACTS).close()
    back = run_reader.run_file(tmp_path / "r")
    assert back.run == run and back.facts == FACTS
    assert [row["name"] for row in back.lineages["rl"]] == ["reinforce", "ppo", "grpo", "grpo+user"]
    assert back.lineages["rl"][-1] == {
        "name": "grpo+user",
        "paper": "your patch",
        "changes": {"clip": {"type": "Clip", "low": 0.2, "high": 0.3, "cap": None}},
    }


@pytest.mark.parametrize("truncated", [False, True])
def test_episodes_round_trip(book: RunFolder, truncated: bool) -> None:
    credit, lost = a_step(truncated=truncated)
    book.write_episodes("rl", 12, credit, lost)
    assert [p.name for p in (book.folder / "episodes").glob("*.npz")] == ["rl-000012.npz"]
    wrote, read = step_format.of_step(credit, lost), run_reader.episodes(book.folder, "rl", 12)
    assert len(read) == 6 and all(same(a.episode, b.episode) for a, b in zip(wrote, read, strict=True))
    for a, b in zip(wrote, read, strict=True):
        assert (a.shaped, a.dropped, a.episode.reward) == (b.shaped, b.dropped, b.episode.reward)
        assert (a.advantage is None) == (b.advantage is None) == (a.episode.reward is None)
        assert all(np.array_equal(x, y) for x, y in zip(a.advantage or (), b.advantage or (), strict=True))


def test_evaluation_episodes_lie_beside_training_ones(book: RunFolder) -> None:
    credit, lost = a_step()
    book.write_episodes("rl", 0, credit, lost)
    book.write_evaluation("rl", 0, lost)
    assert [(f.index, f.kind, f.episodes) for f in run_reader.episode_files(book.folder)] == [
        (0, "train", 6),
        (0, "eval", 1),
    ]
    assert run_reader.episodes(book.folder, "rl", 0, "eval")[0].advantage is None
    with pytest.raises(InvariantError, match="already written"):
        book.write_evaluation("rl", 0, lost)


def test_values_json_cannot_hold_are_stored_by_value_or_as_text(book: RunFolder) -> None:
    task = Task("t", "p", np.float32(2.5), {"array": np.arange(2), "thing": object(), "odd": "\udc80"})
    book.write_evaluation("rl", 0, [Group(task, 3, (episode(np.random.default_rng(0), task, 0),))])
    back = run_reader.episodes(book.folder, "rl", 0, "eval")[0].episode.task
    assert back.answer == 2.5 and back.info == {"array": [0, 1], "thing": "<object object>", "odd": "\udc80"}


numbers = st.floats(allow_nan=False)
written_steps = st.builds(
    Step,
    st.text(max_size=5),
    st.integers(0, 9),
    st.integers(0, 9),
    st.dictionaries(st.text(max_size=5), st.builds(Gauge, numbers, numbers), max_size=3),
    st.dictionaries(st.text(max_size=5), numbers, max_size=2),
    st.lists(st.text(max_size=9), max_size=2).map(tuple),
)


@settings(max_examples=60)
@given(written_steps)
def test_steps_round_trip(one: Step) -> None:
    assert step_format.step_from_plain(json.loads(json.dumps(step_format.step_to_plain(one), allow_nan=False))) == one


def test_a_gauge_that_is_not_a_number_survives(book: RunFolder) -> None:
    book.write(step(1, loss=Gauge(math.nan, 1), norm=Gauge(math.inf, np.float32(2))))
    gauges = run_reader.steps(book.folder)[0].gauges
    assert math.isnan(gauges["loss"].sum) and gauges["norm"] == Gauge(math.inf, 2.0)


# --- truncation and damage --------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_record_cut_at_any_byte_loses_only_its_last_line(tmp_path: Path, data: st.DataObject) -> None:
    lines = [
        json.dumps(step_format.step_to_plain(s)).encode() + b"\n"
        for s in data.draw(st.lists(written_steps, min_size=1, max_size=3))
    ]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    (tmp_path / "steps.jsonl").write_bytes(whole[:cut])
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    assert len(run_reader.steps(tmp_path)) == sum(end <= cut for end in ends)


def test_every_cut_of_one_record(tmp_path: Path) -> None:
    whole = b"".join(json.dumps(step_format.step_to_plain(step(i))).encode() + b"\n" for i in (1, 2))
    for cut in range(len(whole) + 1):
        (tmp_path / "steps.jsonl").write_bytes(whole[:cut])
        assert [s.index for s in run_reader.steps(tmp_path)] == [1, 2][: whole[:cut].count(b"\n")]


@pytest.mark.parametrize(
    "line",
    [b'{"stage":', b"{}", b"[1]", b'{"stage":"rl","index":1,"version":1,"gauges":{"x":1},"clock":{},"notes":[]}'],
)
def test_a_broken_line_before_the_last_names_file_and_line(book: RunFolder, line: bytes) -> None:
    book.write(step(1))
    with (book.folder / "steps.jsonl").open("ab") as f:
        f.write(line + b"\n")
    with pytest.raises(RunFolderError, match=r"steps\.jsonl:2 "):
        run_reader.steps(book.folder)


def test_a_damaged_episode_file_is_named_at_any_cut(book: RunFolder) -> None:
    book.write_episodes("rl", 0, *a_step())
    path = book.folder / "episodes" / "rl-000000.npz"
    whole = path.read_bytes()
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(RunFolderError, match=r"rl-000000\.npz is damaged"):
            run_reader.episodes(book.folder, "rl", 0)
    path.unlink()
    with pytest.raises(RunFolderError, match=r"rl-000000\.npz is missing"):
        run_reader.episodes(book.folder, "rl", 0)


# --- one owner --------------------------------------------------------------------------------------------------------


def test_a_second_opener_is_told_who_holds_it(book: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=rf"in use by another process \(pid {os.getpid()} on "):
        RunFolder.open_for_resume(book.folder)


def test_a_dead_owners_lock_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import os,sys; from pathlib import Path; from posttrain.record.run_folder import RunFolder;"
        " from posttrain.config.run import *;RunFolder.create(Path(sys.argv[1]), "
        "Run(recipe='r', stages=(Reinforce(name='rl'),)), {}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "r")], check=False).returncode == 9
    assert (tmp_path / "r" / "lock").read_text().startswith("pid ")
    book, checkpoint = RunFolder.open_for_resume(tmp_path / "r")
    assert checkpoint is None and f"pid {os.getpid()} " in (tmp_path / "r" / "lock").read_text()
    book.close()


def test_a_forked_child_does_not_keep_the_lock(book: RunFolder) -> None:
    stop, go = os.pipe()
    born, birth = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.write(birth, b"!")
        os.read(stop, 1)
        os._exit(0)
    os.close(stop)
    os.read(born, 1)
    try:
        book._lock.forget()  # pyright: ignore[reportPrivateUsage]
        fd = os.open(book.folder / "lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    finally:
        os.close(go)
        os.waitpid(child, 0)


def test_an_existing_run_or_other_folder_is_refused(book: RunFolder, tmp_path: Path) -> None:
    crash(book)
    with pytest.raises(RunFolderError, match=r"already holds a run\. Go on with it by --resume"):
        RunFolder.create(book.folder, RUN, FACTS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match=r"is not empty \(thesis\.tex\)"):
        RunFolder.create(tmp_path / "mine", RUN, FACTS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot create run folder"):
        RunFolder.create(tmp_path / "file" / "run", RUN, FACTS)
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.open_for_resume(tmp_path / "mine")


def test_another_schema_is_refused(book: RunFolder) -> None:
    data = json.loads((book.folder / "run.json").read_text())
    (book.folder / "run.json").write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(RunFolderError, match="has schema 99; this posttrain reads 2"):
        run_reader.run_file(book.folder)


def test_a_folder_of_an_older_version_is_said_to_be_one(book: RunFolder) -> None:
    """Its stages have settings of that time, which are no damage."""
    data = json.loads((book.folder / "run.json").read_text())
    data["run"]["stages"][0]["beside"] = None
    (book.folder / "run.json").write_text(json.dumps({**data, "schema": 1}))
    with pytest.raises(
        RunFolderError,
        match=(
            r"older version of posttrain \(schema 1; this one reads 2\)\. Nothing is damaged: .* run its recipe again"
        ),
    ):
        run_reader.run_file(book.folder)


@pytest.mark.parametrize(("compiled", "kernels"), [(None, "auto"), (True, "compiled"), (False, "torch")])
def test_a_folder_from_before_the_kernels_had_one_choice_is_read(
    book: RunFolder, compiled: bool | None, kernels: str
) -> None:
    """It has `engine.layers.compiled_layers`, and neither `model.kernels` nor `engine.update`."""
    data = json.loads((book.folder / "run.json").read_text())
    del data["run"]["model"]["kernels"], data["run"]["engine"]["update"]
    data["run"]["engine"]["compiled"] = compiled
    (book.folder / "run.json").write_text(json.dumps(data))
    run = run_reader.run_file(book.folder).run
    assert (run.model.kernels, run.engine) == (kernels, Embedded())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return [c.name for c in cp.scan(folder)]


def test_the_newest_and_the_best_are_kept(book: RunFolder) -> None:
    for i, metric in enumerate([0.1, 0.9, 0.5, None, math.nan, 0.3]):
        book.checkpoint(f"c{i}", weights(i), {"step": i}, metric)
    assert names(book.folder) == ["c1", "c4", "c5"]
    index = json.loads((book.folder / "checkpoints" / "index.json").read_text())
    assert index["best"] == "c1" and [row["name"] for row in index["checkpoints"]] == ["c1", "c4", "c5"]
    assert cp.find(book.folder).state == {"step": 5} and cp.find(book.folder, "best").name == "c1"
    assert (cp.find(book.folder, "c4").folder / "weights.bin").read_bytes() == b"\4" * 1000
    with pytest.raises(RunFolderError, match="did you mean 'c4'"):
        cp.find(book.folder, "c44")
    with pytest.raises(InvariantError, match="already written"):
        book.checkpoint("c5", weights(0), {})


def test_kept_files_are_replaced_and_verified(book: RunFolder) -> None:
    book.keep("start", weights(1))
    book.keep("start", weights(2))
    assert (book.kept("start") / "weights.bin").read_bytes() == b"\2" * 1000
    with pytest.raises(RunFolderError, match="keeps nothing called 'strat'; did you mean 'start'"):
        book.kept("strat")
    (book.folder / "kept" / "start" / "weights.bin").write_bytes(b"x")
    with pytest.raises(RunFolderError, match=r"weights\.bin is damaged"):
        book.kept("start")


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "sub"])
def test_damage_is_named_with_the_way_out(book: RunFolder, harm: str) -> None:
    book.checkpoint("a", weights(1), {"at": "a"})
    book.checkpoint("b", weights(2), {"at": "b"})
    target = book.folder / "checkpoints" / "b" / ("sub/more.bin" if harm == "sub" else "weights.bin")
    data = bytearray(target.read_bytes())
    target.unlink()
    if harm != "remove":
        data[0] ^= 1
        target.write_bytes(data[: len(data) // 2] if harm == "cut" else data)
    folder = book.folder
    crash(book)
    with pytest.raises(
        RunFolderError,
        match=(
            rf"checkpoint b: .*{target.name} is .*Go on from the newest one that is whole with: .*"
            r"posttrain run --resume .*checkpoints/a"
        ),
    ):
        RunFolder.open_for_resume(folder)
    again, checkpoint = RunFolder.open_for_resume(folder / "checkpoints" / "a")
    assert checkpoint is not None and checkpoint.state == {"at": "a"} and names(folder) == ["a"]
    again.close()


def life(book: RunFolder, upto: int) -> None:
    """A small run: three steps with episodes and a checkpoint each, a pure function of the position."""
    start = len(run_reader.steps(book.folder))
    for i in range(start, upto):
        book.write_episodes("rl", i, *a_step(i))
        book.write(step(i + 1))
        book.checkpoint(f"c{i}", weights(i), {"step": i + 1}, 0.5)


def test_kill_at_any_system_call_leaves_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child dies at its n-th rename, fsync, write, unlink..., for every n; the run then goes on to the same
    record."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a kill, unlike a power cut, loses no written page
    with RunFolder.create(tmp_path / "never", SHORT, FACTS) as whole:
        life(whole, 2)
    expected = run_reader.record_digest(tmp_path / "never")
    for n in range(1000):
        folder = tmp_path / f"killed{n}"
        child = os.fork()
        if child == 0:
            _die_at(n)
            book = RunFolder.create(folder, SHORT, FACTS)
            book.keep("start", weights(7))
            life(book, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            assert n > 50
            return
        _goes_on(folder, expected)
        shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("the child never finished")


def _die_at(n: int) -> None:
    count = iter(range(10**9))
    for name in ("replace", "fsync", "write", "unlink", "rmdir", "mkdir", "pwrite", "ftruncate"):
        real = getattr(os, name)

        def dying(*args: object, real: Callable[..., object] = real, **kwargs: object) -> object:
            if next(count) == n:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(os, name, dying)


def _goes_on(folder: Path, expected: str) -> None:
    if not (folder / "run.json").exists():
        with RunFolder.create(folder, SHORT, FACTS) as book:
            life(book, 2)
    else:
        done = [c.state["step"] for c in cp.scan(folder)]
        book, checkpoint = RunFolder.open_for_resume(folder)
        assert (checkpoint.state["step"] if checkpoint else None) == (max(done) if done else None)
        assert len(run_reader.steps(folder)) == (checkpoint.state["step"] if checkpoint else 0)
        assert not list(folder.rglob(".*"))
        life(book, 2)
        book.close()
    assert run_reader.record_digest(folder) == expected
    assert len(cp.scan(folder)) <= 1 and cp.find(folder).state == {"step": 2}


def test_resume_cuts_the_record_back_to_the_checkpoint(book: RunFolder) -> None:
    life(book, 2)
    before = run_reader.record_digest(book.folder)
    book.write_episodes("rl", 2, *a_step(2))
    book.write(step(3))
    book.write_evaluation("rl", 3, a_step(3)[1])
    book._steps.append({"half": 1})  # pyright: ignore[reportPrivateUsage]
    crash(book)
    with (book.folder / "steps.jsonl").open("ab") as f:
        f.write(b'{"stage":"rl","ind')
    again, checkpoint = RunFolder.open_for_resume(book.folder)
    assert checkpoint is not None and checkpoint.state == {"step": 2} and again.run == RUN
    assert run_reader.record_digest(book.folder) == before
    assert sorted(p.name for p in (book.folder / "episodes").glob("*.npz")) == ["rl-000000.npz", "rl-000001.npz"]
    again.close()


def test_lost_lines_are_noticed(book: RunFolder) -> None:
    life(book, 1)
    crash(book)
    (book.folder / "steps.jsonl").write_bytes(b"")
    with pytest.raises(RunFolderError, match="lines are missing"):
        RunFolder.open_for_resume(book.folder)


def test_the_digest_covers_all_but_the_clock(tmp_path: Path) -> None:
    def digest(name: str, **changed: object) -> str:
        with RunFolder.create(tmp_path / name, RUN, FACTS) as book:
            book.write_episodes("rl", 0, *a_step(int(str(changed.get("seed", 0)))))
            book.write(
                Step(
                    "rl",
                    1,
                    1,
                    {"r": Gauge(1, 2)},
                    {"learn": float(str(changed.get("clock", 1)))},
                    (str(changed.get("note")),),
                )
            )
        return run_reader.record_digest(tmp_path / name)

    base = digest("a")
    assert digest("b", clock=7) == base
    assert digest("c", note="other") != base and digest("d", seed=1) != base


# --- full disks -------------------------------------------------------------------------------------------------------


def test_a_full_disk_says_which_checkpoint_is_still_good(book: RunFolder) -> None:
    book.checkpoint("a", weights(1), {"step": 1})

    def full(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        RunFolderError,
        match=r"disk is full: .*checkpoints/b was not written\. The last good checkpoint is a\. Free some space",
    ):
        book.checkpoint("b", full, {"step": 2})
    assert names(book.folder) == ["a"] and not list((book.folder / "checkpoints").glob(".*"))
    book.checkpoint("b", weights(2), {"step": 2})
    assert cp.find(book.folder).state == {"step": 2}


def test_other_failures_of_the_writer_are_passed_on_and_leave_nothing(book: RunFolder) -> None:
    def broken(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        book.checkpoint("a", broken, {})
    assert not list((book.folder / "checkpoints").glob("[!i]*"))


def test_a_line_that_does_not_fit_leaves_no_trace(book: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    book.write(step(1))
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(RunFolderError, match=r"steps\.jsonl was not written\. There is no checkpoint yet"):
        book.write(step(2))
    monkeypatch.undo()
    book.write(step(3))
    assert [s.index for s in run_reader.steps(book.folder)] == [1, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one or root has given it one
    (tests/prove/test_as_user.py)."""
    if given := os.environ.get("POSTTRAIN_SMALL_DISK"):
        yield Path(given)
        return
    where = tmp_path / "small"
    where.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", where], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_really_full_disk(small_disk: Path) -> None:
    """Steps, episodes and checkpoints until nothing fits; what was promised as good can be gone on from."""
    book = RunFolder.create(small_disk / "run", RUN, FACTS)
    with pytest.raises(RunFolderError, match="the disk is full") as error:
        for i in range(10000):
            book.write(step(i + 1))
            book.write_episodes("rl", i, *a_step(i))
            if i % 5 == 4:
                book.checkpoint(f"c{i}", weights(i % 256), {"step": i + 1})
    crash(book)
    again, checkpoint = RunFolder.open_for_resume(small_disk / "run")
    assert checkpoint is not None and checkpoint.name in str(error.value)
    assert len(run_reader.steps(small_disk / "run")) == checkpoint.state["step"]
    again.close()


def test_a_full_disk_as_safetensors_reports_it() -> None:
    assert (
        files.full(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
        == files.FULL[errno.ENOSPC]
    )
    assert files.full(RuntimeError("I/O error: File too large (os error 27)")) == files.FULL[errno.EFBIG]
    assert (
        files.full(OSError(errno.EACCES, "Permission denied")) is None
        and files.full(RuntimeError("os error 2")) is None
    )


def test_the_default_algorithm_is_recorded_without_a_user_patch(book: RunFolder) -> None:
    assert run_reader.run_file(book.folder).lineages["rl"][-1]["name"] == GRPO.name


# --- folders that somebody else made, or that something damaged -------------------------------------------------------


def three(book: RunFolder) -> Path:
    """Checkpoints a, b and c; the owner is gone."""
    for name in "abc":
        book.write(step(1))
        book.checkpoint(f"0000000{ord(name) - 96}-{name}", weights(ord(name)), {"at": name}, 0.5)
    crash(book)
    return book.folder


STATES = {
    "empty": b"",
    "cut": b'{"schema": 1, "order"',
    "a list": b"[]",
    "another object": b'{"schema": 1}',
    "nested": b'{"schema":' + b"[" * 100_000,
    "no place": b'{"schema": 1, "order": 0, "metric": null, "position": {"steps": -1, "episodes": 0}, "state": {}}',
    "a long number": b'{"schema": 1, "order": ' + b"9" * 5000 + b"}",
    "no text": b"\xff\xfe\x00\x00",
}


@pytest.mark.parametrize("harm", STATES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_state_of_an_older_checkpoint_blocks_nothing(tmp_path: Path, harm: str, which: int) -> None:
    folder = three(RunFolder.create(tmp_path / "run", replace(RUN, keep_checkpoints=3), FACTS))
    path = sorted((folder / "checkpoints").glob("0*"))[which]
    (path / "state.json").write_bytes(STATES[harm])
    assert cp.find(folder).state == cp.find(folder, "best").state == {"at": "c"} and len(cp.scan(folder)) == 2
    again, checkpoint = RunFolder.open_for_resume(folder)
    assert checkpoint is not None and checkpoint.state == {"at": "c"}
    again.checkpoint("00000004-d", weights(9), {"at": "d"})
    again.close()
    with pytest.raises(RunFolderError, match=rf"checkpoint {path.name}: .*state\.json .*--checkpoint 00000004-d"):
        cp.find(folder, path.name)


@pytest.mark.parametrize("harm", STATES)
def test_a_damaged_state_of_the_newest_checkpoint_names_the_newest_good_one(tmp_path: Path, harm: str) -> None:
    folder = three(RunFolder.create(tmp_path / "run", replace(RUN, keep_checkpoints=3), FACTS))
    newest, good = folder / "checkpoints" / "00000003-c", folder / "checkpoints" / "00000002-b"
    (newest / "state.json").write_bytes(STATES[harm])
    with pytest.raises(
        RunFolderError,
        match=r"checkpoint 00000003-c: .*state\.json .*whole is 00000002-b: take it with --checkpoint 00000002-b",
    ):
        cp.find(folder)
    with pytest.raises(
        RunFolderError, match=rf"checkpoint 00000003-c: .*state\.json .*with: .*posttrain run --resume {good}$"
    ):
        RunFolder.open_for_resume(folder)
    again, checkpoint = RunFolder.open_for_resume(good)
    assert checkpoint is not None and checkpoint.state == {"at": "b"} and not newest.exists()
    again.close()
    again, checkpoint = RunFolder.open_for_resume(folder)
    assert checkpoint is not None and checkpoint.state == {"at": "b"}
    again.close()


def test_a_damaged_state_is_that_of_the_newest_and_of_the_best_by_the_index(tmp_path: Path) -> None:
    """The end of a stage is named with step 0, so its name comes before that of the checkpoint before it."""
    book = RunFolder.create(tmp_path / "run", replace(RUN, keep_checkpoints=3), FACTS)
    book.checkpoint("00000002-rl-000002", weights(1), {"at": "middle"}, 0.25)
    end = book.checkpoint("00000002-rl-000000", weights(1), {"at": "end"}, 0.75).folder
    book.close()
    text = (end / "state.json").read_text()
    (end / "state.json").write_text(text.replace('"end"', '"End"'))
    for use in (
        lambda: cp.find(tmp_path / "run"),
        lambda: cp.find(tmp_path / "run", "best"),
        lambda: cp.newest(tmp_path / "run"),
        lambda: RunFolder.open_for_resume(tmp_path / "run"),
    ):
        with pytest.raises(RunFolderError, match=r"checkpoint 00000002-rl-000000: .*state.json is damaged"):
            use()


def test_the_newest_good_one_is_one_whose_files_are_whole(tmp_path: Path) -> None:
    folder = three(RunFolder.create(tmp_path / "run", replace(RUN, keep_checkpoints=3), FACTS))
    for name in ("00000003-c/state.json", "00000002-b/weights.bin"):
        os.truncate(folder / "checkpoints" / name, 10)
    with pytest.raises(RunFolderError, match=r"00000003-c: .*--resume .*00000001-a$"):
        RunFolder.open_for_resume(folder)
    os.truncate(folder / "checkpoints" / "00000001-a" / "digests.json", 10)
    with pytest.raises(RunFolderError, match=r"No checkpoint before it is whole"):
        RunFolder.open_for_resume(folder)
    with pytest.raises(RunFolderError, match=r"No other one is whole"):
        cp.find(folder)


def test_what_else_lies_among_the_checkpoints_is_left_alone(tmp_path: Path) -> None:
    folder = three(RunFolder.create(tmp_path / "run", replace(RUN, keep_checkpoints=3), FACTS))
    place, outside = folder / "checkpoints", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    shutil.copytree(place / "00000003-c", outside / "copy")
    (place / "lost+found").mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "away").symlink_to(tmp_path / "nowhere")
    (place / "99999999-link").symlink_to(outside / "copy")
    (place / "me").symlink_to(place)
    (place / ".staged-link").symlink_to(outside)
    (place / ".trash-file").write_text("x")
    (folder / ".run.json.part").symlink_to(outside / "precious")
    again, checkpoint = RunFolder.open_for_resume(folder)
    assert checkpoint is not None and checkpoint.state == {"at": "c"} and cp.find(folder).state == {"at": "c"}
    for i in range(4, 9):
        again.checkpoint(f"0000000{i}-d", weights(i), {"at": "d"})
    again.close()
    assert (outside / "precious").read_text() == "x" and (outside / "copy" / "state.json").exists()
    assert sorted(p.name for p in place.iterdir())[-5:] == ["away", "index.json", "lost+found", "me", "notes.txt"]


@pytest.mark.parametrize(
    "name",
    ["run.json", "steps.jsonl", "episodes/index.jsonl", "episodes/rl-000000.npz", "checkpoints/a/state.json", "lock"],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link", "loop"])
def test_no_file_is_waited_for_and_no_link_is_written_through(
    book: RunFolder, name: str, kind: str, tmp_path: Path
) -> None:
    book.write_episodes("rl", 0, *a_step(0))
    book.write(step(1))
    book.checkpoint("a", weights(1), {"at": "a"})
    crash(book)
    path, outside = book.folder / name, tmp_path / "precious"
    outside.write_text("precious")
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(outside)
        case _:
            path.symlink_to(path)
    with pytest.raises(RunFolderError, match=path.name.replace(".", r"\.")):
        run_reader.run_file(book.folder)
        run_reader.steps(book.folder)
        for row in run_reader.episode_files(book.folder):
            run_reader.read_episodes(row.path)
        again, _ = RunFolder.open_for_resume(book.folder)
        again.close()
    assert outside.read_text() == "precious"


def bomb(path: Path, columns: dict[str, bytes], sizes: dict[str, int] | None = None) -> None:
    """An .npz whose columns are headers and so many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, head in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                entry.write(head)
                for _ in range((sizes or {}).get(name, 0) >> 20):
                    entry.write(bytes(1 << 20))


def head(dtype: str, shape: str, order: str = "False") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}"
    text += " " * (118 - len(text) - 1 if len(text) < 117 else 0) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


BOMBS: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {
    "zeros": ({"ids": head("'<i4'", f"({75 << 20},)")}, {"ids": 300 << 20}),
    "many columns": (
        {n: head("'<i4'", f"({25 << 20},)") for n in ("ids", "version", "kept_ids")},
        dict.fromkeys(("ids", "version", "kept_ids"), 100 << 20),
    ),
    "a shape of its own": ({"ids": head("'<i4'", f"({1 << 40},)")}, {"ids": 1 << 20}),
    "two axes": ({"ids": head("'<i4'", "(1048576, 0)")}, {}),
    "below nothing": ({"ids": head("'<i4'", "(-1,)")}, {}),
    "objects": ({"ids": head("'|O'", "(1,)") + b"cos\nsystem\n(S'touch owned'\ntR."}, {}),
    "another type": ({"ids": head("'<i8'", "(0,)")}, {}),
    "another name": ({"../ids": head("'<i4'", "(0,)")}, {}),
    "no header": ({"ids": b"x" * 200}, {}),
    "keys that cannot be sorted": ({"ids": b"\x93NUMPY\x01\x00\x76\x00" + b"{1: 2, 'a': 3}".ljust(117) + b"\n"}, {}),
    "a deep header": ({"ids": b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"-" * 8999 + b"\n"}, {}),
    "deep words": ({"meta": head("'|u1'", "(200000,)") + b"[" * 200_000}, {}),
    "no words": ({"meta": head("'|u1'", "(2,)") + b"[]"}, {}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_sizes_and_types_are_read_before_anything_is_inflated(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rl-000000.npz"
    bomb(path, *BOMBS[name])
    tracemalloc.start()
    with pytest.raises(RunFolderError, match=r"rl-000000\.npz is damaged"):
        run_reader.read_episodes(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20 and not (tmp_path / "owned").exists()


def test_an_entry_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    """The archive's directory says a few bytes; what follows is no longer read."""
    path = tmp_path / "rl-000000.npz"
    bomb(path, {"ids": head("'<i4'", "(2,)") + bytes(8)}, {"ids": 1 << 26})
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    raw[at + 24 : at + 28] = (len(head("'<i4'", "(2,)")) + 8).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(RunFolderError, match="is damaged"):
        run_reader.read_episodes(path)


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b'{"schema": 1}',
        b'{"schema": 1, "run": 3, "lineages": {}}',
        b"[" * 100_000,
        b'{"schema": 1, "run": {"seed": ' + b"[" * 900 + b"]" * 900 + b'}, "lineages": {}}',
        b"\xff",
        b"",
        b"9" * 5000,
        b'{"schema": 1, "run": {"seed": {"float": []}}, "lineages": 1}',
    ],
    ids=[
        "list",
        "empty object",
        "no run",
        "number",
        "nested",
        "nested inside",
        "no text",
        "empty",
        "long number",
        "no float",
    ],
)
def test_a_run_file_of_anything_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        run_reader.run_file(tmp_path)


@pytest.mark.parametrize("lineages", [[], {"rl": 3}, {"rl": [3]}, {"rl": [{"name": "grpo", "changes": 3}]}])
def test_a_lineage_of_anything_is_damage(tmp_path: Path, lineages: object) -> None:
    RunFolder.create(tmp_path / "r", RUN, FACTS).close()
    path = tmp_path / "r" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lineages": lineages}))
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        run_reader.run_file(tmp_path / "r")


def test_a_line_without_end_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    (tmp_path / "steps.jsonl").write_bytes(
        json.dumps(step_format.step_to_plain(step(1))).encode() + b"\n" + b"x" * 2000
    )
    with pytest.raises(RunFolderError, match=r"steps\.jsonl:2: the line has more than 1,000 bytes"):
        run_reader.steps(tmp_path)


def test_a_folder_that_is_replaced_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = tmp_path / "rows", os.replace

    def written(text: str) -> None:
        files.write_directory(target, lambda place: (place / "a").write_text(text))

    def fails(source: Path, into: Path) -> None:
        if "staged" in str(source) and target.with_name(".old-rows").exists():
            raise OSError("no")
        real(source, into)

    written("old")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no"):
        patched.setattr(os, "replace", fails)
        written("new")
    assert (target / "a").read_text() == "old" and not files.damage(target)
    os.replace(target, tmp_path / ".old-rows")  # as a kill between the two renames leaves it
    files.sweep(tmp_path)
    assert (target / "a").read_text() == "old"
    shutil.copytree(target, tmp_path / ".old-rows")  # as a kill before its removal leaves it
    written("new")
    assert (target / "a").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(RunFolderError, match=r"cannot lock .*lock: Function not implemented\. Take a folder"):
        files.Lock(tmp_path)
