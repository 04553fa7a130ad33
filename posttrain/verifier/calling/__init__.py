"""Tool calls as text: every common format is read into the same `ToolCall`s; what cannot be read is an observation,
never a crash."""

from posttrain.verifier.calling.parse import FORMATS, Malformed, Parsed, ToolCall, parse

__all__ = ["FORMATS", "Malformed", "Parsed", "ToolCall", "parse"]
