"""What a server serves."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.ports import Sampler
from posttrain.environment.render import Renderer
from posttrain.serve.detokenize import TokenText


@dataclass(frozen=True)
class ServedModel:
    """What is served, and to whom."""

    sampler: Sampler
    renderer: Renderer
    words: TokenText
    vocabulary: int
    """Ids the model has embeddings for."""
    name: str
    root: str
    """Where the model came from."""
    fingerprint: str
    token: str | None
    """What callers must bring; None: anybody on this machine is served."""
    created: int
