"""Reads a run folder, finished or being written. It returns typed objects, names damaged files, and needs no lock."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.gauge import Step
from posttrain.core.measure.heldout_loss import HeldoutLoss
from posttrain.ladder.pieces.unknown_pieces import known_pieces, read_without
from posttrain.record import step_format
from posttrain.record.runtime_objects import OwnPiece, own_pieces
from posttrain.system import files
from posttrain.system.dataclass_json import from_plain
from posttrain.system.errors import ConfigError, PosttrainError, RunFolderError

STAGES: tuple[type[Stage], ...] = (
    Supervised,
    Reinforce,
    Preference,
    OnlinePreference,
    RewardModel,
    Rejection,
    StepLabeling,
)
"""The kinds of stage of this package. A run folder can be read only where the kinds of its stages are known."""
HELDOUT = "heldout"
"""The folder of held-out losses."""
SCHEMA = 2
"""Version of the format of run.json and of the record beside it."""
MEASURED = ("clock", "memory")
"""Entries of a line of the record that describe the machine; no digest covers them."""


@dataclass(frozen=True)
class RunFile:
    """run.json: the resolved run, the lineage of each stage's algorithm, and the facts it was started with."""

    run: Run
    lineages: Mapping[str, list[dict[str, Any]]]
    facts: Mapping[str, Any]
    identity: str | None = None
    """Random identity, made with the run; `record.provenance` finds its note by it."""
    edited: tuple[str, ...] = ()
    """Names of entries that were changed since they were written, such as `run.seed`."""
    digest: str = ""
    """Digest of the whole file."""
    absent: tuple[OwnPiece, ...] = ()
    """Pieces of its algorithms whose classes this program does not have. In `run` their plain records stand instead."""


@dataclass(frozen=True)
class EpisodeFile:
    """One episode file: `index` counts a stage's steps; kind is train or eval."""

    path: Path
    stage: str
    index: int
    kind: str
    episodes: int


def is_run(path: Path | str) -> bool:
    """Returns whether a path is that of a run folder."""
    return (Path(path) / "run.json").is_file()


def folder_of(path: Path | str) -> tuple[Path, str | None]:
    """The run folder of a path, and the checkpoint where the path is one inside the folder."""
    path = Path(path)
    inside = path.parent.name == "checkpoints" and is_run(path.parent.parent)
    return (path.parent.parent, path.name) if inside else (path, None)


def run_file(folder: Path | str) -> RunFile:
    """The content of the `run.json` of a run folder. RunFolderError where there is none, or it is damaged."""
    folder = Path(folder)
    path = folder / "run.json"
    if not path.exists():
        why = "it has no run.json" if folder.is_dir() else "it is a file" if folder.exists() else "it does not exist"
        raise RunFolderError(f"{folder} is not a run folder: {why}")
    data = files.read_json(path)
    _check_schema(path, data.get("schema"))
    # The facts are all entries but the tree and those about the file itself.
    facts = {k: v for k, v in data.items() if k not in ("schema", "identity", "digests", "run", "lineages")}
    known = known_pieces()
    with damage_is_named(str(path)):
        recorded_pieces = own_pieces(facts)
    # The user's own pieces that this program has not defined. Their records stay in the tree as they are.
    absent = tuple(p for p in recorded_pieces if p.name not in known)
    # Any error here is reported as damage of the file. `_read_run` treats errors that a changed class may cause.
    with damage_is_named(str(path)), read_without(data.get("run"), {p.name for p in absent}):
        return RunFile(
            _read_run(path, data, [p.name for p in recorded_pieces if p.name in known]),
            _lineages(data["lineages"]),
            facts,
            data.get("identity"),
            _edited(data),
            _digest(data),
            absent,
        )


