"""`posttrain run RECIPE --help`: the settings as text, as wide as the terminal. Without NAME it shows those that people
change first, `--help all` all of them, and `--help NAME` one group, one setting, or all settings below that name."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from posttrain.build.request.setting_groups import Alternative, Setting, SettingGroup, groups
from posttrain.config.field_docs import sentence
from posttrain.config.run import Run
from posttrain.ladder.algorithm import choices
from posttrain.ladder.both_ladders import LADDERS
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, closest
from posttrain.system.terminal_output import visible

LEFT = 34
"""Columns of `key = value`, with two spaces before it."""
NARROW = 60
"""Below this width the text stands on lines of its own."""
WIDEST = 120
FEW = 6
"""Choices up to this many are listed beside a setting; more are in its own help."""
ARGS = 8
"""At most so many settings of an environment are listed in its entry."""
LONGEST = 30
"""Most characters of a value. Of a longer one, such as a path, only the end is shown."""
LISTS = {c for k in LADDERS for c in choices(k) if dataclass_json.tuple_item(dataclass_json.hints(k)[c]) is not None}
"""The choices of an algorithm that are lists of pieces, such as `shape`."""


def width() -> int:
    """Columns of the terminal, but at least 30 and at most `WIDEST`."""
    return max(30, min(shutil.get_terminal_size((80, 24)).columns, WIDEST))


def settings_text(run: Run, topic: str, columns: int) -> str:
    """The text about the settings of a run that a topic names. Topic '': those that people change first."""
    all_groups = groups(run)
    name = topic.removeprefix("--").strip(".")
    if name in ("", "main"):
        return "\n".join(_main(run, all_groups, columns))
    if name == "all":
        return "\n".join([*_title(run, columns), *(line for g in all_groups for line in _group(g, columns))])
    if chosen := [g for g in all_groups if name in g.names]:
        return "\n".join(line for g in chosen for line in _group(g, columns))
    # The name may be that of a group (above), of one setting, of settings below it, or of a piece that is not in use.
    exact = [s for g in all_groups for s in g.settings if name in _names(run, s)]
    below = [s for g in all_groups for s in g.settings if any(p.startswith(f"{name}.") for p in _names(run, s))]
    if len(exact) == 1 and not below:
        return "\n".join(_whole(exact[0], columns))
    if exact or below:
        return "\n".join([*(line for s in exact for line in _whole(s, columns)), *_lines(below, columns)])
    others = [o for g in all_groups for o in g.others if name.lower() in (o.name, o.path, f"{o.path}={o.name}")]
    if others:
        return "\n".join(line for o in others for line in _alternative(o, columns, long=True))
    raise ConfigError(f"--help {name}: {_unknown(run, all_groups, name)}")


def _unknown(run: Run, all_groups: tuple[SettingGroup, ...], name: str) -> str:
    """Returns advice on the name to ask for instead."""
    paths = {p for g in all_groups for s in g.settings for p in _names(run, s)}
    # In reverse order, so that of several paths with the same last word the first in the alphabet remains.
    tails = {p.rpartition(".")[2]: p for p in sorted(paths, reverse=True)}
    tops = ", ".join(dict.fromkeys(n for g in all_groups for n in g.names if "." not in n))
    close = closest(name, paths) or tails.get(closest(name.rpartition(".")[2], tails) or "")
    return f"no setting and no group is called so; {f'did you mean {close}? ' if close else ''}groups: all, {tops}"


def _names(run: Run, s: Setting) -> list[str]:
    """Every way to write a setting's path: with STAGE, with the name of each stage, and without a stage."""
    if not s.path.startswith("STAGE."):
        head, _, below_stage = s.path.partition(".")
        return [s.path, below_stage] if below_stage and any(x.name == head for x in run.stages) else [s.path]
    below_stage = s.path.removeprefix("STAGE.")
    return [s.path, below_stage, *(f"{x.name}.{below_stage}" for x in run.stages)]


def _title(run: Run, columns: int) -> list[str]:
    text = f"settings of {visible(run.recipe)}, each given as key=value (STAGE=none leaves a stage out):"
    return _wrapped(text, columns, "")


