"""`posttrain show` in the terminal: the episodes of a step below their prompts.

One episode token by token is in `token_view`, the comparison of two steps in `compare_steps`. Long text is wrapped, and
colours are used only on a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from posttrain.cli.compare_steps import compared
from posttrain.cli.screen_text import coloured, fold, folded, hanging, number, paint, screen_width
from posttrain.cli.shown_episodes import GRADES, PROMPT_LINES, SAID_LINES, ShowOptions, choose, is_wrong, named, read_as
from posttrain.cli.token_view import decoder, episode_lines
from posttrain.core.content import conversation
from posttrain.core.measure.number_text import number_text
from posttrain.core.measure.right import Grades
from posttrain.core.types import Episode
from posttrain.core.verdict import State
from posttrain.record.run_reader import EpisodeFile, episode_files, read_episodes, run_file
from posttrain.record.step_format import Recorded
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line
from posttrain.system.terminal_output import visible

HEAD = "  episode  sibling  reward  shaped  advantage  tokens  stop"
INDENT = " " * 11
Numbered = tuple[int, Recorded]
"""An episode with its number in its file."""


def lines(folder: str | Path, wanted: ShowOptions, colour: bool | None = None) -> Iterator[str]:
    """The lines that `posttrain show` prints."""
    colours_on = coloured() if colour is None else colour
    folder = Path(folder)
    run = run_file(folder).run
    files = episode_files(folder)
    if not files:
        why = "yet: they appear after its first step or evaluation"
        if not run.record_episodes:
            why = "yet: the run was started with record_episodes=false"
        elif not (run.env.rewards or any(s.contract for s in run.stages)):
            why = ": its stages learn from rows and sample nothing. posttrain summary says what it learned"
        # A reason that begins with a colon stands right behind the folder's name.
        yield from fold(f"no episodes in {visible(str(folder))}{'' if why[0] == ':' else ' '}{why}", screen_width())
        return
    if wanted.compare is not None:
        yield from compared(run, files, wanted, colours_on)
        return
    chosen = choose(run, files, wanted)
    records = read_episodes(chosen.path)
    if wanted.episode is not None:
        if not 0 <= wanted.episode < len(records):
            raise ConfigError(f"--episode {wanted.episode}: {named(chosen)} has episodes 0 to {len(records) - 1}")
        yield paint(named(chosen), "bold", colours_on)
        yield from episode_lines(wanted.episode, records[wanted.episode], decoder(folder), colours_on)
        return
    for line in fold(f"{named(chosen)}: {_tally(records, chosen.kind == 'eval')}", screen_width()):
        yield paint(line, "bold", colours_on)
    yield from _list(folder, chosen, records, wanted, colours_on)


def _tally(records: Sequence[Recorded], heldout: bool) -> str:
    """The figures of a step in one line. For an evaluation they are means over distinct prompts."""
    # All samples of a held-out prompt belong to one prompt. In training each visit of a task is a group of its own.
    by_prompt: dict[tuple[str, int], list[Episode]] = {}
    for e in (r.episode for r in records):
        by_prompt.setdefault((e.task.asked, 0) if heldout else (e.task.id, e.visit), []).append(e)

    def mean(figure: str) -> str:
        """The mean of a figure of the episodes (`reward`, `truth`) in words; '' where none has it."""
        values = [[x for e in each if (x := getattr(e, figure)) is not None] for each in by_prompt.values()]
        means = [float(np.mean(x)) for x in values if x] if heldout else [x for each in values for x in each]
        return f"mean reward {number_text(float(np.mean(means)))}" if means else ""

    prompts, paid, measured = len(by_prompt), mean("reward") or "none judged", mean("truth")
    unjudged = sum(r.episode.reward is None for r in records)
    counts = f"{len(records)} episodes of {prompts} prompt{'s' * (prompts != 1)}"
    reward_words = f"{measured} as it is measured ({paid} as it is paid)" if measured else paid
    return f"{counts}, {reward_words}" + (f", {unjudged} not judged (--failed)" if unjudged else "")


def _list(
    folder: Path, chosen: EpisodeFile, records: Sequence[Recorded], wanted: ShowOptions, colours_on: bool
) -> Iterator[str]:
    """The list of the chosen episodes of a step, below their prompts."""
    rows, grades = list(enumerate(records)), read_as(records)
    if wanted.wrong:
        rows = [(i, r) for i, r in rows if is_wrong(r, grades)]
    if wanted.failed:
        rows = [(i, r) for i, r in rows if r.episode.reward is None]
    if wanted.best or wanted.worst:
        judged = [(r.episode.reward, i, r) for i, r in rows if r.episode.reward is not None]
        sign = -1 if wanted.best else 1
        rows = [(i, r) for _, i, r in sorted(judged, key=lambda row: (sign * row[0], row[1]))]
    if not rows:
        if wanted.wrong and not grades.tells:
            yield f"  {GRADES}"
        elif wanted.wrong and any(r.episode.reward is not None for r in records):
            yield "  none of them is wrong"
        elif wanted.failed:
            yield "  all of them were judged"
        else:
            yield "  none of them was judged; --failed says why"
        return
    yield paint(HEAD, "dim", colours_on)
    groups = _groups(rows, mixed_first=not (wanted.best or wanted.worst))
    # The limit counts lists of equal episodes, each of which is shown once; `seen` counts episodes.
    left = wanted.limit if wanted.limit > 0 else len(rows)
    # The first prompt, its first line, the first episode there, its number.
    width, seen, first = screen_width(), 0, groups[0][0][0][0]
    for of_task in groups:
        if left <= 0:
            break
        yield ""
        most = 0 if wanted.full else PROMPT_LINES
        for line in folded(conversation(of_task[0][0][1].episode.task.prompt), width - 2, most, "; --full shows all"):
            yield paint(f"  {line}", "cyan", colours_on)
        for same in of_task[:left]:
            yield from _row(*same[0], len(same), wanted.full, width, colours_on, grades)
            seen += len(same)
        left -= len(of_task)
    yield ""
    if seen < len(rows):
        yield paint(f"  ... {len(rows) - seen} more; --limit 0 shows all", "dim", colours_on)
    flag = " --eval" if chosen.kind == "eval" else ""
    yield "token by token:"
    command = command_line("show", folder, "--stage", chosen.stage, "--step", str(chosen.index))
    yield f"  {visible(command)}{flag} --episode {first}"


def _groups(rows: Sequence[Numbered], mixed_first: bool) -> list[list[list[Numbered]]]:
    """For each prompt its episodes, where equal ones are joined in one list.

    `mixed_first`: prompts whose rewards differ come first, since a step learns from them.
    """
    out = list[list[list[Numbered]]]()
    for _, siblings in groupby(rows, key=lambda row: (row[1].episode.task.id, row[1].episode.visit)):
        alike: dict[tuple[object, ...], list[Numbered]] = {}
        for i, r in siblings:
            e = r.episode
            # Episodes are alike if their lines would be the same. So advantages are compared as they are printed.
            key = (e.text, e.reward, e.truth, r.shaped, number(_advantage(r)), e.spoken, e.stop, *_notes(r))
            alike.setdefault(key, []).append((i, r))
        out.append(list(alike.values()))
    if mixed_first:
        # The sort is stable: within both halves the order of the file stays.
        out.sort(key=lambda g: len({same[0][1].episode.reward for same in g} - {None}) < 2)
    return out


def _advantage(r: Recorded) -> float | None:
    """The mean advantage of an episode's spoken tokens; None without credit, 0 without tokens."""
    if r.advantage is None:
        return None
    return float(np.mean(np.concatenate([*r.advantage, np.zeros(0)]))) if r.episode.spoken else 0.0


