"""What an endpoint is: which model it serves, and which fields it is known to understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from posttrain.core.errors import ConfigError, EndpointError, nearest
from posttrain.engine.endpoint import Endpoint

Dialect = Literal["openai", "compatible", "vllm", "posttrain"]
"""openai: OpenAI's own API. compatible: what servers of that shape have in common. vllm, posttrain: with their
extensions."""
UNBOUNDED = 2**31 - 1
"""Context of an endpoint that does not tell its own."""


@dataclass(frozen=True)
class RemoteModel:
    """An endpoint's model and dialect."""

    model: str
    dialect: Dialect
    context: int
    """Most tokens of a sequence; `UNBOUNDED` where the endpoint does not say."""
    owner: str

    @property
    def by_tokens(self) -> bool:
        """Whether it takes prompts as token ids and returns what was said as such."""
        return self.dialect in ("vllm", "posttrain")


async def discover(endpoint: Endpoint, model: str | None = None, dialect: str | None = None) -> RemoteModel:
    """Ask for the list of models.

    Args:
        model: which one; None: the only one there is.
        dialect: of the server; None: told from who owns the model.

    Raises:
        ConfigError: no such model, or several and none chosen; or no such dialect.
        EndpointError: nobody answers, or not with a list of models.
    """
    if dialect is not None and dialect not in get_args(Dialect):
        raise ConfigError(f"--dialect {dialect}: {nearest(dialect, get_args(Dialect))}")
    listed = await endpoint.get("/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
        raise EndpointError(
            f"{endpoint.role} ({endpoint.url}): /models lists no models; the address ends in /v1 mostly", endpoint.role
        )
    by_name: dict[str, dict[str, Any]] = {c["id"]: c for c in cards}
    if model is None:
        if len(by_name) != 1:
            raise ConfigError(
                f"{endpoint.url} serves {len(by_name)} models; say which with --model:"
                f" {', '.join(sorted(by_name)[:20])}"
            )
        model = next(iter(by_name))
    if model not in by_name:
        raise ConfigError(f"--model {model}: {endpoint.url} has no such model; {nearest(model, sorted(by_name)[:20])}")
    card = by_name[model]
    owner, length = str(card.get("owned_by", "")), card.get("max_model_len")
    found = dialect or _dialect(owner, urlsplit(endpoint.url).hostname or "")
    return RemoteModel(model, found, length if isinstance(length, int) and length > 0 else UNBOUNDED, owner)  # type: ignore[arg-type]


def _dialect(owner: str, host: str) -> Dialect:
    if owner == "vllm" or owner == "posttrain":
        return owner
    return "openai" if host == "api.openai.com" or host.endswith(".api.openai.com") else "compatible"
