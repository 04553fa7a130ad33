"""The things outside a run's folder that its settings can use: code, addresses, secrets, files and models elsewhere.

For a run folder from somebody else the user must accept these (`build.request.trust_prompt`). All fields of the tree
are classified here. `DECIDED` gives what a field asks for. `HARMLESS` names the texts and switches that use nothing
outside. Numbers use nothing outside. Pieces of an algorithm (`ladder.pieces`) have only numbers, words and switches
that their formulas read. A kind of stage classifies its own fields (`Stage.harmless`, `Stage.models`). A field without
a classification fails `tests/record/test_foreign_folders.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from posttrain.config.env import STAGE, Reward, SandboxSettings
from posttrain.config.run import Run
from posttrain.config.stages.keep_rule import Keep
from posttrain.config.stages.stage import Stage
from posttrain.ladder.pieces.link import PreferencePiece
from posttrain.ladder.pieces.piece import Piece
from posttrain.record.runtime_objects import is_inline
from posttrain.system import dataclass_json


class Kind(StrEnum):
    """The kind of thing that a field asks for."""

    CODE = "code"
    """Foreign Python code is run, or programs of a model run without a sandbox."""
    ADDRESS = "address"
    """Data is sent to a named machine."""
    SECRET = "secret"
    """The value of an environment variable is read and sent."""
    OUTSIDE = "outside"
    """Files outside the run folder are read or written, or something is fetched from the hub."""


@dataclass(frozen=True)
class Ask:
    """One thing outside the run folder that a setting uses. `path`: the setting as overrides write it; `what`: a
    sentence about what it does."""

    path: str
    kind: Kind
    what: str
    reads: tuple[str, ...] = ()
    """The files, folders and hub ids that are read there."""

    @property
    def digest(self) -> str:
        """The same for two requests of the same field for the same thing. Files are named by their full paths in it."""
        # surrogatepass: a path may have bytes that are no text.
        text = f"{self.path}\0{self.kind}\0{self.what}".encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=16).hexdigest()


Found = tuple[Kind, str] | tuple[Kind, str, tuple[str, ...]] | None
"""What a value asks for, as the last fields of `Ask`; None for nothing."""

DATA_FILES = (".jsonl", ".json", ".parquet")
"""Endings of the files that hold data."""
SHIPPED = Path(__file__).parents[1] / "recipe" / "data"
"""Folder of the prompts and rewards of the shipped recipes, a part of posttrain's own code."""


def _file(name: str) -> str:
    return str(Path(name).expanduser().resolve())


def _shipped(name: str) -> bool:
    return Path(_file(name)).is_relative_to(SHIPPED.resolve())


def code_of(name: str) -> Found:
    """Returns the access that a value `path.py:name` asks for."""
    if is_inline(name):  # an object that the user's own program hands again
        return None
    path, colon, attribute = name.rpartition(":")
    # Files of posttrain itself are as trusted as this program.
    if not colon or _shipped(path):
        return None
    return Kind.CODE, f"runs {attribute} of the Python file {_file(path)}", (path,)


def _env(name: str) -> Found:
    head, _, package = name.partition(":")
    # Tasks of reasoning-gym come from the installed package.
    if head == "gym":
        return None
    if head != "verifiers":
        return code_of(name)
    # Either a file that is run, or an installed package by its name.
    if package.endswith(".py"):
        return code_of(f"{package}:load_environment")
    return Kind.CODE, f"runs the installed Python package {package}"


def _here(name: str) -> bool:
    """Returns whether a name means a file or folder of this machine, which need not exist, and not a hub id."""
    path = Path(name).expanduser()
    # No hub id has two slashes, or the ending of a file of data. Such a name is a path, also where no file is there.
    return name.count("/") > 1 or path.exists() or path.suffix in DATA_FILES


def _model(name: str) -> Found:
    what = f"loads the model in {_file(name)}" if _here(name) else f"fetches the model {name} from the hub"
    return Kind.OUTSIDE, what, (name,)


def _data(name: str) -> Found:
    if _shipped(name) or is_inline(name):  # rows that are kept inside the folder
        return None
    what = f"reads the data in {_file(name)}" if _here(name) else f"fetches the data set {name} from the hub"
    return Kind.OUTSIDE, what, (name,)


def _mixed(sets: tuple[tuple[str, float], ...]) -> Found:
    data_sets = [asked for name, _ in sets if (asked := _data(name)) is not None]
    return (Kind.OUTSIDE, " and ".join(x[1] for x in data_sets), tuple(name for name, _ in sets)) if data_sets else None


def _sandbox(name: str) -> Found:
    if "://" in name:
        # A remote sandbox always gets the token, even if the setting of the token has its default.
        return Kind.ADDRESS, f"sends programs, and the token of the sandbox, to {name}"
    return (Kind.CODE, "runs programs that a model writes without a sandbox") if name == "none" else None


def _secret(name: str) -> Found:
    return Kind.SECRET, f"sends the value of the environment variable {name}"


