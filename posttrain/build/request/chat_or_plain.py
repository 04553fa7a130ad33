"""Checks whether the model knows the other form of the prompts better: a chat in its template, or plain text. Known
right answers are scored after the prompts as they are ("here"), and in the other form ("there")."""

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
"""Most prompts that are scored in both forms, and the number of tokens above which no more prompts are taken."""
BETTER, SHARE, SURE = 0.2, 0.2, 3.0
"""Three bounds for the mean gain of right answers in the other form. At least `BETTER` nats a token. At least this
share of the nats a token that they have in the present form: a model that knows neither form has many nats in both, and
their difference says little. And at least `SURE` standard errors above 0."""


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
    if len(pairs) < 4:  # too few for a standard error that means anything
        return []
    here, there = (_logps(parts, [p[i] for p in pairs]) for i in (0, 1))
    if not clearly_better(here, there):
        return []
    was, other = "plain text", "chats in the model's template"
    advice = 'give each prompt as messages: [{"role": "user", "content": "..."}]'
    if not isinstance(known[0][0].prompt, str):
        was, other, advice = "chats", "plain text", "give the prompts as text (a string in the prompt column)"
    return [
        f"wrong template: the prompts are written as {was}, and the model was trained on another form. Right answers"
        f" have {here.mean():.2g} nats a token after them, and {there.mean():.2g} after the same prompts as {other}."
        f" To change it, {advice}"
    ]


def clearly_better(here: np.ndarray, there: np.ndarray) -> bool:
    """True where answers are clearly likelier in the other form.

    Args:
        here, there: mean log-prob a token of each answer, in the present and in the other form.
    """
    gain = there - here
    error = float(gain.std(ddof=1)) / len(gain) ** 0.5
    # The gain must reach all three bounds. `here` is negative, so the second one is positive.
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
    """A prompt in the other form: a text as one message of the user, messages as their texts."""
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
    # The mean over each answer, so that long answers do not count more than short ones.
    return np.bincount(packed.segment_M, weights=logp) / np.bincount(packed.segment_M)
