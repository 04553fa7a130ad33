"""The settings of a run in groups, each with its value and its meaning, as `posttrain run RECIPE --help` prints them.
Several stages of one kind share the lines of their settings, with the value of each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from posttrain.config.env import Env, Reward
from posttrain.config.field_docs import about, meaning
from posttrain.config.overrides import SHORT, fixed
from posttrain.config.run import Model, Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.rejection import Rejection, RejectionMethod
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.environment.make import shipped_class
from posttrain.ladder.algorithm import choices
from posttrain.ladder.both_ladders import LADDERS, AnyAlgorithm, algorithm_type, stage_choices
from posttrain.ladder.formula import word
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system import dataclass_json

MAIN: dict[type, tuple[str, ...]] = {
    Run: ("model", "model.lora", "env", "env.prompts", "env.rewards", "env.heldout", "engine", "seed", "trackers"),
    Supervised: ("style", "epochs", "steps", "batch", "optimizer.lr"),
    Reinforce: (
        "algorithm",
        "steps",
        "prompts",
        "siblings",
        "optimizer.lr",
        "sampling.max_tokens",
        "sampling.temperature",
        "minibatches",
        "eval_every",
    ),
    Preference: ("algorithm", "epochs", "steps", "batch", "optimizer.lr", "beta", "eval_every"),
    Rejection: (
        *("method", "rounds", "prompts", "siblings", "epochs", "batch", "optimizer.lr"),
        *("sampling.max_tokens", "sampling.temperature", "general", "style", "eval_every"),
    ),
    RewardModel: ("judgement", "steps", "batch", "optimizer.lr", "eval_every"),
    StepLabeling: ("completions", "steps"),
}
"""The settings that people change first, of a run and of each kind of stage."""
PARTS = ("sampling", "optimizer", "algorithm", "env")
"""Settings of a stage that get a group of their own."""
SAID_ABOVE = {Model: "path", Env: "name", Reward: "function"}
"""The field of a group that the line of the group itself shows: `model=PATH` is `model.path=PATH`."""
LADDER = "an algorithm of `posttrain ladder`, or path.py:NAME of your own"


@dataclass(frozen=True)
class Setting:
    """One setting. `path` is its name in an override. With several stages of a kind it begins with the word STAGE."""

    path: str
    values: tuple[Any, ...]
    """Its value, or one for each stage of the kind, or for each reward."""
    text: str
    """Meaning of the setting: all of the text at its field."""
    valid: str
    main: int = 0
    """Its place among those that people change first; 0: not among them."""

    @property
    def now(self) -> str:
        """Its value as an override writes it. Where stages have different values, all of them."""
        words = [plain_word(v) for v in self.values]
        return words[0] if len({*words}) == 1 else ", ".join(words)


@dataclass(frozen=True)
class Alternative:
    """A piece that could be chosen and is not in use: its name, what it means, and its settings (`numbers`)."""

    path: str
    name: str
    text: str
    numbers: tuple[Setting, ...]


@dataclass(frozen=True)
class SettingGroup:
    """Settings under one title. `--help=NAME` shows the group for each NAME of `names`."""

    names: tuple[str, ...]
    title: str
    settings: tuple[Setting, ...]
    others: tuple[Alternative, ...] = ()


def plain_word(value: Any) -> str:
    """A value as an override writes it. A piece is its name alone, since its settings have lines of their own."""
    if isinstance(value, tuple):
        return ",".join(plain_word(v) for v in cast("tuple[Any, ...]", value)) or "none"
    if isinstance(value, Model):
        return value.path or "none"
    if isinstance(value, Env | AnyAlgorithm | RejectionMethod):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value.function if isinstance(value, Reward) else type(value).__name__.lower()
    return f"{value:g}" if isinstance(value, float) else word(value)


def groups(run: Run) -> tuple[SettingGroup, ...]:
    """All settings of a run: the run's own, the model, the environment, the engine and its placement, then each kind of
    stage."""
    top = [*_settings((run,), "", MAIN[Run])]
    heads = ("model", "env", "engine", "placement")
    out = [
        SettingGroup((h,), h, tuple(s for s in top if s.path.partition(".")[0] == h), tuple(_alternatives(run, h)))
        for h in heads
    ]
    # All other settings of the tree form the group `run`, which is shown first.
    rest = tuple(s for s in top if s.path.partition(".")[0] not in heads)
    out.insert(0, SettingGroup(("run", "evaluation"), "run", rest))
    for kind in dict.fromkeys(type(s) for s in run.stages):
        out += _stage_groups(tuple(s for s in run.stages if type(s) is kind))
    return tuple(out)


def _stage_groups(stages: tuple[Stage, ...]) -> Iterator[SettingGroup]:
    """The groups of all stages of one kind: the stage's own settings, then one group for each of `PARTS`."""
    kind = type(stages[0])
    names = tuple(s.name for s in stages)
    label = names[0] if len(names) == 1 else "STAGE"
    settings_of_kind = [*_settings(stages, label, MAIN.get(kind, ()))]
    title = f"{'stage' if len(names) == 1 else 'stages'} {', '.join(names)}"
    parts: dict[str, list[Setting]] = {p: [] for p in ("", *PARTS)}
    for s in settings_of_kind:
        head = s.path.split(".")[1]
        part = head if head in PARTS else "algorithm" if head in stage_choices(kind) else ""
        parts[part].append(s)
    for part, settings in parts.items():
        if settings:
            others = tuple(_other_pieces(stages, label)) if part == "algorithm" else ()
            asked = (part, *(f"{n}.{part}" for n in names)) if part else names
            yield SettingGroup(asked, f"{title}: {part}" if part else title, tuple(settings), others)


