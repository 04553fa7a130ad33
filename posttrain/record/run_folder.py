"""The run folder: settings of a run, every step, every episode, and the checkpoints from which it can go on.

    run.json               schema, resolved tree, lineage of each algorithm, facts of the machine; written once, and
                           again with a history where the run goes on with other settings
    lock                   who is writing
    steps.jsonl            one `Step` a line; gauges as [sum, count]
    episodes/              one compressed file a step (`rl-000012.npz`) or evaluation (`rl-000012-eval.npz`),
                           index.jsonl
    heldout/               the held-out loss of stages that imitate, row by row (`sft-000012.json`)
    checkpoints/, kept/    see `record.checkpoint`

Lines after the last checkpoint are written again when a run goes on: `open_for_resume` cuts the record back to it.
`record.run_reader` reads a run folder. It needs no lock and works while a run is being written.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config.run import Run
from posttrain.core.gauge import Gauges, Step, merge
from posttrain.core.measure.heldout_loss import HeldoutLoss
from posttrain.core.scored import Credit
from posttrain.core.types import Group
from posttrain.ladder.algorithm import differences
from posttrain.ladder.both_ladders import AnyAlgorithm
from posttrain.record import run_reader, step_format
from posttrain.record.checkpoint import (
    Checkpoint,
    Checkpoints,
    Position,
    kept_folder,
    newest_good,
    pick,
    refuse_damage_beside,
)
from posttrain.system import files
from posttrain.system.dataclass_json import to_plain
from posttrain.system.errors import InvariantError, RunFolderError
from posttrain.system.shell import command_line

AMENDED = "steps.amended.jsonl"
"""A new record with another last line (`reopen`). It replaces the record when the checkpoint that belongs to it is
written."""


def lineage(algorithm: AnyAlgorithm) -> list[dict[str, Any]]:
    """The patches from the root of its ladder to this algorithm, each with its changes; the user's own is the last."""
    rows: list[dict[str, Any]] = []
    for a in algorithm.lineage():
        changed = differences(a.parent, a) if a.parent else {}
        rows.append({"name": a.name, "paper": a.paper, "changes": {name: to_plain(a)[name] for name in changed}})
    return rows


def _lineages(run: Run) -> dict[str, Any]:
    algorithms = ((s.name, getattr(s, "algorithm", None)) for s in run.stages)
    return {name: lineage(a) for name, a in algorithms if isinstance(a, AnyAlgorithm)}


@contextmanager
def _released_on_failure(folder: Path, lock: files.Lock) -> Generator[None]:
    """Releases the lock whatever goes wrong: it must not outlive the attempt. An OSError becomes a RunFolderError."""
    try:
        yield
    except OSError as error:
        lock.release()
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise RunFolderError(f"cannot write {error.filename or folder}: {why}") from error
    except BaseException:
        lock.release()
        raise


