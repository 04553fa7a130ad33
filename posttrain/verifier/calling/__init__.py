"""Parses tool calls in text. Every common format gives the same `ToolCall`s. A call that cannot be read gives a
`Malformed` and never an exception."""

from posttrain.verifier.calling.parse import FORMATS, Malformed, Parsed, ToolCall, parse

__all__ = ["FORMATS", "Malformed", "Parsed", "ToolCall", "parse"]