def _trackers(names: tuple[str, ...], run: Run) -> Found:
    if "wandb" in names:
        # Numbers are always sent, prompts and completions only with `log_completions`.
        what = "settings, numbers, prompts and completions" if run.log_completions else "settings and numbers"
        return Kind.ADDRESS, f"sends {what} to Weights & Biases, under your account"
    return (Kind.OUTSIDE, "writes into your trackio project") if "trackio" in names else None


def _reward(name: str) -> Found:
    # `Reward` reads the name, as in a run. So what the user is asked cannot differ from what is done.
    reward = Reward(function=name)
    if reward.judge_url:
        return Kind.ADDRESS, f"sends prompts and answers to {reward.judge_url}, and believes what it answers"
    if reward.judge_run:
        return Kind.OUTSIDE, f"reads the judge in {_file(reward.judge_run)}", (reward.judge_run,)
    # A reward model that a stage of the run trains is inside the run folder.
    outside = tuple(m for m in reward.models if not m.startswith(STAGE))
    if reward.models and not outside:
        return None
    return _model(outside[0]) if len(outside) == 1 else _models(outside) if outside else code_of(name)


def _models(names: tuple[str, ...]) -> Found:
    return Kind.OUTSIDE, " and ".join(asked[1] for n in names if (asked := _model(n)) is not None), names


Decision = Callable[[Any, Any], Found]

DECIDED: dict[str, Decision] = {
    "Model.path": lambda x, _: _model(x),
    "Model.trust_remote_code": lambda x, _: (
        (Kind.CODE, "runs the Python code that comes with the model") if x else None
    ),
    "Env.name": lambda x, _: _env(x),
    "Env.args": lambda x, env: (Kind.CODE, f"is given to the environment's code as {x!r}") if _env(env.name) else None,
    "Env.prompts": lambda x, _: _data(x),
    "Env.mix": lambda x, _: _mixed(x),
    "Reward.function": lambda x, _: _reward(x),
    "Reward.meta": lambda x, _: _model(x),
    "JudgeEndpoint.rubric": lambda x, _: (
        (Kind.OUTSIDE, f"sends the text of {_file(x)} to the judge", (x,)) if x else None
    ),
    "JudgeEndpoint.key_env": lambda x, _: _secret(x),
    "SandboxSettings.name": lambda x, _: _sandbox(x),
    "SandboxSettings.token": lambda x, _: _secret(x) if x != SandboxSettings().token else None,
    "Embedded.draft": lambda x, _: _model(x),
    "VLLM.url": lambda x, _: (Kind.ADDRESS, f"sends prompts and weights to {x}, and believes what it answers"),
    "VLLM.key_env": lambda x, _: _secret(x),
    "VLLM.share": lambda x, _: (Kind.OUTSIDE, f"writes weights into {_file(x)}"),
    "Processes.folder": lambda x, _: (Kind.OUTSIDE, f"writes weights into {_file(x)}"),
    "Processes.transport": lambda x, _: (
        (Kind.ADDRESS, "sends weights to whoever connects to a port of this machine") if x == "collective" else None
    ),
    "Ray.address": lambda x, _: (Kind.ADDRESS, f"sends the model and prompts to the Ray cluster {x}, which runs code"),
    "Run.trackers": _trackers,
}
"""For each field: (its value, or an entry of a mapping; the object that has it) -> what is asked for, or None."""

HARMLESS = frozenset(
    f"{cls}.{name}"
    for cls, names in {
        # `fault` starts with --allow-fault only.
        "Run": "recipe deterministic exact record_episodes fault",
        "Reward": "combine measured steps aggregate progress",
        "Env": "measured",
        "JudgeEndpoint": "name model api answer",
        "Model": "arch compile device dtype gradient_checkpointing offload_activations offload_optimizer share_prefixes"
        " warm_up history kernels quantize router_replay",
        "Optimizer": "kind schedule rates freeze",
        "Replay": "balanced",
        "Reinforce": "unfinished",
        "Lora": "targets rslora dora",
        "Stage": "name start time_of eval hands_on",
        "Algorithm": "name paper note scale rewards whiten ratio anchor aggregate filter",
        "PreferenceAlgorithm": "name paper note rows against shift match weights",
        "RejectionMethod": "name paper distinct weights rationalise",
        "Regenerate": "separator by",
        "Sampling": "allowed_words bad_words greedy stop",
        "Evaluation": "greedy",
        "Processes": "delta",
        "Ray": "verifiers",
        "Embedded": "update sleep timeline",
        # `server` is of the installed package, on this machine alone.
        "VLLM": "eager update server",
    }.items()
    for name in names.split()
)
"""Texts, choices and switches that use nothing outside the run folder, beside those of pieces and of kinds of stage."""


def key(cls: type, name: str) -> str:
    """`Class.field`, where the class is the base class that declares the field: all that inherit it have one entry."""
    return f"{next(c for c in reversed(cls.__mro__) if name in inspect.get_annotations(c)).__name__}.{name}"


