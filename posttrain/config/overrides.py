"""Dotted overrides: `apply(run, ["rl.prompts=64", "algorithm=dapo", "clip.high=0.3"])` returns a changed Run.

A path begins with the name of a stage (`rl.steps=50`). The stage may be left out where exactly one stage has the
setting (`prompts=64`). For choices of an algorithm `algorithm` may be left out too (`clip.high=0.3`). All overrides of
one call are applied together and validated once, so their order does not matter. Changes inside an algorithm become the
last patch of its lineage, so the run records what its user changed.

Values are `none`, `true`, `false`, numbers, text, and lists with commas. A piece is named by its type in lower case and
gets its defaults (`baseline=others`, `pull=kl`, `shape=signed,overlong`). `STAGE=none` leaves a stage out (`sft=none`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from posttrain.config.env import Env
from posttrain.config.model_settings import Lora
from posttrain.config.run import Model, Run
from posttrain.config.stages.reinforce import Replay
from posttrain.config.stages.rejection import Regenerate, RejectionMethod, named_method
from posttrain.config.stages.stage import Optimizer, Stage
from posttrain.config.trl_names import our_name
from posttrain.config.values import read
from posttrain.ladder.algorithm import Algorithm, choices, differences, patch
from posttrain.ladder.both_ladders import LADDERS, AnyAlgorithm, algorithm_type, named_algorithm, stage_choices
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, closest, nearest

USER_PATCH = "your patch"
"""The `paper` of a patch that is made from a user's overrides."""


def fixed(cls: type) -> tuple[str, ...]:
    """Fields that the recipe decides and no override can change; of an algorithm all but its choices."""
    if cls in LADDERS:
        return tuple(n for n in dataclass_json.hints(cls) if n not in choices(cls))
    if cls is RejectionMethod:
        return ("name", "paper")
    return ("recipe", "stages") if cls is Run else ("name",) if issubclass(cls, Stage) else ()


@dataclass
class Node:
    """The overrides at one place of the tree: a word for the whole, and nodes for its parts."""

    word: str | None = None
    parts: dict[str, Node] = field(default_factory=dict[str, "Node"])

    def at(self, path: Sequence[str]) -> Node:
        """The node at a path below this one. Nodes that are missing on the way are made."""
        return self if not path else self.parts.setdefault(path[0], Node()).at(path[1:])


def apply(run: Run, overrides: Sequence[str]) -> Run:
    """The run with these overrides. ConfigError names the override, what is valid, and the nearest match."""
    root = Node()
    for text in overrides:
        key, equals, word = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ConfigError(f"{text!r} is not an override: write key=value, for example prompts=64")
        path = address(run, key, word)
        node = root.at(path)
        if node.word is not None and node.word != word:
            raise ConfigError(f"{'.'.join(path)} is given twice, as {node.word!r} and as {word!r}; keep one")
        node.word = word
    # Stages are addressed by their names, so they are taken out first. The run is built once: new stages may be valid
    # with the new fields alone.
    stage_nodes = [(s, root.parts.pop(s.name, Node())) for s in run.stages]
    stages = tuple(
        _forget_right(s, _rebuild(type(s), s, node, s.name), node)
        for s, node in stage_nodes
        if not _left_out(node, s.name)
    )
    return _forget_right(run, _fields(Run, run, root, "", stages=stages), root)


def _forget_right(old: Run | Stage, new: Any, node: Node) -> Any:
    """A changed run or stage. `env.right`, the smallest reward of a right answer, was chosen for the rewards before: it
    goes when they change, unless this call sets it."""
    set_now = node.parts.get("env", Node()).parts.get("right", Node()).word is not None
    if set_now or old.env is None or new.env is None:
        return new
    if [r.function for r in new.env.rewards] == [r.function for r in old.env.rewards]:
        return new
    return replace(new, env=replace(new.env, right=None))


def _left_out(node: Node, name: str) -> bool:
    """`sft=none` leaves a stage out."""
    out = node.word is not None and node.word.lower() == "none"
    if out and node.parts:
        raise ConfigError(f"{name}=none leaves the stage out, and {name}.{next(iter(node.parts))} changes it: keep one")
    return out


