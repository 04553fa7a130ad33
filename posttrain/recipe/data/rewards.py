"""The two forms a reward function may have, on the prompts beside this file."""

from posttrain.core.types import Task


def correct(task: Task, text: str) -> float:
    """Our form: one task and what was said of it."""
    return float(text.strip() == task.answer)


def brief(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float | None]:
    """TRL's form: lists, with the source's columns as keyword arguments. None abstains (here: no answer at all)."""
    return [
        None if not said.strip() else float(len(said.strip()) <= len(gold))
        for said, gold in zip(completions, answer, strict=True)
    ]
