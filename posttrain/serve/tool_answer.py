"""Tool calls in an answer: what is text, and what is a call. In a stream, text is sent until a call may have begun."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from posttrain.verifier.calling import Malformed, ToolCall, parse
from posttrain.verifier.thoughts import THOUGHTS

WITHIN = {
    "hermes": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "coder": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "cohere": ("<|START_ACTION|>",),
    "llama": ("<|python_tag|>",),
}
"""Marks with which a call may begin anywhere in a turn, by format."""
AT_BEGIN = {
    "llama": ("{", "<|python_tag|>"),
    "pythonic": ("[", "<|python_start|>"),
    "harmony": ("<|channel|>", "<|start|>"),
}
"""Marks that mean a call, or other parts of a turn, only at its beginning."""


@dataclass
class ToolAnswer:
    """One answer in a conversation with tools."""

    format: str
    text: str = ""
    sent: int = 0
    """Characters that were released as text."""

    def add(self, piece: str) -> str:
        """The text that can be sent now."""
        self.text += piece
        end = self._certain()
        out, self.sent = self.text[self.sent : end], max(self.sent, end)
        return out

    def finish(self, finish: str) -> tuple[str, list[dict[str, Any]], str]:
        """(the rest of the text, the calls in the form of OpenAI's API, the reason why the answer ended).

        An answer that was cut off, or in which a call cannot be read, is text.
        """
        rest = self.text[self.sent :]
        calls = parse(self.text, self.format).calls if finish == "stop" else ()
        if not calls or any(isinstance(c, Malformed) for c in calls):
            return rest, [], finish
        outside = parse(rest, self.format).content
        made = [_call(c) for c in calls if isinstance(c, ToolCall)]
        return outside, made, "tool_calls"

    def _certain(self) -> int:
        """Number of characters that are text, whatever follows."""
        begins = self.text.lstrip()
        for mark in (*AT_BEGIN.get(self.format, ()), *(dict(THOUGHTS) if self.format in AT_BEGIN else ())):
            if begins.startswith(mark) or mark.startswith(begins):
                return self.sent
        found = [i for m in WITHIN.get(self.format, ()) if (i := self.text.find(m, self.sent)) >= 0]
        if found:
            return max(self.sent, min(found))
        held = max((_begun(self.text, m) for m in WITHIN.get(self.format, ())), default=0)
        return max(self.sent, len(self.text) - held)


def _begun(text: str, mark: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