def address(run: Run, key: str, word: str = "...") -> tuple[str, ...]:
    """The full path of a shortened key: `clip.high` -> (rl, algorithm, clip, high)."""
    parts = tuple(key.split("."))
    stages = {s.name: s for s in run.stages}
    # A stage's name goes before a field of the run, and that before a setting which a single stage has.
    if parts[0] in stages:
        return (parts[0], *_inside(stages[parts[0]], parts[1:]))
    if parts[0] in dataclass_json.hints(Run):
        return parts
    paths = [(s.name, *_inside(s, parts)) for s in _meant(run, parts, word) if _has(s, parts[0])]
    if len(paths) == 1:
        return paths[0]
    if paths:
        ways = ", ".join(f"{'.'.join(p)}={word}" for p in paths)
        raise ConfigError(f"{key}={word}: {len(paths)} stages have {parts[0]!r}; say which: {ways}")
    raise ConfigError(f"{key}={word}: no such setting; {our_name(key) or _suggest(run, key)}")


def _meant(run: Run, parts: tuple[str, ...], word: str) -> tuple[Stage, ...]:
    """The stages that a key without a stage can mean. `algorithm=dapo` and `algorithm.clip.high=0.3` mean those that
    learn from reward, `algorithm=simpo` those that learn from preferences."""
    if parts[0] != "algorithm":
        return run.stages
    # Stages of two ladders may be in one run. The ladder is told from the algorithm's name, or from the choice: `clip`
    # is of reward, `link` of preference. Where it is not told, those of reward are meant.
    kinds = {s.name: algorithm_type(type(s)) for s in run.stages}
    if len(parts) == 1:
        fits = [k for k, rows in LADDERS.items() if word in rows]
    else:
        fits = [k for k in LADDERS if parts[1] in choices(k)]
    meant = tuple(s for s in run.stages if kinds[s.name] in fits)
    return meant or tuple(s for s in run.stages if kinds[s.name] is Algorithm) or run.stages


def _has(stage: Stage, head: str) -> bool:
    """Returns whether a stage, or its algorithm, has a setting of this name."""
    return head in dataclass_json.hints(type(stage)) or head in stage_choices(type(stage))


def _inside(stage: Stage, parts: tuple[str, ...]) -> tuple[str, ...]:
    """A path inside a stage; `algorithm` is put before a choice of its algorithm."""
    if parts and parts[0] in stage_choices(type(stage)) and parts[0] not in dataclass_json.hints(type(stage)):
        return ("algorithm", *parts)
    return parts


def _suggest(run: Run, key: str) -> str:
    """Suggest full paths with the same last word or a close one, else the nearest path, else the first words."""
    full = [path for path, _ in surface(run)]
    ends: dict[str, list[str]] = {}
    for path in sorted(full, key=lambda p: p.count(".")):
        ends.setdefault(path.rpartition(".")[2], []).append(path)
    # Most wrong keys have the right last word and a wrong path before it.
    last = key.rpartition(".")[2]
    if last not in ends and "." in key and (close := closest(key, full)):
        return f"did you mean {close}?"
    if (close := last if last in ends else closest(last, ends)) is not None:
        shortest = list(dict.fromkeys(p for p in ends[close] if p.count(".") == ends[close][0].count(".")))
        return f"did you mean {', '.join(shortest[:6])}?"
    return f"settings begin with one of {', '.join(sorted({p.partition('.')[0] for p in full}))}"


def _env(env: Env | None, word: str) -> Env:
    """A named environment starts from its default settings; only the number of held-out tasks is kept."""
    return Env(name=word) if env is None else Env(name=word, heldout=env.heldout)


def _model(model: Model, word: str) -> Model:
    """A model that is loaded has its own context; the recipe's `context` belongs to the model it would build."""
    path = None if word == "none" else word
    # `model=none` where the model is built already changes nothing: its context stays too.
    return model if path is None and model.path is None else replace(model, path=path, context=None)


def _algorithm(current: AnyAlgorithm, word: str) -> AnyAlgorithm:
    # An algorithm of the same ladder: a stage learns from reward or from preferences.
    return named_algorithm(type(current), word)


def _number(kind: type, field: str, path: str) -> Callable[[Any, str], Any]:
    """Returns a function that builds a group of settings with its defaults, and one whole number as its `field`."""
    return lambda _, word: kind(**{field: read(int, word, path)})


def _optimizer(optimizer: Optimizer, word: str) -> Optimizer:
    return replace(optimizer, kind=read(dataclass_json.hints(Optimizer)["kind"], word, "optimizer"))


