"""Refusals of the server: an HTTP status, and an error in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from posttrain.system.errors import ConfigError, DataError, PosttrainError

LONGEST = 1000
"""Most characters of a message; it quotes the request, which may be long."""
SOON = {"Retry-After": "1"}
_HEADERS: dict[int, Mapping[str, str]] = {401: {"WWW-Authenticate": "Bearer"}, 429: SOON, 503: SOON}


class Refusal(Exception):
    """A request that is not served. `param` names the wrong field; `code` is the kind of error for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(_cut(message))
        self.status, self.param, self.code = status, None if param is None else _cut(param), code

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def bytes(self) -> bytes:
        """The whole HTTP answer; the connection is closed after it."""
        # Written here without aiohttp, for a connection that is refused before aiohttp gets it.
        body = json.dumps(self.body()).encode()
        headers = {**_HEADERS.get(self.status, {}), "Content-Type": "application/json", "Connection": "close"}
        lines = [f"{k}: {v}" for k, v in {**headers, "Content-Length": len(body)}.items()]
        first = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"
        return "\r\n".join([first, *lines, "", ""]).encode() + body


def answer(refusal: Refusal, headers: Mapping[str, str] | None = None) -> web.Response:
    """A refusal as a response, with the headers of its status and the given ones."""
    return web.json_response(
        refusal.body(), status=refusal.status, headers={**_HEADERS.get(refusal.status, {}), **(headers or {})}
    )


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def refusal_of(error: PosttrainError) -> Refusal:
    """The refusal for one of our own errors: the request's fault, or the server's."""
    return Refusal(str(error), status=400 if isinstance(error, DataError | ConfigError) else 500)
