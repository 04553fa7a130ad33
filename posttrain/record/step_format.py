"""The format of the record: a `Step` is one JSON object, the episodes of a step are columns. No pickle is used.

Columns of an episode file, N tokens of all segments one after another:

    ids int32 [N], mask bool [N], logp float32 [N], version int32 [N], advantage float64 [N] (NaN: none)
    length int64 [segments]
    kept_length int64 [spoken tokens of truncated segments], kept_ids int32
    top_ids int32, top_logp float32 [spoken tokens x K of segments that store their K most probable tokens, one after
        another]
    in_turn int32 [spoken tokens of segments whose sampling reads it]: position of each in its turn
    routed int16 [tokens x R x K of segments with router choices, one after another], routed_shape int64 [3 x segments]:
        tokens, R and K of each, 0 0 0 of one without (`core.exchange.expert_choices`); both only where some segment has
        them
    meta uint8: UTF-8 JSON with tasks, samplings and one object per episode
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from posttrain.core.content import ContentPart, content_of
from posttrain.core.exchange.other_seats import SeatTurn
from posttrain.core.gauge import Gauge, Step
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit
from posttrain.core.types import Episode, Group, Message, Segment, Stop, Task, Top, TruncationSets
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.system import read_untrusted
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import RunFolderError

Columns = dict[str, np.ndarray]
"""The columns of an episode file, by name."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """An episode with its credit.

    `shaped` and `advantage` are None for an episode without credit: of an evaluation, or not judged. `advantage` has
    one array a segment, with one float64 a spoken token.
    """

    episode: Episode
    shaped: float | None = None
    advantage: tuple[np.ndarray, ...] | None = None
    dropped: str = ""


def of_step(credit: Credit, unjudged: Iterable[Group]) -> list[Recorded]:
    """All episodes of a training step, in the order of groups and siblings, those that were not judged too.

    A greedy answer comes after its group's siblings. Its sampling has greedy=true.
    """
    out: list[Recorded] = []
    for group in credit.groups:
        credited = {c.episode.sibling: c for c in group.episodes}
        # An episode that was not judged has no credit, and stands at its place in the group too.
        for episode in group.group.episodes:
            c = credited.get(episode.sibling)
            out.append(Recorded(episode) if c is None else Recorded(episode, c.shaped, c.advantage, c.dropped))
        out += [Recorded(e) for e in (group.group.greedy,) if e is not None]
    return out + of_groups(unjudged)


def of_groups(groups: Iterable[Group]) -> list[Recorded]:
    """Episodes without credit."""
    return [Recorded(episode) for group in groups for episode in group.episodes]


# --- steps -----------------------------------------------------------------------------------------------------------


def _number(x: float) -> float | str:
    """A number for JSON. JSON has no infinities and NaN, so these are written as text, which `float` reads."""
    x = float(x)
    return x if np.isfinite(x) else repr(x)


def step_to_plain(step: Step) -> dict[str, Any]:
    return {
        "stage": step.stage,
        "index": step.index,
        "version": step.version,
        "gauges": {name: [_number(g.sum), _number(g.count)] for name, g in step.gauges.items()},
        "clock": {name: _number(x) for name, x in step.clock.items()},
        "memory": {name: _number(x) for name, x in step.memory.items()},
        "notes": list(step.notes),
    }


def step_from_plain(data: Mapping[str, Any]) -> Step:
    return Step(
        stage=data["stage"],
        index=data["index"],
        version=data["version"],
        gauges={name: Gauge(float(total), float(count)) for name, (total, count) in data["gauges"].items()},
        clock={name: float(x) for name, x in data["clock"].items()},
        notes=tuple(data["notes"]),
        memory={name: float(x) for name, x in data.get("memory", {}).items()},
    )


# --- episodes --------------------------------------------------------------------------------------------------------


def _as_plain(value: object) -> Any:
    """A value of a task that JSON does not have. Parts of messages and numpy arrays become plain data, anything else
    text without memory addresses."""
    if isinstance(value, ContentPart):
        return value.plain()
    if isinstance(value, np.ndarray | np.generic):
        return cast("Any", value).tolist()
    # Addresses in memory differ from run to run, and the record of equal runs is equal.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _task(task: Task) -> dict[str, Any]:
    written = {"id": task.id, "prompt": task.prompt, "answer": task.answer, "info": dict(task.info)}
    return written | {"tools": list(task.tools)} if task.tools else written


def _verdict(j: Judged) -> dict[str, Any]:
    v = j.verdict
    return {
        "source": j.source,
        "weight": j.weight,
        "state": v.state,
        "score": v.score,
        "kind": v.kind,
        "why": v.why,
        "end": j.end,
        "paid": j.paid,
        "resolution": j.resolution,
        **({"measured": True} if j.measured else {}),
        # Written only where `verdict_from_plain` would else read another value.
        **({"by_model": j.by_model} if j.by_model or j.resolution > RESOLUTION else {}),
    }


def verdict_from_plain(v: Mapping[str, Any]) -> Judged:
    verdict = Verdict(State(v["state"]), v["score"], v["kind"], v["why"])
    resolution = v.get("resolution", RESOLUTION)
    # Without the entry `by_model`, a score with a coarse resolution is a model's: verifiers have none.
    more = (v.get("paid", False), resolution, v.get("measured", False), v.get("by_model", resolution > RESOLUTION))
    return Judged(v["source"], v["weight"], verdict, v["end"], *more)


def to_columns(records: Sequence[Recorded]) -> Columns:
    """The columns of these episodes, as `from_columns` reads them."""
    tasks: dict[int, int] = {}
    samplings: dict[Sampling, int] = {}
    all_tasks: list[dict[str, Any]] = []
    segments: list[Segment] = []
    advantages: list[np.ndarray] = []
    metas: list[dict[str, Any]] = []
    for r in records:
        e = r.episode
        # By identity: siblings share one task object, which is written once.
        if id(e.task) not in tasks:
            tasks[id(e.task)] = len(all_tasks)
            all_tasks.append(_task(e.task))
        for i, s in enumerate(e.segments):
            advantage = np.full(len(s.ids), np.nan)
            # NaN at tokens that the policy did not say, so that columns of all tokens stay aligned.
            if r.advantage is not None:
                advantage[s.mask] = r.advantage[i]
            segments.append(s)
            advantages.append(advantage)
        metas.append(
            {
                "task": tasks[id(e.task)],
                "visit": e.visit,
                "sibling": e.sibling,
                "stop": e.stop,
                # For each segment the number of its sampling contract, counted from 0. Equal contracts have one number.
                "samplings": [samplings.setdefault(s.sampling, len(samplings)) for s in e.segments],
                "verdicts": [_verdict(j) for j in e.verdicts],
                "reward": e.reward,
                "shaped": r.shaped,
                "credited": r.advantage is not None,
                "dropped": r.dropped,
                "text": e.text,
                "error": e.error,
                "state": e.state,
                "turns": list(e.turns),
                # Entries that hold for few episodes are written only there.
                **({"cut": True} if e.cut else {}),
                **({"seats": [asdict(t) for t in e.seats]} if e.seats else {}),
                **({"figure": e.figure} if any(j.measured for j in e.verdicts) else {}),
                **({"right_at": e.right_at} if e.right_at is not None else {}),
            }
        )
    meta = {"tasks": all_tasks, "samplings": [to_plain(s) for s in samplings], "episodes": metas}
    kept = [s.kept for s in segments if s.kept is not None]
    top = [s.top for s in segments if s.top is not None]
    return {
        "ids": _join([s.ids for s in segments], np.int32),
        "mask": _join([s.mask for s in segments], np.bool_),
        "logp": _join([s.logp for s in segments], np.float32),
        "version": _join([s.version for s in segments], np.int32),
        "advantage": _join(advantages, np.float64),
        "length": np.array([len(s.ids) for s in segments], np.int64),
        # Lengths are written, since those of several segments can be joined. Offsets begin anew in each segment.
        "kept_length": _join([np.diff(k.offsets) for k in kept], np.int64),
        "kept_ids": _join([k.ids for k in kept], np.int32),
        "top_ids": _join([t.ids.ravel() for t in top], np.int32),
        "top_logp": _join([t.logp.ravel() for t in top], np.float32),
        "in_turn": _join([s.in_turn for s in segments if s.in_turn is not None], np.int32),
        "meta": np.frombuffer(json.dumps(meta, default=_as_plain).encode(), np.uint8),
        **_routed_columns(segments),
    }


def _routed_columns(segments: Sequence[Segment]) -> Columns:
    choices = [s.routed for s in segments if s.routed is not None]
    if not choices:
        return {}
    shapes = [(0, 0, 0) if s.routed is None else s.routed.shape for s in segments]
    # A segment without choices gets the shape 0, 0, 0, so that each segment has one.
    return {
        "routed": _join([r.ravel() for r in choices], np.int16),
        "routed_shape": np.array(shapes, np.int64).ravel(),
    }


def _join(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def from_columns(columns: Mapping[str, np.ndarray]) -> tuple[Recorded, ...]:
    """The episodes that `to_columns` wrote."""
    meta: dict[str, list[dict[str, Any]]] = json.loads(columns["meta"].tobytes())
    tasks: list[Task] = [_task_from_plain(t) for t in meta["tasks"]]
    samplings: list[Sampling] = [from_plain(Sampling, s) for s in meta["samplings"]]
    cut = _Cut(columns)
    out: list[Recorded] = []
    for row in meta["episodes"]:
        task_number: int = row["task"]
        contracts: list[int] = row["samplings"]
        # In the order of writing, since `cut` takes each segment from the front of what is left.
        drawn = [cut.segment(samplings[i]) for i in contracts]
        verdicts = tuple(verdict_from_plain(v) for v in row["verdicts"])
        segments = tuple(s for s, _ in drawn)
        # The fields of `Episode` from `text` to `turns`, in its order. Not every row has those of `get`.
        text_to_turns = (row["text"], row["error"], row.get("state"), tuple(row.get("turns", ())))
        seats = tuple(SeatTurn(**t) for t in row.get("seats", ()))
        episode = Episode(
            tasks[task_number],
            row["visit"],
            row["sibling"],
            segments,
            Stop(row["stop"]),
            verdicts,
            *text_to_turns,
            row.get("cut", False),
            seats,
            row.get("right_at"),
        )
        out.append(
            Recorded(episode, row["shaped"], tuple(a for _, a in drawn) if row["credited"] else None, row["dropped"])
        )
    return tuple(out)


def _task_from_plain(data: dict[str, Any]) -> Task:
    prompt = data["prompt"]
    return Task(
        data["id"],
        prompt if isinstance(prompt, str) else tuple(map(_message, prompt)),
        data["answer"],
        data["info"],
        tuple(data.get("tools", ())),
    )


def _message(written: dict[str, Any]) -> Message:
    parts = written.get("content")
    return cast("Message", written if parts is None else {**written, "content": content_of(parts)})


class _Cut:
    """Cuts the columns back into segments, front to back."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = columns
        self.used = Counter[str]()
        """How many entries of each column belong to earlier segments."""
        self.lengths = iter(columns["length"].tolist())
        self.shapes = iter(columns.get("routed_shape", np.zeros(0, np.int64)).reshape(-1, 3).tolist())
        """(tokens, R, K) of each segment; no entry at all where no segment of the file has router choices."""

    def take(self, column: str, count: int) -> np.ndarray:
        """The next entries of a column."""
        begin = self.used[column]
        self.used[column] += count
        return self.columns[column][begin : begin + count]

    def segment(self, sampling: Sampling) -> tuple[Segment, np.ndarray]:
        """The next segment and the advantages of its spoken tokens."""
        length = next(self.lengths)
        ids, mask, logp, version, advantage = (
            self.take(column, length) for column in ("ids", "mask", "logp", "version", "advantage")
        )
        spoken = int(mask.sum())
        # The sampling contract says which columns have something of this segment. The columns themselves do not say it.
        kept = self._kept(spoken) if sampling.truncated else None
        top = self._top(spoken, sampling.top) if sampling.top else None
        in_turn = self.take("in_turn", spoken) if sampling.in_turn else None
        shape = next(self.shapes, (0, 0, 0))
        routed = self.take("routed", int(np.prod(shape))).reshape(shape) if shape[0] else None
        return Segment(ids, mask, logp, version, sampling, kept, top, in_turn, routed), advantage[mask]

    def _kept(self, draws: int) -> TruncationSets:
        # Offsets begin anew at 0 in each segment.
        offsets = np.concatenate([[0], np.cumsum(self.take("kept_length", draws))]).astype(np.int64)
        return TruncationSets(offsets, self.take("kept_ids", int(offsets[-1])))

    def _top(self, draws: int, k: int) -> Top:
        ids, logp = (self.take(column, draws * k) for column in ("top_ids", "top_logp"))
        return Top(ids.reshape(draws, k), logp.reshape(draws, k))