def _lineages(data: Any) -> dict[str, list[dict[str, Any]]]:
    """The lineage of each stage's algorithm; an error where it has another form, since the file may be a stranger's."""
    for row in (row for patches in data.values() for row in patches):
        if not isinstance(row, dict) or not isinstance(cast("dict[str, Any]", row).get("changes") or {}, dict):
            raise ValueError("a patch in its lineages is no object")
    return data


def _read_run(path: Path, data: Mapping[str, Any], own: Sequence[str]) -> Run:
    """The run itself. `own`: pieces of the user's own whose classes this program has."""
    try:
        return from_plain(Run, _migrated(data["run"]))
    except ConfigError as error:
        # With pieces of the user's own, their class may have changed, and the file may be as it was.
        if not own:
            raise
        raise RunFolderError(
            f"{path} cannot be read with the classes that this program has of its pieces {', '.join(own)}: {error}. If"
            " their file was changed since the run was begun, give it as it was; else the run's file is damaged"
        ) from error


def _check_schema(path: Path, schema: object) -> None:
    if type(schema) is int and 0 < schema < SCHEMA:
        raise RunFolderError(
            f"{path} was written by an older version of posttrain (schema {schema}; this one reads {SCHEMA}). Nothing"
            " is damaged: go on with it, read it or export its model with the version that wrote it, or run its recipe"
            " again with this one"
        )
    if schema != SCHEMA:
        raise RunFolderError(
            f"{path} has schema {schema}; this posttrain reads {SCHEMA}. Use the version that wrote it"
        )


def _migrated(run: Any) -> Any:
    """The tree of an older folder, with two settings in their present form: `engine.compiled` (true, false or null)
    became `model.kernels`, and a stage that imitates had no `turns`, and learned the last turn."""
    run = {**run, "stages": [_with_turns(s) for s in run["stages"]]}
    engine, model = run["engine"], run["model"]
    if "compiled" not in engine:
        return run
    then = {True: "compiled", False: "torch", None: "auto"}[engine["compiled"]]
    # Before `**model`, so that a setting of the present form is kept where there is one.
    return {**run, "engine": {k: v for k, v in engine.items() if k != "compiled"}, "model": {"kernels": then, **model}}


def _with_turns(stage: Any) -> Any:
    if not isinstance(stage, dict):
        return stage
    tree = cast("dict[str, Any]", stage)
    return {"turns": "last", **tree} if tree.get("type") in (Supervised.__name__, Rejection.__name__) else tree


