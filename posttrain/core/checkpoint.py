"""Checkpoints: the old or the new, never half of one; the newest few and the best are kept; damage is named.

checkpoints/00000040-rl-000020/   the caller's files, state.json, digests.json (blake2b of each)
checkpoints/index.json            best and all others, for readers; rebuilt from the folders at every open
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core import files
from posttrain.core.errors import InvariantError, RunFolderError, nearest

SCHEMA = 1


@dataclass(frozen=True)
class Position:
    """How far the record was, in bytes of steps.jsonl and of episodes/index.jsonl."""

    steps: int
    episodes: int


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as it lies on disk. `order` counts checkpoints of a run from 0."""

    name: str
    folder: Path
    order: int
    metric: float | None
    position: Position
    state: Mapping[str, Any]

    def verify(self) -> Checkpoint:
        """Itself, or RunFolderError naming the damaged file."""
        if wrong := files.damage(self.folder):
            raise RunFolderError(f"checkpoint {self.name}: {wrong}")
        return self


def scan(folder: Path) -> list[Checkpoint]:
    """All checkpoints of a run folder, oldest first. Reads state.json only; `verify` reads the rest.

    One that its writer removes meanwhile is not there.
    """
    found: list[Checkpoint] = []
    for path in (folder / "checkpoints").glob("[!.]*/"):
        try:
            found.append(_read(path))
        except RunFolderError:
            if path.exists():
                raise
    return sorted(found, key=lambda c: c.order)


def _read(path: Path) -> Checkpoint:
    data = files.read_json(path / "state.json")
    if data.get("schema") != SCHEMA:
        raise RunFolderError(f"{path}/state.json has schema {data.get('schema')}; this posttrain reads {SCHEMA}")
    position = Position(data["position"]["steps"], data["position"]["episodes"])
    return Checkpoint(path.name, path, data["order"], data["metric"], position, data["state"])


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The highest metric; among equals the newest. None where no checkpoint was measured."""
    measured = [c for c in checkpoints if c.metric is not None and math.isfinite(c.metric)]
    return max(measured, key=lambda c: (c.metric, c.order), default=None)


def find(folder: Path, which: str = "last") -> Checkpoint:
    """`last`, `best` or a name; verified."""
    found = scan(folder)
    if not found:
        raise RunFolderError(f"{folder} has no checkpoint yet")
    if which == "last":
        return found[-1].verify()
    if which == "best":
        return (best(found) or found[-1]).verify()
    named = {c.name: c for c in found}
    if which not in named:
        raise RunFolderError(f"{folder} has no checkpoint {which!r}; {nearest(which, ['last', 'best', *named])}")
    return named[which].verify()


class Checkpoints:
    """The writing side, for the one process that holds the run folder's lock."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.run, self.folder, self.kept_folder = folder, folder / "checkpoints", folder / "kept"
        self.keep = keep
        for path in (self.folder, self.kept_folder):
            path.mkdir(exist_ok=True)
            files.sweep(path)
        self.all = scan(folder)

    def still_good(self) -> str:
        return f"The last good checkpoint is {self.all[-1].name}" if self.all else "There is no checkpoint yet"

    def write(
        self, name: str, fill: Callable[[Path], None], state: Mapping[str, Any], metric: float | None, position: Position
    ) -> Checkpoint:
        """Write one, durably, then drop the ones that are neither new nor best."""
        if any(c.name == name for c in self.all):
            raise InvariantError(f"checkpoint {name} was already written: names must differ")
        order = self.all[-1].order + 1 if self.all else 0
        where = {"steps": position.steps, "episodes": position.episodes}
        data = {"schema": SCHEMA, "order": order, "metric": metric, "position": where, "state": dict(state)}

        def everything(staged: Path) -> None:
            fill(staged)
            (staged / "state.json").write_text(json.dumps(data, indent=1))

        with files.disk_full_is_reported(self.folder / name, self.still_good):
            files.write_directory(self.folder / name, everything)
        self.all.append(_read(self.folder / name))
        with files.disk_full_is_reported(self.folder / "index.json", self.still_good):
            self.retain()
        return self.all[-1]

    def retain(self) -> None:
        """Keep the newest and the best; rewrite the index."""
        champion = best(self.all)
        for c in self.all[: max(len(self.all) - max(self.keep, 1), 0)]:
            if c is not champion:
                files.remove_directory(c.folder)
        self.all = [c for c in self.all if c.folder.exists()]
        rows = [{"name": c.name, "order": c.order, "metric": c.metric} for c in self.all]
        files.write_json(self.folder / "index.json", {"best": champion.name if champion else None, "checkpoints": rows})

    def forget_after(self, chosen: Checkpoint) -> None:
        """Remove what was written after `chosen`: the run goes on from there and writes it again."""
        for c in self.all:
            if c.order > chosen.order:
                files.remove_directory(c.folder)
        self.all = [c for c in self.all if c.order <= chosen.order]
        self.retain()

    def hold(self, name: str, fill: Callable[[Path], None]) -> None:
        """Files kept for good under a name (the weights at a stage's border). The same name again replaces them."""
        target = self.kept_folder / name
        with files.disk_full_is_reported(target, self.still_good):
            files.write_directory(target, fill)

    def held(self, name: str) -> Path:
        target = self.kept_folder / name
        if not target.is_dir():
            present = sorted(p.name for p in self.kept_folder.glob("[!.]*"))
            raise RunFolderError(f"{self.run} keeps nothing called {name!r}; {nearest(name, present)}")
        if wrong := files.damage(target):
            raise RunFolderError(f"kept {name}: {wrong}")
        return target
