"""What the server says no with: an HTTP status and an error in the shape OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from posttrain.core.errors import ConfigError, DataError, PosttrainError


class Refusal(Exception):
    """A request that is not served. `param` names the field at fault, `code` the kind for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return {
            "error": {"message": str(self), "type": _TYPES.get(self.status, _rest(self.status)), "param": self.param, "code": self.code}
        }


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def _rest(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def refusal_of(error: PosttrainError) -> Refusal:
    """What one of our own errors is to a client: its request's fault, or the server's."""
    if isinstance(error, DataError | ConfigError):
        return Refusal(str(error))
    return Refusal(str(error), status=500)
