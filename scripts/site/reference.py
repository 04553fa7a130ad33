"""The reference: every public name with its signature and docstring, read from the source by griffe without importing
anything. Which names are public is the table of `tests/public.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from scripts.site.pages import SiteError, Stage, Written

TABLE = "tests/public.py"
WIDTH = 88
"""Longest signature on one line."""


def public(root: Path) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """(group, [(module, names)]): the table of public names with the comments that divide it."""
    text = (root / TABLE).read_text(encoding="utf-8")
    tree = ast.parse(text)
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PUBLIC")
    assert isinstance(table, ast.Dict)
    lines = text.splitlines()
    groups: list[tuple[str, list[tuple[str, list[str]]]]] = []
    for key, value in zip(table.keys, table.values, strict=True):
        assert key is not None
        above = lines[key.lineno - 2].strip()
        if above.startswith("# "):
            groups.append((above[2].upper() + above[3:], []))
        groups[-1][1].append((ast.literal_eval(key), ast.literal_eval(value).split()))
    return groups


def load(root: Path) -> griffe.Module:
    """The package as griffe reads it: statically."""
    found = griffe.load("posttrain", search_paths=[root], allow_inspection=False, docstring_parser="google")
    assert isinstance(found, griffe.Module)
    return found


ORPHAN = "---\norphan: true\n---\n\n"
"""Above pages that the navigation leaves out: their index lists them, and a navigation of hundreds helps nobody."""


def write_reference(stage: Stage, write: Written) -> list[str]:
    """Writes a page for each public module and each room. Returns the lines of their index, which `api.md` ends
    with."""
    package, index = load(stage.root), [""]
    for group, modules in public(stage.root):
        index += [f"## {group}", "", "| name | what it is |", "|---|---|"]
        for module, names in modules:
            here = f"reference/{module}"
            page = stage.text(module_page(package, module, names), _file(package, module), here)
            write(here, ORPHAN + for_whom(page, MODULE.format(module=module)))
            for name in names:
                what = summary(_member(package, module, name))
                index.append(f"| [`{name}`]({module}.md#{name.lower()}) | {_cell(what)} |")
        index.append("")
    index += ["## Rooms", "", "What every module is for, room by room ([architecture](../design/architecture.md)).", ""]
    for room in sorted(
        m for m in package.modules if not package.modules[m].is_alias and package.modules[m].is_init_module
    ):
        here = f"reference/room-{room}"
        page = stage.text(room_page(package, room), f"posttrain/{room}/__init__.py", here)
        write(here, ORPHAN + for_whom(page, ROOM.format(room=room)))
        index.append(f"- [`posttrain/{room}`](room-{room}.md): {summary(package[room])}")
    return index


MODULE = (
    "For people who write programs with posttrain. After this page you can use what `{module}` offers;"
    " [all public names](api.md)."
)
ROOM = (
    "For people who read or change the code. After this page you know what each module of `posttrain/{room}` is for;"
    " [all rooms](api.md#rooms)."
)


def for_whom(page: str, said: str) -> str:
    """The page with a paragraph below its title: whom it is for, and what they can do after it."""
    title, _, rest = page.partition("\n")
    return f"{title}\n\n{said}\n{rest}"


def module_page(package: griffe.Module, module: str, names: list[str]) -> str:
    found = _at(package, module)
    lines = [f"# {module}", "", *_text(found), f"From `{_file(package, module)}`.", ""]
    for name in names:
        lines += list(_entry(name, _member(package, module, name), 2))
    return "\n".join(lines)


def room_page(package: griffe.Module, room: str) -> str:
    lines = [f"# posttrain/{room}", "", *_text(package[room])]
    lines += ["| module | what it is |", "|---|---|"]
    for path, module in sorted(_modules(package[room]), key=lambda found: found[0]):
        lines.append(f"| `{path.partition(f'{room}/')[2]}` | {_cell(summary(module))} |")
    return "\n".join(lines) + "\n"


def _modules(module: Any) -> Iterator[tuple[str, Any]]:
    for m in module.modules.values():
        if m.is_alias:
            continue
        if not m.name.startswith("__"):
            yield str(m.relative_package_filepath), m
        yield from _modules(m)


def _entry(name: str, found: Any, level: int) -> Iterator[str]:
    """A class, function or value: its signature, its docstring, and, of a class, its fields and methods."""
    yield from (f"{'#' * level} {name}", "")
    if found.is_class or found.is_function:
        yield from ("```python", signature(name, found), "```", "")
    yield from _text(found)
    if not found.is_class:
        return
    fields = [m for m in found.members.values() if m.is_attribute and _shown(m) and "property" not in m.labels]
    if fields:
        yield from ("| field | type | default | what it is |", "|---|---|---|---|")
        for m in fields:
            kind, value = _code(m.annotation), _code(m.value)
            yield f"| `{m.name}` | {kind} | {value} | {_cell(_plain(m))} |"
        yield ""
    for m in found.members.values():
        if m.is_function and _shown(m):
            yield from _entry(f"{name}.{m.name}", m, level + 1)
        elif m.is_attribute and "property" in m.labels and _shown(m):
            yield from (f"{'#' * (level + 1)} {name}.{m.name}", "", f"A property: {_code(m.annotation)}.", "")
            yield from _text(m)


def _shown(member: Any) -> bool:
    return not member.name.startswith("_") and not member.is_alias


def signature(name: str, found: Any) -> str:
    """`name(parameters) -> what it returns`, over several lines where it is long. Of a class, how it is made."""
    own = found.members.get("__init__") if found.is_class else found
    if found.is_class and own is None:
        bases = ", ".join(str(b) for b in found.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    parameters, kind = list[str](), ""
    for p in own.parameters:
        if p.name in ("self", "cls"):
            continue
        now = str(p.kind.value if p.kind else "")
        if now == "keyword-only" and kind not in ("keyword-only", "variadic positional"):
            parameters.append("*")
        if kind == "positional-only" and now != kind:
            parameters.append("/")
        kind = now
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        typed = f": {p.annotation}" if p.annotation is not None else ""
        given = "" if p.default is None or star else f"{' = ' if typed else '='}{p.default}"
        parameters.append(f"{star}{p.name}{typed}{given}")
    returns = f" -> {own.returns}" if own.returns is not None and not found.is_class else ""
    word = "class " if found.is_class else "async def " if "async" in own.labels else "def "
    line = f"{word}{name}({', '.join(parameters)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{word}{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"


def _text(found: Any) -> list[str]:
    """A docstring as Markdown: its prose, then what its sections say."""
    if found.docstring is None:
        return []
    out = list[str]()
    for section in found.docstring.parse("google", warnings=False):
        kind = section.kind.value
        if kind == "text":
            out += [prose(section.value), ""]
        elif kind in ("parameters", "attributes", "other parameters"):
            out += [f"- `{p.name}`: {_one(p.description)}" for p in section.value] + [""]
        elif kind in ("returns", "yields"):
            out += [f"{kind.capitalize()}: {_one(p.description)}" for p in section.value] + [""]
        elif kind == "raises":
            out += ["Raises:", "", *(f"- `{p.annotation}`: {_one(p.description)}" for p in section.value), ""]
        elif kind == "examples":
            out += ["```python", *(text for _, text in section.value), "```", ""]
        elif kind == "admonition":
            out += [f"{section.title}: {_one(section.value.description)}", ""]
    return out


SPECIAL = re.compile(r"(?<!\\)([*_<>|$\[\]#])")


def prose(text: str) -> str:
    """Plain text with `code` as Markdown. Indented lines stay as they are written."""
    out = list[str]()
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if all(line.startswith((" ", "\t")) for line in lines):
            out.append("```text\n" + "\n".join(lines) + "\n```")
            continue
        head = [line for line in lines if not line.startswith("    ")]
        tail = lines[len(head) :] if lines[: len(head)] == head else []
        shown = escaped("\n".join(head if tail else lines))
        out.append(shown + ("\n\n```text\n" + "\n".join(tail) + "\n```" if tail else ""))
    return "\n\n".join(out)


def escaped(text: str) -> str:
    """Signs that Markdown would read, outside of `code`, as signs."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(p if i % 2 else SPECIAL.sub(r"\\\1", p) for i, p in enumerate(parts))


