"""Prompts on which an exported model is compared with its run: those of the run's own record, else generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.types import Message, Segment
from posttrain.environment.templates.renderer import History, Renderer
from posttrain.record.run_reader import EpisodeFile, episode_files, read_episodes
from posttrain.system.errors import DataError, RunFolderError

MOST = 8
"""The number of prompts (or of answers) that are compared."""
GENERATED_TOKENS = 16
"""Tokens of a generated prompt."""


@dataclass(frozen=True, eq=False)
class ComparedPrompt:
    """A prompt with the ids that the policy read."""

    name: str
    prompt: str | Sequence[Message]
    ids: np.ndarray
    """int32 [T]"""


def recorded_prompts(folder: Path, rows: int, context: int) -> list[ComparedPrompt]:
    """The shortest prompts of the newest held-out evaluation in a run folder, or of the newest training step.

    Args:
        rows: number of rows of the model's embeddings. All ids must be below it.
        context: tokens of the model's context. Prompts that leave no room in it for an answer are left out.

    Raises:
        RunFolderError: the record is damaged.
    """
    files = [f for f in episode_files(folder) if f.path.is_file()]
    # Held-out prompts are what the run was measured on. Without an evaluation a step of training must do.
    newest: EpisodeFile | None = next((f for f in reversed(files) if f.kind == "eval"), files[-1] if files else None)
    by_task: dict[str, ComparedPrompt] = {}
    for r in read_episodes(newest.path) if newest is not None else ():
        first_segment = r.episode.segments[0] if r.episode.segments else None
        if first_segment is None or r.episode.task.id in by_task or not first_segment.mask.any():
            continue
        # The prompt is what stands before the first spoken token.
        ids = first_segment.ids[: int(np.argmax(first_segment.mask))]
        # An id beyond the embeddings would fail inside the model, without a word about the file.
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= rows):
            raise RunFolderError(f"{newest and newest.path} is damaged: it has token ids that the model does not have")
        if 0 < len(ids) < context:
            by_task[r.episode.task.id] = ComparedPrompt(r.episode.task.id, r.episode.task.prompt, ids)
    # The shortest ones, because both models compute them.
    return sorted(by_task.values(), key=lambda p: (len(p.ids), p.name))[:MOST]


def recorded_answers(folder: Path, version: int) -> list[Segment]:
    """The shortest answers that were sampled with weights of this version; empty where there are none.

    They are of the newest step or evaluation that has such answers, and all have one sampling contract.

    Raises:
        RunFolderError: the record is damaged.
    """
    # From the newest file back, until one has answers of exactly these weights.
    for file in reversed([f for f in episode_files(folder) if f.path.is_file()]):
        # A greedy token is recorded with log-prob 0, which is not the model's, so there is nothing to compare with.
        spoken = [s for r in read_episodes(file.path) for s in r.episode.segments if s.spoken and not s.sampling.greedy]
        of_version = sorted((s for s in spoken if (s.version[s.mask] == version).all()), key=lambda s: len(s.ids))
        if of_version:
            return [s for s in of_version if s.sampling == of_version[0].sampling][:MOST]
    return []


def generated_prompts(tokenizer: Any, rows: int, context: int) -> list[ComparedPrompt]:
    """Prompts for a run without a record. Their ids are spread over the vocabulary, and are the same for every run."""
    length = max(1, min(GENERATED_TOKENS, context // 2))
    # Multiples of the prime 7919 spread over the vocabulary.
    spread = (np.arange(1, MOST * length + 1) * 7919 % min(rows, len(tokenizer))).astype(np.int32)
    return [
        ComparedPrompt(f"generated {i}", str(tokenizer.decode(ids.tolist())), ids)
        for i, ids in enumerate(spread.reshape(MOST, length))
    ]


def rendered(
    tokenizer: Any, stop_ids: Sequence[int], history: History, prompt: str | Sequence[Message]
) -> np.ndarray | str:
    """The ids of a prompt, int32 [T], rendered as the run does it, with any tokenizer and its chat template; if they
    cannot render it, a text that says why. LimitError where the template takes too much time or memory."""
    try:
        return Renderer(tokenizer, stop_ids, None, history).prompt(prompt)
    except DataError as error:
        return str(error)