SHORT: dict[type, Callable[[Any, str], Any]] = {
    Env: _env,
    Model: _model,
    Algorithm: _algorithm,
    PreferenceAlgorithm: _algorithm,
    RejectionMethod: lambda _, word: named_method(word),
    Lora: _number(Lora, "rank", "model.lora"),
    Replay: _number(Replay, "size", "replay"),
    Regenerate: _number(Regenerate, "completions", "method.regenerate"),
    Optimizer: _optimizer,
}
"""Subtrees that one word can set: `model=PATH`, `env=NAME`, `algorithm=NAME`, `method=NAME`, `model.lora=RANK`,
`rl.replay=SIZE`, `method.regenerate=COMPLETIONS`, `optimizer=KIND`."""
BEGUN: dict[type, Any] = {Lora: Lora(), Replay: Replay(), Regenerate: Regenerate()}
"""Groups of settings that are none until one of them is set, and what they are then."""


def _rebuild(declared: Any, current: Any, node: Node, path: str) -> Any:
    """`current` with the overrides of `node`. The word for the whole is applied first, then the parts."""
    if node.word is not None:
        current = _whole(declared, current, node.word, path)
    if not node.parts:
        return current
    # `model.path=X` does what `model=X` does, so the recipe's context goes too.
    if isinstance(current, Model) and (path_word := node.parts.get("path", Node()).word) is not None:
        current = _model(current, path_word)
    # Before the case of a dataclass, which an algorithm is too: a change of it becomes a patch with a lineage.
    if isinstance(current, AnyAlgorithm):
        return _patched(current, node, path)
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        return _fields(declared, current, node, path)
    if isinstance(current, Mapping):
        return _mapping(declared, cast("Mapping[str, Any]", current), node, path)
    if isinstance(current, tuple):
        return _elements(declared, cast("tuple[Any, ...]", current), node, path)
    name = next(iter(node.parts))
    begun = next((BEGUN[m] for m in dataclass_json.members(declared) if m in BEGUN), None)
    # `model.lora.rank=8` begins the group from its defaults.
    if current is None and begun is not None:
        return _fields(declared, begun, node, path)
    if current is None and Env in dataclass_json.members(declared):
        raise ConfigError(
            f"{path}.{name}: {path} is none, so the run's environment is used; name its own first: {path}=NAME"
        )
    if current is None and dataclass_json.pieces(declared):
        names = [n.lower() for n in dataclass_json.pieces(declared)]
        raise ConfigError(
            f"{path}.{name}: {path} is none; choose it first, for example {path}={names[0]} (valid: {', '.join(names)})"
        )
    raise ConfigError(f"{path}.{name}: {path} has no parts; it is {dataclass_json.describe(declared)}")


def _whole(declared: Any, current: Any, word: str, path: str) -> Any:
    """The value that one word gives a whole subtree."""
    cls = cast("type[Any]", type(current))
    # Where a group may be none, the word `none` says so and is no name.
    short = next((SHORT[m] for m in dataclass_json.members(declared) if m in SHORT), None)
    if short is not None and not (word.lower() == "none" and type(None) in dataclass_json.members(declared)):
        return short(current, word)
    if declared is cls and dataclasses.is_dataclass(cls):
        settings = ", ".join(f"{path}.{name}" for name in dataclass_json.hints(cls) if name not in fixed(cls))
        raise ConfigError(
            f"{path}={word}: {path} is a group of settings; set one of"
            f" {settings}{', or leave the stage out: ' + path + '=none' if issubclass(cls, Stage) else ''}"
        )
    return read(declared, word, path)


def _fields(declared: Any, current: Any, node: Node, path: str, **changes: Any) -> Any:
    """`current` with the overrides of its fields. `changes`: fields that are built already."""
    cls = cast("type[Any]", type(current))
    dot = f"{path}." if path else ""
    decided = fixed(cls)
    known = {name: hint for name, hint in dataclass_json.hints(cls).items() if name not in decided}
    for name, part in node.parts.items():
        if name in decided:
            raise ConfigError(
                f"{dot}{name}: the recipe decides this; start another recipe, or address a stage by its name"
            )
        if name not in known:
            alternatives = dataclass_json.pieces(declared).items()
            alternatives_with_it = [tag.lower() for tag, kind in alternatives if name in dataclass_json.hints(kind)]
            advice = our_name(name) or nearest(name, known)
            if issubclass(cls, Env) and name.endswith("_column"):
                advice = f"columns of your rows are renamed by {dot}args.{name}"
            if alternatives_with_it:
                advice = f"{path}={alternatives_with_it[0]} has it: set that too, or leave this out"
            raise ConfigError(f"{dot}{name}: {cls.__name__} has no such setting; {advice}")
        changes[name] = _rebuild(known[name], getattr(current, name), part, f"{dot}{name}")
    return replace(current, **changes)


