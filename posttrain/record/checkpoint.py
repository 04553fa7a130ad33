"""Checkpoints. They are written atomically, the newest few and the best are kept, and damage is reported by file.

checkpoints/00000040-rl-000020/   the caller's files, state.json, digests.json (blake2b of each)
checkpoints/index.json            best and all others, for readers; rebuilt from the folders at every open
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.record.certificate import READ
from posttrain.system import files
from posttrain.system.dataclass_json import build, to_plain
from posttrain.system.errors import InvariantError, RunFolderError, nearest

SCHEMA = 1
BESIDE = ("model", "tokenizer")
"""Folders of a run with the configuration of its model and with its tokenizer."""
KEPT = "kept"
"""Folder of a run with the files that stay, such as the weights at a stage's border."""


@dataclass(frozen=True)
class Position:
    """Length of the record, in bytes of steps.jsonl and of episodes/index.jsonl."""

    steps: int
    episodes: int


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk. `order` counts the checkpoints of a run from 0."""

    name: str
    folder: Path
    order: int
    metric: float | None
    position: Position
    state: Mapping[str, Any]
    """Plain data. It may have infinite numbers, such as the interval of a single prompt."""

    def verify(self) -> Checkpoint:
        """This checkpoint; raises RunFolderError that names a damaged file."""
        if wrong := files.damage(self.folder):
            raise RunFolderError(f"checkpoint {self.name}: {wrong}")
        return self


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint whose state cannot be read, and the reason (`why`)."""

    name: str
    folder: Path
    why: str
    order: float
    """`Checkpoint.order` as the index has it. If the index does not have it: a number between those of its neighbours
    by name, since names begin with the version of the weights."""
    best: bool = False
    """Whether the index says that it is the best one."""


def survey(folder: Path) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """All checkpoints of a run folder, oldest first, and those whose state cannot be read. Reads state.json only;
    `verify` reads the rest.

    Ignored are links, files, folders without any part of a checkpoint, and checkpoints that their writer removes during
    the call.
    """
    readable: list[Checkpoint] = []
    unread: dict[Path, str] = {}
    for path in sorted((folder / "checkpoints").glob("[!.]*")):
        # Links could lead out of the folder. The pattern of `glob` leaves out hidden names: unfinished checkpoints.
        if (
            path.is_symlink()
            or not path.is_dir()
            or not any(os.path.lexists(path / n) for n in ("state.json", files.DIGESTS))
        ):
            continue
        try:
            readable.append(_read(path))
        except RunFolderError as error:
            if path.exists():  # else its writer has removed it in the meantime, which is no damage
                unread[path] = str(error)
    readable.sort(key=lambda c: (c.order, c.name))
    # The index is only a copy, read where a checkpoint's own state cannot be.
    best_one, listed = _index(folder) if unread else ("", {})
    damaged = [
        DamagedCheckpoint(p.name, p, why, _order(p.name, listed, readable), p.name == best_one)
        for p, why in unread.items()
    ]
    return readable, sorted(damaged, key=lambda d: (d.order, d.name))


def _index(folder: Path) -> tuple[str, dict[str, float]]:
    """(name of the best checkpoint, order of each) by the index; nothing where it cannot be read."""
    try:
        data = files.read_json(folder / "checkpoints" / "index.json")
        rows: Any = data.get("checkpoints")
        return str(data.get("best")), {str(row["name"]): float(row["order"]) for row in rows}
    except (RunFolderError, TypeError, KeyError, ValueError, OverflowError):
        return "", {}


def _order(name: str, listed: Mapping[str, float], readable: Sequence[Checkpoint]) -> float:
    """The order of a damaged checkpoint: from the index (`listed`), else by its name."""
    before = max((c.order for c in readable if c.name < name), default=-1)
    # Between the checkpoint with the next smaller name and the one after it.
    return listed.get(name, before + 0.5)


def newest(folder: Path) -> Checkpoint | None:
    """The last checkpoint; None where there is none. RunFolderError if its state cannot be read or is not as it was
    written."""
    readable, damaged = survey(folder)
    last = readable[-1] if readable else None
    # A readable older one must not pass for the newest.
    if newer := [d for d in damaged if last is None or d.order > last.order]:
        raise RunFolderError(f"checkpoint {newer[-1].name}: {newer[-1].why}")
    return last


def scan(folder: Path) -> list[Checkpoint]:
    """The checkpoints of `survey` whose state can be read."""
    return survey(folder)[0]


