"""The lineage of weights: the models, data and code that they come from, as run.json and lineage.json record them.

A lineage is a list of links, from the base model over earlier runs to this run. This file makes the link of a run,
checks that it fits the links before it, and removes the paths of this machine from names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.build.request.branch import run_source
from posttrain.config.env import Env
from posttrain.config.run import Run
from posttrain.config.stages.stage import Stage, starts
from posttrain.core.abilities import declared
from posttrain.core.ports import Environment
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.record import provenance
from posttrain.record.certificate import LINEAGE
from posttrain.record.checkpoint import Checkpoint, find, scan
from posttrain.record.lineage import SCHEMA, LineageLink, chain, check_links, lineage_data, links_from, read_lineage
from posttrain.record.run_reader import RunFile, is_run, run_file, steps
from posttrain.record.runtime_objects import file_digest, object_of
from posttrain.system import files
from posttrain.system.dataclass_json import to_plain
from posttrain.system.errors import DataError, PosttrainError, RunFolderError
from posttrain.system.version import VERSION

if TYPE_CHECKING:
    from posttrain.engine.model.policy_model import Policy

PLACE = re.compile(r"(?<![\w.:/<~-])(?:~[\w-]*/|/)(?:[^\s/\"'`,;:|\\)\]]+/)+[^\s/\"'`,;:|\\)\]]*")
"""An absolute path, or one below a home folder, of two parts or more: /opt/r.py, ~/data/mine.jsonl."""
CHECKPOINT = re.compile(r"\d+-(?P<stage>[\w-]+)-(?P<step>\d+)")
"""The name of a checkpoint, from the version of the weights, the stage and the step: 00000120-rl-000040."""


def stage_of(run: Run, checkpoint: Checkpoint) -> tuple[Stage, int | None]:
    """(the stage that the weights of a checkpoint come from, the step after which they were saved; None: its end)."""
    # The name of a checkpoint inside a stage has stage and step: 00000120-rl-000040. At the end of a stage the step is
    # 0. Then the number of finished stages tells whose weights they are: those of the last stage that handed its
    # weights on.
    parts_of_name = CHECKPOINT.fullmatch(checkpoint.name)
    stage = next((s for s in run.stages if parts_of_name and s.name == parts_of_name["stage"]), run.stages[-1])
    step = int(parts_of_name["step"]) if parts_of_name else 0
    if step and stage.hands_on:
        return stage, step
    done: Any = checkpoint.state.get("stage")  # the number of finished stages
    if not isinstance(done, int):
        raise RunFolderError(f"checkpoint {checkpoint.name}: its state.json does not say how many stages were done")
    last = next((s for s in reversed(run.stages[: max(0, done)]) if s.hands_on), None)
    return (stage, 0) if last is None else (last, None)


def stages_to(run: Run, last: Stage) -> list[Stage]:
    """The stages that made the weights, first to last."""
    line, stage = [last], last
    # Found backwards, since a stage need not start from the stage before it.
    while (start := starts(run.stages, stage)) in {s.name for s in run.stages}:
        stage = run.stage(start)
        line.append(stage)
    return line[::-1]


def local_names(text: str) -> str:
    """The text with each absolute path of this machine, and each path below a home folder, as its last part.

    >>> local_names("/home/me/data/mine.jsonl, /opt/r.py:right, runs/x, </think>, https://host/a/b")
    'mine.jsonl, r.py:right, runs/x, </think>, https://host/a/b'
    """
    return PLACE.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


BEGAN = "began_with"
"""The entry of run.json with the links before the run, and digests of the model, data and code with which it began."""
MOST_SESSIONS = 1000
"""Most sessions that lineage.json keeps."""


def parents(run: Run) -> tuple[LineageLink, ...]:
    """The links of the model with which a run begins, if it is a run folder or a directory with lineage.json; else ().

    Raises:
        RunFolderError, DataError: the record there is damaged, or its links do not fit each other.
    """
    if run.model.path is None:
        return ()
    source = run_source(run.model.path)
    return read_lineage(Path(run.model.path).expanduser()) if source is None else lineage_of(source[0], find(*source))


def began_with(run: Run, policy: Policy, environments: Mapping[str, Environment]) -> dict[str, Any]:
    """Returns the entry `BEGAN` of run.json: what a run began with.

    Args:
        environments: by the names of the stages.

    Raises:
        DataError: the model's weights are not those that its lineage names.
    """
    from posttrain.engine.files.fingerprint import fingerprint
    from posttrain.engine.model.policy_model import base_digest, named_tensors

    weights = fingerprint(policy.numbers(named_tensors(policy.module)))
    facts: dict[str, Any] = {
        "weights": weights,
        # Frozen weights as their files hold them, before they are rounded to few bits.
        "base": policy.rounded_from or (base_digest(policy) if policy.lora is not None else ""),
        "dtype": run.model.dtype,
        "data": {name: tasks_digest(e) for name, e in environments.items()},
        "code": {s.name: code_digests(run.env_of(s)) for s in run.stages},
    }
    shared: dict[str, Any] = {
        "tokenizer": policy.tokenizer_digest,
        "template": policy.template_digest,
        "dtype": run.model.dtype,
    }
    links = parents(run) or _bases(run, facts, shared)
    check_links((*links, LineageLink(kind="run", name="(new)", began=weights, base=facts["base"], **shared)))
    return {BEGAN: {"links": chain(links), **facts}}


def _bases(run: Run, facts: Mapping[str, Any], shared: Mapping[str, Any]) -> tuple[LineageLink, ...]:
    """The links of a model without lineage: a base model, and an adapter over it where the model is one.

    `shared`: the fields that all these links have alike: tokenizer, template and dtype.
    """
    path = run.model.path
    if path is None:
        name = f"built: {run.model.arch}, random weights of seed {run.seed}"
        return (LineageLink(kind="base", name=name, weights=facts["base"] or facts["weights"], **shared),)
    saved = saved_adapter(path)
    base = LineageLink(
        kind="base",
        name=_model_name(path if saved is None else saved.base),
        weights=facts["base"] or facts["weights"],
        **shared,
    )
    if saved is None:
        return (base,)
    adapter = LineageLink(
        kind="adapter", name=_model_name(path), weights=facts["weights"], began=facts["base"], **shared
    )
    return base, adapter


def _model_name(path: str) -> str:
    """A hub id as it is, a directory by its last part."""
    return Path(path).expanduser().resolve().name if Path(path).expanduser().is_dir() else local_names(path)


def tasks_digest(environment: Environment, info: bool = False) -> str:
    """Digest of the tasks of an environment: all rows of the user's data, and the held-out tasks. `info`: include their
    other columns.

    Raises:
        DataError: a held-out task has an answer or info that JSON cannot have.
    """
    h = hashlib.blake2b(digest_size=16)
    rows: Any = declared(environment).rows or ()
    for row in rows:
        # Each row in a fixed form (`_text`), so that the digest is the same in every process and on every machine.
        h.update(_text((row.task.prompt, row.task.answer, row.completion)))
        if row.judged is not None:
            h.update(_text(row.judged))
        h.update(_text(row.task.info) if info else b"")
    for task in environment.heldout:
        try:
            h.update(_text((task.id, task.prompt, task.answer)))
            h.update(_text(task.info) if info else b"")
        except TypeError as error:
            # Rows are JSON already. Tasks of the user's own environment may have other keys, such as (row, column).
            raise DataError(
                f"task {task.id!r}: its answer and info are recorded as JSON, which has texts alone as keys ({error})."
                " Write them as texts"
            ) from error
    return h.hexdigest()


def _text(value: Any) -> bytes:
    """A line of JSON that is the same for equal values in every process."""
    return json.dumps(value, sort_keys=True, default=_same_each_time).encode(errors="surrogatepass") + b"\n"


def _same_each_time(value: Any) -> Any:
    """A form of a value that JSON does not have, without memory addresses and without the order of a set."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, cast("set[Any]", value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def code_digests(env: Env) -> dict[str, str]:
    """Digests of the user's Python files that an environment names, by the names of the files without folders."""
    out: dict[str, str] = {}
    for name in (env.name, *(r.function for r in env.rewards)):
        path = Path(name.rpartition(":")[0]).expanduser()
        if path.suffix == ".py" and path.is_file():
            out[path.name] = file_digest(path)
    return out


