"""Two rewards: is the result right, and is it where it was asked for?"""

from __future__ import annotations

import re

from posttrain.core.types import Task

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(task: Task, text: str) -> float:
    """1 where the number in the last box is the result. Units and words around the number do not matter."""
    boxes = BOXED.findall(text)
    found = NUMBER.findall(boxes[-1].replace("\\$", "").replace("\\,", "")) if boxes else []
    if len(found) != 1:
        return 0.0
    return float(abs(float(found[0].replace(",", "")) - float(str(task.answer))) < 1e-6)


def form(task: Task, text: str) -> float:
    """1 where there is one box, with reasoning before it and next to nothing behind it. It does not ask whether the
    result is right, so it is worth little: see its weight in the command."""
    boxes = list(BOXED.finditer(text))
    if len(boxes) != 1:
        return 0.0
    return float(bool(text[: boxes[0].start()].strip()) and len(text) - boxes[0].end() <= 20)