def _settings(nodes: tuple[Any, ...], path: str, main: tuple[str, ...], inside: str = "") -> Iterator[Setting]:
    """The settings below nodes of one class, such as all stages of a kind.

    Args:
        path: the name of the nodes in an override; '' for the run itself.
        main: the settings that people change first.
        inside: the same path without the stage's name, as `main` has it.
    """
    cls = type(nodes[0])
    for name, declared in dataclass_json.hints(cls).items():
        if name in fixed(cls) or SAID_ABOVE.get(cls) == name:
            continue
        here = f"{path}.{name}" if path else name
        here_inside = f"{inside}.{name}" if inside else name
        values = tuple(getattr(n, name) for n in nodes)
        if cls is Env and name == "args" and (known := [*_arguments(nodes, here)]):
            yield from known
            continue
        classes = dataclass_json.pieces(declared)
        # A field that is always the same group of settings, such as `sampling`, gets no line of its own: the lines of
        # the group's settings are enough. Where one word can set it (`model=PATH`), it has a value to show.
        only_a_group = (
            len(classes) == 1
            and not dataclass_json.is_union(declared)
            and not any(m in SHORT for m in dataclass_json.members(declared))
        )
        if not only_a_group:
            yield Setting(
                here,
                values,
                _text(cls, name, declared),
                _valid(declared),
                main.index(here_inside) + 1 if here_inside in main else 0,
            )
        yield from _below(values, here, main, here_inside)


def _arguments(nodes: tuple[Env, ...], path: str) -> Iterator[Setting]:
    """Yields the arguments that a shipped environment takes, from its fields. Those of another environment are not
    known without running it: then only the arguments that are set get lines."""
    environment_class = shipped_class(nodes[0].name) if len({n.name for n in nodes}) == 1 else None
    if environment_class is None:
        return
    defaults = {f.name: f for f in dataclasses.fields(environment_class)}
    for name in environment_class.settings():
        values = tuple(n.args.get(name, _default(defaults[name])) for n in nodes)
        yield Setting(f"{path}.{name}", values, meaning(environment_class, name), "")