def lineage_of(folder: Path, checkpoint: Checkpoint | None = None) -> tuple[LineageLink, ...]:
    """The verified links up to a checkpoint of a run. None: up to the run itself, which has no checkpoint yet.
    RunFolderError where a record was changed, a parent is not what it was, or links do not fit."""
    file = run_file(folder)
    facts = object_of(file.facts.get(BEGAN))
    if BEGAN in file.edited:
        raise RunFolderError(
            f"{folder}/run.json: its entry {BEGAN} was changed after it was written, so it is not known what this run"
            " began with. Take a copy of the folder that was not changed"
        )
    shared: dict[str, Any] = {n: str(file.facts.get(f"{n}_digest") or "") for n in ("tokenizer", "template")}
    shared["dtype"] = file.run.model.dtype
    links = links_from(facts.get("links", []), f"{folder}/run.json, {BEGAN}", RunFolderError)
    if not links:  # an older version began it
        links = (LineageLink(kind="base", name=_model_name(file.run.model.path or "built")),)
    _same_as_written(folder, links)
    _check_parent(folder, file)
    run_link = LineageLink(
        kind="run",
        name=str(file.identity or ""),
        weights="" if checkpoint is None else str(checkpoint.state.get("weights") or ""),
        began=str(facts.get("weights") or ""),
        base=str(facts.get("base") or ""),
        about=_about(folder, file, facts, checkpoint),
        **shared,
    )
    check_links((*links, run_link), RunFolderError)
    return (*links, run_link)