def decided(cls: type, name: str) -> Decision | None:
    """The function that says what a field of this class asks for; None for a field without a classification."""
    named = key(cls, name)
    if named in DECIDED:
        return DECIDED[named]
    stage_kind: Any = cls if issubclass(cls, Stage) else Stage  # both lists of `Stage` itself are empty
    # A field without any of these has no classification. In a foreign kind of stage it counts as code (`_asked`).
    if named in HARMLESS or issubclass(cls, (Piece, PreferencePiece, Keep)) or name in stage_kind.harmless:
        return lambda x, _: None
    return (lambda x, _: _model(x)) if name in stage_kind.models else None


def _asked(node: Any, name: str, value: Any) -> Found:
    """Returns the access that a value asks for: code, where a foreign kind of stage has not classified the field."""
    cls = cast("type[Any]", type(node))
    if value is None:
        return None
    if (says := decided(cls, name)) is not None:
        return says(value, node)
    # Numbers, and fields of classes that are not foreign, ask for nothing.
    if not issubclass(cls, Stage) or not isinstance(value, str | bool | tuple):
        return None
    return Kind.CODE, f"is given to the code of the stage kind {cls.__name__} as {value!r}"


def grave(requests: Iterable[Ask]) -> tuple[Ask, ...]:
    """Returns the requests that need the user's permission even in a run file, although people write such files: an
    address with a secret that is sent there, that of a sandbox, which always gets a token, and a model's code.
    """
    by_owner: dict[str, list[Ask]] = {}
    for ask in requests:
        # The owner is the judge, engine or sandbox to which an address and a secret belong. A judge has its address
        # in `env.rewards.0.function`, and its secret in `env.rewards.0.judge.key_env`.
        by_owner.setdefault(ask.path.rpartition(".")[0].removesuffix(".judge"), []).append(ask)
    out: list[Ask] = []
    for owner, owner_asks in by_owner.items():
        kinds = {a.kind for a in owner_asks}
        # A sandbox always gets a token, so its address alone is grave.
        if Kind.ADDRESS in kinds and (Kind.SECRET in kinds or owner.endswith("sandbox")):
            out += [a for a in owner_asks if a.kind in (Kind.ADDRESS, Kind.SECRET)]
        out += [a for a in owner_asks if a.path == "model.trust_remote_code"]
    return tuple(out)


def values(run: Run) -> dict[str, tuple[str, Any]]:
    """Every value of the tree as (`Class.field`, value), by the path that overrides use. Stages are under their names.

    The class of an object that may be of several is a value too: two pieces without settings differ in it only.
    """
    rows = (*_walk(run, ""), *_kinds(run, ""))
    return {path: (key(cast("type[Any]", type(node)), name), value) for path, node, name, value in rows}


def _kinds(node: Any, path: str) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields, in the form of `_walk`, the class name of each object whose setting allows objects of several classes."""
    for name, declared in dataclass_json.hints(cast("type[Any]", type(node))).items():
        value, field_path = getattr(node, name), f"{path}{name}"
        items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
        item = dataclass_json.tuple_item(declared) if isinstance(value, tuple) else declared
        for i, x in enumerate(items):
            if not dataclasses.is_dataclass(x):
                continue
            x_path = x.name if isinstance(x, Stage) else f"{field_path}.{i}" if isinstance(value, tuple) else field_path
            # If only one class is possible, its name says nothing.
            if not isinstance(x, Stage) and len(dataclass_json.pieces(item)) > 1:
                yield x_path, node, name, type(x).__name__
            yield from _kinds(x, f"{x_path}.")


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields (path, object, field, value) of every plain value below an object of the tree. `path`: that of the object,
    with a dot behind it; '' for the run."""
    for name in dataclass_json.hints(cast("type[Any]", type(node))):
        value, field_path = getattr(node, name), f"{path}{name}"
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{field_path}.")
        elif isinstance(value, Mapping):
            # Each entry of a mapping is a value of its own, so that each is asked about.
            yield from ((f"{field_path}.{k}", node, name, v) for k, v in cast("Mapping[str, Any]", value).items())
        elif isinstance(value, tuple) and any(dataclasses.is_dataclass(x) for x in cast("tuple[Any, ...]", value)):
            for i, x in enumerate(cast("tuple[Any, ...]", value)):
                yield from _walk(x, f"{x.name}." if isinstance(x, Stage) else f"{field_path}.{i}.")
        else:
            yield field_path, node, name, value


def ask_of(path: str, found: Found) -> Ask | None:
    """Returns the request at a field, with its path; None where there is none."""
    return None if found is None else Ask(path, found[0], found[1], *found[2:])


def asks(run: Run) -> tuple[Ask, ...]:
    """Everything the run asks for, in the order of its fields."""
    accesses = ((path, _asked(node, name, value)) for path, node, name, value in _walk(run, ""))
    return tuple(ask for path, asked in accesses if (ask := ask_of(path, asked)) is not None)