def _main(run: Run, all_groups: tuple[SettingGroup, ...], columns: int) -> Iterator[str]:
    """The settings that people change first, in the order of `Setting.main`: those of the run, then of each stage."""
    yield from _title(run, columns)
    of_stages = {"STAGE", *(s.name for s in run.stages)}
    shared = [s for g in all_groups for s in g.settings if s.main and s.path.partition(".")[0] not in of_stages]
    yield from ("", "model, data and run")
    yield from _lines(sorted(shared, key=lambda s: s.main), columns)
    yield from _arguments(run, all_groups, columns)
    # A stage has a group of its name, and others whose titles have a colon behind it (`stage rl: sampling`).
    stage_groups = [g for g in all_groups if ":" not in g.title and g.title.startswith("stage")]
    for group in stage_groups:
        main_settings = [
            s for g in all_groups if g.title.partition(":")[0] == group.title for s in g.settings if s.main
        ]
        yield from ("", group.title)
        yield from _lines(sorted(main_settings, key=lambda s: s.main), columns)
    names = list(dict.fromkeys(n for g in all_groups for n in g.names if "." not in n))
    yield ""
    example = f"{run.stages[-1].name}.optimizer"
    more = f"more: --help=NAME shows a group ({', '.join(names)}), one setting (--help={example}), or all"
    yield from textwrap.wrap(more, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _arguments(run: Run, all_groups: tuple[SettingGroup, ...], columns: int) -> Iterator[str]:
    """The settings of the run's environment itself, in one entry."""
    arguments = [s for g in all_groups for s in g.settings if s.path.startswith("env.args.")]
    if arguments:
        names = ", ".join(
            f"{s.path.removeprefix('env.args.')}={_short(visible(s.now)) or 'none'}" for s in arguments[:ARGS]
        )
        text = f"What {visible(run.env.name)} takes: {names} (more: --help=env.args)."
        yield from _lines([Setting("env.args.NAME", (), text, "")], columns)


def _group(g: SettingGroup, columns: int) -> Iterator[str]:
    """The lines of one group, with the pieces that are not in use."""
    yield from ("", g.title)
    yield from _lines(g.settings, columns)
    if g.others:
        note = "not in use; choose one as CHOICE=PIECE, then its numbers can be set:"
        yield from ("", *_wrapped(note, columns, "  "))
        for other in g.others:
            yield from _alternative(other, columns, long=False)


def _alternative(o: Alternative, columns: int, long: bool) -> Iterator[str]:
    """A piece that is not in use, with its numbers."""
    yield from _wrapped(f"{o.path}={o.name}: {o.text}", columns, "  ", "      ")
    # The settings of an element of a list have its name in their path.
    base = f"{o.path}.{o.name}" if o.path.rpartition(".")[2] in LISTS else o.path
    if long:
        yield from _lines([Setting(f"{base}.{n.path}", n.values, n.text, n.valid) for n in o.numbers], columns)
    elif o.numbers:
        yield from _wrapped(", ".join(f"{n.path}={_short(n.now)}" for n in o.numbers), columns, "      ")


def _whole(s: Setting, columns: int) -> Iterator[str]:
    """One setting with all that is said about it."""
    yield f"{s.path} = {visible(s.now)}"
    yield from _wrapped(s.text, columns, "  ")
    if s.valid:
        yield from _wrapped(f"valid: {s.valid}", columns, "  ", "    ")


def _lines(settings: Iterable[Setting], columns: int) -> Iterator[str]:
    """One setting after another: `key = value` on the left, what it means on the right."""
    for s in settings:
        left = f"  {s.path} = {_short(visible(s.now))}"
        choices = s.valid.split(", ") if s.valid else []
        meaning = sentence(s.text)
        if 0 < len(choices) <= FEW and not all(c in meaning for c in choices):
            meaning += f" One of {s.valid}."
        if columns < NARROW:
            yield from (left, *_wrapped(meaning, columns, "      "))
            continue
        lines = _wrapped(meaning, columns, " " * LEFT)
        if len(left) <= LEFT - 2 and lines:
            lines[0] = f"{left:<{LEFT}}{lines[0].strip()}"
            yield from lines
        else:
            yield from (left, *lines)


def _wrapped(text: str, columns: int, first: str, then: str | None = None) -> list[str]:
    """Lines of at most `columns`, broken at spaces; a list without spaces after its commas. Any other word that is too
    long stays whole. `first`, `then`: what the first line and the further lines begin with."""
    then = first if then is None else then
    lines, line, empty = list[str](), first, True
    for word in text.split():
        # Only a word that is too long for a line is broken. Its parts follow each other without a space.
        parts = [word] if len(then) + len(word) <= columns else re.findall(r"[^,]*,|[^,]+", word)
        for i, part in enumerate(parts):
            gap = "" if i or empty else " "
            if not empty and len(line) + len(gap) + len(part) > columns:
                lines.append(line)
                line, gap = then, ""
            line, empty = f"{line}{gap}{part}", False
    return lines if empty else [*lines, line]


def _short(value: str) -> str:
    """A value on one line: paths below the current folder are relative, and of a long text only the end is shown."""
    relative = value.replace(f"{os.getcwd()}{os.sep}", "")
    if len(relative) <= LONGEST:
        return relative
    return ",".join(part if len(part) <= LONGEST else _end(part) for part in relative.split(","))


def _end(path: str) -> str:
    """The last parts of a path, or the last characters of another long text."""
    # 4 characters are for the `.../` before it.
    end = path[-LONGEST + 4 :]
    return f".../{end.partition('/')[2]}" if "/" in end else f"...{end}"
