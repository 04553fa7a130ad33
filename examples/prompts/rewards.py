"""Two rewards in the two forms that are understood."""

from __future__ import annotations

from typing import Any

from posttrain.core.types import Task


def first_letter(task: Task, text: str) -> float:
    """Our form: one task, and the text of the response."""
    return float(text.strip() == task.answer)


def short(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """TRL's form: lists by keyword, with the columns of the data beside them."""
    return [float(len(said.strip()) <= 1) for said in completions]
