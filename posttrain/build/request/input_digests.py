"""Digests of the inputs that a run reads by path, and which of them changed before a resume.

Every setting that names a file, a folder or a model counts (`Ask.reads`), with the modules beside a Python file that it
imports, and so do the tasks that the environments give. A hub id counts by its revision in the cache. What a user's
code opens by itself is not known.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, cast

from posttrain.build.request.branch import MODEL, TOKENIZER, run_source
from posttrain.build.weight_lineage import BEGAN, tasks_digest
from posttrain.config.run import Run
from posttrain.core.ports import Environment
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.model.locate_model import HUB_ID
from posttrain.record.certificate import FREE, LINEAGE, READ
from posttrain.record.checkpoint import find
from posttrain.record.external_access import Kind, asks, values
from posttrain.record.run_reader import run_file
from posttrain.record.runtime_objects import object_of
from posttrain.system import files
from posttrain.system.errors import ConfigError, RunFolderError

INPUTS = "inputs"
"""The entry of run.json about what the run began with, and of its history where a change was accepted."""
DATA = (*READ, ".arrow", ".parquet", ".jsonl", ".csv")
"""Endings of the files that count in a folder: those of a model and its tokenizer (`READ`), and those of data."""
REVISION = "revision "
"""Prefix that stands, with the revision, in place of a digest for a hub id that is in the cache."""
Digests = dict[str, dict[str, str]]
"""By the setting: the digest of each file by its name."""


def input_digests(run: Run) -> Digests:
    """Digest of every file that a run reads from outside its folder. A branch has a copy of its model there."""
    out: Digests = {}
    for ask in asks(run):
        if ask.reads and not (ask.path == "model.path" and run_source(ask.reads[0])):
            named = {file: digest for name in ask.reads for file, digest in _files(name, ask.kind)}
            out |= {ask.path: named} if named else {}
    return out


def task_digests(run: Run, environments: Mapping[str, Environment]) -> Digests:
    """Digest of the tasks of every stage. `environments`: by the names of the stages."""
    label = {s.name: run.env_of(s).prompts or run.env_of(s).name for s in run.stages}
    return {f"tasks of {name}": {label[name]: tasks_digest(e, info=True)} for name, e in environments.items()}


def _files(name: str, kind: Kind) -> Iterator[tuple[str, str]]:
    """(name, digest) of the files that are read where a setting names this file, folder or hub id."""
    path = Path(name).expanduser()
    if (source := run_source(name)) is not None:
        # A run folder has lists of digests beside its files, so a digest of these is enough.
        folder, checkpoint = source
        used = (find(folder, checkpoint).folder, folder / MODEL, folder / TOKENIZER)
        lists = [p / files.DIGESTS for p in used if (p / files.DIGESTS).is_file()]
        yield name, hashlib.blake2b(b"".join(p.read_bytes() for p in lists), digest_size=32).hexdigest()
        return
    if path.is_dir():
        model = (path / "config.json").exists() or (path / "adapter_config.json").exists()
        # A model is read from its folder's own files; a folder of data also from those below.
        paths = {f"{name}/{p.relative_to(path)}": p for p in sorted(path.glob("*" if model else "**/*")) if _counts(p)}
        yield from _digested(paths)
        if (saved := saved_adapter(path)) is not None:
            yield from _files(saved.base, kind)
    elif path.is_file():
        # Code that a file imports from beside it decides as much as its own text.
        modules = _modules(path) if kind is Kind.CODE else ()
        beside = {str(Path(name).parent / os.path.relpath(p, path.parent)): p for p in modules}
        yield from _digested({name: path, **beside})
    elif kind is Kind.OUTSIDE and HUB_ID.fullmatch(name):
        from huggingface_hub import try_to_load_from_cache

        # Only the cache is asked, never the hub: without a network the run must begin too.
        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            yield name, REVISION + Path(cached).parent.name


def _counts(path: Path) -> bool:
    """Returns whether a file of a folder is an input: `model.safetensors` and `rows.parquet` are; a certificate, a
    lineage, hidden files, and the `cache-*.arrow` that the package datasets writes there are not."""
    is_input = path.suffix in DATA and path.name not in (*FREE, LINEAGE) and not path.name.startswith((".", "cache-"))
    return is_input and path.is_file()


def _digested(paths: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    try:
        with ThreadPoolExecutor(max_workers=4) as pool:
            yield from zip(paths, pool.map(files.digest, paths.values()), strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _modules(path: Path) -> list[Path]:
    """The modules beside a Python file that it imports, and those that they import. Nothing is run."""
    finder = ModuleFinder([str(path.parent)])
    # A file that cannot be parsed counts alone. Its error is reported where the run imports it.
    with suppress(SyntaxError, ValueError, ImportError, RecursionError):
        finder.run_script(str(path))
    named: list[Any] = [getattr(m, "__file__", None) for m in finder.modules.values()]
    paths = {Path(f) for f in named if f is not None}
    return sorted(p for p in paths if p != path and p.suffix == ".py")


@dataclass(frozen=True)
class ChangedInput:
    """An input that is not as it was. `now`: the digests of all files of its setting."""

    path: str
    what: str
    now: Mapping[str, str]

    @property
    def line(self) -> str:
        return f"{self.path}: {self.what}"


def refuse_gone(folder: Path) -> None:
    """RunFolderError where a file that the run began with is not there any more. Nothing is read."""
    for path, digests in _began(run_file(folder).facts).items():
        for name, digest in digests.items():
            # A revision and a set of tasks are no files.
            local = not digest.startswith(REVISION) and not path.startswith("tasks of ")
            if local and not Path(name).expanduser().exists():
                raise RunFolderError(f"{folder}: {path} names {name}, and it is gone. Put it back where it was")


def changed_files(folder: Path, run: Run) -> list[ChangedInput]:
    """The files of a run folder's settings that changed, of those settings that are the same in `run`."""
    file = run_file(folder)
    stored, now = values(file.run), values(run)
    # A setting that is changed now names another file on purpose.
    then = {p: d for p, d in _began(file.facts).items() if p in stored and stored[p] == now.get(p)}
    # A setting whose files are all gone has no entry, and must still be compared: with nothing.
    no_files: Digests = {p: {} for p in then}
    return _differ(then, no_files | input_digests(file.run)) if then else []


