"""The server of the lab: the map at once, pages as soon as the library is loaded, readouts on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from posttrain.lab.catalog import MAP, entries, find, load
from posttrain.lab.cut_work import Trainings
from posttrain.lab.overview import map_page
from posttrain.lab.page import lesson_page, waiting_page
from posttrain.system.errors import ConfigError, PosttrainError
from posttrain.system.terminal_output import tell
from posttrain.web.guard import Guard
from posttrain.web.local import bound_socket, serve_locally, static_files

BODY = 10_000
"""Bytes of a request at most."""
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass
class Lab:
    """The pages, and what was computed for them: both are kept until the server ends."""

    guard: Guard = field(default_factory=Guard)
    trainings: Trainings = field(default_factory=Trainings)
    firsts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The readout of each lesson's default position that was asked for."""
    claimed: dict[str, list[list[Any]]] = field(default_factory=dict[str, list[list[Any]]])
    """`claim_rows` of each lesson whose claims were asked for."""
    loaded: threading.Event = field(default_factory=threading.Event)
    """Set once the library is loaded or could not be (`failed`)."""
    failed: str = ""
    """Reason why the library could not be loaded."""
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One computation at a time: torch's state is one for all threads."""

    def __post_init__(self) -> None:
        self.files = static_files("posttrain.web", "posttrain.lab")

    def load(self) -> None:
        """Import the library and every lesson. It runs in a thread, while somebody reads the map."""
        try:
            import torch

            torch.set_num_threads(1)
            for entry in entries():
                load(entry.name)
            # Pages that do not train need not wait until the process of those that do has imported the library too.
            self.loaded.set()
            self.trainings.warm()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.loaded.set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard.middleware], client_max_size=BODY)
        app.on_response_prepare.append(self.guard.limit)
        app.router.add_get("/", self._map)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/static/{name}", self._file)
        app.router.add_get("/claims/{name}", self._claims)
        app.router.add_post("/readout/{name}", self._readout)
        app.router.add_post("/train/{name}", self._train)
        app.router.add_get("/{name}", self._page)
        app.on_shutdown.append(self._end)
        return app

    async def _end(self, app: web.Application) -> None:
        self.trainings.end()

    async def _map(self, request: web.Request) -> web.Response:
        return web.Response(text=map_page("server"), content_type="text/html")

    async def _ready(self, request: web.Request) -> web.Response:
        if self.failed:
            return web.Response(status=500, text=f"the library could not be loaded: {self.failed}")
        return web.json_response(self.loaded.is_set())

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self.files.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=KINDS[path.suffix])

    async def _page(self, request: web.Request) -> web.Response:
        entry = _known(request)
        if not self.loaded.is_set():
            return web.Response(text=waiting_page(entry), content_type="text/html")
        lesson = load(entry.name)
        if entry.name not in self.firsts and lesson.pace != "train":
            self.firsts[entry.name] = (await self._compute(lesson.last, lesson.read({}))).as_json()
        page = lesson_page(lesson, "server", self.firsts.get(entry.name))
        return web.Response(text=page, content_type="text/html")

    async def _readout(self, request: web.Request) -> web.Response:
        lesson = self._lesson(request)
        if lesson.pace == "train":
            return web.Response(status=400, text=f"page {lesson.number} trains: ask /train/{lesson.name}")
        try:
            values = lesson.read(await _values(request))
            readout = await self._compute(lesson.last, values)
        except PosttrainError as error:
            return web.Response(status=400, text=str(error))
        return web.json_response(readout.as_json())

    async def _train(self, request: web.Request) -> web.StreamResponse:
        lesson = self._lesson(request)
        try:
            values = lesson.read(await _values(request))
        except PosttrainError as error:
            return web.Response(status=400, text=str(error))
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await answer.prepare(request)
        async for line in self.trainings.lines(lesson.name, values):
            await answer.write(line)
        await answer.write_eof()
        return answer

    async def _claims(self, request: web.Request) -> web.Response:
        lesson = self._lesson(request)
        if lesson.name not in self.claimed:
            self.claimed[lesson.name] = await self._compute(claim_rows, lesson)
        return web.json_response(self.claimed[lesson.name])

    def _lesson(self, request: web.Request) -> Any:
        """The lesson that the address names; 404 where there is none, 503 while the library is being loaded."""
        entry = _known(request)
        if not self.loaded.is_set():
            raise web.HTTPServiceUnavailable(reason="the library is being loaded")
        return load(entry.name)

    async def _compute(self, call: Callable[..., Any], *args: Any) -> Any:
        """Returns what the call returns, from a thread, so that the server answers meanwhile."""
        async with self._one:
            return await asyncio.to_thread(call, *args)


def _known(request: web.Request) -> Any:
    """The entry that the address names; 404 where there is none."""
    try:
        return find(request.match_info["name"])
    except ConfigError as error:
        raise web.HTTPNotFound(reason=str(error).splitlines()[0]) from None


async def _values(request: web.Request) -> dict[str, Any]:
    """The knobs that a request gives. Raises ConfigError where it is no JSON object."""
    try:
        given = json.loads(await request.text())
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError("the knobs must be a JSON object")
    return given


def claim_rows(lesson: Any) -> list[list[Any]]:
    """(claim, source, claimed, ours, holds, why not) of each claim of a lesson."""
    rows: list[list[Any]] = []
    for c in lesson.claims:
        ours = float(c.ours())
        holds = bool(c.holds(ours))
        rows.append([c.text, c.source, float(c.claimed), float(f"{ours:.6g}"), holds, "" if holds else c.why])
    return rows


def serve_lab(page: str | None, port: int, open_browser: bool, say: Callable[[str], None] = tell) -> int:
    """Serve the lab until Ctrl-C; returns the exit code.

    Args:
        page: number or name of the page to open; None: the map.
        port: 0 takes any free one.
    """
    path = "/" if page is None or page.lower() in MAP else f"/{find(page).name}"
    lab, at = Lab(), bound_socket(port)
    threading.Thread(target=lab.load, daemon=True, name="lab-load").start()
    try:
        return asyncio.run(serve_locally(lab.app(), lab.guard, at, path, open_browser, say))
    finally:
        lab.trainings.end()