def _row(i: int, r: Recorded, times: int, full: bool, width: int, colours_on: bool, grades: Grades) -> Iterator[str]:
    """One episode, or several that are alike: figures, then what was said, and what went wrong."""
    e, mean = r.episode, _advantage(r)
    colour = "" if e.reward is None or not grades.tells else "yellow" if is_wrong(r, grades) else "green"
    reward = paint(f"{number(e.reward):>7}", colour, colours_on)
    end = e.stop.value + ("" if e.truth is None else f"  measured {number(e.truth)}")
    yield f"  {i:>7}  {e.sibling:>7} {reward} {number(r.shaped):>7}  {number(mean):>9}  {e.spoken:>6}  {end}"
    lead = INDENT if times == 1 else f"{f'{times} x':>{len(INDENT) - 2}}  "
    for line in folded(e.text, width - len(INDENT), 0 if full else SAID_LINES, "; --full shows all"):
        yield f"{lead}{line}".rstrip()
        lead = INDENT
    for note in _notes(r):
        for line in hanging(f"{INDENT}! ", note, width):
            yield paint(line, "yellow", colours_on)


def _notes(r: Recorded) -> Iterator[str]:
    """Yields the reasons why the episode was dropped and why it has no reward, and its error."""
    if r.dropped:
        yield f"dropped: {r.dropped}"
    if r.episode.reward is None:
        for j in r.episode.verdicts:
            if j.verdict.state is not State.VALUE:
                outcome = {State.FAILED: "could not judge it", State.ABSTAIN: "abstained"}[j.verdict.state]
                yield ": ".join(x for x in (f"{j.source} {outcome}", j.verdict.kind, j.verdict.why) if x)
        if not r.episode.verdicts:
            yield "no source judged it"
    if r.episode.error:
        yield f"error: {r.episode.error}"