def _edited(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of entries that differ from their digest, were added or removed; () where there are no digests."""
    then: Any = data.get("digests")
    if not isinstance(then, dict):
        return ()
    # The names of both, so that added and removed entries are found too.
    now, names = digests(data), {*digests(data), *map(str, cast("dict[Any, Any]", then))}
    return tuple(n for n in sorted(names) if now.get(n) != cast("dict[Any, Any]", then).get(n))


def digests(data: Mapping[str, Any]) -> dict[str, str]:
    """One digest per entry of run.json and per field of the tree, so that an edit can be reported by name."""
    parts = {k: v for k, v in data.items() if k not in ("run", "digests")}
    fields = {f"run.{k}": v for k, v in data["run"].items()}
    return {name: _digest(value) for name, value in {**fields, **parts}.items()}


def _digest(value: Any) -> str:
    # Sorted keys: the order in which a program wrote them does not count.
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


@contextmanager
def damage_is_named(place: str) -> Generator[None]:
    """Context in which objects are made from a file. An error there is reported as damage of the file."""
    try:
        yield
    except RunFolderError:  # it names its file already
        raise
    # Nested too deeply for the parser. `from None`, since the traceback of the cause is as deep.
    except RecursionError:
        raise RunFolderError(f"{place} is damaged: its lists and objects are nested too deeply to be read") from None
    # What code raises that meets data of another form than it expects: here they are data's fault, and no bug.
    except (
        PosttrainError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error) if isinstance(error, PosttrainError) else repr(error)
        raise RunFolderError(f"{place} is damaged: {reason}") from error


def steps(folder: Path | str) -> list[Step]:
    """All whole lines of the record. A last line that was being written is left out; damage before it is an error."""
    path = Path(folder) / "steps.jsonl"
    out: list[Step] = []
    for number, data in files.read_lines(path):
        with damage_is_named(f"{path}:{number}"):
            out.append(step_format.step_from_plain(data))
    return out


def episode_name(stage: str, index: int, kind: str) -> str:
    return f"{stage}-{index:06d}{'' if kind == 'train' else '-' + kind}.npz"


def episode_files(folder: Path | str) -> list[EpisodeFile]:
    """The listed episode files, in the order of writing. Listed files that are gone are included (`missing_episodes`).

    A file that is not listed yet is left out. A name that no run gives, such as a path out of the folder, is an error.
    """
    inner = Path(folder) / "episodes"
    out: list[EpisodeFile] = []
    for number, d in files.read_lines(inner / "index.jsonl"):
        with damage_is_named(f"{inner / 'index.jsonl'}:{number}"):
            row = EpisodeFile(inner / d["file"], str(d["stage"]), int(d["index"]), str(d["kind"]), int(d["episodes"]))
            # The name must follow from the other entries and have no folder in it, so that it cannot lead out.
            named = d["file"] == episode_name(row.stage, row.index, row.kind) and Path(d["file"]).name == d["file"]
        if not named or row.kind not in ("train", "eval"):
            raise RunFolderError(
                f"{inner / 'index.jsonl'}:{number} names {d['file']!r}, which is no episode file of this run"
            )
        out.append(row)
    return out


def losses(folder: Path | str, stage: str) -> dict[int, HeldoutLoss]:
    """The held-out losses of a stage by the steps it had taken, in order."""
    out: dict[int, HeldoutLoss] = {}
    for path in sorted((Path(folder) / HELDOUT).glob(f"{stage}-*.json")):
        index = path.stem.removeprefix(f"{stage}-")
        if not index.isdecimal():  # a file of another stage whose name begins with this one's
            continue
        with damage_is_named(str(path)):
            rows = {str(k): (float(nll), float(tokens)) for k, (nll, tokens) in files.read_json(path).items()}
            # Losses are divided by their tokens, and a NaN would pass into every mean.
            if not rows or any(not (math.isfinite(nll) and 0 < tokens < math.inf) for nll, tokens in rows.values()):
                raise ValueError("a row is no loss over some tokens")
            out[int(index)] = HeldoutLoss(rows)
    return out


def missing_episodes(folder: Path | str) -> list[EpisodeFile]:
    """Listed episode files that do not exist."""
    return [row for row in episode_files(folder) if not row.path.is_file()]


def episodes(folder: Path | str, stage: str, index: int, kind: str = "train") -> tuple[step_format.Recorded, ...]:
    """The episodes of one step (or evaluation), each with its credit."""
    return read_episodes(Path(folder) / "episodes" / episode_name(stage, index, kind))


def read_episodes(path: Path) -> tuple[step_format.Recorded, ...]:
    columns = step_format.read_columns(path)
    with damage_is_named(str(path)):
        return step_format.from_columns(columns)


def record_digest(folder: Path | str) -> str:
    """Digest of the record without clocks and memory: the same for a run that was killed and resumed."""
    folder = Path(folder)
    h = hashlib.blake2b(digest_size=32)
    for _, data in files.read_lines(folder / "steps.jsonl"):
        h.update(json.dumps({k: v for k, v in data.items() if k not in MEASURED}, sort_keys=True).encode())
    for row in episode_files(folder):
        h.update(row.path.name.encode())
        # The columns and not the bytes of the file, whose compression may differ.
        for name, column in sorted(step_format.read_columns(row.path).items()):
            h.update(f"{name} {column.dtype} {column.shape}".encode())
            h.update(column.tobytes())
    return h.hexdigest()