def _below(values: tuple[Any, ...], path: str, main: tuple[str, ...], inside: str) -> Iterator[Setting]:
    """The settings inside these values, which may be groups of settings, pieces in use, lists or mappings."""
    if isinstance(values[0], Mapping):
        for key in dict.fromkeys(k for v in values for k in cast("Mapping[str, Any]", v)):
            yield Setting(f"{path}.{key}", tuple(v[key] for v in values if key in v), "", "")
        return
    first: Any = values[0]
    if isinstance(first, tuple):
        # The lists of several stages may differ in length and in types, so their elements share no lines.
        if len(values) > 1:
            return
        elements = cast("tuple[Any, ...]", first)
        kinds = {type(x) for x in elements}
        if kinds == {Reward}:
            yield from _settings(elements, f"{path}.{'0' if len(elements) == 1 else 'N'}", main, inside)
        elif all(dataclasses.is_dataclass(x) for x in elements) and not any(isinstance(x, Stage) for x in elements):
            for x in elements:
                yield from _settings((x,), f"{path}.{type(x).__name__.lower()}", main, inside)
        return
    # Stages that chose different pieces have no setting of them in common.
    if len({type(v) for v in values}) == 1 and dataclasses.is_dataclass(values[0]):
        # The choices of an algorithm are named without the word `algorithm`, such as `rl.clip.high`.
        short = path.rpartition(".")[0] if isinstance(values[0], AnyAlgorithm) else path
        yield from _settings(values, short, main, inside)


def _text(cls: type, name: str, declared: Any) -> str:
    """The meaning of a setting, in words."""
    if declared is PreferenceAlgorithm:
        return f"How judgements become a loss: {LADDER}."
    if declared in LADDERS:
        return f"How credit and loss are computed: {LADDER}."
    if declared is Model:
        return meaning(Model, "path")
    if declared is Env:
        return meaning(Env, "name")
    return meaning(cls, name)


def _valid(declared: Any) -> str:
    """The valid values of a setting as text: the names of its choices and pieces; '' where it has none."""
    if declared in LADDERS or any(m in SHORT for m in dataclass_json.members(declared)):
        return ""
    item = dataclass_json.tuple_item(declared)
    classes = dataclass_json.pieces(declared if item is None else item)
    names = [n.lower() for n in classes if classes[n] is not Reward]
    names += [str(c) for c in dataclass_json.choices(declared if item is None else item)]
    if type(None) in dataclass_json.members(declared) and names:
        names.append("none")
    return ", ".join(names)


def _alternatives(run: Run, head: str) -> Iterator[Alternative]:
    """The other classes of a choice of the run, such as the other engine."""
    declared = dataclass_json.hints(Run)[head]
    if dataclass_json.is_union(declared) and not any(m in SHORT for m in dataclass_json.members(declared)):
        yield from _unused(head, declared, {type(getattr(run, head))})


def _other_pieces(stages: tuple[Stage, ...], label: str) -> Iterator[Alternative]:
    """Every piece of an algorithm that the stages do not use, by choice."""
    kind = algorithm_type(type(stages[0]))
    algorithms: list[Any] = [getattr(s, "algorithm") for s in stages] if kind is not None else []  # noqa: B009
    for choice in choices(kind) if kind is not None else ():
        declared = dataclass_json.hints(kind)[choice]
        used = {type(p) for a in algorithms for p in a.pieces}
        item = dataclass_json.tuple_item(declared)
        yield from _unused(f"{label}.{choice}", declared if item is None else item, used)


def _unused(path: str, declared: Any, used: set[Any]) -> Iterator[Alternative]:
    """The pieces of a declared type that are not in `used`."""
    for name, cls in dataclass_json.pieces(declared).items():
        if cls not in used:
            numbers = tuple(
                Setting(f.name, (_default(f),), meaning(cls, f.name), _valid(dataclass_json.hints(cls)[f.name]))
                for f in dataclasses.fields(cls)
            )
            yield Alternative(path, name.lower(), about(cls), numbers)


def _default(f: dataclasses.Field[Any]) -> Any:
    """The default of a field; the text "(needed)" where it has none."""
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else "(needed)"
