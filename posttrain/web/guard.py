"""Checks who may ask for a page of this machine, and limits what the page may do.

A page that computes is a program that others could use: another page in the same browser, another user of the machine,
or a hostile site whose name points to 127.0.0.1. So every request must name this machine as its host, must come from
this server's own page, and must carry a secret. The secret is in the address that the browser is opened with. The first
answer puts it into a cookie that no script can read, and redirects the browser to the address without the secret.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy that the browser enforces on a page: files of this server alone, nothing inline, no frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN = "token"


@dataclass
class Guard:
    """The secret of one server, and the check of every request."""

    port: int = 0
    """The port that the server has; set once it listens."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        """The name of the cookie. It has the port, so that servers on other ports of this machine have other
        cookies."""
        return f"posttrain-{self.port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{name}:{self.port}" for name in NAMES)

    def address(self, path: str = "/") -> str:
        """The address to open in a browser, with the secret."""
        return f"http://127.0.0.1:{self.port}{path}?{TOKEN}={self.token}"

    def refuses(self, request: web.Request) -> str:
        """Returns the reason why a request is refused; '' where it is not."""
        # The Host is the name in the browser's address bar. A hostile site may let its own name point to 127.0.0.1, but
        # then the browser sends that name.
        hosts, origins = request.headers.getall("Host", []), request.headers.getall("Origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return "this server answers to 127.0.0.1 and localhost alone"
        # A browser adds the Origin of the page that asks, and no script can change it.
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "a page of another place may not ask here"
        # Browsers send no Origin with a GET to the same origin. With every other method they send it.
        if request.method != "GET" and not origins:
            return "a request that changes something must come from this server's own page"
        if not self._knows(request.cookies.get(self.cookie, "")):
            return "open the address that `posttrain lab` printed: it has the secret of this server"
        return ""

    def _knows(self, given: str) -> bool:
        """Returns whether this is the secret, compared in constant time."""
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Exchange the secret of a first address for a cookie; refuse what `refuses` names."""
        given = request.query.get(TOKEN)
        hosts = request.headers.getall("Host", [])
        # The secret is removed from the address at once, because an address stays in the history and may be copied.
        # With SameSite=Strict the browser does not send the cookie with requests that other sites cause.
        if given is not None and len(hosts) == 1 and hosts[0].lower() in self.hosts and self._knows(given):
            redirect = web.Response(status=303, headers={"Location": request.path})
            redirect.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict", path="/")
            return redirect
        if why := self.refuses(request):
            return web.Response(status=403, text=f"{why}\n")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n")

    async def limit(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Set the headers that limit a page; for `on_response_prepare`. A stream has sent its headers before the
        middleware sees it."""
        answer.headers.update(HEADERS)
