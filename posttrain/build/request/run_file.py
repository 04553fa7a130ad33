"""A run as a YAML file that people edit: `posttrain run RECIPE --dry-run` writes it, `posttrain run my.yaml` reads it.

Values are read as people write them: `1e-6` is a number, `no` is a text. Reading is strict: an unknown key, a key given
twice or a value of a wrong type is an error with file and line. Aliases, tags and large files are refused. An algorithm
is written as a name, as `path.py:NAME`, as `base:` one of these with the choices that differ, or with all its choices.
`run_of` finds the run of whatever a command names: a recipe, a YAML file or `path.py:NAME`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from posttrain.build.request.algorithm_file import algorithm_of
from posttrain.build.request.trust_prompt import list_file
from posttrain.config.overrides import USER_PATCH
from posttrain.config.run import Run
from posttrain.config.stages.stage import Stage
from posttrain.ladder.algorithm import Algorithm, choices, differences, patch
from posttrain.ladder.both_ladders import LADDERS, AnyAlgorithm, algorithm_type, learns_from
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record.external_access import ask_of, code_of
from posttrain.system import dataclass_json, read_untrusted
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.user_code import named_object, user_module

LARGEST = 256 * 1024
"""Most bytes of a file."""
DEEPEST = 50
"""Deepest nesting of a file."""


class _Loader(yaml.SafeLoader):
    """Reads the scalars that JSON has, as people write them, and nothing else."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 (PyYAML's own form)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as something else."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 (PyYAML's own form)


# The forms of scalars that are no text. PyYAML looks at a scalar's first letter to find the forms that it may have. In
# the third column these letters are listed, and \0 stands for the empty scalar, which PyYAML lists under "". Both
# classes get the same forms, so that a written value is read back as the same value. Examples:
#     bool: true, False   int: 42, -7   float: 1e-6, .5, 3., -.inf, .nan   null: ~, null, and an empty scalar
for _tag, _form, _first in (
    ("bool", r"true|false|True|False", "tfTF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", r"~|null|Null|", "~nN\0"),
):
    for _class in (_Loader, _Dumper):
        _letters: Any = [*_first.replace("\0", ""), *([""] if "\0" in _first else [])]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_form})$"), _letters)

# The tags that a run may have: those that PyYAML itself gives to plain values.
_PLAIN = {f"tag:yaml.org,2002:{t}" for t in ("bool", "int", "float", "null", "str", "seq", "map")}


def to_yaml(
    run: Run,
    recipe: Run | None = None,
    reasons: Mapping[str, str] | None = None,
    own: Mapping[str, AnyAlgorithm] | None = None,
) -> str:
    """The run as YAML. Comments give the value of the `recipe` where it differs, and `reasons` by the path of an
    override. `own`: algorithms of the user's files, by their words `path.py:NAME`."""
    ladder_rows = {name: a for rows in LADDERS.values() for name, a in rows.items()}
    recipe_tree = _document(recipe, ladder_rows) if recipe is not None else None
    return "\n".join(_lines(_document(run, {**ladder_rows, **(own or {})}), recipe_tree, "", reasons or {}, ())) + "\n"


def _document(run: Run, named: Mapping[str, AnyAlgorithm]) -> dict[str, Any]:
    """The plain tree with short algorithms, and the stages by their names."""
    data = dataclass_json.to_plain(run)
    stages: dict[str, Any] = {}
    for stage, plain in zip(run.stages, data["stages"], strict=True):
        body = {k: v for k, v in plain.items() if k != "name"}
        if isinstance(algorithm := getattr(stage, "algorithm", None), AnyAlgorithm):
            body["algorithm"] = _short(algorithm, body["algorithm"], named)
        stages[stage.name] = body
    return {**data, "stages": stages}