def _one(text: str) -> str:
    return " ".join(escaped(text).split())


def _plain(found: Any) -> str:
    return " ".join(found.docstring.value.split()) if found.docstring is not None else ""


ABBREVIATED = re.compile(r"\b(?:al|Eq|Sec|e\.g|i\.e|cf|vs)$")
"""What a full stop follows that ends no sentence."""


def summary(found: Any) -> str:
    """The first sentence of a docstring."""
    text = _plain(found)
    for stop in re.finditer(r"\. |\.$", text):
        first = text[: stop.start()]
        if first.count("(") == first.count(")") and not ABBREVIATED.search(first):
            return escaped(first)
    return escaped(text)


def _cell(text: str) -> str:
    return text.replace("\n", " ") if "\\|" in text else escaped(text) if "\\" not in text else text


def _code(value: Any) -> str:
    """An annotation or a default in a cell of a table."""
    text = " ".join(str(value).split()) if value is not None else ""
    short = text if len(text) <= 60 else text[:57] + "..."
    return f"`{short.replace('|', chr(92) + '|')}`" if short else ""


def _at(package: griffe.Module, module: str) -> Any:
    return package[module.removeprefix("posttrain.")]


def _member(package: griffe.Module, module: str, name: str) -> Any:
    found = _at(package, module).members.get(name)
    if found is None:
        raise SiteError(f"{TABLE} names {module}.{name}, and the source has none; correct the table")
    return found


def _file(package: griffe.Module, module: str) -> str:
    found = _at(package, module)
    return f"posttrain/{found.relative_package_filepath.as_posix().removeprefix('posttrain/')}"