def _about(folder: Path, file: RunFile, facts: Mapping[str, Any], checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What the link of a run says about it: its stages, changes of settings, sessions."""
    run, record = file.run, steps(folder)
    last, step = (run.stages[-1], None) if checkpoint is None else stage_of(run, checkpoint)
    taken = {s.name: max((x.index for x in record if x.stage == s.name), default=0) for s in run.stages}
    if step is not None:
        # The record may also have steps that were taken after this checkpoint.
        taken[last.name] = min(taken[last.name], step)
    rows = [_stage(run, s, taken[s.name], facts) for s in stages_to(run, last)]
    history: Any = file.facts.get("history")
    changes = [object_of(x) for x in cast("list[Any]", history)] if isinstance(history, list) else []
    versions = object_of(file.facts.get("versions"))
    about: dict[str, Any] = {
        "recipe": run.recipe,
        "posttrain": str(versions.get("posttrain") or ""),
        "checkpoint": "" if checkpoint is None else checkpoint.name,
        "version": None if checkpoint is None else checkpoint.state.get("version"),
        "stages": rows,
        "changes": [{k: x.get(k) for k in ("stage", "step", "changed")} for x in changes],
        "sessions": len(sessions(folder)),
    }
    return {**about, "adapter": to_plain(run.model.lora)} if run.model.lora is not None else about


def _stage(run: Run, stage: Stage, taken: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the link of a run says about one of its stages."""
    env = run.env_of(stage)
    settings_digest = hashlib.blake2b(_text(to_plain(env)), digest_size=16).hexdigest()
    return {
        "name": stage.name,
        "kind": type(stage).__name__,
        "start": starts(run.stages, stage),
        "steps": taken,
        "algorithm": stage.algorithm_name,
        "environment": local_names(env.name),
        "environment_digest": settings_digest,
        "data_digest": str(object_of(facts.get("data")).get(stage.name) or ""),
        "code": object_of(object_of(facts.get("code")).get(stage.name)),
    }


def _same_as_written(folder: Path, links: Iterable[LineageLink]) -> None:
    """RunFolderError where lineage.json of the folder has other links before the run than run.json."""
    data = lineage_data(folder, RunFolderError)
    if data is None:
        return
    written = links_from(data.get("links"), str(folder / LINEAGE), RunFolderError)
    # Its last link is this run's own.
    if written[:-1] != tuple(links):
        raise RunFolderError(
            f"{folder / LINEAGE} names other models before this run than run.json does. Remove it: it is written anew"
            " from run.json when the run goes on"
        )


def _check_parent(folder: Path, file: RunFile) -> None:
    """Raises RunFolderError if the run with which this one began is still there, and its checkpoint has changed.

    Only for a run that this user made on this machine, because the other folder is outside this one.
    """
    origin = object_of(file.facts.get("branched_from"))
    if not origin or provenance.recall(file.identity) is None or not is_run(str(origin.get("run"))):
        return
    parent = Path(str(origin["run"]))
    try:
        parent_file = run_file(parent)
        parent_checkpoint = next((c for c in scan(parent) if c.name == origin.get("checkpoint")), None)
    except (PosttrainError, OSError):
        # The other run is damaged or cannot be read. This folder has all that it needs, so that is no error here.
        return
    if parent_file.identity != origin.get("identity") or parent_checkpoint is None:
        return
    then, now = origin.get("weights"), parent_checkpoint.state.get("weights")
    if then and now and then != now:
        raise RunFolderError(
            f"{folder} began with checkpoint {parent_checkpoint.name} of {parent}, whose weights were {then} then and"
            f" are {now} now: one of the two is not what its record says. Put that checkpoint back as it was, or move"
            f" that run away: {folder} has all that it needs itself"
        )


def sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions of a run: for each the checkpoint from which it went on, and the version of posttrain."""
    rows: Any = (lineage_data(folder, RunFolderError) or {}).get("sessions")
    return [object_of(x) for x in cast("list[Any]", rows)][:MOST_SESSIONS] if isinstance(rows, list) else []


def write_lineage(folder: Path, begun_from: str | None = None) -> None:
    """Write lineage.json of a run folder anew, up to its last checkpoint.

    Args:
        begun_from: set where a session begins now: the name of the checkpoint from which it goes on, '' without one.
    """
    session_rows = sessions(folder)
    if begun_from is not None:
        # Only the newest are kept, so that the file of a run that is resumed very often does not grow for ever.
        session_rows = [*session_rows, {"from": begun_from, "posttrain": VERSION}][-MOST_SESSIONS:]
    readable = scan(folder)
    links = lineage_of(folder, readable[-1] if readable else None)
    files.write_json(folder / LINEAGE, {"schema": SCHEMA, "links": chain(links), "sessions": session_rows})


def write_exported(folder: Path, links: Iterable[LineageLink]) -> None:
    """Write lineage.json of an exported model."""
    data = json.dumps({"schema": SCHEMA, "links": chain(tuple(links))}, indent=1)
    (folder / LINEAGE).write_text(f"{data}\n", encoding="utf-8")
