"""One episode token by token: who said each token, its log-prob, its advantage, the version that said it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from posttrain.cli.screen_text import folded, hanging, number, paint, screen_width
from posttrain.core.types import Segment
from posttrain.record.step_format import Recorded
from posttrain.system import read_untrusted
from posttrain.system.errors import RunFolderError
from posttrain.system.terminal_output import visible

LARGEST_TOKENIZER = 512 * read_untrusted.MiB
"""Most bytes of a tokenizer.json."""
UNLIKELY = 0.1
"""Probability below which a sampled token is marked."""
HEAD = "     at  who    version     logp      p  advantage  token"
Decode = Callable[[Sequence[int]], str]


def decoder(folder: Path) -> Decode | None:
    """A function from ids to text, with the tokenizer of the run folder. None where there is no tokenizer.json."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    from tokenizers import Tokenizer

    text = read_untrusted.read_bytes(path, LARGEST_TOKENIZER, RunFolderError)
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise RunFolderError(f"{path} is damaged: {error}. Remove it to read the run without its tokenizer") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def episode_lines(i: int, r: Recorded, decode: Decode | None, colours_on: bool) -> Iterator[str]:
    """Summary, verdicts, and one line per sampled token; each stretch of other tokens is one text."""
    e, width = r.episode, screen_width()
    title = f"episode {i}: task {visible(e.task.id)}, visit {e.visit}, sibling {e.sibling}, stop {e.stop.value}"
    for line in folded(title, width):
        yield paint(line, "bold", colours_on)
    dropped = f", dropped: {r.dropped}" if r.dropped else ""
    yield from folded(f"reward {number(e.reward)}, shaped {number(r.shaped)}{dropped}", width)
    if e.task.answer is not None:
        yield from hanging("answer ", str(e.task.answer), width)
    for j in e.verdicts:
        v = j.verdict
        why = ": ".join(x for x in (v.kind, v.why) if x)
        score = number(v.score) if v.score is not None else v.state.value
        pays = "measured, not paid" if j.measured else f"weight {j.weight:g}"
        yield from hanging(f"  {visible(j.source)} ({pays}): ", f"{score}  {why}".rstrip(), width)
    for t in e.seats:
        yield from hanging(f"  seat {visible(t.seat)} after turn {t.after} ({t.tokens} tokens): ", t.text, width)
    if e.error:
        for line in hanging("error: ", e.error, width):
            yield paint(line, "red", colours_on)
    if decode is None:
        yield paint("no tokenizer.json in the run folder: token ids are shown", "yellow", colours_on)
    for n, segment in enumerate(e.segments):
        # The record has advantages of spoken tokens only. They are put at the places of these tokens; others get NaN.
        advantage = np.full(len(segment.ids), np.nan)
        if r.advantage is not None:
            advantage[segment.mask] = r.advantage[n]
        if len(e.segments) > 1:
            yield paint(f"segment {n + 1} of {len(e.segments)}", "bold", colours_on)
        yield paint(HEAD, "dim", colours_on)
        yield from _tokens(
            segment, advantage, decode or (lambda ids: " ".join(f"#{t}" for t in ids)), colours_on, width
        )
    if e.text:
        yield from hanging("said: ", e.text, width)


def _tokens(s: Segment, advantage: np.ndarray, decode: Decode, colours_on: bool, width: int) -> Iterator[str]:
    """A line for each spoken token of a segment, and one text for each stretch of other tokens."""
    t = 0
    while t < len(s.ids):
        if s.mask[t]:
            p = float(np.exp(s.logp[t]))
            a = advantage[t]
            colour = "" if np.isnan(a) or a == 0 else "green" if a > 0 else "red"
            credit = paint(f"{'-' if np.isnan(a) else f'{a:+.3f}':>9}", colour, colours_on)
            chance = paint(f"{s.logp[t]:>7.3f}  {p:>5.3f}", "yellow" if p < UNLIKELY else "", colours_on)
            token = paint(visible(decode([int(s.ids[t])])), "cyan", colours_on)
            yield f"  {t:>5}  said   {s.version[t]:>7}  {chance}  {credit}  {token}"
            t += 1
            continue
        # Tokens of the world have no log-prob and no advantage, so a stretch of them is one piece of text.
        end = t
        while end < len(s.ids) and not s.mask[end]:
            end += 1
        place = str(t) if end == t + 1 else f"{t}-{end - 1}"
        for line in hanging(f"  {place:>5}  world  ", decode(s.ids[t:end].tolist()), width):
            yield paint(line, "dim", colours_on)
        t = end
