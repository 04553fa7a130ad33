"""Finds the model that an endpoint serves, and the request fields that it supports. Judges and the policy's endpoints
(`engine.endpoint`) ask it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from posttrain.system.errors import ConfigError, EndpointError, nearest
from posttrain.verifier.http_client import Endpoint

Dialect = Literal["openai", "compatible", "vllm", "posttrain"]
"""The request fields that a server accepts: of OpenAI's own API (openai), those that all compatible servers have
(compatible), or these and the server's own extensions (vllm, posttrain)."""
UNBOUNDED = 2**31 - 1
"""Context of an endpoint that does not report one."""


@dataclass(frozen=True)
class RemoteModel:
    """An endpoint's model and dialect."""

    model: str
    dialect: Dialect
    context: int
    """Most tokens of a sequence; `UNBOUNDED` where the endpoint does not report it."""
    owner: str
    """The model's owner as the server names it; servers of vLLM and of this package give their own name."""

    @property
    def by_tokens(self) -> bool:
        """True where the endpoint takes prompts as token ids and returns turns as token ids."""
        return self.dialect in ("vllm", "posttrain")


async def discover(endpoint: Endpoint, model: str | None = None, dialect: str | None = None) -> RemoteModel:
    """Ask an endpoint for its list of models, and choose one.

    Args:
        model: name of the model; None: the only one there is.
        dialect: dialect of the server; None: inferred from the model's owner and the address.

    Raises:
        ConfigError: there is no such model or dialect, or there are several models and none was chosen.
        EndpointError: there is no answer, or it is not a list of models.
    """
    if dialect is not None and dialect not in get_args(Dialect):
        raise ConfigError(f"--dialect {dialect}: {nearest(dialect, get_args(Dialect))}")
    answer = await endpoint.get("/models")
    # Whatever answers at the address is foreign: the form is checked before anything is read from it.
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in listed):
        raise EndpointError(
            f"{endpoint.role} ({endpoint.url}): /models lists no models; the address ends in /v1 mostly", endpoint.role
        )
    by_name: dict[str, dict[str, Any]] = {c["id"]: c for c in listed}
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
    chosen_dialect = dialect or _dialect(owner, urlsplit(endpoint.url).hostname or "")
    return RemoteModel(model, chosen_dialect, length if isinstance(length, int) and length > 0 else UNBOUNDED, owner)  # type: ignore[arg-type]


def _dialect(owner: str, host: str) -> Dialect:
    """The dialect of a server, from the owner of its model and its host."""
    if owner == "vllm" or owner == "posttrain":
        return owner
    return "openai" if host == "api.openai.com" or host.endswith(".api.openai.com") else "compatible"
