"""Show rollouts in a terminal: one line per episode, or one episode token by token. Colours are used only on a
terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.core import foreign
from posttrain.core.content import shown as prompted
from posttrain.core.errors import ConfigError, RunFolderError, nearest
from posttrain.core.reader import EpisodeFile, episode_files, read_episodes, run_file
from posttrain.core.record import Recorded
from posttrain.core.shell import command_line
from posttrain.core.types import Segment
from posttrain.core.visible import visible

_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
LARGEST_TOKENIZER = 512 * foreign.MiB
"""Most bytes of a tokenizer.json."""
UNLIKELY = 0.1
"""Probability below which a sampled token is marked."""


@dataclass(frozen=True)
class ShowOptions:
    """What to show. None: the last one. `kind` None: training episodes if there are any, else evaluation."""

    stage: str | None = None
    step: int | None = None
    kind: str | None = None
    episode: int | None = None
    wrong: bool = False
    best: bool = False
    limit: int = 32


def coloured() -> bool:
    """Whether standard output shows colours (https://no-color.org is respected)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, on: bool) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on and colour else text


def lines(folder: str | Path, wanted: ShowOptions, colour: bool | None = None) -> Iterator[str]:
    """The lines that `posttrain show` prints."""
    on = coloured() if colour is None else colour
    folder = Path(folder)
    run = run_file(folder).run
    chosen = _choose(episode_files(folder), wanted)
    if chosen is None:
        why = (
            "the run was started with record_episodes=false"
            if not run.record_episodes
            else "they appear after its first step or evaluation"
        )
        yield f"no episodes in {folder} yet: {why}"
        return
    what = f"{visible(chosen.stage)} step {chosen.index}" + (", held-out evaluation" if chosen.kind == "eval" else "")
    records = read_episodes(chosen.path)
    if wanted.episode is not None:
        if not 0 <= wanted.episode < len(records):
            raise ConfigError(f"--episode {wanted.episode}: {what} has episodes 0 to {len(records) - 1}")
        yield paint(what, "bold", on)
        yield from episode_lines(wanted.episode, records[wanted.episode], decoder(folder), on)
        return
    yield paint(f"{what}: {_tally(records)}", "bold", on)
    yield from _table(folder, chosen, records, wanted, on)


def _choose(files: Sequence[EpisodeFile], wanted: ShowOptions) -> EpisodeFile | None:
    """The last file that matches. Where none does, ConfigError lists what there is."""
    if not files:
        return None
    kind = wanted.kind or (
        "train" if any(f.kind == "train" and wanted.stage in (None, f.stage) for f in files) else "eval"
    )
    of_kind = [f for f in files if f.kind == kind]
    stages = list(dict.fromkeys(f.stage for f in of_kind))
    if not of_kind:
        raise ConfigError(f"this run has no {kind} episodes" + ("; leave out --eval" if kind == "eval" else ""))
    if wanted.stage is not None and wanted.stage not in stages:
        raise ConfigError(f"--stage {wanted.stage}: no {kind} episodes of it; {nearest(wanted.stage, stages)}")
    of_stage = [f for f in of_kind if f.stage == (wanted.stage or of_kind[-1].stage)]
    step = wanted.step
    if step is None:
        return of_stage[-1]
    found = [f for f in of_stage if f.index == step]
    if not found:
        there = [f.index for f in of_stage]
        near = min(there, key=lambda i: abs(i - step))
        raise ConfigError(
            f"--step {step}: no {kind} episodes of {of_stage[0].stage}; the nearest is {near} (from {there[0]} to"
            f" {there[-1]})"
        )
    return found[0]


# --- an episode a line ------------------------------------------------------------------------------------------------


def is_wrong(r: Recorded) -> bool:
    """Whether it was judged and the source with the largest weight gave less than 1."""
    scored = [(j.weight, j.verdict.score) for j in r.episode.verdicts if j.verdict.score is not None]
    return bool(scored) and max(scored, key=lambda s: s[0])[1] < 1


def _tally(records: Sequence[Recorded]) -> str:
    rewards = [r.episode.reward for r in records if r.episode.reward is not None]
    mean = f"mean reward {np.mean(rewards):.3f}" if rewards else "none judged"
    lost = len(records) - len(rewards)
    return f"{len(records)} episodes, {mean}" + (f", {lost} not judged" if lost else "")


def _table(
    folder: Path, chosen: EpisodeFile, records: Sequence[Recorded], wanted: ShowOptions, on: bool
) -> Iterator[str]:
    rows = [(i, r) for i, r in enumerate(records) if not wanted.wrong or is_wrong(r)]
    if wanted.best:
        rows.sort(key=lambda row: -np.inf if row[1].episode.reward is None else -row[1].episode.reward)
        rows = [row for row in rows if row[1].episode.reward is not None]
    if not rows:
        yield "  none of them is wrong" if wanted.wrong else "  none of them was judged"
        return
    yield paint("  episode  sibling  reward  shaped  advantage  tokens  stop      prompt -> said", "dim", on)
    shown = rows[: wanted.limit] if wanted.limit > 0 else rows
    for i, r in shown:
        yield _row(i, r, on)
    if len(shown) < len(rows):
        yield paint(f"  ... {len(rows) - len(shown)} more; --limit 0 shows all", "dim", on)
    flag = " --eval" if chosen.kind == "eval" else ""
    yield paint(
        f"token by token: {visible(command_line('show', folder, '--stage', chosen.stage, '--step', str(chosen.index)))}"
        f"{flag} --episode {shown[0][0]}",
        "dim",
        on,
    )


def _row(i: int, r: Recorded, on: bool) -> str:
    e = r.episode
    prompt = e.task.prompt if isinstance(e.task.prompt, str) else prompted(e.task.prompt[-1]["content"])
    said = f"{_short(prompt, 40)} -> {_short(e.text, 60)}"
    notes = [f"dropped: {visible(r.dropped or '')}"] * bool(r.dropped) + [f"error: {_short(e.error, 60)}"] * bool(
        e.error
    )
    mean = (
        None
        if r.advantage is None
        else float(np.mean(np.concatenate([*r.advantage, np.zeros(0)])))
        if e.spoken
        else 0.0
    )
    reward = paint(f"{_number(e.reward):>7}", "" if e.reward is None else "yellow" if is_wrong(r) else "green", on)
    tail = f"  [{'; '.join(notes)}]" if notes else ""
    return (
        f"  {i:>7}  {e.sibling:>7} {reward} {_number(r.shaped):>7}  {_number(mean):>9}  {e.spoken:>6} "
        f" {e.stop.value:<8}  {said}{tail}"
    )


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def _short(text: str, most: int) -> str:
    flat = visible(text)
    return flat if len(flat) <= most else flat[: most - 3] + "..."


# --- token by token ---------------------------------------------------------------------------------------------------


def decoder(folder: Path) -> Callable[[Sequence[int]], str] | None:
    """A function from ids to text, with the run folder's tokenizer. None where it cannot be read without a model."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    from tokenizers import Tokenizer

    text = foreign.read_bytes(path, LARGEST_TOKENIZER, RunFolderError)
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise RunFolderError(f"{path} is damaged: {error}. Remove it to read the run without its tokenizer") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def episode_lines(i: int, r: Recorded, decode: Callable[[Sequence[int]], str] | None, on: bool) -> Iterator[str]:
    """Summary, verdicts, and one line per sampled token; each stretch of other tokens is one line."""
    e = r.episode
    yield paint(
        f"episode {i}: task {visible(e.task.id)}, visit {e.visit}, sibling {e.sibling}, stop {e.stop.value}", "bold", on
    )
    yield f"reward {_number(e.reward)}, shaped {_number(r.shaped)}" + (
        f", dropped: {visible(r.dropped)}" if r.dropped else ""
    )
    if e.task.answer is not None:
        yield f"answer {_short(str(e.task.answer), 200)}"
    for j in e.verdicts:
        v = j.verdict
        why = ": ".join(x for x in (visible(v.kind), visible(v.why)) if x)
        yield (
            f"  {visible(j.source)} (weight {j.weight:g}): {_number(v.score) if v.score is not None else v.state.value}"
            + (f"  {why}" if why else "")
        )
    for t in e.seats:
        yield f"  seat {visible(t.seat)} after turn {t.after} ({t.tokens} tokens): {_short(t.text, 200)}"
    if e.error:
        yield paint(f"error: {visible(e.error)}", "red", on)
    if decode is None:
        yield paint("no tokenizer.json in the run folder: token ids are shown", "yellow", on)
    for n, segment in enumerate(e.segments):
        advantage = np.full(len(segment.ids), np.nan)
        if r.advantage is not None:
            advantage[segment.mask] = r.advantage[n]
        if len(e.segments) > 1:
            yield paint(f"segment {n + 1} of {len(e.segments)}", "bold", on)
        yield paint("     at  who    mask  version     logp      p  advantage  token", "dim", on)
        yield from _tokens(segment, advantage, decode or (lambda ids: " ".join(f"#{t}" for t in ids)), on)
    if e.text:
        yield f"said: {visible(e.text)}"


def _tokens(s: Segment, advantage: np.ndarray, decode: Callable[[Sequence[int]], str], on: bool) -> Iterator[str]:
    t = 0
    while t < len(s.ids):
        if s.mask[t]:
            p = float(np.exp(s.logp[t]))
            a = advantage[t]
            colour = "" if np.isnan(a) or a == 0 else "green" if a > 0 else "red"
            credit = paint(f"{'-' if np.isnan(a) else f'{a:+.3f}':>9}", colour, on)
            chance = paint(f"{s.logp[t]:>7.3f}  {p:>5.3f}", "yellow" if p < UNLIKELY else "", on)
            token = paint(visible(decode([int(s.ids[t])])), "cyan", on)
            yield f"  {t:>5}  said      1  {s.version[t]:>7}  {chance}  {credit}  {token}"
            t += 1
            continue
        end = t
        while end < len(s.ids) and not s.mask[end]:
            end += 1
        text = visible(decode(s.ids[t:end].tolist()))
        place = str(t) if end == t + 1 else f"{t}-{end - 1}"
        yield paint(f"  {place:>5}  world     0        -        -      -          -  {text}", "dim", on)
        t = end