def changed_tasks(folder: Path, run: Run, environments: Mapping[str, Environment]) -> list[ChangedInput]:
    """The stages whose environments give other tasks than the run of a folder began with."""
    return _differ(_began(run_file(folder).facts), task_digests(run, environments))


def _began(facts: Mapping[str, Any]) -> Digests:
    """Returns the digests that the run began with, or that were accepted since."""
    history: Any = facts.get("history")
    later = [object_of(x).get(INPUTS) for x in cast("list[Any]", history)] if isinstance(history, list) else []
    every = (object_of(facts.get(BEGAN)).get(INPUTS), *later)
    # Later entries replace earlier ones: what was accepted is what the run is compared with from then on.
    return {k: _texts(v) for entry in every for k, v in object_of(entry).items()}


def _differ(then: Digests, now: Digests) -> list[ChangedInput]:
    out: list[ChangedInput] = []
    for path in [p for p in then if p in now]:
        before, after = then[path], now[path]
        # One file of each setting is enough for a message.
        for name in [n for n in {**before, **after} if not _same(before.get(n), after.get(n))][:1]:
            change = "is gone" if name not in after else "was changed" if name in before else "was added"
            out.append(ChangedInput(path, f"{name} {change}", after))
    return out


def _same(before: str | None, after: str | None) -> bool:
    """True where two digests are equal, or where one of two revisions is not known."""
    return before == after or (None in (before, after) and (before or after or "").startswith(REVISION))


def _texts(data: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in object_of(data).items()}


def accepted(folder: Path, changed: list[ChangedInput], accept: bool) -> Digests:
    """The new digests, which the history of the run records; RunFolderError where a change was not accepted."""
    if changed and not accept:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RunFolderError(
            f"{folder} did not begin with what it would learn from now. {changed[0].line}{more} since. Put it back as"
            " it was; or add --accept-changed (from Python accept_changed=True) to go on with it, which run.json then"
            f" records; or begin a new run with the weights: model={folder}"
        )
    return {c.path: dict(c.now) for c in changed}


def input_notes(folder: Path, taken: Digests) -> Iterator[str]:
    """Lines about accepted changes, and about a folder that has no digests of its inputs."""
    for path, now in taken.items():
        yield f"note: {path}: {', '.join(now) or 'it'} is not as it was when the run was begun (accepted)"
    if INPUTS not in object_of(run_file(folder).facts.get(BEGAN)):
        yield (
            "note: an older version began this run, and its folder has no digests of the files that it reads: it cannot"
            " be told whether they changed since"
        )