class RunFolder:
    """Writes a run folder. Only one process has it at a time. Use it as a context manager, or call `close`."""

    def __init__(self, folder: Path, run: Run, lock: files.Lock) -> None:
        self.folder, self.run, self._lock = folder, run, lock
        self._episodes = folder / "episodes"
        self._episodes.mkdir(exist_ok=True)
        for path in (folder, self._episodes):
            # Half-written files of a killed writer are removed before anything is read or written.
            files.sweep(path)
        self._checkpoints = Checkpoints(folder, run.keep_checkpoints)
        # Before the record is opened for appending, since an amendment replaces its file.
        self._finish_amendment()
        self._steps = files.Lines(folder / "steps.jsonl")
        self._index = files.Lines(self._episodes / "index.jsonl")
        self._unsynced: list[Path] = []
        """Episode files that `sync` must still make durable."""
        self._written = {row.path.name for row in run_reader.episode_files(folder)}
        """Names of the episode files that the index lists."""

    @staticmethod
    def refuse(folder: Path | str) -> None:
        """Raises RunFolderError if no run can begin here: it is a file, has a run, or has other files."""
        folder = Path(folder)
        if not folder.exists():
            return
        if not folder.is_dir():
            raise RunFolderError(f"cannot create run folder {folder}: it is a file. Choose another --out")
        if (folder / "run.json").exists():
            raise RunFolderError(
                f"{folder} already holds a run. Go on with it by --resume {folder}, or choose another --out"
            )
        # A creation that was interrupted leaves a lock and temporary files. Such a folder is still free.
        if others := sorted(p.name for p in folder.iterdir() if p.name != "lock" and not files.is_temporary(p)):
            raise RunFolderError(f"{folder} is not empty ({', '.join(others[:3])}). Choose another --out")

    @staticmethod
    def create(folder: Path | str, run: Run, facts: Mapping[str, Any]) -> RunFolder:
        """A new run folder. `facts` (versions, machine, digests, argv) are written into run.json beside the tree.

        Raises:
            RunFolderError: the folder already holds a run or other files, is in use, or cannot be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The lock is taken before `refuse` looks, so that two processes cannot both find the folder empty.
            lock = files.Lock(folder)
        except OSError as error:
            raise RunFolderError(f"cannot create run folder {folder}: {error.strerror}") from error
        with _released_on_failure(folder, lock):
            files.sweep(folder)
            RunFolder.refuse(folder)
            data = {
                "schema": run_reader.SCHEMA,
                "identity": secrets.token_hex(16),
                "run": to_plain(run),
                "lineages": _lineages(run),
                **facts,
            }
            with files.disk_full_is_reported(folder / "run.json", lambda: "Nothing was run"):
                # Digests are made of the data after a way through JSON, as a reader sees it: tuples are lists then.
                digests = run_reader.digests(json.loads(json.dumps(data)))
                files.write_json(folder / "run.json", {**data, "digests": digests})
            return RunFolder(folder, run, lock)

    @staticmethod
    def open_for_resume(path: Path | str, cut: bool = True) -> tuple[RunFolder, Checkpoint | None]:
        """(the run folder, which is cut back to a checkpoint; that checkpoint, or None where the run begins anew).

        `path` is a run folder, which means its last checkpoint, or one checkpoint inside it. Everything after the
        checkpoint is removed; with `cut=False` not yet, for a caller that may still refuse to go on, and then calls
        `cut_back`. A damaged checkpoint is an error that names the file and the newest undamaged checkpoint before it.
        """
        folder, chosen = run_reader.folder_of(path)
        run = run_reader.run_file(folder).run
        lock = files.Lock(folder)
        with _released_on_failure(folder, lock):
            opened = RunFolder(folder, run, lock)
            # Chosen before anything is cut: a damaged choice leaves the folder as it was.
            checkpoint = opened._choose(chosen)
            if cut:
                opened.cut_back(checkpoint)
            return opened, checkpoint

    def _choose(self, name: str | None) -> Checkpoint | None:
        """The checkpoint of this name, or the last one for None; its files are compared with their digests."""
        readable, damaged = self._checkpoints.all, self._checkpoints.damaged
        # If a newer checkpoint is damaged, the last readable one is not taken silently: work would be lost without the
        # user's word. Files are compared before the record is cut back to the checkpoint.
        picked = pick(self.folder, readable, damaged, name, ())
        if picked is None:
            return None
        chosen, wrong = picked
        if isinstance(chosen, Checkpoint) and not wrong:
            refuse_damage_beside(self.folder)
            return chosen
        if name is None:
            older = readable
        elif isinstance(chosen, Checkpoint):
            older = [c for c in readable if c.order < chosen.order]
        else:
            # Its order is that of the index, which may be damaged too. Names begin with the version of the weights, so
            # they sort in the order of writing.
            older = [c for c in readable if c.name < chosen.name]
        if good := newest_good(older):
            advice = f"Go on from the newest one that is whole with: {command_line('run', '--resume', good.folder)}"
        else:
            advice = (
                f"No checkpoint before it is whole: remove {chosen.folder} to begin this run again from its start with"
                " --resume"
            )
        raise RunFolderError(f"checkpoint {chosen.name}: {wrong}. {advice}")

    def cut_back(self, checkpoint: Checkpoint | None) -> None:
        """Remove everything that was written after the checkpoint; with None the whole record."""
        index = self.folder / "checkpoints" / "index.json"
        with files.disk_full_is_reported(index, lambda: "No checkpoint was lost"):
            position = checkpoint.position if checkpoint else Position(0, 0)
            # The checkpoint has the length of both files at its time. Later lines will be written again.
            self._steps.truncate(position.steps)
            self._index.truncate(position.episodes)
            # Read again from the shortened index.
            self._written = {row.path.name for row in run_reader.episode_files(self.folder)}
            for path in self._episodes.glob("*.npz"):
                # Episode files that no line lists belong to steps that are played again.
                if path.name not in self._written:
                    path.unlink()
            if checkpoint:
                self._checkpoints.forget_after(checkpoint)

    # --- the record ------------------------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """One line of the record."""
        with files.disk_full_is_reported(self._steps.path, self._checkpoints.still_good):
            self._steps.append(step_format.step_to_plain(step))

    def write_episodes(self, stage: str, index: int, credit: Credit, unjudged: Sequence[Group] = ()) -> None:
        """All episodes of a training step with their credit; `unjudged` are groups that reached no credit."""
        self._write_columns(stage, index, "train", step_format.of_step(credit, unjudged))

    def write_evaluation(self, stage: str, index: int, groups: Iterable[Group]) -> None:
        """The episodes of a held-out evaluation made after `index` steps of a stage."""
        self._write_columns(stage, index, "eval", step_format.of_groups(groups))

    def holds_evaluation(self, stage: str, index: int) -> bool:
        """Returns whether an evaluation after `index` steps of a stage is in the record."""
        return run_reader.episode_name(stage, index, "eval") in self._written

    def write_losses(self, stage: str, index: int, measured: HeldoutLoss) -> None:
        """The held-out loss after `index` steps of a stage, row by row. One that is there already is replaced."""
        path = self.folder / run_reader.HELDOUT / f"{stage}-{index:06d}.json"
        with files.disk_full_is_reported(path, self._checkpoints.still_good):
            path.parent.mkdir(exist_ok=True)
            files.write_json(path, {key: list(row) for key, row in measured.rows.items()})

    def _write_columns(self, stage: str, index: int, kind: str, records: Sequence[step_format.Recorded]) -> None:
        name = run_reader.episode_name(stage, index, kind)
        # A second file of one step would replace what the index already counts.
        if name in self._written:
            raise InvariantError(f"episodes of {stage} {index} ({kind}) were already written")
        path = self._episodes / name
        with files.disk_full_is_reported(path, self._checkpoints.still_good):
            # The file before its line in the index, so a line never names a missing file. `sync` makes both durable.
            files.write_file(path, step_format.pack_columns(step_format.to_columns(records)), durable=False)
            self._index.append({"file": name, "stage": stage, "index": index, "kind": kind, "episodes": len(records)})
        self._written.add(name)
        self._unsynced.append(path)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(
        self, name: str, write: Callable[[Path], None], state: Mapping[str, Any], metric: float | None = None
    ) -> Checkpoint:
        """Write a checkpoint: `write` puts its files into the given folder, `state` is plain data. It is durable when
        this returns.

        Raises:
            RunFolderError: the disk is full; names the checkpoint that is still good. Nothing is lost.
        """
        # The record must be on the disk before a checkpoint contains its length.
        self.sync()
        return self._checkpoints.write(name, write, state, metric, Position(self._steps.position, self._index.position))

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Files that stay for the whole run, such as the weights a stage started from."""
        self._checkpoints.hold(name, write)

    def kept(self, name: str) -> Path:
        """The folder of files that `keep` wrote, verified."""
        return kept_folder(self.folder, name)

    # --- a run that goes on longer ---------------------------------------------------------------------------------

    def reopen(self, ended: Checkpoint, name: str, state: Mapping[str, Any], gauges: Gauges) -> Checkpoint:
        """Replaces the checkpoint at the end of the last stage by one inside that stage, so that the stage can go on.

        Args:
            name, state: of the new checkpoint. Its files and its metric are those of `ended`.
            gauges: of the evaluation at the end. They are added to the last line of the record, as in a stage that was
                longer from the beginning.

        If the process is killed in between, the folder can be resumed, or is finished as before.
        """
        amended = self.folder / AMENDED
        size = self._steps.position
        if gauges:
            # Only what was written whole: a longer file has a line that is no part of the record.
            *before, last = self._steps.path.read_bytes()[:size].splitlines(keepends=True)
            step = step_format.step_from_plain(json.loads(last))
            line = step_format.step_to_plain(replace(step, gauges=merge(step.gauges, gauges)))
            data = b"".join([*before, files.json_line(line)])
            with files.disk_full_is_reported(amended, self._checkpoints.still_good):
                files.write_file(amended, data)
            size = len(data)
        # The amended record has another length, by which `_finish_amendment` sees to which one a checkpoint belongs.
        position = Position(size, self._index.position)
        reopened = self._checkpoints.replace(ended, name, state, position)
        # Weights that are kept under a stage's name say that it has ended, and it goes on now.
        self._checkpoints.let_go(self.run.stages[-1].name)
        # The file is replaced on disk, so the handle of the old one must not be appended to.
        self._steps.close()
        self._finish_amendment()
        self._steps = files.Lines(self.folder / "steps.jsonl")
        return reopened

    def _finish_amendment(self) -> None:
        """Put an amended record in place if the newest checkpoint was made with it; else remove it."""
        amended = self.folder / AMENDED
        if not amended.is_file():
            return
        newest = self._checkpoints.all[-1] if self._checkpoints.all else None
        # If the newest checkpoint has the amended length, it was written completely, and only the rename is missing.
        if newest is not None and newest.position.steps == amended.stat().st_size:
            os.replace(amended, self.folder / "steps.jsonl")
        else:
            amended.unlink()

    def record_change(self, run: Run, entry: Mapping[str, Any]) -> None:
        """Writes the new settings of a run that goes on. run.json keeps a history of changes (`entry`), newest last."""
        path = self.folder / "run.json"
        data = files.read_json(path)
        data["run"], data["lineages"] = to_plain(run), _lineages(run)
        data["history"] = [*data.get("history", []), dict(entry)]
        # A way through JSON, so that the digests are those that a reader computes.
        data = json.loads(json.dumps(data))
        with files.disk_full_is_reported(path, self._checkpoints.still_good):
            files.write_json(path, {**data, "digests": run_reader.digests(data)})
        self.run, self._checkpoints.keep = run, run.keep_checkpoints

    # --- the end ---------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the record so far safe against a power cut. A full disk may be reported only here."""
        with files.disk_full_is_reported(self._steps.path, self._checkpoints.still_good):
            # The episode files first, then the lines that name them.
            for path in self._unsynced:
                files.sync(path)
            self._unsynced.clear()
            files.sync(self._episodes)
            self._steps.sync()
            self._index.sync()

    def beside(self, name: str, write: Callable[[Path], object]) -> None:
        """Writes a folder of files for readers of this one, such as the tokenizer: once, and whole or not at all."""
        # Such files do not change during a run, so they are not written twice.
        if not (self.folder / name).is_dir():
            self.anew(name, write)

    def anew(self, name: str, write: Callable[[Path], object]) -> Path:
        """Writes a folder of files that can be computed again; one of this name is replaced. Returns where it is."""
        with files.disk_full_is_reported(self.folder / name, self._checkpoints.still_good):
            files.write_directory(self.folder / name, write)
        return self.folder / name

    def close(self) -> None:
        try:
            # This raises on a full disk. The lock is released even then.
            self.sync()
        finally:
            self._steps.close()
            self._index.close()
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