def _read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, from its state.json. RunFolderError where that is damaged."""
    file = path / "state.json"
    data = files.read_json(file)
    # The digest is compared before anything in the state is used.
    if (path / files.DIGESTS).is_file() and files.read_json(path / files.DIGESTS).get(file.name) != files.digest(file):
        raise RunFolderError(f"{file} is damaged (its digest differs from the one written with it)")
    if data.get("schema") != SCHEMA:
        raise RunFolderError(f"{file} has schema {data.get('schema')}; this posttrain reads {SCHEMA}")
    # Types and signs are checked, since a folder may come from somebody else.
    match data:
        case {
            "position": {"steps": int(steps), "episodes": int(episodes)},
            "order": int(order),
            "metric": int() | float() | None as metric,
            "state": dict() as state,  # pyright: ignore[reportUnknownVariableType]
        } if steps >= 0 and episodes >= 0 and not isinstance(metric, bool):
            return Checkpoint(path.name, path, order, metric, Position(steps, episodes), build(Any, state, str(file)))
        case _:
            raise RunFolderError(
                f"{file} is damaged: it does not say position, order, metric and state as a checkpoint does"
            )


def refuse_damage_beside(folder: Path) -> None:
    """Raises RunFolderError if a file of the model's configuration or the tokenizer of a run was changed or added.

    A folder without digests is not checked.
    """
    for path in (folder / name for name in BESIDE):
        if not (path / files.DIGESTS).is_file():
            continue
        if not (wrong := files.damage(path)):
            # Added files count too: a library would read them as a part of the model.
            known = {files.DIGESTS, *files.read_json(path / files.DIGESTS)}
            added = sorted(p for p in path.iterdir() if p.suffix in READ and p.name not in known)
            wrong = f"{added[0]} was added after the folder was written" if added else ""
        if wrong:
            raise RunFolderError(f"{wrong}. Copy the whole folder again")


def newest_good(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The last checkpoint whose files are all as they were written."""
    return next((c for c in reversed(checkpoints) if not files.damage(c.folder)), None)


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest metric; among equals the newest. None where no checkpoint has a metric."""
    measured = [c for c in checkpoints if c.metric is not None and math.isfinite(c.metric)]
    # Among equals the newest has the most training.
    return max(measured, key=lambda c: (c.metric, c.order), default=None)


def pick(
    folder: Path, readable: list[Checkpoint], damaged: list[DamagedCheckpoint], which: str | None, words: Sequence[str]
) -> tuple[Checkpoint | DamagedCheckpoint, str] | None:
    """(the chosen checkpoint, what is wrong with its files or ''). None where there is none at all.

    Args:
        which: a name, or one of `words`; None: the last one.
        words: those of `last` and `best` that may stand in the place of a name.

    Raises:
        RunFolderError: there is none of this name.
    """
    last = readable[-1] if readable else None
    if which is None or (which == "last" and "last" in words):
        chosen = last
        # Damage of checkpoints before the chosen one does not matter. A readable older one never passes for the last.
        damaged = [d for d in damaged if last is None or d.order > last.order]
    elif which == "best" and "best" in words:
        chosen = best(readable) or last
        # Damage of other checkpoints matters only if the index says that one of them is the best, or if none can be
        # read.
        damaged = [d for d in damaged if d.best or not readable]
    else:
        named = {c.name: c for c in readable}
        chosen = named.get(which)
        damaged = [d for d in damaged if d.name == which]
        if chosen is None and not damaged:
            raise RunFolderError(f"{folder} has no checkpoint {which!r}; {nearest(which, [*words, *named])}")
    if damaged:
        return damaged[-1], damaged[-1].why
    if chosen is None:
        return None
    return chosen, files.damage(chosen.folder)


def find(folder: Path, which: str = "last") -> Checkpoint:
    """The checkpoint `last`, `best` or of a name, after its files, the model's configuration and the tokenizer were
    checked.

    Raises:
        RunFolderError: it is damaged or not there. The message names the newest undamaged checkpoint.
    """
    refuse_damage_beside(folder)
    readable, damaged = survey(folder)
    picked = pick(folder, readable, damaged, which, ("last", "best")) if readable or damaged else None
    if picked is None:
        raise RunFolderError(f"{folder} has no checkpoint yet")
    chosen, why = picked
    if isinstance(chosen, Checkpoint) and not why:
        return chosen
    # Offered only if all of its files are as they were written.
    good = newest_good([c for c in readable if c.name != chosen.name])
    if good is None:
        advice = "No other one is whole"
    else:
        advice = f"The newest one that is whole is {good.name}: take it with --checkpoint {good.name}"
    raise RunFolderError(f"checkpoint {chosen.name}: {why}. {advice}")


def kept_folder(run: Path, name: str) -> Path:
    """The folder of files that a run keeps for good under a name, verified."""
    target = run / KEPT / name
    if not target.is_dir():
        present = sorted(p.name for p in (run / KEPT).glob("[!.]*"))
        raise RunFolderError(f"{run} keeps nothing called {name!r}; {nearest(name, present)}")
    if wrong := files.damage(target):
        raise RunFolderError(f"kept {name}: {wrong}")
    return target


class Checkpoints:
    """Writes checkpoints, in the one process that holds the run folder's lock."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.run, self.folder, self.kept_folder = folder, folder / "checkpoints", folder / KEPT
        self.keep = keep
        for path in (self.folder, self.kept_folder):
            path.mkdir(exist_ok=True)
            files.sweep(path)
        self.all, self.damaged = survey(folder)

    def still_good(self) -> str:
        return f"The last good checkpoint is {self.all[-1].name}" if self.all else "There is no checkpoint yet"

    def write(
        self,
        name: str,
        fill: Callable[[Path], None],
        state: Mapping[str, Any],
        metric: float | None,
        position: Position,
    ) -> Checkpoint:
        """Write a checkpoint durably, then remove those that are neither new nor best."""
        # `write_directory` would replace a checkpoint of that name.
        if any(c.name == name for c in self.all):
            raise InvariantError(f"checkpoint {name} was already written: names must differ")
        # One more than the last order. The number of checkpoints would not do, since older ones are removed.
        order = self.all[-1].order + 1 if self.all else 0
        lengths = {"steps": position.steps, "episodes": position.episodes}
        data = {"schema": SCHEMA, "order": order, "metric": metric, "position": lengths, "state": to_plain(dict(state))}

        def everything(staged: Path) -> None:
            fill(staged)
            (staged / "state.json").write_text(json.dumps(data, indent=1))

        with files.disk_full_is_reported(self.folder / name, self.still_good):
            files.write_directory(self.folder / name, everything)
        self.all.append(_read(self.folder / name))
        # Older ones are removed only after the new one is complete, so the run can always go on from one.
        with files.disk_full_is_reported(self.folder / "index.json", self.still_good):
            self.retain()
        return self.all[-1]

    def retain(self) -> None:
        """Keep the newest and the best; rewrite the index."""
        best_one = best(self.all)
        # The best one is kept however old it is. The newest one is always kept, even with `keep` 0.
        for c in self.all[: max(len(self.all) - max(self.keep, 1), 0)]:
            if c is not best_one:
                files.remove_directory(c.folder)
        self.all = [c for c in self.all if c.folder.exists()]
        rows = [{"name": c.name, "order": c.order, "metric": c.metric} for c in self.all]
        files.write_json(self.folder / "index.json", {"best": best_one.name if best_one else None, "checkpoints": rows})

    def forget_after(self, chosen: Checkpoint) -> None:
        """Remove the checkpoints after `chosen`, damaged ones too. The run goes on from there and writes them again."""
        for c in (*self.all, *self.damaged):
            if c.order > chosen.order:
                files.remove_directory(c.folder)
        self.damaged = [d for d in self.damaged if d.order <= chosen.order]
        self.all = [c for c in self.all if c.order <= chosen.order]
        self.retain()

    def replace(self, old: Checkpoint, name: str, state: Mapping[str, Any], position: Position) -> Checkpoint:
        """Writes the files of a checkpoint under another name with another state, and removes the old checkpoint."""
        # An earlier attempt that was killed may have left a checkpoint of this name.
        for c in [c for c in self.all if c.name == name]:
            files.remove_directory(c.folder)
        self.all = [c for c in self.all if c.name != name]

        def copy(folder: Path) -> None:
            for path in old.folder.iterdir():
                if path.is_dir():
                    shutil.copytree(path, folder / path.name)
                # State and digests are made new; all other files are copied.
                elif path.name not in ("state.json", files.DIGESTS):
                    shutil.copyfile(path, folder / path.name)

        written = self.write(name, copy, state, old.metric, position)
        # `write` keeps a limited number and may have removed it already.
        if old.folder.exists():
            files.remove_directory(old.folder)
        self.all = [c for c in self.all if c is not old]
        self.retain()
        return written

    def let_go(self, name: str) -> None:
        """Remove files that were kept under a name."""
        if (self.kept_folder / name).is_dir():
            files.remove_directory(self.kept_folder / name)

    def hold(self, name: str, fill: Callable[[Path], None]) -> None:
        """Keep files for the whole run under a name, such as the weights at the end of a stage, or replace them."""
        target = self.kept_folder / name
        with files.disk_full_is_reported(target, self.still_good):
            files.write_directory(target, fill)
