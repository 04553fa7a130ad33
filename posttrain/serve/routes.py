"""The routes: health, models, completions, chat completions. Every answer and every refusal has OpenAI's format.

A handler reads one request and sends tokens as the engine returns them. A client that disconnects cancels its handler,
which cancels the engine's work and frees its slots.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.serve.caller_limits import LOG, CallerLimits
from posttrain.serve.connections import Connection, Phase
from posttrain.serve.intake import Intake, ServedModel
from posttrain.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from posttrain.serve.refusal import Refusal, answer, refusal_of
from posttrain.serve.response_format import DRAWS, ResponseFormat
from posttrain.serve.served_answers import Choice, Shape, TextChunk
from posttrain.system.errors import DataError, PosttrainError
from posttrain.system.hostile_callers import loopback

Told = tuple[Choice, TextChunk | None]
"""(choice, its next text), or None for the text where the choice has ended."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """The web application over one engine."""

    served: ServedModel
    limits: CallerLimits = CallerLimits()
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Tasks of the requests that are being answered."""
    answers: int = 0
    """Number of answers waiting or being written."""
    hang_up: Callable[[], None] = field(default=lambda: None)
    """Close connections that stay open after their answers; set by the listener."""

    def __post_init__(self) -> None:
        self._intake = Intake(self.served, self.limits)

    def close(self) -> None:
        """Stop reading requests."""
        self._intake.close()

    def app(self) -> web.Application:
        # `_refusals_as_json` is the outer middleware, so it also writes the refusals of `_allowed`.
        app = web.Application(middlewares=[_refusals_as_json, self._allowed], client_max_size=self.limits.body)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", partial(self._generate, CompletionRequest, "cmpl"))
        app.router.add_post("/v1/chat/completions", partial(self._generate, ChatRequest, "chatcmpl"))
        return app

    def cut(self) -> None:
        """Cancel all requests that are being answered."""
        for task in self.running:
            task.cancel()
        self.hang_up()

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse callers without the token. Without a token, refuse requests to another host name (DNS rebinding)."""
        # Load balancers ask for /health without a token. The answer does not describe the model or the load.
        if request.path == "/health":
            return await handler(request)
        token = self.served.token
        if token is None:
            # The header is read itself, because `request.host` looks up a name if there is no Host header.
            hosts = request.headers.getall("Host", [])
            if len(hosts) != 1 or not _local(hosts[0]):
                raise Refusal(
                    f"no token is asked for here, so only this machine is served, not {', '.join(hosts)!r}", status=403
                )
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # The token is compared in constant time, and as bytes, because a header may have bytes that are no text.
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"), token.encode()
        ):
            which = "no" if not given else "a wrong"
            raise Refusal(
                f"{which} token: send the header 'Authorization: Bearer TOKEN' (api_key=TOKEN in OpenAI's clients)",
                status=401,
            )
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._intake.known(request.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        s = self.served
        card = {"id": s.name, "object": "model", "created": s.created, "owned_by": "posttrain"}
        return card | {"root": s.root, "max_model_len": s.sampler.context}

    async def _generate(self, kind: type[GenerationRequest], prefix: str, request: web.Request) -> web.StreamResponse:
        self._intake.check(request)
        fields, prompts = await self._intake.read(request, kind)
        waits_for(request, "answer")
        return await self._answer(request, fields, prompts, prefix)

    def _contract(self, asked: GenerationRequest, length: int) -> Sampling:
        """The contract of one answer to a prompt of `length` tokens."""
        try:
            return asked.sampling(self.served.renderer.stop_ids, self.served.sampler.context - length)
        except PosttrainError as error:
            raise refusal_of(error) from None

    def _format(self, asked: GenerationRequest) -> str | None:
        """The format in which the answers may call tools; None where none are offered."""
        tools = isinstance(asked, ChatRequest) and asked.offered
        return self.served.renderer.template.format if tools else None

    async def _answer(
        self, request: web.Request, asked: GenerationRequest, prompts: Sequence[np.ndarray], kind: str
    ) -> web.StreamResponse:
        """Generates all answers to a request, and writes them whole or as a stream."""
        s, count = self.served, asked.n * len(prompts)
        # The limit is on answers and not on requests, because one request may ask for a thousand answers.
        if self.answers + count > self.limits.answers:
            raise Refusal(
                f"{self.answers} answers wait or are being written, and {count} more are too many; try again later",
                status=429,
            )
        # None in the queue ends a stream (`_stream`).
        queue: asyncio.Queue[Told | None] = asyncio.Queue()
        # The random numbers of an answer come from the seed and its place among the n, whatever other requests run.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        choices: list[Choice] = []
        for ids in prompts:
            sampling = self._contract(asked, len(ids))
            for i in range(asked.n):
                choice = Choice(len(choices), ids, sampling, seeds.key(seed, "serve", i), s.words)
                if asked.stream:
                    choice.told = lambda piece, c=choice: queue.put_nowait((c, piece))
                choices.append(choice)
        shape = Shape(asked, s.words, f"{kind}-{secrets.token_hex(12)}", s.name, s.fingerprint, self._format(asked))
        work = asyncio.create_task(self._run_all(choices, queue, asked.response_format))
        self.running.add(work)
        self.answers += count
        try:
            if asked.stream:
                return await self._stream(request, shape, choices, queue, work)
            await _done(work)
            scores = None
            if isinstance(asked, CompletionRequest) and asked.prompt_logprobs is not None:
                # The n answers to a prompt share one array of ids, so the identity of the array stands for the prompt.
                scores = {id(ids): await s.sampler.score(ids) for ids in prompts}
            return web.json_response(shape.whole(choices, scores))
        finally:
            # `work` is a task of its own, which would go on in the engine where this handler is cancelled or fails.
            work.cancel()
            self.running.discard(work)
            self.answers -= count

    async def _run_all(self, choices: list[Choice], queue: asyncio.Queue[Told | None], form: ResponseFormat) -> None:
        """Run all choices at once, each until it has the form. The first failure cancels the others and is raised."""

        async def run_one(at: int) -> None:
            # A greedy answer is drawn once, because it is the same every time.
            draws = 1 if choices[at].sampling.greedy else DRAWS
            for draw in range(draws):
                choices[at] = choices[at].drawn_again(draw) if draw else choices[at]
                await choices[at].run(self.served.sampler.generate)
                if form.fits(choices[at].whole.text):
                    return queue.put_nowait((choices[at], None))
            raise DataError(
                f"{draws} {'answer has' if draws == 1 else 'answers have'} not the response_format that was asked for:"
                " say in the messages what the answer looks like, give it more tokens, or use a temperature above 0"
            )

        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(choices)):
                    group.create_task(run_one(at))
        except* PosttrainError as many:
            cause: Any = many
            # Groups may be nested. The caller gets the first cause.
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise refusal_of(cause) from None

    async def _stream(
        self,
        request: web.Request,
        shape: Shape,
        choices: Sequence[Choice],
        queue: asyncio.Queue[Told | None],
        work: asyncio.Task[None],
    ) -> web.StreamResponse:
        """Writes the pieces of the answers as events while they are generated."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)

        async def send(event: str) -> None:
            await response.write(f"data: {event}\n\n".encode())

        for choice in choices:
            await send(json.dumps(shape.first(choice)))
        # Every piece is in the queue before the task is done, also where it failed. So None comes last.
        work.add_done_callback(lambda _: queue.put_nowait(None))
        while (entry := await queue.get()) is not None:
            choice, piece = entry
            for chunk in shape.next(choice, piece or TextChunk(), choice.finish if piece is None else None):
                await send(json.dumps(chunk))
        try:
            await _done(work)
        except Refusal as refusal:
            await send(json.dumps(refusal.body()))
        else:
            # Headers with status 200 are already sent, so a failure is an event (above). [DONE] follows whole answers.
            if (options := shape.request.stream_options) and options.include_usage:
                await send(json.dumps(shape.last(choices)))
            await send("[DONE]")
        await response.write_eof()
        return response