# --- columns in a file ------------------------------------------------------------------------------------------------


def pack_columns(columns: Columns) -> bytes:
    """An .npz that numpy reads; equal columns give equal bytes, because no time of day is written."""
    out = io.BytesIO()
    # Level 1: episodes are written in every step, and higher levels take longer for little.
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in columns.items():
            entry = io.BytesIO()
            # No pickle, in which a file could carry code.
            np.lib.format.write_array(entry, column, allow_pickle=False)
            # A ZipInfo that is made by hand has a fixed date.
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, entry.getvalue())
    return out.getvalue()


DTYPES = {
    **dict.fromkeys(("ids", "version", "kept_ids", "top_ids", "in_turn"), np.dtype(np.int32)),
    **dict.fromkeys(("length", "kept_length", "routed_shape"), np.dtype(np.int64)),
    "routed": np.dtype(np.int16),
    **dict.fromkeys(("logp", "top_logp"), np.dtype(np.float32)),
    "mask": np.dtype(np.bool_),
    "advantage": np.dtype(np.float64),
    "meta": np.dtype(np.uint8),
}
"""Column -> its type. A file that holds anything else was not written by `pack_columns`."""
UNQUESTIONED = 256 << 20
"""Bytes to which a file of any size may inflate."""
MOST_INFLATED = 200
"""Above `UNQUESTIONED`: most inflated bytes for each byte of the file. Real steps of that size inflate to a few."""