def _mapping(declared: Any, current: Mapping[str, Any], node: Node, path: str) -> Mapping[str, Any]:
    item = dataclass_json.mapping_item(declared)
    return {
        **current,
        **{name: _rebuild(item, current.get(name), part, f"{path}.{name}") for name, part in node.parts.items()},
    }


def _elements(declared: Any, current: tuple[Any, ...], node: Node, path: str) -> tuple[Any, ...]:
    """Elements by position (`rewards.0.weight`) or by the name of their type (`shape.overlong.cache`)."""
    item = dataclass_json.tuple_item(declared)
    # Reversed, so that of two elements of one type the first has the name.
    names = {type(v).__name__.lower(): i for i, v in reversed(list(enumerate(current)))}
    names |= {str(i): i for i in range(len(current))}
    out = list(current)
    for name, part in node.parts.items():
        if name.lower() not in names:
            raise ConfigError(
                f"{path}.{name}: no such element; {nearest(name, names) if names else f'{path} is empty'}"
            )
        i = names[name.lower()]
        out[i] = _rebuild(item, out[i], part, f"{path}.{name}")
    return tuple(out)


def _patched(base: Any, node: Node, path: str) -> Any:
    """All changed choices of an algorithm as one patch. A user's earlier patch is merged into it; changes without
    effect are left out."""
    kind = cast("type[Any]", type(base))
    known = {name: dataclass_json.hints(kind)[name] for name in choices(kind)}
    wanted: dict[str, Any] = {}
    for name, part in node.parts.items():
        if name not in known:
            raise ConfigError(f"{path}.{name}: an algorithm has no such choice; {nearest(name, known)}")
        wanted[name] = _rebuild(known[name], getattr(base, name), part, f"{path}.{name}")
    # The user's own patch is not stacked on: its changes are made again together with the new ones, which win. An
    # override back to the published value takes the patch away.
    parent = base
    if base.paper == USER_PATCH and base.parent is not None:
        parent = base.parent
        wanted = {**{name: new for name, (_, new) in differences(parent, base).items()}, **wanted}
    changes = {name: value for name, value in wanted.items() if getattr(parent, name) != value}
    return patch(parent, f"{parent.name}+user", USER_PATCH, **changes) if changes else parent


def surface(run: Run) -> list[tuple[str, str]]:
    """Every full path that an override of this run can set, with what is valid there."""
    out = [line for s in run.stages for line in _surface(type(s), s.name)]
    return out + list(_surface(Run, ""))


def _surface(cls: type, path: str) -> Iterator[tuple[str, str]]:
    """The paths below one place of the tree, whose type is `cls`, with what is valid there."""
    for name, declared in dataclass_json.hints(cls).items():
        if name in fixed(cls):
            continue
        here = f"{path}.{name}" if path else name
        if declared in LADDERS:
            yield here, f"one of {', '.join(LADDERS[declared])}"
            yield from _surface(declared, here)
            continue
        # A word for an optimizer is its kind (`SHORT`), so the kinds are valid there and not any text.
        if declared is Optimizer:
            yield here, dataclass_json.describe(dataclass_json.hints(Optimizer)["kind"])
            yield from _surface(Optimizer, here)
            continue
        # A group has a line of its own where a single word sets (`SHORT`) or chooses it.
        set_by_word = any(m in SHORT for m in dataclass_json.members(declared))
        item = dataclass_json.tuple_item(declared)
        pieces = dataclass_json.pieces(declared if item is None else item)
        if set_by_word or not pieces or item is not None or dataclass_json.is_union(declared):
            text = "text, or none" if type(None) in dataclass_json.members(declared) else "text"
            yield here, text if set_by_word else dataclass_json.describe(declared)
        if dataclass_json.mapping_item(declared) is not None:
            yield f"{here}.NAME", dataclass_json.describe(dataclass_json.mapping_item(declared))
        for piece, sub in pieces.items():
            # Elements of a list are written by the name of their type where there are several types, else by position.
            by_name = item is not None and dataclass_json.is_union(item)
            middle = f".{piece.lower()}" if by_name else ".0" if item is not None else ""
            yield from _surface(sub, here + middle)