async def _done(work: asyncio.Task[None]) -> None:
    """Wait for the answers of a request. Refusal where `cut` ends them."""
    try:
        await work
    except asyncio.CancelledError:
        # If this handler was cancelled, the caller has gone. Else `cut` has cancelled `work`, and the caller is told.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise Refusal("the server is stopping", status=503) from None


@web.middleware
async def _refusals_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: answer every refusal as JSON, aiohttp's own included."""
    waits_for(request, "body")
    try:
        return await handler(request)
    except Refusal as refusal:
        return answer(refusal)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        if error.status == 404:
            text += "; served are GET /health, /v1/models, POST /v1/completions, /v1/chat/completions"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return answer(Refusal(text, status=error.status), allow)
    except ConnectionError:  # the caller disconnected
        raise
    except Exception:
        LOG.exception("%s %r", request.method, request.path)
        return answer(Refusal("a bug in the server, whose log has the traceback", status=500))


def waits_for(request: web.Request, phase: Phase) -> None:
    """Set what a request's connection is waiting for."""
    if isinstance(connection := request.protocol, Connection):
        connection.now(phase)


def _local(host: str) -> bool:
    """True where a Host header names this machine. This guards against web pages whose own name resolves to it (DNS
    rebinding)."""
    # "name:port" and "[v6]:port" lose their port; a bare IPv6 address has several colons and no port.
    name = host.rpartition(":")[0] if host.count(":") == 1 or host.rpartition(":")[0].endswith("]") else host
    return loopback(name.strip("[]").lower())
