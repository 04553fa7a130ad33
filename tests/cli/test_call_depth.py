"""From the command line to the loss: the functions of ours that stand on the stack are few and short enough to be read
in one sitting."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from posttrain.algorithm.loss import losses
from posttrain.cli import main

FRAMES, LINES = 7, 250
WORDS = [
    "sft=none",
    "rl.steps=1",
    "rl.prompts=2",
    "rl.siblings=2",
    "rl.algorithm=grpo",
    "rl.eval_every=0",
    "env.heldout=0",
    "model.hidden=32",
]


def ours(frame: FrameType | None) -> list[FrameType]:
    """The frames of the package, outermost first."""
    out: list[FrameType] = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] == "posttrain":
            out.append(frame)
        frame = frame.f_back
    return out[::-1]


def code_lines(code: CodeType) -> int:
    """Lines of a function without its comments."""
    return sum(not line.lstrip().startswith("#") for line in inspect.getsourcelines(code)[0])


@pytest.mark.prove
def test_from_the_command_line_to_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    real = losses.PolicyLoss.terms

    def terms(self: losses.PolicyLoss, micro: Any, scores: Any) -> Any:
        if not seen and not any("synthetic" in f.f_code.co_name for f in ours(sys._getframe(1))):
            codes = [f.f_code for f in ours(sys._getframe(1))] + [real.__code__]
            seen.extend((code.co_qualname, code_lines(code)) for code in codes)
        return real(self, micro, scores)

    monkeypatch.setattr(losses.PolicyLoss, "terms", terms)
    assert main(["run", "arithmetic", *WORDS, "--out", str(tmp_path / "run")]) == 0
    told = "\n".join(f"{lines:4} {name}" for name, lines in seen)
    assert seen[0][0] == "main" and seen[-1][0] == "PolicyLoss.terms"
    assert len(seen) <= FRAMES and sum(lines for _, lines in seen) <= LINES, (
        f"{len(seen)} frames, {sum(x for _, x in seen)} lines\n{told}"
    )