def read_columns(path: Path) -> Columns:
    """The columns of a file. Sizes, types and shapes are checked before anything is inflated.

    Raises:
        RunFolderError: the file is missing or damaged, or would inflate to more than a step can have.
    """
    if not os.path.lexists(path):
        raise RunFolderError(f"{path} is missing")
    try:
        # Opened once, so that what is measured is what is read.
        with read_untrusted.opened(path, RunFolderError) as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            # Two entries of one name would hide one behind the other.
            if len(entries) != len(archive.infolist()) or not entries.keys() <= DTYPES.keys():
                raise RunFolderError(f"{path} is damaged: it holds other columns than an episode file does")
            total = sum(info.file_size for info in entries.values())
            # A small file that claims to inflate to a huge one is an attack. The first bound lets any file inflate that
            # far, and the second one keeps large steps readable.
            if total > UNQUESTIONED and total > MOST_INFLATED * size:
                raise RunFolderError(
                    f"{path} is damaged: its {size:,} bytes claim to hold {total:,}, which no step does"
                )
            return {name: _column(archive, info, DTYPES[name]) for name, info in entries.items()}
    # Everything that a damaged archive raises in zipfile, zlib and numpy.
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        RuntimeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _column(archive: zipfile.ZipFile, info: zipfile.ZipInfo, wanted: np.dtype[Any]) -> np.ndarray:
    """One column, one-dimensional and of its type. ValueError where its header has another type or shape, or does not
    fit its size."""
    with archive.open(info) as entry:
        # Headers of other versions are longer and parsed by other code.
        if np.lib.format.read_magic(entry) != (1, 0):
            raise ValueError(f"{info.filename} has another version than 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
        if (
            dtype != wanted
            or len(shape) != 1
            or shape[0] < 0
            # Header and numbers must fill the entry exactly. So nothing larger than the entry is allocated.
            or entry.tell() + shape[0] * dtype.itemsize != info.file_size
        ):
            raise ValueError(f"{info.filename} of {info.file_size:,} bytes says it is {dtype} {shape}")
        data = entry.read()
    # The size in the archive's directory may be wrong, so the bytes that were read are counted.
    if len(data) != shape[0] * dtype.itemsize:
        raise ValueError(f"{info.filename} ends early")
    return np.frombuffer(data, dtype)