def _short(a: Any, plain: Any, named: Mapping[str, AnyAlgorithm]) -> Any:
    """An algorithm as its name, else as `base:` with the choices that differ, else whole (`plain`)."""
    if (name := _name(a, named)) is not None:
        return name
    parent = a.parent
    # The short form is read as a change by overrides, which has this name and these words.
    if parent is None or (a.name, a.paper, a.note) != (f"{parent.name}+user", USER_PATCH, ""):
        return plain
    base = _name(parent, named)
    return plain if base is None else {"base": base, **{choice: plain[choice] for choice in differences(parent, a)}}


def _name(a: Any, named: Mapping[str, AnyAlgorithm]) -> str | None:
    """The name of an algorithm among `named`; None where none is equal to it."""
    return next((name for name, known in named.items() if known.name == a.name and known == a), None)


def _lines(
    data: dict[str, Any], base: Any, indent: str, reasons: Mapping[str, str], path: tuple[str, ...]
) -> list[str]:
    """The lines of a mapping. `base`: that of the recipe; None or ...: compared with nothing. `path`: keys above it."""
    lines: list[str] = []
    for key, value in data.items():
        before = cast("dict[str, Any]", base).get(key, ...) if isinstance(base, dict) else ...
        key_path = (*path, key)
        name = _scalar(key)
        # `{"float": "inf"}` is a number (`_finite`), and no group of settings.
        if isinstance(value, dict) and value and value.keys() != {"float"}:
            lines.append(f"{indent}{name}:")
            lines += _lines(cast("dict[str, Any]", value), before, f"{indent}  ", reasons, key_path)
        elif isinstance(value, list) and any(isinstance(x, dict) for x in cast("list[Any]", value)):
            lines.append(f"{indent}{name}:")
            for item in cast("list[Any]", value):
                # The first line of an element stands behind the dash, the others below it.
                inner = _lines(item, None, f"{indent}    ", reasons, key_path)
                lines += [f"{indent}  - {inner[0].strip()}", *inner[1:]]
        else:
            dotted = ".".join(key_path[1:] if key_path[0] == "stages" else key_path)
            comments = [f"was {_scalar(before)}"] if base is not None and before is not ... and before != value else []
            comments += [reasons[dotted]] if dotted in reasons else []
            lines.append(f"{indent}{name}: {_scalar(value)}" + (f"  # {'; '.join(comments)}" if comments else ""))
    return lines


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.dump(_finite(value), Dumper=_Dumper, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _finite(value: Any) -> Any:
    """A value with infinities and NaN as floats: the plain tree has them as `{"float": "inf"}`."""
    if isinstance(value, dict) and value.keys() == {"float"}:
        return float(cast("dict[str, str]", value)["float"])
    return [_finite(x) for x in cast("list[Any]", value)] if isinstance(value, list) else value


def from_yaml(text: bytes | str, place: str) -> Run:
    """The run that a YAML text describes; `place` names it in messages."""
    lines: dict[str, int] = {}
    data = _parse(text, place, lines)
    try:
        return _run(data)
    except ConfigError as error:
        table: Any = data.get("stages") if isinstance(data, dict) else None
        stages = [*table] if isinstance(table, dict) else []
        # An error names a stage by its number (`run.stages.0.steps`). The file has it by its name (`stages.rl.steps`).
        message = re.sub(r"^run\.stages\.(\d+)", lambda m: f"stages.{stages[int(m.group(1))]}", str(error))
        line = _line_of(message.removeprefix("run."), lines)
        raise ConfigError(f"{place}{f':{line}' if line else ''}: {message.removeprefix('run.')}") from error


def read_run(path: Path) -> Run:
    """The run of a YAML file; ConfigError where there is no such file or it describes no run."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    return from_yaml(read_untrusted.read_bytes(path, LARGEST, ConfigError), str(path))


def _run(data: Any) -> Run:
    """The run from the plain data of a file: stages become a list, short algorithms become whole ones."""
    if not isinstance(data, dict):
        raise ConfigError("a run is an object of settings; posttrain run RECIPE --dry-run writes one")
    table = cast("dict[str, Any]", data)
    stages = table.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(
            "stages: write each stage under its name; posttrain run RECIPE --dry-run writes a whole run to begin with"
        )
    listed: list[Any] = []
    # The kinds of stages by their names, as the type of `Run.stages` lists them. `build` refuses other names.
    kinds = cast(
        "dict[str, type[Stage]]", dataclass_json.pieces(dataclass_json.tuple_item(dataclass_json.hints(Run)["stages"]))
    )
    for name, body in cast("dict[str, Any]", stages).items():
        if not isinstance(body, dict):
            raise ConfigError(f"stages.{name}: the settings of a stage are wanted here")
        whole = {**cast("dict[str, Any]", body), "name": name}
        if (short := whole.get("algorithm")) is not None:
            declared = algorithm_type(kinds.get(str(whole.get(dataclass_json.TAG)), Stage)) or Algorithm
            whole["algorithm"] = dataclass_json.to_plain(_algorithm(short, f"stages.{name}.algorithm", declared))
        listed.append(whole)
    return cast("Run", dataclass_json.build(Run, {**table, "stages": listed}, "run"))


def _algorithm(data: Any, path: str, declared: type) -> Any:
    """An algorithm of the declared type, from its name, from a base with changes, or from all its choices."""
    if isinstance(data, str):
        data = {"base": data}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the name of an algorithm is wanted, or base: NAME with the choices that differ")
    table = cast("dict[str, Any]", data)
    if "base" not in table:
        return dataclass_json.build(declared, table, path)
    parent, types, names = _base(table["base"], path, declared), dataclass_json.hints(declared), choices(declared)
    for name in table:
        if name != "base" and name not in names:
            raise ConfigError(f"{path}.{name}: an algorithm has no such choice; {nearest(name, names)}")
    wanted = {n: dataclass_json.build(types[n], v, f"{path}.{n}") for n, v in table.items() if n != "base"}
    # A choice that equals the parent's is no change. Without a change the algorithm keeps the parent's name.
    changes = {n: v for n, v in wanted.items() if getattr(parent, n) != v}
    return patch(parent, f"{parent.name}+user", USER_PATCH, **changes) if changes else parent


def _base(word: Any, path: str, declared: type) -> Any:
    """The algorithm that a name or `path.py:NAME` stands for."""
    if _is_file(word):
        try:
            algorithm = algorithm_of(word)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(algorithm, declared):
            raise ConfigError(
                f"{path}: {word} learns from {learns_from(type(algorithm))}, and this stage learns from"
                f" {learns_from(declared)}: name an algorithm of that ladder"
            )
        return algorithm
    rows = LADDERS[declared]
    if word not in rows:
        raise ConfigError(f"{path}.base={word}: no such algorithm; {nearest(str(word), rows)}")
    return rows[word]


def _is_file(word: Any) -> bool:
    return isinstance(word, str) and ":" in word


def algorithm_files(path: Path) -> tuple[str, ...]:
    """The `path.py:NAME` of all algorithms that a YAML file names."""
    data = _parse(read_untrusted.read_bytes(path, LARGEST, ConfigError), str(path), {})
    stages: Any = cast("dict[str, Any]", data).get("stages") if isinstance(data, dict) else None
    bodies = list(cast("dict[str, Any]", stages).values()) if isinstance(stages, dict) else []
    short = [cast("dict[str, Any]", b).get("algorithm") for b in bodies if isinstance(b, dict)]
    words = [cast("dict[str, Any]", s).get("base") if isinstance(s, dict) else s for s in short]
    return tuple(dict.fromkeys(str(w) for w in words if _is_file(w)))


def _parse(text: bytes | str, place: str, lines: dict[str, int]) -> Any:
    """The plain data of a YAML text. `lines` is filled: the line of each path, such as `stages.rl.steps`."""
    loader: Any = None
    try:
        # Inside `try`, since making the loader already reads the first characters.
        loader = _Loader(text)
        node = loader.get_single_node()
        return _plain(loader, node, "", lines, 0, place) if node is not None else None
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"{place}:{at}: this is no YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: this is no YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{place}: nested too deeply to be a run") from None
    finally:
        if loader is not None:
            loader.dispose()


def _plain(loader: Any, node: Any, path: str, lines: dict[str, int], depth: int, place: str) -> Any:
    """The plain data of one node. `path`: its keys, joined by dots."""
    line_of_node = node.start_mark.line + 1
    # An alias gives a node a second time; with aliases of aliases a small file could stand for billions of values.
    if depth > DEEPEST or id(node) in loader.__dict__.setdefault("_met", set()):
        raise ConfigError(
            f"{place}:{line_of_node}: {'nested too deeply' if depth > DEEPEST else 'an alias; write it out'}"
        )
    loader.__dict__["_met"].add(id(node))
    # A tag such as !!python/object could ask PyYAML to make objects of Python.
    if node.tag not in _PLAIN:
        raise ConfigError(f"{place}:{line_of_node}: {node.tag} is a tag of YAML, and a run has none")
    lines.setdefault(path, line_of_node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, x, f"{path}.{i}", lines, depth + 1, place) for i, x in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _value(loader, node, f"{place}:{line_of_node}")
    out: dict[str, Any] = {}
    for key, value in node.value:
        name, line_of_key = str(key.value), key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or name in out:
            raise ConfigError(
                f"{place}:{line_of_key}: {f'{name} is given twice' if name in out else 'a key must be a word'}"
            )
        here = f"{path}.{name}" if path else name
        lines[here] = line_of_key
        out[name] = _plain(loader, value, here, lines, depth + 1, place)
    return out


def _value(loader: Any, node: Any, place: str) -> Any:
    """The value of a scalar. Whole numbers are decimal: 010 is 10, where YAML's own rule gives 8."""
    try:
        if node.tag == "tag:yaml.org,2002:int":
            return int(node.value)
        return loader.construct_object(node)
    except (ValueError, LookupError):
        what = node.tag.rpartition(":")[2]
        raise ConfigError(f"{place}: {node.value[:40]!r} cannot be read as {what}") from None


def _line_of(message: str, lines: Mapping[str, int]) -> int | None:
    """The line of the setting with which a message begins, such as `rl.optimizer.lr: ...`; None where it names none."""
    first_word = re.match(r"[\w.\-]+", message)
    stages = list(dict.fromkeys(p.split(".")[1] for p in lines if p.startswith("stages.")))
    parts = first_word.group(0).rstrip(".").split(".") if first_word else []
    if parts and parts[0] in stages:
        parts = ["stages", *parts]
    while parts:
        if (line := lines.get(".".join(parts))) is not None:
            return line
        # The file may not have this setting. Then the line of the group to which it belongs is taken.
        parts = parts[:-1]
    return None


YAML = (".yaml", ".yml")


def is_recipe(given: str | Run) -> bool:
    """True where the argument is the name of a recipe: no `Run`, no YAML file and no `path.py:NAME`."""
    return not isinstance(given, Run) and Path(given).suffix not in YAML and ":" not in given


def run_of(given: str | Run) -> Run:
    """The run of a recipe's name, a file, or the run itself."""
    if isinstance(given, Run):
        return given
    if is_recipe(given):
        return shipped(given)
    if not is_yaml(given):
        # `path.py:name`: a `Run`, or a function without arguments that returns one.
        return named_object(given, "", Run, partial(user_module, what="run"), "a Run")
    path = Path(given).expanduser()
    # The list comes first: reading the run imports these files, and imported code can do anything.
    list_file(given, [a for word in algorithm_files(path) if (a := ask_of("algorithm", code_of(word)))])
    return read_run(path)


def is_yaml(given: str | Run) -> bool:
    """True where the argument is a YAML file, which may come from elsewhere."""
    return not isinstance(given, Run) and Path(given).suffix in YAML
