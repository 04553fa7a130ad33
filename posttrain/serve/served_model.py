"""The model that a server serves."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.ports import Sampler
from posttrain.environment.templates.renderer import Renderer
from posttrain.serve.detokenize import TokenText


@dataclass(frozen=True)
class ServedModel:
    """A served model with its engine, tokenizer and token."""

    sampler: Sampler
    renderer: Renderer
    words: TokenText
    vocabulary: int
    """Number of ids that the model has embeddings for."""
    name: str
    root: str
    """The target that the model was loaded from."""
    fingerprint: str
    token: str | None
    """The token callers must send; None: every caller on this machine is served."""
    created: int
