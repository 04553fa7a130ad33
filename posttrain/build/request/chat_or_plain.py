"""Checks whether the model knows the prompts in another form: as a chat with its template, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.content import text_of
from posttrain.core.ports import Environment
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Content, Message, Segment, Task
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import PosttrainError

PAIRS, TOKENS = 8, 4096
"""Most prompts that are scored in both forms, and the tokens after which no more are taken."""
BETTER, SHARE, SURE = 0.2, 0.2, 3.0
"""Nats a token by which right answers must be likelier in the other form, the share of what they have in this form
that it must be, and standard errors that it must be above 0. A model that knows neither form has nearly the same, large
distance from both."""


def other_form(parts: RunParts, env: Environment, tasks: Sequence[Task]) -> list[str]:
    """A note where the known answers are far likelier after the same prompts in the other form.

    It needs a chat template, and completions or right answers of one turn. Nothing is sampled.
    """
    if not getattr(getattr(parts.renderer, "tokenizer", None), "chat_template", None):
        return []
    known = answers(env, tasks)
    pairs: list[tuple[Segment, Segment]] = []
    for task, answer in known:
        try:
            pairs.append((_segment(parts, task.prompt, answer), _segment(parts, _other(task.prompt), answer)))
        except PosttrainError:
            continue  # the other form cannot be written with this tokenizer, so the model cannot know it
        if len(pairs) == PAIRS or sum(len(s.ids) for pair in pairs for s in pair) > TOKENS:
            break
    # Too few for a standard error that means anything.
    if len(pairs) < 4:
        return []
    here, there = (_logps(parts, [p[i] for p in pairs]) for i in (0, 1))
    if not clearly_better(here, there):
        return []
    chat = not isinstance(known[0][0].prompt, str)
    was, other = ("chats", "plain text") if chat else ("plain text", "chats in the model's template")
    how = (
        "give the prompts as text (a string in the prompt column)"
        if chat
        else 'give each prompt as messages: [{"role": "user", "content": "..."}]'
    )
    return [
        f"wrong template: the prompts are written as {was}, and the model was trained on another form. Right answers"
        f" have {here.mean():.2g} nats a token after them, and {there.mean():.2g} after the same prompts as {other}."
        f" To change it, {how}"
    ]


def clearly_better(here: np.ndarray, there: np.ndarray) -> bool:
    """True where answers are likelier in the other form by more than chance, by the log-probs of each a token."""
    gain = there - here
    error = float(gain.std(ddof=1)) / len(gain) ** 0.5
    # Three bounds at once: a difference that matters, one that is large against the distance itself, and one above
    # chance.
    return bool(gain.mean() >= max(BETTER, -SHARE * here.mean(), SURE * error))


def answers(env: Environment, tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    """Tasks with a right answer of one turn, or with the completion that the data has for them."""
    rows = {r.task.id: r.completion for r in env.abilities.rows or () if r.completion is not None}
    gold = env.abilities.gold
    right = {t.id: turns for t, turns in gold.known(tasks)} if gold is not None else {}
    out: list[tuple[Task, str]] = []
    for task in tasks:
        turns = (rows[task.id],) if task.id in rows else right.get(task.id, ())
        if len(turns) == 1 and turns[0]:
            out.append((task, turns[0]))
    return out


def _other(prompt: Content | Sequence[Message]) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    return "\n".join(text_of(m["content"]) for m in prompt)  # type: ignore[index]


def _segment(parts: RunParts, prompt: str | Sequence[Message], answer: str) -> Segment:
    before, after = parts.renderer.pair(prompt, answer)
    transcript = Transcript(Sampling(stop_ids=parts.stop_ids))
    transcript.see(before)
    transcript.show(after)
    return transcript.segment()


def _logps(parts: RunParts, segments: Sequence[Segment]) -> np.ndarray:
    """float64 [pairs]: mean log-prob of an answer's tokens."""
    packed = Packed.of(segments)
    logp = parts.learner.score(packed).astype(np.float64)
    # One answer, one number: else long answers would count more than short ones.
    return np.bincount(packed.segment_M, weights=logp) / np.bincount(packed.segment_M)
